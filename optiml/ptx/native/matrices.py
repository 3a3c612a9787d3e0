"""What the native engine has to know of a matrix instruction besides its record; see csrc/tensor.inc for the layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optiml.ptx import tensor

KINDS = {name: code for code, name in enumerate(
    ("f16", "bf16", "tf32", "f32", "f64", "s8", "u8", "s32", "e4m3", "e5m2"))}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Extra:
    """Numbers, then the operands of some register slots, then more numbers."""

    head: tuple[int, ...]
    slots: tuple[int, ...]
    tail: tuple[int, ...] = ()


def _flat(places: tensor.Places, columns: int) -> list[int]:
    found: list[int] = (places[0] * columns + places[1]).reshape(-1).tolist()
    return found


def product(
    shape: tuple[int, int, int], kinds: tuple[str, str, str, str], places: Sequence[tensor.Places], saturate: bool,
    registers: tuple[list[int], list[int], list[int], list[int]],
) -> Extra:  # fmt: skip
    """Of mma and wmma.mma: `kinds` and `registers` of D, A, B, C."""
    _, n, k = shape
    word = 8 if kinds[0] == "f64" else 4
    head = (*shape, *(KINDS[kind] for kind in kinds), int(saturate), *map(len, registers), word)
    tail = [*_flat(places[0], k), *_flat(places[1], n), *_flat(places[2], n)]
    return Extra(head=head, slots=tuple(slot for each in registers for slot in each), tail=tuple(tail))


def fragment(shape: tuple[int, int], kind: str, by_row: bool, places: tensor.Places, slots: list[int]) -> Extra:
    """Of wmma.load and wmma.store."""
    rows, columns = shape
    lines, length = shape if by_row else (columns, rows)
    flat = np.asarray(_flat(places, columns))
    at: Any = flat if by_row else flat % columns * rows + flat // columns
    size = tensor.ELEMENTS[kind].bits.itemsize
    head = (lines, length, size, len(slots), 8 if kind == "f64" else 4)
    return Extra(head=head, slots=tuple(slots), tail=tuple(at.tolist()))
