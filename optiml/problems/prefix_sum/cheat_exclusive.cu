/* optiml
[[launch]]
kernel = "prefix_sum"
grid = [1]
block = [1]
args = ["x", "y", "n"]
*/
//@ types

// The exclusive sum: every element is off by its own input.
extern "C" __global__ void prefix_sum(const T* x, T* y, long long n) {
    A sum = 0;
    for (long long i = 0; i < n; ++i) {
        y[i] = down(sum);
        sum += up(x[i]);
    }
}
