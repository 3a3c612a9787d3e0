/* optiml
[[launch]]
kernel = "gelu"
grid = ["ceil_div(n, 2 * BLOCK)"]
block = ["BLOCK"]
args = ["x", "y", "n"]
[params]
BLOCK = 256
*/
//@ types

// Wrong: half of the work; the odd elements repeat their left neighbour.
extern "C" __global__ void gelu(const T* x, T* y, int n)
{
    int i = 2 * (blockIdx.x * BLOCK + threadIdx.x);
    if (i < n) {
        A v = up(x[i]);
        T result = down(A(0.5) * v * erfc(v * A(-0.70710678118654752440)));
        y[i] = result;
        if (i + 1 < n) y[i + 1] = result;
    }
}
