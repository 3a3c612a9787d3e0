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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from optiml.errors import Unsupported
from optiml.ptx import atomics, memory, opcodes, tensor, warp
from optiml.ptx import numerics as num
from optiml.ptx.counters import record_memory
from optiml.ptx.memory import CODE, LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, WIDE, WINDOW_BITS, Step
from optiml.ptx.numerics import BOOL, F16, F32, F64, I32, I64, U8, U16, U32, U64
from optiml.ptx.opcodes import DTYPES, TOKENS, Pure, UnknownForm
from optiml.ptx.parse import (
    TYPE_BYTES,
    Address,
    Function,
    Immediate,
    Instruction,
    Module,
    Operand,
    Raw,
    Register,
    Symbol,
    Vector,
    registers_in,
)
from optiml.ptx.printing import print_formatted
from optiml.ptx.simt import BARRIER, BRANCH, EXIT, FALL, JUMP, Group

Array = Any
Frame = list[Array]
Convert = Callable[[Array], Array] | None

BUILTINS = frozenset({"vprintf", "__assertfail"})
_UNSIGNED: dict[int, np.dtype[Any]] = {1: U8, 2: U16, 4: U32, 8: U64}
_DEFAULT: dict[int, np.dtype[Any]] = {1: U8, 2: U16, 4: I32, 8: U64}
_SPECIAL_64 = frozenset({"%clock64", "%globaltimer", "%gridid"})
# Specials whose value is the same for all threads of a launch; the batch fills the others in.
_LAUNCH_SPECIALS = frozenset(
    {f"%{name}.{axis}" for name in ("ntid", "nctaid", "nclusterid") for axis in "xyz"}
    | {f"%cluster_{name}.{axis}" for name in ("nctaid", "ctaid") for axis in "xyz"}
    | {"%nwarpid", "%smid", "%nsmid", "%gridid", "%dynamic_smem_size", "%total_smem_size", "%cluster_ctarank",
       "%cluster_nctarank", "%WARP_SZ"}
)  # fmt: skip
_THREAD_SPECIALS = frozenset(
    {f"%{name}.{axis}" for name in ("tid", "ctaid") for axis in "xyz"}
    | {"%laneid", "%warpid", "%lanemask_eq", "%lanemask_lt", "%lanemask_le", "%lanemask_gt", "%lanemask_ge"}
)
_CLOCKS = frozenset({"%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi"})


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


ALIGNMENT = 16  # bytes; what a program may assume of a pointer parameter, checked at launch
_ALIGNMENT_BITS = 4
_Key = tuple[str, bool, frozenset[int]]
_PROGRAMS: weakref.WeakKeyDictionary[Module, dict[_Key, Program]] = weakref.WeakKeyDictionary()


def program_of(
    module: Module, kernel: str, *, counting: bool, aligned: frozenset[int] = frozenset()
) -> Program:
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
        program = known[key] = Lowering(module, module.functions[kernel], counting, aligned).program
    return program


@dataclass(frozen=True, kw_only=True)
class _Context:
    """Where inlined code comes from: its function, a prefix that makes its names unique, its formal parameters."""

    function: Function
    prefix: str
    arguments: Mapping[str, str]  # formal parameter -> storage name of the caller
    depth: int


@dataclass(frozen=True, kw_only=True)
class _Item:
    instruction: Instruction
    context: _Context
    counted: bool = True  # False for branches that the lowering made up


@dataclass(kw_only=True)
class _Block:
    label: str
    origin: tuple[str, int] | None
    items: list[_Item] = field(default_factory=list)


def _is_warp_wide(parts: tuple[str, ...]) -> bool:
    return parts[0] in opcodes.WARP_FAMILIES or parts[:2] == ("bar", "warp")


def _is_barrier(parts: tuple[str, ...]) -> bool:
    return parts[0] in ("bar", "barrier") and parts[1] != "warp"


def _unsupported(item: _Item, what: str = "") -> Unsupported:
    return Unsupported(what or item.instruction.opcode, line=item.instruction.line)


