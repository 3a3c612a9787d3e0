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

// Wrong: a race; warps read one another's partial results without waiting for them.
extern "C" __global__ void softmax(const T* x, T* y, int C)
{
    __shared__ A partial[BLOCK];
    const T* in = x + (long long)blockIdx.x * C;
    T* out = y + (long long)blockIdx.x * C;
    A largest = up(in[0]);
    for (int c = threadIdx.x; c < C; c += BLOCK) largest = max(largest, up(in[c]));
    partial[threadIdx.x] = largest;
    for (int k = 0; k < BLOCK; ++k) largest = max(largest, partial[k]);
    A total = 0;
    for (int c = threadIdx.x; c < C; c += BLOCK) total += exp(up(in[c]) - largest);
    partial[threadIdx.x] = total;
    total = 0;
    for (int k = 0; k < BLOCK; ++k) total += partial[k];
    for (int c = threadIdx.x; c < C; c += BLOCK) out[c] = down(exp(up(in[c]) - largest) / total);
}
