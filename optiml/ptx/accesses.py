"""Lowering of loads, stores, atomics and asynchronous copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from optiml.ptx import atomics, mbarrier, memory
from optiml.ptx.closures import (
    UNSIGNED,
    Convert,
    Frame,
    bound,
    note_poll,
    reading,
    whole_code,
)
from optiml.ptx.counters import record_memory
from optiml.ptx.emit import Emitter, space_of
from optiml.ptx.inline import Item, storage
from optiml.ptx.memory import CODE, Step
from optiml.ptx.numerics import BOOL, I64, U8, U32, U64
from optiml.ptx.opcodes import DTYPES, TOKENS, UnknownForm
from optiml.ptx.parse import (
    Address,
    Immediate,
    Operand,
    Symbol,
    Vector,
    registers_in,
)
from optiml.ptx.program import Segment
from optiml.ptx.simt import Group


class Accesses(Emitter):
    """ld, st, atom, red, cp.async and what only orders them."""

    _LOAD_WORDS = frozenset(
        {
            "weak", "volatile", "relaxed", "acquire", "release", "cta", "gpu", "sys", "cluster", "global", "shared",
            "shared::cta", "local", "const", "param", "nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "v2", "v4",
            "L1::no_allocate", "L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last",
            "L2::64B", "L2::128B", "L2::256B", "L2::cache_hint", "param::entry", "param::func", "mmio",
        }
    )  # fmt: skip

    def memory_words(self, item: Item) -> tuple[str, int, str]:
        """(space, vector length, element type) of ld or st, all modifiers known."""
        parts = item.instruction.parts
        if set(parts[1:-1]) - self._LOAD_WORDS:
            raise UnknownForm
        lanes = 4 if "v4" in parts else 2 if "v2" in parts else 1
        return space_of(parts), lanes, parts[-1]

    def waits_on(self, parts: tuple[str, ...]) -> None:
        """Note a read that may poll what other threads write."""
        if {"volatile", "relaxed", "acquire", "cv", "mmio"} & set(parts):
            self.program.waits = True
            self.steps.append(note_poll)

    def record(self, kind: str, space: str, address: int, offset: int, nbytes: int) -> None:
        """In a counting program, count the access before it is made."""
        if self.counting:
            parts = self.item.instruction.parts
            cached = kind == "load" and not {"cg", "cv", "volatile", "relaxed", "acquire"} & set(parts)
            self.steps.append(record_memory(kind, space, address, offset, nbytes, self.item.instruction.line, cached))

    def lower_load(self, item: Item, segment: Segment) -> None:
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
                self.steps.append(bound(None, to, convert, [(into, None)]))
            return
        whole = self.new_slot()
        aligned = self.is_aligned(address, nbytes)
        self.steps.append(self.loader(whole, base, offset, whole_code(nbytes), space, aligned))
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
        return 1 << self.registers.zero_bits_of(address.base, self.item, self.registers.zero_bits) >= nbytes

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
                slot = self.call_piece(storage(context, name), at, piece)
                self.uses.add(slot)
                to, convert = self.target(target, dtype)
                before = reading(UNSIGNED[piece], dtype)
                self.steps.append(bound(before, to, convert, [(slot, None)]))
                continue
            self.assign(target, slot, dtype)

    def parameter(self, offset: int, dtype: np.dtype[Any]) -> int:
        for slot, at, kind in self.program.parameters:
            if at == offset and kind == dtype:
                return slot
        slot = self.new_slot()
        self.program.parameters.append((slot, offset, dtype))
        return slot

    def lower_store(self, item: Item, segment: Segment) -> None:
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
            dtype = stored if stored is not None and stored.itemsize == piece else UNSIGNED[piece]
            slot, convert = self.source(operand, dtype)  # type: ignore[arg-type]
            aligned = self.is_aligned(address, piece)
            self.steps.append(self.storer(base, offset, slot, convert, CODE[dtype], space, aligned))
            return
        element = UNSIGNED[piece]
        whole = self.new_slot()
        slots = [self.source(operand, element) for operand in sources]  # type: ignore[arg-type]
        code = whole_code(piece * lanes)
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

    def storer(self, base: int, offset: int, slot: int, convert: Convert, code: int, space: str, aligned: bool) -> Step:
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
        whole = storage(self.item.context, address.base.name)
        for index, operand in enumerate(sources):
            if operand is None:
                raise UnknownForm
            slot, convert = self.source(operand, UNSIGNED[piece])
            to = self.call_piece(whole, start + index * piece, piece)
            self.defines.add(to)
            self.steps.append(bound(convert, to, None, [(slot, None)]))

    _ATOMIC_WORDS = frozenset(
        {
            "relaxed", "acquire", "release", "acq_rel", "cta", "gpu", "sys", "cluster", "global", "shared",
            "shared::cta", "noftz", "add", "min", "max", "and", "or", "xor", "inc", "dec", "exch", "cas",
            "L2::cache_hint",
        }
    )  # fmt: skip

    def lower_atomic(self, item: Item, segment: Segment) -> None:
        instruction = item.instruction
        parts = instruction.parts
        if set(parts[1:-1]) - self._ATOMIC_WORDS:
            raise UnknownForm
        operations = [p for p in parts[1:-1] if p in atomics.OPERATIONS]
        found = atomics.combination(operations[0], parts[-1]) if len(operations) == 1 else None
        if found is None:
            raise UnknownForm
        dtype, combine = found
        space = space_of(parts)
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
            if self.registers.read_count[item.context.prefix + name]:
                into = to if convert is None else self.new_slot()
        start = self.shared_slot if space == "shared" else None
        self.steps.append(atomics.atomic(into, base, offset, sources, dtype, combine, space, start, instruction.line))
        if into is not None and convert is not None:
            self.steps.append(bound(None, to, convert, [(into, None)]))

    def lower_copy_async(self, item: Item, segment: Segment) -> None:
        """cp.async copies at once; commit and wait have nothing left to do."""
        instruction = item.instruction
        parts = instruction.parts
        if parts[:4] == ("cp", "async", "mbarrier", "arrive"):
            if "noinc" in parts:  # the copies are done, so this is an arrival; without .noinc it would cancel out
                base, offset = self.address(instruction.src[0])
                count = self.literal(1, U32, 1)
                self.steps.append(
                    mbarrier.arrive(None, base, offset, count, space_of(parts), mbarrier.arrived, instruction.line)
                )
            return
        if parts[:2] != ("cp", "async") or parts[2] == "bulk":
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
        code = whole_code(size.value)
        value = self.new_slot()
        if len(instruction.src) > 3:
            self.copy_some(item, (to, to_offset), (base, offset), size.value)
            return
        self.record("load", "global", base, offset, size.value)
        self.record("store", "shared", to, to_offset, size.value)
        self.steps.append(memory.load_global(value, base, offset, code, "global", line, False))
        self.steps.append(memory.store_window(to, to_offset, value, None, code, shared, "shared", line, False))

    def copy_some(self, item: Item, to: tuple[int, int], base: tuple[int, int], size: int) -> None:
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
            frame[value] = octets.view(memory.VIEW_DTYPES[whole_code(size)]).reshape(-1)

        self.steps.append(run)
        self.steps.append(
            memory.store_window(to[0], to[1], value, None, whole_code(size), shared, "shared", line, False)
        )

    _BARRIER_WORDS = frozenset(
        {
            "shared", "shared::cta", "b64", "release", "acquire", "relaxed", "cta", "parity", "noComplete",
            "expect_tx", "complete_tx",
        }
    )  # fmt: skip

    def lower_mbarrier(self, item: Item, segment: Segment) -> None:
        """Barrier objects."""
        instruction = item.instruction
        parts, line = instruction.parts, instruction.line
        operation = parts[1]
        if set(parts[2:]) - self._BARRIER_WORDS:
            raise UnknownForm
        if operation == "pending_count":
            self.bind(mbarrier.missing, instruction.dst[0], "u4", [(instruction.src[0], "u8")])
            return
        base, offset = self.address(instruction.src[0])
        space = space_of(parts)
        rest = instruction.src[1:]
        if operation == "init":
            self.steps.append(mbarrier.initialise(base, offset, self.plain_source(rest[0], U32), space, line))
        elif operation in mbarrier.CHANGES:
            count = self.plain_source(rest[0], U32) if rest else self.literal(1, U32, 1)
            if operation == "arrive" and "expect_tx" in parts:
                operation = "arrive_expect"
            change = mbarrier.CHANGES[operation]
            self.result(instruction.dst, U64, lambda to: mbarrier.arrive(to, base, offset, count, space, change, line))
        elif operation in ("test_wait", "try_wait"):
            self.program.waits = True
            parity = "parity" in parts
            state = self.plain_source(rest[0], U32 if parity else U64)
            to = self.target(instruction.dst[0], BOOL)[0]
            self.steps.append(mbarrier.test(to, base, offset, state, parity, space, line))
        elif operation != "inval":
            raise UnknownForm

    def result(self, targets: Sequence[Operand], dtype: np.dtype[Any], step: Callable[[int | None], Step]) -> None:
        """Append `step(slot)` and what brings its result into the first target, if there is one."""
        if not targets:
            self.steps.append(step(None))
            return
        to, convert = self.target(targets[0], dtype)
        into = to if convert is None else self.new_slot()
        self.steps.append(step(into))
        if convert is not None:
            self.steps.append(bound(None, to, convert, [(into, None)]))

    def lower_nothing(self, item: Item, segment: Segment) -> None:
        """Fences and hints: threads run in an order that is sequentially consistent anyway."""

    def lower_pause(self, item: Item, segment: Segment) -> None:
        self.steps.append(note_poll)

    def lower_policy(self, item: Item, segment: Segment) -> None:
        target = item.instruction.dst[0]
        self.assign(target, self.literal(0, U64, 1), U64)

    def lower_trap(self, item: Item, segment: Segment) -> None:
        line = item.instruction.line

        def run(frame: Frame, group: Group) -> None:
            memory.raise_fault(group, 0, "trap", "trap: the kernel stopped itself", line=line)

        self.steps.append(run)
