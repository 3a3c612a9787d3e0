/* optiml
[[launch]]
kernel = "layernorm"
grid = ["R"]
block = ["BLOCK"]
args = ["x", "weight", "bias", "y", "C"]
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
Each thread keeps up to ITEMS elements of its row in registers, so mean, variance and output all come from one read \
of a row of at most BLOCK * ITEMS columns, with the exact two-pass variance; only what lies beyond is read again."""
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
__device__ __forceinline__ void normalise_row(const T* in, const T* weight, const T* bias, T* out, int C)
{
    __shared__ A sum_of_warp[BLOCK / 32];
    __shared__ A squares_of_warp[BLOCK / 32];
    const int KEPT = ITEMS / N;  // wide loads per thread that stay in registers
    const Pack<N>* source = reinterpret_cast<const Pack<N>*>(in);
    const Pack<N>* weights = reinterpret_cast<const Pack<N>*>(weight);
    const Pack<N>* biases = reinterpret_cast<const Pack<N>*>(bias);
    Pack<N>* target = reinterpret_cast<Pack<N>*>(out);
    const int packs = C / N;  // C is a multiple of N
    A kept[KEPT][N];
    const A pivot = up(in[0]);  // sums of differences from it stay small where a row sits far from zero

    A sum = 0;
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        const int p = k * BLOCK + threadIdx.x;
        if (p < packs) {
            const Pack<N> pack = source[p];
#pragma unroll
            for (int j = 0; j < N; ++j) {
                kept[k][j] = up(pack.v[j]) - pivot;
                sum += kept[k][j];
            }
        }
    }
    for (int p = KEPT * BLOCK + threadIdx.x; p < packs; p += BLOCK) {
        const Pack<N> pack = source[p];
#pragma unroll
        for (int j = 0; j < N; ++j) sum += up(pack.v[j]) - pivot;
    }
    const A mean = block_sum(sum, sum_of_warp) / C;

    A squares = 0;
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        if (k * BLOCK + threadIdx.x < packs) {
#pragma unroll
            for (int j = 0; j < N; ++j) {
                kept[k][j] -= mean;
                squares = fma(kept[k][j], kept[k][j], squares);
            }
        }
    }
    for (int p = KEPT * BLOCK + threadIdx.x; p < packs; p += BLOCK) {
        const Pack<N> pack = source[p];
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const A centred = up(pack.v[j]) - pivot - mean;
            squares = fma(centred, centred, squares);
        }
    }
    const A scale = rsqrt(block_sum(squares, squares_of_warp) / C + A(1e-5));

#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        const int p = k * BLOCK + threadIdx.x;
        if (p < packs) {
            const Pack<N> w = weights[p];
            const Pack<N> b = biases[p];
            Pack<N> pack;
#pragma unroll
            for (int j = 0; j < N; ++j) pack.v[j] = down(fma(kept[k][j] * scale, up(w.v[j]), up(b.v[j])));
            target[p] = pack;
        }
    }
    for (int p = KEPT * BLOCK + threadIdx.x; p < packs; p += BLOCK) {
        Pack<N> pack = source[p];
        const Pack<N> w = weights[p];
        const Pack<N> b = biases[p];
#pragma unroll
        for (int j = 0; j < N; ++j)
            pack.v[j] = down(fma((up(pack.v[j]) - pivot - mean) * scale, up(w.v[j]), up(b.v[j])));
        target[p] = pack;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) layernorm(
    const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ y, int C)
{
    static_assert(BLOCK % 32 == 0 && BLOCK <= 1024, "whole warps, and at most 32 of them");
    static_assert(ITEMS % VECTOR == 0, "whole wide loads");
    const T* in = x + static_cast<long long>(blockIdx.x) * C;
    T* out = y + static_cast<long long>(blockIdx.x) * C;
    const size_t addresses = reinterpret_cast<size_t>(x) | reinterpret_cast<size_t>(weight) |
                             reinterpret_cast<size_t>(bias) | reinterpret_cast<size_t>(y);
    if (C % VECTOR == 0 && addresses % sizeof(Pack<VECTOR>) == 0) {
        normalise_row<VECTOR>(in, weight, bias, out, C);  // then every row starts on a vector boundary
    } else {
        normalise_row<1>(in, weight, bias, out, C);
    }
}
