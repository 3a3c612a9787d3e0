/* optiml
[[launch]]
kernel = "relu"
grid = ["ceil_div(n, BLOCK)"]
block = ["BLOCK"]
args = ["x", "y"]
[params]
BLOCK = 256
*/
//@ types

// Wrong: no bounds check, so the last block reads and writes past the end of the arrays.
extern "C" __global__ void relu(const T* x, T* y)
{
    int i = blockIdx.x * BLOCK + threadIdx.x;
    A v = up(x[i]);
    y[i] = down(v < A(0) ? A(0) : v);
}
