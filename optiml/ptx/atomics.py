"""Atomic operations: memory and returned values as if the threads ran one after the other, in order of their slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from optiml.ptx import numerics as num
from optiml.ptx.memory import CODE, Step, full, global_index, locate, offset_address, shared_index
from optiml.ptx.numerics import F16, F32, F64, I32, I64, U16, U32, U64
from optiml.ptx.simt import Group

Array = Any
Combine = Callable[[Array, Array], Array]


def _increment(old: Array, limit: Array) -> Array:
    return np.where(old >= limit, np.array(0, old.dtype), old + np.array(1, old.dtype))


def _decrement(old: Array, limit: Array) -> Array:
    return np.where((old == 0) | (old > limit), limit, old - np.array(1, old.dtype))


# operation and PTX type -> (element dtype in memory, how an old and a new value combine)
_TYPES: dict[str, np.dtype[Any]] = {
    "u32": U32, "s32": I32, "b32": U32, "u64": U64, "s64": I64, "b64": U64, "f32": F32, "f64": F64,
    "b16": U16, "f16": F16, "bf16": U16, "f16x2": U32, "bf16x2": U32, "u16": U16,
}  # fmt: skip
_PLAIN: dict[str, Combine] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "inc": _increment, "dec": _decrement, "exch": lambda old, new: new,
}  # fmt: skip
_HALF_ADD: dict[str, Combine] = {
    "f16": np.add, "bf16": num.add_bf16, "f16x2": num.packed(np.add, F16), "bf16x2": num.packed(num.add_bf16, U16)
}  # fmt: skip
_HALF_EXTREME: dict[tuple[str, str], Combine] = {
    (operation, kind): combine
    for operation, plain in (("min", num.fmin), ("max", num.fmax))
    for kind, combine in (
        ("f16", plain),
        ("bf16", num.in_bf16(plain)),
        ("f16x2", num.packed(plain, F16)),
        ("bf16x2", num.packed(num.in_bf16(plain), U16)),
    )
}


OPERATIONS = frozenset({*_PLAIN, "cas"})


def combination(operation: str, kind: str) -> tuple[np.dtype[Any], Combine | None] | None:
    """Element dtype and combining function of an atomic (None for cas); None if the ISA has no such form."""
    dtype = _TYPES.get(kind)
    if dtype is None:
        return None
    if operation == "cas":
        return dtype, None
    if kind in _HALF_ADD:
        combine = _HALF_ADD[kind] if operation == "add" else _HALF_EXTREME.get((operation, kind))
    elif kind in ("f32", "f64"):
        combine = np.add if operation == "add" else None
    else:
        combine = _PLAIN.get(operation)
    return None if combine is None else (dtype, combine)


def apply_in_order(memory: Array, index: Array, values: Array, combine: Combine, wanted: bool) -> Array | None:
    """Combine `values[i]` into `memory[index[i]]` for i = 0, 1, ...; the old values if `wanted`.

    Threads with an address of their own are done at once; the k-th threads of all shared addresses together, or
    address by address where there are fewer addresses than threads per address.
    """
    count = len(index)
    if count == 1:
        old = memory[index]
        memory[index] = combine(old, values)
        return old
    if not wanted and isinstance(combine, np.ufunc) and memory.dtype.kind != "f":
        combine.at(memory, index, values)
        return None
    if combine is np.add and not wanted:
        np.add.at(memory, index, values)
        return None
    order = np.argsort(index, kind="stable")
    places = index[order]
    fresh = np.empty(count, bool)
    fresh[0] = True
    np.not_equal(places[1:], places[:-1], out=fresh[1:])
    starts = np.flatnonzero(fresh)
    if len(starts) == count:
        old = memory[index]
        memory[index] = combine(old, values)
        return old
    sorted_values = values[order]
    sorted_old = np.empty(count, memory.dtype)
    ends = np.append(starts[1:], count)
    longest = int((ends - starts).max())
    if isinstance(combine, np.ufunc) and len(starts) <= longest:
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            place = places[start]
            chain = combine.accumulate(np.concatenate([memory[place : place + 1], sorted_values[start:end]]))
            sorted_old[start:end] = chain[:-1]
            memory[place] = chain[-1]
    else:
        active, limit = starts, ends
        while len(active):
            spot = places[active]
            old = memory[spot]
            sorted_old[active] = old
            memory[spot] = combine(old, sorted_values[active])
            active = active + 1
            more = active < limit
            active, limit = active[more], limit[more]
    result = np.empty(count, memory.dtype)
    result[order] = sorted_old
    return result


def swap_in_order(memory: Array, index: Array, compare: Array, values: Array) -> Array:
    """Compare-and-swap, thread after thread; the old values."""
    count = len(index)
    old = memory[index]
    if not np.count_nonzero(old == compare):  # nobody succeeds, so nothing changes: a lock that is taken
        return old
    if len(np.unique(index)) == count:
        memory[index] = np.where(old == compare, values, old)
        return old
    current: dict[int, int] = {}
    before = old.tolist()
    olds = []
    for place, first, expected, new in zip(index.tolist(), before, compare.tolist(), values.tolist(), strict=True):
        value = current.get(place, first)
        olds.append(value)
        current[place] = new if value == expected else value
    memory[np.fromiter(current.keys(), np.int64, len(current))] = np.array(list(current.values()), memory.dtype)
    return np.array(olds, memory.dtype)


def atomic(
    target: int | None, address: int, offset: int, sources: list[tuple[int, Any]], dtype: np.dtype[Any],
    combine: Combine | None, space: str, start_slot: int | None, line: int | None,
) -> Step:  # fmt: skip
    """atom and red. `combine` None is compare-and-swap with two sources; `target` None drops the old value."""
    code = CODE[dtype]
    size = dtype.itemsize
    global_at = global_index(size, offset, aligned=False)
    shared_at = None if start_slot is None else shared_index(size, offset, start_slot, space, aligned=False)

    def fast(frame: list[Array], addresses: Array, group: Group) -> tuple[Array, Array] | None:
        if shared_at is not None:
            index = shared_at(frame, addresses, group)
            return None if index is None else (group.batch.shared_views[code], index)
        if space == "global":
            found = global_at(addresses, group)
            if found is not None and int(found[1].max()) < len(found[0].views[code]) and int(found[1].min()) >= 0:
                return found[0].views[code], found[1]
        return None

    def run(frame: list[Array], group: Group) -> None:
        group.batch.polled = True
        addresses = frame[address]
        operands = [full(group, frame[s] if convert is None else convert(frame[s])) for s, convert in sources]
        found = fast(frame, addresses, group)
        if found is not None:
            parts = [(found[0], full(group, found[1]), None)]
        else:
            parts = [
                (views[code], offsets // size, positions)
                for views, offsets, positions in locate(
                    group, offset_address(addresses, offset), size, space, "atomic", line
                )
            ]
        result: Array = None
        for memory, index, positions in parts:
            mine = operands if positions is None else [x[positions] for x in operands]
            if combine is None:
                old = swap_in_order(memory, index, mine[0], mine[1])
            else:
                old = apply_in_order(memory, index, mine[0], combine, target is not None)
            if target is not None:
                if positions is None:
                    result = old
                else:
                    result = np.empty(group.n, dtype) if result is None else result
                    result[positions] = old
        if target is not None:
            frame[target] = result

    return run
