/* optiml
[[launch]]
kernel = "conv2d"
grid = ["N*ceil_div(((H + 2*padding - R)//stride + 1)*((W + 2*padding - S)//stride + 1), BLOCK)", "ceil_div(K, CHANNELS)"]
block = ["BLOCK"]
args = [
    "x", "w", "y", "C", "H", "W", "K", "R", "S", "(H + 2*padding - R)//stride + 1", "(W + 2*padding - S)//stride + 1",
    "stride", "padding",
]
[params]
BLOCK = 128
CHANNELS = 16
[tunables]
BLOCK = [64, 128, 256]
CHANNELS = [4, 8, 16]
[strategy]
title = "several output channels per thread, weights in shared memory"
rationale = "Each input element is loaded and tested against the edges once for CHANNELS output channels, and a block reads its weights once instead of once per pixel, so global loads per multiply-add fall by about 2 * CHANNELS."
moves = ["l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum", "smsp__inst_executed.sum"]
dtypes = ["float32", "float16", "bfloat16", "float64"]
requires = []
*/
//@ types

constexpr int TAPS = 64;  // weights per output channel held at a time

extern "C" __global__ void __launch_bounds__(BLOCK)
conv2d(const T* __restrict__ x, const T* __restrict__ w, T* __restrict__ y, int C, int H, int W, int K, int R, int S,
       int P, int Q, int stride, int padding) {
    __shared__ alignas(16) A weights[TAPS][CHANNELS];
    int pixels = P * Q, tiles = (pixels + BLOCK - 1) / BLOCK;
    int n = blockIdx.x / tiles, pixel = blockIdx.x % tiles * BLOCK + threadIdx.x;
    int first_k = blockIdx.y * CHANNELS;
    int first_row = pixel / Q * stride - padding, first_column = pixel % Q * stride - padding;
    const T* image = x + (long long)n * C * H * W;
    int taps = C * R * S;
    int r = 0, s = 0;
    A sum[CHANNELS] = {};

    for (int start = 0; start < taps; start += TAPS) {
        int count = min(TAPS, taps - start);
        __syncthreads();  // the weights of the step before have been used
        for (int i = threadIdx.x; i < TAPS * CHANNELS; i += BLOCK) {
            int tap = i % TAPS, channel = i / TAPS;
            bool exists = tap < count && first_k + channel < K;
            weights[tap][channel] = exists ? up(w[(long long)(first_k + channel) * taps + start + tap]) : A(0);
        }
        __syncthreads();
        if (pixel >= pixels) continue;
        for (int tap = 0; tap < count; ++tap) {
            int row = first_row + r, column = first_column + s;
            A value = row >= 0 && row < H && column >= 0 && column < W ? up(image[(long long)row * W + column]) : A(0);
#pragma unroll
            for (int k = 0; k < CHANNELS; ++k) sum[k] += value * weights[tap][k];
            if (++s == S) {
                s = 0;
                if (++r == R) {
                    r = 0;
                    image += (long long)H * W;
                }
            }
        }
    }
    if (pixel >= pixels) return;
#pragma unroll
    for (int k = 0; k < CHANNELS; ++k) {
        if (first_k + k < K) y[((long long)n * K + first_k + k) * pixels + pixel] = down(sum[k]);
    }
}
