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

// Wrong: leaves the sum in its first input too, so a second run adds the second operand twice.
extern "C" __global__ void vector_add(T* a, const T* b, T* c, int n)
{
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) {
        a[i] = down(up(a[i]) + up(b[i]));
        c[i] = a[i];
    }
}
