/* optiml
[[launch]]
kernel = "rmsnorm"
grid = ["R"]
block = ["BLOCK"]
args = ["x", "weight", "y", "C"]
[params]
BLOCK = 256
VECTOR = 4
[tunables]
BLOCK = [128, 256, 512, 1024]
VECTOR = [1, 2, 4, 8]
[strategy]
title = "one block per row, wide loads"
rationale = """
The threads of a block keep many loads of one row in flight even where there are few rows, and wide accesses quarter \
the memory instructions and the index arithmetic. Few registers, so occupancy stays high."""
moves = [
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
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
    __shared__ A of_warp[BLOCK / 32];
    const Pack<N>* source = reinterpret_cast<const Pack<N>*>(in);
    const Pack<N>* weights = reinterpret_cast<const Pack<N>*>(weight);
    Pack<N>* target = reinterpret_cast<Pack<N>*>(out);
    const int packs = C / N;  // C is a multiple of N

    A squares = 0;
#pragma unroll 2
    for (int p = threadIdx.x; p < packs; p += BLOCK) {
        const Pack<N> pack = source[p];
#pragma unroll
        for (int j = 0; j < N; ++j) squares = fma(up(pack.v[j]), up(pack.v[j]), squares);
    }
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = squares;
    __syncthreads();
    // Every warp adds the partial sums itself, which saves a broadcast and its barrier.
    squares = warp_sum(threadIdx.x % 32 < BLOCK / 32 ? of_warp[threadIdx.x % 32] : A(0));
    const A scale = rsqrt(squares / C + A(1e-6));
#pragma unroll 2
    for (int p = threadIdx.x; p < packs; p += BLOCK) {
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
