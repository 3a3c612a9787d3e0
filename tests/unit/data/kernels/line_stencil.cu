/* optiml
[[launch]]
kernel = "blur"
grid = ["ceil_div(H, BLOCK)", "W"]
block = ["BLOCK"]
args = ["img", "out", "H", "W"]
[params]
BLOCK = 128
*/
extern "C" __global__ void blur(const float* img, float* out, int H, int W) {
    int y = blockIdx.x * BLOCK + threadIdx.x;
    int x = blockIdx.y;
    if (y < H) {
        float sum = 0.f;
        for (int d = -2; d <= 2; d++) {
            int yy = min(max(y + d, 0), H - 1);
            sum += img[yy * W + x];
        }
        out[y * W + x] = sum * 0.2f;
    }
}
