/* optiml
[[launch]]
kernel = "layernorm"
grid = ["ceil_div(R, BLOCK)"]
block = ["BLOCK"]
args = ["x", "weight", "bias", "y", "R", "C"]
[params]
BLOCK = 128
[tunables]
BLOCK = [32, 64, 128, 256]
*/
//@ types

// One thread per row. Elements are taken relative to the first one of their row: the sums then stay small, and
// exact, where a row sits far from zero.
extern "C" __global__ void layernorm(const T* x, const T* weight, const T* bias, T* y, int R, int C)
{
    int row = blockIdx.x * BLOCK + threadIdx.x;
    if (row >= R) return;
    const T* in = x + (long long)row * C;
    T* out = y + (long long)row * C;
    A pivot = up(in[0]);

    A mean = 0;
    for (int c = 0; c < C; c++) {
        mean += up(in[c]) - pivot;
    }
    mean /= C;
    A variance = 0;
    for (int c = 0; c < C; c++) {
        A centred = up(in[c]) - pivot - mean;
        variance += centred * centred;
    }
    variance /= C;
    for (int c = 0; c < C; c++) {
        A centred = up(in[c]) - pivot - mean;
        out[c] = down(centred / sqrt(variance + A(1e-5)) * up(weight[c]) + up(bias[c]));
    }
}
