/* optiml
[[launch]]
kernel = "relu"
grid = ["min(ceil_div(n, BLOCK * VECTOR), BLOCKS)"]
block = ["BLOCK"]
args = ["x", "y", "n"]
[params]
BLOCK = 256
VECTOR = 4
UNROLL = 4
BLOCKS = 864
[tunables]
BLOCK = [128, 256, 512]
VECTOR = [2, 4, 8]
UNROLL = [1, 2, 4]
BLOCKS = [432, 864, 1728]
[strategy]
title = "resident blocks stride over the array, several wide loads in flight"
rationale = """
Each thread starts UNROLL independent loads before it needs the first, which hides memory latency, and \
blocks that stay pay their start-up and index arithmetic once instead of once per chunk."""
moves = [
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "smsp__inst_executed.sum",
]
dtypes = ["float32", "float16", "bfloat16", "float64", "int32"]
requires = []
*/
//@ types

// Written so that a NaN stays one.
__device__ __forceinline__ A rectified(A v) { return v < A(0) ? A(0) : v; }

extern "C" __global__ void __launch_bounds__(BLOCK) relu(
    const T* __restrict__ x, T* __restrict__ y, int n)
{
    const int thread = blockIdx.x * BLOCK + threadIdx.x;
    const int stride = gridDim.x * BLOCK;
    int done = 0;  // elements that the wide part covers
    const size_t addresses = reinterpret_cast<size_t>(x) | reinterpret_cast<size_t>(y);
    if (addresses % sizeof(Pack<VECTOR>) == 0) {
        const Pack<VECTOR>* x_packs = reinterpret_cast<const Pack<VECTOR>*>(x);
        Pack<VECTOR>* y_packs = reinterpret_cast<Pack<VECTOR>*>(y);
        const int packs = n / VECTOR;
        int p = thread;
        for (; p < packs - (UNROLL - 1) * stride; p += UNROLL * stride) {
            Pack<VECTOR> x_pack[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                x_pack[u] = x_packs[p + u * stride];
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                Pack<VECTOR> result;
#pragma unroll
                for (int j = 0; j < VECTOR; ++j) result.v[j] = down(rectified(up(x_pack[u].v[j])));
                y_packs[p + u * stride] = result;
            }
        }
        for (; p < packs; p += stride) {
            Pack<VECTOR> result;
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) result.v[j] = down(rectified(up(x_packs[p].v[j])));
            y_packs[p] = result;
        }
        done = packs * VECTOR;
    }
    for (int i = done + thread; i < n; i += stride) y[i] = down(rectified(up(x[i])));
}
