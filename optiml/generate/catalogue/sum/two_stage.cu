/* optiml
[[launch]]
kernel = "add_strided"
grid = ["max(1, min(BLOCKS, ceil_div(n, BLOCK * UNROLL)))"]
block = ["BLOCK"]
args = ["x", "partial", "n"]
[[launch]]
kernel = "add_partial"
grid = [1]
block = ["BLOCK"]
args = ["partial", "out", "max(1, min(BLOCKS, ceil_div(n, BLOCK * UNROLL)))"]
[params]
BLOCK = 256
UNROLL = 4
BLOCKS = 864
[tunables]
BLOCK = [128, 256, 512, 1024]
UNROLL = [1, 2, 4, 8]
BLOCKS = [216, 432, 864, 1728]
[workspace.partial]
dtype = "float64"
shape = ["BLOCKS"]
[strategy]
title = "two stages, strided loads, warp shuffles"
rationale = """
Blocks that stay resident stride over the data with UNROLL independent running sums, so nearly every instruction is \
a load or an addition; a block reduces once, through shuffles, instead of once per BLOCK elements, and nothing \
contends for one address. The result does not depend on the order in which blocks finish."""
moves = [
    "smsp__inst_executed.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "smsp__sass_branch_targets_threads_divergent.sum",
]
dtypes = ["float32", "float16", "bfloat16", "float64", "int32"]
requires = []
*/
//@ types

// The sum of `v` over the block, in its first thread.
template <typename Number>
__device__ __forceinline__ Number block_sum(Number v)
{
    __shared__ Number of_warp[BLOCK / 32];
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) v += __shfl_down_sync(0xffffffff, v, distance);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x < 32) {
        v = threadIdx.x < BLOCK / 32 ? of_warp[threadIdx.x] : Number(0);
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) v += __shfl_down_sync(0xffffffff, v, distance);
    }
    return v;
}

extern "C" __global__ void __launch_bounds__(BLOCK) add_strided(
    const T* __restrict__ x, double* __restrict__ partial, int n)
{
    static_assert(BLOCK % 32 == 0 && BLOCK <= 1024, "whole warps, and at most 32 of them");
    const int stride = gridDim.x * BLOCK;
    A sums[UNROLL] = {};
    int i = blockIdx.x * BLOCK + threadIdx.x;
    for (; i < n - (UNROLL - 1) * stride; i += UNROLL * stride) {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) sums[u] += up(x[i + u * stride]);
    }
    for (; i < n; i += stride) sums[0] += up(x[i]);
#pragma unroll
    for (int u = 1; u < UNROLL; ++u) sums[0] += sums[u];
    const A sum = block_sum(sums[0]);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// One block adds the partial sums, in double precision: there are few, so it costs nothing.
extern "C" __global__ void __launch_bounds__(BLOCK) add_partial(
    const double* __restrict__ partial, T* __restrict__ out, int count)
{
    double sum = 0.0;
    for (int i = threadIdx.x; i < count; i += BLOCK) sum += partial[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[0] = down(static_cast<A>(sum));
}
