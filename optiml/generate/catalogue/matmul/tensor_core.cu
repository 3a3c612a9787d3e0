/* optiml
[[launch]]
kernel = "matmul"
grid = ["ceil_div(N, 64)", "ceil_div(M, 64)"]
block = [128]
args = ["a", "b", "c", "M", "N", "K"]
[params]
DEPTH = 64
[tunables]
DEPTH = [16, 32, 64]
[strategy]
title = "tensor cores, 64 x 64 tile, two shared buffers, float32 sums"
rationale = "One warp instruction multiplies 16 x 16 x 16 elements of 16 bits and adds them up in float32, in place of 128 multiply-adds per lane; the next tiles travel into registers meanwhile."
moves = ["smsp__inst_executed.sum", "sm__inst_executed_pipe_fma.sum", "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"]
dtypes = ["float16", "bfloat16"]
requires = []
*/
//@ types
#include <mma.h>

constexpr int THREADS = 128;  // four warps, each with a 32 x 32 quarter of the tile
constexpr int TILE = 64;
constexpr int PAD = 8;                            // 16 bytes: moves neighbouring rows to other banks
constexpr int SHARE = TILE * DEPTH / 8 / THREADS;  // loads of eight elements per thread, for a and for b
typedef T ATile[TILE][DEPTH + PAD];
typedef T BTile[DEPTH][TILE + PAD];
typedef float CTile[TILE][TILE + PAD];
constexpr int BYTES = 2 * (sizeof(ATile) + sizeof(BTile)) > sizeof(CTile) ? 2 * (sizeof(ATile) + sizeof(BTile)) : sizeof(CTile);

__device__ __forceinline__ bool is_aligned(const T* base, int row_length) {
    return row_length % 8 == 0 && reinterpret_cast<unsigned long long>(base) % sizeof(Pack<8>) == 0;
}

// Eight elements as they lie in memory: taking them apart before they are needed would wait for the load.
struct alignas(16) Eight {
    unsigned words[4];
};

// Eight neighbouring elements, of which the first `valid` exist; zeros for the others. Aligned: all or none exist.
__device__ __forceinline__ Eight load_eight(const T* __restrict__ from, int valid, bool aligned) {
    Eight eight = {};
    if (aligned) {
        if (valid > 0) eight = *reinterpret_cast<const Eight*>(from);
    } else {
        Pack<8> pack;
#pragma unroll
        for (int i = 0; i < 8; ++i) pack.v[i] = i < valid ? from[i] : down(0.f);
        eight = reinterpret_cast<Eight&>(pack);
    }
    return eight;
}

extern "C" __global__ void __launch_bounds__(THREADS)
matmul(const T* __restrict__ a, const T* __restrict__ b, T* __restrict__ c, int M, int N, int K) {
    using namespace nvcuda;
    __shared__ alignas(32) unsigned char memory[BYTES];
    ATile* a_tile = reinterpret_cast<ATile*>(memory);                    // two buffers each
    BTile* b_tile = reinterpret_cast<BTile*>(memory + 2 * sizeof(ATile));
    CTile& c_tile = *reinterpret_cast<CTile*>(memory);                   // after the last product
    int thread = threadIdx.x;
    int warp_row = thread / 64 * 32, warp_column = thread / 32 % 2 * 32;
    int first_row = blockIdx.y * TILE, first_column = blockIdx.x * TILE;
    bool a_aligned = is_aligned(a, K), b_aligned = is_aligned(b, N);
    Eight a_next[SHARE], b_next[SHARE];
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) wmma::fill_fragment(sum[i][j], 0.f);
    }

    auto fetch = [&](int start) {
#pragma unroll
        for (int n = 0; n < SHARE; ++n) {
            int i = thread + n * THREADS;
            int row = i / (DEPTH / 8), k = i % (DEPTH / 8) * 8;
            const T* from = a + (long long)(first_row + row) * K + start + k;
            a_next[n] = load_eight(from, first_row + row < M ? K - start - k : 0, a_aligned);
        }
#pragma unroll
        for (int n = 0; n < SHARE; ++n) {
            int i = thread + n * THREADS;
            int k = i / (TILE / 8), column = i % (TILE / 8) * 8;
            const T* from = b + (long long)(start + k) * N + first_column + column;
            b_next[n] = load_eight(from, start + k < K ? N - first_column - column : 0, b_aligned);
        }
    };
    auto publish = [&](int buffer) {
#pragma unroll
        for (int n = 0; n < SHARE; ++n) {
            int i = thread + n * THREADS;
            *reinterpret_cast<Eight*>(&a_tile[buffer][i / (DEPTH / 8)][i % (DEPTH / 8) * 8]) = a_next[n];
            *reinterpret_cast<Eight*>(&b_tile[buffer][i / (TILE / 8)][i % (TILE / 8) * 8]) = b_next[n];
        }
    };

    fetch(0);
    publish(0);
    __syncthreads();
    int buffer = 0;
    for (int start = 0; start < K; start += DEPTH) {
        bool more = start + DEPTH < K;
        if (more) fetch(start + DEPTH);
#pragma unroll
        for (int k = 0; k < DEPTH; k += 16) {
            wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major> left[2];
            wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::row_major> right[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                wmma::load_matrix_sync(left[i], &a_tile[buffer][warp_row + 16 * i][k], DEPTH + PAD);
                wmma::load_matrix_sync(right[i], &b_tile[buffer][k][warp_column + 16 * i], TILE + PAD);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int j = 0; j < 2; ++j) wmma::mma_sync(sum[i][j], left[i], right[j], sum[i][j]);
            }
        }
        // The other buffer was last read before the previous barrier, so it may be overwritten now.
        if (more) publish(buffer ^ 1);
        __syncthreads();
        buffer ^= 1;
    }

    // Fragments have no documented layout: they pass through shared memory to be rounded and clipped.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float* corner = &c_tile[warp_row + 16 * i][warp_column + 16 * j];
            wmma::store_matrix_sync(corner, sum[i][j], TILE + PAD, wmma::mem_row_major);
        }
    }
    __syncthreads();
    for (int i = thread; i < TILE * TILE; i += THREADS) {
        int row = first_row + i / TILE, column = first_column + i % TILE;
        if (row < M && column < N) c[(long long)row * N + column] = down(c_tile[i / TILE][i % TILE]);
    }
}
