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
BLOCK_Y = 4
[tunables]
BLOCK_X = [16, 32, 64]
BLOCK_Y = [2, 4, 8]
[strategy]
title = "unrolled code for windows of 2 and 3"
rationale = "A window size known at compile time turns the three loops into straight code without counters or branches, whose loads do not wait for each other; positions outside are moved to the nearest one inside the window, which leaves the maximum as it is."
moves = ["smsp__inst_executed.sum", "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"]
dtypes = ["float32", "float16", "bfloat16", "float64"]
requires = []
*/
//@ types

__device__ __forceinline__ A larger(A best, A value) {
    return value > best || value != value ? value : best;  // a NaN stays
}

// The position of a tap, moved into the array; it stays inside the window, which always overlaps the array.
__device__ __forceinline__ int clipped(int position, int size) {
    return min(max(position, 0), size - 1);
}

template <int WINDOW>
__device__ __forceinline__ A window_max(const T* __restrict__ volume, int d0, int h0, int w0, int D, int H, int W) {
    int columns[WINDOW];
#pragma unroll
    for (int w = 0; w < WINDOW; ++w) columns[w] = clipped(w0 + w, W);
    A best = -INFINITY;
#pragma unroll
    for (int d = 0; d < WINDOW; ++d) {
        const T* plane = volume + (long long)clipped(d0 + d, D) * H * W;
#pragma unroll
        for (int h = 0; h < WINDOW; ++h) {
            const T* row = plane + (long long)clipped(h0 + h, H) * W;
#pragma unroll
            for (int w = 0; w < WINDOW; ++w) best = larger(best, up(row[columns[w]]));
        }
    }
    return best;
}

extern "C" __global__ void __launch_bounds__(BLOCK_X * BLOCK_Y)
max_pool3d(const T* __restrict__ x, T* __restrict__ y, int D, int H, int W, int out_d, int out_h, int out_w,
           int window, int stride, int padding) {
    int ow = blockIdx.z * BLOCK_X + threadIdx.x;
    int oh = blockIdx.y * BLOCK_Y + threadIdx.y;
    if (ow >= out_w || oh >= out_h) return;
    int plane = blockIdx.x / out_d, od = blockIdx.x % out_d;
    int d0 = od * stride - padding, h0 = oh * stride - padding, w0 = ow * stride - padding;
    const T* volume = x + (long long)plane * D * H * W;
    A best = -INFINITY;
    if (window == 2) {
        best = window_max<2>(volume, d0, h0, w0, D, H, W);
    } else if (window == 3) {
        best = window_max<3>(volume, d0, h0, w0, D, H, W);
    } else {
        for (int d = max(d0, 0); d < min(d0 + window, D); ++d) {
            for (int h = max(h0, 0); h < min(h0 + window, H); ++h) {
                const T* row = volume + ((long long)d * H + h) * W;
                for (int w = max(w0, 0); w < min(w0 + window, W); ++w) best = larger(best, up(row[w]));
            }
        }
    }
    y[((long long)blockIdx.x * out_h + oh) * out_w + ow] = down(best);
}
