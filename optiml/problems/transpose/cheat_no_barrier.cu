/* optiml
[[launch]]
kernel = "transpose"
grid = ["ceil_div(C, TILE)", "ceil_div(R, TILE)"]
block = ["TILE", "TILE"]
args = ["x", "y", "R", "C"]
[params]
TILE = 16
*/
//@ types

// Reads what other warps of the block are still to write: the barrier is missing.
extern "C" __global__ void transpose(const T* x, T* y, int R, int C) {
    __shared__ T tile[TILE][TILE + 1];
    int row = blockIdx.y * TILE, column = blockIdx.x * TILE;
    int u = threadIdx.x, v = threadIdx.y;
    if (row + v < R && column + u < C) tile[v][u] = x[(long long)(row + v) * C + column + u];
    if (column + v < C && row + u < R) y[(long long)(column + v) * R + row + u] = tile[u][v];
}
