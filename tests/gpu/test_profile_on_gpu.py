"""Profiles on a real GPU: counters, ceilings, energy, and what must not hang."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest

from optiml.device.cuda_job import JobItem
from optiml.device.plan import Plan, PlannedArray, PlannedLaunch, Pointer
from optiml.errors import SetupError, WorkerTimeout
from optiml.measure.nsight import Ncu, open_ncu, profile_job
from optiml.records import Build, Kernel, Launch
from optiml.settings import read_settings
from optiml.workbench import Workbench, seed_kernel

pytestmark = pytest.mark.gpu
SPIN = Kernel(
    source='extern "C" __global__ void spin(volatile int* f) { while (!*f) {} }',
    launches=(Launch(kernel="spin", grid=(1,), block=(1,), args=("f",)),),
)


@pytest.fixture
def ncu() -> Ncu:
    try:
        return open_ncu()
    except SetupError as error:
        pytest.skip(str(error))


def test_a_profile_carries_counters_or_says_why_not(gpu: Workbench, ncu: Ncu) -> None:
    problem = gpu.problem("transpose")
    profile = gpu.profile(seed_kernel(problem), problem)
    assert profile.time.source == "measured"
    assert profile.speed_of_light is not None
    refused = [text for text in profile.warnings if text.startswith("no hardware counters")]
    if refused:
        pytest.skip(refused[0])
    assert set(profile.metric_source.values()) == {"ncu"}
    assert profile.metrics["l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio"] == pytest.approx(32)
    assert "y[column * R + row] = x[i]" in " ".join(line.source for line in profile.hot_lines)
    started = time.monotonic()
    again = gpu.known_profile(seed_kernel(problem), problem)
    assert again is not None
    assert again.cached
    assert time.monotonic() - started < 1.0


def test_somebodys_program_is_profiled_with_a_filter(ncu: Ncu, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    text = "import torch; x = torch.ones(1 << 20, device='cuda'); torch.relu(x); (x @ x); torch.cuda.synchronize()"
    with Workbench(
        read_settings(environment={}, home=str(tmp_path), roots=(Path("/"),), device="cuda:0", allow_commands=True)
    ) as bench:
        report = bench.profile_command([sys.executable, "-c", text], kernel_regex="elementwise", launch_count=2)
    assert report.kernels
    assert all("elementwise" in kernel.name for kernel in report.kernels)


def test_a_kernel_that_never_ends_is_stopped_under_the_profiler(gpu: Workbench, ncu: Ncu) -> None:
    evaluator = gpu.evaluator()
    build = evaluator.build(SPIN)
    assert isinstance(build, Build)
    launch = PlannedLaunch(
        symbol="spin", grid=(1, 1, 1), block=(1, 1, 1), shared_bytes=0, args=(Pointer(name="f"),)
    )  # fmt: skip
    plan = Plan(steps=(launch,), arrays={"f": PlannedArray(dtype="int32", shape=(4,), role="input")})
    item = JobItem(name="spin", build=build, plan=plan, contents={"f": np.zeros(4, np.int32)})
    with pytest.raises(WorkerTimeout, match="one at a time"):
        profile_job(ncu, [item], metrics=("dram__bytes.sum",), timeout_s=8.0)
    problem = gpu.problem("relu")
    assert gpu.verify(seed_kernel(problem), problem).status == "accepted"
