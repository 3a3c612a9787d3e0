/* optiml
[[launch]]
kernel = "cross_entropy"
grid = [1]
block = [128]
args = ["x", "labels", "loss", "R", "C"]
*/
//@ types

// Wrong: one block whatever the number of rows, so the rows from 128 on stay unwritten.
extern "C" __global__ void cross_entropy(const T* x, const int* labels, T* loss, int R, int C)
{
    int row = threadIdx.x;
    if (row >= R) return;
    const T* in = x + (long long)row * C;
    if (labels[row] == -100) {
        loss[row] = down(A(0));
        return;
    }
    A largest = up(in[0]);
    for (int c = 1; c < C; c++) largest = max(largest, up(in[c]));
    A total = 0;
    for (int c = 0; c < C; c++) total += exp(up(in[c]) - largest);
    loss[row] = down(log(total) - (up(in[labels[row]]) - largest));
}
