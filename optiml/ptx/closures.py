"""The closures that instructions are bound to, and the conversions between storage and operand types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from optiml.ptx.memory import CODE, WIDE, Step
from optiml.ptx.numerics import BOOL, F16, F32, F64, U8, U16, U32, U64
from optiml.ptx.opcodes import UnknownForm
from optiml.ptx.parse import (
    Immediate,
)
from optiml.ptx.simt import Group

Array = Any
Frame = list[Array]
Convert = Callable[[Array], Array] | None

UNSIGNED: dict[int, np.dtype[Any]] = {1: U8, 2: U16, 4: U32, 8: U64}


def bits_of(immediate: Immediate, dtype: np.dtype[Any]) -> int:
    """The bit pattern of a literal as an operand of type `dtype`."""
    if immediate.kind == "f64" and dtype in (F32, F16):
        value = np.frombuffer(immediate.value.to_bytes(8, "little"), F64).astype(dtype)
        return int.from_bytes(value.tobytes(), "little")
    if dtype == BOOL:
        return int(immediate.value != 0)
    return immediate.value


def widened(literal: Immediate) -> Immediate:
    """A float32 literal as the float64 of the same value."""
    single = np.frombuffer((bits_of(literal, F32) & 0xFFFFFFFF).to_bytes(4, "little"), F32)
    return Immediate(value=int.from_bytes(single.astype(F64).tobytes(), "little"), kind="f64")


def trailing_zeros(value: int) -> int:
    return 64 if value == 0 else (value & -value).bit_length() - 1


def viewing(dtype: np.dtype[Any]) -> Callable[[Array], Array]:
    return lambda value: value.view(dtype)


def casting(dtype: np.dtype[Any]) -> Callable[[Array], Array]:
    return lambda value: value.astype(dtype)


def reading(stored: np.dtype[Any], wanted: np.dtype[Any]) -> Convert:
    """What turns a stored value into an operand of `wanted`: nothing, new eyes, or only its low bits."""
    if stored == wanted:
        return None
    if stored.itemsize == wanted.itemsize:
        return viewing(wanted)
    low = UNSIGNED[wanted.itemsize]
    if stored.itemsize < wanted.itemsize:
        raise UnknownForm
    if stored.kind in "ui":
        if wanted.kind in "ui":
            return casting(wanted)
        return lambda value: value.astype(low).view(wanted)
    bits = UNSIGNED[stored.itemsize]
    return lambda value: value.view(bits).astype(low).view(wanted)


def writing(result: np.dtype[Any], stored: np.dtype[Any]) -> Convert:
    """What turns a result into storage: wider storage gets zeros, or the sign of a signed result."""
    if result == stored:
        return None
    if result.itemsize == stored.itemsize:
        return viewing(stored)
    if result.itemsize > stored.itemsize or result.kind == "b":
        raise UnknownForm
    narrow = UNSIGNED[result.itemsize]
    wide = UNSIGNED[stored.itemsize]
    if result.kind == "i":
        return lambda value: value.astype(wide).view(stored)
    return lambda value: value.view(narrow).astype(wide).view(stored)


def field_of(shift: Array, part: np.dtype[Any]) -> Callable[[Array], Array]:
    if not shift:
        return lambda value: value.astype(part)
    return lambda value: (value >> shift).astype(part)


def whole_code(nbytes: int) -> int:
    return CODE[WIDE] if nbytes == 16 else CODE[UNSIGNED[nbytes]]


def bound(apply: Callable[..., Array] | None, target: int, after: Convert, sources: list[tuple[int, Convert]]) -> Step:
    """A closure for frame[target] = after(apply(sources...)); None stands for the identity."""
    converts = any(convert is not None for _, convert in sources) or after is not None
    if len(sources) == 1:
        ((a, before),) = sources
        if apply is None and not converts:

            def copy(frame: Frame, group: Group) -> None:
                frame[target] = frame[a]

            return copy
        chain = [f for f in (before, apply, after) if f is not None]
        if len(chain) == 1:
            only = chain[0]

            def one(frame: Frame, group: Group) -> None:
                frame[target] = only(frame[a])

            return one

        def several(frame: Frame, group: Group) -> None:
            value = frame[a]
            for f in chain:
                value = f(value)
            frame[target] = value

        return several
    assert apply is not None
    function = apply
    if len(sources) == 2:
        (a, convert_a), (b, convert_b) = sources
        if not converts:

            def two(frame: Frame, group: Group) -> None:
                frame[target] = function(frame[a], frame[b])

            return two

        def two_converted(frame: Frame, group: Group) -> None:
            x, y = frame[a], frame[b]
            if convert_a is not None:
                x = convert_a(x)
            if convert_b is not None:
                y = convert_b(y)
            value = function(x, y)
            frame[target] = value if after is None else after(value)

        return two_converted
    if len(sources) == 3 and not converts:
        a, b, c = (slot for slot, _ in sources)

        def three(frame: Frame, group: Group) -> None:
            frame[target] = function(frame[a], frame[b], frame[c])

        return three

    def many(frame: Frame, group: Group) -> None:
        value = function(*[frame[s] if convert is None else convert(frame[s]) for s, convert in sources])
        frame[target] = value if after is None else after(value)

    return many


def guarded_pure(predicate: int, negated: bool, steps: tuple[Step, ...], defines: tuple[int, ...]) -> Step:
    """Run for everyone, then keep the old values where the predicate does not hold."""

    def run(frame: Frame, group: Group) -> None:
        holds = frame[predicate]
        votes = np.count_nonzero(holds)
        if votes == (len(holds) if negated else 0):
            return
        if votes == (0 if negated else len(holds)):
            for step in steps:
                step(frame, group)
            return
        old = [frame[slot] for slot in defines]
        for step in steps:
            step(frame, group)
        for slot, before in zip(defines, old, strict=True):
            if negated:
                frame[slot] = np.where(holds, before, frame[slot])
            else:
                frame[slot] = np.where(holds, frame[slot], before)

    return run


def guarded(
    predicate: int, negated: bool, steps: tuple[Step, ...], uses: tuple[int, ...], defines: tuple[int, ...]
) -> Step:
    """Run for a group of only the threads whose predicate holds."""
    live = tuple(slot for slot in uses if slot != predicate)

    def run(frame: Frame, group: Group) -> None:
        holds = frame[predicate]
        votes = np.count_nonzero(holds)
        if votes == (len(holds) if negated else 0):
            return
        if votes == (0 if negated else len(holds)):
            for step in steps:
                step(frame, group)
            return
        chosen = (~holds if negated else holds).nonzero()[0]
        part = group.subset(chosen, live, frame)
        for step in steps:
            step(part.frame, part)
        for slot in defines:
            new, old = part.frame[slot], frame[slot]
            wide = np.empty(group.n, new.dtype)
            wide[:] = old
            wide[chosen] = new
            frame[slot] = wide

    return run


def note_poll(frame: Frame, group: Group) -> None:
    group.batch.polled = True


def clock(slot: int, dtype: np.dtype[Any], *, high: bool) -> Step:
    """A clock that advances with the work done, so that runs repeat exactly."""

    def run(frame: Frame, group: Group) -> None:
        batch = group.batch
        batch.ticks += 1
        now = batch.budget.ticks() + batch.ticks
        frame[slot] = np.array([(now >> 32 if high else now) & ((1 << 8 * dtype.itemsize) - 1)], dtype)

    return run
