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
shared_bytes = "4*min(bins, CHUNK)"
args = ["x", "h", "n", "bins"]
[params]
BLOCK = 256
BLOCKS = 512
CHUNK = 8192
[tunables]
BLOCK = [256, 512, 1024]
BLOCKS = [128, 256, 512, 1024]
[strategy]
title = "lanes with the same value count as one"
rationale = "The lanes of a warp find those that hold the same value, and one of them adds the number of all: no two lanes of a warp ever wait for one counter, however skewed the data."
moves = ["l1tex__data_pipe_lsu_wavefronts_mem_shared_op_atom.sum", "smsp__inst_executed_op_shared_atom.sum", "lts__t_sectors_op_red.sum"]
dtypes = ["int32"]
requires = []
*/

extern "C" __global__ void clear(int* __restrict__ h, int bins) {
    int bin = blockIdx.x * blockDim.x + threadIdx.x;
    if (bin < bins) h[bin] = 0;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
count(const int* __restrict__ x, int* __restrict__ h, long long n, int bins) {
    extern __shared__ int counts[];
    int first_bin = blockIdx.y * CHUNK;
    int width = min(CHUNK, bins - first_bin);
    int lane = threadIdx.x % 32;
    for (int bin = threadIdx.x; bin < width; bin += BLOCK) counts[bin] = 0;
    __syncthreads();
    long long step = (long long)gridDim.x * BLOCK;
    // Whole blocks go round together, so that all 32 lanes take part in the match.
    for (long long first = (long long)blockIdx.x * BLOCK; first < n; first += step) {
        long long i = first + threadIdx.x;
        int value = i < n ? x[i] : -1;  // not a bin
        unsigned bin = unsigned(value) - unsigned(first_bin);
        unsigned equals = __match_any_sync(0xffffffffu, value);
        bool leader = __ffs(equals) - 1 == lane;
        if (leader && value >= 0 && bin < unsigned(width)) atomicAdd(&counts[bin], __popc(equals));
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < width; bin += BLOCK) {
        int count = counts[bin];
        if (count != 0) atomicAdd(&h[first_bin + bin], count);
    }
}
