/* optiml
[[launch]]
kernel = "cross_entropy"
grid = ["ceil_div(R, ROWS)"]
block = ["32 * ROWS"]
args = ["x", "labels", "loss", "R", "C"]
[params]
ROWS = 4
[tunables]
ROWS = [1, 2, 4, 8]
[strategy]
title = "one warp per row, largest and sum in one pass, shuffles"
rationale = """
Lanes read neighbouring columns, so a load touches 4 sectors where one thread per row touches 32. The running sum \
is rescaled whenever a larger logit appears, so the row is read once; the lanes combine through shuffles."""
moves = [
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "lts__t_sectors_op_read.sum",
    "smsp__inst_executed.sum",
]
dtypes = ["float32", "float16", "bfloat16", "float64"]
requires = []
*/
//@ types

#if ELEMENT_BYTES == 8
#define LOWEST -1.7976931348623157e308
#else
#define LOWEST -3.402823466e38f
#endif

// Arguments are at most 0, so the error of the fast form, which grows with its argument, stays below that of a sum.
__device__ __forceinline__ float exponential(float v) { return __expf(v); }
__device__ __forceinline__ double exponential(double v) { return exp(v); }

extern "C" __global__ void __launch_bounds__(32 * ROWS) cross_entropy(
    const T* __restrict__ x, const int* __restrict__ labels, T* __restrict__ loss, int R, int C)
{
    const int lane = threadIdx.x % 32;
    const int row = blockIdx.x * ROWS + threadIdx.x / 32;
    if (row >= R) return;  // a whole warp at a time
    const int label = labels[row];
    if (label == -100) {
        if (lane == 0) loss[row] = down(A(0));
        return;
    }
    const T* in = x + static_cast<long long>(row) * C;

    A largest = LOWEST;  // finite: a lane without elements then contributes exactly nothing
    A total = 0;
#pragma unroll 4
    for (int c = lane; c < C; c += 32) {
        const A v = up(in[c]);
        const A lesser = exponential(-fabs(v - largest));  // either the old sum or the new term shrinks by this
        total = v > largest ? fma(total, lesser, A(1)) : total + lesser;
        largest = max(largest, v);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        const A other = __shfl_xor_sync(0xffffffff, largest, distance);
        const A other_total = __shfl_xor_sync(0xffffffff, total, distance);
        const A larger = max(largest, other);
        total = total * exponential(largest - larger) + other_total * exponential(other - larger);
        largest = larger;
    }
    if (lane == 0) loss[row] = down(log(total) - (up(in[label]) - largest));
}
