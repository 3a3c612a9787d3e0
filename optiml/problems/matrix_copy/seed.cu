/* optiml
[[launch]]
kernel = "matrix_copy"
grid = ["ceil_div(R, BLOCK_R)", "ceil_div(C, BLOCK_C)"]
block = ["BLOCK_R", "BLOCK_C"]
args = ["x", "y", "R", "C"]
[params]
BLOCK_R = 16
BLOCK_C = 16
[tunables]
BLOCK_R = [4, 8, 16, 32]
BLOCK_C = [4, 8, 16, 32]
*/
//@ types

// One thread per element; the first index of the thread is the row, as a mathematician would write it.
extern "C" __global__ void matrix_copy(const T* x, T* y, int R, int C)
{
    int row = blockIdx.x * BLOCK_R + threadIdx.x;
    int column = blockIdx.y * BLOCK_C + threadIdx.y;
    if (row < R && column < C) {
        y[(long long)row * C + column] = x[(long long)row * C + column];
    }
}
