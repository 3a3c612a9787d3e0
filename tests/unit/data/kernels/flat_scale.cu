/* optiml
[[launch]]
kernel = "scale_columns"
grid = ["ceil_div(R * C, 256)"]
block = [256]
args = ["x", "s", "y", "R", "C"]
*/
extern "C" __global__ void scale_columns(const float* x, const float* s, float* y, int R, int C) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= R * C) return;
    int r = t % R;   // rows change fastest
    int c = t / R;
    y[r * C + c] = x[r * C + c] * s[c];
}
