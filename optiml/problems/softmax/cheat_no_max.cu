/* optiml
[[launch]]
kernel = "softmax"
grid = ["R"]
block = ["BLOCK"]
args = ["x", "y", "C"]
[params]
BLOCK = 256
*/
//@ types

// Wrong: saves the pass for the largest element and overflows as soon as a row holds a large one.
extern "C" __global__ void softmax(const T* x, T* y, int C)
{
    __shared__ A partial[BLOCK];
    const T* in = x + (long long)blockIdx.x * C;
    T* out = y + (long long)blockIdx.x * C;
    A total = 0;
    for (int c = threadIdx.x; c < C; c += BLOCK) total += exp(up(in[c]));
    partial[threadIdx.x] = total;
    __syncthreads();
    for (int half = BLOCK / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
        __syncthreads();
    }
    for (int c = threadIdx.x; c < C; c += BLOCK) out[c] = down(exp(up(in[c])) / partial[0]);
}
