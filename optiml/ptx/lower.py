"""Turns a kernel into segments of closures that the scheduler runs.

Device functions are inlined, so that a program is one list of segments. A segment is a stretch of instructions that
is entered only at the top; it starts at a basic block, at an instruction that speaks for a whole warp, and after a
barrier, and ends with at most one decision. Each instruction is bound once to a closure over frame slots.

Registers have a storage dtype each, chosen by counting how the kernel uses them, so that few instructions have to
reinterpret bits. Values that all threads share are arrays of one entry: parameters, loop counters and what is
computed from them cost nothing per thread.

A program does not depend on a machine: parameters, addresses of symbols and launch geometry are slots filled at
launch.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from optiml.errors import Unsupported
from optiml.ptx import opcodes
from optiml.ptx.accesses import Accesses
from optiml.ptx.closures import (
    Array,
    guarded,
    guarded_pure,
)
from optiml.ptx.collectives import Collectives
from optiml.ptx.inline import Block, Item, is_warp_wide, unsupported
from optiml.ptx.memory import Step
from optiml.ptx.moves import Moves
from optiml.ptx.numerics import BOOL, I32, U32
from optiml.ptx.opcodes import UnknownForm
from optiml.ptx.parse import (
    Function,
    Immediate,
    Module,
    Register,
    Symbol,
)
from optiml.ptx.program import BarrierCall, Program, Segment
from optiml.ptx.simt import BARRIER, BRANCH, EXIT, FALL, JUMP

_Key = tuple[str, bool, frozenset[int]]
_PROGRAMS: weakref.WeakKeyDictionary[Module, dict[_Key, Program]] = weakref.WeakKeyDictionary()


def program_of(module: Module, kernel: str, *, counting: bool, aligned: frozenset[int] = frozenset()) -> Program:
    """The program of a kernel, lowered on first use and kept as long as the module.

    Args:
        counting: count instructions and memory traffic.
        aligned: offsets of the 8-byte parameters whose value is a multiple of `ALIGNMENT`; accesses that are
            aligned because of that are not checked one by one.

    Raises:
        Unsupported: the kernel, or a function it calls, has an instruction that the engine does not execute.
    """
    known = _PROGRAMS.setdefault(module, {})
    key = (kernel, counting, aligned)
    program = known.get(key)
    if program is None:
        try:
            program = known[key] = Lowering(module, module.functions[kernel], counting, aligned).program
        except opcodes.MALFORMED as error:
            raise Unsupported(f"the operands of an instruction of {kernel}") from error
    return program


class Lowering(Moves, Accesses, Collectives):
    """Builds the program of one kernel."""

    def __init__(self, module: Module, kernel: Function, counting: bool, aligned: frozenset[int]) -> None:
        super().__init__(module, kernel, counting, aligned)
        self.build(self.inliner.blocks)

    def build(self, blocks: list[Block]) -> None:
        program = self.program
        places: dict[str, int] = {}
        jumps: list[tuple[Segment, str]] = []
        reads: list[set[int]] = []  # used before defined, per segment
        writes: list[set[int]] = []
        open_steps: list[Step] = []
        mix: list[tuple[int | None, str]] = []
        current: Segment

        def start() -> None:
            nonlocal current, open_steps, mix
            current = Segment(len(program.segments))
            program.segments.append(current)
            reads.append(set())
            writes.append(set())
            open_steps, mix = [], []

        def close() -> None:
            current.operations = tuple(open_steps)
            current.mix = tuple(mix)
            current.weight = len(mix)

        for block in blocks:
            start()
            places[block.label] = current.number
            current.origin = block.origin
            for item in block.items:
                self.item = item
                instruction = item.instruction
                parts = instruction.parts
                if is_warp_wide(parts) and (open_steps or mix or current.warp_wide):
                    close()
                    start()
                if is_warp_wide(parts):
                    current.warp_wide = True
                self.steps, self.uses, self.defines = [], set(), set()
                ends = self.control(item, current, jumps) if parts[0] in opcodes.CONTROL else False
                if not ends:
                    self.lower(item, current)
                predicate = instruction.predicate
                if predicate is not None and not ends:
                    self.guard(predicate)
                    self.uses |= self.defines
                reads[-1] |= self.uses - writes[-1]
                writes[-1] |= self.defines
                open_steps += self.steps
                if instruction.line is not None:
                    current.last_line = instruction.line
                if item.counted:
                    mix.append((instruction.line, opcodes.operation_class(parts)))
                if ends and (current.kind == BARRIER):
                    close()
                    start()
            close()
        start()
        current.kind, current.exits, current.mix = EXIT, True, ()
        close()
        end = current.number
        for segment, label in jumps:
            segment.target = places[label] if label else end
        for segment in program.segments:
            if segment.kind == EXIT and not segment.operations:
                segment.exits = True
            if segment.kind == JUMP and segment.target == segment.number + 1 and not segment.barrier:
                segment.kind = FALL
        self.liveness(reads, writes)
        program.registers = len(self.registers.dtypes)
        zeros: dict[np.dtype[Any], Array] = {}
        program.base = [np.zeros(1, I32)] * program.slots
        for name, slot in self.slots.items():
            dtype = self.registers.dtypes.get(name, U32)
            program.base[slot] = zeros.setdefault(dtype, np.zeros(1, dtype))
        for slot, value in program.constants:
            program.base[slot] = value

    def control(self, item: Item, segment: Segment, jumps: list[tuple[Segment, str]]) -> bool:
        """Make a branch, exit or barrier the end of its segment; False if it is none of them after all."""
        instruction = item.instruction
        parts = instruction.parts
        family = parts[0]
        if parts[:2] == ("bar", "warp"):
            return False
        if family in ("bar", "barrier"):
            self.barrier(item, segment)
            return True
        guard = instruction.predicate
        segment.counted_branch = item.counted
        if guard is not None:
            segment.predicate = self.register(guard[0])[0]
            segment.negated = guard[1]
            segment.kind = BRANCH
        else:
            segment.kind = JUMP if family == "bra" else EXIT
        if family == "bra":
            label = instruction.src[0]
            assert isinstance(label, Symbol)
            name = label.name if parts[-1] == "made_up" else item.context.prefix + label.name
            jumps.append((segment, name))
        elif guard is not None:
            jumps.append((segment, ""))
        return True

    def barrier(self, item: Item, segment: Segment) -> None:
        """bar.sync, bar.arrive, bar.red and their barrier spellings."""
        instruction = item.instruction
        parts = instruction.parts
        sources = list(instruction.src)
        operation, target, source, negated, dtype = "", -1, -1, False, BOOL
        if "red" in parts:
            operation = parts[parts.index("red") + 1]
            if operation in ("aligned",):
                operation = parts[parts.index("red") + 2]
            last = sources.pop()
            if not isinstance(last, Register):
                raise unsupported(item)
            source, negated = self.register(last.name)[0], last.negated
            wanted = U32 if operation == "popc" else BOOL
            target, _ = self.target(instruction.dst[0], wanted)
            dtype = self.registers.dtypes[item.context.prefix + instruction.dst[0].name]  # type: ignore[union-attr]
        elif "sync" not in parts and "arrive" not in parts:
            raise unsupported(item)
        number = None if sources[0] == Immediate(value=0) else self.plain_source(sources[0], U32)
        count = self.plain_source(sources[1], U32) if len(sources) > 1 else None
        segment.kind = BARRIER
        segment.barrier = BarrierCall(
            number=number,
            count=count,
            plain=number is None and count is None and "arrive" not in parts,
            arrive_only="arrive" in parts,
            aligned=parts[0] == "bar" or "aligned" in parts,
            source=source,
            reduces="red" in parts,
            negated=negated,
            operation=operation,
            target=target,
            dtype=dtype,
        )

    def liveness(self, reads: list[set[int]], writes: list[set[int]]) -> None:
        """Which slots each segment needs on entry, by the usual backward iteration over sets."""
        program = self.program
        segments = program.segments
        for segment in segments:
            if segment.kind == BRANCH and segment.predicate not in writes[segment.number]:
                reads[segment.number].add(segment.predicate)
        for segment in segments:
            segment.reads, segment.writes = frozenset(reads[segment.number]), frozenset(writes[segment.number])
        as_bits = [sum(1 << s for s in slots) for slots in reads]
        kill = [sum(1 << s for s in slots) for slots in writes]
        live = [0] * len(segments)
        changed = True
        while changed:
            changed = False
            for number in range(len(segments) - 1, -1, -1):
                out = 0
                for after in program.successors(number):
                    out |= live[after]
                entry = as_bits[number] | (out & ~kill[number])
                if entry != live[number]:
                    live[number] = entry
                    changed = True
        constant = {slot for slot, _ in program.constants}
        lists: dict[int, tuple[int, ...]] = {}
        for segment in segments:
            bits = live[segment.number]
            if bits not in lists:
                lists[bits] = tuple(s for s in range(program.slots) if bits >> s & 1 and s not in constant)
            segment.live = lists[bits]
        for segment in segments:
            if segment.number + 1 < len(segments):
                segment.live_after = segments[segment.number + 1].live

    def guard(self, predicate: tuple[str, bool]) -> None:
        """Make the current instruction run only for the threads whose predicate holds."""
        slot, _ = self.register(predicate[0])
        negated = predicate[1]
        steps = tuple(self.steps)
        defines = tuple(self.defines)
        parts = self.item.instruction.parts
        if opcodes.pure_row(parts) is not None or parts[0] in ("mov", "setp", "lop3", "cvta"):
            self.steps = [guarded_pure(slot, negated, steps, defines)]
        else:
            self.steps = [guarded(slot, negated, steps, tuple(self.uses), defines)]

    def lower(self, item: Item, segment: Segment) -> None:
        """Append the closures of one instruction to `self.steps`."""
        parts = item.instruction.parts
        if opcodes.pure_row(parts) is not None:
            self.pure(item)
            return
        method = "warp_barrier" if parts[0] in ("bar", "barrier") else opcodes.effect(parts)
        try:
            getattr(self, f"lower_{method}")(item, segment)
        except (UnknownForm, KeyError, IndexError, ValueError):
            raise unsupported(item) from None
