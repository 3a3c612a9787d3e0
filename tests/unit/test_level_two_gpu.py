"""What level 2 on a GPU makes of the sanitizers' answers and of impossible times."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_measured import BUILD, KERNEL, PROBLEM
from test_timing import INFO, ScriptedGpu

from optiml.device.emulated import EmulatedDevice, emulated_info
from optiml.errors import Fault
from optiml.evaluate import Evaluator
from optiml.measure.measured import MeasuredProfiler
from optiml.records import Build, Kernel, Problem, Verdict
from optiml.store import open_store
from optiml.verify.sanitizer import TOOLS, Sanitized
from optiml.workbench import Workbench

ACCEPTED = Verdict(
    kernel_id="0" * 16, status="accepted", reason=None, detail=None, levels=("L0", "L1"), summary="", next_action="",
    device=INFO,
)  # fmt: skip


def evaluator(folder: Path, answer: Sanitized | None, asked: list[Any] | None = None) -> Evaluator:
    def sanitize(items: Any) -> Sanitized:
        assert answer is not None
        if asked is not None:
            asked.extend(items)
        return answer

    never: Any = None
    gpu: Any = ScriptedGpu(50.0)
    return Evaluator(
        compiler=never, device=gpu, fresh_device=never, references=never, profiler=MeasuredProfiler(counted=False),
        store=open_store(folder, size_limit_bytes=1 << 20), kernel_timeout_s=1.0,
        sanitizer=None if answer is None else sanitize,
    )  # fmt: skip


def judged(folder: Path, answer: Sanitized | None, asked: list[Any] | None = None) -> Verdict:
    return evaluator(folder, answer, asked)._at_level_two(KERNEL, PROBLEM, BUILD, ACCEPTED, 7)


@pytest.mark.parametrize(("kind", "reason"), [("race", "race"), ("uninitialised", "fault"), ("out_of_bounds", "fault")])
def test_a_finding_rejects_with_its_line(tmp_path: Path, kind: str, reason: str) -> None:
    fault = Fault(kind=kind, line=7, detail="memcheck: something, line 7")
    verdict = judged(tmp_path, Sanitized(report={"memcheck": kind}, fault=fault))
    assert (verdict.status, verdict.reason) == ("rejected", reason)
    assert verdict.fault is not None
    assert verdict.fault.line == 7
    assert verdict.sanitizer == {"memcheck": kind}
    assert "line 7" in verdict.summary


def test_a_tool_that_says_nothing_leaves_the_kernel_unverified(tmp_path: Path) -> None:
    verdict = judged(tmp_path, Sanitized(missing="memcheck did not end within 60 s"))
    assert verdict.status == "unverified"
    assert "memcheck did not end within 60 s" in (verdict.detail or "")


def test_without_compute_sanitizer_level_two_cannot_be_reached(tmp_path: Path) -> None:
    assert "compute-sanitizer" in (judged(tmp_path, None).detail or "")


def test_the_tools_see_several_sizes_and_uninitialised_outputs(tmp_path: Path) -> None:
    asked: list[Any] = []
    judged(tmp_path, Sanitized(report=dict.fromkeys(TOOLS, "clean"), fault=Fault(kind="race")), asked)
    assert len({item.name for item in asked}) > 5
    assert all(set(item.contents) == {"x"} for item in asked)


def test_a_time_below_what_the_bytes_need_is_not_believed(tmp_path: Path) -> None:
    made = evaluator(tmp_path, None)
    assert "less than" in (made._below_the_possible(PROBLEM, 5.0) or "")
    assert made._below_the_possible(PROBLEM, 30.0) is None


class OneBuild:
    """A compiler of one kernel."""

    version = "one build"

    def compile(self, kernel: Any, arch: str) -> Any:
        return BUILD

    def close(self) -> None: ...


def judged_together(folder: Path, clean: bool) -> tuple[list[Verdict], list[int]]:
    """Verdicts of two kernels that passed level 1, and how many cases each start of the sanitizers saw."""
    starts: list[int] = []
    fault = Fault(kind="race", line=7, detail="racecheck: two threads")

    def sanitize(items: Any) -> Sanitized:
        starts.append(len(items))
        racing = not clean and any(launch.block == (96, 1, 1) for item in items for launch in item.plan.launches)
        return Sanitized(report=dict.fromkeys(TOOLS, "race" if racing else "clean"), fault=fault if racing else None)

    gpu: Any = ScriptedGpu(50.0)
    never: Any = None
    made = Evaluator(
        compiler=OneBuild(), device=gpu, fresh_device=never, references=never, profiler=never,
        store=open_store(folder, size_limit_bytes=1 << 20), kernel_timeout_s=1.0, sanitizer=sanitize,
    )  # fmt: skip
    other = dataclasses.replace(KERNEL, launches=(dataclasses.replace(KERNEL.launches[0], block=(96,)),))
    for kernel in (KERNEL, other):
        made._kept(kernel, PROBLEM, ACCEPTED, level="L1", seed=7, arch=None)
    return made.verify_together([(KERNEL, PROBLEM), (other, PROBLEM)], seed=7), starts


def test_kernels_judged_together_share_one_start_of_the_sanitizers(tmp_path: Path) -> None:
    verdicts, starts = judged_together(tmp_path, clean=True)
    assert [verdict.levels for verdict in verdicts] == [("L0", "L1", "L2")] * 2
    assert len(starts) == 1


def test_a_finding_among_kernels_judged_together_falls_on_the_one_that_has_it(tmp_path: Path) -> None:
    verdicts, starts = judged_together(tmp_path, clean=False)
    assert [verdict.reason for verdict in verdicts] == [None, "race"]
    assert starts == [starts[1] + starts[2], starts[1], starts[2]]


# --- the embedded device beside a GPU ---------------------------------------------------------------------------------
CLEARED_BY_ONE = """/* optiml
[[launch]]
kernel = "total"
grid = ["ceil_div(n, 256)"]
block = [256]
args = ["x", "out", "n"]
*/
extern "C" __global__ void total(const float* x, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i == 0) out[0] = 0.0f;
  __threadfence();
  if (i < n) atomicAdd(out, x[i]);
}
"""
CLEARED_BEFORE = """/* optiml
[[launch]]
kernel = "clear"
grid = [1]
block = [1]
args = ["out"]
[[launch]]
kernel = "total"
grid = ["ceil_div(n, 256)"]
block = [256]
args = ["x", "out", "n"]
*/
extern "C" __global__ void clear(float* out) { out[0] = 0.0f; }
extern "C" __global__ void total(const float* x, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicAdd(out, x[i]);
}
"""


@contextmanager
def beside_a_gpu(
    bench: Workbench, folder: Path, source: str
) -> Iterator[tuple[Evaluator, Kernel, Problem, Build]]:  # fmt: skip
    """An evaluator of a scripted GPU with a real embedded device, and a kernel of `sum` built for it."""
    inner = bench.evaluator("emulator")
    if inner.device.info.engine != "native":
        pytest.skip("races are looked for by the native engine, which is not built here")
    problem = bench.problem("sum")
    kernel = bench.kernel(source, problem)
    build = inner.build(kernel, arch="sm_90")
    assert isinstance(build, Build)
    gpu: Any = ScriptedGpu(50.0)
    never: Any = None
    with closing(EmulatedDevice(emulated_info("emulator:h200"))) as embedded:
        made = Evaluator(
            compiler=inner._compiler, device=gpu, fresh_device=never, references=inner._references, profiler=never,
            store=open_store(folder, size_limit_bytes=1 << 20), kernel_timeout_s=20.0, embedded=embedded,
            sanitizer=lambda items: Sanitized(report=dict.fromkeys(TOOLS, "clean")),
        )  # fmt: skip
        yield made, kernel, problem, build


@pytest.mark.parametrize(("source", "reason"), [(CLEARED_BY_ONE, "race"), (CLEARED_BEFORE, None)])
def test_a_race_between_blocks_is_found_beside_a_gpu_that_starts_them_in_order(
    bench: Workbench, tmp_path: Path, source: str, reason: str | None
) -> None:
    with beside_a_gpu(bench, tmp_path, source) as (made, kernel, problem, build):
        verdict = made._at_level_two(kernel, problem, build, ACCEPTED, 7)
    assert (verdict.status, verdict.reason) == ("rejected" if reason else "accepted", reason), verdict.detail


def test_wrong_values_on_a_gpu_are_traced_back_to_the_race_behind_them(bench: Workbench, tmp_path: Path) -> None:
    wrong = dataclasses.replace(ACCEPTED, status="rejected", reason="wrong_values", detail="out[0] is 1")
    with beside_a_gpu(bench, tmp_path, CLEARED_BY_ONE) as (made, kernel, problem, build):
        verdict = made._traced_back(kernel, problem, build, wrong, 7)
    assert verdict.reason == "race"
    assert "on the GPU: wrong_values, out[0] is 1" in (verdict.detail or "")
