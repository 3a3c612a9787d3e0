/* optiml
[[launch]]
kernel = "relu"
grid = ["ceil_div(n, BLOCK * ITEMS)"]
block = ["BLOCK"]
args = ["x", "y", "n"]
[params]
BLOCK = 256
ITEMS = 4
[tunables]
BLOCK = [128, 256, 512]
ITEMS = [2, 4, 8]
[strategy]
title = "several elements per thread, a block apart"
rationale = """
All loads of a thread start before its first store, and the index arithmetic is shared by its elements; \
unlike wide loads this holds at any alignment."""
moves = [
    "smsp__inst_executed.sum",
]
dtypes = ["float32", "float16", "bfloat16", "float64", "int32"]
requires = []
*/
//@ types

// Written so that a NaN stays one.
__device__ __forceinline__ A rectified(A v) { return v < A(0) ? A(0) : v; }

extern "C" __global__ void __launch_bounds__(BLOCK) relu(
    const T* __restrict__ x, T* __restrict__ y, int n)
{
    const int first = blockIdx.x * (BLOCK * ITEMS) + threadIdx.x;
    if (n - first > BLOCK * (ITEMS - 1)) {  // every element of this thread exists
        T x_kept[ITEMS];
#pragma unroll
        for (int k = 0; k < ITEMS; ++k) {
            x_kept[k] = x[first + k * BLOCK];
        }
#pragma unroll
        for (int k = 0; k < ITEMS; ++k) y[first + k * BLOCK] = down(rectified(up(x_kept[k])));
        return;
    }
    for (int i = first; i < n; i += BLOCK) y[i] = down(rectified(up(x[i])));
}
