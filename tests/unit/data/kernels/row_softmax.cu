/* optiml
[[launch]]
kernel = "smax"
grid = ["(R + 63) // 64"]
block = [64]
args = ["logits", "prob", "R", "C"]
*/
extern "C" __global__ void smax(const float* logits, float* prob, int R, int C)
{
    int r = threadIdx.x + blockDim.x * blockIdx.x;
    if (r < R) {
        float best = -1e30f;
        for (int c = 0; c < C; ++c)
            if (logits[r * C + c] > best) best = logits[r * C + c];
        float total = 0.0f;
        for (int c = 0; c < C; ++c) {
            float e = expf(logits[r * C + c] - best);
            prob[r * C + c] = e;
            total = total + e;
        }
        for (int c = 0; c < C; ++c)
            prob[r * C + c] /= total;
    }
}
