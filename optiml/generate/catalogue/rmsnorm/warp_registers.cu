/* optiml
[[launch]]
kernel = "rmsnorm"
grid = ["ceil_div(R, ROWS)"]
block = ["32 * ROWS"]
args = ["x", "weight", "y", "R", "C"]
[params]
ROWS = 4
VECTOR = 4
ITEMS = 16
[tunables]
ROWS = [1, 2, 4, 8]
VECTOR = [1, 2, 4, 8]
ITEMS = [8, 16, 32]
[strategy]
title = "one warp per row, the row kept in registers"
rationale = """
For rows of up to 32 * ITEMS columns a warp holds the whole row: one read, no shared memory and no barrier, and \
several rows in flight per block. Longer rows stay right but read their rest again."""
moves = [
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "lts__t_sectors_op_read.sum",
    "smsp__inst_executed.sum",
]
dtypes = ["float32", "float16", "bfloat16", "float64"]
requires = []
*/
//@ types

__device__ __forceinline__ A warp_sum(A v)
{
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) v += __shfl_xor_sync(0xffffffff, v, distance);
    return v;
}

template <int N>
__device__ __forceinline__ void normalise_row(const T* in, const T* weight, T* out, int C)
{
    const int lane = threadIdx.x % 32;
    const int KEPT = ITEMS / N;  // wide loads per lane that stay in registers
    const Pack<N>* source = reinterpret_cast<const Pack<N>*>(in);
    const Pack<N>* weights = reinterpret_cast<const Pack<N>*>(weight);
    Pack<N>* target = reinterpret_cast<Pack<N>*>(out);
    const int packs = C / N;  // C is a multiple of N
    A kept[KEPT][N];

    A squares = 0;
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        const int p = k * 32 + lane;
        if (p < packs) {
            const Pack<N> pack = source[p];
#pragma unroll
            for (int j = 0; j < N; ++j) {
                kept[k][j] = up(pack.v[j]);
                squares = fma(kept[k][j], kept[k][j], squares);
            }
        }
    }
    for (int p = KEPT * 32 + lane; p < packs; p += 32) {
        const Pack<N> pack = source[p];
#pragma unroll
        for (int j = 0; j < N; ++j) squares = fma(up(pack.v[j]), up(pack.v[j]), squares);
    }
    const A scale = rsqrt(warp_sum(squares) / C + A(1e-6));

#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        const int p = k * 32 + lane;
        if (p < packs) {
            const Pack<N> w = weights[p];
            Pack<N> pack;
#pragma unroll
            for (int j = 0; j < N; ++j) pack.v[j] = down(kept[k][j] * scale * up(w.v[j]));
            target[p] = pack;
        }
    }
    for (int p = KEPT * 32 + lane; p < packs; p += 32) {
        Pack<N> pack = source[p];
        const Pack<N> w = weights[p];
#pragma unroll
        for (int j = 0; j < N; ++j) pack.v[j] = down(up(pack.v[j]) * scale * up(w.v[j]));
        target[p] = pack;
    }
}

extern "C" __global__ void __launch_bounds__(32 * ROWS) rmsnorm(
    const T* __restrict__ x, const T* __restrict__ weight, T* __restrict__ y, int R, int C)
{
    static_assert(ITEMS % VECTOR == 0, "whole wide loads");
    const int row = blockIdx.x * ROWS + threadIdx.x / 32;
    if (row >= R) return;  // a whole warp at a time
    const T* in = x + static_cast<long long>(row) * C;
    T* out = y + static_cast<long long>(row) * C;
    const size_t addresses =
        reinterpret_cast<size_t>(x) | reinterpret_cast<size_t>(weight) | reinterpret_cast<size_t>(y);
    if (C % VECTOR == 0 && addresses % sizeof(Pack<VECTOR>) == 0) {
        normalise_row<VECTOR>(in, weight, out, C);  // then every row starts on a vector boundary
    } else {
        normalise_row<1>(in, weight, out, C);
    }
}
