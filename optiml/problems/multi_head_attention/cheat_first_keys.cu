/* optiml
[[launch]]
kernel = "attention"
grid = ["ceil_div(B*H*S*D, 128)"]
block = [128]
args = ["q", "k", "v", "y", "B*H*S*D", "S", "D"]
*/
//@ types

// Partial work: looks at the first 16 keys only.
extern "C" __global__ void attention(const T* q, const T* k, const T* v, T* y, long long size, int S, int D) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    long long query = i / D, head = query / S;
    int keys = S < 16 ? S : 16;
    A scale = A(1) / sqrt(A(D));
    A largest = -INFINITY, total = 0, result = 0;
    for (int j = 0; j < keys; ++j) {
        A score = 0;
        for (int d = 0; d < D; ++d) score += up(q[query * D + d]) * up(k[(head * S + j) * D + d]);
        A peak = max(largest, score * scale);
        A weight = exp(score * scale - peak), shrink = exp(largest - peak);
        total = total * shrink + weight;
        result = result * shrink + weight * up(v[(head * S + j) * D + i % D]);
        largest = peak;
    }
    y[i] = down(result / total);
}
