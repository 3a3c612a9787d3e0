/* optiml
[[launch]]
kernel = "rmsnorm"
grid = ["R"]
block = ["BLOCK"]
args = ["x", "weight", "y", "C"]
[params]
BLOCK = 256
VECTOR = 4
ITEMS = 16
[tunables]
BLOCK = [128, 256, 512, 1024]
VECTOR = [1, 2, 4, 8]
ITEMS = [8, 16, 32]
[strategy]
title = "one block per row, the row kept in registers"
rationale = """
Each thread keeps up to ITEMS elements of its row in registers, so a row of at most BLOCK * ITEMS columns is read \
from memory once instead of twice; only what lies beyond is read again."""
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

// Every thread of the block gets the sum; `of_warp` holds one slot per warp and serves one call only.
__device__ __forceinline__ A block_sum(A v, A* of_warp)
{
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
    __syncthreads();
    return warp_sum(threadIdx.x % 32 < BLOCK / 32 ? of_warp[threadIdx.x % 32] : A(0));
}

template <int N>
__device__ __forceinline__ void normalise_row(const T* in, const T* weight, T* out, int C)
{
    __shared__ A squares_of_warp[BLOCK / 32];
    const int KEPT = ITEMS / N;  // wide loads per thread that stay in registers
    const Pack<N>* source = reinterpret_cast<const Pack<N>*>(in);
    const Pack<N>* weights = reinterpret_cast<const Pack<N>*>(weight);
    Pack<N>* target = reinterpret_cast<Pack<N>*>(out);
    const int packs = C / N;  // C is a multiple of N
    A kept[KEPT][N];

    A squares = 0;
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        const int p = k * BLOCK + threadIdx.x;
        if (p < packs) {
            const Pack<N> pack = source[p];
#pragma unroll
            for (int j = 0; j < N; ++j) {
                kept[k][j] = up(pack.v[j]);
                squares = fma(kept[k][j], kept[k][j], squares);
            }
        }
    }
    for (int p = KEPT * BLOCK + threadIdx.x; p < packs; p += BLOCK) {
        const Pack<N> pack = source[p];
#pragma unroll
        for (int j = 0; j < N; ++j) squares = fma(up(pack.v[j]), up(pack.v[j]), squares);
    }
    const A scale = rsqrt(block_sum(squares, squares_of_warp) / C + A(1e-6));

#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        const int p = k * BLOCK + threadIdx.x;
        if (p < packs) {
            const Pack<N> w = weights[p];
            Pack<N> pack;
#pragma unroll
            for (int j = 0; j < N; ++j) pack.v[j] = down(kept[k][j] * scale * up(w.v[j]));
            target[p] = pack;
        }
    }
    for (int p = KEPT * BLOCK + threadIdx.x; p < packs; p += BLOCK) {
        Pack<N> pack = source[p];
        const Pack<N> w = weights[p];
#pragma unroll
        for (int j = 0; j < N; ++j) pack.v[j] = down(up(pack.v[j]) * scale * up(w.v[j]));
        target[p] = pack;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) rmsnorm(
    const T* __restrict__ x, const T* __restrict__ weight, T* __restrict__ y, int C)
{
    static_assert(BLOCK % 32 == 0 && BLOCK <= 1024, "whole warps, and at most 32 of them");
    static_assert(ITEMS % VECTOR == 0, "whole wide loads");
    const T* in = x + static_cast<long long>(blockIdx.x) * C;
    T* out = y + static_cast<long long>(blockIdx.x) * C;
    const size_t addresses =
        reinterpret_cast<size_t>(x) | reinterpret_cast<size_t>(weight) | reinterpret_cast<size_t>(y);
    if (C % VECTOR == 0 && addresses % sizeof(Pack<VECTOR>) == 0) {
        normalise_row<VECTOR>(in, weight, out, C);  // then every row starts on a vector boundary
    } else {
        normalise_row<1>(in, weight, out, C);
    }
}
