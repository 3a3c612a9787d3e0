// Launchers of many styles. All compute y = a * x, or say in their names what they do wrong.
#include <cuda_runtime.h>
#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <vector>

__device__ float table[4];
__constant__ float factor[1];
__device__ int unused[3];

extern "C" __global__ void scale(const float* x, float* y, int n, float a) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i];
}
template <typename T, int PER>
__global__ void scale_many(const T* x, T* y, int n, T a) {
    for (int k = 0; k < PER; k++) {
        int i = (blockIdx.x * PER + k) * blockDim.x + threadIdx.x;
        if (i < n) y[i] = a * x[i];
    }
}
static __global__ void add_atomically(const float* x, float* y, int n, float a) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(y + i, a * x[i]);
}
__global__ void through_shared(const float* x, float* y, int n, float a) {
    extern __shared__ float s[];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    s[threadIdx.x + 16000] = i < n ? x[i] : 0.f;
    __syncthreads();
    if (i < n) y[i] = a * s[threadIdx.x + 16000];
}
__global__ void by_symbol(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = table[1] * factor[0] * x[i];
}
struct View { const float* x; float* y; int n; float a; };
__global__ void by_struct(View v) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < v.n) v.y[i] = v.a * v.x[i];
}
__global__ void by_pointers(float** rows, int n, float a) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) rows[1][i] = a * rows[0][i];
}
__global__ void __launch_bounds__(128) bounded(const float* x, float* y, int n, float a) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i];
}

namespace {
int blocks(int n, int per) { return (n + per - 1) / per; }
}
#define LAUNCHER(name) extern "C" void name(const float* x, float* y, int n, float a, cudaStream_t stream)

LAUNCHER(plain) { scale<<<blocks(n, 256), 256, 0, stream>>>(x, y, n, a); }
LAUNCHER(templated) {
    if (n > 512) scale_many<float, 4><<<blocks(n, 512), 128, 0, stream>>>(x, y, n, a);
    else scale_many<float, 1><<<blocks(n, 64), 64, 0, stream>>>(x, y, n, a);
}
LAUNCHER(by_api) {
    void* args[] = {&x, &y, &n, &a};
    cudaLaunchKernel((const void*)scale, dim3(blocks(n, 128)), dim3(128), args, 0, stream);
}
LAUNCHER(by_config) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks(n, 128)), config.blockDim = dim3(128), config.stream = stream;
    cudaLaunchKernelEx(&config, scale, x, y, n, a);
}
LAUNCHER(cooperative) {
    void* args[] = {&x, &y, &n, &a};
    cudaLaunchCooperativeKernel((const void*)scale, dim3(blocks(n, 128)), dim3(128), args, 0, stream);
}
LAUNCHER(by_occupancy) {
    int least = 0, block = 0, per = 0, sms = 0;
    cudaOccupancyMaxPotentialBlockSize(&least, &block, scale, 0, 0);
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per, scale, block, 0);
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
    cudaDeviceProp properties;
    cudaGetDeviceProperties(&properties, 0);
    if (per < 1 || sms != properties.multiProcessorCount || block > properties.maxThreadsPerBlock) return;
    scale<<<blocks(n, block), block, 0, stream>>>(x, y, n, a);
}
LAUNCHER(with_scratch) {
    float* scratch = nullptr;
    if (cudaMalloc(&scratch, n * sizeof(float)) != cudaSuccess) return;
    scale<<<blocks(n, 256), 256, 0, stream>>>(x, scratch, n, a);
    cudaMemcpyAsync(y, scratch, n * sizeof(float), cudaMemcpyDeviceToDevice, stream);
    cudaStreamSynchronize(stream);
    cudaFree(scratch);
}
LAUNCHER(with_async_scratch) {
    float* scratch = nullptr;
    cudaMallocAsync(&scratch, n * sizeof(float), stream);
    scale<<<blocks(n, 256), 256, 0, stream>>>(x, scratch, n, 1.0f);
    scale<<<blocks(n, 256), 256, 0, stream>>>(scratch, y, n, a);
    cudaFreeAsync(scratch, stream);
}
LAUNCHER(cleared_then_added) {
    cudaMemsetAsync(y, 0, n * sizeof(float), stream);
    add_atomically<<<blocks(n, 256), 256, 0, stream>>>(x, y, n, a);
}
LAUNCHER(large_shared) {
    cudaFuncSetAttribute(through_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);
    through_shared<<<blocks(n, 256), 256, 65536, stream>>>(x, y, n, a);
}
LAUNCHER(side_stream_joined) {
    cudaStream_t side;
    cudaEvent_t before, after;
    cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking);
    cudaEventCreateWithFlags(&before, cudaEventDisableTiming);
    cudaEventCreateWithFlags(&after, cudaEventDisableTiming);
    cudaEventRecord(before, stream);
    cudaStreamWaitEvent(side, before, 0);
    scale<<<blocks(n, 256), 256, 0, side>>>(x, y, n, a);
    cudaEventRecord(after, side);
    cudaStreamWaitEvent(stream, after, 0);
    cudaEventDestroy(before), cudaEventDestroy(after), cudaStreamDestroy(side);
}
LAUNCHER(uploaded) {
    std::vector<float> host(4);
    for (int i = 0; i < 4; i++) host[i] = std::pow(2.0f, (float)i);
    float half = a / 2;
    cudaMemcpyToSymbolAsync(table, host.data(), 16, 0, cudaMemcpyHostToDevice, stream);
    cudaMemcpyToSymbolAsync(factor, &half, 4, 0, cudaMemcpyHostToDevice, stream);
    cudaMemcpyToSymbolAsync(unused, &half, 4, 0, cudaMemcpyHostToDevice, stream);
    by_symbol<<<blocks(n, 256), 256, 0, stream>>>(x, y, n);
}
LAUNCHER(in_halves) {
    int half = n / 2;
    if (half > 0) scale<<<blocks(half, 256), 256, 0, stream>>>(x, y, half, a);
    scale<<<blocks(n - half, 256), 256, 0, stream>>>(x + half, y + half, n - half, a);
}
LAUNCHER(struct_of_pointers) {
    View view{x, y, n, a};
    by_struct<<<blocks(n, 256), 256, 0, stream>>>(view);
}
LAUNCHER(table_of_pointers) {
    const float* host[2] = {x, y};
    float** device;
    cudaMalloc(&device, sizeof host);
    cudaMemcpyAsync(device, host, sizeof host, cudaMemcpyHostToDevice, stream);
    by_pointers<<<blocks(n, 256), 256, 0, stream>>>(device, n, a);
}

