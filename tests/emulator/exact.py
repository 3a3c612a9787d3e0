"""Correct rounding in rational arithmetic: an oracle that shares no code with the interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

# fraction bits, smallest normal exponent, largest exponent
_FORMATS = {"f16": (10, -14, 15), "bf16": (7, -126, 127), "f32": (23, -126, 127), "f64": (52, -1022, 1023)}


def rounded(value: Fraction, kind: str, mode: str = "rn") -> float:
    """`value` rounded to a format as a Python float; zero results are +0."""
    fraction_bits, smallest, largest = _FORMATS[kind]
    if value == 0:
        return 0.0
    size = abs(value)
    exponent = math.floor(math.log2(size.numerator) - math.log2(size.denominator))
    while Fraction(2) ** exponent > size:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= size:
        exponent += 1
    unit = Fraction(2) ** (max(exponent, smallest) - fraction_bits)
    scaled = value / unit
    low = math.floor(scaled)
    rest = scaled - low
    if mode == "rn":
        whole = low + (1 if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and low % 2) else 0)
    elif mode == "rm":
        whole = low
    elif mode == "rp":
        whole = low + (1 if rest else 0)
    else:
        whole = low + (1 if rest and value < 0 else 0)
    result = whole * unit
    most = (2 - Fraction(1, 2**fraction_bits)) * Fraction(2) ** largest
    if abs(result) > most:
        toward_zero = mode == "rz" or (mode == "rm" and value > 0) or (mode == "rp" and value < 0)
        edge = float(most) if toward_zero else math.inf
        return edge if value > 0 else -edge
    return float(result)


def elementwise(function: Callable[..., Fraction], kind: str, mode: str, *columns: Any) -> Any:
    """Round `function` of the exact values of each row; rows must be finite."""
    rows = zip(*[np.asarray(c, np.float64).tolist() for c in columns], strict=True)
    return np.array([rounded(function(*[Fraction(v) for v in row]), kind, mode) for row in rows])
