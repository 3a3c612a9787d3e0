/* optiml
[[launch]]
kernel = "over_parts"
grid = ["PARTS * R"]
block = ["BLOCK"]
args = ["x", "labels", "partial", "C"]
[[launch]]
kernel = "over_rows"
grid = ["ceil_div(R, 8)"]
block = [256]
args = ["x", "labels", "partial", "loss", "R", "C"]
[params]
BLOCK = 256
PARTS = 4
[tunables]
BLOCK = [128, 256, 512]
PARTS = [2, 4, 8, 16]
[workspace.partial]
dtype = "float64"
shape = ["R", "PARTS", 2]
[strategy]
title = "several blocks per row, partial sums joined by a second launch"
rationale = """
With fewer rows than the device holds blocks, one block per row leaves multiprocessors idle while the wide rows are \
read. PARTS blocks share a row; a small second launch joins their largest elements and sums."""
moves = [
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "lts__t_sectors_op_read.sum",
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

extern "C" __global__ void __launch_bounds__(BLOCK) over_parts(
    const T* __restrict__ x, const int* __restrict__ labels, double* __restrict__ partial, int C)
{
    static_assert(BLOCK % 32 == 0 && BLOCK <= 1024, "whole warps, and at most 32 of them");
    __shared__ Running of_warp[BLOCK / 32];
    const int row = blockIdx.x / PARTS;
    const int part = blockIdx.x % PARTS;
    if (labels[row] == -100) return;  // the same for the whole block; nobody reads its partial result
    const T* in = x + static_cast<long long>(row) * C;
    const int length = (C + PARTS - 1) / PARTS;
    const int end = min(C, (part + 1) * length);

    Running mine = {LOWEST, A(0)};  // finite: a thread without elements then contributes exactly nothing
#pragma unroll 4
    for (int c = part * length + threadIdx.x; c < end; c += BLOCK) {
        const A v = up(in[c]);
        const A lesser = exponential(-fabs(v - mine.largest));  // either the old sum or the new term shrinks by this
        mine.total = v > mine.largest ? fma(mine.total, lesser, A(1)) : mine.total + lesser;
        mine.largest = max(mine.largest, v);
    }
    mine = combined_over_warp(mine);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    mine = combined_over_warp(threadIdx.x < BLOCK / 32 ? of_warp[threadIdx.x] : Running{LOWEST, A(0)});
    if (threadIdx.x == 0) {
        partial[2LL * blockIdx.x] = mine.largest;
        partial[2LL * blockIdx.x + 1] = mine.total;
    }
}

// One warp per row.
extern "C" __global__ void __launch_bounds__(256) over_rows(
    const T* __restrict__ x, const int* __restrict__ labels, const double* __restrict__ partial, T* __restrict__ loss,
    int R, int C)
{
    static_assert(PARTS <= 32, "one lane per part");
    const int lane = threadIdx.x % 32;
    const int row = blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= R) return;
    const int label = labels[row];
    if (label == -100) {
        if (lane == 0) loss[row] = down(A(0));
        return;
    }
    Running part = {LOWEST, A(0)};
    if (lane < PARTS) {
        const double* stored = partial + 2 * (static_cast<long long>(row) * PARTS + lane);
        part = {static_cast<A>(stored[0]), static_cast<A>(stored[1])};
    }
    const Running whole = combined_over_warp(part);
    const A of_label = up(x[static_cast<long long>(row) * C + label]);
    if (lane == 0) loss[row] = down(log(whole.total) - (of_label - whole.largest));
}
