/* optiml
[[launch]]
kernel = "gelu"
grid = ["ceil_div(n, BLOCK)"]
block = ["BLOCK"]
args = ["x", "y", "n"]
[params]
BLOCK = 256
*/
//@ types

// Wrong: another function, which agrees with gelu only far from zero.
extern "C" __global__ void gelu(const T* x, T* y, int n)
{
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) {
        A v = up(x[i]);
        y[i] = down(v < A(0) ? A(0) : v);
    }
}
