"""Profiles of a device that keeps real time, over scripted samples."""

from __future__ import annotations

from typing import Any

import pytest
from test_cuda_context import REPORT
from test_timing import ScriptedGpu

from optiml.errors import InvalidInput, SetupError
from optiml.measure.measured import Counters, MeasuredProfiler, Rival, compared, stand_in
from optiml.measure.timing import Budget
from optiml.problems.problem import load_builtin
from optiml.records import Build, Kernel
from optiml.workbench import seed_kernel

PROBLEM = load_builtin("relu").problem
KERNEL: Kernel = seed_kernel(PROBLEM)
ENTRY = ".visible .entry relu(.param .u64 x, .param .u64 y, .param .u32 n)"
BUILD = Build(
    kernel_id="0" * 16, report=REPORT, ptx=ENTRY, cubin=b"c", entries={KERNEL.launches[0].kernel: "relu"}, resources={}
)


class Reader:
    """Counters, or the reason why there are none."""

    version = "reader/1"

    def __init__(self, answer: Counters | SetupError) -> None:
        self._answer = answer
        self.calls = 0

    def read(self, *_: Any, **__: Any) -> Counters:
        self.calls += 1
        if isinstance(self._answer, SetupError):
            raise self._answer
        return self._answer


def profiled(gpu: ScriptedGpu, profiler: MeasuredProfiler, rival: Rival | None = None) -> Any:
    common: dict[str, Any] = {"bench": PROBLEM.bench, "timeout_s": 1.0}
    if rival is None:
        return profiler.profile(KERNEL, BUILD, PROBLEM, gpu, **common)
    return profiler.profile_against(
        KERNEL, BUILD, PROBLEM, gpu, rival, budget=Budget(seconds=5.0), **common
    )  # fmt: skip


def test_a_profile_states_the_measured_time_its_noise_and_its_share_of_the_speed_of_light() -> None:
    profile = profiled(ScriptedGpu(56.0), MeasuredProfiler(counted=False))
    assert profile.time.source == "measured"
    assert profile.time.median_us == pytest.approx(56.0, rel=0.06)
    assert profile.speed_of_light is not None
    assert profile.speed_of_light.pct == pytest.approx(50.0, rel=0.06)
    assert "A/A noise" in profile.summary
    assert profile.conditions["driver"] == "580.1"


def test_counters_of_the_hardware_are_labelled_and_missing_ones_stay_unknown() -> None:
    reader = Reader(Counters(values={"dram__bytes.sum": 1.3e8, "sm__odd": None}))
    profile = profiled(ScriptedGpu(56.0), MeasuredProfiler(counters=reader, counted=False))
    assert profile.metrics == {"dram__bytes.sum": 1.3e8, "sm__odd": None}
    assert profile.metric_source == {"dram__bytes.sum": "ncu"}


def test_counters_of_a_kernel_are_read_once_however_often_it_is_timed() -> None:
    reader = Reader(Counters(values={"dram__bytes.sum": 1.3e8}))
    profiler = MeasuredProfiler(counters=reader, counted=False)
    first, second = (profiled(ScriptedGpu(56.0), profiler) for _ in range(2))
    assert first.metrics == second.metrics
    assert reader.calls == 1


def test_without_the_permission_to_read_counters_the_rest_of_the_profile_stands() -> None:
    reader = Reader(SetupError("ask your administrator", code="profiler_forbidden"))
    profile = profiled(ScriptedGpu(56.0), MeasuredProfiler(counters=reader, counted=False))
    assert profile.time.source == "measured"
    assert any("profiler_forbidden: ask your administrator" in warning for warning in profile.warnings)


def test_a_rival_gives_a_comparison_and_the_scale_of_the_time() -> None:
    rival = Rival(kernel=KERNEL, build=BUILD, time_us=100.0)
    profile = profiled(ScriptedGpu(40.0, 60.0), MeasuredProfiler(counted=False), rival)
    assert profile.comparison is not None
    assert profile.comparison.verdict == "faster"
    assert profile.comparison.ratio == pytest.approx(1.5, rel=0.01)
    assert profile.time.median_us == pytest.approx(100.0 / 1.5, rel=0.01)
    assert compared(profile, profile).comparison is not None


def test_a_device_without_real_time_is_refused() -> None:
    class Timeless:
        info = ScriptedGpu.info

        def run(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

        def close(self) -> None:
            return

    with pytest.raises(InvalidInput, match="keeps no real time"):
        profiled(Timeless(), MeasuredProfiler(counted=False))  # type: ignore[arg-type]


def test_a_gpu_without_a_table_is_stood_for_by_one_of_its_generation() -> None:
    assert [stand_in("other", arch) for arch in ("sm_80", "sm_89", "sm_90", "sm_100")] == [
        "a100",
        "a100",
        "h200",
        "h200",
    ]
    assert stand_in("h100", "sm_90") == "h100"
