"""The common ground of the lowering: slots, operands and results of instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from optiml.ptx import opcodes
from optiml.ptx.closures import (
    UNSIGNED,
    Array,
    Convert,
    Frame,
    bits_of,
    bound,
    clock,
    reading,
    viewing,
    widened,
    writing,
)
from optiml.ptx.inline import Inliner, Item, unsupported
from optiml.ptx.memory import Step
from optiml.ptx.numerics import U32, U64
from optiml.ptx.opcodes import DTYPES, UnknownForm
from optiml.ptx.parse import (
    Address,
    Function,
    Immediate,
    Module,
    Operand,
    Register,
    Symbol,
)
from optiml.ptx.program import Program
from optiml.ptx.registers import CLOCKS, LAUNCH_SPECIALS, THREAD_SPECIALS, WIDE_SPECIALS, Registers
from optiml.ptx.simt import Group


def space_of(parts: tuple[str, ...]) -> str:
    """The state space that an opcode names, or "generic"."""
    for part in parts[1:]:
        base = part.split("::")[0]
        if base in ("global", "shared", "local", "const", "param") and part != "shared::cluster":
            return base
    return "generic"


class Emitter:
    """Binds instructions to closures: slots, operands, results; the state of one lowering.

    The lowering sets `item`, calls the method for its opcode, and collects `steps` (closures), `uses` and `defines`
    (slots of registers read and written).
    """

    def __init__(self, module: Module, kernel: Function, counting: bool, aligned: frozenset[int]) -> None:
        self.module = module
        self.kernel = kernel
        self.counting = counting
        self.program = Program()
        self.inliner = Inliner(module, kernel)
        self.program.local_bytes = self.inliner.local_bytes
        self.registers = Registers(module, kernel, self.inliner, aligned)
        self.slots: dict[str, int] = {}
        self.literals: dict[tuple[int, str, int], int] = {}
        self.known: dict[str, Immediate] = {}  # register that is written once, with a literal
        self.fixed: dict[str, int] = {}  # register with one value per launch -> slot of that value, 0-d
        self.flat: dict[int, int] = {}  # slot of a launch value -> slot of the same as a 0-d array
        self.pieces: dict[str, set[tuple[int, int]]] = {}  # call parameter storage -> (offset, size) in use
        self.steps: list[Step] = []
        self.uses: set[int] = set()
        self.defines: set[int] = set()
        self.item: Item

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
        return found, self.registers.dtypes[full]

    def special(self, name: str) -> tuple[int, np.dtype[Any]]:
        dtype = U64 if name in WIDE_SPECIALS else U32
        slot = self.slot(name)
        if name in LAUNCH_SPECIALS:
            self.program.launch_values[name] = slot
        elif name in CLOCKS:
            self.steps.append(clock(slot, dtype, high=name.endswith("_hi")))
            self.defines.add(slot)
        elif name in THREAD_SPECIALS:
            self.program.specials[name] = slot
            self.uses.add(slot)
        else:
            raise unsupported(self.item, f"special register {name}")
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
            if dimensions == 0 and full in self.fixed and self.registers.dtypes[full] == dtype and not operand.negated:
                return self.fixed[full], None
            slot, stored = self.register(operand.name)
            convert = reading(stored, dtype)
            if operand.negated:
                return slot, np.logical_not if convert is None else convert
            return slot, convert
        if isinstance(operand, Immediate):
            return self.literal(bits_of(operand, dtype), dtype, dimensions), None
        if isinstance(operand, Symbol):
            slot, stored = self.symbol(operand)
            return slot, reading(stored, dtype)
        raise unsupported(self.item)

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
            raise unsupported(self.item)
        full = self.item.context.prefix + operand.name
        slot = self.slot(full)
        self.defines.add(slot)
        return slot, writing(dtype, self.registers.dtypes[full])

    def stored_dtype(self, operand: Operand) -> np.dtype[Any] | None:
        """Storage dtype of a register operand."""
        if isinstance(operand, Register):
            return self.registers.dtypes.get(self.item.context.prefix + operand.name)
        return None

    def symbol(self, symbol: Symbol) -> tuple[int, np.dtype[Any]]:
        """Slot of a symbol's address within its own space (shared, local) or of its generic address (global)."""
        context = self.item.context
        name = symbol.name
        local = self.inliner.local_offsets.get(context.prefix + name)
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
        raise unsupported(self.item, f"address of {name}")

    def address(self, operand: Operand) -> tuple[int, int]:
        """Slot of the base of a memory operand, as unsigned, and the constant to add."""
        if not isinstance(operand, Address):
            raise unsupported(self.item)
        base = operand.base
        if base is None:
            return self.literal(operand.offset, U64, 1), 0
        if isinstance(base, Symbol):
            return self.symbol(base)[0], operand.offset
        slot, stored = self.register(base.name)
        unsigned = UNSIGNED[stored.itemsize]
        if stored != unsigned:
            slot = self.converted(slot, viewing(unsigned))
        return slot, operand.offset

    def pure(self, item: Item) -> None:
        instruction = item.instruction
        row = self.registers.rows[instruction.opcode]
        sources = list(instruction.src)
        if instruction.parts[0] in ("shl", "shr") and isinstance(sources[1], Immediate):
            row = opcodes.shift_by_constant(instruction.parts)
            sources[1] = Immediate(value=min(sources[1].value & 0xFFFFFFFF, 127))
        inputs = list(row.inputs)
        for index, operand in enumerate(sources):
            resolved = self.resolved(operand)
            if row.wide_literals and isinstance(resolved, Immediate):
                inputs[index] = "f8"
                resolved = widened(resolved)
            sources[index] = resolved
        self.bind(row.apply, instruction.dst[0], row.output, list(zip(sources, inputs, strict=True)))

    def resolved(self, operand: Operand) -> Operand:
        """The literal that a register stands for, if it is written once and with a literal; else the operand."""
        if isinstance(operand, Register) and not operand.negated:
            return self.known.get(self.item.context.prefix + operand.name, operand)
        return operand

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
        self.steps.append(bound(apply, slot, convert, slots))

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
        if self.registers.write_count[full] == 1:
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
                chosen[token] = UNSIGNED[int(token[1:])]
        return chosen

    def assign(self, target: Operand, slot: int, dtype: np.dtype[Any]) -> None:
        """target = the value in `slot`, which has `dtype`."""
        to, convert = self.target(target, dtype)
        self.steps.append(bound(None, to, convert, [(slot, None)]))

    def pass_on(self, source: Operand, target: Operand) -> None:
        """A copy of a launch value is a launch value too."""
        if not isinstance(source, Register) or self.stored_dtype(source) != self.stored_dtype(target):
            return
        flat = self.fixed.get(self.item.context.prefix + source.name)
        if flat is not None:
            original = next(slot for slot, same in self.flat.items() if same == flat)
            self.fix(target, original)

    def call_piece(self, storage: str, offset: int, size: int) -> int:
        """The slot that holds part of a call's parameter, kept as unsigned; pieces must not overlap."""
        pieces = self.pieces.setdefault(storage, set())
        for other, length in pieces:
            if (other, length) != (offset, size) and other < offset + size and offset < other + length:
                raise UnknownForm
        pieces.add((offset, size))
        return self.slot(f"{storage}+{offset}")