class Lowering:
    """Builds the program of one kernel."""

    def __init__(self, module: Module, kernel: Function, counting: bool, aligned: frozenset[int]) -> None:
        self.module = module
        self.kernel = kernel
        self.counting = counting
        self.program = Program()
        self.slots: dict[str, int] = {}
        self.dtypes: dict[str, np.dtype[Any]] = {}
        self.literals: dict[tuple[int, str, int], int] = {}
        self.local_offsets: dict[str, int] = {}
        self.read_count: Counter[str] = Counter()
        self.write_count: Counter[str] = Counter()
        self.aligned = aligned
        self.zero_bits: dict[str, int] = {}  # low bits of a register that are always zero
        self.fixed: dict[str, int] = {}  # register with one value per launch -> slot of that value, 0-d
        self.flat: dict[int, int] = {}  # slot of a launch value -> slot of the same as a 0-d array
        self.steps: list[Step] = []
        self.uses: set[int] = set()
        self.defines: set[int] = set()
        self.item: _Item
        self.inlined = 0
        self.rows: dict[str, Pure] = {}
        self.pieces: dict[str, set[tuple[int, int]]] = {}  # call parameter storage -> (offset, size) in use
        blocks = self.expand(kernel, _Context(function=kernel, prefix="", arguments={}, depth=0))
        self.check(blocks)
        self.choose_dtypes(blocks)
        self.zero_bits = self.known_zero_bits(blocks)
        self.build(blocks)

    # -- inlining ---------------------------------------------------------------------------------------------

    def expand(self, function: Function, context: _Context, after: str = "") -> list[_Block]:
        """Blocks of `function` with calls replaced by the callee's blocks; a return goes to label `after`."""
        prefix = context.prefix
        for variable in function.variables:
            if variable.space == "local":
                size = -(-self.program.local_bytes // variable.align) * variable.align
                self.local_offsets[prefix + variable.name] = size
                self.program.local_bytes = size + variable.bytes
        blocks: list[_Block] = []
        fresh = 0
        for index, source in enumerate(function.blocks):
            label = prefix + source.label if source.label else f"{prefix}#{index}"
            current = _Block(label=label, origin=(function.name, index))
            blocks.append(current)
            for instruction in source.instructions:
                item = _Item(instruction=instruction, context=context)
                parts = instruction.parts
                family = parts[0]
                callee = self.callee(item) if family == "call" else None
                returns = family == "ret" and after != ""
                apart = callee is not None or _is_warp_wide(parts) or _is_barrier(parts)
                skip = ""
                if instruction.predicate is not None and (apart or returns):
                    # a guard around something that must not run for part of a group: branch around it
                    fresh += 1
                    skip = f"{prefix}#{index}.{fresh}"
                    name, negated = instruction.predicate
                    current.items.append(
                        self.made_up(item, "bra", skip, (name, not negated), counted=False)
                    )
                    item = replace(item, instruction=replace(instruction, predicate=None))
                    fresh += 1
                    current = _Block(label=f"{prefix}#{index}.{fresh}", origin=None)
                    blocks.append(current)
                if returns:
                    current.items.append(self.made_up(item, "bra", after, None, counted=True))
                elif callee is not None:
                    self.inlined += 1
                    back = f"{prefix}#back{self.inlined}"
                    current.items.append(item)
                    blocks += self.expand(callee, self.entered(item, callee), back)
                    current = _Block(label=back, origin=None)
                    blocks.append(current)
                else:
                    current.items.append(item)
                if skip:
                    current = _Block(label=skip, origin=None)
                    blocks.append(current)
        return blocks

    @staticmethod
    def made_up(item: _Item, opcode: str, label: str, predicate: tuple[str, bool] | None, *, counted: bool) -> _Item:
        """A branch in place of `item`; `label` is complete, so the context must not prefix it again."""
        instruction = replace(
            item.instruction,
            opcode=opcode,
            parts=(opcode, "made_up"),
            predicate=predicate,
            dst=(),
            src=(Symbol(name=label),),
        )
        return replace(item, instruction=instruction, counted=counted)

    def callee(self, item: _Item) -> Function | None:
        """The device function that a call enters, or None for one of the built-in functions."""
        target = item.instruction.src[0]
        if not isinstance(target, Symbol):
            raise _unsupported(item, "indirect call")
        if target.name in BUILTINS:
            return None
        function = self.module.functions.get(target.name)
        if function is None or not function.defined:
            raise _unsupported(item, f"call of {target.name}")
        if item.context.depth >= 32:
            raise _unsupported(item, f"recursive call of {target.name}")
        return function

    def entered(self, item: _Item, callee: Function) -> _Context:
        """The context of an inlined callee: its formal parameters are the caller's parameter variables."""
        actual = [o for o in item.instruction.src[1:] if isinstance(o, Symbol)]
        results = [o for o in item.instruction.dst if isinstance(o, Symbol)]
        if len(actual) != len(callee.params) or len(results) != len(callee.returns):
            raise _unsupported(item, f"call of {callee.name} with these arguments")
        arguments = {
            formal.name: self.storage(item.context, symbol.name)
            for formal, symbol in zip((*callee.params, *callee.returns), (*actual, *results), strict=True)
        }
        return _Context(
            function=callee,
            prefix=f"{item.context.prefix}{callee.name}#{self.inlined}:",
            arguments=arguments,
            depth=item.context.depth + 1,
        )

    @staticmethod
    def storage(context: _Context, name: str) -> str:
        """The storage that a call parameter or formal parameter stands for."""
        return context.arguments.get(name) or f"{context.prefix}{name}"

    # -- checks and storage types -----------------------------------------------------------------------------

    def check(self, blocks: list[_Block]) -> None:
        """Refuse instructions that no table knows, before anything runs."""
        for block in blocks:
            for item in block.items:
                parts = item.instruction.parts
                family = parts[0]
                if family in opcodes.PURE:
                    self.row(item)
                elif not self.known_effect(parts):
                    raise _unsupported(item)
                if any(isinstance(o, Raw) and o.text != "_" for o in (*item.instruction.dst, *item.instruction.src)):
                    raise _unsupported(item)

    @staticmethod
    def known_effect(parts: tuple[str, ...]) -> bool:
        """Whether a family outside the pure table is one that the lowering builds."""
        family = parts[0]
        if family == "brx" or parts[:2] == ("barrier", "cluster") or "shared::cluster" in parts:
            return False
        return family in opcodes.EFFECTS or family in opcodes.CONTROL

    def row(self, item: _Item) -> Pure:
        opcode = item.instruction.opcode
        row = self.rows.get(opcode)
        if row is None:
            parts = item.instruction.parts
            try:
                row = opcodes.PURE[parts[0]](parts)
            except (UnknownForm, KeyError, IndexError):
                raise _unsupported(item) from None
            self.rows[opcode] = row
        if len(item.instruction.dst) != 1:
            raise _unsupported(item)
        if len(item.instruction.src) != len(row.inputs):
            raise _unsupported(item)
        return row

    def choose_dtypes(self, blocks: list[_Block]) -> None:
        """Pick a storage dtype for every register by counting typed uses."""
        votes: dict[str, Counter[np.dtype[Any]]] = {}
        declared: dict[str, str] = {}
        for block in blocks:
            for item in block.items:
                self.item = item
                context, instruction = item.context, item.instruction
                if instruction.predicate is not None:
                    self.note(declared, context, instruction.predicate[0])
                    self.read_count[context.prefix + instruction.predicate[0]] += 1
                for operand in instruction.dst:
                    for name in registers_in(operand):
                        self.note(declared, context, name)
                        self.write_count[context.prefix + name] += 1
                    if isinstance(operand, Address):
                        self.read_count.update(context.prefix + n for n in registers_in(operand))
                for operand in instruction.src:
                    for name in registers_in(operand):
                        self.note(declared, context, name)
                        self.read_count[context.prefix + name] += 1
                for name, dtype, weight in self.typed_operands(item):
                    votes.setdefault(context.prefix + name, Counter())[dtype] += weight
        for name, type_name in declared.items():
            size = TYPE_BYTES[type_name]
            if type_name == "pred":
                dtype = BOOL
            elif type_name == "f32":
                dtype = F32
            elif type_name == "f64":
                dtype = F64
            else:
                cast = votes.get(name)
                fitting = [(w, d) for d, w in cast.items() if d.itemsize == size and d != BOOL] if cast else []
                best = max(fitting, key=lambda pair: pair[0], default=None)
                dtype = best[1] if best is not None else _DEFAULT[size]
            self.dtypes[name] = dtype

    def note(self, declared: dict[str, str], context: _Context, name: str) -> None:
        type_name = context.function.registers.get(name)
        if type_name is not None:
            if type_name == "b128":
                raise _unsupported(self.item, "128-bit registers")
            declared[context.prefix + name] = type_name
        elif name.startswith("%") and (
            name in _LAUNCH_SPECIALS or name in _THREAD_SPECIALS or name in _CLOCKS
        ):
            self.dtypes[context.prefix + name] = U64 if name in _SPECIAL_64 else U32
        else:
            raise _unsupported(self.item, f"register {name}")

    def typed_operands(self, item: _Item) -> Iterable[tuple[str, np.dtype[Any], int]]:
        """(register, dtype, weight) wherever an instruction demands a type; reading weighs more than writing."""
        instruction = item.instruction
        parts = instruction.parts
        family = parts[0]
        if family in opcodes.PURE:
            row = self.rows[instruction.opcode]
            for operand, token in zip(instruction.src, row.inputs, strict=True):
                if isinstance(operand, Register) and token[0] in "uif":
                    yield operand.name, DTYPES[token], 4
            target = instruction.dst[0]
            if isinstance(target, Register) and row.output[0] in "uif":
                yield target.name, DTYPES[row.output], 1
        elif family == "setp":
            try:
                (token, _), _, _ = opcodes.comparison(parts)
            except (UnknownForm, KeyError, IndexError):
                raise _unsupported(item) from None
            for operand in instruction.src[:2]:
                if isinstance(operand, Register) and token[0] in "uif":
                    yield operand.name, DTYPES[token], 4
        elif family in ("ld", "st", "atom", "red"):
            windowed = "shared" in parts or "local" in parts
            for operand in instruction.src:
                if isinstance(operand, Address) and isinstance(operand.base, Register):
                    yield operand.base.name, U64, 4
                    if windowed:
                        yield operand.base.name, U32, 4
            token = TOKENS.get(parts[-1], "")
            if token[:1] in ("f", "i"):
                values = instruction.dst if family == "ld" else instruction.src[1:]
                for operand in values:
                    for name in registers_in(operand):
                        yield name, DTYPES[token], 1

    def known_zero_bits(self, blocks: list[_Block]) -> dict[str, int]:
        """Low bits that are zero in every value a register takes, from all its definitions at once."""
        bits: dict[str, int] = {}
        definitions: list[tuple[str, _Item]] = []
        for block in blocks:
            for item in block.items:
                for operand in item.instruction.dst:
                    for name in registers_in(operand):
                        full = item.context.prefix + name
                        bits[full] = 64
                        definitions.append((full, item))
        changed = True
        while changed:
            changed = False
            for full, item in definitions:
                found = min(self.zero_bits_of_result(item, bits), 64)
                if found < bits[full]:
                    bits[full] = found
                    changed = True
        return bits

    def zero_bits_of_result(self, item: _Item, bits: Mapping[str, int]) -> int:
        instruction = item.instruction
        parts, family = instruction.parts, instruction.parts[0]
        if isinstance(instruction.dst[0], Vector) or len(instruction.dst) != 1:
            return 0
        if family == "ld":
            address = instruction.src[0]
            if parts[1] == "param" and isinstance(address, Address) and isinstance(address.base, Symbol):
                for param in self.kernel.params if item.context.depth == 0 else ():
                    if param.name == address.base.name and address.offset == 0 and param.offset in self.aligned:
                        return _ALIGNMENT_BITS
            return 0
        if family not in ("mov", "cvta", "cvt", "add", "sub", "mul", "mad", "shl", "and", "or", "xor", "selp", "neg"):
            return 0
        if parts[-1].startswith(("f", "bf")) or "sat" in parts or "hi" in parts:
            return 0
        if family == "cvt" and parts[-2].startswith(("f", "bf")):
            return 0
        known = [self.zero_bits_of(operand, item, bits) for operand in instruction.src]
        if family in ("add", "sub", "or", "xor"):
            return min(known)
        if family in ("mul", "mad"):
            return min(known[0] + known[1], *known[2:], 64)
        if family == "shl":
            amount = instruction.src[1]
            return known[0] + (amount.value & 0xFFFFFFFF if isinstance(amount, Immediate) else 0)
        if family == "and":
            return max(known)
        if family == "selp":
            return min(known[:2])
        return known[0]

    def zero_bits_of(self, operand: Operand, item: _Item, bits: Mapping[str, int]) -> int:
        if isinstance(operand, Register):
            return bits.get(item.context.prefix + operand.name, 0)
        if isinstance(operand, Immediate):
            return _trailing_zeros(operand.value)
        if isinstance(operand, Symbol):
            offset = self.local_offsets.get(item.context.prefix + operand.name)
            offset = self.kernel.shared_layout.get(operand.name) if offset is None else offset
            if offset is not None:
                return _trailing_zeros(offset + operand.offset)
            if operand.name in self.module.globals:
                return min(_trailing_zeros(operand.offset), 8)
        return 0

    # -- slots ------------------------------------------------------------------------------------------------

    def slot(self, name: str) -> int:
        """The frame slot of a full register name."""
        found = self.slots.get(name)
        if found is None:
            found = self.slots[name] = self.new_slot()
        return found

    def new_slot(self) -> int:
        self.program.slots += 1
        return self.program.slots - 1

    def literal(self, value: int, dtype: np.dtype[Any], dimensions: int = 0) -> int:
        """The slot of a constant given by its bits, a 0-d array or an array of one."""
        size = dtype.itemsize
        key = (value & ((1 << (8 * size)) - 1), dtype.str, dimensions)
        found = self.literals.get(key)
        if found is None:
            found = self.literals[key] = self.new_slot()
            content = np.frombuffer(key[0].to_bytes(size, "little"), dtype).copy()
            self.program.constants.append((found, content if dimensions else content.reshape(())))
        return found

    def register(self, name: str) -> tuple[int, np.dtype[Any]]:
        """Slot and storage dtype of a register that the current instruction reads."""
        if name.startswith("%") and name not in self.item.context.function.registers:
            return self.special(name)
        full = self.item.context.prefix + name
        found = self.slot(full)
        self.uses.add(found)
        return found, self.dtypes[full]

    def special(self, name: str) -> tuple[int, np.dtype[Any]]:
        dtype = U64 if name in _SPECIAL_64 else U32
        slot = self.slot(name)
        if name in _LAUNCH_SPECIALS:
            self.program.launch_values[name] = slot
        elif name in _CLOCKS:
            self.steps.append(_clock(slot, dtype, high=name.endswith("_hi")))
            self.defines.add(slot)
        elif name in _THREAD_SPECIALS:
            self.program.specials[name] = slot
            self.uses.add(slot)
        else:
            raise _unsupported(self.item, f"special register {name}")
        return slot, dtype

    @property
    def shared_slot(self) -> int:
        if self.program.shared_slot is None:
            self.program.shared_slot = self.new_slot()
        self.uses.add(self.program.shared_slot)
        return self.program.shared_slot

    @property
    def local_slot(self) -> int:
        if self.program.local_slot is None:
            self.program.local_slot = self.new_slot()
        self.uses.add(self.program.local_slot)
        return self.program.local_slot

    def source(self, operand: Operand, dtype: np.dtype[Any], *, dimensions: int = 1) -> tuple[int, Convert]:
        """Slot of an operand and what turns its value into `dtype` (None: nothing to do)."""
        if isinstance(operand, Register):
            full = self.item.context.prefix + operand.name
            if dimensions == 0 and full in self.fixed and self.dtypes[full] == dtype and not operand.negated:
                return self.fixed[full], None
            slot, stored = self.register(operand.name)
            convert = _reading(stored, dtype)
            if operand.negated:
                return slot, np.logical_not if convert is None else convert
            return slot, convert
        if isinstance(operand, Immediate):
            return self.literal(_bits_of(operand, dtype), dtype, dimensions), None
        if isinstance(operand, Symbol):
            slot, stored = self.symbol(operand)
            return slot, _reading(stored, dtype)
        raise _unsupported(self.item)

    def plain_source(self, operand: Operand, dtype: np.dtype[Any]) -> int:
        """Slot of an operand as `dtype`, through a temporary if it must be converted."""
        slot, convert = self.source(operand, dtype)
        return slot if convert is None else self.converted(slot, convert)

    def converted(self, slot: int, convert: Callable[[Array], Array]) -> int:
        temporary = self.new_slot()

        def run(frame: Frame, group: Group) -> None:
            frame[temporary] = convert(frame[slot])

        self.steps.append(run)
        return temporary

    def target(self, operand: Operand, dtype: np.dtype[Any]) -> tuple[int, Convert]:
        """Slot of a destination and what turns a result of `dtype` into its storage."""
        if not isinstance(operand, Register):
            raise _unsupported(self.item)
        full = self.item.context.prefix + operand.name
        slot = self.slot(full)
        self.defines.add(slot)
        return slot, _writing(dtype, self.dtypes[full])

    def stored_dtype(self, operand: Operand) -> np.dtype[Any] | None:
        """Storage dtype of a register operand."""
        if isinstance(operand, Register):
            return self.dtypes.get(self.item.context.prefix + operand.name)
        return None

    def symbol(self, symbol: Symbol) -> tuple[int, np.dtype[Any]]:
        """Slot of a symbol's address within its own space (shared, local) or of its generic address (global)."""
        context = self.item.context
        name = symbol.name
        local = self.local_offsets.get(context.prefix + name)
        if local is not None:
            return self.literal(local + symbol.offset, U64, 1), U64
        shared = self.kernel.shared_layout.get(name)
        if shared is not None:
            return self.literal(shared + symbol.offset, U64, 1), U64
        if name in self.module.globals:
            slot = self.new_slot()
            self.program.symbols.append((slot, name, symbol.offset))
            return slot, U64
        for param in self.kernel.params:
            if param.name == name and context.depth == 0:
                return self.literal(param.offset + symbol.offset, U64, 1), U64
        raise _unsupported(self.item, f"address of {name}")

    def address(self, operand: Operand) -> tuple[int, int]:
        """Slot of the base of a memory operand, as unsigned, and the constant to add."""
        if not isinstance(operand, Address):
            raise _unsupported(self.item)
        base = operand.base
        if base is None:
            return self.literal(operand.offset, U64, 1), 0
        if isinstance(base, Symbol):
            return self.symbol(base)[0], operand.offset
        slot, stored = self.register(base.name)
        unsigned = _UNSIGNED[stored.itemsize]
        if stored != unsigned:
            slot = self.converted(slot, _viewing(unsigned))
        return slot, operand.offset

    # -- segments ---------------------------------------------------------------------------------------------

    def build(self, blocks: list[_Block]) -> None:
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
                if _is_warp_wide(parts) and (open_steps or mix or current.warp_wide):
                    close()
                    start()
                if _is_warp_wide(parts):
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
        program.registers = len(self.dtypes)
        zeros: dict[np.dtype[Any], Array] = {}
        program.base = [np.zeros(1, I32)] * program.slots
        for name, slot in self.slots.items():
            dtype = self.dtypes.get(name, U32)
            program.base[slot] = zeros.setdefault(dtype, np.zeros(1, dtype))
        for slot, value in program.constants:
            program.base[slot] = value

    def control(self, item: _Item, segment: Segment, jumps: list[tuple[Segment, str]]) -> bool:
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

    def barrier(self, item: _Item, segment: Segment) -> None:
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
                raise _unsupported(item)
            source, negated = self.register(last.name)[0], last.negated
            wanted = U32 if operation == "popc" else BOOL
            target, _ = self.target(instruction.dst[0], wanted)
            dtype = self.dtypes[item.context.prefix + instruction.dst[0].name]  # type: ignore[union-attr]
        elif "sync" not in parts and "arrive" not in parts:
            raise _unsupported(item)
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
        if parts[0] in opcodes.PURE or parts[0] in ("mov", "setp", "lop3", "cvta"):
            self.steps = [_guarded_pure(slot, negated, steps, defines)]
        else:
            self.steps = [_guarded(slot, negated, steps, tuple(self.uses), defines)]

    # -- instructions -----------------------------------------------------------------------------------------

    def lower(self, item: _Item, segment: Segment) -> None:
        """Append the closures of one instruction to `self.steps`."""
        family = item.instruction.parts[0]
        if family in opcodes.PURE:
            self.pure(item)
            return
        method = "warp_barrier" if family in ("bar", "barrier") else opcodes.EFFECTS[family]
        try:
            getattr(self, f"lower_{method}")(item, segment)
        except (UnknownForm, KeyError, IndexError, ValueError):
            raise _unsupported(item) from None

    def pure(self, item: _Item) -> None:
        instruction = item.instruction
        row = self.rows[instruction.opcode]
        sources = list(instruction.src)
        if instruction.parts[0] in ("shl", "shr") and isinstance(sources[1], Immediate):
            row = opcodes.shift_by_constant(instruction.parts)
            sources[1] = Immediate(value=min(sources[1].value & 0xFFFFFFFF, 127))
        self.bind(row.apply, instruction.dst[0], row.output, list(zip(sources, row.inputs, strict=True)))

    def bind(
        self, apply: Callable[..., Array], target: Operand, output: str, sources: list[tuple[Operand, str]]
    ) -> None:
        """target = apply(sources), with tokens resolved to dtypes and conversions where storage differs."""
        chosen = self.working_dtypes(target, output, sources)
        slots: list[tuple[int, Convert]] = []
        alike = all(self.is_fixed(operand) for operand, _ in sources)
        for position, (operand, token) in enumerate(sources):
            # 0-d values are fastest next to an array, but a result must never be a numpy scalar
            dimensions = 1 if alike and position == 0 else 0
            slots.append(self.source(operand, chosen.get(token) or DTYPES[token], dimensions=dimensions))
        slot, convert = self.target(target, chosen.get(output) or DTYPES[output])
        self.steps.append(_bound(apply, slot, convert, slots))

    def is_fixed(self, operand: Operand) -> bool:
        """Whether an operand has one value per launch that is also at hand as a 0-d array."""
        if isinstance(operand, Register):
            return self.item.context.prefix + operand.name in self.fixed
        return isinstance(operand, Immediate)

    def fix(self, target: Operand, slot: int) -> None:
        """Note that `target` is written only here, with the launch value in `slot`."""
        if not isinstance(target, Register) or self.item.instruction.predicate is not None:
            return
        full = self.item.context.prefix + target.name
        if self.write_count[full] == 1:
            flat = self.flat.get(slot)
            if flat is None:
                flat = self.flat[slot] = self.new_slot()
                self.program.flat.append((flat, slot))
            self.fixed[full] = flat

    def working_dtypes(
        self, target: Operand, output: str, sources: list[tuple[Operand, str]]
    ) -> dict[str, np.dtype[Any]]:
        """The dtype in which an operation on x and w tokens is done: the target's own if that is possible."""
        chosen: dict[str, np.dtype[Any]] = {}
        for operand, token in [(target, output), *sources]:
            if token[0] not in "xw":
                continue
            stored = self.stored_dtype(operand)
            if token in chosen or stored is None or stored.itemsize != int(token[1:]):
                continue
            if token[0] == "w" or stored.kind in "ui":
                chosen[token] = stored
        for _, token in [(target, output), *sources]:
            if token[0] in "xw" and token not in chosen:
                chosen[token] = _UNSIGNED[int(token[1:])]
        return chosen

    def assign(self, target: Operand, slot: int, dtype: np.dtype[Any]) -> None:
        """target = the value in `slot`, which has `dtype`."""
        to, convert = self.target(target, dtype)
        self.steps.append(_bound(None, to, convert, [(slot, None)]))

    def lower_mov(self, item: _Item, segment: Segment) -> None:
        instruction = item.instruction
        target, source = instruction.dst[0], instruction.src[0]
        kind = instruction.parts[-1]
        if isinstance(target, Vector):
            self.unpack(source, kind, target)
        elif isinstance(source, Vector):
            self.pack(source, kind, target)
        elif kind == "pred":
            slot, convert = self.source(source, BOOL)
            to, _ = self.target(target, BOOL)
            self.steps.append(_bound(None, to, convert, [(slot, None)]))
        else:
            dtype = self.stored_dtype(target)
            size = int(TOKENS[kind][1:])
            if dtype is None or dtype.itemsize != size:
                dtype = _UNSIGNED[size]
            slot, convert = self.source(source, dtype)
            to, after = self.target(target, dtype)
            self.steps.append(_bound(convert, to, after, [(slot, None)]))
            self.pass_on(source, target)

    def pass_on(self, source: Operand, target: Operand) -> None:
        """A copy of a launch value is a launch value too."""
        if not isinstance(source, Register) or self.stored_dtype(source) != self.stored_dtype(target):
            return
        flat = self.fixed.get(self.item.context.prefix + source.name)
        if flat is not None:
            original = next(slot for slot, same in self.flat.items() if same == flat)
            self.fix(target, original)

    def unpack(self, source: Operand, kind: str, target: Vector) -> None:
        """mov.b64 {a, b}, c: the parts of a register, lowest first."""
        size = int(TOKENS[kind][1:])
        piece = size // len(target.elements)
        whole, part = _UNSIGNED[size], _UNSIGNED[piece]
        slot = self.plain_source(source, whole)
        for index, element in enumerate(target.elements):
            if element is None:
                continue
            shift = np.array(8 * piece * index, whole)
            to, convert = self.target(element, part)
            self.steps.append(_bound(_field(shift, part), to, convert, [(slot, None)]))

    def pack(self, source: Vector, kind: str, target: Operand) -> None:
        """mov.b64 c, {a, b}."""
        size = int(TOKENS[kind][1:])
        piece = size // len(source.elements)
        whole, part = _UNSIGNED[size], _UNSIGNED[piece]
        slots = [self.plain_source(element, part) for element in source.elements if element is not None]
        if len(slots) != len(source.elements):
            raise UnknownForm
        to, convert = self.target(target, whole)
        shifts = [np.array(8 * piece * index, whole) for index in range(len(slots))]

        def run(frame: Frame, group: Group) -> None:
            value = frame[slots[0]].astype(whole)
            for slot, shift in zip(slots[1:], shifts[1:], strict=True):
                value = value | (frame[slot].astype(whole) << shift)
            frame[to] = value if convert is None else convert(value)

        self.steps.append(run)

    def lower_setp(self, item: _Item, segment: Segment) -> None:
        instruction = item.instruction
        (token, _), compare, combine = opcodes.comparison(instruction.parts)
        sources = [(operand, token) for operand in instruction.src[:2]]
        if instruction.parts[-1] in ("f16x2", "bf16x2"):
            self.setp_packed(item, compare, combine)
            return
        if combine:
            compare_first = opcodes.combined(compare, combine)
            sources.append((instruction.src[2], "p"))
        elif len(instruction.src) != 2:
            raise UnknownForm
        else:
            compare_first = compare
        if not isinstance(instruction.dst[0], Raw):
            self.bind(compare_first, instruction.dst[0], "p", sources)
        if len(instruction.dst) > 1:
            def opposite(a: Array, b: Array) -> Array:
                return np.logical_not(compare(a, b))

            second = opcodes.combined(opposite, combine) if combine else opposite
            self.bind(second, instruction.dst[1], "p", sources)

    def setp_packed(self, item: _Item, compare: Callable[..., Array], combine: str) -> None:
        """setp on two halves: one predicate each."""
        instruction = item.instruction
        if combine or len(instruction.dst) != 2:
            raise UnknownForm
        element = F16 if instruction.parts[-1] == "f16x2" else U16
        a = self.plain_source(instruction.src[0], U32)
        b = self.plain_source(instruction.src[1], U32)
        low, high = (self.target(target, BOOL)[0] for target in instruction.dst)

        def run(frame: Frame, group: Group) -> None:
            x = np.ascontiguousarray(frame[a]).reshape(-1, 1).view(element)
            y = np.ascontiguousarray(frame[b]).reshape(-1, 1).view(element)
            result = np.ascontiguousarray(compare(x, y).T)
            frame[low], frame[high] = result[0], result[1]

        self.steps.append(run)

    def lower_lop3(self, item: _Item, segment: Segment) -> None:
        instruction = item.instruction
        table = instruction.src[3]
        if len(instruction.parts) != 2 or not isinstance(table, Immediate):
            raise UnknownForm
        function = num.lookup3(table.value & 0xFF)
        self.bind(function, instruction.dst[0], "u4", [(operand, "u4") for operand in instruction.src[:3]])

    def lower_carry(self, item: _Item, segment: Segment) -> None:
        raise UnknownForm

    def lower_cvta(self, item: _Item, segment: Segment) -> None:
        """Generic addresses put the window's number above bit 36; global, const and generic are the same."""
        instruction = item.instruction
        parts = instruction.parts
        space = parts[2] if parts[1] == "to" else parts[1]
        windows = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW, "global": 0, "const": 0}
        if parts[-1] not in ("u64", "s64"):
            raise UnknownForm
        base = windows[space.split("::")[0]] << WINDOW_BITS
        source = instruction.src[0]
        if base == 0:
            slot, convert = self.source(source, self.stored_dtype(instruction.dst[0]) or U64)
            to, after = self.target(instruction.dst[0], self.stored_dtype(instruction.dst[0]) or U64)
            self.steps.append(_bound(convert, to, after, [(slot, None)]))
            self.pass_on(source, instruction.dst[0])
            return
        constant = np.array(base, U64)
        if parts[1] == "to":
            self.bind(lambda x: x - constant, instruction.dst[0], "u8", [(source, "u8")])
        else:
            self.bind(lambda x: x + constant, instruction.dst[0], "u8", [(source, "u8")])

    def lower_isspacep(self, item: _Item, segment: Segment) -> None:
        space = item.instruction.parts[1].split("::")[0]
        window = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW, "global": 0, "const": 0}[space]
        shift = np.uint64(WINDOW_BITS)

        def inside(x: Array) -> Array:
            found = x >> shift
            if space == "const":
                return np.zeros(len(x), bool)
            return found == np.uint64(window) if window else found >= np.uint64(memory.FIRST_ALLOCATION)

        self.bind(inside, item.instruction.dst[0], "p", [(item.instruction.src[0], "u8")])

    # -- memory -----------------------------------------------------------------------------------------------

    def space_of(self, parts: tuple[str, ...]) -> str:
        for part in parts[1:]:
            base = part.split("::")[0]
            if base in ("global", "shared", "local", "const", "param") and part != "shared::cluster":
                return base
        return "generic"

    _LOAD_WORDS = frozenset(
        {
            "weak", "volatile", "relaxed", "acquire", "release", "cta", "gpu", "sys", "cluster", "global", "shared",
            "shared::cta", "local", "const", "param", "nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "v2", "v4",
            "L1::no_allocate", "L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last",
            "L2::64B", "L2::128B", "L2::256B", "L2::cache_hint", "param::entry", "param::func", "mmio",
        }
    )  # fmt: skip

    def memory_words(self, item: _Item) -> tuple[str, int, str]:
        """(space, vector length, element type) of ld or st, all modifiers known."""
        parts = item.instruction.parts
        if set(parts[1:-1]) - self._LOAD_WORDS:
            raise UnknownForm
        lanes = 4 if "v4" in parts else 2 if "v2" in parts else 1
        return self.space_of(parts), lanes, parts[-1]

    def waits_on(self, parts: tuple[str, ...]) -> None:
        """Note a read that may poll what other threads write."""
        if {"volatile", "relaxed", "acquire"} & set(parts):
            self.program.waits = True
            self.steps.append(_note_poll)

    def record(self, kind: str, space: str, address: int, offset: int, nbytes: int) -> None:
        """In a counting program, count the access before it is made."""
        if self.counting:
            parts = self.item.instruction.parts
            cached = kind == "load" and not {"cg", "cv", "volatile", "relaxed", "acquire"} & set(parts)
            self.steps.append(record_memory(kind, space, address, offset, nbytes, self.item.instruction.line, cached))

    def lower_load(self, item: _Item, segment: Segment) -> None:
        instruction = item.instruction
        space, lanes, kind = self.memory_words(item)
        token = TOKENS[kind]
        if token[0] == "p":
            raise UnknownForm
        piece = int(token[1:])
        first = instruction.dst[0]
        targets: list[Operand | None] = list(first.elements) if isinstance(first, Vector) else [first]
        if len(targets) != lanes:
            raise UnknownForm
        address = instruction.src[0]
        if space == "param" and isinstance(address, Address) and isinstance(address.base, Symbol):
            self.load_parameter(address, targets, token)
            return
        self.waits_on(instruction.parts)
        base, offset = self.address(address)
        nbytes = piece * lanes
        self.record("load", space, base, offset, nbytes)
        if lanes == 1:
            stored = self.stored_dtype(targets[0]) if targets[0] is not None else None
            dtype = DTYPES[token.replace("w", "u")]
            if stored is not None and stored.itemsize == piece:
                dtype = stored
            if targets[0] is None:
                raise UnknownForm
            to, convert = self.target(targets[0], dtype)
            into = to if convert is None else self.new_slot()
            self.steps.append(self.loader(into, base, offset, CODE[dtype], space, self.is_aligned(address, piece)))
            if convert is not None:
                self.steps.append(_bound(None, to, convert, [(into, None)]))
            return
        whole = self.new_slot()
        aligned = self.is_aligned(address, nbytes)
        self.steps.append(self.loader(whole, base, offset, _whole_code(nbytes), space, aligned))
        element = DTYPES[token.replace("w", "u")]
        self.split(whole, element, targets)

    def split(self, whole: int, element: np.dtype[Any], targets: Sequence[Operand | None]) -> None:
        """Take a vector value apart into its target registers."""
        outs: list[tuple[int, int, np.dtype[Any], Convert]] = []
        for index, target in enumerate(targets):
            if target is None:
                continue
            stored = self.stored_dtype(target)
            dtype = stored if stored is not None and stored.itemsize == element.itemsize else element
            to, convert = self.target(target, dtype)
            outs.append((index, to, dtype, convert))
        count = len(targets)

        def run(frame: Frame, group: Group) -> None:
            rows = np.ascontiguousarray(frame[whole].view(element).reshape(-1, count).T)
            for index, to, dtype, convert in outs:
                value = rows[index].view(dtype)
                frame[to] = value if convert is None else convert(value)

        self.steps.append(run)

    def is_aligned(self, address: Operand, nbytes: int) -> bool:
        """Whether every address an operand can have is known to be a multiple of the access size."""
        if not isinstance(address, Address) or address.offset % nbytes:
            return False
        if address.base is None:
            return True
        return 1 << self.zero_bits_of(address.base, self.item, self.zero_bits) >= nbytes

    def loader(self, to: int, base: int, offset: int, code: int, space: str, aligned: bool) -> Step:
        line = self.item.instruction.line
        if space in ("global", "const"):
            return memory.load_global(to, base, offset, code, space, line, aligned)
        if space == "shared":
            return memory.load_window(to, base, offset, code, self.shared_slot, space, line, aligned)
        if space == "local":
            return memory.load_window(to, base, offset, code, self.local_slot, space, line, aligned)
        return memory.load_any(to, base, offset, code, space, line)

    def load_parameter(self, address: Address, targets: list[Operand | None], token: str) -> None:
        """ld.param of a kernel parameter (a launch constant) or of a call's parameter (a register)."""
        assert isinstance(address.base, Symbol)
        context = self.item.context
        name, start = address.base.name, address.base.offset + address.offset
        piece = int(token[1:])
        param = next((p for p in self.kernel.params if p.name == name), None) if context.depth == 0 else None
        for index, target in enumerate(targets):
            at = start + index * piece
            if target is None:
                continue
            dtype = DTYPES[token.replace("w", "u")]
            stored = self.stored_dtype(target)
            if stored is not None and stored.itemsize == piece:
                dtype = stored
            if param is not None:
                if at < 0 or at + piece > param.bytes:
                    raise UnknownForm
                slot = self.parameter(param.offset + at, dtype)
                if self.stored_dtype(target) == dtype:
                    self.fix(target, slot)
            else:
                slot = self.call_piece(self.storage(context, name), at, piece)
                self.uses.add(slot)
                to, convert = self.target(target, dtype)
                before = _reading(_UNSIGNED[piece], dtype)
                self.steps.append(_bound(before, to, convert, [(slot, None)]))
                continue
            self.assign(target, slot, dtype)

    def parameter(self, offset: int, dtype: np.dtype[Any]) -> int:
        for slot, at, kind in self.program.parameters:
            if at == offset and kind == dtype:
                return slot
        slot = self.new_slot()
        self.program.parameters.append((slot, offset, dtype))
        return slot

    def call_piece(self, storage: str, offset: int, size: int) -> int:
        """The slot that holds part of a call's parameter, kept as unsigned; pieces must not overlap."""
        pieces = self.pieces.setdefault(storage, set())
        for other, length in pieces:
            if (other, length) != (offset, size) and other < offset + size and offset < other + length:
                raise UnknownForm
        pieces.add((offset, size))
        return self.slot(f"{storage}+{offset}")

    def lower_store(self, item: _Item, segment: Segment) -> None:
        instruction = item.instruction
        space, lanes, kind = self.memory_words(item)
        token = TOKENS[kind]
        if token[0] == "p":
            raise UnknownForm
        piece = int(token[1:])
        source = instruction.src[1]
        sources = list(source.elements) if isinstance(source, Vector) else [source]
        if len(sources) != lanes:
            raise UnknownForm
        address = instruction.src[0]
        if space == "param":
            self.store_parameter(address, sources, piece)
            return
        base, offset = self.address(address)
        self.record("store", space, base, offset, piece * lanes)
        if lanes == 1:
            operand = sources[0]
            stored = self.stored_dtype(operand) if operand is not None else None
            dtype = stored if stored is not None and stored.itemsize == piece else _UNSIGNED[piece]
            slot, convert = self.source(operand, dtype)  # type: ignore[arg-type]
            aligned = self.is_aligned(address, piece)
            self.steps.append(self.storer(base, offset, slot, convert, CODE[dtype], space, aligned))
            return
        element = _UNSIGNED[piece]
        whole = self.new_slot()
        slots = [self.source(operand, element) for operand in sources]  # type: ignore[arg-type]
        code = _whole_code(piece * lanes)
        dtype = memory.VIEW_DTYPES[code]

        def run(frame: Frame, group: Group) -> None:
            values = [frame[s] if convert is None else convert(frame[s]) for s, convert in slots]
            rows = np.empty((max(len(v) for v in values), lanes), element)
            for index, value in enumerate(values):
                rows[:, index] = value
            frame[whole] = rows.view(dtype).reshape(-1)

        self.steps.append(run)
        aligned = self.is_aligned(address, piece * lanes)
        self.steps.append(self.storer(base, offset, whole, None, code, space, aligned))

    def storer(
        self, base: int, offset: int, slot: int, convert: Convert, code: int, space: str, aligned: bool
    ) -> Step:
        line = self.item.instruction.line
        if space == "global":
            return memory.store_global(base, offset, slot, convert, code, line, aligned)
        if space == "shared":
            return memory.store_window(base, offset, slot, convert, code, self.shared_slot, space, line, aligned)
        if space == "local":
            return memory.store_window(base, offset, slot, convert, code, self.local_slot, space, line, aligned)
        if space != "generic":
            raise UnknownForm
        return memory.store_any(base, offset, slot, convert, code, space, line)

    def store_parameter(self, address: Operand, sources: Sequence[Operand | None], piece: int) -> None:
        if not isinstance(address, Address) or not isinstance(address.base, Symbol):
            raise UnknownForm
        start = address.base.offset + address.offset
        storage = self.storage(self.item.context, address.base.name)
        for index, operand in enumerate(sources):
            if operand is None:
                raise UnknownForm
            slot, convert = self.source(operand, _UNSIGNED[piece])
            to = self.call_piece(storage, start + index * piece, piece)
            self.defines.add(to)
            self.steps.append(_bound(convert, to, None, [(slot, None)]))

    _ATOMIC_WORDS = frozenset(
        {
            "relaxed", "acquire", "release", "acq_rel", "cta", "gpu", "sys", "cluster", "global", "shared",
            "shared::cta", "noftz", "add", "min", "max", "and", "or", "xor", "inc", "dec", "exch", "cas",
            "L2::cache_hint",
        }
    )  # fmt: skip

    def lower_atomic(self, item: _Item, segment: Segment) -> None:
        instruction = item.instruction
        parts = instruction.parts
        if set(parts[1:-1]) - self._ATOMIC_WORDS:
            raise UnknownForm
        operations = [p for p in parts[1:-1] if p in atomics.OPERATIONS]
        found = atomics.combination(operations[0], parts[-1]) if len(operations) == 1 else None
        if found is None:
            raise UnknownForm
        dtype, combine = found
        space = self.space_of(parts)
        base, offset = self.address(instruction.src[0])
        self.record("atomic", space, base, offset, dtype.itemsize)
        self.program.waits = True
        sources = [self.source(operand, dtype) for operand in instruction.src[1 : 3 if combine is None else 2]]
        if len(sources) != (2 if combine is None else 1):
            raise UnknownForm
        into: int | None = None
        to, convert = -1, None
        if instruction.dst:
            name = next(registers_in(instruction.dst[0]), "")
            to, convert = self.target(instruction.dst[0], dtype)
            if self.read_count[item.context.prefix + name]:
                into = to if convert is None else self.new_slot()
        start = self.shared_slot if space == "shared" else None
        self.steps.append(
            atomics.atomic(into, base, offset, sources, dtype, combine, space, start, instruction.line)
        )
        if into is not None and convert is not None:
            self.steps.append(_bound(None, to, convert, [(into, None)]))

    def lower_copy_async(self, item: _Item, segment: Segment) -> None:
        """cp.async copies at once; commit and wait have nothing left to do."""
        instruction = item.instruction
        parts = instruction.parts
        if parts[:2] != ("cp", "async") or (len(parts) > 2 and parts[2] in ("bulk", "mbarrier")):
            raise UnknownForm
        if parts[2] in ("commit_group", "wait_group", "wait_all"):
            return
        size = instruction.src[2]
        if not isinstance(size, Immediate) or size.value not in (4, 8, 16):
            raise UnknownForm
        to, to_offset = self.address(instruction.src[0])
        base, offset = self.address(instruction.src[1])
        shared = self.shared_slot
        line = instruction.line
        code = _whole_code(size.value)
        value = self.new_slot()
        if len(instruction.src) > 3:
            self.copy_some(item, (to, to_offset), (base, offset), size.value)
            return
        self.record("load", "global", base, offset, size.value)
        self.record("store", "shared", to, to_offset, size.value)
        self.steps.append(memory.load_global(value, base, offset, code, "global", line, False))
        self.steps.append(memory.store_window(to, to_offset, value, None, code, shared, "shared", line, False))

    def copy_some(self, item: _Item, to: tuple[int, int], base: tuple[int, int], size: int) -> None:
        """cp.async with a source size or an ignore-source predicate: bytes not read are zero."""
        operand = item.instruction.src[3]
        stored = self.stored_dtype(operand)
        line = item.instruction.line
        if stored == BOOL:
            flag, convert = self.source(operand, BOOL)
            count = self.converted(flag, lambda p: np.where(p if convert is None else convert(p), 0, size))
        else:
            count = self.converted(self.plain_source(operand, U32), lambda n: np.minimum(n, size).astype(I64))
        shared = self.shared_slot
        value = self.new_slot()
        self.record("store", "shared", to[0], to[1], size)

        def run(frame: Frame, group: Group) -> None:
            counts = memory.full(group, frame[count])
            addresses = memory.full(group, memory.offset_address(frame[base[0]], base[1]))
            octets = np.zeros((group.n, size), np.uint8)
            for index in range(size):
                wanted = np.flatnonzero(counts > index)
                if len(wanted):
                    part = Group(group.batch, group.lanes[wanted], [], 0)
                    octets[wanted, index] = memory.gather(
                        part, addresses[wanted] + np.uint64(index), CODE[U8], "global", line
                    )
            frame[value] = octets.view(memory.VIEW_DTYPES[_whole_code(size)]).reshape(-1)

        self.steps.append(run)
        self.steps.append(
            memory.store_window(to[0], to[1], value, None, _whole_code(size), shared, "shared", line, False)
        )

    def lower_nothing(self, item: _Item, segment: Segment) -> None:
        """Fences and hints: threads run in an order that is sequentially consistent anyway."""

    def lower_pause(self, item: _Item, segment: Segment) -> None:
        self.steps.append(_note_poll)

    def lower_policy(self, item: _Item, segment: Segment) -> None:
        target = item.instruction.dst[0]
        self.assign(target, self.literal(0, U64, 1), U64)

    def lower_trap(self, item: _Item, segment: Segment) -> None:
        line = item.instruction.line

        def run(frame: Frame, group: Group) -> None:
            memory.raise_fault(group, 0, "trap", "trap: the kernel stopped itself", line=line)

        self.steps.append(run)

    # -- warps ------------------------------------------------------------------------------------------------

    def member_mask(self, operand: Operand, segment: Segment) -> int:
        """Slot of a member mask, which the scheduler also needs unless it is the whole warp."""
        slot, convert = self.source(operand, U32)
        if isinstance(operand, Immediate) and operand.value & 0xFFFFFFFF == 0xFFFFFFFF:
            return slot
        segment.mask = slot
        if convert is not None:
            return self.converted(slot, convert)
        return slot

    def lower_warp_barrier(self, item: _Item, segment: Segment) -> None:
        self.member_mask(item.instruction.src[0], segment)

    def lower_shuffle(self, item: _Item, segment: Segment) -> None:
        instruction = item.instruction
        parts = instruction.parts
        if parts[1] != "sync" or parts[2] not in ("up", "down", "bfly", "idx") or parts[-1] != "b32":
            raise UnknownForm
        self.member_mask(instruction.src[3], segment)
        b = self.plain_source(instruction.src[1], U32)
        c = self.plain_source(instruction.src[2], U32)
        first = instruction.dst[0]
        flag = self.target(instruction.dst[1], BOOL)[0] if len(instruction.dst) > 1 else None
        dtype = self.stored_dtype(first) or U32
        value = self.plain_source(instruction.src[0], dtype)
        to = None if isinstance(first, Raw) else self.target(first, dtype)[0]
        self.steps.append(warp.shuffle(parts[2], to, flag, value, b, c))

    def lower_vote(self, item: _Item, segment: Segment) -> None:
        instruction = item.instruction
        parts = instruction.parts
        if parts[1] != "sync" or parts[2] not in ("ballot", "all", "any", "uni"):
            raise UnknownForm
        mask = self.member_mask(instruction.src[1], segment)
        source = instruction.src[0]
        negated = isinstance(source, Register) and source.negated
        if isinstance(source, Register):
            slot = self.register(source.name)[0]
        else:
            slot = self.literal(1 if isinstance(source, Immediate) and source.value else 0, BOOL, 1)
        dtype = U32 if parts[2] == "ballot" else BOOL
        to, convert = self.target(instruction.dst[0], dtype)
        into = to if convert is None else self.new_slot()
        self.steps.append(warp.vote(parts[2], into, slot, negated, mask))
        if convert is not None:
            self.steps.append(_bound(None, to, convert, [(into, None)]))

    def lower_match(self, item: _Item, segment: Segment) -> None:
        instruction = item.instruction
        parts = instruction.parts
        mask = self.member_mask(instruction.src[1], segment)
        value = self.plain_source(instruction.src[0], _UNSIGNED[int(TOKENS[parts[-1]][1:])])
        flag = self.target(instruction.dst[1], BOOL)[0] if len(instruction.dst) > 1 else None
        to, convert = self.target(instruction.dst[0], U32)
        into = to if convert is None else self.new_slot()
        if parts[1] not in ("any", "all"):
            raise UnknownForm
        self.steps.append(warp.match(parts[1], into, flag, value, mask))
        if convert is not None:
            self.steps.append(_bound(None, to, convert, [(into, None)]))

    def lower_redux(self, item: _Item, segment: Segment) -> None:
        instruction = item.instruction
        parts = instruction.parts
        if not warp.reduction_known(parts[2]) or len(parts) != 4:
            raise UnknownForm
        mask = self.member_mask(instruction.src[1], segment)
        dtype = DTYPES[TOKENS[parts[-1]].replace("w", "u")]
        value = self.plain_source(instruction.src[0], dtype)
        to, convert = self.target(instruction.dst[0], dtype)
        into = to if convert is None else self.new_slot()
        self.steps.append(warp.redux(parts[2], into, value, mask))
        if convert is not None:
            self.steps.append(_bound(None, to, convert, [(into, None)]))

    def lower_activemask(self, item: _Item, segment: Segment) -> None:
        to, convert = self.target(item.instruction.dst[0], U32)
        into = to if convert is None else self.new_slot()
        self.steps.append(warp.active_mask(into))
        if convert is not None:
            self.steps.append(_bound(None, to, convert, [(into, None)]))

    def lower_elect(self, item: _Item, segment: Segment) -> None:
        instruction = item.instruction
        mask = self.member_mask(instruction.src[0], segment)
        first = instruction.dst[0]
        leader = None if isinstance(first, Raw) else self.target(first, I32)[0]
        flag = self.target(instruction.dst[1], BOOL)[0] if len(instruction.dst) > 1 else None
        self.steps.append(warp.elect(leader, flag, mask))

    # -- tensor instructions ------------------------------------------------------------------------------------

    def registers_as(self, operand: Operand, dtype: np.dtype[Any]) -> list[int]:
        """Slots of a vector operand's elements."""
        elements = operand.elements if isinstance(operand, Vector) else (operand,)
        return [self.plain_source(element, dtype) for element in elements if element is not None]

    def results_as(self, operand: Operand, dtype: np.dtype[Any]) -> tuple[list[int], list[Step]]:
        """Slots for a vector of results of `dtype`, and the conversions to run afterwards."""
        elements = operand.elements if isinstance(operand, Vector) else (operand,)
        slots: list[int] = []
        after: list[Step] = []
        for element in elements:
            if element is None:
                raise UnknownForm
            to, convert = self.target(element, dtype)
            slots.append(to if convert is None else self.new_slot())
            if convert is not None:
                after.append(_bound(None, to, convert, [(slots[-1], None)]))
        return slots, after

    def lower_mma(self, item: _Item, segment: Segment) -> None:
        """mma.sync.aligned.shape.row.col[.satfinite].d.a.b.c"""
        instruction = item.instruction
        parts = instruction.parts
        kinds = (parts[-4], parts[-3], parts[-2], parts[-1])
        if parts[1:3] != ("sync", "aligned") or parts[4:6] != ("row", "col") or parts[6:-4] not in ((), ("satfinite",)):
            raise UnknownForm
        same_layout = {"s8": "s8", "u8": "s8", "e4m3": "e4m3", "e5m2": "e4m3"}
        if same_layout.get(kinds[1], kinds[1]) != same_layout.get(kinds[2], kinds[2]):
            raise UnknownForm
        places = tensor.fragments(parts[3], kinds[1])
        if places is None:
            raise UnknownForm
        self.product(item, parts[3], kinds, places)

    def product(
        self, item: _Item, shape: str, kinds: tuple[str, str, str, str],
        places: tuple[tensor.Places, tensor.Places, tensor.Places],
    ) -> None:  # fmt: skip
        instruction = item.instruction
        accumulators = {"f64": {"f64"}, "tf32": {"f32"}, "bf16": {"f32"}, "s8": {"s32"}, "u8": {"s32"}}
        if not {kinds[0], kinds[3]} <= accumulators.get(kinds[1], {"f32", "f16"}):
            raise UnknownForm
        product = tensor.Product(
            name=instruction.opcode,
            kinds=kinds,
            sizes=tensor.sizes(shape),
            places=places,
            saturate="satfinite" in instruction.parts,
            line=instruction.line,
        )
        word = U64 if kinds[0] == "f64" else U32
        a, b, c = (self.registers_as(operand, word) for operand in instruction.src)
        d, after = self.results_as(instruction.dst[0], word)
        for slots, place, kind in ((d, places[2], kinds[0]), (a, places[0], kinds[1]), (b, places[1], kinds[2]),
                                   (c, places[2], kinds[3])):  # fmt: skip
            if len(slots) * word.itemsize != place[0].shape[1] * tensor.ELEMENTS[kind].bits.itemsize:
                raise UnknownForm
        self.steps.append(tensor.multiply(product, d, a, b, c))
        self.steps += after

    def lower_wmma(self, item: _Item, segment: Segment) -> None:
        instruction = item.instruction
        parts = instruction.parts
        if parts[1] == "mma":
            if parts[2:4] != ("sync", "aligned") or not {parts[4], parts[5]} <= {"row", "col"}:
                raise UnknownForm
            rest = tuple(p for p in parts[7:] if p != "satfinite")
            if len(rest) == 2:
                kinds = (rest[0], "f16", "f16", rest[1])
            elif len(rest) == 4:
                kinds = (rest[0], rest[1], rest[2], rest[3])
            else:
                raise UnknownForm
            if not tensor.wmma_registers("a", parts[6], kinds[1]) or kinds[1] != kinds[2]:
                raise UnknownForm
            shape = parts[6]
            places = (
                tensor.wmma_places("a", shape, kinds[1]),
                tensor.wmma_places("b", shape, kinds[2]),
                tensor.wmma_places("c", shape, kinds[3]),
            )
            self.product(item, shape, kinds, places)
            return
        fragment, layout, shape, kind = parts[2], parts[5], parts[6], parts[-1]
        space = self.space_of(parts)
        if parts[3:5] != ("sync", "aligned") or layout not in ("row", "col") or space not in (
            "global", "shared", "generic"
        ):  # fmt: skip
            raise UnknownForm
        count = tensor.wmma_registers(fragment, shape, kind)
        word = U64 if kind == "f64" else U32
        transfer = tensor.Transfer(
            name=instruction.opcode,
            shape=tensor.wmma_shape(fragment, shape),
            kind=kind,
            by_row=layout == "row",
            places=tensor.wmma_places(fragment, shape, kind),
            space=space,
            line=instruction.line,
        )
        base, offset = self.address(instruction.src[0])
        if parts[1] == "load":
            stride = self.plain_source(instruction.src[1], U32) if len(instruction.src) > 1 else None
            slots, after = self.results_as(instruction.dst[0], word)
            self.steps.append(tensor.wmma_load(transfer, slots, base, offset, stride))
            self.steps += after
        else:
            slots = self.registers_as(instruction.src[1], word)
            stride = self.plain_source(instruction.src[2], U32) if len(instruction.src) > 2 else None
            self.steps.append(tensor.wmma_store(transfer, slots, base, offset, stride))
        if len(slots) != count:
            raise UnknownForm

    def lower_ldmatrix(self, item: _Item, segment: Segment) -> None:
        """ldmatrix and stmatrix of 8x8 matrices of 16-bit elements."""
        instruction = item.instruction
        parts = instruction.parts
        matrices = {"x1": 1, "x2": 2, "x4": 4}[parts[4]]
        known = {"trans", "shared", "shared::cta"}
        if parts[1:4] != ("sync", "aligned", "m8n8") or set(parts[5:-1]) - known or parts[-1] != "b16":
            raise UnknownForm
        space = self.space_of(parts)
        base, offset = self.address(instruction.src[0])
        transposed = "trans" in parts
        if parts[0] == "ldmatrix":
            slots, after = self.results_as(instruction.dst[0], U32)
            step = tensor.load_matrices(
                instruction.opcode, slots, base, offset, transposed, space, instruction.line
            )
            self.steps += [step, *after]
        else:
            slots = self.registers_as(instruction.src[1], U32)
            self.steps.append(
                tensor.store_matrices(instruction.opcode, slots, base, offset, transposed, space, instruction.line)
            )
        if len(slots) != matrices:
            raise UnknownForm

    def lower_movmatrix(self, item: _Item, segment: Segment) -> None:
        instruction = item.instruction
        if instruction.parts[1:] != ("sync", "aligned", "m8n8", "trans", "b16"):
            raise UnknownForm
        source = self.plain_source(instruction.src[0], U32)
        slots, after = self.results_as(instruction.dst[0], U32)
        self.steps += [tensor.transpose_matrix(instruction.opcode, slots[0], source, instruction.line), *after]

    # -- calls ------------------------------------------------------------------------------------------------

    def lower_builtin_call(self, item: _Item, segment: Segment) -> None:
        """vprintf and __assertfail; entering a device function needs no work, its code follows."""
        instruction = item.instruction
        callee = instruction.src[0]
        assert isinstance(callee, Symbol)
        if callee.name not in BUILTINS:
            return
        pieces = []
        for operand in instruction.src[1:3]:
            if not isinstance(operand, Symbol):
                raise UnknownForm
            slot = self.call_piece(self.storage(item.context, operand.name), 0, 8)
            self.uses.add(slot)
            pieces.append(slot)
        result = -1
        if instruction.dst:
            symbol = instruction.dst[0]
            if not isinstance(symbol, Symbol):
                raise UnknownForm
            result = self.call_piece(self.storage(item.context, symbol.name), 0, 4)
            self.defines.add(result)
        self.steps.append(print_formatted(callee.name, pieces, result, instruction.line))


