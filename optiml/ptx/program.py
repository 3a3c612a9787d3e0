"""A kernel ready to run: segments of closures and the slots that a launch fills."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from optiml.ptx.memory import Step
from optiml.ptx.numerics import BOOL
from optiml.ptx.simt import BRANCH, EXIT, FALL, JUMP

Array = Any
Frame = list[Array]


@dataclass(frozen=True, kw_only=True)
class BarrierCall:
    """Operands of a bar or barrier instruction, as slots.

    `plain` is barrier 0 for all threads of the block; `count` is the number of threads expected, None for all;
    `source`, `operation`, `target` and `dtype` belong to bar.red.
    """

    number: int | None
    count: int | None
    plain: bool
    arrive_only: bool
    aligned: bool
    source: int = -1
    reduces: bool = False
    negated: bool = False
    operation: str = ""
    target: int = -1
    dtype: np.dtype[Any] = BOOL


class Segment:
    """Instructions run in one go; see the module's text.

    Attributes:
        operations: the closures.
        kind, target, predicate, negated: how it ends; `predicate` is a slot.
        reads, writes: slots whose values on entry its instructions need, and slots they set.
        live: slots whose values are needed from here on; `live_after` the same for the next segment.
        weight: number of instructions, for budgets and counters.
        warp_wide: the first instruction needs whole warps; `mask` is the slot of its member mask, None for all.
        exits: nothing but a plain exit.
        mix: (source line, class) of each instruction.
        origin: (function, basic block index) if this segment starts that basic block.
    """

    __slots__ = (
        "barrier", "counted_branch", "exits", "kind", "last_line", "live", "live_after", "mask", "mix", "negated",
        "number", "operations", "origin", "predicate", "reads", "target", "warp_wide", "weight", "writes",
    )  # fmt: skip

    def __init__(self, number: int) -> None:
        self.number = number
        self.operations: tuple[Step, ...] = ()
        self.kind = FALL
        self.target = -1
        self.predicate = -1
        self.negated = False
        self.counted_branch = True
        self.live: tuple[int, ...] = ()
        self.live_after: tuple[int, ...] = ()
        self.reads: frozenset[int] = frozenset()
        self.writes: frozenset[int] = frozenset()
        self.weight = 0
        self.warp_wide = False
        self.mask: int | None = None
        self.exits = False
        self.barrier: BarrierCall | None = None
        self.last_line: int | None = None
        self.mix: tuple[tuple[int | None, str], ...] = ()
        self.origin: tuple[str, int] | None = None


@dataclass
class Program:
    """A kernel ready to run.

    Attributes:
        constants: slot and value of every literal.
        base: a frame with literals in place and every register 0.
        parameters: (slot, byte offset, dtype) of the kernel parameters that are read.
        flat: (slot, slot of a launch value): the same value as a 0-d array.
        symbols: (slot, module-scope variable, addend) of the global addresses that are needed.
        launch_values: slot by special register with one value per launch.
        specials: slot by special register with one value per thread.
        shared_slot, local_slot: slots of the byte offsets of a thread's shared and local memory, if used.
        waits: the kernel reads memory that other blocks may write while it runs.
    """

    segments: list[Segment] = field(default_factory=list)
    slots: int = 0
    constants: list[tuple[int, Array]] = field(default_factory=list)
    base: Frame = field(default_factory=list)
    parameters: list[tuple[int, int, np.dtype[Any]]] = field(default_factory=list)
    symbols: list[tuple[int, str, int]] = field(default_factory=list)
    flat: list[tuple[int, int]] = field(default_factory=list)
    launch_values: dict[str, int] = field(default_factory=dict)
    specials: dict[str, int] = field(default_factory=dict)
    shared_slot: int | None = None
    local_slot: int | None = None
    local_bytes: int = 0
    waits: bool = False
    registers: int = 0
    reach: dict[int, frozenset[int]] = field(default_factory=dict)

    @property
    def grid_barrier(self) -> bool:
        """Whether the kernel asks for the workspace of a grid-wide barrier: all its blocks must run together."""
        return "%envreg1" in self.launch_values

    def successors(self, number: int) -> tuple[int, ...]:
        """Segments that may run directly after this one."""
        segment = self.segments[number]
        if segment.kind == EXIT:
            return ()
        if segment.kind == JUMP:
            return (segment.target,)
        if segment.kind == BRANCH:
            return (segment.target, number + 1)
        return (number + 1,)

    def reachable(self, number: int) -> frozenset[int]:
        """Segments that can run at some time after this one."""
        known = self.reach.get(number)
        if known is None:
            seen: set[int] = set()
            stack = list(self.successors(number))
            while stack:
                current = stack.pop()
                if current not in seen:
                    seen.add(current)
                    stack.extend(self.successors(current))
            known = self.reach[number] = frozenset(seen)
        return known
