"""Barrier objects in shared memory (mbarrier), as `cuda::barrier` uses them.

The 64-bit object is opaque to programs. Ours holds the number of arrivals that a phase expects (bits 0-19), those
still missing (20-39), the bytes that bulk copies have still to bring (40-61, signed) and the phase (bit 62).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from optiml.ptx import memory
from optiml.ptx.memory import CODE, Step
from optiml.ptx.numerics import U64
from optiml.ptx.simt import Group

Array = Any
_COUNT = (1 << 20) - 1
_BYTES = (1 << 22) - 1
_PHASE = 1 << 62


def initialise(address: int, offset: int, count: int, space: str, line: int | None) -> Step:
    """mbarrier.init: a first phase that expects `count` arrivals."""

    def run(frame: list[Array], group: Group) -> None:
        expected = frame[count].astype(U64) & np.uint64(_COUNT)
        value = expected | expected << np.uint64(20)
        memory.scatter(group, memory.offset_address(frame[address], offset), value, CODE[U64], space, line)

    return run


def _after(state: int, *, arrivals: int = 0, dropped: int = 0, tx: int = 0) -> int:
    """The object after some arrivals and a change of the bytes to come; what completes a phase begins the next one."""
    expected, missing, left = state & _COUNT, state >> 20 & _COUNT, state >> 40 & _BYTES
    left = left + tx & _BYTES
    expected = expected - dropped & _COUNT
    missing = max(0, missing - arrivals)
    phase = state & _PHASE
    if missing == 0 and left == 0:
        missing, phase = expected, phase ^ _PHASE
    return expected | missing << 20 | left << 40 | phase


def arrived(state: int, count: int) -> int:
    """The object after `count` arrivals."""
    return _after(state, arrivals=count)


# By operation: the object after it, for its operand.
CHANGES: Mapping[str, Callable[[int, int], int]] = MappingProxyType(
    {
        "arrive": arrived,
        "arrive_drop": lambda state, count: _after(state, arrivals=count, dropped=count),
        "expect_tx": lambda state, count: _after(state, tx=count),
        "complete_tx": lambda state, count: _after(state, tx=-count),
        "arrive_expect": lambda state, count: _after(state, arrivals=1, tx=count),
    }
)


def arrive(
    target: int | None, address: int, offset: int, count: int, space: str, change: Callable[[int, int], int],
    line: int | None,
) -> Step:  # fmt: skip
    """mbarrier.arrive, thread after thread; `target` gets the object as it was before."""

    def run(frame: list[Array], group: Group) -> None:
        counts = memory.full(group, frame[count]).tolist()
        before = np.empty(group.n, U64)
        addresses = memory.offset_address(frame[address], offset)
        for views, offsets, positions in memory.locate(group, addresses, 8, space, "atomic", line):
            objects = views[CODE[U64]]
            for position, place in zip(positions.tolist(), (offsets >> 3).tolist(), strict=True):
                state = int(objects[place])
                before[position] = state
                objects[place] = change(state, counts[position])
        group.batch.polled = True
        if target is not None:
            frame[target] = before

    return run


def test(target: int, address: int, offset: int, state: int, parity: bool, space: str, line: int | None) -> Step:
    """mbarrier.test_wait and try_wait: whether the phase of `state`, or of that parity, is over."""

    def run(frame: list[Array], group: Group) -> None:
        now = memory.gather(group, memory.offset_address(frame[address], offset), CODE[U64], space, line)
        phase = (now & np.uint64(_PHASE)) != 0
        asked = frame[state]
        old = (asked & np.uint32(1)) != 0 if parity else (asked & np.uint64(_PHASE)) != 0
        group.batch.polled = True
        frame[target] = phase != old

    return run


def missing(state: Array) -> Array:
    """mbarrier.pending_count of a state."""
    return ((state >> np.uint64(20)) & np.uint64(_COUNT)).astype(np.uint32)
