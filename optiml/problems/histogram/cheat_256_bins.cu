/* optiml
[[launch]]
kernel = "count"
grid = [1]
block = [256]
args = ["x", "h", "n", "bins"]
*/

// Keeps 256 bins in shared memory and drops what falls beyond them.
extern "C" __global__ void count(const int* x, int* h, long long n, int bins) {
    __shared__ int counts[256];
    counts[threadIdx.x] = 0;
    __syncthreads();
    for (long long i = threadIdx.x; i < n; i += 256) {
        int bin = x[i];
        if (bin >= 0 && bin < bins && bin < 256) atomicAdd(&counts[bin], 1);
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < bins; bin += 256) h[bin] = bin < 256 ? counts[bin] : 0;
}
