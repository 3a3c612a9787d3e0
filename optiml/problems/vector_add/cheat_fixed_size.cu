/* optiml
[[launch]]
kernel = "vector_add"
grid = [4]
block = [256]
args = ["a", "b", "c", "n"]
*/
//@ types

// Wrong: four blocks whatever the size, so only the first 1024 elements are computed.
extern "C" __global__ void vector_add(const T* a, const T* b, T* c, int n)
{
    int i = blockIdx.x * 256 + threadIdx.x;
    if (i < n) c[i] = down(up(a[i]) + up(b[i]));
}
