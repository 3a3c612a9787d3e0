"""Matrix instructions of a warp: mma, ldmatrix, stmatrix, movmatrix and wmma.

Products are exact and summed in float64, in the order of k, before one rounding to the accumulator type; hardware
sums in an order and precision of its own, so results agree to a tolerance only. Integer products are exact.

The layout of mma fragments is NVIDIA's (PTX ISA 9 §9.7.15). That of wmma fragments is unspecified there, so ours is
simply the row-major order of the matrix, dealt out lane by lane and repeated where there are more places than elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from optiml.ptx import memory
from optiml.ptx import numerics as num
from optiml.ptx.memory import CODE, WIDE, Step
from optiml.ptx.numerics import F16, F32, F64, I8, I32, I64, U8, U16, U32, U64
from optiml.ptx.simt import WARP, Group

Array = Any
_G = np.arange(WARP) >> 2
_T = np.arange(WARP) & 3


@dataclass(frozen=True, kw_only=True)
class Element:
    """How matrix elements of a type lie in registers.

    Attributes:
        bits: dtype of the pattern of one element.
        value: patterns to numbers on which products are exact (float64 or int64).
    """

    bits: np.dtype[Any]
    value: Callable[[Array], Array]


def _bf16_value(x: Array) -> Array:
    return num.bf16_to_f32(x).astype(F64)


def _tf32_value(x: Array) -> Array:
    return (x & np.uint32(0xFFFFE000)).view(F32).astype(F64)


ELEMENTS: dict[str, Element] = {
    "f16": Element(bits=U16, value=lambda x: x.view(F16).astype(F64)),
    "bf16": Element(bits=U16, value=_bf16_value),
    "tf32": Element(bits=U32, value=_tf32_value),
    "f32": Element(bits=U32, value=lambda x: x.view(F32).astype(F64)),
    "f64": Element(bits=U64, value=lambda x: x.view(F64)),
    "s8": Element(bits=U8, value=lambda x: x.view(I8).astype(I64)),
    "u8": Element(bits=U8, value=lambda x: x.astype(I64)),
    "s32": Element(bits=U32, value=lambda x: x.view(I32).astype(I64)),
    "e4m3": Element(bits=U8, value=lambda x: num.from_fp8("e4m3")(x).astype(F64)),
    "e5m2": Element(bits=U8, value=lambda x: num.from_fp8("e5m2")(x).astype(F64)),
}


def encoded(values: Array, kind: str, saturate: bool) -> Array:
    """Numbers to patterns of an accumulator type."""
    if kind == "f64":
        return values.view(U64)
    if kind == "f32":
        return values.astype(F32).view(U32)
    if kind == "f16":
        return values.astype(F16).view(U16)
    if saturate:
        values = np.clip(values, -(2**31), 2**31 - 1)
    return values.astype(I32).view(U32)


# -- fragments of mma ------------------------------------------------------------------------------------------------

Places = tuple[Array, Array]  # row and column, each [32, elements per lane]


def _places(rows: list[Array], columns: list[Array]) -> Places:
    return np.stack(np.broadcast_arrays(*rows), axis=1), np.stack(np.broadcast_arrays(*columns), axis=1)


@lru_cache(maxsize=64)
def fragments(shape: str, kind: str) -> tuple[Places, Places, Places] | None:
    """Where the elements of A, B and C of each lane lie; None for a shape that is not known for this type."""
    per_word = {"f16": 2, "bf16": 2, "s8": 4, "u8": 4, "e4m3": 4, "e5m2": 4}.get(kind, 1)
    known = {
        1: {"m16n8k8", "m16n8k4"} if kind == "tf32" else {"m8n8k4"},
        2: {"m16n8k16", "m16n8k8"},
        4: {"m16n8k16", "m16n8k32", "m8n8k16"},
    }
    if shape not in known[per_word] or (kind in ("e4m3", "e5m2") and shape == "m8n8k16"):
        return None
    m, _, k = sizes(shape)
    row_blocks = m // 8
    width = 4 * per_word  # columns of A that one word of each lane spans
    a_rows, a_columns, b_rows, b_columns = [], [], [], []
    for part in range(k // width):
        for block in range(row_blocks):
            for i in range(per_word):
                a_rows.append(_G + 8 * block)
                a_columns.append(part * width + _T * per_word + i)
        for i in range(per_word):
            b_rows.append(part * width + _T * per_word + i)
            b_columns.append(_G)
    c_rows = [_G + 8 * block for block in range(row_blocks) for _ in range(2)]
    c_columns = [_T * 2 + i for _ in range(row_blocks) for i in range(2)]
    return _places(a_rows, a_columns), _places(b_rows, b_columns), _places(c_rows, c_columns)


def sizes(shape: str) -> tuple[int, int, int]:
    """m, n and k of "m16n8k16"."""
    m, rest = shape[1:].split("n")
    n, k = rest.split("k")
    return int(m), int(n), int(k)


def _assembled(group: Group, registers: list[Array], element: Element, places: Places, shape: tuple[int, int]) -> Array:
    """The `[warps, rows, columns]` matrix of numbers held in registers."""
    words = np.stack([np.broadcast_to(r, group.n) for r in registers], axis=1)
    patterns = np.ascontiguousarray(words).view(element.bits).reshape(group.warps, -1)
    flat = np.empty((group.warps, shape[0] * shape[1]), element.bits)
    flat[:, (places[0] * shape[1] + places[1]).reshape(-1)] = patterns
    return element.value(flat).reshape(-1, *shape)


def _dealt(matrix: Array, places: Places, kind: str, saturate: bool, word: np.dtype[Any]) -> list[Array]:
    """Registers that hold a `[warps, rows, columns]` matrix."""
    flat = matrix.reshape(len(matrix), -1)[:, (places[0] * matrix.shape[2] + places[1]).reshape(-1)]
    patterns = encoded(np.ascontiguousarray(flat), kind, saturate).reshape(len(matrix) * WARP, -1)
    words = np.ascontiguousarray(patterns).view(word)
    return [np.ascontiguousarray(words[:, i]) for i in range(words.shape[1])]


def require_whole_warps(group: Group, name: str, line: int | None) -> None:
    """A matrix instruction in a warp with missing threads is undefined, so it is a fault."""
    group.count_warps()
    if not group.full_rows:
        lacking = group.rows[np.argmin(group.present().all(axis=1))]
        position = int(np.argmax(group.lanes >> 5 == lacking))
        memory.raise_fault(group, position, "illegal", f"illegal: {name} needs all 32 threads of a warp", line=line)


@dataclass(frozen=True, kw_only=True)
class Product:
    """A matrix product D = A B + C: types, sizes, fragments and register slots."""

    name: str
    kinds: tuple[str, str, str, str]  # of D, A, B, C
    sizes: tuple[int, int, int]
    places: tuple[Places, Places, Places]
    saturate: bool
    line: int | None


def multiply(product: Product, d: list[int], a: list[int], b: list[int], c: list[int]) -> Step:
    """The closure of mma and wmma.mma."""
    m, n, k = product.sizes
    to, left, right, plus = product.kinds
    word = U64 if to == "f64" else U32
    places_a, places_b, places_c = product.places

    def run(frame: list[Array], group: Group) -> None:
        require_whole_warps(group, product.name, product.line)
        x = _assembled(group, [frame[s] for s in a], ELEMENTS[left], places_a, (m, k))
        y = _assembled(group, [frame[s] for s in b], ELEMENTS[right], places_b, (k, n))
        z = _assembled(group, [frame[s] for s in c], ELEMENTS[plus], places_c, (m, n))
        total = x[:, :, 0, None] * y[:, 0, None, :]
        for at in range(1, k):
            total += x[:, :, at, None] * y[:, at, None, :]
        result = total + z
        for slot, value in zip(d, _dealt(result, places_c, to, product.saturate, word), strict=True):
            frame[slot] = value

    return run


# -- moving 8x8 matrices ------------------------------------------------------------------------------------------


def _row_group(group: Group, addresses: Array, rows: int) -> tuple[Group, Array]:
    """The lanes whose addresses ldmatrix and stmatrix use, and those addresses."""
    chosen = np.flatnonzero((group.lanes & 31) < rows)
    part = Group(group.batch, group.lanes[chosen], [], group.place)
    return part, memory.full(group, addresses)[chosen]


def load_matrices(
    name: str, targets: list[int], address: int, offset: int, transposed: bool, space: str, line: int | None
) -> Step:
    """ldmatrix: each lane gets two neighbouring elements of its row (or column) of one, two or four matrices."""
    count = len(targets)

    def run(frame: list[Array], group: Group) -> None:
        require_whole_warps(group, name, line)
        part, addresses = _row_group(group, memory.offset_address(frame[address], offset), 8 * count)
        if group.batch.recorder is not None:
            group.batch.recorder.access("load", space, addresses, part, 16, line, False)
        rows = memory.gather(part, addresses, CODE[WIDE], space, line).view(U16).reshape(-1, count, 8, 8)
        if transposed:
            rows = np.ascontiguousarray(rows.transpose(0, 1, 3, 2))
        words = rows.reshape(-1, count, 64).view(U32)  # [warps, matrices, 32]: one word per lane
        for index, slot in enumerate(targets):
            frame[slot] = np.ascontiguousarray(words[:, index]).reshape(-1)

    return run


def store_matrices(
    name: str, sources: list[int], address: int, offset: int, transposed: bool, space: str, line: int | None
) -> Step:
    """stmatrix: the inverse of ldmatrix."""
    count = len(sources)

    def run(frame: list[Array], group: Group) -> None:
        require_whole_warps(group, name, line)
        part, addresses = _row_group(group, memory.offset_address(frame[address], offset), 8 * count)
        if group.batch.recorder is not None:
            group.batch.recorder.access("store", space, addresses, part, 16, line, False)
        words = np.stack([memory.full(group, frame[s]).reshape(-1, WARP) for s in sources], axis=1)
        rows = np.ascontiguousarray(words).view(U16).reshape(-1, count, 8, 8)
        if transposed:
            rows = rows.transpose(0, 1, 3, 2)
        values = np.ascontiguousarray(rows).reshape(-1, 8).view(WIDE).reshape(-1)
        memory.scatter(part, addresses, values, CODE[WIDE], space, line)

    return run


def transpose_matrix(name: str, target: int, source: int, line: int | None) -> Step:
    """movmatrix.trans: the 8x8 matrix of a warp, transposed."""

    def run(frame: list[Array], group: Group) -> None:
        require_whole_warps(group, name, line)
        halves = np.ascontiguousarray(memory.full(group, frame[source])).view(U16).reshape(-1, 8, 8)
        frame[target] = np.ascontiguousarray(halves.transpose(0, 2, 1)).reshape(-1, 2).view(U32).reshape(-1)

    return run


# -- wmma ----------------------------------------------------------------------------------------------------------


def wmma_shape(part: str, shape: str) -> tuple[int, int]:
    """Rows and columns of fragment a, b, c or d."""
    m, n, k = sizes(shape)
    return {"a": (m, k), "b": (k, n)}.get(part, (m, n))


def wmma_registers(part: str, shape: str, kind: str) -> int:
    """Registers of a fragment as the ISA has them; 0 if the combination does not exist."""
    shapes = {"f16": "m16n16k16 m8n32k16 m32n8k16", "bf16": "m16n16k16 m8n32k16 m32n8k16", "tf32": "m16n16k8",
              "s8": "m16n16k16 m8n32k16 m32n8k16", "u8": "m16n16k16 m8n32k16 m32n8k16", "f64": "m8n8k4"}  # fmt: skip
    if part in ("c", "d"):
        if kind not in ("f16", "f32", "s32", "f64") or (kind == "f64") != (shape == "m8n8k4"):
            return 0
        return {"f16": 4, "f64": 2}.get(kind, 8)
    if shape not in shapes.get(kind, "").split():
        return 0
    if kind == "f16":
        return 8
    if kind == "f64":
        return 1
    rows, columns = wmma_shape(part, shape)
    return max(1, rows * columns * ELEMENTS[kind].bits.itemsize // 128)


def wmma_places(part: str, shape: str, kind: str) -> Places:
    """Our layout of a wmma fragment."""
    rows, columns = wmma_shape(part, shape)
    word = 8 if kind == "f64" else 4
    each = wmma_registers(part, shape, kind) * word // ELEMENTS[kind].bits.itemsize
    flat = np.arange(WARP * each).reshape(WARP, each) % (rows * columns)
    return flat // columns, flat % columns


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A wmma load or store."""

    name: str
    shape: tuple[int, int]  # rows, columns of the fragment
    kind: str
    by_row: bool
    places: Places
    space: str
    line: int | None

    def pieces(self, group: Group, addresses: Array, stride: Array | None) -> tuple[Group, Array, Array]:
        """(one thread per piece, addresses of 16-byte pieces `[warps * pieces]`, warp numbers): line by line."""
        size = ELEMENTS[self.kind].bits.itemsize
        lines, length = self.shape if self.by_row else self.shape[::-1]
        first = memory.full(group, addresses).reshape(-1, WARP)[:, 0].astype(U64)
        if stride is None:
            pitch = np.full(len(first), length, np.uint64)
        else:
            pitch = memory.full(group, stride).reshape(-1, WARP)[:, 0].astype(U64)
        per_line = length * size // 16
        starts = first[:, None] + np.arange(lines, dtype=np.uint64) * (pitch * np.uint64(size))[:, None]
        every = (starts[:, :, None] + np.arange(per_line, dtype=np.uint64) * np.uint64(16)).reshape(len(first), -1)
        owners = np.repeat(group.rows * WARP, every.shape[1])
        return Group(group.batch, owners, [], group.place), every.reshape(-1), every

    def count(self, kind: str, group: Group, every: Array) -> None:
        """Count the pieces as 16-byte accesses of 32 lanes at a time."""
        recorder = group.batch.recorder
        if recorder is None:
            return
        for start in range(0, every.shape[1], WARP):
            block = every[:, start : start + WARP]
            lanes = (group.rows[:, None] * WARP + np.arange(block.shape[1])).reshape(-1)
            part = Group(group.batch, lanes, [], group.place)
            recorder.access(kind, self.space, block.reshape(-1), part, 16, self.line, kind == "load")


