"""Runs a lowered kernel in the native engine and translates what it reports."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from optiml.errors import Fault, KernelFault, OptimlError, OtherParty, Unsupported
from optiml.ptx import memory
from optiml.ptx.counters import SECTOR_BYTES, Counters, Recorder, _Traffic
from optiml.ptx.memory import FIRST_ALLOCATION, WINDOW_BITS, Allocation
from optiml.ptx.native import splitting
from optiml.ptx.native.library import COMPUTE, PRINT, AllocationRecord, LaunchRecord, library
from optiml.ptx.native.lowering import NativeLowering, NativeProgram, NotNative
from optiml.ptx.opcodes import DTYPES, MALFORMED, Pure
from optiml.ptx.parse import Module
from optiml.ptx.printing import PRINTF_LIMIT, STRING_LIMIT, formatted
from optiml.ptx.simt import WARP

_SPACES = ("global_load", "global_store", "global_atomic", "local_load", "local_store", "shared_load", "shared_store",
           "shared_atomic")  # fmt: skip
_ACCESS = ("read", "write", "atomic")
(_NO_FAULT, _BAD_ACCESS, _TRAP, _SKIPPED_BARRIER, _TWO_BARRIERS, _DEADLOCK, _OUT_OF_BUDGET, _PAST_DEADLINE, _ABORTED,
 _RACE, _UNINITIALISED, _NO_MEMORY, _PART_OF_WARP) = range(13)  # fmt: skip
_SHARED, _LOCAL, _GENERIC = 2, 3, 4
_UNWAITED = 3
CHECKS: Mapping[str, int] = {"race": 1, "uninitialised": 2}

_PROGRAMS: weakref.WeakKeyDictionary[Module, dict[str, NativeProgram | None]] = weakref.WeakKeyDictionary()


def native_program(module: Module, kernel: str) -> NativeProgram | None:
    """The kernel for the native engine, or None if the numpy engine has to run it."""
    if library() is None:
        return None
    known = _PROGRAMS.setdefault(module, {})
    if kernel not in known:
        try:
            known[kernel] = NativeLowering(module, module.functions[kernel]).native
        except (NotNative, Unsupported, *MALFORMED):
            # the numpy engine runs it, or says what is wrong with it
            known[kernel] = None
    return known[kernel]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One launch, checked already.

    Attributes:
        values: special registers with one value per launch.
        addresses: device address of module-scope data, by name.
        blocks: linear ids to run, None for the whole grid of `total`.
        checks: names of `CHECKS`.
        unwritten: byte that shared and local memory hold until something is written.
        threads: threads of the host that may share the work.
    """

    program: NativeProgram
    allocations: Mapping[int, Allocation]
    parameters: bytes
    values: Mapping[str, int]
    addresses: Mapping[str, int]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    total: int
    blocks: Sequence[int] | None
    count: bool
    checks: frozenset[str]
    unwritten: int
    warp_instructions: int | None
    deadline: float | None
    l1_bytes: int
    threads: int


