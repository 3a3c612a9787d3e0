"""Lowers a kernel to the records that the native engine runs.

Segments, inlining, liveness and what is counted are those of the numpy engine's lowering; only what an instruction
becomes differs: a record naming a handler of the table and its operands. An operation without side effects that the
table lacks calls its numpy function; a kernel with another instruction that has no handler is not lowered at all
(`NotNative`), and the numpy engine runs it.

Registers live in one file per warp, 32 lanes each. Those that are needed in one segment only share room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from optiml.ptx import atomics, memory, opcodes, tensor
from optiml.ptx.closures import UNSIGNED, bits_of
from optiml.ptx.emit import space_of
from optiml.ptx.inline import BUILTINS, Item, storage
from optiml.ptx.lower import Lowering
from optiml.ptx.memory import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, WINDOW_BITS
from optiml.ptx.native import matrices, table
from optiml.ptx.native.origins import Roots, mark_retried_loads, roots_of
from optiml.ptx.native.splitting import may_be_divided
from optiml.ptx.numerics import BOOL, F16, F32, U32, U64
from optiml.ptx.opcodes import DTYPES, TOKENS, UnknownForm
from optiml.ptx.parse import (
    Address,
    Function,
    Immediate,
    Module,
    Operand,
    Raw,
    Register,
    Symbol,
    Vector,
    registers_in,
)
from optiml.ptx.registers import CLOCKS, LAUNCH_SPECIALS, THREAD_SPECIALS, WIDE_SPECIALS
from optiml.ptx.simt import BARRIER, BRANCH

NONE = 0xFFFFFFFF
RECORD = np.dtype(
    [("op", "<u4"), ("pred", "<u4"), ("neg", "<u4"), ("d", "<u4", 4), ("s", "<u4", 5), ("aux", "<u4"), ("line", "<i4"),
     ("order", "<u4"), ("number", "<u4"), ("imm", "<i8")], align=True,
)  # fmt: skip
SEGMENT = np.dtype(
    [(name, "<i4") for name in ("first", "last", "kind", "target")]
    + [("pred", "<u4"), ("neg", "<u4"), ("weight", "<i4"), ("flags", "<i4"), ("mask", "<u4")]
    + [(name, "<i4") for name in ("barrier", "line", "exit_bit")],
    align=True,
)
BARRIER_RECORD = np.dtype(
    [(name, "<u4") for name in ("number", "count", "source", "target")] + [("flags", "<i4"), ("operation", "<i4")],
    align=True,
)
# flags of the C side, see csrc/engine.h and csrc/core.inc
_WARP_WIDE, _EXITS, _COUNTED = 1, 2, 4
_MOST_EXITS = 512
_MOST_SOURCES = 5
_PLAIN, _ARRIVE, _ALIGNED, _REDUCES, _NEGATED = 1, 2, 4, 8, 16
_SPACES = {"global": 0, "const": 1, "shared": 2, "local": 3, "generic": 4}
_WIDE_ADDRESS, _CACHED, _POLLS, _UNCOUNTED = 8, 16, 32, 256
_BARRIER_OPERATIONS = {name: code for code, name in enumerate(
    ("init", "arrive", "arrive_drop", "expect_tx", "complete_tx", "arrive_expect", "test", "test_parity"))}  # fmt: skip
_ATOMICS = {name: code for code, name in enumerate(
    ("add", "min", "max", "and", "or", "xor", "inc", "dec", "exch", "cas"))}  # fmt: skip
_ATOMIC_TYPES = {"u32": 0, "b32": 0, "s32": 1, "u64": 2, "b64": 2, "s64": 3, "f32": 4, "f64": 5, "f16": 6, "bf16": 7,
                 "f16x2": 8, "bf16x2": 9, "b16": 10, "u16": 10}  # fmt: skip
_SPECIAL_CODES = {
    "%tid.x": 0, "%tid.y": 1, "%tid.z": 2, "%ctaid.x": 3, "%ctaid.y": 4, "%ctaid.z": 5, "%laneid": 6, "%warpid": 7,
    "%lanemask_eq": 8, "%lanemask_lt": 9, "%lanemask_le": 10, "%lanemask_gt": 11, "%lanemask_ge": 12,
}  # fmt: skip
_SHUFFLES = {"up": 0, "down": 1, "bfly": 2, "idx": 3}
_VOTES = {"ballot": 0, "all": 1, "any": 2, "uni": 3}
_MOVES: Mapping[str, int] = MappingProxyType(
    {key: table.NUMBERS[row] for key, row in table.ROWS.items() if key[0] == "@"}
)


class NotNative(Exception):
    """The native engine has no handler for some instruction of the kernel."""


@dataclass(kw_only=True)
class Record:
    """One instruction; operands are slots, -1 for none. `raw` are entries of `s` that are plain numbers."""

    op: int
    d: Sequence[int] = ()
    s: Sequence[int] = ()
    aux: int = 0
    imm: int = 0
    raw: Mapping[int, int] = field(default_factory=dict)
    line: int | None = None
    pred: int = -1
    negated: bool = False
    extra: matrices.Extra | None = None
    name: str = ""

    @property
    def slots(self) -> tuple[int, ...]:
        """Every slot that it touches, -1 for none."""
        return (*self.d, *self.s, self.pred, *(self.extra.slots if self.extra is not None else ()))


@dataclass(frozen=True, kw_only=True)
class NativeProgram:
    """A kernel as arrays for the engine.

    Attributes:
        program: the segments and launch-time slots, as the numpy engine has them.
        extra: what does not fit the records of matrix instructions.
        names: spelling of those that need whole warps, by number of the record.
        functions: operations of the numpy engine that it calls.
        constant_slots: byte offset and lane width (4 or 8) within the constants, by slot.
        lines: source line by line index.
    """

    program: Any
    records: np.ndarray[Any, Any]
    segments: np.ndarray[Any, Any]
    barriers: np.ndarray[Any, Any]
    reach: np.ndarray[Any, Any]
    specials: np.ndarray[Any, Any]
    zeros: np.ndarray[Any, Any]
    extra: np.ndarray[Any, Any]
    names: Mapping[int, str]
    functions: tuple[opcodes.Pure, ...]
    constant_slots: Mapping[int, tuple[int, int]]
    constant_bytes: int
    register_bytes: int
    lines: tuple[int, ...]
    max_order: int

    @cached_property
    def roots(self) -> Roots:
        """What the addresses come from that the kernel reads and writes."""
        return roots_of(self.program)

    @cached_property
    def divisible(self) -> bool:
        """Whether several threads of the host may share a launch."""
        return may_be_divided(self.program)


def _lane_bytes(dtype: np.dtype[Any]) -> int:
    return 8 if dtype.itemsize == 8 else 4


class NativeLowering(Lowering):
    """Builds the records of one kernel."""

    def __init__(self, module: Module, kernel: Function) -> None:
        self.widths: dict[int, int] = {}  # lane bytes by slot
        self.native_rows: dict[str, table.Row | opcodes.Pure] = {}
        self.functions: list[opcodes.Pure] = []
        super().__init__(module, kernel, False, frozenset())
        mark_retried_loads(self.program)
        self.native = _packed(self)

    # -- registers and operands -------------------------------------------------------------------------------

    def temporary(self, width: int) -> int:
        slot = self.new_slot()
        self.widths[slot] = width
        return slot

    def literal(self, value: int, dtype: np.dtype[Any], dimensions: int = 0) -> int:
        slot = super().literal(value, dtype, 0)
        self.widths[slot] = _lane_bytes(dtype)
        return slot

    def special(self, name: str) -> tuple[int, np.dtype[Any]]:
        dtype = U64 if name in WIDE_SPECIALS else U32
        slot = self.slot(name)
        self.widths[slot] = _lane_bytes(dtype)
        if name in LAUNCH_SPECIALS:
            self.program.launch_values[name] = slot
        elif name in CLOCKS:
            width = self.widths[slot]
            self.emit(table.EFFECT_NUMBERS[f"clock_{width}"], [slot], [], aux=int(name.endswith("_hi")))
            self.defines.add(slot)
        elif name in THREAD_SPECIALS and name in _SPECIAL_CODES:
            self.program.specials[name] = slot
            self.uses.add(slot)
        else:
            raise NotNative(name)
        return slot, dtype

    def emit(self, op: int, d: Sequence[int], s: Sequence[int], **extra: Any) -> None:
        self.steps.append(Record(op=op, d=d, s=s, line=self.item.instruction.line, **extra))  # type: ignore[arg-type]

    def move(self, key: str, target: int, *sources: int) -> None:
        self.emit(_MOVES[key], [target], sources)

    def source(self, operand: Operand, dtype: np.dtype[Any], *, dimensions: int = 1) -> tuple[int, None]:
        """Slot of an operand, brought to the lane width of `dtype` if it is a wider register."""
        if isinstance(operand, Immediate):
            if operand.kind == "f64" and dtype.itemsize < 8:
                dtype = F32 if dtype.itemsize == 4 else F16
            return self.literal(bits_of(operand, dtype), dtype), None
        if isinstance(operand, Symbol):
            slot, stored = self.symbol(operand)
            self.widths.setdefault(slot, 8)
        elif isinstance(operand, Register):
            slot, stored = self.register(operand.name)
            self.widths[slot] = _lane_bytes(stored)
        else:
            raise NotNative("operand")
        if (stored == BOOL) != (dtype == BOOL):
            raise NotNative("predicate operand")
        if isinstance(operand, Register) and operand.negated:
            inverse = self.temporary(4)
            self.emit(table.NUMBERS[table.ROWS["not.pred"]], [inverse], [slot])
            return inverse, None
        if stored.itemsize < dtype.itemsize:
            raise NotNative("narrow operand")
        if self.widths[slot] == 8 and dtype.itemsize < 8:
            low = self.temporary(4)
            self.move("@low", low, slot)
            return low, None
        return slot, None

    def plain_source(self, operand: Operand, dtype: np.dtype[Any]) -> int:
        return self.source(operand, dtype)[0]

    def converted(self, slot: int, convert: Callable[[Any], Any]) -> int:
        raise NotNative("conversion")

    def target(self, operand: Operand, dtype: np.dtype[Any]) -> tuple[int, None]:
        """Slot of a destination of exactly the lane width of `dtype`."""
        if not isinstance(operand, Register):
            raise NotNative("destination")
        full = self.item.context.prefix + operand.name
        stored = self.registers.dtypes[full]
        if (stored == BOOL) != (dtype == BOOL) or _lane_bytes(stored) != _lane_bytes(dtype):
            raise NotNative("destination width")
        if dtype.itemsize > stored.itemsize:
            raise NotNative("narrow destination")
        slot = self.slot(full)
        self.widths[slot] = _lane_bytes(stored)
        self.defines.add(slot)
        return slot, None

    def wide_register(self, operand: Operand) -> bool:
        stored = self.stored_dtype(operand)
        return stored is not None and stored.itemsize == 8

    def symbol(self, symbol: Symbol) -> tuple[int, np.dtype[Any]]:
        slot, dtype = super().symbol(symbol)
        self.widths[slot] = 8
        return slot, dtype

    def place(self, operand: Operand) -> tuple[int, int, int]:
        """Slot of the base of a memory operand, the constant to add, and the flag of its width."""
        if not isinstance(operand, Address):
            raise NotNative("address")
        if operand.base is None:
            return self.literal(operand.offset, U64), 0, _WIDE_ADDRESS
        if isinstance(operand.base, Symbol):
            return self.symbol(operand.base)[0], operand.offset, _WIDE_ADDRESS
        slot, stored = self.register(operand.base.name)
        self.widths[slot] = _lane_bytes(stored)
        if stored.itemsize not in (4, 8):
            raise NotNative("address")
        return slot, operand.offset, _WIDE_ADDRESS if stored.itemsize == 8 else 0

    # -- instructions -----------------------------------------------------------------------------------------

    def guard(self, predicate: tuple[str, bool]) -> None:
        slot, _ = self.register(predicate[0])
        self.widths[slot] = 4
        for step in self.steps:
            step.pred, step.negated = slot, predicate[1]  # type: ignore[attr-defined]

    def row(self, item: Item) -> table.Row | opcodes.Pure:
        """The row of the native table for a pure instruction, or the numpy engine's where there is none."""
        parts, opcode = item.instruction.parts, item.instruction.opcode
        found = self.native_rows.get(opcode)
        if found is None:
            found = table.ROWS.get(table.canonical(parts)) or opcodes.PURE[parts[0]](parts)
            if len(item.instruction.src) != len(found.inputs) or len(found.inputs) > _MOST_SOURCES:
                raise NotNative(opcode)
            self.native_rows[opcode] = found
        return found

    def lower(self, item: Item, segment: Any) -> None:
        family = item.instruction.parts[0]
        if family == "set":
            self.native_set(item)
        elif "cc" in item.instruction.parts:
            self.native_carry(item, segment)
        elif family in opcodes.PURE:
            row = self.row(item)
            self.apply(row, item.instruction.dst[0], item.instruction.src)
        else:
            method = "warp_barrier" if family in ("bar", "barrier") else opcodes.EFFECTS[family]
            run = getattr(self, f"native_{method}", None)
            if run is None:
                raise NotNative(item.instruction.opcode)
            run(item, segment)

    def compute(self, row: table.Row | opcodes.Pure, target: int, sources: Sequence[int]) -> None:
        """Emit the operation of a row."""
        if isinstance(row, table.Row):
            self.emit(table.NUMBERS[row], [target], sources)
            return
        if row not in self.functions:
            self.functions.append(row)
        width = _lane_bytes(_dtype(row.output))
        self.emit(table.EFFECT_NUMBERS["numpy"], [target], sources, aux=width, imm=self.functions.index(row))

    def apply(self, row: table.Row | opcodes.Pure, target: Operand, sources: Iterable[Operand]) -> None:
        slots = [self.source(operand, _dtype(token))[0] for operand, token in zip(sources, row.inputs, strict=True)]
        out = _dtype(row.output)
        if out.itemsize < 8 and out != BOOL and self.wide_register(target):
            if row.output[0] == "i":
                raise NotNative("sign extension")
            part = self.temporary(4)
            self.compute(row, part, slots)
            self.move("@widen", self.target(target, U64)[0], part)
            return
        self.compute(row, self.target(target, out)[0], slots)

    def native_nothing(self, item: Item, segment: Any) -> None:
        """Fences and hints: threads run in an order that is sequentially consistent anyway."""

    native_pause = native_nothing

    def native_policy(self, item: Item, segment: Any) -> None:
        self.move("@mov8", self.target(item.instruction.dst[0], U64)[0], self.literal(0, U64))

    def native_trap(self, item: Item, segment: Any) -> None:
        self.emit(table.EFFECT_NUMBERS["trap"], [], [])

    def native_mov(self, item: Item, segment: Any) -> None:
        instruction = item.instruction
        target, source = instruction.dst[0], instruction.src[0]
        kind = instruction.parts[-1]
        if isinstance(target, Vector):
            self.unpack(source, kind, target)
        elif isinstance(source, Vector):
            self.pack(source, kind, target)
        else:
            dtype = BOOL if kind == "pred" else UNSIGNED[int(TOKENS[kind][1:])]
            slot = self.source(source, dtype)[0]
            self.move("@mov8" if dtype.itemsize == 8 else "@mov4", self.target(target, dtype)[0], slot)

    def unpack(self, source: Operand, kind: str, target: Vector) -> None:
        size, count = int(TOKENS[kind][1:]), len(target.elements)
        whole, part = UNSIGNED[size], UNSIGNED[size // count]
        slot = self.plain_source(source, whole)
        for index, element in enumerate(target.elements):
            if element is None:
                continue
            into = self.target(element, part)[0]
            # a later element must not read a register that an earlier one has overwritten
            if into == slot:
                raise NotNative("unpack onto itself")
            if (size, count) == (8, 2):
                self.move(("@low", "@high")[index], into, slot)
            elif (size, count) == (4, 2):
                self.move(("@low2", "@high2")[index], into, slot)
            elif (size, count) == (8, 4):
                self.move("@field", into, slot, self.literal(16 * index, U32))
            else:
                raise NotNative("unpack")

    def pack(self, source: Vector, kind: str, target: Operand) -> None:
        size, count = int(TOKENS[kind][1:]), len(source.elements)
        part = UNSIGNED[size // count]
        if any(element is None for element in source.elements):
            raise NotNative("pack")
        slots = [self.plain_source(element, part) for element in source.elements]  # type: ignore[arg-type]
        into = self.target(target, UNSIGNED[size])[0]
        if (size, count) == (8, 2):
            self.move("@pack8", into, *slots)
        elif (size, count) == (4, 2):
            self.move("@pack4", into, *slots)
        elif (size, count) == (8, 4):
            halves = [self.temporary(4), self.temporary(4)]
            self.move("@pack4", halves[0], *slots[:2])
            self.move("@pack4", halves[1], *slots[2:])
            self.move("@pack8", into, *halves)
        else:
            raise NotNative("pack")

    def compare(self, parts: tuple[str, ...], sources: Sequence[Operand]) -> tuple[int, str]:
        """Emit a comparison; the slot of its truth, and how it is combined with a predicate."""
        names = [p for p in parts[1:] if p != "ftz"]
        combine = names[1] if len(names) > 2 else ""
        if len(names) > 3 or combine not in ("", "and", "or", "xor"):
            raise NotNative("comparison")
        row = table.ROWS.get(table.canonical(("setp", names[0], *(p for p in parts if p == "ftz"), names[-1])))
        if row is None:
            raise NotNative("comparison")
        slots = [self.source(operand, _dtype(t))[0] for operand, t in zip(sources[:2], row.inputs, strict=True)]
        truth = self.temporary(4)
        self.emit(table.NUMBERS[row], [truth], slots)
        return truth, combine

    def native_carry(self, item: Item, segment: Any) -> None:
        """add, sub and mad with carry: `.cc` writes the carry flag, addc, subc and madc read it."""
        instruction = item.instruction
        parts = instruction.parts
        family = parts[0].removesuffix("c")
        kind = parts[-1]
        dtype = UNSIGNED[int(TOKENS[kind][1:])]
        half = next((p for p in parts if p in ("lo", "hi")), "")
        if family not in ("add", "sub", "mad") or set(parts[1:-1]) - {"cc", half} or dtype.itemsize < 4:
            raise NotNative(instruction.opcode)
        slots = [self.source(operand, dtype)[0] for operand in instruction.src]
        if family == "mad":
            product = self.temporary(dtype.itemsize)
            row = table.ROWS[table.canonical(("mul", half, kind))]
            self.emit(table.NUMBERS[row], [product], slots[:2])
            slots = [product, slots[2]]
        flag = self.slot(f"{item.context.prefix}%carry")
        self.widths[flag] = 4
        takes = parts[0] != family
        if takes:
            self.uses.add(flag)
        carry = flag if takes else self.literal(0, BOOL)
        name = "subc" if family == "sub" else "addc"
        into = self.target(instruction.dst[0], dtype)[0]
        if "cc" in parts:
            out = self.temporary(4)
            self.move(f"@{name}_out{dtype.itemsize}", out, *slots, carry)
        self.move(f"@{name}{dtype.itemsize}", into, *slots, carry)
        if "cc" in parts:
            self.defines.add(flag)
            self.move("@mov4", flag, out)

    def native_setp_packed(self, item: Item) -> None:
        """setp on two halves: one predicate each."""
        instruction = item.instruction
        parts = (*instruction.parts[:-1], instruction.parts[-1].removesuffix("x2"))
        row = table.ROWS.get(table.canonical(parts))
        if row is None or len(instruction.dst) != 2 or len(instruction.src) != 2:
            raise NotNative(instruction.opcode)
        wholes = [self.plain_source(operand, U32) for operand in instruction.src]
        truths = []
        for key in ("@low2", "@high2"):
            halves = [self.temporary(4), self.temporary(4)]
            for part, whole in zip(halves, wholes, strict=True):
                self.move(key, part, whole)
            truths.append(self.temporary(4))
            self.emit(table.NUMBERS[row], [truths[-1]], halves)
        for operand, truth in zip(instruction.dst, truths, strict=True):
            if not isinstance(operand, Raw):
                self.move("@mov4", self.target(operand, BOOL)[0], truth)

    def native_setp(self, item: Item, segment: Any) -> None:
        instruction = item.instruction
        if instruction.parts[-1].endswith("x2"):
            self.native_setp_packed(item)
            return
        wanted = [not isinstance(operand, Raw) for operand in instruction.dst]
        if len(instruction.src) == 2 and len(instruction.dst) == 1 and wanted[0]:
            parts = instruction.parts
            row = table.ROWS.get(table.canonical(parts))
            if row is None:
                raise NotNative(instruction.opcode)
            self.apply(row, instruction.dst[0], instruction.src)
            return
        truth, combine = self.compare(instruction.parts, instruction.src)
        if len(instruction.src) != (3 if combine else 2):
            raise NotNative(instruction.opcode)
        other = self.source(instruction.src[2], BOOL)[0] if combine else -1
        values = []
        for index in range(len(instruction.dst)):
            value = truth
            if index:
                value = self.temporary(4)
                self.emit(table.NUMBERS[table.ROWS["not.pred"]], [value], [truth])
            if combine:
                joined = self.temporary(4)
                self.emit(table.NUMBERS[table.ROWS[f"{combine}.pred"]], [joined], [value, other])
                value = joined
            values.append(value)
        for operand, value, is_wanted in zip(instruction.dst, values, wanted, strict=True):
            if is_wanted:
                self.move("@mov4", self.target(operand, BOOL)[0], value)

    def native_set(self, item: Item) -> None:
        instruction = item.instruction
        names = [p for p in instruction.parts[1:] if p != "ftz"]
        out_name = names[-2]
        if names[-1].endswith("x2"):
            raise NotNative(instruction.opcode)
        parts = ("setp", *(p for p in instruction.parts[1:-2]), names[-1])
        truth, combine = self.compare(parts, instruction.src)
        if len(instruction.src) != (3 if combine else 2):
            raise NotNative(instruction.opcode)
        if combine:
            joined = self.temporary(4)
            other = self.source(instruction.src[2], BOOL)[0]
            self.emit(table.NUMBERS[table.ROWS[f"{combine}.pred"]], [joined], [truth, other])
            truth = joined
        dtype = UNSIGNED[int(TOKENS[out_name][1:])]
        if dtype.itemsize == 8:
            raise NotNative(instruction.opcode)
        ones = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80}.get(out_name, (1 << 8 * dtype.itemsize) - 1)
        sources = [self.literal(ones, dtype), self.literal(0, dtype), truth]
        self.emit(table.NUMBERS[table.ROWS["selp.b32"]], [self.target(instruction.dst[0], dtype)[0]], sources)

    def native_lop3(self, item: Item, segment: Any) -> None:
        instruction = item.instruction
        truth_table = instruction.src[3]
        combine = instruction.parts[1] if len(instruction.parts) == 3 else ""
        if combine not in ("", "or", "and") or not isinstance(truth_table, Immediate):
            raise NotNative(instruction.opcode)
        slots = [self.plain_source(operand, U32) for operand in instruction.src[:3]]
        first = instruction.dst[0]
        if not combine:
            target = self.target(first, U32)[0]
            self.emit(table.EFFECT_NUMBERS["lop3"], [target], slots, aux=truth_table.value & 0xFF)
            return
        other = self.source(instruction.src[4], BOOL)[0]
        value, truth = self.temporary(4), self.temporary(4)
        self.emit(table.EFFECT_NUMBERS["lop3"], [value], slots, aux=truth_table.value & 0xFF)
        self.emit(table.NUMBERS[table.ROWS["setp.ne.u32"]], [truth], [value, self.literal(0, U32)])
        flag = self.target(instruction.dst[1], BOOL)[0]
        self.emit(table.NUMBERS[table.ROWS[f"{combine}.pred"]], [flag], [truth, other])
        if not isinstance(first, Raw):
            self.move("@mov4", self.target(first, U32)[0], value)

    def native_cvta(self, item: Item, segment: Any) -> None:
        instruction = item.instruction
        parts = instruction.parts
        space = parts[2] if parts[1] == "to" else parts[1]
        windows = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW, "global": 0, "const": 0}
        if parts[-1] not in ("u64", "s64"):
            raise NotNative(instruction.opcode)
        base = windows[space.split("::")[0]] << WINDOW_BITS
        slot = self.plain_source(instruction.src[0], U64)
        target = self.target(instruction.dst[0], U64)[0]
        if base == 0:
            self.move("@mov8", target, slot)
        else:
            self.move("@add8", target, slot, self.literal(-base if parts[1] == "to" else base, U64))

    def native_isspacep(self, item: Item, segment: Any) -> None:
        space = item.instruction.parts[1].split("::")[0]
        windows = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW, "global": 0, "const": -1}
        window = windows[space]
        slot = self.plain_source(item.instruction.src[0], U64)
        target = self.target(item.instruction.dst[0], BOOL)[0]
        if window < 0:
            self.move("@mov4", target, self.literal(0, BOOL))
        elif window == 0:
            self.move("@beyond", target, slot, self.literal(memory.FIRST_ALLOCATION, U64))
        else:
            self.move("@window", target, slot, self.literal(window, U64))

    # -- memory -----------------------------------------------------------------------------------------------

    def flags(self, space: str, wide: int) -> int:
        if space not in _SPACES or (space == "generic" and not wide):
            raise NotNative(f"access to {space} memory")
        return _SPACES[space] | wide

    def native_load(self, item: Item, segment: Any) -> None:
        instruction = item.instruction
        parts = instruction.parts
        space, lanes, kind = self.memory_words(item)
        token = TOKENS[kind].replace("w", "u").replace("f2", "u2").replace("f4", "u4").replace("f8", "u8")
        if token[0] == "p":
            raise NotNative(instruction.opcode)
        first = instruction.dst[0]
        targets: list[Operand | None] = list(first.elements) if isinstance(first, Vector) else [first]
        if len(targets) != lanes:
            raise NotNative(instruction.opcode)
        address = instruction.src[0]
        if space == "param" and isinstance(address, Address) and isinstance(address.base, Symbol):
            self.native_parameter(address, targets, token)
            return
        aux = 0
        if {"volatile", "relaxed", "acquire"} & set(parts):
            self.program.waits = True
            aux = _POLLS
        if not {"cg", "cv", "volatile", "relaxed", "acquire"} & set(parts):
            aux |= _CACHED
        base, offset, wide = self.place(address)
        size = int(token[1:])
        widths = {8 if self.wide_register(t) else 4 for t in targets if t is not None}
        if len(widths) != 1:
            raise NotNative(instruction.opcode)
        (width,) = widths
        element = "u" + token[1:] if size >= width else token
        number = table.EFFECT_NUMBERS.get(f"load_{element}_{width}_{lanes}")
        if number is None:
            raise NotNative(instruction.opcode)
        slots = [-1 if t is None else self.target(t, UNSIGNED[width if width == 8 else size])[0] for t in targets]
        self.emit(number, slots, [base], aux=aux | self.flags(space, wide), imm=offset)

    def native_parameter(self, address: Address, targets: list[Operand | None], token: str) -> None:
        """A kernel parameter is a launch constant, a call's parameter a register."""
        assert isinstance(address.base, Symbol)
        context = self.item.context
        name, start = address.base.name, address.base.offset + address.offset
        piece = int(token[1:])
        param = next((p for p in self.kernel.params if p.name == name), None) if context.depth == 0 else None
        for index, target in enumerate(targets):
            if target is None:
                continue
            at = start + index * piece
            if param is not None:
                if at < 0 or at + piece > param.bytes:
                    raise NotNative("parameter")
                slot = self.parameter(param.offset + at, DTYPES[token])
            else:
                slot = self.call_piece(storage(context, name), at, piece)
                self.uses.add(slot)
                if token[0] == "i" and piece < 4:
                    raise NotNative("narrow parameter")
            self.widths[slot] = 8 if piece == 8 else 4
            if piece < 8 and self.wide_register(target):
                extend = "cvt.s64.s32" if token[0] == "i" else "cvt.u64.u32"
                self.emit(table.NUMBERS[table.ROWS[extend]], [self.target(target, U64)[0]], [slot])
                continue
            self.move("@mov8" if piece == 8 else "@mov4", self.target(target, UNSIGNED[piece])[0], slot)

    def native_store(self, item: Item, segment: Any) -> None:
        instruction = item.instruction
        space, lanes, kind = self.memory_words(item)
        if TOKENS[kind][0] == "p":
            raise NotNative(instruction.opcode)
        size = int(TOKENS[kind][1:])
        source = instruction.src[1]
        sources = list(source.elements) if isinstance(source, Vector) else [source]
        if len(sources) != lanes or any(operand is None for operand in sources):
            raise NotNative(instruction.opcode)
        address = instruction.src[0]
        slots = [self.source(operand, UNSIGNED[size])[0] for operand in sources]  # type: ignore[arg-type]
        if space == "param":
            if not isinstance(address, Address) or not isinstance(address.base, Symbol):
                raise NotNative(instruction.opcode)
            start = address.base.offset + address.offset
            place = storage(item.context, address.base.name)
            for index, slot in enumerate(slots):
                to = self.call_piece(place, start + index * size, size)
                self.widths[to] = 8 if size == 8 else 4
                self.defines.add(to)
                self.move("@mov8" if size == 8 else "@mov4", to, slot)
            return
        base, offset, wide = self.place(address)
        number = table.EFFECT_NUMBERS.get(f"store_{size}_{lanes}")
        if number is None or space == "const":
            raise NotNative(instruction.opcode)
        ordered = _POLLS if {"volatile", "relaxed", "release"} & set(instruction.parts) else 0
        self.emit(number, [], [base, *slots], aux=self.flags(space, wide) | ordered, imm=offset)

    def native_atomic(self, item: Item, segment: Any) -> None:
        instruction = item.instruction
        parts = instruction.parts
        if set(parts[1:-1]) - self._ATOMIC_WORDS:
            raise NotNative(instruction.opcode)
        operations = [p for p in parts[1:-1] if p in _ATOMICS]
        found = atomics.combination(operations[0], parts[-1]) if len(operations) == 1 else None
        if found is None:
            raise NotNative(instruction.opcode)
        dtype = UNSIGNED[found[0].itemsize]
        operation = operations[0]
        base, offset, wide = self.place(instruction.src[0])
        self.program.waits = True
        operands = instruction.src[1:]
        if len(operands) != (2 if operation == "cas" else 1):
            raise NotNative(instruction.opcode)
        slots = [self.source(operand, dtype)[0] for operand in operands]
        target = -1
        if instruction.dst:
            slot = self.target(instruction.dst[0], dtype)[0]
            name = next(registers_in(instruction.dst[0]), "")
            target = slot if self.registers.read_count[item.context.prefix + name] else -1
        if not -(2**31) <= offset < 2**31:
            raise NotNative("offset")
        self.emit(
            table.EFFECT_NUMBERS[f"atomic_{dtype.itemsize}"], [target], [base, *slots],
            aux=self.flags(space_of(parts), wide), imm=_ATOMICS[operation] | _ATOMIC_TYPES[parts[-1]] << 8,
            raw={4: offset & NONE},
        )  # fmt: skip

    def native_copy_async(self, item: Item, segment: Any) -> None:
        """cp.async copies at once; commit and wait only matter to the check for missing waits."""
        instruction = item.instruction
        parts = instruction.parts
        if parts[:4] == ("cp", "async", "mbarrier", "arrive"):
            # the copies are done, so this is an arrival; without .noinc it would cancel out
            self.emit(table.EFFECT_NUMBERS["copy_wait"], [], [], aux=1, imm=0)
            if "noinc" in parts:
                self.barrier_object(item, "arrive", self.literal(1, U32), -1)
            return
        if parts[:2] != ("cp", "async") or parts[2] == "bulk":
            raise NotNative(instruction.opcode)
        if parts[2] in ("commit_group", "wait_group", "wait_all"):
            most = instruction.src[0] if parts[2] == "wait_group" else None
            allowed = most.value if isinstance(most, Immediate) else -1 if parts[2] == "commit_group" else 0
            self.emit(table.EFFECT_NUMBERS["copy_wait"], [], [], aux=int(parts[2] != "wait_group"), imm=allowed)
            return
        size = instruction.src[2]
        if not isinstance(size, Immediate) or size.value not in (4, 8, 16):
            raise NotNative(instruction.opcode)
        some, kind = -1, 0
        if len(instruction.src) > 3:  # a source size, or a predicate to ignore the source
            kind = 2 if self.stored_dtype(instruction.src[3]) == BOOL else 1
            some = self.source(instruction.src[3], BOOL if kind == 2 else U32)[0]
        to, to_offset, to_wide = self.place(instruction.src[0])
        base, offset, wide = self.place(instruction.src[1])
        if not wide:
            raise NotNative(instruction.opcode)
        self.emit(table.EFFECT_NUMBERS["copy_async"], [], [base, to, -1, -1, some], aux=to_wide,
                  imm=size.value << 8 | kind, raw={2: offset & NONE, 3: to_offset & NONE})  # fmt: skip

    # -- warps ------------------------------------------------------------------------------------------------

    def native_warp_barrier(self, item: Item, segment: Any) -> None:
        self.member_mask(item.instruction.src[0], segment)
        self.emit(table.EFFECT_NUMBERS["join"], [], [])

    def native_shuffle(self, item: Item, segment: Any) -> None:
        instruction = item.instruction
        parts = instruction.parts
        if parts[1] != "sync" or parts[2] not in _SHUFFLES or parts[-1] != "b32":
            raise NotNative(instruction.opcode)
        self.member_mask(instruction.src[3], segment)
        slots = [self.plain_source(instruction.src[k], U32) for k in range(3)]
        first = instruction.dst[0]
        flag = self.target(instruction.dst[1], BOOL)[0] if len(instruction.dst) > 1 else -1
        value = -1 if isinstance(first, Raw) else self.target(first, U32)[0]
        self.emit(table.EFFECT_NUMBERS["shuffle"], [value, flag], slots, aux=_SHUFFLES[parts[2]])

    def native_vote(self, item: Item, segment: Any) -> None:
        instruction = item.instruction
        parts = instruction.parts
        if parts[1] != "sync" or parts[2] not in _VOTES:
            raise NotNative(instruction.opcode)
        mask = self.member_mask(instruction.src[1], segment)
        source = instruction.src[0]
        negated = isinstance(source, Register) and source.negated
        if isinstance(source, Register):
            slot = self.register(source.name)[0]
            self.widths[slot] = 4
        else:
            slot = self.literal(1 if isinstance(source, Immediate) and source.value else 0, BOOL)
        target = self.target(instruction.dst[0], U32 if parts[2] == "ballot" else BOOL)[0]
        self.emit(table.EFFECT_NUMBERS["vote"], [target], [slot, mask], aux=_VOTES[parts[2]],
                  imm=NONE if negated else 0)  # fmt: skip

    def native_match(self, item: Item, segment: Any) -> None:
        instruction = item.instruction
        parts = instruction.parts
        mask = self.member_mask(instruction.src[1], segment)
        size = int(TOKENS[parts[-1]][1:])
        value = self.plain_source(instruction.src[0], UNSIGNED[size])
        flag = self.target(instruction.dst[1], BOOL)[0] if len(instruction.dst) > 1 else -1
        target = self.target(instruction.dst[0], U32)[0]
        if parts[1] not in ("any", "all") or size not in (4, 8):
            raise NotNative(instruction.opcode)
        self.emit(table.EFFECT_NUMBERS[f"match_{size}"], [target, flag], [value, mask], aux=int(parts[1] == "all"))

    def native_redux(self, item: Item, segment: Any) -> None:
        instruction = item.instruction
        parts = instruction.parts
        if len(parts) != 4 or parts[2] not in ("add", "min", "max", "and", "or", "xor") or TOKENS[parts[3]][1:] != "4":
            raise NotNative(instruction.opcode)
        mask = self.member_mask(instruction.src[1], segment)
        value = self.plain_source(instruction.src[0], U32)
        target = self.target(instruction.dst[0], U32)[0]
        self.emit(table.EFFECT_NUMBERS["redux"], [target], [value, mask], aux=_ATOMICS[parts[2]],
                  imm=_ATOMIC_TYPES[parts[-1]])  # fmt: skip

    def native_activemask(self, item: Item, segment: Any) -> None:
        self.emit(table.EFFECT_NUMBERS["activemask"], [self.target(item.instruction.dst[0], U32)[0]], [])

    def native_elect(self, item: Item, segment: Any) -> None:
        instruction = item.instruction
        mask = self.member_mask(instruction.src[0], segment)
        first = instruction.dst[0]
        leader = -1 if isinstance(first, Raw) else self.target(first, U32)[0]
        flag = self.target(instruction.dst[1], BOOL)[0] if len(instruction.dst) > 1 else -1
        self.emit(table.EFFECT_NUMBERS["elect"], [leader, flag], [mask])

    # -- matrices ---------------------------------------------------------------------------------------------

    def matrix(self, effect: str, d: Sequence[int], s: Sequence[int], **more: Any) -> None:
        self.emit(table.EFFECT_NUMBERS[effect], d, s, name=self.item.instruction.opcode, **more)

    def native_mma(self, item: Item, segment: Any) -> None:
        self.lower_mma(item, segment)

    def product(
        self, item: Item, shape: str, kinds: tuple[str, str, str, str],
        places: tuple[tensor.Places, tensor.Places, tensor.Places],
    ) -> None:  # fmt: skip
        self.check_product(item, kinds)
        a, b, c, d = self.product_registers(item, kinds, places)
        for slot in (*a, *b, *c, *d):
            self.widths.setdefault(slot, 8 if kinds[0] == "f64" else 4)
        saturate = "satfinite" in item.instruction.parts
        extra = matrices.product(tensor.sizes(shape), kinds, places, saturate, (d, a, b, c))
        self.matrix("product", [], [], extra=extra)

    def native_wmma(self, item: Item, segment: Any) -> None:
        self.lower_wmma(item, segment)

    def transfer(self, item: Item, transfer: tensor.Transfer, count: int) -> None:
        instruction = item.instruction
        loads = instruction.parts[1] == "load"
        operand = instruction.dst[0] if loads else instruction.src[1]
        rest = instruction.src[1 if loads else 2 :]
        word = U64 if transfer.kind == "f64" else U32
        base, offset, wide = self.place(instruction.src[0])
        stride = self.plain_source(rest[0], U32) if rest else -1
        slots = self.results_as(operand, word)[0] if loads else self.registers_as(operand, word)
        if len(slots) != count or not -(2**31) <= offset < 2**31:
            raise UnknownForm
        extra = matrices.fragment(transfer.shape, transfer.kind, transfer.by_row, transfer.places, slots)
        flags = self.flags(transfer.space, wide) | (_CACHED if loads else 0)
        self.matrix("load_fragment" if loads else "store_fragment", [], [base, stride], aux=flags, extra=extra,
                    raw={4: offset & NONE})  # fmt: skip

    def native_ldmatrix(self, item: Item, segment: Any) -> None:
        self.lower_ldmatrix(item, segment)

    def move_matrices(self, item: Item, count: int, transposed: bool, space: str) -> None:
        instruction = item.instruction
        loads = instruction.parts[0] == "ldmatrix"
        base, offset, wide = self.place(instruction.src[0])
        if loads:
            slots = self.results_as(instruction.dst[0], U32)[0]
        else:
            slots = self.registers_as(instruction.src[1], U32)
        if len(slots) != count or not -(2**31) <= offset < 2**31:
            raise UnknownForm
        extra = matrices.Extra(head=(count, int(transposed)), slots=tuple(slots))
        self.matrix("load_matrices" if loads else "store_matrices", [], [base], aux=self.flags(space, wide),
                    extra=extra, raw={4: offset & NONE})  # fmt: skip

    def native_movmatrix(self, item: Item, segment: Any) -> None:
        instruction = item.instruction
        if instruction.parts[1:] != ("sync", "aligned", "m8n8", "trans", "b16"):
            raise NotNative(instruction.opcode)
        source = self.plain_source(instruction.src[0], U32)
        self.matrix("transpose", [self.target(instruction.dst[0], U32)[0]], [source])

    def native_mbarrier(self, item: Item, segment: Any) -> None:
        """Barrier objects; accesses to them are not counted, as in the numpy engine."""
        instruction = item.instruction
        parts = instruction.parts
        operation = parts[1]
        if set(parts[2:]) - self._BARRIER_WORDS:
            raise NotNative(instruction.opcode)
        if operation == "inval":
            return
        if operation == "pending_count":
            state = self.plain_source(instruction.src[0], U64)
            self.move("@missing", self.target(instruction.dst[0], U32)[0], state)
            return
        rest = instruction.src[1:]
        target = -1
        if operation in ("test_wait", "try_wait"):
            self.program.waits = True
            operation = "test_parity" if "parity" in parts else "test"
            amount = self.plain_source(rest[0], U32 if "parity" in parts else U64)
            target = self.target(instruction.dst[0], BOOL)[0]
        else:
            if operation == "arrive" and "expect_tx" in parts:
                operation = "arrive_expect"
            amount = self.plain_source(rest[0], U32) if rest else self.literal(1, U32)
            if instruction.dst and not isinstance(instruction.dst[0], Raw):
                target = self.target(instruction.dst[0], U64)[0]
        self.barrier_object(item, operation, amount, target)

    def barrier_object(self, item: Item, operation: str, amount: int, target: int) -> None:
        instruction = item.instruction
        base, offset, wide = self.place(instruction.src[0])
        if operation not in _BARRIER_OPERATIONS or not -(2**31) <= offset < 2**31:
            raise NotNative(instruction.opcode)
        flags = self.flags(space_of(instruction.parts), wide) | _POLLS | _UNCOUNTED
        self.emit(table.EFFECT_NUMBERS["barrier_object"], [target], [base, amount], aux=flags,
                  imm=_BARRIER_OPERATIONS[operation], raw={4: offset & NONE})  # fmt: skip

    def native_builtin_call(self, item: Item, segment: Any) -> None:
        """vprintf and __assertfail; entering a device function needs no work, its code follows."""
        instruction = item.instruction
        callee = instruction.src[0]
        assert isinstance(callee, Symbol)
        if callee.name not in BUILTINS:
            return
        pieces = []
        for operand in instruction.src[1:3]:
            if not isinstance(operand, Symbol):
                raise NotNative(instruction.opcode)
            slot = self.call_piece(storage(item.context, operand.name), 0, 8)
            self.widths[slot] = 8
            self.uses.add(slot)
            pieces.append(slot)
        result = -1
        if instruction.dst:
            symbol = instruction.dst[0]
            if not isinstance(symbol, Symbol):
                raise NotNative(instruction.opcode)
            result = self.call_piece(storage(item.context, symbol.name), 0, 4)
            self.widths[result] = 4
            self.defines.add(result)
        self.emit(table.EFFECT_NUMBERS["print"], [result], pieces, aux=int(callee.name == "__assertfail"))


