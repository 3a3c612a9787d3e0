/* optiml
[[launch]]
kernel = "layernorm"
grid = ["R"]
block = ["BLOCK"]
args = ["x", "weight", "bias", "y", "C"]
[params]
BLOCK = 256
*/
//@ types

// Wrong: takes for granted that rows have mean 0 and variance 1, which standard normal data nearly have.
extern "C" __global__ void layernorm(const T* x, const T* weight, const T* bias, T* y, int C)
{
    const T* in = x + (long long)blockIdx.x * C;
    T* out = y + (long long)blockIdx.x * C;
    for (int c = threadIdx.x; c < C; c += BLOCK) out[c] = down(up(in[c]) * up(weight[c]) + up(bias[c]));
}
