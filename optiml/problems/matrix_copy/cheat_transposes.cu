/* optiml
[[launch]]
kernel = "matrix_copy"
grid = ["ceil_div(C, 16)", "ceil_div(R, 16)"]
block = [16, 16]
args = ["x", "y", "R", "C"]
*/
//@ types

// Wrong: writes the transpose, which is a copy only of symmetric matrices.
extern "C" __global__ void matrix_copy(const T* x, T* y, int R, int C)
{
    int column = blockIdx.x * 16 + threadIdx.x;
    int row = blockIdx.y * 16 + threadIdx.y;
    if (row < R && column < C) y[(long long)column * R + row] = x[(long long)row * C + column];
}
