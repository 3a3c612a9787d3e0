/* optiml
[[launch]]
kernel = "prefix_sum"
grid = [1]
block = ["BLOCK"]
args = ["x", "y", "n"]
[params]
BLOCK = 512
[tunables]
BLOCK = [256, 512, 1024]
[strategy]
title = "one block walks over the array in tiles, warp shuffles and a carry"
rationale = "Each element is read once, by neighbouring threads in 16-byte pieces, in place of two walks with a stride of n / BLOCK; one launch and no workspace make it the choice for short arrays."
moves = ["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum", "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum", "smsp__inst_executed.sum"]
dtypes = ["float32", "float16", "bfloat16", "float64", "int32"]
requires = []
*/
//@ types

constexpr int ITEMS = 4;  // neighbouring elements per thread
constexpr int WARPS = BLOCK / 32;

__device__ __forceinline__ bool is_aligned(const T* base) {
    return reinterpret_cast<unsigned long long>(base) % sizeof(Pack<ITEMS>) == 0;
}

__device__ __forceinline__ A warp_scan(A value, int lane) {  // inclusive
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        A left = __shfl_up_sync(0xffffffffu, value, step);
        if (lane >= step) value += left;
    }
    return value;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
prefix_sum(const T* __restrict__ x, T* __restrict__ y, long long n) {
    __shared__ A warp_totals[2][WARPS];  // two sets in turn: one barrier per tile
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, set = 0;
    bool aligned = is_aligned(x) && is_aligned(y);
    A carry = 0;
    for (long long tile = 0; tile < n; tile += BLOCK * ITEMS, set ^= 1) {
        long long first = tile + threadIdx.x * ITEMS;
        bool whole = aligned && first + ITEMS <= n;
        A sum[ITEMS];
        if (whole) {
            Pack<ITEMS> pack = *reinterpret_cast<const Pack<ITEMS>*>(x + first);
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) sum[i] = up(pack.v[i]);
        } else {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) sum[i] = first + i < n ? up(x[first + i]) : A(0);
        }
#pragma unroll
        for (int i = 1; i < ITEMS; ++i) sum[i] += sum[i - 1];

        A up_to_thread = warp_scan(sum[ITEMS - 1], lane);
        if (lane == 31) warp_totals[set][warp] = up_to_thread;
        __syncthreads();
        A totals = warp_scan(lane < WARPS ? warp_totals[set][lane] : A(0), lane);
        A before_thread = __shfl_up_sync(0xffffffffu, up_to_thread, 1);
        A before_warp = __shfl_sync(0xffffffffu, totals, warp > 0 ? warp - 1 : 0);
        A before = carry + (warp > 0 ? before_warp : A(0)) + (lane > 0 ? before_thread : A(0));
        carry += __shfl_sync(0xffffffffu, totals, WARPS - 1);

        if (whole) {
            Pack<ITEMS> pack;
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) pack.v[i] = down(before + sum[i]);
            *reinterpret_cast<Pack<ITEMS>*>(y + first) = pack;
        } else {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                if (first + i < n) y[first + i] = down(before + sum[i]);
            }
        }
    }
}
