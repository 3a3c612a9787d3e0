"""From what a launcher was recorded to ask for to a plan, or to the reason why it cannot be one."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from optiml.device.entries import entry_parameters, most_threads
from optiml.device.steps import (
    BadLaunch,
    Copy,
    Memset,
    Plan,
    PlannedArray,
    PlannedLaunch,
    Pointer,
    Step,
    Upload,
    Value,
    check_limits,
)
from optiml.errors import SetupError, Unsupported
from optiml.problems.data import from_float64, is_float
from optiml.records import Build, DeviceInfo, Problem, Reason, Resources, Scalar, Workload
from optiml.toolchain.record import (
    MAX_SLOTS,
    Allocated,
    Cleared,
    Copied,
    Entry,
    Launched,
    Orders,
    Place,
    Recording,
    Refused,
    Uploaded,
    Variable,
    first_address,
    place_of,
    record,
)
from optiml.toolchain.signatures import host_parameters

# Multiprocessors and bytes of L2 that the recorded device reports; NVIDIA data sheets.
_FACTS: Mapping[str, tuple[int, int]] = {"a100": (108, 40 << 20), "h100": (132, 50 << 20), "h200": (132, 50 << 20)}
DEVICE_MEMORY_BYTES = 16 << 30
MAX_STEPS = 4096
_NO_RESOURCES = Resources(registers_per_thread=32, shared_bytes_per_block=0, stack_bytes=0, spill_bytes=0)

_ENDINGS: Mapping[str, tuple[Reason, str]] = {
    "left": ("host_escape", "the launcher calls exit"),
    "gone": ("host_escape", "the launcher ended its process before it returned"),
    "trapped": ("host_escape", "the launcher starts another program (system, popen or posix_spawn)"),
    "damaged": ("host_escape", "the launcher wrote over its own record"),
    "timed_out": ("timed_out", "the launcher did not return in its time on the host"),
    "flooded": ("resource_limit", "the launcher did not return and printed without end"),
    "crashed": ("fault", "the launcher crashed on the host (an invalid address)"),
    "arithmetic": ("fault", "the launcher crashed on the host (an integer division by zero)"),
    "aborted": ("fault", "the launcher aborted on the host (an assertion or an exception that nothing catches)"),
    "touched": ("host_escape", "the launcher reads or writes device memory on the host"),
}


class Unrecordable(Unsupported):
    """A launcher of which nothing can be told here: the machine or the recorder lacks something."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.args = (message,)


def recorded_plan(
    launcher: str,
    source: str,
    build: Build,
    problem: Problem,
    workload: Workload,
    arrays: Mapping[str, PlannedArray],
    limits: DeviceInfo,
) -> Plan:
    """Call the launcher at the sizes of `workload` and plan what it asked for.

    Args:
        arrays: of the problem, at these sizes, in the order of the launcher's arguments.

    Raises:
        BadLaunch: what it did wrong, with the reason.
        Unsupported: no sandbox here, or something that the recorder does not record.
    """
    arguments = launcher_arguments(problem, workload, arrays)
    _check_signature(launcher, source, arguments)
    orders = Orders(
        name=launcher,
        mode="launcher",
        device=device_facts(limits),
        entries=entries_of(build),
        arguments=tuple(line for line, _ in arguments),
    )
    try:
        recording = record(orders, build.launcher_library, build.recorder)
    except SetupError as error:
        raise Unrecordable(f"the launcher was not called: {error}") from error
    _refuse(recording, launcher)
    return plan_of(recording, build, dict(arrays), limits)


def device_facts(limits: DeviceInfo) -> tuple[int, int, int, int, int, int]:
    """What the recorded device says of itself; see `Orders.device`."""
    digits = "".join(character for character in limits.arch if character.isdigit())
    multiprocessors, l2_bytes = _FACTS.get(limits.model, _FACTS["h100"])
    shared = limits.max_shared_bytes_per_block
    return int(digits[:-1]), int(digits[-1]), multiprocessors, shared, l2_bytes, DEVICE_MEMORY_BYTES


