/* optiml
[[launch]]
kernel = "softmax"
grid = ["ceil_div(R, BLOCK)"]
block = ["BLOCK"]
args = ["x", "y", "R", "C"]
[params]
BLOCK = 128
*/
//@ types

// Wrong: only the first 512 columns of a row enter its sum; the others are written as zero.
extern "C" __global__ void softmax(const T* x, T* y, int R, int C)
{
    int row = blockIdx.x * BLOCK + threadIdx.x;
    if (row >= R) return;
    const T* in = x + (long long)row * C;
    T* out = y + (long long)row * C;
    int used = min(C, 512);
    A largest = up(in[0]);
    for (int c = 1; c < used; c++) largest = max(largest, up(in[c]));
    A total = 0;
    for (int c = 0; c < used; c++) total += exp(up(in[c]) - largest);
    for (int c = 0; c < C; c++) out[c] = c < used ? down(exp(up(in[c]) - largest) / total) : down(A(0));
}
