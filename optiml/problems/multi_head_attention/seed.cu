/* optiml
[[launch]]
kernel = "score"
grid = ["ceil_div(B*H*S*S, BLOCK)"]
block = ["BLOCK"]
args = ["q", "k", "weights", "B*H*S", "S", "D"]
[[launch]]
kernel = "softmax"
grid = ["ceil_div(B*H*S, BLOCK)"]
block = ["BLOCK"]
args = ["weights", "B*H*S", "S"]
[[launch]]
kernel = "add_values"
grid = ["ceil_div(B*H*S*D, BLOCK)"]
block = ["BLOCK"]
args = ["weights", "v", "y", "B*H*S", "S", "D"]
[params]
BLOCK = 128
[tunables]
BLOCK = [64, 128, 256]
[workspace.weights]
dtype = "float64"  # room for A, whichever it is
shape = ["B*H*S", "S"]
init = "none"
*/
//@ types

// weights[i, j] = q[i] . k[j] / sqrt(D): one thread per pair of a query and a key of its head.
extern "C" __global__ void score(const T* q, const T* k, A* weights, long long queries, int S, int D) {
    long long pair = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (pair >= queries * S) return;
    long long query = pair / S, key = query / S * S + pair % S;
    A sum = 0;
    for (int d = 0; d < D; ++d) sum += up(q[query * D + d]) * up(k[key * D + d]);
    weights[pair] = sum / sqrt(A(D));
}

// One thread per row.
extern "C" __global__ void softmax(A* weights, long long queries, int S) {
    long long query = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (query >= queries) return;
    A* row = weights + query * S;
    A largest = row[0];
    for (int j = 1; j < S; ++j) largest = max(largest, row[j]);
    A total = 0;
    for (int j = 0; j < S; ++j) {
        row[j] = exp(row[j] - largest);
        total += row[j];
    }
    for (int j = 0; j < S; ++j) row[j] = row[j] / total;
}

// One thread per element of y.
extern "C" __global__ void add_values(const A* weights, const T* v, T* y, long long queries, int S, int D) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= queries * D) return;
    long long query = i / D, first_key = query / S * S;
    A sum = 0;
    for (int j = 0; j < S; ++j) sum += weights[query * S + j] * up(v[(first_key + j) * D + i % D]);
    y[i] = down(sum);
}