def _dtype(token: str) -> np.dtype[Any]:
    return BOOL if token in ("p", "m") else UNSIGNED[int(token[1:])]


# -- packing ------------------------------------------------------------------------------------------------------


def _packed(lowering: NativeLowering) -> NativeProgram:
    """Give every slot its place and turn records into arrays."""
    program = lowering.program
    widths = lowering.widths
    for slot, _, dtype in program.parameters:
        widths[slot] = _lane_bytes(dtype)
    for slot, _, _ in program.symbols:
        widths[slot] = 8
    launch_slots = [slot for slot, _ in program.constants]
    launch_slots += [slot for slot, _, _ in program.parameters] + [slot for slot, _, _ in program.symbols]
    launch_slots += list(program.launch_values.values())
    constants: dict[int, tuple[int, int]] = {}
    at = 0
    for slot in launch_slots:
        constants[slot] = (at, widths[slot])
        at += 32 * widths[slot]
    constant_bytes = at
    operands: dict[int, int] = {slot: place << 1 | 1 for slot, (place, _) in constants.items()}
    register_bytes = _assign_registers(lowering, operands)

    def encoded(slot: int) -> int:
        return NONE if slot < 0 else operands[slot]

    line_numbers: dict[int, int] = {}

    def line_index(line: int | None) -> int:
        return -1 if line is None else line_numbers.setdefault(line, len(line_numbers))

    rows: list[tuple[Any, ...]] = []
    extra: list[int] = []
    names: dict[int, str] = {}
    segments: list[tuple[Any, ...]] = []
    barriers: list[tuple[Any, ...]] = []
    barrier_segments: list[int] = []
    exits = 0
    most = 0
    for segment in program.segments:
        first = len(rows)
        for order, record in enumerate(segment.operations):
            assert isinstance(record, Record)
            imm = record.imm
            if record.extra is not None:
                imm = len(extra)
                extra += [*record.extra.head, *map(encoded, record.extra.slots), *record.extra.tail]
            if record.name:
                names[len(rows)] = record.name
            sources = [encoded(slot) for slot in record.s] + [NONE] * (5 - len(record.s))
            for index, value in record.raw.items():
                sources[index] = value
            targets = [encoded(slot) for slot in record.d] + [NONE] * (4 - len(record.d))
            rows.append((record.op, encoded(record.pred), NONE if record.negated else 0, targets, sources, record.aux,
                         line_index(record.line), order, len(rows), imm))  # fmt: skip
        most = max(most, len(segment.operations))
        flags = (_WARP_WIDE if segment.warp_wide else 0) | (_EXITS if segment.exits else 0)
        flags |= _COUNTED if segment.counted_branch else 0
        exit_bit = -1
        if segment.exits:
            exit_bit = exits
            exits += 1
        barrier = -1
        if segment.kind == BARRIER:
            call = segment.barrier
            assert call is not None
            barrier = len(barriers)
            barrier_segments.append(segment.number)
            bits = (_PLAIN if call.plain else 0) | (_ARRIVE if call.arrive_only else 0)
            bits |= (_ALIGNED if call.aligned else 0) | (_REDUCES if call.reduces else 0)
            bits |= _NEGATED if call.negated else 0
            barriers.append(
                (NONE if call.number is None else encoded(call.number), NONE if call.count is None else
                 encoded(call.count), encoded(call.source), encoded(call.target), bits,
                 {"and": 0, "or": 1, "popc": 2}.get(call.operation, 0))
            )  # fmt: skip
        branch = segment.kind == BRANCH
        line = segment.last_line if segment.kind == BARRIER or not segment.mix else segment.mix[-1][0]
        segments.append(
            (first, len(rows), segment.kind, segment.target, encoded(segment.predicate) if branch else NONE,
             NONE if segment.negated else 0, segment.weight, flags,
             NONE if segment.mask is None else encoded(segment.mask), barrier, line_index(line), exit_bit)
        )  # fmt: skip
    if exits > _MOST_EXITS:
        raise NotNative(f"more than {_MOST_EXITS} exits")
    reach = np.zeros((max(1, len(barriers)), len(program.segments)), np.uint8)
    for index, number in enumerate(barrier_segments):
        reach[index, list(program.reachable(number))] = 1
    live = set(program.segments[0].live)
    fixed = {slot for slot in live if slot not in constants and slot not in program.specials.values()}
    zeros = [operands[slot] | (widths[slot] == 8) << 31 for slot in sorted(fixed)]
    return NativeProgram(
        program=program,
        records=np.array(rows, RECORD),
        segments=np.array(segments, SEGMENT),
        barriers=np.array(barriers, BARRIER_RECORD),
        reach=reach,
        specials=np.array([(_SPECIAL_CODES[n], operands[s]) for n, s in program.specials.items()], np.int32).ravel(),
        zeros=np.array(zeros, np.uint32),
        extra=np.array(extra or [0], np.uint32),
        names=MappingProxyType(names),
        functions=tuple(lowering.functions),
        constant_slots=MappingProxyType(constants),
        constant_bytes=constant_bytes,
        register_bytes=register_bytes,
        lines=tuple(line_numbers),
        max_order=most,
    )


