"""What a wrong output looks like: the usual mistakes leave patterns. A guess for whoever has to mend the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
CLOSE = 1e-3  # relative; patterns are looked for among values that differ by much more
MANY = 0.9  # share of the wrong elements that a pattern must explain
SPACINGS = (2, 3, 4, 5, 7, 8, 10, 16, 32)
BLOCKS = (1024, 512, 256, 128, 64, 32, 16, 8, 4)


def likely_cause(
    actual: Array, expected: Array, wrong: Array, *, unwritten: Array, before: Sequence[Array] = ()
) -> str | None:
    """The first pattern that explains the wrong elements, in words; None where none does.

    Args:
        actual, expected: one output, in float64 or integers, and `wrong`, the mask of its wrong elements.
        unwritten: mask of the elements that still hold what they held before the run.
        before: the expected outputs of earlier runs of the same load.
    """
    if not wrong.any():
        return None
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    with np.errstate(all="ignore"):
        return (
            _stale(actual, wrong, before)
            or _places(wrong, unwritten)
            or _moved(actual, expected, wrong)
            or _constant(actual, expected, wrong)
            or _scaled(actual, expected, wrong)
        )


def _close(a: Array, b: Array) -> Array:
    near: Array = np.abs(a - b) <= CLOSE * np.maximum(np.abs(a), np.abs(b))
    return near


def _explains(match: Array, wrong: Array) -> bool:
    """Whether a pattern holds for nearly all wrong elements."""
    return int((match & wrong).sum()) >= MANY * int(wrong.sum())


def _stale(actual: Array, wrong: Array, before: Sequence[Array]) -> str | None:
    for earlier in before:
        if earlier.shape == actual.shape and _explains(_close(actual, earlier.astype(np.float64)), wrong):
            return "the values are those of an earlier run: a result or a buffer is kept between runs"
    return None


def _places(wrong: Array, unwritten: Array) -> str | None:
    """Where the wrong elements lie: a tail, every k-th, whole rows."""
    flat = wrong.reshape(-1)
    count, places = flat.size, np.flatnonzero(flat)
    what = "never written" if unwritten.reshape(-1)[places].all() else "wrong"
    if 0 < len(places) < count and places[0] == count - len(places):
        block = next((block for block in BLOCKS if places[0] and places[0] % block == 0), None)
        tail = f"the last {len(places)} of {count} elements are {what}"
        return f"{tail}: a missed tail" + (f" after the last multiple of {block}" if block else "")
    if wrong.ndim >= 2:
        rows = wrong.reshape(wrong.shape[0], -1)
        lines = np.flatnonzero(rows.any(axis=1))
        if rows[lines].all() and 0 < len(lines) < rows.shape[0]:
            return f"whole rows are {what}, {_which(lines, rows.shape[0])}: the work is not spread over all rows"
        columns = wrong.reshape(-1, wrong.shape[-1])
        tails = np.flatnonzero(columns.any(axis=0))
        if len(tails) and tails[0] > 0 and len(tails) == columns.shape[1] - tails[0] and columns[:, tails].all():
            return f"columns from {tails[0]} on are {what} in every row: a missed tail of the last axis"
    if len(places) >= 4:
        for spacing in SPACINGS:
            if len(np.unique(places % spacing)) == 1 and len(places) >= MANY * (count // spacing):
                return f"every {spacing}th element is {what}, from {places[0]} on"
            right = np.flatnonzero(~flat)
            if len(right) >= 4 and len(np.unique(right % spacing)) == 1 and len(right) >= MANY * (count // spacing):
                return f"only every {spacing}th element is right: part of the work is left out"
    return None


def _which(lines: Array, count: int) -> str:
    if lines[0] == count - len(lines):
        return f"the last {len(lines)} of {count}"
    for spacing in SPACINGS:
        if len(np.unique(lines % spacing)) == 1 and len(lines) >= MANY * (count // spacing):
            return f"every {spacing}th from {lines[0]} on"
    return f"{len(lines)} of {count}"


def _moved(actual: Array, expected: Array, wrong: Array) -> str | None:
    """Right values in the wrong place."""
    if wrong.ndim >= 2 and min(wrong.shape[-2:]) > 1:
        turned = np.swapaxes(expected, -1, -2)
        same = turned if turned.shape == expected.shape else turned.reshape(expected.shape)
        if _explains(_close(actual, same), wrong):
            return "the values are those of the transposed output: rows and columns are exchanged"
    if wrong.size < 3:
        return None
    for axis in range(wrong.ndim):
        for step in (1, -1):
            if wrong.shape[axis] > 2 and _explains(_close(actual, np.roll(expected, step, axis=axis)), wrong):
                unit = "row" if wrong.ndim >= 2 and axis == 0 else "column" if axis == wrong.ndim - 1 else "plane"
                name = unit if wrong.ndim >= 2 else "element"
                return (
                    f"the values are those of the {name} {'before' if step == 1 else 'after'}: an index is off by one"
                )
    if wrong.ndim == 1 and _explains(_close(actual, expected[::-1]), wrong):
        return "the values are in reverse order"
    return None


def _constant(actual: Array, expected: Array, wrong: Array) -> str | None:
    values = actual[wrong]
    if len(values) < 2 or not np.isfinite(values[0]) or not (values == values[0]).all():
        return None
    if values[0] == 0 and not (expected[wrong] < 0).all():
        return "the wrong elements are all 0: they were cleared and never filled, or their work was skipped"
    if (expected[wrong] < values[0]).all():
        return (
            f"the wrong elements are all {values[0]:.6g} and should be less: the identity of a maximum is not low "
            "enough (-INFINITY)"
        )
    if (expected[wrong] > values[0]).all() and values[0] > 0:
        return f"the wrong elements are all {values[0]:.6g} and should be more: the identity of a minimum, or a cap"
    return f"the wrong elements are all {values[0]:.6g}"


def _scaled(actual: Array, expected: Array, wrong: Array) -> str | None:
    given, wanted = actual[wrong], expected[wrong]
    usable = np.isfinite(given) & (np.abs(wanted) > 0)
    if usable.sum() < 3:
        return None
    ratios = given[usable] / wanted[usable]
    middle = float(np.median(ratios))
    if middle != 0 and float(np.mean(np.abs(ratios - middle) <= CLOSE * abs(middle))) >= MANY:
        if abs(middle - 1.0) > CLOSE:
            return f"the values are {middle:.6g} times too large: a factor is missing, wrong or applied twice"
        return None
    offsets = given[usable] - wanted[usable]
    shift = float(np.median(offsets))
    if abs(shift) > CLOSE and float(np.mean(np.abs(offsets - shift) <= CLOSE * abs(shift))) >= MANY:
        return (
            f"the values are off by {shift:.6g} everywhere: a sum starts at another value than 0, or a term is missing"
        )
    if (np.abs(given[usable]) < np.abs(wanted[usable])).all() and (
        np.sign(given[usable]) == np.sign(wanted[usable])
    ).all():
        return "the values are too small everywhere: part of what they add up is left out, or updates are lost"
    return None
