/* optiml
[[launch]]
kernel = "max_pool3d"
grid = ["N*C*((D+2*padding-window)//stride+1)", "ceil_div((H+2*padding-window)//stride+1, BLOCK_Y)", "ceil_div((W+2*padding-window)//stride+1, BLOCK_X)"]
block = ["BLOCK_X", "BLOCK_Y"]
args = [
    "x", "y", "D", "H", "W", "(D+2*padding-window)//stride+1", "(H+2*padding-window)//stride+1",
    "(W+2*padding-window)//stride+1", "window", "stride", "padding",
]
[params]
BLOCK_X = 32
BLOCK_Y = 8
[tunables]
BLOCK_X = [16, 32, 64]
BLOCK_Y = [2, 4, 8]
[strategy]
title = "3-D grid, windows clipped once"
rationale = "The grid gives the output position, so a thread makes one division instead of seven, and clipping the window once removes six comparisons from each tap."
moves = ["smsp__inst_executed.sum", "smsp__thread_inst_executed.sum"]
dtypes = ["float32", "float16", "bfloat16", "float64"]
requires = []
*/
//@ types

extern "C" __global__ void __launch_bounds__(BLOCK_X * BLOCK_Y)
max_pool3d(const T* __restrict__ x, T* __restrict__ y, int D, int H, int W, int out_d, int out_h, int out_w,
           int window, int stride, int padding) {
    int ow = blockIdx.z * BLOCK_X + threadIdx.x;
    int oh = blockIdx.y * BLOCK_Y + threadIdx.y;
    if (ow >= out_w || oh >= out_h) return;
    int plane = blockIdx.x / out_d, od = blockIdx.x % out_d;
    int d0 = od * stride - padding, h0 = oh * stride - padding, w0 = ow * stride - padding;
    int d_end = min(d0 + window, D), h_end = min(h0 + window, H), w_end = min(w0 + window, W);
    d0 = max(d0, 0);
    h0 = max(h0, 0);
    w0 = max(w0, 0);
    A best = -INFINITY;
    for (int d = d0; d < d_end; ++d) {
        for (int h = h0; h < h_end; ++h) {
            const T* row = x + (((long long)plane * D + d) * H + h) * W;
            for (int w = w0; w < w_end; ++w) {
                A value = up(row[w]);
                if (value > best || value != value) best = value;  // a NaN stays
            }
        }
    }
    y[((long long)blockIdx.x * out_h + oh) * out_w + ow] = down(best);
}
