/* optiml
[[launch]]
kernel = "matrix_copy"
grid = ["ceil_div(R * C, BLOCK * VECTOR)"]
block = ["BLOCK"]
args = ["x", "y", "R * C"]
[params]
BLOCK = 256
VECTOR = 4
[tunables]
BLOCK = [128, 256, 512]
VECTOR = [2, 4, 8]
[strategy]
title = "one flat array, wide loads and stores"
rationale = """
Row-major in and out, so the matrix is one array: no row and column arithmetic, no part-filled blocks at the end of \
each row, and one 16-byte access moves what four 4-byte ones do."""
moves = [
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "smsp__inst_executed.sum",
]
dtypes = ["float32", "float16", "bfloat16", "float64", "int32"]
requires = []
*/
//@ types

extern "C" __global__ void __launch_bounds__(BLOCK) matrix_copy(
    const T* __restrict__ x, T* __restrict__ y, long long count)
{
    const size_t addresses = reinterpret_cast<size_t>(x) | reinterpret_cast<size_t>(y);
    const long long first = static_cast<long long>(blockIdx.x) * (BLOCK * VECTOR);
    if (addresses % sizeof(Pack<VECTOR>) == 0 && count - first >= BLOCK * VECTOR) {
        const long long at = first + threadIdx.x * VECTOR;
        *reinterpret_cast<Pack<VECTOR>*>(y + at) = *reinterpret_cast<const Pack<VECTOR>*>(x + at);
        return;
    }
    // The last block, or arrays that start off a vector boundary: neighbours still take neighbouring elements.
    const long long last = min(count, first + BLOCK * VECTOR);
    for (long long i = first + threadIdx.x; i < last; i += BLOCK) y[i] = x[i];
}
