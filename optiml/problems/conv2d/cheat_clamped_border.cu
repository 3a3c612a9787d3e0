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
//@ types

// Repeats the border pixels where the padding should be zero.
extern "C" __global__ void conv2d(const T* x, const T* w, T* y, int N, int C, int H, int W, int K, int R, int S, int P, int Q,
                                  int stride, int padding) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (long long)N * K * P * Q) return;
    int q = i % Q;
    int p = i / Q % P;
    int k = i / Q / P % K;
    long long n = i / Q / P / K;
    A sum = 0;
    for (int c = 0; c < C; ++c) {
        for (int r = 0; r < R; ++r) {
            for (int s = 0; s < S; ++s) {
                int row = min(max(p * stride - padding + r, 0), H - 1);
                int column = min(max(q * stride - padding + s, 0), W - 1);
                A value = up(x[((n * C + c) * H + row) * W + column]);
                sum += value * up(w[(((long long)k * C + c) * R + r) * S + s]);
            }
        }
    }
    y[i] = down(sum);
}
