/* optiml
[[launch]]
kernel = "attention"
grid = ["B*H*S"]
block = ["BLOCK"]
args = ["q", "k", "v", "y", "S", "D"]
[params]
BLOCK = 128
[tunables]
BLOCK = [64, 128, 256]
[strategy]
title = "one block per query, scores in shared memory"
rationale = "The threads of a block share one query: for few queries and many keys it keeps far more warps busy than a thread per query, and values are read in whole rows."
moves = ["sm__warps_active.avg.pct_of_peak_sustained_active", "smsp__inst_executed_op_local.sum", "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"]
dtypes = ["float32", "float16", "bfloat16", "float64"]
requires = []
*/
//@ types

constexpr int WARPS = BLOCK / 32;
constexpr int CHUNK = 512;  // keys whose scores are held at a time
constexpr int PARTS = 4;    // of 32 lanes each: D <= 128

__device__ __forceinline__ A warp_max(A value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value = max(value, __shfl_xor_sync(0xffffffffu, value, step));
    return value;
}

__device__ __forceinline__ A warp_sum(A value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
attention(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, T* __restrict__ y, int S, int D) {
    __shared__ A scores[CHUNK];
    __shared__ A peaks[WARPS];
    __shared__ A totals[WARPS];
    __shared__ A results[WARPS][32 * PARTS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    long long query = blockIdx.x, head = query / S;
    const T* keys = k + head * S * D;
    const T* values = v + head * S * D;
    A scale = A(1) / sqrt(A(D));
    A asked[PARTS], result[PARTS];
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        int d = lane + 32 * p;
        asked[p] = d < D ? up(q[query * D + d]) * scale : A(0);
        result[p] = 0;
    }
    A largest = -INFINITY, total = 0;  // total and result: this warp's keys only

    for (int first = 0; first < S; first += CHUNK) {
        int count = min(CHUNK, S - first);
        A peak = -INFINITY;
        for (int j = warp; j < count; j += WARPS) {
            A score = 0;
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                int d = lane + 32 * p;
                if (d < D) score += asked[p] * up(keys[(long long)(first + j) * D + d]);
            }
            score = warp_sum(score);
            if (lane == 0) scores[j] = score;
            peak = max(peak, score);
        }
        if (lane == 0) peaks[warp] = peak;
        __syncthreads();
        peak = max(largest, warp_max(lane < WARPS ? peaks[lane] : -INFINITY));
        A shrink = exp(largest - peak);  // 0 at the first chunk
        largest = peak;
        total *= shrink;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) result[p] *= shrink;
        for (int j = warp; j < count; j += WARPS) {
            A weight = exp(scores[j] - peak);
            total += weight;
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                int d = lane + 32 * p;
                if (d < D) result[p] += weight * up(values[(long long)(first + j) * D + d]);
            }
        }
        __syncthreads();
    }

    if (lane == 0) totals[warp] = total;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) results[warp][lane + 32 * p] = result[p];
    __syncthreads();
    for (int d = threadIdx.x; d < D; d += BLOCK) {
        A sum = 0, weights = 0;
        for (int w = 0; w < WARPS; ++w) {
            sum += results[w][d];
            weights += totals[w];
        }
        y[query * D + d] = down(sum / weights);
    }
}
