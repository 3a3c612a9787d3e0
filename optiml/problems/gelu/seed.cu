/* optiml
[[launch]]
kernel = "gelu"
grid = ["ceil_div(n, BLOCK)"]
block = ["BLOCK"]
args = ["x", "y", "n"]
[params]
BLOCK = 256
[tunables]
BLOCK = [64, 128, 256, 512]
*/
//@ types

// x * Phi(x). erfc keeps its relative accuracy in the left tail, where 1 + erf would cancel.
__device__ __forceinline__ A gelu_of(A v) { return A(0.5) * v * erfc(v * A(-0.70710678118654752440)); }

extern "C" __global__ void gelu(const T* x, T* y, int n)
{
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) y[i] = down(gelu_of(up(x[i])));
}
