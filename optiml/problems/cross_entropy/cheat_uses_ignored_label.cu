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

// Wrong: takes -100 for a class and reads in front of the row (of the array, in the first row).
extern "C" __global__ void cross_entropy(const T* x, const int* labels, T* loss, int R, int C)
{
    int row = blockIdx.x * BLOCK + threadIdx.x;
    if (row >= R) return;
    const T* in = x + (long long)row * C;
    A largest = up(in[0]);
    for (int c = 1; c < C; c++) largest = max(largest, up(in[c]));
    A total = 0;
    for (int c = 0; c < C; c++) total += exp(up(in[c]) - largest);
    loss[row] = down(log(total) - (up(in[labels[row]]) - largest));
}