def wmma_load(transfer: Transfer, targets: list[int], address: int, offset: int, stride: int | None) -> Step:
    """wmma.load: a matrix from memory into fragments."""
    element = ELEMENTS[transfer.kind]
    word = U64 if transfer.kind == "f64" else U32
    rows, columns = transfer.shape
    order = (transfer.places[0] * columns + transfer.places[1]).reshape(-1)

    def run(frame: list[Array], group: Group) -> None:
        require_whole_warps(group, transfer.name, transfer.line)
        addresses = memory.offset_address(frame[address], offset)
        owners, wanted, every = transfer.pieces(group, addresses, None if stride is None else frame[stride])
        transfer.count("load", group, every)
        data = memory.gather(owners, wanted, CODE[WIDE], transfer.space, transfer.line).view(element.bits)
        matrix = data.reshape((-1, rows, columns) if transfer.by_row else (-1, columns, rows))
        if not transfer.by_row:
            matrix = np.ascontiguousarray(matrix.transpose(0, 2, 1))
        dealt = np.ascontiguousarray(matrix.reshape(len(matrix), -1)[:, order]).reshape(group.n, -1).view(word)
        for index, slot in enumerate(targets):
            frame[slot] = np.ascontiguousarray(dealt[:, index])

    return run


def wmma_store(transfer: Transfer, sources: list[int], address: int, offset: int, stride: int | None) -> Step:
    """wmma.store: fragments of D to memory."""
    element = ELEMENTS[transfer.kind]
    rows, columns = transfer.shape
    order = (transfer.places[0] * columns + transfer.places[1]).reshape(-1)

    def run(frame: list[Array], group: Group) -> None:
        require_whole_warps(group, transfer.name, transfer.line)
        addresses = memory.offset_address(frame[address], offset)
        owners, wanted, every = transfer.pieces(group, addresses, None if stride is None else frame[stride])
        transfer.count("store", group, every)
        words = np.stack([memory.full(group, frame[s]) for s in sources], axis=1)
        patterns = np.ascontiguousarray(words).view(element.bits).reshape(group.warps, -1)
        matrix = np.empty((group.warps, rows * columns), element.bits)
        matrix[:, order] = patterns
        matrix = matrix.reshape(-1, rows, columns)
        if not transfer.by_row:
            matrix = matrix.transpose(0, 2, 1)
        values = np.ascontiguousarray(matrix).reshape(-1).view(WIDE)
        memory.scatter(owners, wanted, values, CODE[WIDE], transfer.space, transfer.line)

    return run
