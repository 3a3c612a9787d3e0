/* optiml
[[launch]]
kernel = "matrix_copy"
grid = ["ceil_div(R * C, 1024)"]
block = [256]
args = ["x", "y", "ceil_div(R * C, 4)"]
*/

// Wrong: copies four elements at a time and does not end at the last one, so up to three too many.
extern "C" __global__ void matrix_copy(const float* x, float* y, long long quads)
{
    long long i = blockIdx.x * 256LL + threadIdx.x;
    if (i < quads) {
        for (int k = 0; k < 4; ++k) y[4 * i + k] = x[4 * i + k];
    }
}
