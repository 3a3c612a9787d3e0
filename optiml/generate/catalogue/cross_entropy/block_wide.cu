/* optiml
[[launch]]
kernel = "cross_entropy"
grid = ["R"]
block = ["BLOCK"]
args = ["x", "labels", "loss", "C"]
[params]
BLOCK = 256
VECTOR = 4
[tunables]
BLOCK = [128, 256, 512, 1024]
VECTOR = [1, 2, 4, 8]
[strategy]
title = "one block per row, one pass, wide loads"
rationale = """
Vocabulary-sized rows need more than a warp: the threads of a block keep many wide loads of one row in flight. The \
running sum is rescaled once per wide load, so the logits are read exactly once."""
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

#if ELEMENT_BYTES == 8
#define LOWEST -1.7976931348623157e308
#else
#define LOWEST -3.402823466e38f
#endif

// Arguments are at most 0, so the error of the fast form, which grows with its argument, stays below that of a sum.
__device__ __forceinline__ float exponential(float v) { return __expf(v); }
__device__ __forceinline__ double exponential(double v) { return exp(v); }

struct Running {
    A largest;  // of the elements seen
    A total;    // of exp(element - largest)
};

__device__ __forceinline__ Running combined_over_warp(Running a)
{
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        const A other = __shfl_xor_sync(0xffffffff, a.largest, distance);
        const A other_total = __shfl_xor_sync(0xffffffff, a.total, distance);
        const A larger = max(a.largest, other);
        a.total = a.total * exponential(a.largest - larger) + other_total * exponential(other - larger);
        a.largest = larger;
    }
    return a;
}

template <int N>
__device__ __forceinline__ Running over_share(const T* in, int C)  // of this thread
{
    const Pack<N>* source = reinterpret_cast<const Pack<N>*>(in);
    const int packs = C / N;             // C is a multiple of N
    Running mine = {LOWEST, A(0)};       // finite: a thread without elements then contributes exactly nothing
#pragma unroll 2
    for (int p = threadIdx.x; p < packs; p += BLOCK) {
        const Pack<N> pack = source[p];
        A larger = mine.largest;
#pragma unroll
        for (int j = 0; j < N; ++j) larger = max(larger, up(pack.v[j]));
        mine.total *= exponential(mine.largest - larger);
        mine.largest = larger;
#pragma unroll
        for (int j = 0; j < N; ++j) mine.total += exponential(up(pack.v[j]) - larger);
    }
    return mine;
}

extern "C" __global__ void __launch_bounds__(BLOCK) cross_entropy(
    const T* __restrict__ x, const int* __restrict__ labels, T* __restrict__ loss, int C)
{
    static_assert(BLOCK % 32 == 0 && BLOCK <= 1024, "whole warps, and at most 32 of them");
    __shared__ Running of_warp[BLOCK / 32];
    const int row = blockIdx.x;
    const int label = labels[row];
    if (label == -100) {  // the same for the whole block, so nobody waits at the barrier below
        if (threadIdx.x == 0) loss[row] = down(A(0));
        return;
    }
    const T* in = x + static_cast<long long>(row) * C;
    const bool wide = C % VECTOR == 0 && reinterpret_cast<size_t>(x) % sizeof(Pack<VECTOR>) == 0;
    Running mine = combined_over_warp(wide ? over_share<VECTOR>(in, C) : over_share<1>(in, C));
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    mine = combined_over_warp(threadIdx.x < BLOCK / 32 ? of_warp[threadIdx.x] : Running{LOWEST, A(0)});
    if (threadIdx.x == 0) loss[row] = down(log(mine.total) - (up(in[label]) - mine.largest));
}
