"""Expected against actual: the tolerance policy (design of verification.md §4) and the first mismatch.

    floor: rtol0 = 2 eps(output) + 8 eps(accumulator) sqrt(L),  atol0 = rtol0 * rms(expected) + spacing(0)
    working tolerance = floor * min(max(4 s, 1), 16)

with L the accumulation length and s the error of the reference computed in the declared dtype, in units of the floor.
A caller's tolerance may be tighter than that, and looser up to 16 times the floor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optiml.problems.data import EPSILON, SMALLEST, is_float, to_float64
from optiml.records import Mismatch, Tolerance

Array = NDArray[Any]
CAP = 16.0  # times the floor
SAFETY = 4.0  # times the error of a trusted same-dtype computation
IMPRECISE_FACTOR = 100.0  # errors up to this many tolerances are called imprecise
DATA_SCALE: Mapping[str, float] = {
    "large": 300.0,
    "large_negative": 300.0,
    "mixed_rows": 300.0,
    "low": 3e4,
    "tiny": 1e-6,
}  # of the distributions, for a caller's atol


def floor_rtol(dtype: str, accumulation: int) -> float:
    """Relative tolerance that any honest kernel of this dtype must be granted."""
    accumulator = EPSILON["float64"] if dtype == "float64" else EPSILON["float32"]
    return 2 * EPSILON[dtype] + 8 * accumulator * math.sqrt(max(accumulation, 1))


def rms(values: Array) -> float:
    """Root mean square of the finite values; 0 of none."""
    finite = values[np.isfinite(values)]
    if finite.size == 0:
        return 0.0
    scale = float(np.max(np.abs(finite)))
    return 0.0 if scale == 0 else scale * float(np.sqrt(np.mean(np.square(finite / scale))))


def floor_for(dtype: str, *, accumulation: int, magnitude: float) -> Tolerance:
    """What any honest kernel of this dtype must be granted for an output whose rms is `magnitude`."""
    rtol = floor_rtol(dtype, accumulation)
    return Tolerance(rtol=rtol, atol=rtol * magnitude + SMALLEST[dtype])  # subnormal outputs are rounded to that


def hardness(floor: Tolerance, exact: Array, same_dtype: Array | None) -> float:
    """Error of the reference computed in the declared dtype, in floors; 0 where it is not known."""
    if same_dtype is None:
        return 0.0
    with np.errstate(all="ignore"):
        error = np.abs(same_dtype - exact) / (floor.atol + floor.rtol * np.abs(exact))
    return float(error[np.isfinite(error)].max(initial=0.0))


def tolerance_for(
    dtype: str,
    *,
    accumulation: int,
    magnitude: float,
    exact: Array,
    same_dtype: Array | None,
    caller: Tolerance | None,
    data_scale: float,
) -> Tolerance | None:
    """The tolerance of one output in one case; None where values compare exactly.

    Args:
        magnitude: rms of the expected output, over several seeds where it has few elements.
        data_scale: how much larger than N(0, 1) the data of this case is; scales a caller's atol.
    """
    if not is_float(dtype):
        return None
    floor = floor_for(dtype, accumulation=accumulation, magnitude=magnitude)
    if caller is not None:
        if caller.rtol == 0 and caller.atol == 0:
            return None
        atol = min(caller.atol * max(data_scale, 1.0), CAP * floor.atol)
        return Tolerance(rtol=min(caller.rtol, CAP * floor.rtol), atol=atol)
    factor = min(max(SAFETY * hardness(floor, exact, same_dtype), 1.0), CAP)
    return Tolerance(rtol=floor.rtol * factor, atol=floor.atol * factor)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One output of one run against its expectation."""

    ok: bool
    max_abs_error: float | None
    max_rel_error: float | None
    worst: float  # largest error in tolerances; inf where a value is not finite and should be
    nonfinite: bool  # NaN or infinity where the reference is finite
    wrong: Array  # bool mask, shape of the output


def compare(actual: Array, expected: Array, dtype: str, tolerance: Tolerance | None) -> Comparison:
    """Compare an output in storage dtype with its expectation.

    NaN matches only NaN, an infinity only itself.
    """
    if not is_float(dtype):
        wrong = actual.astype(object) != expected.astype(object) if expected.dtype.kind == "f" else actual != expected
        wrong = np.asarray(wrong, dtype=bool)
        difference = np.abs(actual.astype(np.float64) - expected.astype(np.float64))
        error = float(difference.max(initial=0.0))
        return Comparison(
            ok=not wrong.any(),
            max_abs_error=error,
            max_rel_error=None,
            worst=math.inf if wrong.any() else 0.0,
            nonfinite=False,
            wrong=wrong,
        )
    wide = to_float64(actual, dtype)
    finite = np.isfinite(expected)
    with np.errstate(all="ignore"):
        difference = np.abs(wide - expected)
        if tolerance is None:
            rounded = expected.astype(np.float32).astype(np.float64) if dtype == "float32" else expected
            near = (wide == rounded) | (wide == expected)
        else:
            near = difference <= tolerance.atol + tolerance.rtol * np.abs(expected)
        same_special = (np.isnan(wide) & np.isnan(expected)) | (wide == expected)
        right = np.where(finite, near, same_special)
        relative = difference / np.abs(expected)
        allowed = (
            tolerance.atol + tolerance.rtol * np.abs(expected) if tolerance is not None else np.zeros_like(expected)
        )
        excess = np.where(right, 0.0, difference / np.where(allowed > 0, allowed, np.nan))
    nonfinite = bool((finite & ~np.isfinite(wide)).any())
    measured = difference[finite & np.isfinite(wide)]
    ratios = relative[finite & np.isfinite(wide) & (expected != 0)]
    excess = np.where(right, 0.0, np.where(np.isfinite(excess), excess, math.inf))
    return Comparison(
        ok=bool(right.all()),
        max_abs_error=float(measured.max(initial=0.0)),
        max_rel_error=float(ratios.max(initial=0.0)),
        worst=float(excess.max(initial=0.0)),
        nonfinite=nonfinite,
        wrong=~right,
    )


def first_mismatch(
    name: str, actual: Array, expected: Array, dtype: str, wrong: Array, poison: Array, axes: Mapping[str, int]
) -> Mismatch:
    """The first wrong element, in memory order, and whether the kernel ever wrote it."""
    flat = int(np.argmax(wrong.reshape(-1)))
    index = tuple(int(i) for i in np.unravel_index(flat, wrong.shape)) if wrong.shape else ()
    bits = actual.reshape(-1)[flat : flat + 1]
    value: float | int
    if is_float(dtype):
        value = float(to_float64(bits, dtype)[0])
        wanted: float | int = float(expected.reshape(-1)[flat])
    else:
        value, wanted = int(bits[0]), int(expected.reshape(-1)[flat])
    return Mismatch(
        output=name,
        index=index,
        expected=wanted,
        actual=value,
        axes=dict(axes),
        unwritten=bits.tobytes() == poison.reshape(-1)[flat : flat + 1].tobytes(),
    )
