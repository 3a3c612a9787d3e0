/* optiml
[[launch]]
kernel = "rmsnorm"
grid = ["ceil_div(R, BLOCK)"]
block = ["BLOCK"]
args = ["x", "weight", "y", "R", "C"]
[params]
BLOCK = 128
*/
//@ types

// Wrong: normalises the input where it lies and copies it, so the caller's data are gone.
extern "C" __global__ void rmsnorm(T* x, const T* weight, T* y, int R, int C)
{
    int row = blockIdx.x * BLOCK + threadIdx.x;
    if (row >= R) return;
    T* in = x + (long long)row * C;
    A squares = 0;
    for (int c = 0; c < C; c++) squares += up(in[c]) * up(in[c]);
    A scale = A(1) / sqrt(squares / C + A(1e-6));
    for (int c = 0; c < C; c++) {
        T result = down(up(in[c]) * scale * up(weight[c]));
        in[c] = result;
        y[(long long)row * C + c] = result;
    }
}
