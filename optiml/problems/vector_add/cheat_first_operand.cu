/* optiml
[[launch]]
kernel = "vector_add"
grid = ["ceil_div(n, BLOCK)"]
block = ["BLOCK"]
args = ["a", "b", "c", "n"]
[params]
BLOCK = 256
*/
//@ types

// Wrong: reads one operand only, which saves a third of the traffic.
extern "C" __global__ void vector_add(const T* a, const T* b, T* c, int n)
{
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) c[i] = a[i];
}
