// A whole program, as people write them: main, checks, timing loop, results that it compares on the host.
#include <cuda_runtime.h>
#include <cstdio>
#include <cstdlib>
#include <cmath>
#include <vector>
#define CHECK(call) do { cudaError_t e = (call); if (e != cudaSuccess) { printf("%s\n", cudaGetErrorString(e)); exit(1); } } while (0)
constexpr int TILE = 16;

template <typename T>
__global__ void scaled_rows(const T* __restrict__ x, T* y, int rows, int cols, float alpha) {
    int c = blockIdx.x * TILE + threadIdx.x, r = blockIdx.y * TILE + threadIdx.y;
    if (r < rows && c < cols) y[r * cols + c] = alpha * x[r * cols + c];
}
__global__ void row_sums(const float* y, float* sums, int rows, int cols) {
    int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= rows) return;
    float s = 0.f;
    for (int c = 0; c < cols; c++) s += y[r * cols + c];
    sums[r] = s;
}
static float reference(const std::vector<float>& x, int r, int cols) {
    float s = 0.f;
    for (int c = 0; c < cols; c++) s += 2.5f * x[r * cols + c];
    return s;
}
int main(int argc, char** argv) {
    int rows = 48, cols = argc > 1 ? atoi(argv[1]) : 100;
    std::vector<float> x(rows * cols), sums(rows);
    for (int i = 0; i < rows * cols; i++) x[i] = (float)rand() / RAND_MAX;
    float *dx, *dy, *dsums;
    CHECK(cudaMalloc(&dx, x.size() * sizeof(float)));
    CHECK(cudaMalloc(&dy, x.size() * sizeof(float)));
    CHECK(cudaMalloc(&dsums, rows * sizeof(float)));
    CHECK(cudaMemcpy(dx, x.data(), x.size() * sizeof(float), cudaMemcpyHostToDevice));
    cudaEvent_t start, stop;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&stop));
    CHECK(cudaEventRecord(start));
    for (int i = 0; i < 20; i++) {
        dim3 block(TILE, TILE), grid((cols + TILE - 1) / TILE, (rows + TILE - 1) / TILE);
        scaled_rows<float><<<grid, block>>>(dx, dy, rows, cols, 2.5f);
        row_sums<<<(rows + 31) / 32, 32>>>(dy, dsums, rows, cols);
    }
    CHECK(cudaEventRecord(stop));
    CHECK(cudaEventSynchronize(stop));
    CHECK(cudaMemcpy(sums.data(), dsums, rows * sizeof(float), cudaMemcpyDeviceToHost));
    for (int r = 0; r < rows; r++)
        if (std::fabs(sums[r] - reference(x, r, cols)) > 1e-3f) { printf("wrong at %d\n", r); return 1; }
    printf("right\n");
    cudaFree(dx), cudaFree(dy), cudaFree(dsums);
}
