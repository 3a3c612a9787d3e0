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

// Wrong: writes nothing and hopes that the answer is already there.
extern "C" __global__ void vector_add(const T* a, const T* b, T* c, int n)
{
}
