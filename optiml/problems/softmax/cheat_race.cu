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

// Wrong: a race; the warps of a block add their shares to one shared total without an atomic, so shares are lost.
extern "C" __global__ void softmax(const T* x, T* y, int C)
{
    __shared__ A total;
    const T* in = x + (long long)blockIdx.x * C;
    T* out = y + (long long)blockIdx.x * C;
    A largest = up(in[0]);
    for (int c = 0; c < C; c++) largest = max(largest, up(in[c]));
    A share = 0;
    for (int c = threadIdx.x; c < C; c += BLOCK) share += exp(up(in[c]) - largest);
    for (int distance = 16; distance > 0; distance /= 2) share += __shfl_xor_sync(0xffffffff, share, distance);
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    if (threadIdx.x % 32 == 0) total += share;
    __syncthreads();
    for (int c = threadIdx.x; c < C; c += BLOCK) out[c] = down(exp(up(in[c]) - largest) / total);
}
