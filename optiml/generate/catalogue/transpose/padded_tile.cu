/* optiml
[[launch]]
kernel = "transpose"
grid = ["ceil_div(C, TILE)", "ceil_div(R, TILE)"]
block = ["TILE", "TILE"]
args = ["x", "y", "R", "C"]
[params]
TILE = 32
[tunables]
TILE = [16, 32]
[strategy]
title = "tile in shared memory, one element per thread"
rationale = "The turn happens in shared memory, so a warp both reads and writes whole rows: a store touches 4 sectors of float32 instead of 32. One column of padding keeps the column reads free of bank conflicts."
moves = ["l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum"]
dtypes = ["float32", "float16", "bfloat16", "float64", "int32"]
requires = []
*/
//@ types

extern "C" __global__ void __launch_bounds__(TILE * TILE)
transpose(const T* __restrict__ x, T* __restrict__ y, int R, int C) {
    __shared__ T tile[TILE][TILE + 1];
    int row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
    if (row < R && column < C) tile[threadIdx.y][threadIdx.x] = x[(long long)row * C + column];
    __syncthreads();
    row = blockIdx.y * TILE + threadIdx.x;
    column = blockIdx.x * TILE + threadIdx.y;
    if (row < R && column < C) y[(long long)column * R + row] = tile[threadIdx.x][threadIdx.y];
}
