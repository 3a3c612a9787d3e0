/* optiml
[[launch]]
kernel = "rmsnorm"
grid = ["R"]
block = ["BLOCK"]
args = ["x", "weight", "y", "C"]
[params]
BLOCK = 256
*/
//@ types

// Wrong: takes for granted that rows have a mean square of 1, which long rows of standard normal data nearly have.
extern "C" __global__ void rmsnorm(const T* x, const T* weight, T* y, int C)
{
    const T* in = x + (long long)blockIdx.x * C;
    T* out = y + (long long)blockIdx.x * C;
    for (int c = threadIdx.x; c < C; c += BLOCK) out[c] = down(up(in[c]) * up(weight[c]));
}
