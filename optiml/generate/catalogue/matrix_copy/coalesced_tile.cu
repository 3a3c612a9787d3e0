/* optiml
[[launch]]
kernel = "matrix_copy"
grid = ["ceil_div(C, 32)", "min(ceil_div(R, ROWS), 65535)"]
block = [32, "ROWS"]
args = ["x", "y", "R", "C"]
[params]
ROWS = 8
[tunables]
ROWS = [4, 8, 16, 32]
[strategy]
title = "columns along the warp"
rationale = """
With the fastest thread index on the column a warp touches 32 neighbouring elements: 4 sectors per access instead \
of one per lane."""
moves = [
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
]
dtypes = ["float32", "float16", "bfloat16", "float64", "int32"]
requires = []
*/
//@ types

extern "C" __global__ void __launch_bounds__(32 * ROWS) matrix_copy(
    const T* __restrict__ x, T* __restrict__ y, int R, int C)
{
    const int column = blockIdx.x * 32 + threadIdx.x;
    if (column >= C) return;
    // A grid has at most 65535 blocks in y, so a tall matrix takes several rounds.
    for (int row = blockIdx.y * ROWS + threadIdx.y; row < R; row += gridDim.y * ROWS) {
        const long long at = static_cast<long long>(row) * C + column;
        y[at] = x[at];
    }
}
