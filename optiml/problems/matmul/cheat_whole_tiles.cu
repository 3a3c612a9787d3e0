/* optiml
[[launch]]
kernel = "matmul"
grid = ["ceil_div(N, TILE)", "ceil_div(M, TILE)"]
block = ["TILE", "TILE"]
args = ["a", "b", "c", "M", "N", "K"]
[params]
TILE = 16
*/
//@ types

// Leaves out the last K % TILE products: right only where K is a multiple of the tile.
extern "C" __global__ void matmul(const T* a, const T* b, T* c, int M, int N, int K) {
    __shared__ A a_tile[TILE][TILE];
    __shared__ A b_tile[TILE][TILE + 1];
    int x = threadIdx.x, y = threadIdx.y;
    int column = blockIdx.x * TILE + x;
    int row = blockIdx.y * TILE + y;
    A sum = 0;
    for (int start = 0; start + TILE <= K; start += TILE) {
        a_tile[y][x] = row < M ? up(a[(long long)row * K + start + x]) : A(0);
        b_tile[y][x] = column < N ? up(b[(long long)(start + y) * N + column]) : A(0);
        __syncthreads();
        for (int k = 0; k < TILE; ++k) sum += a_tile[y][k] * b_tile[k][x];
        __syncthreads();
    }
    if (row < M && column < N) c[(long long)row * N + column] = down(sum);
}
