/* optiml
[[launch]]
kernel = "matrix_copy"
grid = ["ceil_div(R, 16)", "ceil_div(R, 16)"]
block = [16, 16]
args = ["x", "y", "R"]
*/
//@ types

// Wrong: takes every matrix to be square, so other shapes are cut short or overrun.
extern "C" __global__ void matrix_copy(const T* x, T* y, int R)
{
    int column = blockIdx.x * 16 + threadIdx.x;
    int row = blockIdx.y * 16 + threadIdx.y;
    if (row < R && column < R) y[(long long)row * R + column] = x[(long long)row * R + column];
}
