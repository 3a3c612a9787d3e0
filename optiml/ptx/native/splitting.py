"""Which kernels several threads of the host may share, how many there are for it, and when it is worth while.

The engine divides a launch by blocks so that memory, counters and faults are those of one thread, whatever a kernel
does with plain loads and stores; see csrc/parts.inc. What it could not keep apart is refused here.
"""

from __future__ import annotations

import os
from typing import Any

from optiml.ptx.native import table

MOST_THREADS = 4  # each may need a copy of what the kernel writes
# In warp instructions, about 20 ns each: what runs before a launch is divided, so that it is known how long a block
# takes; and what must be left for threads to be worth starting, and for each so many bytes to be worth copying.
PROBE_INSTRUCTIONS = 1 << 13
WORTHWHILE_INSTRUCTIONS = 1 << 14
COPIED_BYTES = 8
_POLLS, _SPACE_MASK, _SHARED, _LOCAL = 32, 7, 2, 3  # of csrc/core.inc


def _effects(*starts: str) -> frozenset[int]:
    return frozenset(number for name, number in table.EFFECT_NUMBERS.items() if name.startswith(starts))


# A clock counts all that ran before; text comes in the order of the blocks; Python runs in one thread at a time.
_ORDERED = _effects("clock_", "print", "numpy")
_ATOMIC = _effects("atomic_", "barrier_object")
_PLAIN = _effects("load_", "store_")


def may_be_divided(program: Any) -> bool:
    """Whether blocks of the kernel may run at the same time: none of them can take part in what another one does.

    Not if it waits for the whole grid, reads the clock, prints or asserts, needs a function of the numpy engine, or
    touches global memory in a way that is meant for other blocks: with atomics, or volatile, relaxed, acquire or
    release. Within a block all of that is fine.
    """
    if program.grid_barrier:
        return False
    for segment in program.segments:
        for record in segment.operations:
            meant_for_others = record.op in _ATOMIC or (record.op in _PLAIN and record.aux & _POLLS)
            within_block = record.aux & _SPACE_MASK in (_SHARED, _LOCAL)
            if record.op in _ORDERED or (meant_for_others and not within_block):
                return False
    return True


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_threads() -> int:
    """Threads that are of use to one launch where nothing else is running: a core each, at most four."""
    return min(MOST_THREADS, available_cores())
