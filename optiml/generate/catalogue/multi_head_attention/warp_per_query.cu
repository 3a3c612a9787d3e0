/* optiml
[[launch]]
kernel = "attention"
grid = ["ceil_div(B*H*S, WARPS)"]
block = ["32*WARPS"]
args = ["q", "k", "v", "y", "B*H*S", "S", "D"]
[params]
WARPS = 4
UNROLL = 4
[tunables]
WARPS = [2, 4, 8]
UNROLL = [1, 2, 4, 8]
[strategy]
title = "one warp per query, online softmax"
rationale = "Lanes hold neighbouring elements of q, k and v, so a load touches a few whole sectors; the running maximum and sum let one pass over the keys do the work of three, each lane takes the exponential of one key in 32, and no score is ever written to memory."
moves = ["dram__bytes.sum", "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum", "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum"]
dtypes = ["float32", "float16", "bfloat16", "float64"]
requires = []
*/
//@ types

constexpr int PARTS = 4;  // of 32 lanes each: D <= 128
constexpr unsigned ALL = 0xffffffffu;

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
    A largest = -INFINITY, total = 0;  // total: this lane's keys only

    for (int first = 0; first < S; first += 32) {
        int count = min(32, S - first);
        A mine = -INFINITY;  // the score of key first + lane
        for (int group = 0; group < count; group += UNROLL) {
            A score[UNROLL];
#pragma unroll
            for (int j = 0; j < UNROLL; ++j) {
                score[j] = 0;
                if (group + j < count) {
#pragma unroll
                    for (int p = 0; p < PARTS; ++p) {
                        int d = lane + 32 * p;
                        if (d < D) score[j] += asked[p] * up(keys[(long long)(first + group + j) * D + d]);
                    }
                }
            }
#pragma unroll
            for (int step = 16; step > 0; step /= 2) {
#pragma unroll
                for (int j = 0; j < UNROLL; ++j) score[j] += __shfl_xor_sync(ALL, score[j], step);
            }
#pragma unroll
            for (int j = 0; j < UNROLL; ++j) {
                if (lane == group + j && lane < count) mine = score[j] * scale;
            }
        }

        A peak = max(largest, mine);
#pragma unroll
        for (int step = 16; step > 0; step /= 2) peak = max(peak, __shfl_xor_sync(ALL, peak, step));
        A weight = exp(mine - peak);  // 0 for lanes without a key
        A shrink = exp(largest - peak);  // 0 at the first step
        largest = peak;
        total = total * shrink + weight;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) result[p] *= shrink;
#pragma unroll UNROLL
        for (int j = 0; j < count; ++j) {
            A weight_of_key = __shfl_sync(ALL, weight, j);
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                int d = lane + 32 * p;
                if (d < D) result[p] += weight_of_key * up(values[(long long)(first + j) * D + d]);
            }
        }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(ALL, total, step);
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        int d = lane + 32 * p;
        if (d < D) y[query * D + d] = down(result[p] / total);
    }
}
