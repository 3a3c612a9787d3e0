"""What a verification on the embedded device looks for beside wrong results, and on which cases it can afford to.

Level 1 checks small cases for races and for reads of memory that nothing has written, and runs them once more with the
blocks in the other order, the arrays at other addresses and other bytes in unwritten shared memory. Level 2 checks
every case.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from optiml.device.device import Scrutiny
from optiml.device.plan import Plan
from optiml.errors import Fault
from optiml.ptx.memory import FIRST_ALLOCATION, WINDOW_BITS
from optiml.records import DeviceInfo

CHECKS = frozenset(("race", "uninitialised"))
CHECKED_COST = 1e6  # operations or elements of a case that level 1 checks; the checks take about five times as long
CHECKED_THREADS = 1 << 20  # and it launches no more threads than this
CHECK_TIME = 5.0  # times the usual limit, for a run of level 2 with all checks
PERTURBED_TIMEOUT_S = 2.0  # a kernel that waits for an earlier block never ends when it runs last to first
SHIFT_BYTES = 5 * 256  # as a GPU aligns allocations, and no more
OTHER_BYTE = 0x3C  # of unwritten memory: a small positive number in every floating dtype
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
_FOUND_BY: Mapping[str, str] = {
    "race": "racecheck",
    "uninitialised": "initcheck",
    "barrier_divergence": "synccheck",
    "deadlock": "synccheck",
}
Change = Literal["unwritten", "order", "place"]
PERTURBED = Scrutiny(unwritten=OTHER_BYTE, reverse=True, shift_bytes=SHIFT_BYTES)
ALONE: Mapping[Change, Scrutiny] = {
    "unwritten": Scrutiny(unwritten=OTHER_BYTE),
    "order": Scrutiny(reverse=True),
    "place": Scrutiny(shift_bytes=SHIFT_BYTES),
}


def can_check(device: DeviceInfo) -> bool:
    """Whether the device looks for races and uninitialised reads by itself."""
    return device.kind == "emulator" and device.engine == "native"


def threads_of(plan: Plan) -> int:
    """Threads that all launches of a plan start."""
    return sum(math.prod(launch.grid) * math.prod(launch.block) for launch in plan.launches)


def array_of(fault: Fault, plan: Plan) -> str | None:
    """Name of the array that a fault's address lies in; None for shared memory and variables of the kernel."""
    number = (fault.address or 0) >> WINDOW_BITS
    names = list(plan.arrays)
    return names[number - FIRST_ALLOCATION] if 0 <= number - FIRST_ALLOCATION < len(names) else None


def sanitizer_report(fault: Fault | None) -> dict[str, str]:
    """The four checks of level 2: clean, or what one of them found; the others then ended early."""
    if fault is None:
        return dict.fromkeys(SANITIZERS, "clean")
    finder = _FOUND_BY.get(fault.kind, "memcheck")
    return {name: fault.detail or fault.kind if name == finder else "not finished" for name in SANITIZERS}
