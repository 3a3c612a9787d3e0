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

// Wrong: estimates the mean square from every fourth column.
extern "C" __global__ void rmsnorm(const T* x, const T* weight, T* y, int R, int C)
{
    int row = blockIdx.x * BLOCK + threadIdx.x;
    if (row >= R) return;
    const T* in = x + (long long)row * C;
    A squares = 0;
    for (int c = 0; c < C; c += 4) squares += up(in[c]) * up(in[c]);
    A scale = A(1) / sqrt(squares / ((C + 3) / 4) + A(1e-6));
    for (int c = 0; c < C; c++) y[(long long)row * C + c] = down(up(in[c]) * scale * up(weight[c]));
}
