"""Lowering of moves, comparisons and address conversions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from optiml.ptx import memory, opcodes
from optiml.ptx import numerics as num
from optiml.ptx.closures import (
    UNSIGNED,
    Array,
    Frame,
    bits_of,
    bound,
    field_of,
)
from optiml.ptx.emit import Emitter
from optiml.ptx.inline import Item
from optiml.ptx.memory import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, WINDOW_BITS
from optiml.ptx.numerics import BOOL, F16, U16, U32, U64
from optiml.ptx.opcodes import DTYPES, TOKENS, UnknownForm
from optiml.ptx.parse import (
    Immediate,
    Operand,
    Raw,
    Register,
    Vector,
)
from optiml.ptx.program import Segment
from optiml.ptx.simt import Group


class Moves(Emitter):
    """mov, setp, lop3, cvta, isspacep, and arithmetic with the carry flag."""

    def lower_mov(self, item: Item, segment: Segment) -> None:
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
            self.steps.append(bound(None, to, convert, [(slot, None)]))
        else:
            dtype = self.stored_dtype(target)
            size = int(TOKENS[kind][1:])
            if dtype is None or dtype.itemsize != size:
                dtype = UNSIGNED[size]
            source = self.resolved(source)
            slot, convert = self.source(source, dtype)
            to, after = self.target(target, dtype)
            self.steps.append(bound(convert, to, after, [(slot, None)]))
            self.pass_on(source, target)
            full = item.context.prefix + target.name if isinstance(target, Register) else ""
            once = self.registers.write_count[full] == 1 and instruction.predicate is None
            if once and isinstance(source, Immediate):
                self.known[full] = Immediate(value=bits_of(source, dtype))

    def unpack(self, source: Operand, kind: str, target: Vector) -> None:
        """mov.b64 {a, b}, c: the parts of a register, lowest first."""
        size = int(TOKENS[kind][1:])
        piece = size // len(target.elements)
        whole, part = UNSIGNED[size], UNSIGNED[piece]
        slot = self.plain_source(source, whole)
        for index, element in enumerate(target.elements):
            if element is None:
                continue
            shift = np.array(8 * piece * index, whole)
            to, convert = self.target(element, part)
            self.steps.append(bound(field_of(shift, part), to, convert, [(slot, None)]))

    def pack(self, source: Vector, kind: str, target: Operand) -> None:
        """mov.b64 c, {a, b}."""
        size = int(TOKENS[kind][1:])
        piece = size // len(source.elements)
        whole, part = UNSIGNED[size], UNSIGNED[piece]
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

    def lower_setp(self, item: Item, segment: Segment) -> None:
        instruction = item.instruction
        (token, _), compare, combine = opcodes.comparison(instruction.parts)
        sources = [(self.resolved(operand), token) for operand in instruction.src[:2]]
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

    def setp_packed(self, item: Item, compare: Callable[..., Array], combine: str) -> None:
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

    def lower_lop3(self, item: Item, segment: Segment) -> None:
        instruction = item.instruction
        table = instruction.src[3]
        combine = instruction.parts[1] if len(instruction.parts) == 3 else ""
        if combine not in ("", "or", "and") or not isinstance(table, Immediate):
            raise UnknownForm
        function = num.lookup3(table.value & 0xFF)
        sources = [(operand, "u4") for operand in instruction.src[:3]]
        if not combine:
            self.bind(function, instruction.dst[0], "u4", sources)
            return
        # d|p: whether any bit of d is set, combined with a predicate; the predicate first, as d may be a source
        join = np.logical_or if combine == "or" else np.logical_and
        flagged = [*sources, (instruction.src[4], "p")]
        first, flag = instruction.dst
        to, convert = self.target(flag, BOOL)
        later = self.new_slot()
        slots = [self.source(operand, DTYPES[token]) for operand, token in flagged]
        self.steps.append(bound(lambda a, b, c, q: join(function(a, b, c) != 0, q), later, None, slots))
        if not isinstance(first, Raw):
            self.bind(function, first, "u4", sources)
        self.steps.append(bound(None, to, convert, [(later, None)]))

    def lower_cvta(self, item: Item, segment: Segment) -> None:
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
            self.steps.append(bound(convert, to, after, [(slot, None)]))
            self.pass_on(source, instruction.dst[0])
            return
        constant = np.array(base, U64)
        if parts[1] == "to":
            self.bind(lambda x: x - constant, instruction.dst[0], "u8", [(source, "u8")])
        else:
            self.bind(lambda x: x + constant, instruction.dst[0], "u8", [(source, "u8")])

    def lower_isspacep(self, item: Item, segment: Segment) -> None:
        space = item.instruction.parts[1].split("::")[0]
        window = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW, "global": 0, "const": 0}[space]
        shift = np.uint64(WINDOW_BITS)

        def inside(x: Array) -> Array:
            found = x >> shift
            if space == "const":
                return np.zeros(len(x), bool)
            return found == np.uint64(window) if window else found >= np.uint64(memory.FIRST_ALLOCATION)

        self.bind(inside, item.instruction.dst[0], "p", [(item.instruction.src[0], "u8")])

    def lower_carry(self, item: Item, segment: Segment) -> None:
        """add, sub and mad with carry: `.cc` writes the carry flag, addc, subc and madc read it."""
        instruction = item.instruction
        parts = instruction.parts
        family = parts[0].removesuffix("c")
        dtype = DTYPES[TOKENS[parts[-1]].replace("w", "u")]
        unsigned = UNSIGNED[dtype.itemsize]
        takes, gives = parts[0] != family, "cc" in parts
        half = next((p for p in parts if p in ("lo", "hi")), "")
        if family not in ("add", "sub", "mad") or set(parts[1:-1]) - {"cc", half} or dtype.itemsize < 4:
            raise UnknownForm
        slots = [self.plain_source(operand, dtype) for operand in instruction.src]
        if len(slots) != (3 if family == "mad" else 2):
            raise UnknownForm
        flag = self.slot(f"{item.context.prefix}%carry")
        if takes:
            self.uses.add(flag)
        if gives:
            self.defines.add(flag)
        to, convert = self.target(instruction.dst[0], unsigned)

        def run(frame: Frame, group: Group) -> None:
            values = [frame[slot] for slot in slots]
            if family == "mad":
                product = num.mul_high(values[0], values[1]) if half == "hi" else np.multiply(values[0], values[1])
                values = [product, values[2]]
            a, b = values[0].view(unsigned), values[1].view(unsigned)
            carry = (frame[flag] != 0).astype(unsigned) if takes else np.zeros(1, unsigned)
            if family == "sub":
                first = a - b
                result = first - carry
                out = (a < b) | (first < carry)
            else:
                first = a + b
                result = first + carry
                out = (first < a) | (result < first)
            if gives:
                frame[flag] = out
            frame[to] = result if convert is None else convert(result)

        self.steps.append(run)
