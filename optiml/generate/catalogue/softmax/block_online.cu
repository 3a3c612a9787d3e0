/* optiml
[[launch]]
kernel = "softmax"
grid = ["R"]
block = ["BLOCK"]
args = ["x", "y", "C"]
[params]
BLOCK = 256
VECTOR = 4
[tunables]
BLOCK = [128, 256, 512, 1024]
VECTOR = [1, 2, 4, 8]
[strategy]
title = "one block per row, largest and sum in one pass, wide loads"
rationale = """
Enough threads share a row to keep many loads in flight even where there are few rows. The running sum is rescaled \
once per wide load, so a row is read twice instead of three times, in a quarter of the memory instructions."""
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

__device__ __forceinline__ Running combined(Running a, Running b)
{
    const A larger = max(a.largest, b.largest);
    return {larger, a.total * exponential(a.largest - larger) + b.total * exponential(b.largest - larger)};
}

__device__ __forceinline__ Running combined_over_warp(Running a)
{
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        const Running other = {
            __shfl_xor_sync(0xffffffff, a.largest, distance), __shfl_xor_sync(0xffffffff, a.total, distance)};
        a = combined(a, other);
    }
    return a;
}

template <int N>
__device__ __forceinline__ void softmax_row(const T* in, T* out, int C)
{
    __shared__ Running of_warp[BLOCK / 32];
    const Pack<N>* source = reinterpret_cast<const Pack<N>*>(in);
    Pack<N>* target = reinterpret_cast<Pack<N>*>(out);
    const int packs = C / N;  // C is a multiple of N

    Running mine = {LOWEST, A(0)};  // finite: a thread without elements then contributes exactly nothing
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
    mine = combined_over_warp(mine);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
    __syncthreads();
    const int slot = threadIdx.x % 32;
    mine = slot < BLOCK / 32 ? of_warp[slot] : Running{LOWEST, A(0)};
    mine = combined_over_warp(mine);  // every warp does this itself, which saves a broadcast and its barrier

    const A scale = A(1) / mine.total;
    for (int p = threadIdx.x; p < packs; p += BLOCK) {
        Pack<N> pack = source[p];
#pragma unroll
        for (int j = 0; j < N; ++j) pack.v[j] = down(exponential(up(pack.v[j]) - mine.largest) * scale);
        target[p] = pack;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) softmax(const T* __restrict__ x, T* __restrict__ y, int C)
{
    static_assert(BLOCK % 32 == 0 && BLOCK <= 1024, "whole warps, and at most 32 of them");
    const T* in = x + static_cast<long long>(blockIdx.x) * C;
    T* out = y + static_cast<long long>(blockIdx.x) * C;
    const size_t addresses = reinterpret_cast<size_t>(x) | reinterpret_cast<size_t>(y);
    if (C % VECTOR == 0 && addresses % sizeof(Pack<VECTOR>) == 0) {
        softmax_row<VECTOR>(in, out, C);  // then every row starts on a vector boundary
    } else {
        softmax_row<1>(in, out, C);
    }
}
