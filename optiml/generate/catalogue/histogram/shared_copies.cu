/* optiml
[[launch]]
kernel = "clear"
grid = ["ceil_div(bins, 256)"]
block = [256]
args = ["h", "bins"]
[[launch]]
kernel = "count"
grid = ["min(BLOCKS, ceil_div(n, BLOCK))", "ceil_div(bins, CHUNK)"]
block = ["BLOCK"]
shared_bytes = "4*COPIES*min(bins, CHUNK)"
args = ["x", "h", "n", "bins"]
[params]
BLOCK = 256
BLOCKS = 512
COPIES = 8
CHUNK = 512
[tunables]
BLOCK = [256, 512]
BLOCKS = [128, 256, 512, 1024]
COPIES = [2, 4, 8, 16]
[strategy]
title = "several shared histograms per block, one for each group of lanes"
rationale = "Lanes that meet in one bin take turns; with COPIES histograms side by side only every COPIES-th lane can meet, and copies of one bin lie in different banks, which is what skewed data needs."
moves = ["l1tex__data_pipe_lsu_wavefronts_mem_shared_op_atom.sum", "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_atom.sum", "lts__t_sectors_op_red.sum"]
dtypes = ["int32"]
requires = []
*/

extern "C" __global__ void clear(int* __restrict__ h, int bins) {
    int bin = blockIdx.x * blockDim.x + threadIdx.x;
    if (bin < bins) h[bin] = 0;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
count(const int* __restrict__ x, int* __restrict__ h, long long n, int bins) {
    extern __shared__ int counts[];  // [width][COPIES]
    int first_bin = blockIdx.y * CHUNK;
    int width = min(CHUNK, bins - first_bin);
    int copy = threadIdx.x % COPIES;
    for (int i = threadIdx.x; i < width * COPIES; i += BLOCK) counts[i] = 0;
    __syncthreads();
    for (long long i = (long long)blockIdx.x * BLOCK + threadIdx.x; i < n; i += (long long)gridDim.x * BLOCK) {
        // Unsigned: bins below the chunk, negative values among them, wrap round and fail the same test.
        unsigned bin = unsigned(x[i]) - unsigned(first_bin);
        if (bin < unsigned(width)) atomicAdd(&counts[bin * COPIES + copy], 1);
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < width; bin += BLOCK) {
        int count = 0;
#pragma unroll
        for (int c = 0; c < COPIES; ++c) count += counts[bin * COPIES + (c + threadIdx.x) % COPIES];
        if (count != 0) atomicAdd(&h[first_bin + bin], count);
    }
}
