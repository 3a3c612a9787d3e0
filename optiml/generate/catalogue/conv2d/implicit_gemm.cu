/* optiml
[[launch]]
kernel = "conv2d"
grid = ["ceil_div(N*((H + 2*padding - R)//stride + 1)*((W + 2*padding - S)//stride + 1), 64)", "ceil_div(K, 64)"]
block = [256]
args = [
    "x", "w", "y", "N", "C", "H", "W", "K", "R", "S", "(H + 2*padding - R)//stride + 1",
    "(W + 2*padding - S)//stride + 1", "stride", "padding",
]
[params]
DEPTH = 16
[tunables]
DEPTH = [8, 16, 32]
[strategy]
title = "implicit matrix product, 4 channels x 4 pixels per thread"
rationale = "For each tap the layer is a product of weights [K, C] and shifted pixels [C, N*P*Q]; tiles of both in shared memory and 16 sums in registers give each value read four uses, and edges are tested once per tap and pixel, not per channel."
moves = ["l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum", "smsp__inst_executed.sum", "smsp__thread_inst_executed.sum"]
dtypes = ["float32", "float16", "bfloat16", "float64"]
requires = []
*/
//@ types

constexpr int THREADS = 256;  // 16 x 16, each with 4 channels x 4 pixels
constexpr int TILE = 64;      // output channels and pixels per block
constexpr int PAD = 4;        // spreads the transposed stores over the banks and keeps rows aligned for Quad

struct alignas(4 * sizeof(A)) Quad {
    A v[4];
};

extern "C" __global__ void __launch_bounds__(THREADS)
conv2d(const T* __restrict__ x, const T* __restrict__ w, T* __restrict__ y, int N, int C, int H, int W, int K, int R, int S,
       int P, int Q, int stride, int padding) {
    __shared__ alignas(32) A w_tile[DEPTH][TILE + PAD];  // [input channel][output channel]
    __shared__ alignas(32) A x_tile[DEPTH][TILE];        // [input channel][pixel]
    int thread = threadIdx.x;
    int u = thread % 16, v = thread / 16;
    int first_k = blockIdx.y * TILE;
    int pixels = P * Q, plane = H * W;
    long long all_pixels = (long long)N * pixels;
    long long first_pixel = (long long)blockIdx.x * TILE;

    // The pixel that this thread loads, in every step.
    int lane = thread % TILE;
    long long pixel = first_pixel + lane;
    bool pixel_exists = pixel < all_pixels;
    int position = int(pixel % pixels);
    const T* image = x + pixel / pixels * C * plane;
    int first_row = position / Q * stride - padding, first_column = position % Q * stride - padding;
    A sum[4][4] = {};

    auto multiply = [&](int c) {
        Quad left = *reinterpret_cast<Quad*>(&w_tile[c][4 * v]);
        Quad right = *reinterpret_cast<Quad*>(&x_tile[c][4 * u]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) sum[i][j] += left.v[i] * right.v[j];
        }
    };

    for (int tap = 0; tap < R * S; ++tap) {
        int row = first_row + tap / S, column = first_column + tap % S;
        bool inside = pixel_exists && row >= 0 && row < H && column >= 0 && column < W;
        const T* from = image + (long long)row * W + column;
        for (int start = 0; start < C; start += DEPTH) {
            int depth = min(DEPTH, C - start);
            for (int c = thread / TILE; c < depth; c += THREADS / TILE) {
                x_tile[c][lane] = inside ? up(from[(long long)(start + c) * plane]) : A(0);
            }
            for (int i = thread; i < DEPTH * TILE; i += THREADS) {
                int c = i % DEPTH, k = i / DEPTH;
                bool exists = first_k + k < K && c < depth;
                long long filter = (long long)(first_k + k) * C + start + c;
                w_tile[c][k] = exists ? up(w[filter * R * S + tap]) : A(0);
            }
            __syncthreads();
            if (depth == DEPTH) {
#pragma unroll
                for (int c = 0; c < DEPTH; ++c) multiply(c);
            } else {  // the last channels, or an image of few
                for (int c = 0; c < depth; ++c) multiply(c);
            }
            __syncthreads();
        }
    }

#pragma unroll
    for (int j = 0; j < 4; ++j) {
        long long to = first_pixel + 4 * u + j;
        if (to >= all_pixels) continue;
        long long n = to / pixels, offset = to % pixels;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int k = first_k + 4 * v + i;
            if (k < K) y[(n * K + k) * pixels + offset] = down(sum[i][j]);
        }
    }
}
