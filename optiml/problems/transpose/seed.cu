/* optiml
[[launch]]
kernel = "transpose"
grid = ["ceil_div(R*C, BLOCK)"]
block = ["BLOCK"]
args = ["x", "y", "R", "C"]
[params]
BLOCK = 256
[tunables]
BLOCK = [128, 256, 512]
*/
//@ types

// One thread per element: neighbouring threads read one row and write down one column.
extern "C" __global__ void transpose(const T* x, T* y, int R, int C) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (long long)R * C) return;
    long long row = i / C, column = i % C;
    y[column * R + row] = x[i];
}
