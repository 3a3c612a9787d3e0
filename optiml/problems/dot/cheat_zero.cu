/* optiml
[[launch]]
kernel = "dot"
grid = [1]
block = [1]
args = ["out"]
*/
//@ types

// Wrong: zero, the average dot product of independent normal vectors.
extern "C" __global__ void dot(T* out)
{
    out[0] = down(A(0));
}
