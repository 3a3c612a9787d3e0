/* optiml
[[launch]]
kernel = "transpose"
grid = ["ceil_div(C, TILE)", "ceil_div(R, TILE)"]
block = ["TILE", "LANES"]
args = ["x", "y", "R", "C"]
[params]
TILE = 32
LANES = 4
[tunables]
TILE = [32, 64]
LANES = [4, 8, 16]
[strategy]
title = "tile in shared memory, several rows per thread"
rationale = "A thread moves TILE / LANES elements, so its index arithmetic is shared among them and several independent loads are in flight at once; the block is smaller, so more tiles overlap on a multiprocessor."
moves = ["smsp__inst_executed.sum", "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum", "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"]
dtypes = ["float32", "float16", "bfloat16", "float64", "int32"]
requires = []
*/
//@ types

extern "C" __global__ void __launch_bounds__(TILE * LANES)
transpose(const T* __restrict__ x, T* __restrict__ y, int R, int C) {
    __shared__ T tile[TILE][TILE + 1];
    int first_row = blockIdx.y * TILE, first_column = blockIdx.x * TILE;
    int lane = threadIdx.x;
    if (first_column + lane < C) {
        const T* from = x + (long long)first_row * C + first_column + lane;
#pragma unroll
        for (int i = threadIdx.y; i < TILE; i += LANES) {
            if (first_row + i < R) tile[i][lane] = from[(long long)i * C];
        }
    }
    __syncthreads();
    if (first_row + lane < R) {
        T* to = y + (long long)first_column * R + first_row + lane;
#pragma unroll
        for (int i = threadIdx.y; i < TILE; i += LANES) {
            if (first_column + i < C) to[(long long)i * R] = tile[lane][i];
        }
    }
}
