/* optiml
[[launch]]
kernel = "clear"
grid = [1]
block = [1]
args = ["out"]
[[launch]]
kernel = "sum_squares"
grid = ["ceil_div(n, 256)"]
block = [256]
args = ["x", "out", "n"]
*/
extern "C" __global__ void clear(float* out) { out[0] = 0.0f; }
extern "C" __global__ void sum_squares(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = x[i];
    atomicAdd(out, v * v);
}
