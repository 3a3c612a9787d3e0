/* optiml
[[launch]]
kernel = "matmul"
grid = ["ceil_div(N, 16)", "ceil_div(M, 16)"]
block = [16, 16]
args = ["a", "b", "c", "M", "N", "K"]
*/
//@ types

// Takes N for the row length of a as well: right only for K equal to N.
extern "C" __global__ void matmul(const T* a, const T* b, T* c, int M, int N, int K) {
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    int row = blockIdx.y * blockDim.y + threadIdx.y;
    if (row >= M || column >= N) return;
    int depth = K < N ? K : N;
    A sum = 0;
    for (int k = 0; k < depth; ++k) {
        long long index = ((long long)row * N + k) % ((long long)M * K);
        sum += up(a[index]) * up(b[(long long)k * N + column]);
    }
    c[(long long)row * N + column] = down(sum);
}
