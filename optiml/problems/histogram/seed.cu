/* optiml
[[launch]]
kernel = "clear"
grid = ["ceil_div(bins, 256)"]
block = [256]
args = ["h", "bins"]
[[launch]]
kernel = "count"
grid = ["ceil_div(n, BLOCK)"]
block = ["BLOCK"]
args = ["x", "h", "n", "bins"]
[params]
BLOCK = 256
[tunables]
BLOCK = [128, 256, 512, 1024]
*/

extern "C" __global__ void clear(int* h, int bins) {
    int bin = blockIdx.x * blockDim.x + threadIdx.x;
    if (bin < bins) h[bin] = 0;
}

// One thread and one global atomic per element.
extern "C" __global__ void count(const int* x, int* h, long long n, int bins) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int bin = x[i];
    if (bin >= 0 && bin < bins) atomicAdd(&h[bin], 1);
}
