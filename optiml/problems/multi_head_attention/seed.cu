/* optiml
[[launch]]
kernel = "attention"
grid = ["ceil_div(B*H*S, BLOCK)"]
block = ["BLOCK"]
args = ["q", "k", "v", "y", "B*H*S", "S", "D"]
[params]
BLOCK = 128
[tunables]
BLOCK = [32, 64, 128, 256]
*/
//@ types

constexpr int MAX_D = 128;

// One thread per query: one pass over the keys for the largest score, a second one for the weighted sum.
extern "C" __global__ void attention(const T* q, const T* k, const T* v, T* y, long long queries, int S, int D) {
    long long query = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (query >= queries) return;
    long long head = query / S;
    A scale = A(1) / sqrt(A(D));
    A largest = -INFINITY;
    for (int j = 0; j < S; ++j) {
        A score = 0;
        for (int d = 0; d < D; ++d) score += up(q[query * D + d]) * up(k[(head * S + j) * D + d]);
        if (score * scale > largest) largest = score * scale;
    }
    A result[MAX_D];
    for (int d = 0; d < D; ++d) result[d] = 0;
    A total = 0;
    for (int j = 0; j < S; ++j) {
        A score = 0;
        for (int d = 0; d < D; ++d) score += up(q[query * D + d]) * up(k[(head * S + j) * D + d]);
        A weight = exp(score * scale - largest);
        total += weight;
        for (int d = 0; d < D; ++d) result[d] += weight * up(v[(head * S + j) * D + d]);
    }
    for (int d = 0; d < D; ++d) y[query * D + d] = down(result[d] / total);
}
