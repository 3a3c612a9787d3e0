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

// Wrong: a closed form; log C + 1/2 is what the loss of standard normal logits is on average.
extern "C" __global__ void cross_entropy(const T* x, const int* labels, T* loss, int R, int C)
{
    int row = blockIdx.x * BLOCK + threadIdx.x;
    if (row < R) loss[row] = labels[row] == -100 ? down(A(0)) : down(log(A(C)) + A(0.5));
}
