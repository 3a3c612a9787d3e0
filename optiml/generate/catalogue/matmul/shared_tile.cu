/* optiml
[[launch]]
kernel = "matmul"
grid = ["ceil_div(N, TILE)", "ceil_div(M, TILE)"]
block = ["TILE", "TILE"]
args = ["a", "b", "c", "M", "N", "K"]
[params]
TILE = 16
[tunables]
TILE = [8, 16, 32]
[strategy]
title = "square tiles of a and b in shared memory"
rationale = "A block loads each element of its two tiles once and uses it TILE times, so global load requests fall by about TILE."
moves = ["l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum", "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"]
dtypes = ["float32", "float16", "bfloat16", "float64"]
requires = []
*/
//@ types

extern "C" __global__ void __launch_bounds__(TILE * TILE)
matmul(const T* __restrict__ a, const T* __restrict__ b, T* __restrict__ c, int M, int N, int K) {
    __shared__ A a_tile[TILE][TILE];
    __shared__ A b_tile[TILE][TILE];
    int x = threadIdx.x, y = threadIdx.y;
    int column = blockIdx.x * TILE + x;
    int row = blockIdx.y * TILE + y;
    const T* a_row = a + (long long)row * K;
    A sum = 0;
    for (int start = 0; start < K; start += TILE) {
        // Zeros outside the matrices: such products add nothing.
        a_tile[y][x] = row < M && start + x < K ? up(a_row[start + x]) : A(0);
        b_tile[y][x] = column < N && start + y < K ? up(b[(long long)(start + y) * N + column]) : A(0);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < TILE; ++k) sum += a_tile[y][k] * b_tile[k][x];
        __syncthreads();
    }
    if (row < M && column < N) c[(long long)row * N + column] = down(sum);
}
