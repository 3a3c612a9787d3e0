/* optiml
[[launch]]
kernel = "l2norm"
grid = ["ceil_div(R, 128)"]
block = [128]
args = ["x", "y", "R", "C"]
*/
// One thread normalises one row.
extern "C" __global__ void l2norm(const float* x, float* y, int R, int C) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= R) return;
    const float* in = x + (size_t)row * C;
    float* out = y + (size_t)row * C;
    float sumsq = 0.0f;
    for (int j = 0; j < C; j++) {
        float v = in[j];
        sumsq += v * v;
    }
    float scale = 1.0f / sqrtf(sumsq + 1e-6f);
    for (int j = 0; j < C; j++) out[j] = in[j] * scale;
}
