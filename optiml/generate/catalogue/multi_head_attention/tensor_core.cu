/* optiml
[[launch]]
kernel = "attention_32"
grid = ["B*H*ceil_div(S, 64) if D <= 32 else 0"]
block = [128]
shared_bytes = "2*(64 + 2*KEYS)*(32 + 8) + 64*(KEYS + 8)*6 + 4096"
args = ["q", "k", "v", "y", "S", "D"]
[[launch]]
kernel = "attention_64"
grid = ["B*H*ceil_div(S, 64) if D > 32 and D <= 64 else 0"]
block = [128]
shared_bytes = "2*(64 + 2*KEYS)*(64 + 8) + 64*(KEYS + 8)*6 + 4096"
args = ["q", "k", "v", "y", "S", "D"]
[[launch]]
kernel = "attention_128"
grid = ["B*H*ceil_div(S, 64) if D > 64 else 0"]
block = [128]
shared_bytes = "2*(64 + 2*KEYS)*(128 + 8) + 64*(KEYS + 8)*6 + 4096"
args = ["q", "k", "v", "y", "S", "D"]
[params]
KEYS = 64
[tunables]
KEYS = [32, 64]
[strategy]
title = "flash attention on tensor cores, float32 scores and sums"
rationale = "Both products run as 16 x 16 x 16 matrix instructions; each warp owns 16 queries, so the online softmax needs no barrier, and scores stay in float32 on chip."
moves = ["smsp__inst_executed.sum", "sm__inst_executed_pipe_fma.sum", "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"]
dtypes = ["float16", "bfloat16"]
requires = []
*/
//@ types
#include <mma.h>

using namespace nvcuda;

constexpr int THREADS = 128;  // four warps
constexpr int QUERIES = 64;   // 16 per warp
constexpr int PAD = 8;        // 16 bytes of T: moves neighbouring rows to other banks
constexpr int SCORES = KEYS + PAD;

typedef wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major> Left;
typedef wmma::fragment<wmma::accumulator, 16, 16, 16, float> Sum;

__device__ __forceinline__ bool is_aligned(const T* base, int row_length) {
    return row_length % 8 == 0 && reinterpret_cast<unsigned long long>(base) % sizeof(Pack<8>) == 0;
}

// Eight elements as they lie in memory.
struct alignas(16) Eight {
    unsigned words[4];
};

// The first `rows` rows of D elements each, with zeros for the rest of [HEIGHT][WIDTH].
template <int HEIGHT, int WIDTH>
__device__ __forceinline__ void load_tile(T* __restrict__ tile, const T* __restrict__ from, int rows, int D, bool aligned) {
#pragma unroll 4
    for (int n = 0; n < HEIGHT * WIDTH / 8 / THREADS; ++n) {
        int i = threadIdx.x + n * THREADS;
        int row = i / (WIDTH / 8), d = i % (WIDTH / 8) * 8;
        const T* source = from + (long long)row * D + d;
        int valid = row < rows ? D - d : 0;
        Eight eight = {};
        if (aligned) {  // all eight exist, or none
            if (valid > 0) eight = *reinterpret_cast<const Eight*>(source);
        } else {
            Pack<8> pack;
#pragma unroll
            for (int j = 0; j < 8; ++j) pack.v[j] = j < valid ? source[j] : down(0.f);
            eight = reinterpret_cast<Eight&>(pack);
        }
        *reinterpret_cast<Eight*>(tile + row * (WIDTH + PAD) + d) = eight;
    }
}

