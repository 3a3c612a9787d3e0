"""Outputs that no kernel had to compute. A problem that one of them passes cannot tell right from wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optiml.problems.data import from_float64, is_float
from optiml.records import Problem, Tolerance
from optiml.verify.compare import compare

Array = NDArray[Any]
Outputs = Mapping[str, Array]
Tolerances = Mapping[str, Tolerance | None]


def passing_control(problem: Problem, cases: Sequence[tuple[Outputs, Tolerances]]) -> str | None:
    """Name of a control that every case would accept for some output, or None.

    Each output is judged alone: right ones beside it do not make up for one that no kernel has to compute.

    Args:
        cases: for each case the expected outputs (float64 or integers) and their tolerances.
    """
    cases = [case for case in cases if any(array.size for array in case[0].values())]
    if not cases:
        return None
    controls: list[tuple[str, Callable[[str, Array], Array | None]]] = [
        ("NaN everywhere", lambda name, array: np.full_like(array, np.nan) if array.dtype.kind == "f" else None),
        ("an all-zero output", lambda name, array: np.zeros_like(array)),
        ("one constant", lambda name, array: np.full_like(array, _first(cases, name))),
        ("the mean over all cases", lambda name, array: np.full_like(array, _mean(cases, name, array.dtype))),
        ("the first row everywhere", _first_row),
        ("rows in another order", _rotated_rows),
    ]
    for name in problem.outputs:
        for label, control in controls:
            if _passes(problem.outputs[name].dtype, name, cases, control):
                return label if len(problem.outputs) == 1 else f"{label} in {name}"
    return None


def _passes(
    dtype: str, name: str, cases: Sequence[tuple[Outputs, Tolerances]], control: Callable[[str, Array], Array | None]
) -> bool:
    applied = False
    for outputs, tolerances in cases:
        expected = outputs[name]
        if expected.size == 0:
            continue
        value = control(name, expected)
        if value is None:
            continue  # this control has no meaning for this case
        applied = True
        with np.errstate(all="ignore"):
            stored = from_float64(value, dtype) if is_float(dtype) else value
        if not compare(stored, expected, dtype, tolerances[name]).ok:
            return False
    return applied


def _finite(cases: Sequence[tuple[Outputs, Tolerances]], name: str) -> Array:
    values = np.concatenate([outputs[name].reshape(-1).astype(np.float64) for outputs, _ in cases])
    finite: Array = values[np.isfinite(values)]
    return finite


def _first(cases: Sequence[tuple[Outputs, Tolerances]], name: str) -> float:
    values = _finite(cases, name)
    return float(values[0]) if values.size else 0.0


def _mean(cases: Sequence[tuple[Outputs, Tolerances]], name: str, dtype: np.dtype[Any]) -> float:
    values = _finite(cases, name)
    mean = float(values.mean()) if values.size else 0.0
    return mean if dtype.kind == "f" else round(mean)


def _distinct_rows(array: Array) -> bool:
    return array.ndim >= 2 and array.shape[0] >= 2 and bool((array[1:] != array[:1]).any())


def _first_row(_: str, array: Array) -> Array | None:
    return np.broadcast_to(array[:1], array.shape).copy() if _distinct_rows(array) else None


def _rotated_rows(_: str, array: Array) -> Array | None:
    return np.roll(array, 1, axis=0) if _distinct_rows(array) else None
