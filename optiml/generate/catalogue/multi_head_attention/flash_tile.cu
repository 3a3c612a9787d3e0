/* optiml
[[launch]]
kernel = "attention_32"
grid = ["B*H*ceil_div(S, 16*ROWS) if D <= 32 else 0"]
block = [256]
shared_bytes = "4*(32*(16*ROWS + 4) + 32*(16*COLUMNS + 4) + 16*COLUMNS*(16*ROWS + 4))"
args = ["q", "k", "v", "y", "S", "D"]
[[launch]]
kernel = "attention_64"
grid = ["B*H*ceil_div(S, 16*ROWS) if D > 32 and D <= 64 else 0"]
block = [256]
shared_bytes = "4*(64*(16*ROWS + 4) + 64*(16*COLUMNS + 4) + 16*COLUMNS*(16*ROWS + 4))"
args = ["q", "k", "v", "y", "S", "D"]
[[launch]]
kernel = "attention_128"
grid = ["B*H*ceil_div(S, 16*ROWS) if D > 64 else 0"]
block = [256]
shared_bytes = "4*(128*(16*ROWS + 4) + 128*(16*COLUMNS + 4) + 16*COLUMNS*(16*ROWS + 4))"
args = ["q", "k", "v", "y", "S", "D"]
[params]
ROWS = 4
COLUMNS = 2
[tunables]
ROWS = [2, 4]
COLUMNS = [2, 4]
[strategy]
title = "tiles of queries and keys, online softmax (flash attention)"
rationale = "A tile of keys and values is loaded once for 16 * ROWS queries, and every value read from shared memory feeds several multiply-adds in registers; scores never leave the multiprocessor."
moves = ["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum", "smsp__inst_executed.sum", "smsp__inst_executed_op_local.sum"]
dtypes = ["float32", "float16", "bfloat16"]
requires = []
*/
//@ types

constexpr int THREADS = 256;  // 16 x 16: ROWS queries by COLUMNS keys, later by WIDTH / 16 elements of the result
constexpr int QUERIES = 16 * ROWS;
constexpr int KEYS = 16 * COLUMNS;
constexpr int PAD = 4;  // spreads transposed stores over the banks and keeps rows aligned for vectors

template <int COUNT>
struct alignas(4 * COUNT) Vector {
    float v[COUNT];
};

template <int COUNT>
__device__ __forceinline__ Vector<COUNT> read(const float* from) {
    return *reinterpret_cast<const Vector<COUNT>*>(from);
}

// WIDTH: D rounded up; elements beyond D count as zeros.
template <int WIDTH>
__device__ __forceinline__ void attention(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                                          T* __restrict__ y, int S, int D) {
    constexpr int PARTS = WIDTH / 16;              // elements of the result per thread and query
    constexpr int CHUNK = PARTS < 4 ? PARTS : 4;   // neighbouring ones among them
    extern __shared__ __align__(16) float shared[];
    float* q_tile = shared;                                // [WIDTH][QUERIES + PAD]
    float* kv_tile = q_tile + WIDTH * (QUERIES + PAD);     // keys [WIDTH][KEYS + PAD], then values [KEYS][WIDTH]
    float* weights = kv_tile + WIDTH * (KEYS + PAD);       // [KEYS][QUERIES + PAD]
    int thread = threadIdx.x;
    int x = thread % 16, y_index = thread / 16;
    int tiles = (S + QUERIES - 1) / QUERIES;
    long long head = blockIdx.x / tiles;
    int first_query = blockIdx.x % tiles * QUERIES;
    const T* queries = q + (head * S + first_query) * D;
    float scale = 1.f / sqrtf(float(D));

    for (int i = thread; i < QUERIES * WIDTH; i += THREADS) {
        int row = i / WIDTH, d = i % WIDTH;
        bool exists = first_query + row < S && d < D;
        q_tile[d * (QUERIES + PAD) + row] = exists ? up(queries[(long long)row * D + d]) * scale : 0.f;
    }
    float result[ROWS][PARTS] = {};
    float largest[ROWS], total[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        largest[i] = -INFINITY;
        total[i] = 0;
    }

    for (int first = 0; first < S; first += KEYS) {
        const T* keys = k + (head * S + first) * D;
        const T* values = v + (head * S + first) * D;
        __syncthreads();  // the values of the step before have been read
        for (int i = thread; i < KEYS * WIDTH; i += THREADS) {
            int row = i / WIDTH, d = i % WIDTH;
            bool exists = first + row < S && d < D;
            kv_tile[d * (KEYS + PAD) + row] = exists ? up(keys[(long long)row * D + d]) : 0.f;
        }
        __syncthreads();

        float score[ROWS][COLUMNS] = {};
#pragma unroll 8
        for (int d = 0; d < WIDTH; ++d) {
            Vector<ROWS> left = read<ROWS>(q_tile + d * (QUERIES + PAD) + y_index * ROWS);
            Vector<COLUMNS> right = read<COLUMNS>(kv_tile + d * (KEYS + PAD) + x * COLUMNS);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) score[i][j] += left.v[i] * right.v[j];
            }
        }
        __syncthreads();  // the keys have been read
        for (int i = thread; i < KEYS * WIDTH; i += THREADS) {
            int row = i / WIDTH, d = i % WIDTH;
            bool exists = first + row < S && d < D;
            kv_tile[row * WIDTH + d] = exists ? up(values[(long long)row * D + d]) : 0.f;
        }

        // The 16 threads of one query are one half of a warp: xor steps below 16 stay inside it.
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            float peak = largest[i];
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                if (first + x * COLUMNS + j >= S) score[i][j] = -INFINITY;
                peak = max(peak, score[i][j]);
            }
#pragma unroll
            for (int step = 8; step > 0; step /= 2) peak = max(peak, __shfl_xor_sync(0xffffffffu, peak, step));
            float shrink = expf(largest[i] - peak);  // 0 at the first step
            largest[i] = peak;
            float sum = 0;
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                float weight = expf(score[i][j] - peak);
                sum += weight;
                weights[(x * COLUMNS + j) * (QUERIES + PAD) + y_index * ROWS + i] = weight;
            }
            total[i] = total[i] * shrink + sum;  // this thread's keys only
#pragma unroll
            for (int p = 0; p < PARTS; ++p) result[i][p] *= shrink;
        }
        __syncthreads();

#pragma unroll 4
        for (int j = 0; j < KEYS; ++j) {
            Vector<ROWS> left = read<ROWS>(weights + j * (QUERIES + PAD) + y_index * ROWS);
#pragma unroll
            for (int p = 0; p < PARTS; p += CHUNK) {
                Vector<CHUNK> right = read<CHUNK>(kv_tile + j * WIDTH + 16 * p + x * CHUNK);
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
#pragma unroll
                    for (int c = 0; c < CHUNK; ++c) result[i][p + c] += left.v[i] * right.v[c];
                }
            }
        }
    }

#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
#pragma unroll
        for (int step = 8; step > 0; step /= 2) total[i] += __shfl_xor_sync(0xffffffffu, total[i], step);
        int row = y_index * ROWS + i;
        if (first_query + row >= S) continue;
        T* to = y + (head * S + first_query + row) * D;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            int d = p / CHUNK * 16 * CHUNK + x * CHUNK + p % CHUNK;
            if (d < D) to[d] = down(result[i][p] / total[i]);
        }
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
