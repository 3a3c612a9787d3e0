/* optiml
[[launch]]
kernel = "conv2d"
grid = ["ceil_div((W + 2*padding - S)//stride + 1, 32)*ceil_div((H + 2*padding - R)//stride + 1, TILE_Y)", "ceil_div(K, CHANNELS)", "N"]
block = [32, "TILE_Y"]
shared_bytes = "4*(CHANNELS*R*S + ((TILE_Y - 1)*stride + R)*(31*stride + S))"
args = [
    "x", "w", "y", "C", "H", "W", "K", "R", "S", "(H + 2*padding - R)//stride + 1", "(W + 2*padding - S)//stride + 1",
    "stride", "padding",
]
[params]
TILE_Y = 8
CHANNELS = 8
[tunables]
TILE_Y = [4, 8, 16]
CHANNELS = [4, 8, 16]
[strategy]
title = "input patch and weights in shared memory, several output channels per thread"
rationale = "Overlapping windows read one patch from shared memory: an input element is loaded from global memory once per block instead of R * S times, and its edge test happens once, at the load."
moves = ["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum", "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum", "smsp__thread_inst_executed.sum"]
dtypes = ["float32", "float16", "bfloat16"]
requires = []
*/
//@ types

constexpr int TILE_X = 32;
constexpr int THREADS = TILE_X * TILE_Y;

struct alignas(16) Four {
    float v[4];
};

extern "C" __global__ void __launch_bounds__(THREADS)
conv2d(const T* __restrict__ x, const T* __restrict__ w, T* __restrict__ y, int C, int H, int W, int K, int R, int S,
       int P, int Q, int stride, int padding) {
    extern __shared__ __align__(16) float shared[];
    float* weights = shared;                       // [R * S][CHANNELS]
    float* patch = shared + CHANNELS * R * S;      // [height][width]
    int height = (TILE_Y - 1) * stride + R, width = (TILE_X - 1) * stride + S;
    int tiles_x = (Q + TILE_X - 1) / TILE_X;
    int first_q = blockIdx.x % tiles_x * TILE_X, first_p = blockIdx.x / tiles_x * TILE_Y;
    int first_k = blockIdx.y * CHANNELS, n = blockIdx.z;
    int first_row = first_p * stride - padding, first_column = first_q * stride - padding;
    int thread = threadIdx.y * TILE_X + threadIdx.x;
    float sum[CHANNELS] = {};

    for (int c = 0; c < C; ++c) {
        const T* plane = x + ((long long)n * C + c) * H * W;
        for (int v = threadIdx.y; v < height; v += TILE_Y) {
            int row = first_row + v;
            for (int u = threadIdx.x; u < width; u += TILE_X) {
                int column = first_column + u;
                bool inside = row >= 0 && row < H && column >= 0 && column < W;
                patch[v * width + u] = inside ? up(plane[(long long)row * W + column]) : 0.f;
            }
        }
        for (int i = thread; i < R * S * CHANNELS; i += THREADS) {
            int channel = i / (R * S), tap = i % (R * S);
            const T* filter = w + ((long long)(first_k + channel) * C + c) * R * S;
            weights[tap * CHANNELS + channel] = first_k + channel < K ? up(filter[tap]) : 0.f;
        }
        __syncthreads();
        const float* corner = patch + threadIdx.y * stride * width + threadIdx.x * stride;
        const float* weight = weights;
        for (int r = 0; r < R; ++r) {
            for (int s = 0; s < S; ++s, weight += CHANNELS) {
                float value = corner[r * width + s];
#pragma unroll
                for (int k = 0; k < CHANNELS; k += 4) {
                    Four four = *reinterpret_cast<const Four*>(weight + k);
#pragma unroll
                    for (int i = 0; i < 4; ++i) sum[k + i] += value * four.v[i];
                }
            }
        }
        __syncthreads();
    }

    int p = first_p + threadIdx.y, q = first_q + threadIdx.x;
    if (p >= P || q >= Q) return;
#pragma unroll
    for (int k = 0; k < CHANNELS; ++k) {
        if (first_k + k < K) y[(((long long)n * K + first_k + k) * P + p) * Q + q] = down(sum[k]);
    }
}