def _assign_registers(lowering: NativeLowering, operands: dict[int, int]) -> int:
    """Byte offsets in the register file, shared by slots that are needed in one segment only; the file's size."""
    program = lowering.program
    widths = lowering.widths
    fixed: set[int] = set(program.specials.values())
    for segment in program.segments:
        fixed.update(segment.live)
        fixed.add(segment.predicate)
        if segment.barrier is not None:
            call = segment.barrier
            fixed.update(s for s in (call.number, call.count, call.source, call.target) if s is not None)
    home: dict[int, int] = {}
    for segment in program.segments:
        for record in segment.operations:
            for slot in record.slots:  # type: ignore[attr-defined]
                if slot >= 0 and home.setdefault(slot, segment.number) != segment.number:
                    fixed.add(slot)
    size = 0
    for slot in sorted(fixed):
        if slot >= 0 and slot not in operands:
            operands[slot] = size << 1
            size += 32 * widths[slot]
    highest = size
    for segment in program.segments:
        last: dict[int, int] = {}
        for index, record in enumerate(segment.operations):
            for slot in record.slots:  # type: ignore[attr-defined]
                last[slot] = index
        free: dict[int, list[int]] = {4: [], 8: []}
        top = size
        for index, record in enumerate(segment.operations):
            touched = [s for s in dict.fromkeys(record.slots) if s >= 0]  # type: ignore[attr-defined]
            for slot in touched:
                if slot not in operands:
                    width = widths[slot]
                    if free[width]:
                        place = free[width].pop()
                    else:
                        place, top = top, top + 32 * width
                    operands[slot] = place << 1
            for slot in touched:
                if last[slot] == index and slot not in fixed and not operands[slot] & 1:
                    free[widths[slot]].append(operands[slot] >> 1)
        highest = max(highest, top)
    return highest
