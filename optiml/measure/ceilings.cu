// Kernels whose speed is a ceiling of the device: each does one thing as fast as the machine can.
// Results are kept by a store that never happens in practice, so that nothing is optimised away.

extern "C" __global__ void empty() {}

extern "C" __global__ void copy(const uint4* x, uint4* y, long long n) {
    long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; i + 3 * stride < n; i += 4 * stride) {
        uint4 a = x[i], b = x[i + stride], c = x[i + 2 * stride], d = x[i + 3 * stride];
        y[i] = a; y[i + stride] = b; y[i + 2 * stride] = c; y[i + 3 * stride] = d;
    }
    for (; i < n; i += stride) y[i] = x[i];
}

extern "C" __global__ void read(const uint4* x, float* out, long long n) {
    long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    unsigned int sum = 0;
    for (; i + 7 * stride < n; i += 8 * stride) {
        uint4 v[8];
        #pragma unroll
        for (int k = 0; k < 8; ++k) v[k] = x[i + k * stride];
        #pragma unroll
        for (int k = 0; k < 8; ++k) sum ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    for (; i < n; i += stride) sum ^= x[i].x;
    if (sum == 12345u) out[threadIdx.x] = 1.0f;
}

extern "C" __global__ void read_l2(const uint4* x, float* out, int n, int rounds) {
    unsigned int sum = 0;
    int i = (blockIdx.x * 7919 * blockDim.x + threadIdx.x) % n;
    for (int round = 0; round < rounds; ++round) {
        uint4 v[8];
        #pragma unroll
        for (int k = 0; k < 8; ++k) {
            v[k] = __ldcg(x + i);
            i += blockDim.x;
            if (i >= n) i -= n;
        }
        #pragma unroll
        for (int k = 0; k < 8; ++k) sum ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    if (sum == 12345u) out[threadIdx.x] = 1.0f;
}

extern "C" __global__ void __launch_bounds__(1024) read_shared(float* out, int rounds) {
    __shared__ float4 tile[2048];
    tile[threadIdx.x] = make_float4(1.f, 2.f, 3.f, 4.f);
    tile[threadIdx.x + 1024] = make_float4(1.f, 2.f, 3.f, 4.f);
    __syncthreads();
    unsigned int address = static_cast<unsigned int>(__cvta_generic_to_shared(tile + threadIdx.x));
    float sum = 0.f;
    for (int round = 0; round < rounds; ++round) {
        #pragma unroll
        for (int k = 0; k < 8; ++k) {
            float a, b, c, d;
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(a), "=f"(b), "=f"(c), "=f"(d) : "r"(address + (k & 1) * 16384u));
            sum += a + b + c + d;
        }
    }
    if (sum == 12345.f) out[threadIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(512) multiply_add(float* out, int rounds) {
    float v[16];
    #pragma unroll
    for (int k = 0; k < 16; ++k) v[k] = threadIdx.x * 0.001f + k;
    float a = 0.999f + blockIdx.x * 1e-9f;
    for (int round = 0; round < rounds; ++round) {
        #pragma unroll
        for (int repeat = 0; repeat < 4; ++repeat) {
            #pragma unroll
            for (int k = 0; k < 16; ++k) v[k] = fmaf(v[k], a, 0.5f);
        }
    }
    float sum = 0.f;
    #pragma unroll
    for (int k = 0; k < 16; ++k) sum += v[k];
    if (sum == 12345.f) out[threadIdx.x] = sum;
}

#define MMA_LOOP(NAME, ACC, COUNT, ...)                                  \
    extern "C" __global__ void __launch_bounds__(512) NAME(ACC* out, int rounds) {    \
        ACC d[4][COUNT] = {};                                                         \
        unsigned int a = 0x3c003c00u + threadIdx.x, b = 0x3c003800u + threadIdx.x;    \
        for (int round = 0; round < rounds; ++round) {                                \
            _Pragma("unroll") for (int k = 0; k < 4; ++k) { __VA_ARGS__; }                   \
        }                                                                             \
        ACC sum = 0;                                                                  \
        for (int k = 0; k < 4; ++k)                                                   \
            for (int j = 0; j < COUNT; ++j) sum += d[k][j];                           \
        if (sum == static_cast<ACC>(12345)) out[threadIdx.x] = sum;                   \
    }
#define MMA4(SHAPE, C)                                                                                         \
    asm volatile("mma.sync.aligned." SHAPE " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"             \
                 : C(d[k][0]), C(d[k][1]), C(d[k][2]), C(d[k][3]) : "r"(a), "r"(b), "r"(a), "r"(b), "r"(b), "r"(a))

MMA_LOOP(mma_f16, float, 4, MMA4("m16n8k16.row.col.f32.f16.f16.f32", "+f"))
MMA_LOOP(mma_tf32, float, 4, MMA4("m16n8k8.row.col.f32.tf32.tf32.f32", "+f"))
MMA_LOOP(mma_s8, int, 4, MMA4("m16n8k32.row.col.s32.s8.s8.s32", "+r"))
MMA_LOOP(mma_f64, double, 2, {
    double x = 1.0 + 1e-9 * a, y = 0.5 + 1e-9 * b;
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
                 : "+d"(d[k][0]), "+d"(d[k][1]) : "d"(x), "d"(y));
})

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
extern "C" __global__ void __launch_bounds__(512) wgmma_f16(float* out, int rounds) {
    __shared__ alignas(1024) unsigned char tiles[16384];
    for (int i = threadIdx.x; i < 16384; i += blockDim.x) tiles[i] = 0x38 + (i & 3);
    __syncthreads();
    unsigned int address = static_cast<unsigned int>(__cvta_generic_to_shared(tiles));
    unsigned long long part = ((address & 0x3FFFF) >> 4) | (8ull << 16) | (16ull << 32);  // no swizzle
    unsigned long long other = part + 256;
    float d[64] = {};
    for (int i = 0; i < rounds; ++i) {
        asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
        for (int k = 0; k < 4; ++k) asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63}, %64, %65, 1, 1, 1, 0, 0;\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(part), "l"(other));
        asm volatile("wgmma.commit_group.sync.aligned;\n" "wgmma.wait_group.sync.aligned 0;\n" ::: "memory");
    }
    float sum = 0;
    for (int i = 0; i < 64; ++i) sum += d[i];
    if (sum == static_cast<float>(12345)) out[threadIdx.x] = sum;
}
extern "C" __global__ void __launch_bounds__(512) wgmma_tf32(float* out, int rounds) {
    __shared__ alignas(1024) unsigned char tiles[16384];
    for (int i = threadIdx.x; i < 16384; i += blockDim.x) tiles[i] = 0x38 + (i & 3);
    __syncthreads();
    unsigned int address = static_cast<unsigned int>(__cvta_generic_to_shared(tiles));
    unsigned long long part = ((address & 0x3FFFF) >> 4) | (8ull << 16) | (16ull << 32);  // no swizzle
    unsigned long long other = part + 256;
    float d[64] = {};
    for (int i = 0; i < rounds; ++i) {
        asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
        for (int k = 0; k < 4; ++k) asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63}, %64, %65, 1, 1, 1;\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(part), "l"(other));
        asm volatile("wgmma.commit_group.sync.aligned;\n" "wgmma.wait_group.sync.aligned 0;\n" ::: "memory");
    }
    float sum = 0;
    for (int i = 0; i < 64; ++i) sum += d[i];
    if (sum == static_cast<float>(12345)) out[threadIdx.x] = sum;
}
extern "C" __global__ void __launch_bounds__(512) wgmma_f8(float* out, int rounds) {
    __shared__ alignas(1024) unsigned char tiles[16384];
    for (int i = threadIdx.x; i < 16384; i += blockDim.x) tiles[i] = 0x38 + (i & 3);
    __syncthreads();
    unsigned int address = static_cast<unsigned int>(__cvta_generic_to_shared(tiles));
    unsigned long long part = ((address & 0x3FFFF) >> 4) | (8ull << 16) | (16ull << 32);  // no swizzle
    unsigned long long other = part + 256;
    float d[64] = {};
    for (int i = 0; i < rounds; ++i) {
        asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
        for (int k = 0; k < 4; ++k) asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63}, %64, %65, 1, 1, 1;\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(part), "l"(other));
        asm volatile("wgmma.commit_group.sync.aligned;\n" "wgmma.wait_group.sync.aligned 0;\n" ::: "memory");
    }
    float sum = 0;
    for (int i = 0; i < 64; ++i) sum += d[i];
    if (sum == static_cast<float>(12345)) out[threadIdx.x] = sum;
}
extern "C" __global__ void __launch_bounds__(512) wgmma_s8(int* out, int rounds) {
    __shared__ alignas(1024) unsigned char tiles[16384];
    for (int i = threadIdx.x; i < 16384; i += blockDim.x) tiles[i] = 0x03 + (i & 3);
    __syncthreads();
    unsigned int address = static_cast<unsigned int>(__cvta_generic_to_shared(tiles));
    unsigned long long part = ((address & 0x3FFFF) >> 4) | (8ull << 16) | (16ull << 32);  // no swizzle
    unsigned long long other = part + 256;
    int d[64] = {};
    for (int i = 0; i < rounds; ++i) {
        asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
        for (int k = 0; k < 4; ++k) asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63}, %64, %65, 1;\n"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]),
          "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]),
          "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]),
          "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31]),
          "+r"(d[32]), "+r"(d[33]), "+r"(d[34]), "+r"(d[35]), "+r"(d[36]), "+r"(d[37]), "+r"(d[38]), "+r"(d[39]),
          "+r"(d[40]), "+r"(d[41]), "+r"(d[42]), "+r"(d[43]), "+r"(d[44]), "+r"(d[45]), "+r"(d[46]), "+r"(d[47]),
          "+r"(d[48]), "+r"(d[49]), "+r"(d[50]), "+r"(d[51]), "+r"(d[52]), "+r"(d[53]), "+r"(d[54]), "+r"(d[55]),
          "+r"(d[56]), "+r"(d[57]), "+r"(d[58]), "+r"(d[59]), "+r"(d[60]), "+r"(d[61]), "+r"(d[62]), "+r"(d[63])
        : "l"(part), "l"(other));
        asm volatile("wgmma.commit_group.sync.aligned;\n" "wgmma.wait_group.sync.aligned 0;\n" ::: "memory");
    }
    int sum = 0;
    for (int i = 0; i < 64; ++i) sum += d[i];
    if (sum == static_cast<int>(12345)) out[threadIdx.x] = sum;
}
#endif
