/* optiml
[[launch]]
kernel = "matrix_copy"
grid = ["ceil_div(R * C, BLOCK * VECTOR * UNROLL)"]
block = ["BLOCK"]
args = ["x", "y", "R * C"]
[params]
BLOCK = 256
VECTOR = 4
UNROLL = 4
[tunables]
BLOCK = [128, 256, 512]
VECTOR = [2, 4, 8]
UNROLL = [2, 4, 8]
[strategy]
title = "one flat array, several wide loads in flight per thread"
rationale = """
A thread starts all its loads before the first store, so fewer threads keep the memory busy, and index arithmetic \
and block start-up are shared by UNROLL accesses."""
moves = [
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "smsp__inst_executed.sum",
]
dtypes = ["float32", "float16", "bfloat16", "float64", "int32"]
requires = []
*/
//@ types

extern "C" __global__ void __launch_bounds__(BLOCK) matrix_copy(
    const T* __restrict__ x, T* __restrict__ y, long long count)
{
    const int CHUNK = BLOCK * VECTOR * UNROLL;  // elements of one block
    const size_t addresses = reinterpret_cast<size_t>(x) | reinterpret_cast<size_t>(y);
    const long long first = static_cast<long long>(blockIdx.x) * CHUNK;
    if (addresses % sizeof(Pack<VECTOR>) == 0 && count - first >= CHUNK) {
        const Pack<VECTOR>* source = reinterpret_cast<const Pack<VECTOR>*>(x + first) + threadIdx.x;
        Pack<VECTOR>* target = reinterpret_cast<Pack<VECTOR>*>(y + first) + threadIdx.x;
        Pack<VECTOR> kept[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) kept[u] = source[u * BLOCK];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) target[u * BLOCK] = kept[u];
        return;
    }
    // The last block, or arrays that start off a vector boundary: neighbours still take neighbouring elements.
    const long long last = min(count, first + CHUNK);
    for (long long i = first + threadIdx.x; i < last; i += BLOCK) y[i] = x[i];
}
