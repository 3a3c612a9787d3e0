/* optiml
[[launch]]
kernel = "attention"
grid = ["ceil_div(B*H*S, 128)"]
block = [128]
args = ["q", "k", "v", "y", "B*H*S", "S", "D"]
*/
//@ types

// Partial work: looks at the first 16 keys only.
extern "C" __global__ void attention(const T* q, const T* k, const T* v, T* y, long long queries, int S, int D) {
    long long query = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (query >= queries) return;
    long long head = query / S;
    int keys = S < 16 ? S : 16;
    A scale = A(1) / sqrt(A(D));
    A scores[16];
    A largest = -INFINITY;
    for (int j = 0; j < keys; ++j) {
        A score = 0;
        for (int d = 0; d < D; ++d) score += up(q[query * D + d]) * up(k[(head * S + j) * D + d]);
        scores[j] = score * scale;
        largest = max(largest, scores[j]);
    }
    for (int d = 0; d < D; ++d) {
        A result = 0, total = 0;
        for (int j = 0; j < keys; ++j) {
            A weight = exp(scores[j] - largest);
            total += weight;
            result += weight * up(v[(head * S + j) * D + d]);
        }
        y[query * D + d] = down(result / total);
    }
}
