"""Contents of input arrays: distributions, literal values, files; and dtypes that numpy lacks.

float16 is numpy's own. bfloat16 is stored as uint16 bits, the float8 formats as uint8 bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optiml.errors import InvalidInput
from optiml.expressions import evaluate
from optiml.records import Distribution, Problem, Scalar, Size, Tensor, Workload

Array = NDArray[Any]

DISTRIBUTIONS = (
    "normal", "uniform", "negative", "large", "tiny", "integers", "zeros_and_ones", "heavy_tail", "sorted_unique",
    "labels", "labels_ignore", "csr_indices", "csr_indptr",
)  # fmt: skip
SHORT_ROW = 8  # elements of an array of one axis that `mixed_rows` takes for a row
DEFAULT_DISTRIBUTIONS = ("normal", "uniform", "negative", "large", "tiny")
IGNORED_LABEL = -100

_STORAGE: Mapping[str, str] = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "float8_e4m3": "u1", "float8_e5m2": "u1",
    "int8": "i1", "uint8": "u1", "int16": "<i2", "uint16": "<u2", "int32": "<i4", "uint32": "<u4", "int64": "<i8",
    "bool": "u1",
}  # fmt: skip
EPSILON: Mapping[str, float] = {  # spacing just above 1
    "float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7,
    "float8_e4m3": 2.0**-3, "float8_e5m2": 2.0**-2,
}  # fmt: skip
SMALLEST: Mapping[str, float] = {  # subnormal: the spacing around zero
    "float64": 2.0**-1074, "float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133,
    "float8_e4m3": 2.0**-9, "float8_e5m2": 2.0**-16,
}  # fmt: skip


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype that holds elements of `dtype` in memory."""
    return np.dtype(_STORAGE[dtype])


def element_bytes(dtype: str) -> int:
    return storage_dtype(dtype).itemsize


