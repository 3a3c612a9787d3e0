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


def test_a_device_that_does_not_exist_is_named_with_those_that_do(gpu: Workbench) -> None:
    problem = gpu.problem("relu")
    with pytest.raises(SetupError, match=r"cuda:0 \(") as caught:
        gpu.verify(seed_kernel(problem), problem, device="cuda:99")
    assert caught.value.code == "no_device"
