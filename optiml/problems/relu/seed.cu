/* optiml
[[launch]]
kernel = "relu"
grid = ["ceil_div(n, BLOCK)"]
block = ["BLOCK"]
args = ["x", "y", "n"]
[params]
BLOCK = 256
[tunables]
BLOCK = [64, 128, 256, 512]
*/
//@ types

// Written so that a NaN stays one.
__device__ __forceinline__ A rectified(A v) { return v < A(0) ? A(0) : v; }

extern "C" __global__ void relu(const T* x, T* y, int n)
{
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) y[i] = down(rectified(up(x[i])));
}
