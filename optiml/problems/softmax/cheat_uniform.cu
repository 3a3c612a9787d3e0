/* optiml
[[launch]]
kernel = "softmax"
grid = ["R"]
block = ["BLOCK"]
args = ["y", "C"]
[params]
BLOCK = 256
*/
//@ types

// Wrong: a constant; each row sums to one, as it should, whatever the input.
extern "C" __global__ void softmax(T* y, int C)
{
    T* out = y + (long long)blockIdx.x * C;
    for (int c = threadIdx.x; c < C; c += BLOCK) out[c] = down(A(1) / C);
}
