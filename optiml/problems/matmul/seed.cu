/* optiml
[[launch]]
kernel = "matmul"
grid = ["ceil_div(N, BLOCK_X)", "ceil_div(M, BLOCK_Y)"]
block = ["BLOCK_X", "BLOCK_Y"]
args = ["a", "b", "c", "M", "N", "K"]
[params]
BLOCK_X = 16
BLOCK_Y = 16
[tunables]
BLOCK_X = [8, 16, 32]
BLOCK_Y = [8, 16, 32]
*/
//@ types

// One thread per element of c.
extern "C" __global__ void matmul(const T* a, const T* b, T* c, int M, int N, int K) {
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    int row = blockIdx.y * blockDim.y + threadIdx.y;
    if (row >= M || column >= N) return;
    A sum = 0;
    for (int k = 0; k < K; ++k) {
        sum += up(a[(long long)row * K + k]) * up(b[(long long)k * N + column]);
    }
    c[(long long)row * N + column] = down(sum);
}
