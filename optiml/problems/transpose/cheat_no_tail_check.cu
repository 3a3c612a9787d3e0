/* optiml
[[launch]]
kernel = "transpose"
grid = ["ceil_div(C, TILE)", "ceil_div(R, TILE)"]
block = ["TILE", "TILE"]
args = ["x", "y", "R", "C"]
[params]
TILE = 32
*/
//@ types

// Tests neither edge: reads and writes outside the arrays unless both sizes are multiples of the tile.
extern "C" __global__ void transpose(const T* x, T* y, int R, int C) {
    __shared__ T tile[TILE][TILE + 1];
    int row = blockIdx.y * TILE, column = blockIdx.x * TILE;
    tile[threadIdx.y][threadIdx.x] = x[(long long)(row + threadIdx.y) * C + column + threadIdx.x];
    __syncthreads();
    y[(long long)(column + threadIdx.y) * R + row + threadIdx.x] = tile[threadIdx.x][threadIdx.y];
}
