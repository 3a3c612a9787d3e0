"""Kernels that are PTX already: what Triton and Numba wrote is verified, race-checked and profiled without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from optiml.ptx import engine_name
from optiml.records import Verdict
from optiml.workbench import Workbench

EMITTED = Path(__file__).parent.parent / "emulator" / "data" / "emitted"
SUM: dict[str, Any] = {
    "name": "sum_of_two",
    "axes": {"n": {"type": "var"}},
    "inputs": {"x": {"dtype": "float32", "shape": ["n"]}, "y": {"dtype": "float32", "shape": ["n"]}},
    "outputs": {"out": {"dtype": "float32", "shape": ["n"]}},
    "reference": "def run(x, y):\n    return x + y",
    "workloads": [{"axes": {"n": 256}}, {"axes": {"n": 3000}}],
}
ROWS: dict[str, Any] = {
    "name": "softmax_of_rows",
    "axes": {"rows": {"type": "var"}, "columns": {"type": "var"}},
    "inputs": {"x": {"dtype": "float32", "shape": ["rows", "columns"]}},
    "outputs": {"out": {"dtype": "float32", "shape": ["rows", "columns"]}},
    "reference": "def run(x):\n    e = np.exp(x - x.max(axis=1, keepdims=True))\n"
    "    return e / e.sum(axis=1, keepdims=True)",
    "workloads": [{"axes": {"rows": 3, "columns": 256}}, {"axes": {"rows": 5, "columns": 1008}}],
    "constraints": ["columns <= 1024"],
    "accumulation": "columns",
}
ADD = {"kernel": "add_rows", "grid": ["ceil_div(n, 1024)"], "block": [128], "args": ["x", "y", "out", "n"]}
SOFTMAX = {
    "kernel": "softmax_rows", "grid": ["rows"], "block": [128], "args": ["x", "out", "columns"], "shared_bytes": 16,
}  # fmt: skip


def text(name: str) -> str:
    return (EMITTED / f"{name}.ptx").read_text(encoding="utf-8")


def kernel(source: str, launch: dict[str, Any]) -> dict[str, Any]:
    return {"source": source, "language": "ptx", "launches": [launch]}


def verdict(bench: Workbench, source: str, launch: dict[str, Any], problem: dict[str, Any], level: str) -> Verdict:
    return bench.verify(kernel(source, launch), problem, level=level, seed=3)


def test_a_kernel_from_triton_is_accepted_without_its_scratch_pointers(bench: Workbench) -> None:
    found = verdict(bench, text("triton_add_rows"), ADD, SUM, "L1")
    assert (found.status, found.detail) == ("accepted", None)


def test_a_kernel_from_numba_is_accepted_with_arrays_as_numba_passes_them(bench: Workbench) -> None:
    problem = {
        **ROWS,
        "name": "row_sums",
        "outputs": {"out": {"dtype": "float32", "shape": ["rows"]}},
        "reference": "def run(x):\n    return x.sum(axis=1)",
    }
    # two pointers that may be null, elements, bytes of one, address, shape, strides
    x = [0, 0, "rows * columns", 4, "x", "rows", "columns", "columns * 4", 4]
    out = [0, 0, "rows", 4, "out", "rows", 4]
    launch = {"kernel": "row_sums", "grid": ["rows"], "block": [128], "args": [*x, *out]}
    found = verdict(bench, text("numba_row_sums"), launch, problem, "L1")
    assert (found.status, found.detail) == ("accepted", None)


@pytest.mark.skipif(engine_name() != "native", reason="the native engine was not built")
def test_a_barrier_taken_out_of_the_text_is_a_race_on_its_line(bench: Workbench) -> None:
    good = verdict(bench, text("triton_softmax_rows"), SOFTMAX, ROWS, "L2")
    assert (good.status, good.detail) == ("accepted", None)
    bad = verdict(bench, text("triton_softmax_rows").replace("bar.sync", "// bar.sync", 1), SOFTMAX, ROWS, "L1")
    assert (bad.status, bad.reason) == ("rejected", "race")
    assert bad.fault is not None
    assert bad.fault.line is not None


def test_a_profile_counts_what_the_text_does(bench: Workbench) -> None:
    found = bench.profile(kernel(text("triton_add_rows"), ADD), SUM)
    assert found.metrics["l1tex__t_requests_pipe_lsu_mem_global_op_st.sum"] > 0


def test_what_does_not_fit_is_said_in_the_verdict(bench: Workbench) -> None:
    source = text("triton_add_rows")
    broken = verdict(bench, source.replace("ret;", "ret"), ADD, SUM, "L0")
    assert (broken.status, broken.reason) == ("rejected", "compile_failed")
    newer = verdict(bench, source.replace(".target sm_80", ".target sm_90a"), ADD, SUM, "L0")
    assert (newer.reason, "sm_90a" in (newer.detail or "")) == ("compile_failed", True)
    absent = verdict(bench, source, {**ADD, "kernel": "other"}, SUM, "L0")
    assert (absent.reason, "add_rows" in (absent.detail or "")) == ("bad_launch", True)
    other_block = verdict(bench, source, {**ADD, "block": [256]}, SUM, "L0")
    assert (other_block.reason, "requires" in (other_block.detail or "")) == ("bad_launch", True)
