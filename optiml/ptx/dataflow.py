"""How long one warp, alone, needs for a basic block: the critical path through its registers and memory order.

PTX places a load next to its use and leaves it to ptxas to hoist it, so the order of the text says little. A block is
read as a dataflow graph instead: an instruction may start as soon as its operands are there, except where memory order
or a barrier forbids it. Between two executions of a block the order is that of the machine: in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from optiml.ptx.parse import Address, BasicBlock, Instruction, Operand, Register, Symbol, Vector

_SPACES = ("global", "shared", "local", "const", "param")
SIMULATED_ITERATIONS = 3  # the difference between the last two is the steady state


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Cost of one warp instruction in cycles: issue slots it occupies, and time from its start to its result."""

    slots: float
    latency: float


@dataclass(frozen=True, kw_only=True)
class BlockCycles:
    """Cycles of one execution of a basic block, and of each further one where it loops onto itself."""

    first: float
    steady: float


def block_cycles(block: BasicBlock, timing: Callable[[Instruction], Timing]) -> BlockCycles:
    """Critical-path length of a basic block in cycles.

    A register is ready `latency` after the instruction that writes it starts. A load waits for the stores before it to
    the same space, unless it is `.nc`; a barrier waits for every memory access before it and holds up those behind it.
    An execution is over when all results are there; the next one of a loop starts when the last instruction has
    started, but not before every slot has been issued. So unrolling, which puts several loads into one execution,
    shortens a loop, and so does `.nc` (from `const __restrict__`) where stores stand between loads.

    Args:
        timing: cost of each instruction.

    Returns:
        Both lengths; `steady == first` for a block that does not branch to itself.
    """
    if not block.instructions:
        return BlockCycles(first=0.0, steady=0.0)
    walk = _Walk(timing)
    first, ended = walk.execute(block)
    if not _loops_onto_itself(block):
        return BlockCycles(first=first, steady=first)
    previous = ended
    for _ in range(SIMULATED_ITERATIONS - 1):
        previous = ended
        _, ended = walk.execute(block)
    return BlockCycles(first=first, steady=ended - previous)


class _Walk:
    """Moments at which registers and memory become ready while a block is executed again and again."""

    def __init__(self, timing: Callable[[Instruction], Timing]) -> None:
        self._timing = timing
        self._ready: dict[str, float] = {}
        self._start = 0.0
        self._stored: dict[str, float] = {}  # space -> start of the last store
        self._accessed = 0.0  # all memory accesses so far are done
        self._released = 0.0  # end of the last barrier

    def execute(self, block: BasicBlock) -> tuple[float, float]:
        """One execution: the moment of its last result, and the moment from which the next one may start."""
        begin = self._start
        finished = last_start = begin
        slots = 0.0
        for instruction in block.instructions:
            cost = self._timing(instruction)
            start = max([begin, *(self._ready.get(name, 0.0) for name in _reads(instruction))])
            start = self._in_memory_order(instruction, start, cost)
            done = start + max(cost.latency, cost.slots)
            for name in _writes(instruction):
                self._ready[name] = done
            slots += cost.slots
            last_start = max(last_start, start + cost.slots)
            finished = max(finished, done)
        self._start = max(last_start, begin + slots)
        return max(finished, self._start), self._start

    def _in_memory_order(self, instruction: Instruction, start: float, cost: Timing) -> float:
        family = instruction.parts[0]
        if family in ("bar", "barrier", "membar", "fence"):
            start = max(start, self._accessed, self._released)
            self._released = start + cost.latency
            return start
        if family not in ("ld", "ldu", "st", "atom", "red", "cp", "ldmatrix", "stmatrix", "wmma"):
            return start
        space = next((part for part in instruction.parts if part in _SPACES), "global")
        if space == "param":
            return start
        reads_only = family in ("ld", "ldu", "ldmatrix") or (family == "wmma" and "load" in instruction.parts)
        free = space == "const" or "nc" in instruction.parts
        if not free:
            start = max(start, self._stored.get(space, 0.0), self._released)
        if not reads_only:
            self._stored[space] = max(self._stored.get(space, 0.0), start)
        self._accessed = max(self._accessed, start + cost.latency)
        return start


def _loops_onto_itself(block: BasicBlock) -> bool:
    last = block.instructions[-1]
    return last.parts[0] == "bra" and any(isinstance(item, Symbol) and item.name == block.label for item in last.src)


def _reads(instruction: Instruction) -> Iterator[str]:
    for operand in instruction.src:
        yield from _registers(operand)
    for operand in instruction.dst:
        if isinstance(operand, Address):
            yield from _registers(operand)
    if instruction.predicate is not None:
        yield instruction.predicate[0]
        yield from _writes(instruction)  # where the guard is off, the old value stays


def _writes(instruction: Instruction) -> Iterator[str]:
    for operand in instruction.dst:
        if not isinstance(operand, Address):
            yield from _registers(operand)


def _registers(operand: Operand | None) -> Iterator[str]:
    match operand:
        case Register(name=name):
            yield name
        case Address(base=Register(name=name)):
            yield name
        case Vector(elements=elements):
            for element in elements:
                yield from _registers(element)
