/* optiml
[[launch]]
kernel = "dot"
grid = [1]
block = [256]
args = ["a", "b", "out", "n"]
*/
//@ types

// Wrong: rounds the length up to whole blocks and reads past the end of both vectors.
extern "C" __global__ void dot(const T* a, const T* b, T* out, int n)
{
    __shared__ A partial[256];
    A total = 0;
    for (int first = 0; first < n; first += 256) total += up(a[first + threadIdx.x]) * up(b[first + threadIdx.x]);
    partial[threadIdx.x] = total;
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[0] = down(partial[0]);
}
