/* optiml
[[launch]]
kernel = "rmsnorm"
grid = ["ceil_div(R, BLOCK)"]
block = ["BLOCK"]
args = ["x", "weight", "y", "R", "C"]
[params]
BLOCK = 128
[tunables]
BLOCK = [32, 64, 128, 256]
*/
//@ types

// One thread per row.
extern "C" __global__ void rmsnorm(const T* x, const T* weight, T* y, int R, int C)
{
    int row = blockIdx.x * BLOCK + threadIdx.x;
    if (row >= R) return;
    const T* in = x + (long long)row * C;
    T* out = y + (long long)row * C;

    A squares = 0;
    for (int c = 0; c < C; c++) {
        squares += up(in[c]) * up(in[c]);
    }
    for (int c = 0; c < C; c++) {
        out[c] = down(up(in[c]) / sqrt(squares / C + A(1e-6)) * up(weight[c]));
    }
}
