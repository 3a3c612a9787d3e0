/* optiml
[[launch]]
kernel = "transpose"
grid = ["ceil_div(C, 16)", "ceil_div(R, 16)"]
block = [16, 16]
args = ["x", "y", "R", "C"]
*/
//@ types

// Gives the output the row length of the input: right only for square matrices.
extern "C" __global__ void transpose(const T* x, T* y, int R, int C) {
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    int row = blockIdx.y * blockDim.y + threadIdx.y;
    if (row >= R || column >= C) return;
    long long to = ((long long)column * C + row) % ((long long)R * C);
    y[to] = x[(long long)row * C + column];
}
