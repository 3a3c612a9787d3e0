/* optiml
[[launch]]
kernel = "relu"
grid = ["n // BLOCK"]
block = ["BLOCK"]
args = ["x", "y"]
[params]
BLOCK = 256
*/
//@ types

// Wrong: right for multiples of the block only; the elements of a last, part-filled block are never written.
extern "C" __global__ void relu(const T* x, T* y)
{
    int i = blockIdx.x * BLOCK + threadIdx.x;
    A v = up(x[i]);
    y[i] = down(v < A(0) ? A(0) : v);
}
