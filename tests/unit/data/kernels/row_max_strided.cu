/* optiml
[[launch]]
kernel = "row_max"
grid = ["min(ceil_div(R, BLOCK), 64)"]
block = ["BLOCK"]
args = ["m", "top", "R", "C"]
[params]
BLOCK = 64
*/
extern "C" __global__ void row_max(const float* __restrict__ m, float* __restrict__ top, int R, int C) {
    for (int r = blockIdx.x * BLOCK + threadIdx.x; r < R; r += gridDim.x * BLOCK) {
        float best = m[(long long)r * C];
        for (int k = 1; k < C; k += 1) best = fmaxf(best, m[(long long)r * C + k]);
        top[r] = best;
    }
}
