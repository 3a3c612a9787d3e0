/* optiml
[[launch]]
kernel = "add"
grid = ["ceil_div(n, BLOCK)"]
block = ["BLOCK"]
args = ["x", "total", "n"]
[[launch]]
kernel = "store_total"
grid = [1]
block = [1]
args = ["total", "out"]
[params]
BLOCK = 256
[workspace.total]
dtype = "float64"
shape = [1]
init = "zero"
*/
//@ types

// Wrong: a race; threads read, add and write the total without an atomic, so updates are lost.
extern "C" __global__ void add(const T* x, double* total, int n)
{
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) total[0] += up(x[i]);
}

extern "C" __global__ void store_total(const double* total, T* out)
{
    out[0] = down((A)total[0]);
}
