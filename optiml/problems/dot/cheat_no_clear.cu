/* optiml
[[launch]]
kernel = "dot"
grid = ["ceil_div(n, BLOCK)"]
block = ["BLOCK"]
args = ["a", "b", "out", "n"]
[params]
BLOCK = 256
*/

// Wrong: adds to whatever the output holds; right only on memory that happens to be zero.
extern "C" __global__ void dot(const float* a, const float* b, float* out, int n)
{
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) atomicAdd(out, a[i] * b[i]);
}
