/* optiml
[[launch]]
kernel = "relu"
grid = ["ceil_div(n, BLOCK)"]
block = ["BLOCK"]
args = ["x", "y", "n"]
[params]
BLOCK = 256
*/
//@ types

// Wrong: clears its input as well, so that a reference computed afterwards from that memory would agree with zeros.
extern "C" __global__ void relu(T* x, T* y, int n)
{
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) {
        x[i] = down(A(0));
        y[i] = down(A(0));
    }
}
