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
moves = ["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum", "smsp__inst_executed.sum", "smsp__inst_executed_op_local_ld.sum"]
dtypes = ["float32", "float16", "bfloat16", "float64"]
requires = []
*/
//@ types

constexpr int THREADS = 256;  // 16 x 16: QUERY_SHARE queries by KEY_SHARE keys, later by WIDTH / 16 elements of the result
constexpr int PASSES = sizeof(A) / sizeof(float);  // doubles take twice the room: half the queries and keys at a time
constexpr int QUERY_SHARE = ROWS / PASSES, KEY_SHARE = COLUMNS / PASSES;
constexpr int QUERIES = 16 * QUERY_SHARE, KEYS = 16 * KEY_SHARE;
constexpr int PAD = 4 / PASSES;  // spreads transposed stores over the banks and keeps rows aligned for vectors

template <int COUNT>
struct alignas(sizeof(A) * COUNT) Vector {
    A v[COUNT];
};

template <int COUNT>
__device__ __forceinline__ Vector<COUNT> read(const A* from) {
    return *reinterpret_cast<const Vector<COUNT>*>(from);
}

// One tile of queries. WIDTH: D rounded up; elements beyond D count as zeros.
template <int WIDTH>
__device__ __forceinline__ void attend(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                                       T* __restrict__ y, long long head, int first_query, int S, int D, A* shared) {
    constexpr int PARTS = WIDTH / 16;                                                        // of the result, per thread
    constexpr int CHUNK = PARTS < 16 / int(sizeof(A)) ? PARTS : 16 / int(sizeof(A));  // neighbouring ones among them
    A* q_tile = shared;                             // [WIDTH][QUERIES + PAD]
    A* kv_tile = q_tile + WIDTH * (QUERIES + PAD);  // keys [WIDTH][KEYS + PAD], then values [KEYS][WIDTH]
    A* weights = kv_tile + WIDTH * (KEYS + PAD);    // [KEYS][QUERIES + PAD]
    int thread = threadIdx.x;
    int x = thread % 16, row = thread / 16 * QUERY_SHARE;
    const T* queries = q + (head * S + first_query) * D;
    A scale = A(1) / sqrt(A(D));

    for (int i = thread; i < QUERIES * WIDTH; i += THREADS) {
        int query = i / WIDTH, d = i % WIDTH;
        bool exists = first_query + query < S && d < D;
        q_tile[d * (QUERIES + PAD) + query] = exists ? up(queries[(long long)query * D + d]) : A(0);
    }
    A result[QUERY_SHARE][PARTS] = {};
    A largest[QUERY_SHARE], total[QUERY_SHARE];
#pragma unroll
    for (int i = 0; i < QUERY_SHARE; ++i) {
        largest[i] = -INFINITY;
        total[i] = 0;
    }

    for (int first = 0; first < S; first += KEYS) {
        const T* keys = k + (head * S + first) * D;
        const T* values = v + (head * S + first) * D;
        __syncthreads();  // the values of the step before have been read
        for (int i = thread; i < KEYS * WIDTH; i += THREADS) {
            int key = i / WIDTH, d = i % WIDTH;
            bool exists = first + key < S && d < D;
            kv_tile[d * (KEYS + PAD) + key] = exists ? up(keys[(long long)key * D + d]) : A(0);
        }
        __syncthreads();

        A score[QUERY_SHARE][KEY_SHARE] = {};
#pragma unroll 8
        for (int d = 0; d < WIDTH; ++d) {
            Vector<QUERY_SHARE> left = read<QUERY_SHARE>(q_tile + d * (QUERIES + PAD) + row);
            Vector<KEY_SHARE> right = read<KEY_SHARE>(kv_tile + d * (KEYS + PAD) + x * KEY_SHARE);
#pragma unroll
            for (int i = 0; i < QUERY_SHARE; ++i) {
#pragma unroll
                for (int j = 0; j < KEY_SHARE; ++j) score[i][j] += left.v[i] * right.v[j];
            }
        }
        __syncthreads();  // the keys have been read
        for (int i = thread; i < KEYS * WIDTH; i += THREADS) {
            int key = i / WIDTH, d = i % WIDTH;
            bool exists = first + key < S && d < D;
            kv_tile[key * WIDTH + d] = exists ? up(values[(long long)key * D + d]) : A(0);
        }

        // The 16 threads of one query are one half of a warp: xor steps below 16 stay inside it.
#pragma unroll
        for (int i = 0; i < QUERY_SHARE; ++i) {
            A peak = largest[i];
#pragma unroll
            for (int j = 0; j < KEY_SHARE; ++j) {
                score[i][j] = first + x * KEY_SHARE + j < S ? score[i][j] * scale : -INFINITY;
                peak = max(peak, score[i][j]);
            }
#pragma unroll
            for (int step = 8; step > 0; step /= 2) peak = max(peak, __shfl_xor_sync(0xffffffffu, peak, step));
            A shrink = exp(largest[i] - peak);  // 0 at the first step
            largest[i] = peak;
            A sum = 0;
#pragma unroll
            for (int j = 0; j < KEY_SHARE; ++j) {
                A weight = exp(score[i][j] - peak);
                sum += weight;
                weights[(x * KEY_SHARE + j) * (QUERIES + PAD) + row + i] = weight;
            }
            total[i] = total[i] * shrink + sum;  // this thread's keys only
#pragma unroll
            for (int p = 0; p < PARTS; ++p) result[i][p] *= shrink;
        }
        __syncthreads();

#pragma unroll 4
        for (int j = 0; j < KEYS; ++j) {
            Vector<QUERY_SHARE> left = read<QUERY_SHARE>(weights + j * (QUERIES + PAD) + row);
#pragma unroll
            for (int p = 0; p < PARTS; p += CHUNK) {
                Vector<CHUNK> right = read<CHUNK>(kv_tile + j * WIDTH + 16 * p + x * CHUNK);
#pragma unroll
                for (int i = 0; i < QUERY_SHARE; ++i) {
#pragma unroll
                    for (int c = 0; c < CHUNK; ++c) result[i][p + c] += left.v[i] * right.v[c];
                }
            }
        }
    }

#pragma unroll
    for (int i = 0; i < QUERY_SHARE; ++i) {
#pragma unroll
        for (int step = 8; step > 0; step /= 2) total[i] += __shfl_xor_sync(0xffffffffu, total[i], step);
        if (first_query + row + i >= S) continue;
        T* to = y + (head * S + first_query + row + i) * D;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            int d = p / CHUNK * 16 * CHUNK + x * CHUNK + p % CHUNK;
            if (d < D) to[d] = down(result[i][p] / total[i]);
        }
    }
}

template <int WIDTH>
__device__ __forceinline__ void attention(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                                          T* __restrict__ y, int S, int D) {
    extern __shared__ __align__(16) unsigned char shared[];
    int tiles = (S + 16 * ROWS - 1) / (16 * ROWS);
    long long head = blockIdx.x / tiles;
    int begin = blockIdx.x % tiles * 16 * ROWS;
    for (int first_query = begin; first_query < min(begin + 16 * ROWS, S); first_query += QUERIES) {
        attend<WIDTH>(q, k, v, y, head, first_query, S, D, reinterpret_cast<A*>(shared));
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