// WIDTH: D rounded up; elements beyond D count as zeros.
template <int WIDTH>
__device__ __forceinline__ void attention(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                                          T* __restrict__ y, int S, int D) {
    constexpr int PITCH = WIDTH + PAD;
    extern __shared__ __align__(32) unsigned char shared[];
    T* q_tile = reinterpret_cast<T*>(shared);  // [QUERIES][PITCH]
    T* k_tile = q_tile + QUERIES * PITCH;      // [KEYS][PITCH]
    T* v_tile = k_tile + KEYS * PITCH;         // [KEYS][PITCH]
    float* all_factors = reinterpret_cast<float*>(v_tile + KEYS * PITCH);  // per warp [16][16], equal along a row
    float* all_scores = all_factors + QUERIES * 16;                       // per warp [16][SCORES]
    T* all_weights = reinterpret_cast<T*>(all_scores + QUERIES * SCORES);  // per warp [16][SCORES]
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* factors = all_factors + warp * 16 * 16;
    float* scores = all_scores + warp * 16 * SCORES;
    T* weights = all_weights + warp * 16 * SCORES;
    int row = lane / 2, half = lane % 2;  // two lanes share one query
    int tiles = (S + QUERIES - 1) / QUERIES;
    long long head = blockIdx.x / tiles;
    int first_query = blockIdx.x % tiles * QUERIES;
    bool aligned = is_aligned(q, D) && is_aligned(k, D) && is_aligned(v, D);
    float scale = 1.f / sqrtf(float(D));
    float largest = -INFINITY, total = 0;
    Sum result[WIDTH / 16];
#pragma unroll
    for (int p = 0; p < WIDTH / 16; ++p) wmma::fill_fragment(result[p], 0.f);

    // Multiplies each row of the result by its own number; the fragment of factors has the layout of the result.
    auto scale_rows = [&](float factor) {
#pragma unroll
        for (int j = 0; j < 8; ++j) factors[row * 16 + half * 8 + j] = factor;
        __syncwarp();
        Sum by_row;
        wmma::load_matrix_sync(by_row, factors, 16, wmma::mem_row_major);
#pragma unroll
        for (int p = 0; p < WIDTH / 16; ++p) {
#pragma unroll
            for (int i = 0; i < by_row.num_elements; ++i) result[p].x[i] *= by_row.x[i];
        }
    };

    load_tile<QUERIES, WIDTH>(q_tile, q + (head * S + first_query) * D, S - first_query, D, aligned);
    for (int first = 0; first < S; first += KEYS) {
        __syncthreads();  // the tiles of the step before have been read
        load_tile<KEYS, WIDTH>(k_tile, k + (head * S + first) * D, S - first, D, aligned);
        load_tile<KEYS, WIDTH>(v_tile, v + (head * S + first) * D, S - first, D, aligned);
        __syncthreads();

#pragma unroll
        for (int j = 0; j < KEYS; j += 16) {
            Sum score;
            wmma::fill_fragment(score, 0.f);
#pragma unroll
            for (int d = 0; d < WIDTH; d += 16) {
                Left left;
                wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::col_major> right;  // keys, turned
                wmma::load_matrix_sync(left, q_tile + warp * 16 * PITCH + d, PITCH);
                wmma::load_matrix_sync(right, k_tile + j * PITCH + d, PITCH);
                wmma::mma_sync(score, left, right, score);
            }
            wmma::store_matrix_sync(scores + j, score, SCORES, wmma::mem_row_major);
        }
        __syncwarp();

        // Neighbouring lanes take neighbouring keys of one query.
        float peak = largest;
        for (int j = half; j < KEYS; j += 2) {
            if (first + j < S) peak = max(peak, scores[row * SCORES + j] * scale);
        }
        peak = max(peak, __shfl_xor_sync(0xffffffffu, peak, 1));
        float sum = 0;
        for (int j = half; j < KEYS; j += 2) {
            float weight = first + j < S ? expf(scores[row * SCORES + j] * scale - peak) : 0.f;
            T rounded = down(weight);
            weights[row * SCORES + j] = rounded;
            sum += up(rounded);  // the weights as they are used, so that they add up to 1
        }
        float shrink = expf(largest - peak);  // 0 at the first step
        largest = peak;
        total = total * shrink + sum;
        scale_rows(shrink);

#pragma unroll
        for (int j = 0; j < KEYS; j += 16) {
            Left left;
            wmma::load_matrix_sync(left, weights + j, SCORES);
#pragma unroll
            for (int p = 0; p < WIDTH / 16; ++p) {
                wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::row_major> right;
                wmma::load_matrix_sync(right, v_tile + j * PITCH + 16 * p, PITCH);
                wmma::mma_sync(result[p], left, right, result[p]);
            }
        }
        __syncwarp();  // weights and factors have been read
    }

    total += __shfl_xor_sync(0xffffffffu, total, 1);
    scale_rows(1.f / total);
    int query = first_query + warp * 16 + row;
    T* to = y + (head * S + query) * D;
#pragma unroll
    for (int p = 0; p < WIDTH / 16; ++p) {
        wmma::store_matrix_sync(scores, result[p], SCORES, wmma::mem_row_major);
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            int d = 16 * p + half * 8 + j;
            if (query < S && d < D) to[d] = down(scores[row * SCORES + half * 8 + j]);
        }
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
attention_32(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, T* __restrict__ y, int S, int D) {
    attention<32>(q, k, v, y, S, D);
}

extern "C" __global__ void __launch_bounds__(THREADS)
attention_64(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, T* __restrict__ y, int S, int D) {
    attention<64>(q, k, v, y, S, D);
}

extern "C" __global__ void __launch_bounds__(THREADS)
attention_128(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, T* __restrict__ y, int S, int D) {
    attention<128>(q, k, v, y, S, D);
}
