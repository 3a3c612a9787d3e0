/* optiml
[[launch]]
kernel = "vector_add"
grid = ["ceil_div(n, BLOCK * VECTOR)"]
block = ["BLOCK"]
args = ["a", "b", "c", "n"]
[params]
BLOCK = 256
VECTOR = 4
[tunables]
BLOCK = [128, 256, 512]
VECTOR = [2, 4, 8]
[strategy]
title = "wide loads and stores"
rationale = """
One 16-byte access moves what four 4-byte ones do, so a warp issues a quarter of the memory instructions and \
address arithmetic for the same bytes."""
moves = [
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "smsp__inst_executed.sum",
]
dtypes = ["float32", "float16", "bfloat16", "float64", "int32"]
requires = []
*/
//@ types

extern "C" __global__ void __launch_bounds__(BLOCK) vector_add(
    const T* __restrict__ a, const T* __restrict__ b, T* __restrict__ c, int n)
{
    const size_t addresses = reinterpret_cast<size_t>(a) | reinterpret_cast<size_t>(b) | reinterpret_cast<size_t>(c);
    const int first = blockIdx.x * (BLOCK * VECTOR);
    if (addresses % sizeof(Pack<VECTOR>) == 0 && n - first >= BLOCK * VECTOR) {
        const int at = first + threadIdx.x * VECTOR;
        const Pack<VECTOR> a_pack = *reinterpret_cast<const Pack<VECTOR>*>(a + at);
        const Pack<VECTOR> b_pack = *reinterpret_cast<const Pack<VECTOR>*>(b + at);
        Pack<VECTOR> result;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) result.v[j] = down(up(a_pack.v[j]) + up(b_pack.v[j]));
        *reinterpret_cast<Pack<VECTOR>*>(c + at) = result;
        return;
    }
    // The last block, or arrays that start off a vector boundary: neighbours still take neighbouring elements.
    const int last = min(n, first + BLOCK * VECTOR);
    for (int i = first + threadIdx.x; i < last; i += BLOCK) c[i] = down(up(a[i]) + up(b[i]));
}
