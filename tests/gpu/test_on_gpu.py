"""The GPU path on a real GPU."""

from __future__ import annotations

import pytest

from optiml.errors import SetupError
from optiml.toolchain.tools import find_tool
from optiml.workbench import Workbench, seed_kernel

pytestmark = pytest.mark.gpu

HEAD = """\
extern "C" __global__ void relu(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
"""
RIGHT = "  if (i < n) y[i] = fmaxf(x[i], 0.0f);\n}\n"


def test_a_right_kernel_is_accepted(gpu: Workbench) -> None:
    problem = gpu.problem("relu")
    verdict = gpu.verify(seed_kernel(problem), problem)
    assert (verdict.status, verdict.levels) == ("accepted", ("L0", "L1"))
    assert verdict.device is not None
    assert verdict.device.kind == "cuda"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("  if (i == 0) __trap();\n", "fault"),
        ("  if (i == 0) *(volatile float*)0 = 1.0f;\n", "fault"),
        ("  if (i == 0) y[n] = 1.0f;\n", "fault"),
        ("  while (*(volatile const float*)x < 1e30f) { }\n", "timed_out"),
        ("  if (n > 0) return;\n", "unwritten_output"),
    ],
)
def test_a_broken_kernel_is_rejected_and_the_next_one_accepted(gpu: Workbench, line: str, reason: str) -> None:
    problem = gpu.problem("relu")
    assert gpu.verify(HEAD + line + RIGHT, problem).reason == reason
    assert gpu.verify(seed_kernel(problem), problem, seed=7).status == "accepted"


def test_level_two_runs_the_four_sanitizers(gpu: Workbench) -> None:
    if find_tool("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not installed")
    problem = gpu.problem("softmax")
    verdict = gpu.verify(seed_kernel(problem), problem, level="L2")
    assert verdict.status == "accepted", verdict.detail
    assert verdict.sanitizer == dict.fromkeys(("memcheck", "racecheck", "initcheck", "synccheck"), "clean")


def test_a_read_of_what_nothing_wrote_is_found_at_level_two(gpu: Workbench) -> None:
    if find_tool("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not installed")
    problem = gpu.problem("relu")
    line = "  if (i < n && __float_as_int(y[i]) == 123456789) return;\n"
    verdict = gpu.verify(HEAD + line + RIGHT, problem, level="L2")
    assert verdict.reason == "fault", verdict.detail
    assert verdict.fault is not None
    assert (verdict.fault.kind, verdict.fault.line) == ("uninitialised", 3)


def test_times_are_measured_and_a_kernel_is_as_fast_as_itself(gpu: Workbench) -> None:
    problem = gpu.problem("relu")
    kernel = seed_kernel(problem)
    profile = gpu.compare(kernel, kernel, problem)
    assert profile.time.source == "measured"
    assert profile.comparison is not None
    assert profile.comparison.verdict == "same"
    assert profile.comparison.ci95 is not None


GRID_WIDE = """\
/* optiml
[[launch]]
kernel = "scaled"
grid = [16]
block = [256]
cooperative = true
args = ["x", "y", "largest", "n"]
[workspace.largest]
dtype = "int32"
shape = [1]
init = "zero"
*/
#include <cooperative_groups.h>
extern "C" __global__ void scaled(const float* x, float* y, int* largest, int n) {
  int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  for (int i = first; i < n; i += step) atomicMax(largest, __float_as_int(fabsf(x[i])));
  cooperative_groups::this_grid().sync();
  for (int i = first; i < n; i += step) y[i] = x[i] / __int_as_float(*(volatile int*)largest);
}
"""
LARGEST = {
    "name": "by_the_largest",
    "axes": {"n": {"type": "var", "min": 1}},
    "inputs": {"x": {"dtype": "float32", "shape": ["n"]}},
    "outputs": {"y": {"dtype": "float32", "shape": ["n"]}},
    "reference": "import numpy as np\ndef run(x): return x / np.abs(x).max()",
    "workloads": [{"axes": {"n": 5000}}, {"axes": {"n": 77}}],
    "bench": [{"axes": {"n": 1 << 20}}],
    "baselines": {"mine": "def run(x):\n    return x / x.abs().max()\n"},
}
NEIGHBOUR = """\
/* optiml
[[launch]]
kernel = "relu"
grid = ["2 * ceil_div(n, 512)"]
block = [256]
cluster = [2]
args = ["x", "y", "n"]
*/
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
extern "C" __global__ void relu(const float* x, float* y, int n) {
  __shared__ float mine[256];
  cg::cluster_group cluster = cg::this_cluster();
  unsigned i = (blockIdx.x ^ 1u) * 256 + threadIdx.x;
  mine[threadIdx.x] = i < n ? x[i] : 0.0f;
  cluster.sync();
  float* other = cluster.map_shared_rank(mine, cluster.block_rank() ^ 1u);
  unsigned j = blockIdx.x * 256 + threadIdx.x;
  if (j < n) y[j] = fmaxf(other[threadIdx.x], 0.0f);
  cluster.sync();
}
"""


def test_a_barrier_of_the_whole_grid_works_in_a_cooperative_launch(gpu: Workbench) -> None:
    verdict = gpu.verify(GRID_WIDE, LARGEST)
    assert verdict.status == "accepted", verdict.detail
    profile = gpu.profile(GRID_WIDE, LARGEST)
    assert profile.time.source == "measured"


def test_a_barrier_of_the_whole_grid_breaks_an_ordinary_launch(gpu: Workbench) -> None:
    assert gpu.verify(GRID_WIDE.replace("cooperative = true\n", ""), LARGEST).reason == "fault"


def test_a_cooperative_launch_of_too_many_blocks_is_refused(gpu: Workbench) -> None:
    assert gpu.verify(GRID_WIDE.replace("grid = [16]", "grid = [60000]"), LARGEST).reason == "bad_launch"


def test_blocks_of_a_cluster_read_each_others_shared_memory(gpu: Workbench) -> None:
    if gpu.evaluator().device.info.arch < "sm_90":
        pytest.skip("this GPU has no clusters")
    verdict = gpu.verify(NEIGHBOUR, "relu")
    assert verdict.status == "accepted", verdict.detail


def test_a_callers_own_baseline_is_timed_beside_the_kernel(gpu: Workbench) -> None:
    pytest.importorskip("torch")
    profile = gpu.profile(GRID_WIDE, LARGEST)
    assert profile.baselines["mine"] > 0, profile.warnings


def test_a_device_that_does_not_exist_is_named_with_those_that_do(gpu: Workbench) -> None:
    problem = gpu.problem("relu")
    with pytest.raises(SetupError, match=r"cuda:0 \(") as caught:
        gpu.verify(seed_kernel(problem), problem, device="cuda:99")
    assert caught.value.code == "no_device"
