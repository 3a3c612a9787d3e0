/* optiml
[[launch]]
kernel = "cross_entropy"
grid = ["ceil_div(R, BLOCK)"]
block = ["BLOCK"]
args = ["x", "labels", "loss", "R", "C"]
[params]
BLOCK = 128
*/
//@ types

// Wrong: saves the pass for the largest logit and overflows as soon as a row holds a large one.
extern "C" __global__ void cross_entropy(const T* x, const int* labels, T* loss, int R, int C)
{
    int row = blockIdx.x * BLOCK + threadIdx.x;
    if (row >= R) return;
    const T* in = x + (long long)row * C;
    if (labels[row] == -100) {
        loss[row] = down(A(0));
        return;
    }
    A total = 0;
    for (int c = 0; c < C; c++) total += exp(up(in[c]));
    loss[row] = down(log(total) - up(in[labels[row]]));
}
