"""Lowering of what threads of a warp do together, of matrix instructions and of built-in calls."""

from __future__ import annotations

from typing import Any

import numpy as np

from optiml.ptx import tensor, warp
from optiml.ptx.closures import (
    UNSIGNED,
    bound,
)
from optiml.ptx.emit import Emitter, space_of
from optiml.ptx.inline import BUILTINS, Item, storage
from optiml.ptx.memory import Step
from optiml.ptx.numerics import BOOL, I32, U32, U64
from optiml.ptx.opcodes import DTYPES, TOKENS, UnknownForm
from optiml.ptx.parse import (
    Immediate,
    Operand,
    Raw,
    Register,
    Symbol,
    Vector,
)
from optiml.ptx.printing import print_formatted
from optiml.ptx.program import Segment


class Collectives(Emitter):
    """shfl, vote, match, redux, activemask, elect, mma, wmma, ldmatrix, stmatrix, movmatrix, vprintf."""

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

    def lower_warp_barrier(self, item: Item, segment: Segment) -> None:
        self.member_mask(item.instruction.src[0], segment)

    def lower_shuffle(self, item: Item, segment: Segment) -> None:
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

    def lower_vote(self, item: Item, segment: Segment) -> None:
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
            self.steps.append(bound(None, to, convert, [(into, None)]))

    def lower_match(self, item: Item, segment: Segment) -> None:
        instruction = item.instruction
        parts = instruction.parts
        mask = self.member_mask(instruction.src[1], segment)
        value = self.plain_source(instruction.src[0], UNSIGNED[int(TOKENS[parts[-1]][1:])])
        flag = self.target(instruction.dst[1], BOOL)[0] if len(instruction.dst) > 1 else None
        to, convert = self.target(instruction.dst[0], U32)
        into = to if convert is None else self.new_slot()
        if parts[1] not in ("any", "all"):
            raise UnknownForm
        self.steps.append(warp.match(parts[1], into, flag, value, mask))
        if convert is not None:
            self.steps.append(bound(None, to, convert, [(into, None)]))

    def lower_redux(self, item: Item, segment: Segment) -> None:
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
            self.steps.append(bound(None, to, convert, [(into, None)]))

    def lower_activemask(self, item: Item, segment: Segment) -> None:
        to, convert = self.target(item.instruction.dst[0], U32)
        into = to if convert is None else self.new_slot()
        self.steps.append(warp.active_mask(into))
        if convert is not None:
            self.steps.append(bound(None, to, convert, [(into, None)]))

    def lower_elect(self, item: Item, segment: Segment) -> None:
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
                after.append(bound(None, to, convert, [(slots[-1], None)]))
        return slots, after

    def lower_mma(self, item: Item, segment: Segment) -> None:
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
        self, item: Item, shape: str, kinds: tuple[str, str, str, str],
        places: tuple[tensor.Places, tensor.Places, tensor.Places],
    ) -> None:  # fmt: skip
        """Append the step of a matrix product."""
        instruction = item.instruction
        self.check_product(item, kinds)
        product = tensor.Product(
            name=instruction.opcode,
            kinds=kinds,
            sizes=tensor.sizes(shape),
            places=places,
            saturate="satfinite" in instruction.parts,
            line=instruction.line,
        )
        a, b, c, d = self.product_registers(item, kinds, places)
        self.steps.append(tensor.multiply(product, d, a, b, c))
        self.steps += self.after

    def check_product(self, item: Item, kinds: tuple[str, str, str, str]) -> None:
        """Refuse types of D, A, B and C that do not go together."""
        accumulators = {"f64": {"f64"}, "tf32": {"f32"}, "bf16": {"f32"}, "s8": {"s32"}, "u8": {"s32"}}
        if not {kinds[0], kinds[3]} <= accumulators.get(kinds[1], {"f32", "f16"}) or len(item.instruction.src) != 3:
            raise UnknownForm

    def product_registers(
        self, item: Item, kinds: tuple[str, str, str, str],
        places: tuple[tensor.Places, tensor.Places, tensor.Places],
    ) -> tuple[list[int], list[int], list[int], list[int]]:  # fmt: skip
        """Slots of A, B, C and D; the conversions of D are left in `after`."""
        word = U64 if kinds[0] == "f64" else U32
        a, b, c = (self.registers_as(operand, word) for operand in item.instruction.src)
        d, self.after = self.results_as(item.instruction.dst[0], word)
        for slots, place, kind in ((d, places[2], kinds[0]), (a, places[0], kinds[1]), (b, places[1], kinds[2]),
                                   (c, places[2], kinds[3])):  # fmt: skip
            if len(slots) * word.itemsize != place[0].shape[1] * tensor.ELEMENTS[kind].bits.itemsize:
                raise UnknownForm
        return a, b, c, d

    def lower_wmma(self, item: Item, segment: Segment) -> None:
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
        space = space_of(parts)
        if parts[3:5] != ("sync", "aligned") or layout not in ("row", "col") or space not in (
            "global", "shared", "generic"
        ):  # fmt: skip
            raise UnknownForm
        count = tensor.wmma_registers(fragment, shape, kind)
        transfer = tensor.Transfer(
            name=instruction.opcode,
            shape=tensor.wmma_shape(fragment, shape),
            kind=kind,
            by_row=layout == "row",
            places=tensor.wmma_places(fragment, shape, kind),
            space=space,
            line=instruction.line,
        )
        self.transfer(item, transfer, count)

    def transfer(self, item: Item, transfer: tensor.Transfer, count: int) -> None:
        """Append the step of a wmma load or store of `count` registers."""
        instruction = item.instruction
        word = U64 if transfer.kind == "f64" else U32
        base, offset = self.address(instruction.src[0])
        if instruction.parts[1] == "load":
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

    def lower_ldmatrix(self, item: Item, segment: Segment) -> None:
        """ldmatrix and stmatrix of 8x8 matrices of 16-bit elements."""
        instruction = item.instruction
        parts = instruction.parts
        matrices = {"x1": 1, "x2": 2, "x4": 4}[parts[4]]
        known = {"trans", "shared", "shared::cta"}
        if parts[1:4] != ("sync", "aligned", "m8n8") or set(parts[5:-1]) - known or parts[-1] != "b16":
            raise UnknownForm
        self.move_matrices(item, matrices, "trans" in parts, space_of(parts))

    def move_matrices(self, item: Item, matrices: int, transposed: bool, space: str) -> None:
        """Append the step of an ldmatrix or stmatrix."""
        instruction = item.instruction
        base, offset = self.address(instruction.src[0])
        if instruction.parts[0] == "ldmatrix":
            slots, after = self.results_as(instruction.dst[0], U32)
            step = tensor.load_matrices(instruction.opcode, slots, base, offset, transposed, space, instruction.line)
            self.steps += [step, *after]
        else:
            slots = self.registers_as(instruction.src[1], U32)
            self.steps.append(
                tensor.store_matrices(instruction.opcode, slots, base, offset, transposed, space, instruction.line)
            )
        if len(slots) != matrices:
            raise UnknownForm

    def lower_movmatrix(self, item: Item, segment: Segment) -> None:
        instruction = item.instruction
        if instruction.parts[1:] != ("sync", "aligned", "m8n8", "trans", "b16"):
            raise UnknownForm
        source = self.plain_source(instruction.src[0], U32)
        slots, after = self.results_as(instruction.dst[0], U32)
        self.steps += [tensor.transpose_matrix(instruction.opcode, slots[0], source, instruction.line), *after]

    # -- calls ------------------------------------------------------------------------------------------------

    def lower_builtin_call(self, item: Item, segment: Segment) -> None:
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
            slot = self.call_piece(storage(item.context, operand.name), 0, 8)
            self.uses.add(slot)
            pieces.append(slot)
        result = -1
        if instruction.dst:
            symbol = instruction.dst[0]
            if not isinstance(symbol, Symbol):
                raise UnknownForm
            result = self.call_piece(storage(item.context, symbol.name), 0, 4)
            self.defines.add(result)
        self.steps.append(print_formatted(callee.name, pieces, result, instruction.line))
