/* optiml
[[launch]]
kernel = "layernorm"
grid = ["R"]
block = ["BLOCK"]
args = ["x", "weight", "bias", "y", "C"]
[params]
BLOCK = 256
VECTOR = 4
[tunables]
BLOCK = [128, 256, 512, 1024]
VECTOR = [1, 2, 4, 8]
[strategy]
title = "one block per row, mean and variance in one pass, wide loads"
rationale = """
Partial means and squared deviations merge exactly enough to need a single pass over the row, so it is read twice \
in all instead of three times; wide loads quarter the memory instructions, and the threads of a block keep many \
loads in flight even where there are few rows."""
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

struct Moments {
    A count;
    A mean;
    A squares;  // sum of squared deviations from the mean
};

// The share of one part in a merged mean; two units in the last place of it move the mean by about as much as
// rounding does.
__device__ __forceinline__ float quotient(float a, float b) { return __fdividef(a, b); }
__device__ __forceinline__ double quotient(double a, double b) { return a / b; }

// Chan, Golub and LeVeque 1979: no difference of large sums, so nothing cancels.
__device__ __forceinline__ Moments merged(Moments a, Moments b)
{
    const A count = a.count + b.count;
    const A share = count > A(0) ? quotient(b.count, count) : A(0);
    const A delta = b.mean - a.mean;
    return {count, fma(delta, share, a.mean), a.squares + fma(delta * delta, a.count * share, b.squares)};
}

__device__ __forceinline__ Moments merged_over_warp(Moments a)
{
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        const Moments other = {
            __shfl_xor_sync(0xffffffff, a.count, distance), __shfl_xor_sync(0xffffffff, a.mean, distance),
            __shfl_xor_sync(0xffffffff, a.squares, distance)};
        a = merged(a, other);
    }
    return a;
}

template <int N>
__device__ __forceinline__ void normalise_row(const T* in, const T* weight, const T* bias, T* out, int C)
{
    __shared__ Moments of_warp[BLOCK / 32];
    const Pack<N>* source = reinterpret_cast<const Pack<N>*>(in);
    const Pack<N>* weights = reinterpret_cast<const Pack<N>*>(weight);
    const Pack<N>* biases = reinterpret_cast<const Pack<N>*>(bias);
    Pack<N>* target = reinterpret_cast<Pack<N>*>(out);
    const int packs = C / N;    // C is a multiple of N
    const A pivot = up(in[0]);  // differences from it keep their precision where a row sits far from zero

    Moments mine = {A(0), A(0), A(0)};
    for (int p = threadIdx.x; p < packs; p += BLOCK) {
        const Pack<N> pack = source[p];
        A mean = 0;
#pragma unroll
        for (int j = 0; j < N; ++j) mean += up(pack.v[j]) - pivot;
        mean *= A(1) / N;
        A squares = 0;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const A centred = up(pack.v[j]) - pivot - mean;
            squares = fma(centred, centred, squares);
        }
        mine = merged(mine, {A(N), mean, squares});
    }
    mine = merged_over_warp(mine);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
    __syncthreads();
    const int slot = threadIdx.x % 32;
    mine = slot < BLOCK / 32 ? of_warp[slot] : Moments{A(0), A(0), A(0)};
    mine = merged_over_warp(mine);  // every warp does this itself, which saves a broadcast and its barrier

    const A scale = rsqrt(mine.squares / C + A(1e-5));
    for (int p = threadIdx.x; p < packs; p += BLOCK) {
        Pack<N> pack = source[p];
        const Pack<N> w = weights[p];
        const Pack<N> b = biases[p];
#pragma unroll
        for (int j = 0; j < N; ++j)
            pack.v[j] = down(fma((up(pack.v[j]) - pivot - mine.mean) * scale, up(w.v[j]), up(b.v[j])));
        target[p] = pack;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) layernorm(
    const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ y, int C)
{
    static_assert(BLOCK % 32 == 0 && BLOCK <= 1024, "whole warps, and at most 32 of them");
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
