/* optiml
[[launch]]
kernel = "add_strided"
grid = ["max(1, min(BLOCKS, ceil_div(n, BLOCK * VECTOR)))"]
block = ["BLOCK"]
args = ["x", "partial", "n"]
[[launch]]
kernel = "add_partial"
grid = [1]
block = ["BLOCK"]
args = ["partial", "out", "max(1, min(BLOCKS, ceil_div(n, BLOCK * VECTOR)))"]
[params]
BLOCK = 256
VECTOR = 4
UNROLL = 4
BLOCKS = 864
[tunables]
BLOCK = [128, 256, 512, 1024]
VECTOR = [2, 4, 8]
UNROLL = [1, 2, 4]
BLOCKS = [216, 432, 864, 1728]
[workspace.partial]
dtype = "float64"
shape = ["BLOCKS"]
[strategy]
title = "two stages, wide strided loads"
rationale = """
One 16-byte load feeds four additions, so memory instructions and loop overhead fall to a quarter of what scalar \
loads need, and UNROLL wide loads in flight per thread cover the latency of memory with fewer warps."""
moves = [
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "smsp__inst_executed.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
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

// What this thread adds up: wide loads, UNROLL of them in flight, wherever the arrays start on a vector boundary.
__device__ __forceinline__ A sum_over_share(const T* __restrict__ x, int n)
{
    const int thread = blockIdx.x * BLOCK + threadIdx.x;
    const int stride = gridDim.x * BLOCK;
    A sums[UNROLL] = {};
    int done = 0;  // elements that the wide part covers
    if (reinterpret_cast<size_t>(x) % sizeof(Pack<VECTOR>) == 0) {
        const Pack<VECTOR>* x_packs = reinterpret_cast<const Pack<VECTOR>*>(x);
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
#pragma unroll
                for (int j = 0; j < VECTOR; ++j) sums[u] += up(x_pack[u].v[j]);
            }
        }
        for (; p < packs; p += stride) {
            const Pack<VECTOR> x_pack = x_packs[p];
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) sums[0] += up(x_pack.v[j]);
        }
        done = packs * VECTOR;
    }
    for (int i = done + thread; i < n; i += stride) sums[0] += up(x[i]);
#pragma unroll
    for (int u = 1; u < UNROLL; ++u) sums[0] += sums[u];
    return sums[0];
}

extern "C" __global__ void __launch_bounds__(BLOCK) add_strided(
    const T* __restrict__ x, double* __restrict__ partial, int n)
{
    static_assert(BLOCK % 32 == 0 && BLOCK <= 1024, "whole warps, and at most 32 of them");
    const A sum = block_sum(sum_over_share(x, n));
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