def entries_of(build: Build) -> tuple[Entry, ...]:
    """The kernels of a build as the recorder needs them."""
    found = []
    for symbol, parameters in entry_parameters(build.ptx).items():
        used = build.resources.get(symbol, _NO_RESOURCES)
        found.append(
            Entry(
                symbol=symbol,
                shared_bytes=used.shared_bytes_per_block,
                registers=used.registers_per_thread,
                local_bytes=used.stack_bytes,
                max_threads=most_threads(build.ptx, symbol),
                parameters=tuple(item.bytes for item in parameters),
            )
        )
    return tuple(found)


def launcher_arguments(
    problem: Problem, workload: Workload, arrays: Mapping[str, PlannedArray]
) -> list[tuple[str, str]]:
    """Order line and C type of every argument: arrays, axes, scalars, stream (contract §2)."""
    lines = [(f"array {array.nbytes}", "pointer") for array in arrays.values()]
    for name, axis in problem.axes.items():
        size = axis.value if axis.value is not None else workload.axes[name]
        lines.append((f"integer {size}", "integer"))
    for name, tensor in problem.inputs.items():
        if tensor.shape is None:
            lines.append(_scalar(workload.scalars[name], tensor.dtype))
    return [*lines, ("stream", "stream")]


def _scalar(value: Scalar, dtype: str) -> tuple[str, str]:
    if dtype == "float32":
        return f"float {struct.unpack('<I', struct.pack('<f', float(value)))[0]:x}", "float"
    if dtype == "float64":
        return f"double {struct.unpack('<Q', struct.pack('<d', float(value)))[0]:x}", "double"
    if is_float(dtype):  # half and the like are classes of one small integer
        bits = int.from_bytes(from_float64(np.array([float(value)]), dtype).tobytes(), "little")
        return f"integer {bits}", "other"
    return f"integer {int(value)}", "integer"


def _check_signature(launcher: str, source: str, arguments: Sequence[tuple[str, str]]) -> None:
    """Refuse a launcher whose parameters cannot take the arguments; a function that is not found is left alone."""
    parameters = host_parameters(source, launcher)
    if parameters is None:
        return
    wanted = [kind for _, kind in arguments]
    shown = ", ".join(wanted)
    if len(parameters) != len(wanted):
        raise BadLaunch(
            f"the launcher {launcher} takes {len(parameters)} parameters and gets {len(wanted)}: {shown} "
            "(arrays in inputs, then other outputs, axes as int, scalars, cudaStream_t)"
        )
    for position, (written, kind) in enumerate(zip(parameters, wanted, strict=True)):
        is_pointer = "*" in written or "[" in written
        floating = next((name for name in ("float", "double") if name in written.split()), None)
        wrong = (
            (kind == "pointer") != is_pointer
            if kind != "stream"
            else not is_pointer and "cudaStream_t" not in written and "CUstream" not in written
        )
        if kind in ("float", "double", "integer") and not is_pointer:
            wrong = wrong or (floating or "integer") != kind
        if wrong:
            raise BadLaunch(
                f"the launcher {launcher} declares parameter {position + 1} as {written.strip()!r}, and gets a {kind}; "
                f"its parameters are {shown}"
            )


def _refuse(recording: Recording, launcher: str) -> None:
    """Raise for the first thing that a plan cannot hold or that the runtime would refuse."""
    found = [event for event in recording.events if isinstance(event, Refused)]
    for event in found:
        if event.kind == "escape":
            raise BadLaunch(f"the launcher uses {event.what}", reason="host_escape")
    if recording.ending == "nameless":
        raise BadLaunch(f'the source has no extern "C" host function {launcher!r}')
    if recording.ending == "unfiltered":
        raise Unrecordable("the launcher was not called: this kernel filters no system calls (seccomp)")
    for event in found:
        if event.kind == "limit":
            raise BadLaunch(f"the launcher asks for {event.what}", reason="resource_limit")
        if event.kind == "refused":
            raise BadLaunch(event.what)
        what = event.what or "something that is not there"
        raise Unrecordable(f"the launcher uses {what}, which the recorder does not record: give the kernel as launches")
    if recording.ending != "returned":
        reason, text = _ENDINGS.get(recording.ending, _ENDINGS["damaged"])
        raise BadLaunch(text, reason=reason)


