/* optiml
[[launch]]
kernel = "matmul"
grid = ["ceil_div(N, 16*COLUMNS)", "ceil_div(M, 16*ROWS)"]
block = [256]
args = ["a", "b", "c", "M", "N", "K"]
[params]
ROWS = 8
COLUMNS = 4
TILE_K = 16
[tunables]
ROWS = [4, 8]
COLUMNS = [4, 8]
TILE_K = [8, 16]
[strategy]
title = "register tile with two shared buffers"
rationale = "The next tiles travel from global memory into registers while the current ones are multiplied, and two shared buffers need one barrier per step instead of two, so load latency hides behind arithmetic."
moves = ["smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio", "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio", "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"]
dtypes = ["float32", "float16", "bfloat16", "float64"]
requires = []
*/
//@ types

constexpr int THREADS = 256;  // 16 x 16, each with ROWS x COLUMNS results
constexpr int TILE_M = 16 * ROWS;
constexpr int TILE_N = 16 * COLUMNS;
constexpr int DEPTH = TILE_K * 4 / int(sizeof(A));  // tiles of doubles are half as deep, to stay below 48 KiB
constexpr int PAD = 4;  // spreads the transposed stores over the banks and keeps rows aligned for Quad
constexpr int A_QUADS = TILE_M * DEPTH / 4, B_QUADS = DEPTH * TILE_N / 4;
constexpr int A_SHARE = (A_QUADS + THREADS - 1) / THREADS, B_SHARE = (B_QUADS + THREADS - 1) / THREADS;  // per thread

struct alignas(4 * sizeof(A)) Quad {
    A v[4];
};

// Four elements as they lie in memory: converting them before they are needed would wait for the load.
struct alignas(sizeof(Pack<4>)) Four {
    unsigned words[sizeof(Pack<4>) / 4];
};

// Four neighbouring elements, of which the first `valid` exist; zeros for the others. Aligned: all or none exist.
__device__ __forceinline__ Four load_four(const T* __restrict__ from, int valid, bool aligned) {
    Four four = {};
    if (aligned) {
        if (valid > 0) four = *reinterpret_cast<const Four*>(from);
    } else {
        Pack<4> pack;
#pragma unroll
        for (int i = 0; i < 4; ++i) pack.v[i] = i < valid ? from[i] : down(A(0));
        four = reinterpret_cast<Four&>(pack);
    }
    return four;
}

__device__ __forceinline__ Quad converted(Four four) {
    Pack<4> pack = reinterpret_cast<Pack<4>&>(four);
    Quad quad;
#pragma unroll
    for (int i = 0; i < 4; ++i) quad.v[i] = up(pack.v[i]);
    return quad;
}

__device__ __forceinline__ bool is_aligned(const T* base, int row_length) {
    return row_length % 4 == 0 && reinterpret_cast<unsigned long long>(base) % sizeof(Pack<4>) == 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, sizeof(A) == 4 ? 2 : 1)
matmul(const T* __restrict__ a, const T* __restrict__ b, T* __restrict__ c, int M, int N, int K) {
    __shared__ alignas(32) A a_tile[2][DEPTH][TILE_M + PAD];  // transposed: a thread reads its rows as one Quad
    __shared__ alignas(32) A b_tile[2][DEPTH][TILE_N];
    int thread = threadIdx.x;
    int x = thread % 16, y = thread / 16;
    int first_row = blockIdx.y * TILE_M, first_column = blockIdx.x * TILE_N;
    bool a_aligned = is_aligned(a, K), b_aligned = is_aligned(b, N), c_aligned = is_aligned(c, N);
    A sum[ROWS][COLUMNS] = {};
    Four a_next[A_SHARE], b_next[B_SHARE];

    auto fetch = [&](int start) {
#pragma unroll
        for (int n = 0; n < A_SHARE; ++n) {
            int i = thread + n * THREADS;
            int row = i / (DEPTH / 4), k = i % (DEPTH / 4) * 4;
            const T* from = a + (long long)(first_row + row) * K + start + k;
            a_next[n] = load_four(from, i < A_QUADS && first_row + row < M ? K - start - k : 0, a_aligned);
        }
#pragma unroll
        for (int n = 0; n < B_SHARE; ++n) {
            int i = thread + n * THREADS;
            int k = i / (TILE_N / 4), column = i % (TILE_N / 4) * 4;
            const T* from = b + (long long)(start + k) * N + first_column + column;
            b_next[n] = load_four(from, i < B_QUADS && start + k < K ? N - first_column - column : 0, b_aligned);
        }
    };
    auto publish = [&](int buffer) {
#pragma unroll
        for (int n = 0; n < A_SHARE; ++n) {
            int i = thread + n * THREADS;
            int row = i / (DEPTH / 4), k = i % (DEPTH / 4) * 4;
            if (i < A_QUADS) {
                Quad quad = converted(a_next[n]);
#pragma unroll
                for (int j = 0; j < 4; ++j) a_tile[buffer][k + j][row] = quad.v[j];
            }
        }
#pragma unroll
        for (int n = 0; n < B_SHARE; ++n) {
            int i = thread + n * THREADS;
            int k = i / (TILE_N / 4), column = i % (TILE_N / 4) * 4;
            if (i < B_QUADS) *reinterpret_cast<Quad*>(&b_tile[buffer][k][column]) = converted(b_next[n]);
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
        for (int k = 0; k < DEPTH; ++k) {
            Quad left[ROWS / 4], right[COLUMNS / 4];
#pragma unroll
            for (int i = 0; i < ROWS / 4; ++i) left[i] = *reinterpret_cast<Quad*>(&a_tile[buffer][k][64 * i + 4 * y]);
#pragma unroll
            for (int j = 0; j < COLUMNS / 4; ++j) right[j] = *reinterpret_cast<Quad*>(&b_tile[buffer][k][64 * j + 4 * x]);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) sum[i][j] += left[i / 4].v[i % 4] * right[j / 4].v[j % 4];
            }
        }
        // The other buffer was last read before the previous barrier, so it may be overwritten now.
        if (more) publish(buffer ^ 1);
        __syncthreads();
        buffer ^= 1;
    }

#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        int row = first_row + 64 * (i / 4) + 4 * y + i % 4;
        if (row >= M) continue;
#pragma unroll
        for (int j = 0; j < COLUMNS; j += 4) {
            int column = first_column + 64 * (j / 4) + 4 * x;
            T* to = c + (long long)row * N + column;
            if (c_aligned && column < N) {
                Pack<4> pack;
#pragma unroll
                for (int l = 0; l < 4; ++l) pack.v[l] = down(sum[i][j + l]);
                *reinterpret_cast<Pack<4>*>(to) = pack;
            } else {
#pragma unroll
                for (int l = 0; l < 4; ++l) {
                    if (column + l < N) to[l] = down(sum[i][j + l]);
                }
            }
        }
    }
}
