/* optiml
[[launch]]
kernel = "max_pool3d"
grid = ["N*C*((D+2*padding-window)//stride+1)", "ceil_div((H+2*padding-window)//stride+1, TILE_Y)", "ceil_div((W+2*padding-window)//stride+1, 32)"]
block = ["THREADS"]
args = [
    "x", "y", "D", "H", "W", "(D+2*padding-window)//stride+1", "(H+2*padding-window)//stride+1",
    "(W+2*padding-window)//stride+1", "window", "stride", "padding",
]
[params]
TILE_Y = 8
THREADS = 256
[tunables]
TILE_Y = [4, 8, 16]
THREADS = [128, 256]
[strategy]
title = "maximum along depth, width and height in turn, in shared memory"
rationale = "The maximum of a box is a maximum of maxima: each input column under the tile is read once per plane by neighbouring threads, and overlapping windows share the partial maxima, about 3 reads per output and axis in place of window^3."
moves = ["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum", "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"]
dtypes = ["float32", "float16", "bfloat16", "float64"]
requires = []
*/
//@ types

constexpr int TILE_X = 32;
constexpr int PATCH = 12288 / ELEMENT_BYTES;  // elements of the input patch that fit: 12 KiB
constexpr int STRIP = 8192 / ELEMENT_BYTES;   // elements of its row maxima that fit: 8 KiB

__device__ __forceinline__ A larger(A best, A value) {
    return value > best || value != value ? value : best;  // a NaN stays
}

extern "C" __global__ void __launch_bounds__(THREADS)
max_pool3d(const T* __restrict__ x, T* __restrict__ y, int D, int H, int W, int out_d, int out_h, int out_w,
           int window, int stride, int padding) {
    __shared__ T patch[PATCH];  // [rows][columns]: maxima along depth
    __shared__ T strip[STRIP];  // [rows][TILE_X]: maxima along depth and width
    int first_w = blockIdx.z * TILE_X, first_h = blockIdx.y * TILE_Y;
    int plane = blockIdx.x / out_d, od = blockIdx.x % out_d;
    int d0 = od * stride - padding, h0 = first_h * stride - padding, w0 = first_w * stride - padding;
    int d_begin = max(d0, 0), d_end = min(d0 + window, D);
    long long plane_size = (long long)H * W;
    const T* volume = x + plane * D * plane_size;
    T* result = y + ((long long)blockIdx.x * out_h + first_h) * out_w + first_w;
    int tile_w = min(TILE_X, out_w - first_w), tile_h = min(TILE_Y, out_h - first_h);
    // 64 bits: a huge stride must not wrap round into a size that seems to fit.
    long long columns = (long long)(tile_w - 1) * stride + window, rows = (long long)(tile_h - 1) * stride + window;

    if (columns <= PATCH && rows * columns <= PATCH && rows * TILE_X <= STRIP) {
        int width = int(columns), height = int(rows);
        for (int i = threadIdx.x; i < height * width; i += THREADS) {
            int h = h0 + i / width, w = w0 + i % width;
            A best = -INFINITY;
            if (h >= 0 && h < H && w >= 0 && w < W) {
                const T* column = volume + (long long)h * W + w;
                for (int d = d_begin; d < d_end; ++d) best = larger(best, up(column[d * plane_size]));
            }
            patch[i] = down(best);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < height * TILE_X; i += THREADS) {
            int u = i % TILE_X;
            if (u >= tile_w) continue;
            const T* from = patch + i / TILE_X * width + u * stride;
            A best = -INFINITY;
            for (int w = 0; w < window; ++w) best = larger(best, up(from[w]));
            strip[i] = down(best);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < TILE_Y * TILE_X; i += THREADS) {
            int u = i % TILE_X, v = i / TILE_X;
            if (u >= tile_w || v >= tile_h) continue;
            A best = -INFINITY;
            for (int h = 0; h < window; ++h) best = larger(best, up(strip[(v * stride + h) * TILE_X + u]));
            result[(long long)v * out_w + u] = down(best);
        }
    } else {  // large window or stride: read the taps directly
        for (int i = threadIdx.x; i < TILE_Y * TILE_X; i += THREADS) {
            int u = i % TILE_X, v = i / TILE_X;
            if (u >= tile_w || v >= tile_h) continue;
            int h = h0 + v * stride, w = w0 + u * stride;
            A best = -INFINITY;
            for (int d = d_begin; d < d_end; ++d) {
                for (int b = max(h, 0); b < min(h + window, H); ++b) {
                    const T* row = volume + d * plane_size + (long long)b * W;
                    for (int c = max(w, 0); c < min(w + window, W); ++c) best = larger(best, up(row[c]));
                }
            }
            result[(long long)v * out_w + u] = down(best);
        }
    }
}
