/* optiml
[[launch]]
kernel = "softmax"
grid = ["ceil_div(R, ROWS)"]
block = ["32 * ROWS"]
args = ["x", "y", "R", "C"]
[params]
ROWS = 4
VECTOR = 4
ITEMS = 16
[tunables]
ROWS = [1, 2, 4, 8]
VECTOR = [1, 2, 4, 8]
ITEMS = [8, 16, 32]
[strategy]
title = "one warp per row, the row kept in registers"
rationale = """
For rows of up to 32 * ITEMS columns a warp holds the whole row: one read, one exponential per element, no shared \
memory and no barrier, and several rows in flight per block. Longer rows stay right but read their rest again."""
moves = [
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "lts__t_sectors_op_read.sum",
    "smsp__inst_executed.sum",
]
dtypes = ["float32", "float16", "bfloat16", "float64"]
requires = []
*/
//@ types

// Arguments are at most 0, so the error of the fast form, which grows with its argument, stays below that of a sum.
__device__ __forceinline__ float exponential(float v) { return __expf(v); }
__device__ __forceinline__ double exponential(double v) { return exp(v); }

template <int N>
__device__ __forceinline__ void softmax_row(const T* in, T* out, int C)
{
    const int KEPT = ITEMS / N;  // wide loads per lane that stay in registers
    const int lane = threadIdx.x % 32;
    const Pack<N>* source = reinterpret_cast<const Pack<N>*>(in);
    Pack<N>* target = reinterpret_cast<Pack<N>*>(out);
    const int packs = C / N;  // C is a multiple of N
    A kept[KEPT][N];

    A largest = up(in[0]);
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        const int p = k * 32 + lane;
        if (p < packs) {
            const Pack<N> pack = source[p];
#pragma unroll
            for (int j = 0; j < N; ++j) {
                kept[k][j] = up(pack.v[j]);
                largest = max(largest, kept[k][j]);
            }
        }
    }
    for (int p = KEPT * 32 + lane; p < packs; p += 32) {
        const Pack<N> pack = source[p];
#pragma unroll
        for (int j = 0; j < N; ++j) largest = max(largest, up(pack.v[j]));
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        largest = max(largest, __shfl_xor_sync(0xffffffff, largest, distance));

    A total = 0;
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        if (k * 32 + lane < packs) {
#pragma unroll
            for (int j = 0; j < N; ++j) {
                kept[k][j] = exponential(kept[k][j] - largest);
                total += kept[k][j];
            }
        }
    }
    for (int p = KEPT * 32 + lane; p < packs; p += 32) {
        const Pack<N> pack = source[p];
#pragma unroll
        for (int j = 0; j < N; ++j) total += exponential(up(pack.v[j]) - largest);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) total += __shfl_xor_sync(0xffffffff, total, distance);
    const A scale = A(1) / total;

#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        const int p = k * 32 + lane;
        if (p < packs) {
            Pack<N> pack;
#pragma unroll
            for (int j = 0; j < N; ++j) pack.v[j] = down(kept[k][j] * scale);
            target[p] = pack;
        }
    }
    for (int p = KEPT * 32 + lane; p < packs; p += 32) {
        Pack<N> pack = source[p];
#pragma unroll
        for (int j = 0; j < N; ++j) pack.v[j] = down(exponential(up(pack.v[j]) - largest) * scale);
        target[p] = pack;
    }
}

extern "C" __global__ void __launch_bounds__(32 * ROWS) softmax(
    const T* __restrict__ x, T* __restrict__ y, int R, int C)
{
    static_assert(ITEMS % VECTOR == 0, "whole wide loads");
    const int row = blockIdx.x * ROWS + threadIdx.x / 32;
    if (row >= R) return;  // a whole warp at a time
    const T* in = x + static_cast<long long>(row) * C;
    T* out = y + static_cast<long long>(row) * C;
    const size_t addresses = reinterpret_cast<size_t>(x) | reinterpret_cast<size_t>(y);
    if (C % VECTOR == 0 && addresses % sizeof(Pack<VECTOR>) == 0) {
        softmax_row<VECTOR>(in, out, C);  // then every row starts on a vector boundary
    } else {
        softmax_row<1>(in, out, C);
    }
}
