/* optiml
[[launch]]
kernel = "layernorm"
grid = ["ceil_div(R, BLOCK)"]
block = ["BLOCK"]
args = ["x", "weight", "bias", "y", "R", "C"]
[params]
BLOCK = 128
*/
//@ types

// Wrong: computes mean and variance of the first row only and uses them for all.
extern "C" __global__ void layernorm(const T* x, const T* weight, const T* bias, T* y, int R, int C)
{
    int row = blockIdx.x * BLOCK + threadIdx.x;
    if (row >= R) return;
    A mean = 0;
    for (int c = 0; c < C; c++) mean += up(x[c]);
    mean /= C;
    A variance = 0;
    for (int c = 0; c < C; c++) variance += (up(x[c]) - mean) * (up(x[c]) - mean);
    variance /= C;
    const T* in = x + (long long)row * C;
    T* out = y + (long long)row * C;
    for (int c = 0; c < C; c++)
        out[c] = down((up(in[c]) - mean) / sqrt(variance + A(1e-5)) * up(weight[c]) + up(bias[c]));
}
