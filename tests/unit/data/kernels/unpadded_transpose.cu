/* optiml
[[launch]]
kernel = "flip"
grid = ["ceil_div(C, 32)", "ceil_div(R, 32)"]
block = [32, 32]
args = ["a", "b", "R", "C"]
*/
#define TILE 32
extern "C" __global__ void flip(const float* a, float* b, int R, int C) {
    __shared__ float tile[TILE][TILE];
    int c = blockIdx.x * TILE + threadIdx.x, r = blockIdx.y * TILE + threadIdx.y;
    if (r < R && c < C) tile[threadIdx.y][threadIdx.x] = a[(long long)r * C + c];
    __syncthreads();
    int rr = blockIdx.y * TILE + threadIdx.x, cc = blockIdx.x * TILE + threadIdx.y;
    if (rr < R && cc < C) b[(long long)cc * R + rr] = tile[threadIdx.x][threadIdx.y];
}
