/* optiml
[[launch]]
kernel = "softmax"
grid = ["ceil_div(R, BLOCK)"]
block = ["BLOCK"]
args = ["x", "y", "R", "C"]
[params]
BLOCK = 128
[tunables]
BLOCK = [32, 64, 128, 256]
*/
//@ types

// One thread per row.
extern "C" __global__ void softmax(const T* x, T* y, int R, int C)
{
    int row = blockIdx.x * BLOCK + threadIdx.x;
    if (row >= R) return;
    const T* in = x + (long long)row * C;
    T* out = y + (long long)row * C;

    A largest = up(in[0]);
    for (int c = 1; c < C; c++) {
        largest = max(largest, up(in[c]));
    }
    A total = 0;
    for (int c = 0; c < C; c++) {
        total += exp(up(in[c]) - largest);
    }
    for (int c = 0; c < C; c++) {
        out[c] = down(exp(up(in[c]) - largest) / total);
    }
}
