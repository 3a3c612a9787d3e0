/* optiml
[[launch]]
kernel = "prefix_sum"
grid = [1]
block = ["BLOCK"]
args = ["x", "y", "n"]
[params]
BLOCK = 256
[tunables]
BLOCK = [128, 256, 512, 1024]
*/
//@ types

// One block: each thread adds up one share of the array, then walks over it again from the sum of the shares before.
extern "C" __global__ void prefix_sum(const T* x, T* y, long long n) {
    __shared__ A totals[BLOCK];
    long long share = (n + BLOCK - 1) / BLOCK;
    long long begin = threadIdx.x * share;
    long long end = begin + share < n ? begin + share : n;
    A sum = 0;
    for (long long i = begin; i < end; ++i) sum += up(x[i]);
    totals[threadIdx.x] = sum;
    __syncthreads();
    sum = 0;
    for (int t = 0; t < threadIdx.x; ++t) sum += totals[t];
    for (long long i = begin; i < end; ++i) {
        sum += up(x[i]);
        y[i] = down(sum);
    }
}