LAUNCHER(no_attribute) { through_shared<<<blocks(n, 256), 256, 65536, stream>>>(x, y, n, a); }
LAUNCHER(over_bounds) { bounded<<<blocks(n, 256), 256, 0, stream>>>(x, y, n, a); }
LAUNCHER(large_block) { scale<<<blocks(n, 2048), 2048, 0, stream>>>(x, y, n, a); }
LAUNCHER(after_free) {
    float* scratch;
    cudaMalloc(&scratch, 64), cudaFree(scratch);
    scale<<<1, 16, 0, stream>>>(x, scratch, n, a);
}
LAUNCHER(memset_past_end) { cudaMemsetAsync(y, 0, (n + 1) * sizeof(float), stream); }
LAUNCHER(crashes) { *(volatile int*)8 = n; }
LAUNCHER(throws) { throw std::runtime_error("no"); }
LAUNCHER(side_stream_left) {
    cudaStream_t side;
    cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking);
    scale<<<blocks(n, 256), 256, 0, side>>>(x, y, n, a);
}
LAUNCHER(default_stream) { scale<<<blocks(n, 256), 256>>>(x, y, n, a); }
LAUNCHER(host_address) {
    static float here[8];
    scale<<<1, 8, 0, stream>>>(x, here, n, a);
}
LAUNCHER(copies_back) {
    float first = 0;
    cudaMemcpy(&first, x, 4, cudaMemcpyDeviceToHost);
    scale<<<blocks(n, 256), 256, 0, stream>>>(x, y, n, first > 0 ? a : a);
}
LAUNCHER(touches) { y[0] = a * x[0]; }
LAUNCHER(too_much_memory) {
    float* scratch[600];
    for (int i = 0; i < 600; i++) cudaMalloc(&scratch[i], 4096);
    scale<<<blocks(n, 256), 256, 0, stream>>>(x, y, n, a);
}
extern "C" void wrong_signature(const float* x, float* y, int n, cudaStream_t stream) {}
extern "C" void wrong_type(const float* x, float* y, int n, double a, cudaStream_t stream) {}