def run(call: Call) -> tuple[Counters | None, str, int, int]:
    """Run a launch: counters if asked for, device printf text, number of blocks run, threads that shared the work.

    Raises:
        KernelFault: the kernel broke a rule or outlived its limits.
    """
    engine = library()
    assert engine is not None
    native = call.program
    program = native.program
    launch = LaunchRecord()
    kept: list[Any] = []  # arrays that the record points to

    def pointer(array: np.ndarray[Any, Any]) -> int:
        kept.append(array)
        return array.ctypes.data

    launch.instructions = pointer(native.records)
    launch.segments = pointer(native.segments)
    launch.barriers = pointer(native.barriers)
    launch.reach = pointer(native.reach)
    launch.specials = pointer(native.specials)
    launch.zeros = pointer(native.zeros)
    launch.extra = pointer(native.extra)
    launch.constants = pointer(_constants(call))
    launch.parameters = pointer(np.frombuffer(call.parameters + bytes(8), np.uint8).copy())
    count = max(call.allocations, default=FIRST_ALLOCATION - 1) + 1 - FIRST_ALLOCATION
    records = (AllocationRecord * max(1, count))()
    touched: dict[int, np.ndarray[Any, Any]] = {}
    written, read = (_allocations_behind(call, roots) for roots in (native.roots.written, native.roots.read))
    for number, allocation in call.allocations.items():
        record = records[number - FIRST_ALLOCATION]
        record.data = allocation.data.ctypes.data
        record.size = allocation.nbytes
        if call.count:
            sectors = -(-allocation.nbytes // SECTOR_BYTES) + 1
            record.last = pointer(np.zeros(sectors, np.uint64))
            touched[number] = np.zeros(sectors, np.uint8)
            record.touched = pointer(touched[number])
        record.written, record.read = number in written, number in read
        if "uninitialised" in call.checks and allocation.valid is not None:
            record.valid = pointer(allocation.valid)
    launch.allocations = records
    launch.allocation_count = count
    launch.block_count = call.total
    if call.blocks is not None:
        chosen = np.asarray(call.blocks, np.int64)
        launch.blocks = pointer(chosen)
        launch.block_count = len(chosen)
    warps = np.zeros(len(program.segments), np.int64)
    threads = np.zeros(len(program.segments), np.int64)
    spaces = np.zeros((len(_SPACES), 5), np.int64)
    lines = np.zeros((len(native.lines) + 1, 7), np.int64)
    launch.segment_warps, launch.segment_threads = pointer(warps), pointer(threads)
    launch.spaces, launch.lines = pointer(spaces), pointer(lines)
    launch.budget = -1 if call.warp_instructions is None else call.warp_instructions
    launch.deadline = call.deadline or 0.0
    launch.l1_sectors = call.l1_bytes // SECTOR_BYTES
    launch.grid[:] = call.grid
    launch.block[:] = call.block
    launch.segment_count = len(program.segments)
    launch.barrier_total = len(native.barriers)
    launch.special_count = len(native.specials) // 2
    launch.zero_count = len(native.zeros)
    launch.register_bytes = native.register_bytes
    launch.shared_bytes = call.shared_bytes
    launch.local_bytes = program.local_bytes
    launch.parameter_bytes = len(call.parameters)
    launch.waits = program.waits
    launch.together = program.grid_barrier
    launch.count = call.count
    launch.checks = sum(CHECKS[name] for name in call.checks)
    launch.max_order = native.max_order
    launch.unwritten = call.unwritten
    # the checks compare what different blocks do, in the order in which they do it
    launch.threads = call.threads if native.divisible and not call.checks else 1
    launch.probe, launch.worthwhile = splitting.PROBE_INSTRUCTIONS, splitting.WORTHWHILE_INSTRUCTIONS
    launch.copied_bytes = splitting.COPIED_BYTES
    launch.line_count = len(native.lines)
    launch.fault.other_line = launch.fault.other_thread = -1
    printer = _Printer(call, engine)
    launch.print = printer.callback
    numpy_functions = _Functions(native.functions)
    launch.compute = numpy_functions.callback
    if engine.ptx_run(ctypes.byref(launch)):
        for helper in (printer, numpy_functions):
            if helper.error is not None:
                raise helper.error
        raise KernelFault(_fault(call, launch.fault))
    counters = None
    if call.count:
        counters = _counters(call, launch, warps, threads, spaces, lines, records, touched)
    return counters, "".join(printer.printed), launch.block_count, launch.parts


def _allocations_behind(call: Call, roots: frozenset[int | str] | None) -> frozenset[int]:
    """Numbers of the allocations that addresses lie in which come from `roots`; None stands for any address."""
    if roots is None:
        return frozenset(call.allocations)
    addresses = [call.addresses[root] if isinstance(root, str) else
                 int.from_bytes(call.parameters[root : root + 8], "little") for root in roots]  # fmt: skip
    return frozenset(address >> WINDOW_BITS for address in addresses)


def _constants(call: Call) -> np.ndarray[Any, Any]:
    """The launch's constants, one value in all 32 lanes."""
    native = call.program
    program = native.program
    area = np.zeros(native.constant_bytes + 32, np.uint8)
    start = -area.ctypes.data % 32  # the engine reads whole vectors
    area = area[start : start + native.constant_bytes]

    def fill(slot: int, content: bytes) -> None:
        place, width = native.constant_slots[slot]
        area[place : place + 32 * width] = np.frombuffer(content.ljust(width, b"\0") * 32, np.uint8)

    for slot, value in program.constants:
        bits = b"\xff" * 4 if value.dtype == bool and value.any() else value.tobytes()
        fill(slot, bits)
    for slot, offset, dtype in program.parameters:
        value = np.frombuffer(call.parameters[offset : offset + dtype.itemsize], dtype)
        if dtype.itemsize < 4:
            value = value.astype(np.int32 if dtype.kind == "i" else np.uint32)
        fill(slot, value.tobytes())
    for slot, name, addend in program.symbols:
        fill(slot, (call.addresses[name] + addend & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little"))
    for name, slot in program.launch_values.items():
        fill(slot, call.values[name].to_bytes(native.constant_slots[slot][1], "little"))
    return area


class _Printer:
    """Formats device printf and assert; what goes wrong on the way is kept for the caller."""

    def __init__(self, call: Call, engine: ctypes.CDLL) -> None:
        self.call = call
        self.engine = engine
        self.printed: list[str] = []
        self.room = PRINTF_LIMIT
        self.error: OptimlError | None = None
        self.callback = PRINT(self.one)

    def one(self, lane: int, template_at: int, arguments: int, instruction: int) -> int:
        try:
            self.format(lane, template_at, arguments, instruction)
        except OptimlError as error:  # an exception must not cross the C frames
            self.error = error
            return 1
        return 0

    def read(self, lane: int, address: int, nbytes: int, line: int | None) -> bytes:
        buffer = ctypes.create_string_buffer(nbytes)
        found = self.engine.ptx_peek(lane, address, buffer, nbytes)
        if found < 0:
            raise KernelFault(
                Fault(
                    kind="out_of_bounds", access="read", bytes=1, address=address, line=line,
                    detail=f"out of bounds: read of 1 bytes at 0x{address:x}, in no allocation",
                    **self.where(lane),
                )
            )  # fmt: skip
        return buffer.raw[:found]

    def where(self, lane: int) -> dict[str, Any]:
        place = (ctypes.c_int64 * 2)()
        self.engine.ptx_where(lane, place)
        block, thread = _coordinates(self.call, place[0], place[1])
        return {"block": block, "thread": thread}

    def format(self, lane: int, template_at: int, arguments: int, instruction: int) -> None:
        record = self.call.program.records[instruction]
        line = None if record["line"] < 0 else self.call.program.lines[record["line"]]

        def text_at(address: int) -> str:
            return self.read(lane, address, STRING_LIMIT, line).split(b"\0")[0].decode("latin-1")

        template = text_at(template_at)
        if record["aux"]:
            raise KernelFault(
                Fault(kind="trap", line=line, detail=f"trap: assertion `{template}` failed", **self.where(lane))
            )
        offset = 0

        def argument(size: int) -> bytes:
            nonlocal offset
            offset = -(-offset // size) * size
            found = self.read(lane, arguments + offset, size, line)
            offset += size
            return found

        text = formatted(template, argument, text_at)[: self.room]
        self.room -= len(text)
        self.printed.append(text)


class _Functions:
    """Calls functions of the numpy engine on the registers of a warp; what goes wrong is kept for the caller."""

    def __init__(self, rows: Sequence[Pure]) -> None:
        self.rows = rows
        self.error: OptimlError | None = None
        self.callback = COMPUTE(self.one)

    def one(self, number: int, operands: Any, result: int) -> int:
        row = self.rows[number]
        try:
            with np.errstate(all="ignore"):
                values = [_lanes(operands[k], token) for k, token in enumerate(row.inputs)]
                value = np.broadcast_to(row.apply(*values), WARP)
        except MALFORMED as error:  # an exception must not cross the C frames
            self.error = Unsupported(f"a numpy function of the engine failed: {type(error).__name__}: {error}")
            return 1
        if row.output == "p":
            bits = -value.astype(np.int32)
        else:
            bits = value.astype(_stored(row.output), copy=False)
            if bits.dtype.kind != "i":
                bits = bits.view(f"u{bits.dtype.itemsize}")
        wide = np.dtype(f"{bits.dtype.kind}{max(4, bits.dtype.itemsize)}")
        out = np.ascontiguousarray(bits, wide)
        ctypes.memmove(result, out.ctypes.data, out.nbytes)
        return 0


def _stored(token: str) -> np.dtype[Any]:
    """What a token stands for; integers of no particular sign are unsigned."""
    return DTYPES.get(token) or DTYPES["u" + token[1:]]


def _lanes(address: int, token: str) -> np.ndarray[Any, Any]:
    """The values of an operand in the lanes of a warp, copied out of their registers."""
    dtype = np.dtype(np.int32) if token == "p" else _stored(token)
    word = max(4, dtype.itemsize)
    bits = np.frombuffer(ctypes.string_at(address, word * WARP), f"u{word}")
    values: np.ndarray[Any, Any] = bits.astype(f"u{dtype.itemsize}").view(dtype)
    return values.astype(bool) if token == "p" else values


def _coordinates(call: Call, linear: int, thread: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    x, y, _ = call.grid
    bx, by, _ = call.block
    return (linear % x, linear // x % y, linear // (x * y)), (thread % bx, thread // bx % by, thread // (bx * by))


def _line(call: Call, index: int) -> int | None:
    return None if index < 0 else call.program.lines[index]


def _fault(call: Call, found: Any) -> Fault:
    """The fault as the numpy engine words it."""
    kind = found.kind
    if kind == _NO_MEMORY:
        return Fault(kind="illegal", detail="the emulator ran out of memory for this launch")
    block, thread = _coordinates(call, found.block, found.thread)
    line = _line(call, found.line)
    if kind == _PART_OF_WARP:
        detail = f"illegal: {call.program.names[found.address]} needs all 32 threads of a warp"
        return Fault(kind="illegal", block=block, thread=thread, line=line, detail=detail)
    if kind == _BAD_ACCESS:
        return _access_fault(call, found, block, thread, line)
    names = {
        _TRAP: ("trap", "trap: the kernel stopped itself"),
        _SKIPPED_BARRIER: (
            "barrier_divergence",
            "barrier divergence: this thread waits at a barrier that other threads of its block went around",
        ),
        _TWO_BARRIERS: ("barrier_divergence",
                        "barrier divergence: threads of one warp wait at two different barriers"),
        _DEADLOCK: ("deadlock", "deadlock: every thread left waits at a barrier that can never be complete"),
        _OUT_OF_BUDGET: ("timed_out", "timed out: the budget of warp instructions is used up"),
        _PAST_DEADLINE: ("timed_out", "timed out: the kernel was still running at its deadline"),
    }  # fmt: skip
    if kind in names:
        name, detail = names[kind]
        other = _line(call, found.other_line)
        if kind == _TWO_BARRIERS and other:
            detail += f", the other one on line {other}"
        return Fault(kind=name, block=block, thread=thread, line=line, detail=detail, other=_other_party(call, found))
    return _check_fault(call, found, block, thread, line)


def _access_fault(
    call: Call, found: Any, block: tuple[int, int, int], thread: tuple[int, int, int], line: int | None
) -> Fault:
    access, address, nbytes = _ACCESS[found.access], found.address, found.nbytes
    if found.space in (_SHARED, _LOCAL, _GENERIC):
        name, size = {
            _SHARED: ("shared memory", call.shared_bytes),
            _LOCAL: ("local memory", call.program.program.local_bytes),
            _GENERIC: ("kernel parameters", len(call.parameters)),
        }[found.space]
        signed = address - (1 << 64) if address >> 63 else address
        problem = memory._window_problem(name, size, signed, nbytes, access)
        address = signed
    else:
        view: Any = SimpleNamespace(memory=call.allocations)
        problem = memory._global_problem(view, address, nbytes, access)
        if address >> WINDOW_BITS not in call.allocations:
            problem = memory._before_first(view, address, nbytes, access) or problem
    assert problem is not None
    return Fault(kind=problem[0], access=access, bytes=nbytes, address=address, block=block, thread=thread, line=line,
                 detail=problem[1])  # fmt: skip


def _check_fault(
    call: Call, found: Any, block: tuple[int, int, int], thread: tuple[int, int, int], line: int | None
) -> Fault:
    access, address, nbytes = _ACCESS[found.access], found.address, found.nbytes
    where = "shared memory" if found.space == _SHARED else "global memory"
    if found.kind == _UNINITIALISED:
        return Fault(
            kind="uninitialised", access=access, bytes=nbytes, address=address, block=block, thread=thread, line=line,
            detail=f"uninitialised: read of {nbytes} bytes of {where} at 0x{address:x} that nothing has written",
        )  # fmt: skip
    other = _other_party(call, found)
    assert other is not None
    whose = f"thread {other.thread}" if other.block == block else f"block {other.block}"
    on = f" on line {other.line}" if other.line is not None else ""
    what = f"{access} of {nbytes} bytes of {where} at 0x{address:x}"
    if found.hazard == _UNWAITED:
        detail = f"missing wait: {what} that a cp.async of {whose}{on} fills, which that thread has not waited for"
    else:
        hazard = ("read-after-write", "write-after-read", "write-after-write")[found.hazard]
        detail = (f"{hazard} race: {what} conflicts with a {_ACCESS[found.other_access]} by {whose}{on}, "
                  "with nothing that orders the two")  # fmt: skip
    return Fault(kind="race", access=access, bytes=nbytes, address=address, block=block, thread=thread, line=line,
                 detail=detail, other=other)  # fmt: skip


def _other_party(call: Call, found: Any) -> OtherParty | None:
    if found.other_thread < 0:
        return None
    block, thread = _coordinates(call, found.other_block, found.other_thread)
    return OtherParty(block=block, thread=thread, line=_line(call, found.other_line))


def _counters(
    call: Call, launch: Any, warps: Any, threads: Any, spaces: Any, lines: Any, records: Any,
    touched: Mapping[int, np.ndarray[Any, Any]],
) -> Counters:  # fmt: skip
    """The numpy engine's recorder, filled with what the native engine counted."""
    native = call.program
    recorder = Recorder(native.program, call.l1_bytes // SECTOR_BYTES)
    recorder.segment_warps, recorder.segment_threads = warps.tolist(), threads.tolist()
    recorder.branches, recorder.divergent, recorder.barriers = launch.branches, launch.divergent, launch.barrier_count
    recorder.blocks, recorder.warps = launch.block_count, launch.warps
    for name, totals in zip(_SPACES, spaces.tolist(), strict=True):
        recorder.spaces[name] = totals
    for number, row in zip(native.lines, lines.tolist(), strict=False):
        if any(row):
            at = recorder.line(number)
            (at.load_requests, at.load_sectors, at.store_requests, at.store_sectors, at.shared_wavefronts,
             at.shared_conflicts, at.divergent) = row  # fmt: skip
    flags = [np.zeros(0, np.uint8)]
    first = 0
    for number, bits in touched.items():
        allocation = call.allocations[number]
        record = records[number - FIRST_ALLOCATION]
        traffic = recorder.traffic[number] = _Traffic(number, allocation.name, allocation.nbytes, first)
        traffic.load, traffic.store, traffic.atomic = record.sectors
        traffic.misses = record.misses
        flags.append(bits[: traffic.size])
        first += traffic.size
    every = np.concatenate(flags)
    recorder.loaded, recorder.stored, recorder.updated = ((every & bit) != 0 for bit in (1, 2, 4))
    return recorder.counters()
