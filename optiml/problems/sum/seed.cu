/* optiml
[[launch]]
kernel = "add_blocks"
grid = ["ceil_div(n, BLOCK)"]
block = ["BLOCK"]
args = ["x", "total", "n"]
[[launch]]
kernel = "store_total"
grid = [1]
block = [1]
args = ["total", "out"]
[params]
BLOCK = 256
[tunables]
BLOCK = [64, 128, 256, 512]
[workspace.total]
dtype = "float64"
shape = [1]
init = "zero"
*/
//@ types

// One thread per element; each block adds its elements in shared memory and then adds the result to the total.
extern "C" __global__ void add_blocks(const T* x, double* total, int n)
{
    __shared__ A partial[BLOCK];
    int i = blockIdx.x * BLOCK + threadIdx.x;
    partial[threadIdx.x] = i < n ? up(x[i]) : A(0);
    __syncthreads();
    for (int step = 1; step < BLOCK; step *= 2) {
        if (threadIdx.x % (2 * step) == 0 && threadIdx.x + step < BLOCK) {
            partial[threadIdx.x] += partial[threadIdx.x + step];
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) atomicAdd(total, (double)partial[0]);
}

extern "C" __global__ void store_total(const double* total, T* out)
{
    out[0] = down((A)total[0]);
}
