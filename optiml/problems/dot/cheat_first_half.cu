/* optiml
[[launch]]
kernel = "dot"
grid = [1]
block = [256]
args = ["a", "b", "out", "n"]
*/
//@ types

// Wrong: half of the work; the second half is taken to weigh as much as the first.
extern "C" __global__ void dot(const T* a, const T* b, T* out, int n)
{
    __shared__ A partial[256];
    A total = 0;
    for (int i = threadIdx.x; i < (n + 1) / 2; i += 256) total += up(a[i]) * up(b[i]);
    partial[threadIdx.x] = total;
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[0] = down(A(2) * partial[0]);
}
