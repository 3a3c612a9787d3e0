/* optiml
[[launch]]
kernel = "max_pool3d"
grid = ["ceil_div(N*C*((D+2*padding-window)//stride+1)*((H+2*padding-window)//stride+1)*((W+2*padding-window)//stride+1), BLOCK)"]
block = ["BLOCK"]
args = [
    "x", "y", "N*C", "D", "H", "W", "(D+2*padding-window)//stride+1", "(H+2*padding-window)//stride+1",
    "(W+2*padding-window)//stride+1", "window", "stride", "padding",
]
[params]
BLOCK = 256
[tunables]
BLOCK = [64, 128, 256, 512]
*/
//@ types

// One thread per output; every tap is tested against the edges. A NaN in the window is the answer, as in numpy.
extern "C" __global__ void max_pool3d(const T* x, T* y, int planes, int D, int H, int W, int out_d, int out_h, int out_w,
                                      int window, int stride, int padding) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (long long)planes * out_d * out_h * out_w) return;
    int ow = i % out_w;
    int oh = i / out_w % out_h;
    int od = i / out_w / out_h % out_d;
    long long plane = i / out_w / out_h / out_d;
    A best = -INFINITY;
    for (int a = 0; a < window; ++a) {
        for (int b = 0; b < window; ++b) {
            for (int c = 0; c < window; ++c) {
                int d = od * stride - padding + a;
                int h = oh * stride - padding + b;
                int w = ow * stride - padding + c;
                if (d >= 0 && d < D && h >= 0 && h < H && w >= 0 && w < W) {
                    A value = up(x[((plane * D + d) * H + h) * W + w]);
                    if (value > best || value != value) best = value;
                }
            }
        }
    }
    y[i] = down(best);
}