# -- closures -----------------------------------------------------------------------------------------------------


def _bits_of(immediate: Immediate, dtype: np.dtype[Any]) -> int:
    """The bit pattern of a literal as an operand of type `dtype`."""
    if immediate.kind == "f64" and dtype in (F32, F16):
        value = np.frombuffer(immediate.value.to_bytes(8, "little"), F64).astype(dtype)
        return int.from_bytes(value.tobytes(), "little")
    if dtype == BOOL:
        return int(immediate.value != 0)
    return immediate.value


def _trailing_zeros(value: int) -> int:
    return 64 if value == 0 else (value & -value).bit_length() - 1


def _viewing(dtype: np.dtype[Any]) -> Callable[[Array], Array]:
    return lambda value: value.view(dtype)


def _casting(dtype: np.dtype[Any]) -> Callable[[Array], Array]:
    return lambda value: value.astype(dtype)


def _reading(stored: np.dtype[Any], wanted: np.dtype[Any]) -> Convert:
    """What turns a stored value into an operand of `wanted`: nothing, new eyes, or only its low bits."""
    if stored == wanted:
        return None
    if stored.itemsize == wanted.itemsize:
        return _viewing(wanted)
    low = _UNSIGNED[wanted.itemsize]
    if stored.itemsize < wanted.itemsize:
        raise UnknownForm
    if stored.kind in "ui":
        if wanted.kind in "ui":
            return _casting(wanted)
        return lambda value: value.astype(low).view(wanted)
    bits = _UNSIGNED[stored.itemsize]
    return lambda value: value.view(bits).astype(low).view(wanted)


