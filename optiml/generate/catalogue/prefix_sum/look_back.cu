/* optiml
[[launch]]
kernel = "prefix_sum"
grid = ["ceil_div(n, SHARE*BLOCK)"]
block = ["BLOCK"]
args = ["x", "y", "states", "ticket", "n"]
[params]
BLOCK = 256
SHARE = 32
[tunables]
BLOCK = [128, 256, 512]
SHARE = [16, 32]
[workspace.states]
dtype = "int64"
shape = ["ceil_div(n, SHARE*BLOCK)"]
init = "zero"
[workspace.ticket]
dtype = "int32"
shape = [1]
init = "zero"
[strategy]
title = "one pass, each tile looks back at the tiles before it"
rationale = "Every element is read once and written once: a block scans its tile in registers, publishes the sum, and adds up the published sums before it, back to the nearest tile whose whole prefix is known. Blocks take tiles in the order in which they start, so none waits for one that has not begun."
moves = ["dram__bytes.sum", "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum", "gpu__time_duration.sum"]
dtypes = ["float32", "float16", "bfloat16"]
requires = []
*/
//@ types

constexpr int ITEMS = 16 / ELEMENT_BYTES;  // neighbouring elements per load
constexpr int ROUNDS = SHARE / ITEMS;      // loads per thread
constexpr int WARPS = BLOCK / 32;
constexpr int WARP_SHARE = 32 * ITEMS * ROUNDS;
enum State : unsigned { UNKNOWN = 0, SUM_OF_TILE = 1, SUM_UP_TO_TILE = 2 };

// State and sum share one 64-bit word, so that they are always seen together.
__device__ __forceinline__ long long packed(State state, float sum) {
    return (long long)state << 32 | __float_as_uint(sum);
}

__device__ __forceinline__ bool is_aligned(const T* base) {
    return reinterpret_cast<unsigned long long>(base) % sizeof(Pack<ITEMS>) == 0;
}

__device__ __forceinline__ float warp_scan(float value, int lane) {  // inclusive
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        float left = __shfl_up_sync(0xffffffffu, value, step);
        if (lane >= step) value += left;
    }
    return value;
}

// The sum of all tiles before `tile`; for one whole warp.
__device__ __forceinline__ float sum_before(const volatile long long* states, long long tile, int lane) {
    float sum = 0;
    for (long long nearest = tile - 1; nearest >= 0; nearest -= 32) {
        bool exists = nearest >= lane;
        const volatile long long* mine = states + (exists ? nearest - lane : 0);
        long long word;
        do {
            word = *mine;
            if (!exists) word = packed(SUM_UP_TO_TILE, 0.f);
        } while (__any_sync(0xffffffffu, word >> 32 == UNKNOWN));
        unsigned complete = __ballot_sync(0xffffffffu, word >> 32 == SUM_UP_TO_TILE);
        int last = complete != 0 ? __ffs(complete) - 1 : 31;
        float part = lane <= last ? __uint_as_float(unsigned(word)) : 0.f;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) part += __shfl_xor_sync(0xffffffffu, part, step);
        sum += part;
        if (complete != 0) break;
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
prefix_sum(const T* __restrict__ x, T* __restrict__ y, volatile long long* states, int* ticket, long long n) {
    __shared__ int taken;
    __shared__ float warp_totals[WARPS];
    __shared__ float before_tile;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) taken = atomicAdd(ticket, 1);
    __syncthreads();
    long long tile = taken;
    long long base = (tile * WARPS + warp) * WARP_SHARE + lane * ITEMS;  // this lane's first element
    bool aligned = is_aligned(x) && is_aligned(y);

    float sum[ROUNDS][ITEMS];  // from the start of the warp's share
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        long long first = base + r * 32 * ITEMS;
        if (aligned && first + ITEMS <= n) {
            Pack<ITEMS> pack = *reinterpret_cast<const Pack<ITEMS>*>(x + first);
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) sum[r][i] = up(pack.v[i]);
        } else {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) sum[r][i] = first + i < n ? up(x[first + i]) : 0.f;
        }
    }
    float warp_total = 0;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
#pragma unroll
        for (int i = 1; i < ITEMS; ++i) sum[r][i] += sum[r][i - 1];
        float inclusive = warp_scan(sum[r][ITEMS - 1], lane);
        float before_lane = __shfl_up_sync(0xffffffffu, inclusive, 1);
        float before = warp_total + (lane > 0 ? before_lane : 0.f);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) sum[r][i] += before;
        warp_total += __shfl_sync(0xffffffffu, inclusive, 31);
    }
    if (lane == 0) warp_totals[warp] = warp_total;
    __syncthreads();

    float up_to_warp = warp_scan(lane < WARPS ? warp_totals[lane] : 0.f, lane);
    float before_warp = __shfl_sync(0xffffffffu, up_to_warp, warp > 0 ? warp - 1 : 0);
    float tile_total = __shfl_sync(0xffffffffu, up_to_warp, WARPS - 1);
    if (warp == 0) {
        if (lane == 0 && tile > 0) states[tile] = packed(SUM_OF_TILE, tile_total);
        float before = sum_before(states, tile, lane);
        if (lane == 0) {
            states[tile] = packed(SUM_UP_TO_TILE, before + tile_total);
            before_tile = before;
        }
    }
    __syncthreads();

    float before = before_tile + (warp > 0 ? before_warp : 0.f);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        long long first = base + r * 32 * ITEMS;
        if (aligned && first + ITEMS <= n) {
            Pack<ITEMS> pack;
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) pack.v[i] = down(before + sum[r][i]);
            *reinterpret_cast<Pack<ITEMS>*>(y + first) = pack;
        } else {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                if (first + i < n) y[first + i] = down(before + sum[r][i]);
            }
        }
    }
}
