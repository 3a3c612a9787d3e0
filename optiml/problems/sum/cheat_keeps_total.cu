/* optiml
[[launch]]
kernel = "add"
grid = ["ceil_div(n, BLOCK)"]
block = ["BLOCK"]
args = ["x", "n"]
[[launch]]
kernel = "store_total"
grid = [1]
block = [1]
args = ["out"]
[params]
BLOCK = 256
*/
//@ types

// Wrong from the second run on: the total lives in the module and is never cleared.
__device__ double total = 0.0;

extern "C" __global__ void add(const T* x, int n)
{
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) atomicAdd(&total, (double)up(x[i]));
}

extern "C" __global__ void store_total(T* out)
{
    out[0] = down((A)total);
}
