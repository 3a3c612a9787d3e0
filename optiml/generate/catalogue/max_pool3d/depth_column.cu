/* optiml
[[launch]]
kernel = "max_pool3d"
grid = ["N*C*ceil_div((D+2*padding-window)//stride+1, DEPTH)", "ceil_div((H+2*padding-window)//stride+1, BLOCK_Y)", "ceil_div((W+2*padding-window)//stride+1, BLOCK_X)"]
block = ["BLOCK_X", "BLOCK_Y"]
args = [
    "x", "y", "D", "H", "W", "(D+2*padding-window)//stride+1", "(H+2*padding-window)//stride+1",
    "(W+2*padding-window)//stride+1", "window", "stride", "padding",
]
[params]
BLOCK_X = 32
BLOCK_Y = 4
DEPTH = 4
[tunables]
BLOCK_X = [16, 32]
BLOCK_Y = [2, 4, 8]
DEPTH = [2, 4, 8]
[strategy]
title = "DEPTH outputs per thread share the maxima of planes"
rationale = "The maximum of a box is the maximum over its planes, and boxes that follow each other in depth share planes: a thread walks down a column and reads (DEPTH - 1) * stride + window planes in place of DEPTH * window."
moves = ["l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum", "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum", "smsp__inst_executed.sum"]
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
__device__ __forceinline__ A square_max(const T* __restrict__ plane, int h0, int w0, int H, int W) {
    A best = -INFINITY;
#pragma unroll
    for (int h = 0; h < WINDOW; ++h) {
        const T* row = plane + (long long)clipped(h0 + h, H) * W;
#pragma unroll
        for (int w = 0; w < WINDOW; ++w) best = larger(best, up(row[clipped(w0 + w, W)]));
    }
    return best;
}

extern "C" __global__ void __launch_bounds__(BLOCK_X * BLOCK_Y)
max_pool3d(const T* __restrict__ x, T* __restrict__ y, int D, int H, int W, int out_d, int out_h, int out_w,
           int window, int stride, int padding) {
    int ow = blockIdx.z * BLOCK_X + threadIdx.x;
    int oh = blockIdx.y * BLOCK_Y + threadIdx.y;
    if (ow >= out_w || oh >= out_h) return;
    int columns = (out_d + DEPTH - 1) / DEPTH;
    int plane = blockIdx.x / columns, first_od = blockIdx.x % columns * DEPTH;
    int last_od = min(first_od + DEPTH, out_d) - 1;
    int h0 = oh * stride - padding, w0 = ow * stride - padding;
    const T* volume = x + (long long)plane * D * H * W;
    A best[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) best[i] = -INFINITY;

    int end = min(last_od * stride - padding + window, D);
    for (int d = max(first_od * stride - padding, 0); d < end; ++d) {
        if (stride > window && (d + padding) % stride >= window) continue;  // between two boxes
        const T* at = volume + (long long)d * H * W;
        A square = -INFINITY;
        if (window == 2) {
            square = square_max<2>(at, h0, w0, H, W);
        } else if (window == 3) {
            square = square_max<3>(at, h0, w0, H, W);
        } else {
            for (int h = max(h0, 0); h < min(h0 + window, H); ++h) {
                const T* row = at + (long long)h * W;
                for (int w = max(w0, 0); w < min(w0 + window, W); ++w) square = larger(square, up(row[w]));
            }
        }
        int into = d + padding - first_od * stride;  // planes below the top of the first box
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
            if (into >= i * stride && into - i * stride < window) best[i] = larger(best[i], square);
        }
    }
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
        int od = first_od + i;
        if (od < out_d) y[(((long long)plane * out_d + od) * out_h + oh) * out_w + ow] = down(best[i]);
    }
}
