/* optiml
[[launch]]
kernel = "diffuse"
grid = ["ceil_div(H, 16)", "ceil_div(W, 16)"]
block = [16, 16]
args = ["u", "v", "H", "W"]
*/
extern "C" __global__ void diffuse(const float* u, float* v, int H, int W) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;   // rows on the fast axis: uncoalesced
    int col = blockIdx.y * blockDim.y + threadIdx.y;
    if (row >= H || col >= W) return;
    float centre = u[row * W + col];
    float up = row > 0 ? u[(row - 1) * W + col] : centre;
    float down = row + 1 < H ? u[(row + 1) * W + col] : centre;
    float left = col > 0 ? u[row * W + col - 1] : centre;
    float right = col + 1 < W ? u[row * W + col + 1] : centre;
    v[row * W + col] = centre + 0.2f * (up + down + left + right - 4.0f * centre);
}
