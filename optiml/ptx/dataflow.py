"""How long one warp, alone, needs for the basic blocks of a function: critical paths through registers and memory.

PTX places a load next to its use and leaves it to ptxas to hoist it, so the order of the text says little. A region is
read as a dataflow graph instead: an instruction may start as soon as its operands are there, except where memory order
or a barrier forbids it. A region is a block, or several that only short forward branches separate, which ptxas turns
into predicates. Between regions, and between two executions of one, the order is that of the machine: a region starts
when every instruction of the one before it has started, while results may still be under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

from optiml.ptx.parse import Address, BasicBlock, Function, Instruction, Operand, Register, Symbol, Vector

_SPACES = ("global", "shared", "local", "const", "param")
_NEAR_SPACES = frozenset(_SPACES) - {"global"}
WORKING_REGISTERS = 12  # taken to hold everything but loads under way
LONGEST_PREDICATED = 8  # instructions of a branch that ptxas is taken to replace by predicates
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
    function: Function,
    executions: Mapping[int, int],
    timing: Callable[[Instruction, int], Timing],
    *,
    registers: int | None = None,
) -> dict[int, BlockCycles]:
    """Critical-path length of each executed basic block in cycles, by index of the block.

    A register is ready `latency` after the instruction that writes it starts. A load waits for the stores before it to
    the same space, unless it is `.nc`; a barrier waits for every memory access before it and holds up those behind it.
    So unrolling, which puts several loads into one execution, shortens a loop, and so does `.nc` (from
    `const __restrict__`) where stores stand between loads.

    Results of loads that are under way occupy registers: with R of them a thread has R - 12 left for that, one for each
    word and one for an address, and a load that finds none free waits for the oldest.

    Executed blocks are walked once in the order of the text, each charged with what it adds to the path. A block
    executed less than half as often as both its neighbours is a detour: it is charged, and the walk goes on as if it
    had been passed by. A block that branches to itself is walked three times; the last difference is its steady state.

    Args:
        executions: how often each block was executed, by any warp; blocks that are missing were not.
        timing: cost of an instruction, given also how many global loads of its region are under way together.
        registers: of a thread, from ptxas; None for no limit.
    """
    executed = [index for index in range(len(function.blocks)) if executions.get(index, 0) > 0]
    regions = _regions(function.blocks)
    loads: dict[int, int] = {}
    for index in executed:
        loads[regions[index]] = loads.get(regions[index], 0) + _global_loads(function.blocks[index])
    walk = _Walk(timing, None if registers is None else max(0, registers - WORKING_REGISTERS))
    cycles = {}
    region = -1
    for place, index in enumerate(executed):
        if regions[index] != region:
            region = regions[index]
            walk.enter_region(loads[region])
        neighbours = executed[max(0, place - 1) : place] + executed[place + 1 : place + 2]
        detour = len(neighbours) == 2 and all(2 * executions[index] < executions[near] for near in neighbours)
        cycles[index] = (walk.copy() if detour else walk).lengths(function.blocks[index])
    return cycles


def _regions(blocks: Sequence[BasicBlock]) -> list[int]:
    """For each block the number of its region. A new one starts at every loop head and behind every long branch."""
    place = {block.label: index for index, block in enumerate(blocks)}
    heads = {place[label] for index, block in enumerate(blocks) for label in _targets(block) if place[label] <= index}
    regions = [0]
    for index in range(1, len(blocks)):
        joined = index not in heads and _is_short_branch(blocks, index - 1, place)
        regions.append(regions[-1] + (0 if joined else 1))
    return regions


def _is_short_branch(blocks: Sequence[BasicBlock], index: int, place: Mapping[str, int]) -> bool:
    """Whether a block falls through, or branches forward over nothing but short straight code."""
    for label in _targets(blocks[index]):
        skipped = blocks[index + 1 : place[label]]
        if place[label] <= index or not all(_is_predicable(block) for block in skipped):
            return False
    return not blocks[index].instructions or blocks[index].instructions[-1].parts[0] not in ("ret", "exit", "brx")


def _is_predicable(block: BasicBlock) -> bool:
    return len(block.instructions) <= LONGEST_PREDICATED and not any(
        instruction.parts[0] in ("bar", "barrier", "call", "ret", "exit", "brx", "membar", "fence")
        for instruction in block.instructions
    )


def _targets(block: BasicBlock) -> list[str]:
    if not block.instructions or block.instructions[-1].parts[0] != "bra":
        return []
    return [operand.name for operand in block.instructions[-1].src if isinstance(operand, Symbol)]


def _global_loads(block: BasicBlock) -> int:
    return sum(_is_global_load(instruction) for instruction in block.instructions)


def _is_global_load(instruction: Instruction) -> bool:
    return instruction.parts[0] in ("ld", "ldu") and not _NEAR_SPACES & set(instruction.parts)


def _words(instruction: Instruction) -> int:
    """Registers that the result of a load takes."""
    count = next((int(part[1:]) for part in instruction.parts if part in ("v2", "v4", "v8")), 1)
    return count * (2 if instruction.parts[-1][1:] == "64" else 1)


class _Walk:
    """Moments at which registers and memory become ready while blocks are executed one after another."""

    def __init__(self, timing: Callable[[Instruction, int], Timing], free_registers: int | None) -> None:
        self._timing = timing
        self._free_registers = free_registers
        self._loads = 0  # global loads of the region that are under way together
        self._under_way: deque[tuple[float, int]] = deque()  # of loads: when the result is there, registers
        self._ready: dict[str, float] = {}
        self._begin = 0.0  # of the region
        self._slots = 0.0  # issued in the region
        self._exit = 0.0  # the next region may start
        self._stored: dict[str, float] = {}  # space -> start of the last store
        self._accessed = 0.0  # all memory accesses so far are done
        self._released = 0.0  # end of the last barrier

    def copy(self) -> _Walk:
        twin = copy(self)
        twin._ready, twin._stored, twin._under_way = dict(self._ready), dict(self._stored), deque(self._under_way)
        return twin

    def enter_region(self, loads: int) -> None:
        self._loads = loads
        if self._free_registers is not None:
            self._loads = max(1, min(loads, self._free_registers // 2))
        self._under_way.clear()
        self._begin, self._slots = self._exit, 0.0

    def lengths(self, block: BasicBlock) -> BlockCycles:
        """Execute a block, and twice more if it loops onto itself."""
        first = steady = self._execute(block)
        if block.label in _targets(block):
            for _ in range(SIMULATED_ITERATIONS - 1):
                self.enter_region(self._loads)
                steady = self._execute(block)
        return BlockCycles(first=first, steady=steady)

    def _execute(self, block: BasicBlock) -> float:
        """What the block adds to the moment at which the next region may start."""
        before = self._exit
        for instruction in block.instructions:
            cost = self._timing(instruction, self._loads)
            start = max([self._begin, *(self._ready.get(name, 0.0) for name in _reads(instruction))])
            start = self._in_memory_order(instruction, start, cost)
            if _is_global_load(instruction):
                start = self._when_registers_are_free(_words(instruction) + 1, start, cost.latency)
            for name in _writes(instruction):
                self._ready[name] = start + max(cost.latency, cost.slots)
            self._slots += cost.slots
            self._exit = max(self._exit, start + cost.slots, self._begin + self._slots)
        return self._exit - before

    def _when_registers_are_free(self, registers: int, start: float, latency: float) -> float:
        if self._free_registers is not None:
            while self._under_way and sum(taken for _, taken in self._under_way) + registers > self._free_registers:
                start = max(start, self._under_way.popleft()[0])
        self._under_way.append((start + latency, registers))
        return start

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
