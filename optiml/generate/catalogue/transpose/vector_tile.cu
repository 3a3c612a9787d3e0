/* optiml
[[launch]]
kernel = "transpose"
grid = ["ceil_div(C, TILE)", "ceil_div(R, TILE)"]
block = ["THREADS"]
args = ["x", "y", "R", "C"]
[params]
TILE = 64
THREADS = 256
[tunables]
TILE = [32, 64]
THREADS = [128, 256]
[strategy]
title = "tile in shared memory, 16-byte global loads and stores"
rationale = "Where both row lengths and both arrays are aligned, a thread reads and writes 16 bytes at a time, so there are 16 / element size times fewer global requests; other sizes take a path of single elements."
moves = ["l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum", "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum", "smsp__inst_executed.sum"]
dtypes = ["float32", "float16", "bfloat16", "float64", "int32"]
requires = []
*/
//@ types

constexpr int WIDTH = 16 / ELEMENT_BYTES;  // elements per vector
constexpr int VECTORS = TILE / WIDTH;      // per row of a tile

__device__ __forceinline__ bool is_aligned(const void* base) {
    return reinterpret_cast<unsigned long long>(base) % sizeof(Pack<WIDTH>) == 0;
}

extern "C" __global__ void __launch_bounds__(THREADS)
transpose(const T* __restrict__ x, T* __restrict__ y, int R, int C) {
    __shared__ T tile[TILE][TILE + 1];
    int first_row = blockIdx.y * TILE, first_column = blockIdx.x * TILE;
    int rows = min(TILE, R - first_row), columns = min(TILE, C - first_column);
    const T* from = x + (long long)first_row * C + first_column;
    T* to = y + (long long)first_column * R + first_row;
    bool vectors = R % WIDTH == 0 && C % WIDTH == 0 && is_aligned(x) && is_aligned(y);

    if (vectors) {  // rows and columns are then multiples of WIDTH too
#pragma unroll
        for (int i = threadIdx.x; i < TILE * VECTORS; i += THREADS) {
            int row = i / VECTORS, column = i % VECTORS * WIDTH;
            if (row < rows && column < columns) {
                Pack<WIDTH> pack = *reinterpret_cast<const Pack<WIDTH>*>(from + (long long)row * C + column);
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) tile[row][column + j] = pack.v[j];
            }
        }
        __syncthreads();
#pragma unroll
        for (int i = threadIdx.x; i < TILE * VECTORS; i += THREADS) {
            int column = i / VECTORS, row = i % VECTORS * WIDTH;
            if (row < rows && column < columns) {
                Pack<WIDTH> pack;
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) pack.v[j] = tile[row + j][column];
                *reinterpret_cast<Pack<WIDTH>*>(to + (long long)column * R + row) = pack;
            }
        }
    } else {
        for (int i = threadIdx.x; i < TILE * TILE; i += THREADS) {
            int row = i / TILE, column = i % TILE;
            if (row < rows && column < columns) tile[row][column] = from[(long long)row * C + column];
        }
        __syncthreads();
        for (int i = threadIdx.x; i < TILE * TILE; i += THREADS) {
            int column = i / TILE, row = i % TILE;
            if (row < rows && column < columns) to[(long long)column * R + row] = tile[row][column];
        }
    }
}
