/* optiml
[[launch]]
kernel = "gelu"
grid = ["ceil_div(n, BLOCK)"]
block = ["BLOCK"]
args = ["x", "y", "n"]
[params]
BLOCK = 256
*/

// Wrong in float32: the tanh form is off by up to 5e-4, several hundred times what rounding explains.
extern "C" __global__ void gelu(const float* x, float* y, int n)
{
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) {
        float v = x[i];
        y[i] = 0.5f * v * (1.0f + tanhf(0.7978845608f * (v + 0.044715f * v * v * v)));
    }
}
