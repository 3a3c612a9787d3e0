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
distribution only to float accuracy: one reciprocal, eight multiply-adds and one hardware exponential give it."""
moves = [
    "smsp__inst_executed.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
]
dtypes = ["float32", "float16", "bfloat16"]
requires = []
*/
//@ types

// Phi(-a) for a >= 0, as t * exp(P(t) - a * a / 2) with t = 1 / (1 + 0.4 a). P is a minimax fit of the logarithm of
// Phi(-a) / t plus a * a / 2 over 0 <= a <= 37, within 4e-8 up to a = 2 and within 7e-6 where the tail has vanished;
// rounding in float adds about 1e-7.
__device__ __forceinline__ float normal_tail(float a)
{
    const float t = __fdividef(1.0f, fmaf(0.4f, a, 1.0f));
    float p = 0.15989305f;
    p = fmaf(p, t, -0.82288235f);
    p = fmaf(p, t, 1.6266456f);
    p = fmaf(p, t, -1.3793323f);
    p = fmaf(p, t, 0.28645951f);
    p = fmaf(p, t, -0.07580243f);
    p = fmaf(p, t, 0.34698030f);
    p = fmaf(p, t, 1.0001483f);
    p = fmaf(p, t, -1.8352568f);
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
