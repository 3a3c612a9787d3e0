/* optiml
[[launch]]
kernel = "gelu"
grid = ["ceil_div(n, BLOCK * VECTOR)"]
block = ["BLOCK"]
args = ["x", "y", "n"]
[params]
BLOCK = 256
VECTOR = 4
[tunables]
BLOCK = [128, 256, 512]
VECTOR = [2, 4, 8]
[strategy]
title = "wide accesses, the normal tail from one polynomial and one exponential"
rationale = """
The library erfc spends most of the instructions of this kernel. Gelu needs the upper tail of the normal \
distribution only to float accuracy: one reciprocal, seven multiply-adds and one hardware exponential give it."""
moves = [
    "smsp__inst_executed.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
]
dtypes = ["float32", "float16", "bfloat16"]
requires = []
*/
//@ types

// Phi(-a) for a >= 0, as t * exp(P(t) - a * a / 2) with t = 1 / (1 + 0.35 a). P is a least-maximum fit of the
// logarithm of Phi(-a) / t plus a * a / 2 over 0 <= a <= 37; the result is within 1e-7 of its size where it matters
// (a < 4) and within 1e-10 beyond.
__device__ __forceinline__ float normal_tail(float a)
{
    const float t = __fdividef(1.0f, fmaf(0.35f, a, 1.0f));
    float p = -0.18044132f;
    p = fmaf(p, t, 0.7311425f);
    p = fmaf(p, t, -0.98543209f);
    p = fmaf(p, t, 0.34303204f);
    p = fmaf(p, t, -0.02471093f);
    p = fmaf(p, t, 0.392907f);
    p = fmaf(p, t, 0.99909946f);
    p = fmaf(p, t, -1.96874653f);
    return t * __expf(fmaf(-0.5f * a, a, p));
}

// x * Phi(x), which is max(x, 0) less |x| times the tail beyond |x|.
__device__ __forceinline__ float gelu_of(float v)
{
    const float a = fabsf(v);
    return fmaf(-a, normal_tail(a), fmaxf(v, 0.0f));
}

extern "C" __global__ void __launch_bounds__(BLOCK) gelu(
    const T* __restrict__ x, T* __restrict__ y, int n)
{
    const size_t addresses = reinterpret_cast<size_t>(x) | reinterpret_cast<size_t>(y);
    const int first = blockIdx.x * (BLOCK * VECTOR);
    if (addresses % sizeof(Pack<VECTOR>) == 0 && n - first >= BLOCK * VECTOR) {
        const int at = first + threadIdx.x * VECTOR;
        const Pack<VECTOR> x_pack = *reinterpret_cast<const Pack<VECTOR>*>(x + at);
        Pack<VECTOR> result;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) result.v[j] = down(gelu_of(up(x_pack.v[j])));
        *reinterpret_cast<Pack<VECTOR>*>(y + at) = result;
        return;
    }
    // The last block, or arrays that start off a vector boundary: neighbours still take neighbouring elements.
    const int last = min(n, first + BLOCK * VECTOR);
    for (int i = first + threadIdx.x; i < last; i += BLOCK) y[i] = down(gelu_of(up(x[i])));
}
