"""What level 2 on a GPU makes of the sanitizers' answers and of impossible times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_measured import BUILD, KERNEL, PROBLEM
from test_timing import INFO, ScriptedGpu

from optiml.errors import Fault
from optiml.evaluate import Evaluator
from optiml.measure.measured import MeasuredProfiler
from optiml.records import Verdict
from optiml.store import open_store
from optiml.verify.sanitizer import TOOLS, Sanitized

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
