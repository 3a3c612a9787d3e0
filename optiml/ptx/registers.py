"""Decides how registers are stored and what is known of their values before a kernel runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from optiml.ptx import opcodes
from optiml.ptx.closures import (
    trailing_zeros,
)
from optiml.ptx.inline import Block, Context, Inliner, Item, unsupported
from optiml.ptx.numerics import BOOL, F32, F64, I32, U8, U16, U32, U64
from optiml.ptx.opcodes import DTYPES, TOKENS, Pure, UnknownForm
from optiml.ptx.parse import (
    TYPE_BYTES,
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

ALIGNMENT = 16  # bytes; what a program may assume of a pointer parameter, checked at launch
_ALIGNMENT_BITS = 4
_DEFAULT: dict[int, np.dtype[Any]] = {1: U8, 2: U16, 4: I32, 8: U64}
# families through which low zero bits can be followed
_BIT_PRESERVING = frozenset(
    {"mov", "cvta", "cvt", "add", "sub", "mul", "mad", "shl", "and", "or", "xor", "selp", "neg"}
)
WIDE_SPECIALS = frozenset({"%clock64", "%globaltimer", "%gridid"})
# Specials whose value is the same for all threads of a launch; the batch fills the others in.
LAUNCH_SPECIALS = frozenset(
    {f"%{name}.{axis}" for name in ("ntid", "nctaid", "nclusterid") for axis in "xyz"}
    | {f"%cluster_{name}.{axis}" for name in ("nctaid", "ctaid") for axis in "xyz"}
    | {"%envreg1", "%envreg2", "%nwarpid", "%smid", "%nsmid", "%gridid", "%dynamic_smem_size", "%total_smem_size",
       "%cluster_ctarank", "%cluster_nctarank", "%WARP_SZ"}
)  # fmt: skip
THREAD_SPECIALS = frozenset(
    {f"%{name}.{axis}" for name in ("tid", "ctaid") for axis in "xyz"}
    | {"%laneid", "%warpid", "%lanemask_eq", "%lanemask_lt", "%lanemask_le", "%lanemask_gt", "%lanemask_ge"}
)
CLOCKS = frozenset({"%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi"})


class Registers:
    """What is known of the registers of an inlined kernel.

    Attributes:
        dtypes: storage dtype by full name.
        read_count, write_count: how often instructions mention them.
        zero_bits: low bits that are zero in every value of a register.
        rows: the pure operation of each opcode that occurs.
    """

    def __init__(self, module: Module, kernel: Function, inliner: Inliner, aligned: frozenset[int]) -> None:
        self.module = module
        self.kernel = kernel
        self.inliner = inliner
        self.aligned = aligned
        self.dtypes: dict[str, np.dtype[Any]] = {}
        self.read_count: Counter[str] = Counter()
        self.write_count: Counter[str] = Counter()
        self.rows: dict[str, Pure] = {}
        self.item: Item
        self.check(inliner.blocks)
        self.choose_dtypes(inliner.blocks)
        self.zero_bits = self.known_zero_bits(inliner.blocks)

    def check(self, blocks: list[Block]) -> None:
        """Refuse instructions that no table knows, before anything runs."""
        for block in blocks:
            for item in block.items:
                parts = item.instruction.parts
                if opcodes.pure_row(parts) is not None:
                    self.row(item)
                elif not self.known_effect(parts):
                    raise unsupported(item)
                if any(isinstance(o, Raw) and o.text != "_" for o in (*item.instruction.dst, *item.instruction.src)):
                    raise unsupported(item)

    @staticmethod
    def known_effect(parts: tuple[str, ...]) -> bool:
        """Whether a family outside the pure table is one that the lowering builds."""
        family = parts[0]
        if family == "brx" or parts[:2] == ("barrier", "cluster") or "shared::cluster" in parts:
            return False
        return opcodes.effect(parts) is not None or family in opcodes.CONTROL

    def row(self, item: Item) -> Pure:
        opcode = item.instruction.opcode
        row = self.rows.get(opcode)
        if row is None:
            parts = item.instruction.parts
            build = opcodes.pure_row(parts)
            assert build is not None
            try:
                row = build(parts)
            except (UnknownForm, KeyError, IndexError):
                raise unsupported(item) from None
            self.rows[opcode] = row
        if len(item.instruction.dst) != 1:
            raise unsupported(item)
        if len(item.instruction.src) != len(row.inputs):
            raise unsupported(item)
        return row

    def choose_dtypes(self, blocks: list[Block]) -> None:
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

    def note(self, declared: dict[str, str], context: Context, name: str) -> None:
        type_name = context.function.registers.get(name)
        if type_name is not None:
            if type_name == "b128":
                raise unsupported(self.item, "128-bit registers")
            declared[context.prefix + name] = type_name
        elif name.startswith("%") and (name in LAUNCH_SPECIALS or name in THREAD_SPECIALS or name in CLOCKS):
            self.dtypes[context.prefix + name] = U64 if name in WIDE_SPECIALS else U32
        else:
            raise unsupported(self.item, f"register {name}")

    def typed_operands(self, item: Item) -> Iterable[tuple[str, np.dtype[Any], int]]:
        """(register, dtype, weight) wherever an instruction demands a type; reading weighs more than writing."""
        instruction = item.instruction
        parts = instruction.parts
        family = parts[0]
        if opcodes.pure_row(parts) is not None:
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
                raise unsupported(item) from None
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

    def known_zero_bits(self, blocks: list[Block]) -> dict[str, int]:
        """Low bits that are zero in every value a register takes, from all its definitions at once."""
        bits: dict[str, int] = {}
        definitions: list[tuple[str, Item]] = []
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

    def zero_bits_of_result(self, item: Item, bits: Mapping[str, int]) -> int:
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
        if "cc" in parts or family not in _BIT_PRESERVING:
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

    def zero_bits_of(self, operand: Operand, item: Item, bits: Mapping[str, int]) -> int:
        if isinstance(operand, Register):
            return bits.get(item.context.prefix + operand.name, 0)
        if isinstance(operand, Immediate):
            return trailing_zeros(operand.value)
        if isinstance(operand, Symbol):
            offset = self.inliner.local_offsets.get(item.context.prefix + operand.name)
            offset = self.kernel.shared_layout.get(operand.name) if offset is None else offset
            if offset is not None:
                return trailing_zeros(offset + operand.offset)
            if operand.name in self.module.globals:
                return min(trailing_zeros(operand.offset), 8)
        return 0
