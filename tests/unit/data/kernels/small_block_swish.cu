/* optiml
[[launch]]
kernel = "gated"
grid = ["ceil_div(n, 32)"]
block = [32]
args = ["gate", "value", "out", "n"]
*/
extern "C" __global__ void gated(const float* gate, const float* value, float* out, int n) {
    int idx = blockIdx.x * blockDim.x + threadIdx.x;
    if (idx < n) {
        float g = gate[idx];
        out[idx] = g / (1.0f + expf(-g)) * value[idx];
    }
}
