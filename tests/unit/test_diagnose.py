"""Patterns of wrong values, and rejections that say what differs, where, from which size on and why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from optiml.records import Verdict
from optiml.verify.diagnose import likely_cause
from optiml.workbench import Workbench

GOOD = np.random.default_rng(0).standard_normal((6, 10)) + 3.0
FLAT = np.random.default_rng(1).standard_normal(300)


def cause(actual: Any, expected: Any, *, poison: float | None = None, before: Any = ()) -> str:
    wrong = actual != expected
    unwritten = actual == poison if poison is not None else np.zeros(actual.shape, dtype=bool)
    return likely_cause(actual, expected, wrong, unwritten=unwritten, before=before) or ""


def changed(array: Any, places: Any, value: Any) -> Any:
    copy = array.copy()
    copy[places] = value
    return copy


@pytest.mark.parametrize(
    ("actual", "expected", "words"),
    [
        (changed(FLAT, slice(256, None), 0.0), FLAT, "missed tail after the last multiple of 256"),
        (changed(GOOD, (slice(None), slice(8, None)), 9.0), GOOD, "missed tail of the last axis"),
        (changed(GOOD, slice(1, None, 2), 9.5), GOOD, "every 2th from 1 on"),
        (changed(FLAT, slice(3, None, 4), 9.5), FLAT, "every 4th element"),
        (np.roll(GOOD, 1, axis=0), GOOD, "row before: an index is off by one"),
        (np.roll(FLAT, -1), FLAT, "element after: an index is off by one"),
        (GOOD.T.reshape(GOOD.shape), GOOD, "transposed"),
        (FLAT[::-1].copy(), FLAT, "reverse order"),
        (2 * GOOD, GOOD, "2 times too large"),
        (GOOD + 1, GOOD, "off by 1 everywhere"),
        (np.full_like(FLAT, 9.0), FLAT - 50.0, "identity of a maximum"),
        (np.zeros_like(FLAT), np.abs(FLAT) + 1, "all 0"),
        (GOOD * np.linspace(0.3, 0.8, 60).reshape(6, 10), GOOD, "left out, or updates are lost"),
        (FLAT, FLAT, ""),
    ],
)
def test_a_usual_mistake_is_named(actual: Any, expected: Any, words: str) -> None:
    found = cause(actual, expected)
    assert words in found
    assert bool(words) == bool(found)


def test_elements_that_hold_what_was_there_before_are_called_unwritten() -> None:
    assert "never written" in cause(changed(FLAT, slice(256, None), 7.0), FLAT, poison=7.0)


def test_the_answer_of_an_earlier_run_is_called_stale() -> None:
    assert "earlier run" in cause(FLAT, FLAT[::-1] + 1.0, before=[FLAT])


ABS: dict[str, Any] = {
    "name": "absolute",
    "axes": {"n": {"type": "var", "min": 1}},
    "inputs": {"x": {"dtype": "float32", "shape": ["n"]}},
    "outputs": {"y": {"dtype": "float32", "shape": ["n"]}},
    "reference": "def run(x):\n    return np.abs(x)",
    "workloads": [{"axes": {"n": 256}}, {"axes": {"n": 1000}}],
}


def verdict(bench: Workbench, body: str, problem: Any = ABS) -> Verdict:
    source = (
        'extern "C" __global__ void k(const float* x, float* y, int n) {'
        f" int i = blockIdx.x * 256 + threadIdx.x; {body} }}"
    )
    launch = {"kernel": "k", "grid": ["ceil_div(n, 256)"], "block": [256], "args": ["x", "y", "n"]}
    return bench.verify({"source": source, "launches": [launch]}, problem, seed=5)


def test_a_rejection_names_the_smallest_failing_size_and_a_likely_cause(bench: Workbench) -> None:
    found = verdict(
        bench, "if (i < n / 256 * 256 || n < 200) { if (i < n) y[i] = fabsf(x[i]); } else if (i < n) y[i] = 0;"
    )
    assert found.status == "rejected"
    assert found.smallest_failing is not None
    assert 200 <= found.smallest_failing["n"] <= 257
    assert "smallest failing size found is n=" in (found.detail or "")
    assert "likely cause" in (found.detail or "")
    assert found.likely_cause is not None


def test_a_verdict_states_how_values_were_compared(bench: Workbench) -> None:
    found = verdict(bench, "if (i < n) y[i] = fabsf(x[i]);")
    assert "y (float32)" in (found.tolerance_policy or "")
    assert "16 floors" in (found.tolerance_policy or "")
