/* optiml
[[launch]]
kernel = "prefix_sum"
grid = ["ceil_div(n, BLOCK)"]
block = ["BLOCK"]
args = ["x", "y", "n"]
[params]
BLOCK = 256
*/
//@ types

// Every block starts from zero: right up to the first BLOCK elements only.
extern "C" __global__ void prefix_sum(const T* x, T* y, long long n) {
    __shared__ A sums[BLOCK];
    long long i = (long long)blockIdx.x * BLOCK + threadIdx.x;
    sums[threadIdx.x] = i < n ? up(x[i]) : A(0);
    __syncthreads();
    for (int step = 1; step < BLOCK; step *= 2) {
        A left = threadIdx.x >= step ? sums[threadIdx.x - step] : A(0);
        __syncthreads();
        sums[threadIdx.x] += left;
        __syncthreads();
    }
    if (i < n) y[i] = down(sums[threadIdx.x]);
}
