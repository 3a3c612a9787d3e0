/* optiml
[[launch]]
kernel = "attention"
grid = ["ceil_div(B*H*S, WARPS)"]
block = ["32*WARPS"]
args = ["q", "k", "v", "y", "B*H*S", "S", "D"]
[params]
WARPS = 4
KEYS = 4
[tunables]
WARPS = [2, 4, 8]
KEYS = [1, 2, 4, 8]
[strategy]
title = "one warp per query, online softmax"
rationale = "Lanes hold neighbouring elements of q, k and v, so a load touches a few whole sectors and nothing spills to local memory; the running maximum and sum let one pass over the keys do the work of two, KEYS of them at a time to overlap their latency."
moves = ["smsp__inst_executed_op_local.sum", "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum", "smsp__inst_executed.sum"]
dtypes = ["float32", "float16", "bfloat16", "float64"]
requires = []
*/
//@ types

constexpr int PARTS = 4;  // of 32 lanes each: D <= 128

extern "C" __global__ void __launch_bounds__(32 * WARPS)
attention(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, T* __restrict__ y,
          long long queries, int S, int D) {
    int lane = threadIdx.x % 32;
    long long query = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
    if (query >= queries) return;  // the whole warp
    long long head = query / S;
    const T* keys = k + head * S * D;
    const T* values = v + head * S * D;
    A scale = A(1) / sqrt(A(D));
    A asked[PARTS], result[PARTS];
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        int d = lane + 32 * p;
        asked[p] = d < D ? up(q[query * D + d]) : A(0);
        result[p] = 0;
    }
    A largest = -INFINITY, total = 0;

    for (int first = 0; first < S; first += KEYS) {
        A score[KEYS];
#pragma unroll
        for (int j = 0; j < KEYS; ++j) {
            score[j] = 0;
            if (first + j < S) {
#pragma unroll
                for (int p = 0; p < PARTS; ++p) {
                    int d = lane + 32 * p;
                    if (d < D) score[j] += asked[p] * up(keys[(long long)(first + j) * D + d]);
                }
            }
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
#pragma unroll
            for (int j = 0; j < KEYS; ++j) score[j] += __shfl_xor_sync(0xffffffffu, score[j], step);
        }
        A peak = largest;
#pragma unroll
        for (int j = 0; j < KEYS; ++j) {
            score[j] *= scale;
            if (first + j < S) peak = max(peak, score[j]);
        }
        A shrink = exp(largest - peak);  // 0 at the first step
        largest = peak;
        total *= shrink;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) result[p] *= shrink;
#pragma unroll
        for (int j = 0; j < KEYS; ++j) {
            if (first + j < S) {
                A weight = exp(score[j] - peak);
                total += weight;
#pragma unroll
                for (int p = 0; p < PARTS; ++p) {
                    int d = lane + 32 * p;
                    if (d < D) result[p] += weight * up(values[(long long)(first + j) * D + d]);
                }
            }
        }
    }
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        int d = lane + 32 * p;
        if (d < D) y[query * D + d] = down(result[p] / total);
    }
}
