/* optiml
[[launch]]
kernel = "layernorm"
grid = ["R"]
block = ["BLOCK"]
args = ["x", "weight", "bias", "y", "C"]
[params]
BLOCK = 256
*/
//@ types

// Wrong: mean of squares less square of mean, which cancels where a row sits far from zero.
extern "C" __global__ void layernorm(const T* x, const T* weight, const T* bias, T* y, int C)
{
    __shared__ A sums[BLOCK];
    __shared__ A squares[BLOCK];
    const T* in = x + (long long)blockIdx.x * C;
    T* out = y + (long long)blockIdx.x * C;
    A sum = 0, square = 0;
    for (int c = threadIdx.x; c < C; c += BLOCK) {
        A v = up(in[c]);
        sum += v;
        square += v * v;
    }
    sums[threadIdx.x] = sum;
    squares[threadIdx.x] = square;
    __syncthreads();
    for (int half = BLOCK / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            sums[threadIdx.x] += sums[threadIdx.x + half];
            squares[threadIdx.x] += squares[threadIdx.x + half];
        }
        __syncthreads();
    }
    A mean = sums[0] / C;
    A scale = A(1) / sqrt(max(squares[0] / C - mean * mean, A(0)) + A(1e-5));
    for (int c = threadIdx.x; c < C; c += BLOCK)
        out[c] = down((up(in[c]) - mean) * scale * up(weight[c]) + up(bias[c]));
}