def _writing(result: np.dtype[Any], stored: np.dtype[Any]) -> Convert:
    """What turns a result into storage: wider storage gets zeros, or the sign of a signed result."""
    if result == stored:
        return None
    if result.itemsize == stored.itemsize:
        return _viewing(stored)
    if result.itemsize > stored.itemsize or result.kind == "b":
        raise UnknownForm
    narrow = _UNSIGNED[result.itemsize]
    wide = _UNSIGNED[stored.itemsize]
    if result.kind == "i":
        return lambda value: value.astype(wide).view(stored)
    return lambda value: value.view(narrow).astype(wide).view(stored)


def _field(shift: Array, part: np.dtype[Any]) -> Callable[[Array], Array]:
    if not shift:
        return lambda value: value.astype(part)
    return lambda value: (value >> shift).astype(part)


def _whole_code(nbytes: int) -> int:
    return CODE[WIDE] if nbytes == 16 else CODE[_UNSIGNED[nbytes]]


def _bound(
    apply: Callable[..., Array] | None, target: int, after: Convert, sources: list[tuple[int, Convert]]
) -> Step:
    """A closure for frame[target] = after(apply(sources...)); None stands for the identity."""
    converts = any(convert is not None for _, convert in sources) or after is not None
    if len(sources) == 1:
        (a, before), = sources
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


def _guarded_pure(predicate: int, negated: bool, steps: tuple[Step, ...], defines: tuple[int, ...]) -> Step:
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


def _guarded(
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


def _note_poll(frame: Frame, group: Group) -> None:
    group.batch.polled = True


def _clock(slot: int, dtype: np.dtype[Any], *, high: bool) -> Step:
    """A clock that advances with the work done, so that runs repeat exactly."""

    def run(frame: Frame, group: Group) -> None:
        batch = group.batch
        batch.ticks += 1
        now = batch.budget.ticks() + batch.ticks
        frame[slot] = np.array([(now >> 32 if high else now) & ((1 << 8 * dtype.itemsize) - 1)], dtype)

    return run
