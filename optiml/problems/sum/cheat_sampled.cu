/* optiml
[[launch]]
kernel = "sum"
grid = [1]
block = [256]
args = ["x", "out", "n"]
*/
//@ types

// Wrong: adds every second element and doubles the result.
extern "C" __global__ void sum(const T* x, T* out, int n)
{
    __shared__ A partial[256];
    A total = 0;
    for (long long i = 2 * threadIdx.x; i < n; i += 512) total += up(x[i]);
    partial[threadIdx.x] = total;
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[0] = down(A(2) * partial[0]);
}
