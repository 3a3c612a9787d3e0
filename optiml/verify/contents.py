"""What the arrays of a plan hold before a run: inputs as drawn, everything undefined poisoned."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optiml.device.plan import Plan
from optiml.problems.data import from_float64, is_float, storage_dtype

Array = NDArray[Any]


def filled(plan: Plan, inputs: Mapping[str, Array], rng: random.Random, *, quiet_nan: bool) -> dict[str, Array]:
    """Every array of the plan: inputs as drawn, the rest poisoned, zeroed workspaces zero."""
    contents: dict[str, Array] = {}
    for name, planned in plan.arrays.items():
        if name in inputs:
            contents[name] = inputs[name]
        elif planned.zero:
            contents[name] = np.zeros(planned.shape, dtype=storage_dtype(planned.dtype))
        else:
            contents[name] = poison(planned.dtype, planned.shape, rng.getrandbits(63), quiet_nan=quiet_nan)
    return contents


def same_bits(actual: Array, held: Array) -> Array:
    """Mask of the elements that still hold what they held before; never true of single bytes, which match by chance."""
    if actual.dtype.itemsize == 1:
        return np.zeros(actual.shape, dtype=bool)
    kind = f"u{actual.dtype.itemsize}"
    same: Array = np.ascontiguousarray(actual).view(kind) == np.ascontiguousarray(held).view(kind)
    return same


_NAN_BITS: Mapping[str, tuple[str, int, int]] = {  # storage, pattern of a quiet NaN, free payload bits
    "float64": ("<u8", 0x7FF8000000000000, 40),
    "float32": ("<u4", 0x7FC00000, 20),
    "float16": ("<u2", 0x7E00, 8),
    "bfloat16": ("<u2", 0x7FC0, 5),
}


def poison(dtype: str, shape: tuple[int, ...], seed: int, *, quiet_nan: bool) -> Array:
    """What an output holds before a run: one NaN with a random payload, or noise that looks like an answer."""
    rng = np.random.default_rng(seed)
    if quiet_nan and dtype in _NAN_BITS:
        storage, pattern, bits = _NAN_BITS[dtype]
        word = pattern | int(rng.integers(1, 1 << bits))
        return np.full(shape, word, dtype=storage).view(storage_dtype(dtype))
    if not is_float(dtype) or dtype.startswith("float8"):
        kind = storage_dtype(dtype)
        if quiet_nan and kind.itemsize >= 4:
            info = np.iinfo(kind)
            return np.full(shape, int(rng.integers(info.max // 3, info.max // 2)), dtype=kind)
        return rng.integers(1, 100, shape).astype(kind)
    noise = rng.standard_normal(int(np.prod(shape, dtype=np.int64)))
    return from_float64(noise, dtype).reshape(shape)
