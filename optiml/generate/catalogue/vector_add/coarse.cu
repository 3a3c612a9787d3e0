/* optiml
[[launch]]
kernel = "vector_add"
grid = ["ceil_div(n, BLOCK * ITEMS)"]
block = ["BLOCK"]
args = ["a", "b", "c", "n"]
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

extern "C" __global__ void __launch_bounds__(BLOCK) vector_add(
    const T* __restrict__ a, const T* __restrict__ b, T* __restrict__ c, int n)
{
    const int first = blockIdx.x * (BLOCK * ITEMS) + threadIdx.x;
    if (n - first > BLOCK * (ITEMS - 1)) {  // every element of this thread exists
        T a_kept[ITEMS];
        T b_kept[ITEMS];
#pragma unroll
        for (int k = 0; k < ITEMS; ++k) {
            a_kept[k] = a[first + k * BLOCK];
            b_kept[k] = b[first + k * BLOCK];
        }
#pragma unroll
        for (int k = 0; k < ITEMS; ++k) c[first + k * BLOCK] = down(up(a_kept[k]) + up(b_kept[k]));
        return;
    }
    for (int i = first; i < n; i += BLOCK) c[i] = down(up(a[i]) + up(b[i]));
}
