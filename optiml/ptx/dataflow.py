"""How long one warp, alone, needs for the basic blocks of a function: critical paths through registers and memory.

PTX places a load next to its use and leaves it to ptxas to hoist it, so the order of the text says little. A block is
read as a dataflow graph instead: an instruction may start as soon as its operands are there, except where memory order
or a barrier forbids it. Between blocks, and between two executions of one block, the order is that of the machine: a
block starts when every instruction of the one before it has started, while results may still be under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from optiml.ptx.parse import Address, BasicBlock, Function, Instruction, Operand, Register, Symbol, Vector

_SPACES = ("global", "shared", "local", "const", "param")
SIMULATED_ITERATIONS = 3  # the last one stands for the steady state


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


def function_cycles(
    function: Function, executions: Mapping[int, int], timing: Callable[[Instruction], Timing]
) -> dict[int, BlockCycles]:
    """Critical-path length of each executed basic block in cycles, by index of the block.

    A register is ready `latency` after the instruction that writes it starts. A load waits for the stores before it to
    the same space, unless it is `.nc`; a barrier waits for every memory access before it and holds up those behind it.
    So unrolling, which puts several loads into one execution, shortens a loop, and so does `.nc` (from
    `const __restrict__`) where stores stand between loads.

    Executed blocks are walked once in the order of the text, each charged with what it adds to the path. A block
    executed less than half as often as both its neighbours is a detour: it is charged, and the walk goes on as if it
    had been passed by. A block that branches to itself is walked three times; the last difference is its steady state.

    Args:
        executions: how often each block was executed, by any warp; blocks that are missing were not.
        timing: cost of each instruction.
    """
    executed = [index for index in range(len(function.blocks)) if executions.get(index, 0) > 0]
    walk = _Walk(timing)
    cycles = {}
    for place, index in enumerate(executed):
        neighbours = executed[max(0, place - 1) : place] + executed[place + 1 : place + 2]
        detour = len(neighbours) == 2 and all(2 * executions[index] < executions[near] for near in neighbours)
        cycles[index] = (walk.copy() if detour else walk).lengths(function.blocks[index])
    return cycles


class _Walk:
    """Moments at which registers and memory become ready while blocks are executed one after another."""

    def __init__(self, timing: Callable[[Instruction], Timing]) -> None:
        self._timing = timing
        self._ready: dict[str, float] = {}
        self._start = 0.0
        self._stored: dict[str, float] = {}  # space -> start of the last store
        self._accessed = 0.0  # all memory accesses so far are done
        self._released = 0.0  # end of the last barrier

    def copy(self) -> _Walk:
        twin = _Walk(self._timing)
        twin._ready, twin._stored = dict(self._ready), dict(self._stored)
        twin._start, twin._accessed, twin._released = self._start, self._accessed, self._released
        return twin

    def lengths(self, block: BasicBlock) -> BlockCycles:
        """Execute a block, and twice more if it loops onto itself."""
        first = steady = self._execute(block)
        if _loops_onto_itself(block):
            for _ in range(SIMULATED_ITERATIONS - 1):
                steady = self._execute(block)
        return BlockCycles(first=first, steady=steady)

    def _execute(self, block: BasicBlock) -> float:
        """Cycles from the start of this block to the moment at which the next one may start."""
        begin = last_start = self._start
        slots = 0.0
        for instruction in block.instructions:
            cost = self._timing(instruction)
            start = max([begin, *(self._ready.get(name, 0.0) for name in _reads(instruction))])
            start = self._in_memory_order(instruction, start, cost)
            for name in _writes(instruction):
                self._ready[name] = start + max(cost.latency, cost.slots)
            slots += cost.slots
            last_start = max(last_start, start + cost.slots)
        self._start = max(last_start, begin + slots)
        return self._start - begin

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
    if not block.instructions:
        return False
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