def raw(array: Array) -> memoryview:
    """The bytes of an array, as a child is sent them."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def is_float(dtype: str) -> bool:
    return "float" in dtype


def array_shape(tensor_shape: Sequence[Size], names: Mapping[str, Scalar]) -> tuple[int, ...]:
    """Concrete extents of a shape; never negative."""
    extents = tuple(evaluate(size, names) for size in tensor_shape)
    if any(extent < 0 for extent in extents):
        raise InvalidInput(f"shape {tuple(tensor_shape)} has a negative extent: {extents}")
    return extents


# --- dtypes ----------------------------------------------------------------------------------------------------------
def to_float64(array: Array, dtype: str) -> Array:
    """Storage to float64, exactly."""
    if dtype.startswith("float8"):
        return _float8_values(dtype)[array]
    with np.errstate(invalid="ignore"):  # signalling NaNs, as in a poison
        if dtype == "bfloat16":
            return (array.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
        return array.astype(np.float64)


def from_float64(values: Array, dtype: str) -> Array:
    """float64 to storage: round to nearest, ties to even. float8_e4m3 saturates (it has no infinity)."""
    if dtype == "bfloat16":
        return _round_to_bfloat16(values)
    if dtype.startswith("float8"):
        return _round_to_float8(values, dtype)
    if is_float(dtype):
        with np.errstate(over="ignore"):
            return values.astype(storage_dtype(dtype))
    return values.astype(storage_dtype(dtype))


def _round_to_bfloat16(values: Array) -> Array:
    with np.errstate(over="ignore"):
        # Through float32 rounded to odd, so that the second rounding is right.
        single = values.astype(np.float32)
    inexact = np.isfinite(single) & (single.astype(np.float64) != values)
    bits = single.view(np.uint32).copy()
    away = inexact & (np.abs(single.astype(np.float64)) > np.abs(values))
    bits[away] -= np.uint32(1)  # truncate toward zero first
    bits[inexact] |= np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(single), np.uint32(0x7FC0), rounded).astype(np.uint16)


@cache
def _float8_values(dtype: str) -> Array:
    mantissa_bits, bias = (3, 7) if dtype == "float8_e4m3" else (2, 15)
    code = np.arange(256)
    sign = np.where(code & 0x80, -1.0, 1.0)
    exponent = (code & 0x7F) >> mantissa_bits
    fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    values = sign * np.where(
        exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent.astype(float) - bias)
    )
    if dtype == "float8_e4m3":
        values[[0x7F, 0xFF]] = np.nan
    else:
        values[[0x7C, 0xFC]] = [np.inf, -np.inf]
        values[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    return values


def _round_to_float8(values: Array, dtype: str) -> Array:
    table = _float8_values(dtype)[:128]
    finite = table[np.isfinite(table)]
    magnitude = np.abs(values)
    upper = np.clip(np.searchsorted(finite, magnitude), 1, len(finite) - 1)
    lower = upper - 1
    below, above = magnitude - finite[lower], finite[upper] - magnitude
    code = np.where((below < above) | ((below == above) & (lower % 2 == 0)), lower, upper)
    code = np.where(magnitude >= finite[-1], len(finite) - 1, code)
    if dtype == "float8_e5m2":
        code = np.where(magnitude >= 61440.0, 0x7C, code)
    code = np.where(np.isnan(values), 0x7F, code)
    return (code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


# --- drawing ---------------------------------------------------------------------------------------------------------
def draw(problem: Problem, workload: Workload, *, seed: int, tile: int | None = None) -> dict[str, Array]:
    """Contents of every input array of one workload, in storage dtype.

    Args:
        seed: each array gets its own stream, keyed by this seed and its name.
        tile: draw at most this many elements of a floating array and return them flat, for the device to repeat
            (`Device.run`): where contents hardly matter and 2**24 draws would dominate.

    Raises:
        InvalidInput: literal values whose count is not that of the array, or an unreadable file.
    """
    names: dict[str, Scalar] = {
        **{name: axis.value for name, axis in problem.axes.items() if axis.value is not None},
        **workload.axes,
        **workload.scalars,
    }
    return {
        name: _draw_array(problem, name, tensor, workload, names, seed=seed, tile=tile)
        for name, tensor in problem.inputs.items()
        if tensor.shape is not None
    }


def _draw_array(
    problem: Problem,
    name: str,
    tensor: Tensor,
    workload: Workload,
    names: Mapping[str, Scalar],
    *,
    seed: int,
    tile: int | None,
) -> Array:
    shape = array_shape(tensor.shape or (), names)
    spec = workload.inputs.get(name, "normal" if is_float(tensor.dtype) else "integers")
    if isinstance(spec, str):
        spec = Distribution(distribution=spec)
    if spec.values is not None:
        return _literal(spec.values, tensor.dtype, shape, name)
    if spec.npy is not None:
        return _from_file(spec.npy, tensor.dtype, shape, name)
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    rng = np.random.default_rng(int.from_bytes(key[:16], "little"))
    count = int(np.prod(shape, dtype=np.int64))
    drawn = min(count, tile) if tile is not None and is_float(tensor.dtype) else count
    if spec.distribution == "csr_indptr":
        values = _csr_indptr(rng, count, _csr_length(problem, workload, names))
    else:
        values = _draw_values(rng, spec, drawn, tensor.dtype, names, problem)
        if spec.distribution == "mixed_rows":
            length = shape[-1] if len(shape) > 1 else SHORT_ROW
            low = np.repeat(rng.random(-(-drawn // max(length, 1))) < 0.5, length)[:drawn]
            values = np.where(low, _below(rng, drawn), values)
    stored = (
        from_float64(values, tensor.dtype) if is_float(tensor.dtype) else values.astype(storage_dtype(tensor.dtype))
    )
    return stored if drawn < count else stored.reshape(shape)


def _draw_values(
    rng: np.random.Generator,
    spec: Distribution,
    count: int,
    dtype: str,
    names: Mapping[str, Scalar],
    problem: Problem,
) -> Array:
    last_axis = int(names[list(problem.axes)[-1]]) if problem.axes else 1
    match spec.distribution:
        case "normal" | "mixed_rows":
            return _scaled(rng.standard_normal(count), 1.0, dtype)
        case "uniform":
            return rng.random(count) if is_float(dtype) else rng.integers(0, 2, count)
        case "negative":
            return -np.abs(rng.standard_normal(count)) - 0.01 if is_float(dtype) else -rng.integers(1, 100, count)
        case "low":  # of verification alone: far below any plausible identity of a maximum
            return np.maximum(
                -2e4 * (np.abs(rng.standard_normal(count)) + 1.0), -6e4 if dtype == "float16" else -np.inf
            )
        case "large_negative":  # of verification alone, as `mixed_rows` is
            return _below(rng, count)
        case "large":
            return _scaled(rng.standard_normal(count), 300.0, dtype)
        case "tiny":
            return _scaled(rng.standard_normal(count), 1e-6, dtype)
        case "integers":
            low, high = _integer_range(spec, dtype)
            return rng.integers(low, high, count)
        case "zeros_and_ones":
            return rng.integers(0, 2, count)
        case "heavy_tail":
            return np.clip(rng.standard_t(2, count), -1e4, 1e4)
        case "sorted_unique":
            return np.cumsum(rng.integers(1, 4, count)) if not is_float(dtype) else np.sort(rng.random(count))
        case "labels" | "csr_indices":
            return rng.integers(0, max(last_axis, 1), count)
        case "labels_ignore":
            labels = rng.integers(0, max(last_axis, 1), count)
            return np.where(rng.random(count) < 0.25, IGNORED_LABEL, labels)
    raise InvalidInput(f"{spec.distribution!r} is no distribution")


def _below(rng: np.random.Generator, count: int) -> Array:
    """What a draw of `large` may look like in which all values came out negative."""
    below: Array = -300.0 * np.abs(rng.standard_normal(count)) - 100.0
    return below


def _scaled(values: Array, factor: float, dtype: str) -> Array:
    return values * factor if is_float(dtype) else np.rint(values * max(factor, 3.0)).astype(np.int64)


def _integer_range(spec: Distribution, dtype: str) -> tuple[int, int]:
    low = 0 if spec.low is None else spec.low
    high = low + 100 if spec.high is None else spec.high
    return (low, high) if dtype != "bool" else (0, 2)


def _csr_length(problem: Problem, workload: Workload, names: Mapping[str, Scalar]) -> int:
    """Length of the input that holds the column indices, which the last row pointer must equal."""
    for name, tensor in problem.inputs.items():
        specs = [w.inputs.get(name) for w in (workload, *problem.workloads, *problem.bench)]
        if any((spec if isinstance(spec, str) else spec and spec.distribution) == "csr_indices" for spec in specs):
            return int(np.prod(array_shape(tensor.shape or (), names), dtype=np.int64))
    raise InvalidInput("csr_indptr needs an input with the distribution csr_indices")


def _csr_indptr(rng: np.random.Generator, count: int, length: int) -> Array:
    if count == 0:
        return np.zeros(0, dtype=np.int64)
    cuts = np.sort(rng.integers(0, length + 1, max(count - 2, 0)))
    return np.concatenate([[0], cuts, [length]])[:count] if count > 1 else np.zeros(1, dtype=np.int64)


def _literal(values: tuple[Any, ...], dtype: str, shape: tuple[int, ...], name: str) -> Array:
    words = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # what JSON has no numbers for
    try:
        flat = np.asarray([words.get(v, v) if isinstance(v, str) else v for v in values]).reshape(-1)
    except ValueError as error:
        raise InvalidInput(f"input {name!r}: its literal values are nested unevenly; give a flat list") from error
    if flat.dtype.kind not in "biuf":
        raise InvalidInput(f"input {name!r}: a literal value is no number, or beyond 64 bits")
    if flat.size != int(np.prod(shape, dtype=np.int64)):
        raise InvalidInput(f"input {name!r}: {flat.size} literal values do not fill the shape {shape}")
    stored = from_float64(flat.astype(np.float64), dtype) if is_float(dtype) else flat.astype(storage_dtype(dtype))
    return stored.reshape(shape)


def _from_file(path: str, dtype: str, shape: tuple[int, ...], name: str) -> Array:
    try:
        array = np.load(Path(path), allow_pickle=False, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise InvalidInput(f"input {name!r}: its npy file cannot be read as a plain array") from error
    if array.size != int(np.prod(shape, dtype=np.int64)) or array.dtype.kind not in "biuf":
        raise InvalidInput(f"input {name!r}: the file holds {array.shape} {array.dtype}, not {shape} {dtype}")
    return (
        from_float64(np.asarray(array, dtype=np.float64), dtype)
        if is_float(dtype)
        else np.asarray(array).astype(storage_dtype(dtype))
    ).reshape(shape)