def plan_of(recording: Recording, build: Build, arrays: dict[str, PlannedArray], limits: DeviceInfo) -> Plan:
    """The steps of a recording over the arrays of the problem and what the launcher allocated itself.

    The record comes from a process that a stranger's code ran in, so limits that the recorder enforces are enforced
    here again.

    Raises:
        BadLaunch: a step that the device would refuse, or more steps or memory than a launcher may have.
    """
    memory: dict[int, Pointer] = {slot: Pointer(name=name) for slot, name in enumerate(arrays)}
    steps: list[Step] = []
    for event in recording.events:
        match event:
            case Variable():
                if _is_in(event.name, build.ptx):
                    memory[event.slot] = Pointer(name=event.name, symbol=True)
            case Allocated():
                name = f"launcher's allocation {event.slot}"
                memory[event.slot] = Pointer(name=name)
                arrays[name] = _scratch(event.nbytes)
            case Launched():
                used = build.resources.get(event.symbol, _NO_RESOURCES)
                static = used.shared_bytes_per_block
                check_limits(
                    event.symbol, event.grid, event.block, event.shared_bytes, static, limits, cluster=event.cluster
                )
                args = tuple(_argument(arg, memory) for arg in event.args)
                steps.append(
                    PlannedLaunch(
                        symbol=event.symbol,
                        grid=event.grid,
                        block=event.block,
                        shared_bytes=event.shared_bytes,
                        args=args,
                        cluster=event.cluster,
                        cooperative=event.cooperative,
                    )
                )
            case Cleared() | Copied() | Uploaded():
                steps += _transfer(event, memory)
    if len(steps) > MAX_STEPS:
        raise BadLaunch(f"the launcher asks for more than {MAX_STEPS} steps", reason="resource_limit")
    if sum(array.nbytes for array in arrays.values() if array.role == "workspace") > DEVICE_MEMORY_BYTES:
        raise BadLaunch("the launcher allocates more memory than the device has", reason="resource_limit")
    return Plan(steps=tuple(steps), arrays=arrays)


def _scratch(nbytes: int) -> PlannedArray:
    """Memory whose type only the kernels know; as floats where it can be, so that its poison is one of floats."""
    if nbytes % 4 == 0:
        return PlannedArray(dtype="float32", shape=(nbytes // 4,), role="workspace")
    return PlannedArray(dtype="uint8", shape=(nbytes,), role="workspace")


def _is_in(name: str, ptx: str) -> bool:
    """Whether the PTX still has the variable; one that no kernel uses is dropped by the compiler."""
    return f" {name}[" in ptx or f" {name};" in ptx or f" {name} =" in ptx


def _transfer(event: Cleared | Copied | Uploaded, memory: Mapping[int, Pointer]) -> Iterator[Step]:
    target = _pointer(event.target, memory)
    if target is None:
        return  # a variable that no kernel uses
    match event:
        case Cleared():
            yield Memset(target=target, value=event.value, nbytes=event.nbytes)
        case Copied():
            source = _pointer(event.source, memory)
            if source is None:
                raise BadLaunch("the launcher copies from a variable that no kernel uses")
            yield Copy(source=source, target=target, nbytes=event.nbytes)
        case Uploaded():
            yield Upload(target=target, content=_value(event.data, memory))


def _pointer(place: Place, memory: Mapping[int, Pointer]) -> Pointer | None:
    base = memory.get(place.slot)
    return None if base is None else Pointer(name=base.name, offset=place.offset, symbol=base.symbol)


def _argument(data: bytes, memory: Mapping[int, Pointer]) -> Pointer | Value:
    value = _value(data, memory)
    if len(data) == 8 and value.pointers:
        return value.pointers[0][1]
    return value


def _value(data: bytes, memory: Mapping[int, Pointer]) -> Value:
    """Bytes with the device addresses among their aligned words named; they differ from one device to the next."""
    words = np.frombuffer(data[: len(data) // 8 * 8], dtype="<u8")
    inside = np.flatnonzero((words >= first_address(0) - (1 << 30)) & (words < first_address(MAX_SLOTS)))
    pointers = []
    for index in inside.tolist():
        place = place_of(int(words[index]))
        found = None if place is None else _pointer(place, memory)
        if found is not None:
            pointers.append((8 * index, found))
    return Value(data=data, pointers=tuple(pointers))
