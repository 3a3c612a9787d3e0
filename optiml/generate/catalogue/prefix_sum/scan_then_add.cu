/* optiml
[[launch]]
kernel = "scan_tiles"
grid = ["ceil_div(n, 4*BLOCK)"]
block = ["BLOCK"]
args = ["x", "y", "offsets", "n"]
[[launch]]
kernel = "scan_offsets"
grid = [1]
block = [1024]
args = ["offsets", "ceil_div(n, 4*BLOCK)"]
[[launch]]
kernel = "add_offsets"
grid = ["ceil_div(n, 4*BLOCK)"]
block = ["BLOCK"]
args = ["y", "offsets", "n"]
[params]
BLOCK = 256
[tunables]
BLOCK = [128, 256, 512, 1024]
[workspace.offsets]
dtype = "float64"
shape = ["ceil_div(n, 4*BLOCK)"]
init = "none"
[strategy]
title = "scan tiles, scan their sums, add them back"
rationale = "All multiprocessors work: every block scans one tile with warp shuffles, one block scans the sums of the tiles, and a third pass adds them. Tile sums stay in float64, so the error does not grow with the number of tiles."
moves = ["sm__warps_active.avg.pct_of_peak_sustained_active", "gpu__time_duration.sum", "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"]
dtypes = ["float32", "float64"]
requires = []
*/
//@ types

constexpr int ITEMS = 4;  // neighbouring elements per thread
constexpr int WARPS = BLOCK / 32;

__device__ __forceinline__ bool is_aligned(const T* base) {
    return reinterpret_cast<unsigned long long>(base) % sizeof(Pack<ITEMS>) == 0;
}

template <typename Number>
__device__ __forceinline__ Number warp_scan(Number value, int lane) {  // inclusive
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        Number left = __shfl_up_sync(0xffffffffu, value, step);
        if (lane >= step) value += left;
    }
    return value;
}

// y: prefix sums within each tile of BLOCK * ITEMS elements; offsets: the sums of the tiles.
extern "C" __global__ void __launch_bounds__(BLOCK)
scan_tiles(const T* __restrict__ x, T* __restrict__ y, double* __restrict__ offsets, long long n) {
    __shared__ A warp_totals[WARPS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    long long first = ((long long)blockIdx.x * BLOCK + threadIdx.x) * ITEMS;
    bool whole = is_aligned(x) && is_aligned(y) && first + ITEMS <= n;
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
    if (lane == 31) warp_totals[warp] = up_to_thread;
    __syncthreads();
    A totals = warp_scan(lane < WARPS ? warp_totals[lane] : A(0), lane);
    A before_thread = __shfl_up_sync(0xffffffffu, up_to_thread, 1);
    A before_warp = __shfl_sync(0xffffffffu, totals, warp > 0 ? warp - 1 : 0);
    A before = (warp > 0 ? before_warp : A(0)) + (lane > 0 ? before_thread : A(0));
    if (threadIdx.x == BLOCK - 1) offsets[blockIdx.x] = before + sum[ITEMS - 1];

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

// In place: offsets[i] becomes the sum of all before it.
extern "C" __global__ void __launch_bounds__(1024) scan_offsets(double* offsets, long long count) {
    __shared__ double warp_totals[2][32];  // two sets in turn: one barrier per round
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, set = 0;
    double carry = 0;
    for (long long first = 0; first < count; first += 1024, set ^= 1) {
        long long i = first + threadIdx.x;
        double value = i < count ? offsets[i] : 0.0;
        double inclusive = warp_scan(value, lane);
        if (lane == 31) warp_totals[set][warp] = inclusive;
        __syncthreads();
        double totals = warp_scan(warp_totals[set][lane], lane);
        double before_thread = __shfl_up_sync(0xffffffffu, inclusive, 1);
        double before_warp = __shfl_sync(0xffffffffu, totals, warp > 0 ? warp - 1 : 0);
        double before = carry + (warp > 0 ? before_warp : 0.0) + (lane > 0 ? before_thread : 0.0);
        if (i < count) offsets[i] = before;
        carry += __shfl_sync(0xffffffffu, totals, 31);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
add_offsets(T* __restrict__ y, const double* __restrict__ offsets, long long n) {
    long long first = ((long long)blockIdx.x * BLOCK + threadIdx.x) * ITEMS;
    A offset = A(offsets[blockIdx.x]);
    if (is_aligned(y) && first + ITEMS <= n) {
        Pack<ITEMS> pack = *reinterpret_cast<Pack<ITEMS>*>(y + first);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) pack.v[i] = down(up(pack.v[i]) + offset);
        *reinterpret_cast<Pack<ITEMS>*>(y + first) = pack;
    } else {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (first + i < n) y[first + i] = down(up(y[first + i]) + offset);
        }
    }
}
