/* optiml
[[launch]]
kernel = "softmax"
grid = ["R"]
block = ["BLOCK"]
args = ["x", "y", "C"]
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
from memory once and exponentiated once; only what lies beyond is read again."""
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

// Arguments are at most 0, so the error of the fast form, which grows with its argument, stays below that of a sum.
__device__ __forceinline__ float exponential(float v) { return __expf(v); }
__device__ __forceinline__ double exponential(double v) { return exp(v); }

__device__ __forceinline__ A block_max(A v)
{
    __shared__ A of_warp[BLOCK / 32];
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) v = max(v, __shfl_xor_sync(0xffffffff, v, distance));
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
    __syncthreads();
    v = of_warp[threadIdx.x % 32 < BLOCK / 32 ? threadIdx.x % 32 : 0];
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) v = max(v, __shfl_xor_sync(0xffffffff, v, distance));
    return v;
}

__device__ __forceinline__ A block_sum(A v)
{
    __shared__ A of_warp[BLOCK / 32];
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) v += __shfl_xor_sync(0xffffffff, v, distance);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
    __syncthreads();
    v = threadIdx.x % 32 < BLOCK / 32 ? of_warp[threadIdx.x % 32] : A(0);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) v += __shfl_xor_sync(0xffffffff, v, distance);
    return v;
}

template <int N>
__device__ __forceinline__ void softmax_row(const T* in, T* out, int C)
{
    const int KEPT = ITEMS / N;  // wide loads per thread that stay in registers
    const Pack<N>* source = reinterpret_cast<const Pack<N>*>(in);
    Pack<N>* target = reinterpret_cast<Pack<N>*>(out);
    const int packs = C / N;  // C is a multiple of N
    A kept[KEPT][N];

    A largest = up(in[0]);
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        const int p = k * BLOCK + threadIdx.x;
        if (p < packs) {
            const Pack<N> pack = source[p];
#pragma unroll
            for (int j = 0; j < N; ++j) {
                kept[k][j] = up(pack.v[j]);
                largest = max(largest, kept[k][j]);
            }
        }
    }
    for (int p = KEPT * BLOCK + threadIdx.x; p < packs; p += BLOCK) {
        const Pack<N> pack = source[p];
#pragma unroll
        for (int j = 0; j < N; ++j) largest = max(largest, up(pack.v[j]));
    }
    largest = block_max(largest);

    A total = 0;
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        if (k * BLOCK + threadIdx.x < packs) {
#pragma unroll
            for (int j = 0; j < N; ++j) {
                kept[k][j] = exponential(kept[k][j] - largest);
                total += kept[k][j];
            }
        }
    }
    for (int p = KEPT * BLOCK + threadIdx.x; p < packs; p += BLOCK) {
        const Pack<N> pack = source[p];
#pragma unroll
        for (int j = 0; j < N; ++j) total += exponential(up(pack.v[j]) - largest);
    }
    const A scale = A(1) / block_sum(total);

#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        const int p = k * BLOCK + threadIdx.x;
        if (p < packs) {
            Pack<N> pack;
#pragma unroll
            for (int j = 0; j < N; ++j) pack.v[j] = down(kept[k][j] * scale);
            target[p] = pack;
        }
    }
    for (int p = KEPT * BLOCK + threadIdx.x; p < packs; p += BLOCK) {
        Pack<N> pack = source[p];
#pragma unroll
        for (int j = 0; j < N; ++j) pack.v[j] = down(exponential(up(pack.v[j]) - largest) * scale);
        target[p] = pack;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) softmax(const T* __restrict__ x, T* __restrict__ y, int C)
{
    static_assert(BLOCK % 32 == 0 && BLOCK <= 1024, "whole warps, and at most 32 of them");
    static_assert(ITEMS % VECTOR == 0, "whole wide loads");
    const T* in = x + static_cast<long long>(blockIdx.x) * C;
    T* out = y + static_cast<long long>(blockIdx.x) * C;
    const size_t addresses = reinterpret_cast<size_t>(x) | reinterpret_cast<size_t>(y);
    if (C % VECTOR == 0 && addresses % sizeof(Pack<VECTOR>) == 0) {
        softmax_row<VECTOR>(in, out, C);  // then every row starts on a vector boundary
    } else {
        softmax_row<1>(in, out, C);
    }
}
