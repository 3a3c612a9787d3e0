"""A whole program to a first draft of its problem and of its kernel with a launch plan, from a recording of it.

Arrays are the program's allocations, named after the parameters they are passed to; sizes are the integers it passes;
what it computes with them only a person can say, so the reference is left to be written.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from optiml.device.recorded import device_facts, entries_of
from optiml.errors import InvalidInput
from optiml.problems.data import element_bytes
from optiml.problems.skeleton import dtype_of
from optiml.records import Build, DeviceInfo, Kernel, Launch, Size, Workspace
from optiml.toolchain.record import (
    Allocated,
    Cleared,
    Downloaded,
    Launched,
    Orders,
    Place,
    Recording,
    Refused,
    Uploaded,
    place_of,
    record,
)
from optiml.toolchain.signatures import Signature, device_source, kernel_signatures

MAX_IMPORTED_LAUNCHES = 16
_ENDED = {
    "timed_out": "it was stopped after its time on the host; what it did until then is shown",
    "crashed": "it crashed on the host; what it did until then is shown",
    "aborted": "it aborted on the host; what it did until then is shown",
    "gone": "it ended without a record",
    "damaged": "its record was damaged",
    "flooded": "it printed without end",
}


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What a program was seen to do.

    Attributes:
        problem: a Problem in JSON form whose reference raises until it is written.
        kernel: the device code with the launches as a plan; None where no kernel was launched.
        notes: what could not be carried over, one sentence each.
    """

    problem: dict[str, Any]
    kernel: Kernel | None
    notes: tuple[str, ...]


@dataclass(kw_only=True)
class _Memory:
    """One allocation and what happened to it."""

    nbytes: int
    dtype: str = "float32"
    name: str = ""
    uploaded: bool = False
    cleared: bool = False
    downloaded: bool = False
    constant: bool = True  # only ever passed as a pointer to const
    shape: tuple[Size, ...] = ()


@dataclass(kw_only=True)
class _Draft:
    memory: dict[int, _Memory] = field(default_factory=dict)
    axes: dict[str, int] = field(default_factory=dict)
    scalars: dict[str, tuple[str, float]] = field(default_factory=dict)  # name -> dtype, value
    notes: list[str] = field(default_factory=list)


def import_program(kernel: Kernel, build: Build, limits: DeviceInfo) -> Imported:
    """Run `main` under the recorder and draft a problem and a kernel from it.

    Copies to the host give zeros there, so results that the program checks are wrong, and what it decides by them is
    not what it would decide on a GPU.

    Raises:
        SetupError: no sandbox that is strong enough can be made here.
        InvalidInput: the program launched nothing.
    """
    orders = Orders(name="main", mode="program", device=device_facts(limits), entries=entries_of(build))
    recording = record(orders, build.launcher_library, build.recorder)
    launches = _distinct(recording)
    if not launches:
        why = _first_refusal(recording) or _ENDED.get(recording.ending, "it launched no kernel")
        raise InvalidInput(f"nothing can be imported from this program: {why}")
    draft = _Draft()
    if recording.ending in _ENDED:
        draft.notes.append(_ENDED[recording.ending])
    signatures = {item.name: item for item in kernel_signatures(kernel.source)}
    _observe(recording, draft)
    named = [(launch, *_named(launch.symbol, signatures)) for launch in launches]
    for launch, _, parameters in named:
        _name_arguments(launch, parameters, draft)
    for memory in draft.memory.values():
        memory.shape = _shape(memory, draft.axes)
    plan = tuple(_launch(launch, name, parameters, draft) for launch, name, parameters in named)
    problem, workspace = _problem(plan, draft)
    source, dropped = device_source(kernel.source)
    if dropped:
        draft.notes.append(f"host code was left out: {', '.join(dropped[:8])}")
    made = Kernel(source=source, launches=plan, flags=kernel.flags, params=kernel.params, workspace=workspace)
    return Imported(problem=problem, kernel=made, notes=tuple(dict.fromkeys(draft.notes)))


def _distinct(recording: Recording) -> list[Launched]:
    """The launches without repetitions: a program may time its kernel a thousand times."""
    launches = dict.fromkeys(event for event in recording.events if isinstance(event, Launched))
    return list(launches)[:MAX_IMPORTED_LAUNCHES]


def _first_refusal(recording: Recording) -> str:
    return next((event.what for event in recording.events if isinstance(event, Refused)), "")


def _observe(recording: Recording, draft: _Draft) -> None:
    for event in recording.events:
        match event:
            case Allocated():
                draft.memory[event.slot] = _Memory(nbytes=event.nbytes)
            case Uploaded() | Cleared() if event.target.slot in draft.memory:
                memory = draft.memory[event.target.slot]
                memory.uploaded = memory.uploaded or isinstance(event, Uploaded)
                memory.cleared = memory.cleared or isinstance(event, Cleared)
            case Uploaded() | Cleared():
                draft.notes.append("a device variable is written from the host, which a plan in formulas cannot hold")
            case Downloaded() if event.source.slot in draft.memory:
                draft.memory[event.source.slot].downloaded = True
            case Refused() if event.kind in ("refused", "limit", "unsupported", "missing"):
                draft.notes.append(event.what)


_BUILTIN = {
    "f": "float", "d": "double", "i": "int", "j": "unsigned int", "l": "long", "m": "unsigned long",
    "x": "long long", "y": "unsigned long long", "c": "char", "a": "signed char", "h": "unsigned char", "s": "short",
    "t": "unsigned short", "b": "bool",
}  # fmt: skip


def _named(symbol: str, signatures: Mapping[str, Signature]) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Name of a kernel as a launch plan gives it, and its parameters as written."""
    name, rest = _split(symbol)
    signature = signatures.get(name)
    parameters = () if signature is None else signature.parameters
    if rest.startswith("I"):
        name += _template_arguments(rest[1:])
    return name, parameters


def _split(symbol: str) -> tuple[str, str]:
    """The last name inside an Itanium-mangled symbol and what follows it."""
    match = re.match(r"_ZN?(?=\d)", symbol)
    name, position = symbol, match.end() if match else len(symbol)
    while digits := re.match(r"\d+", symbol[position:]):
        start = position + digits.end()
        position = start + int(digits.group(0))
        name = symbol[start:position]
    return name, symbol[position:]


def _template_arguments(text: str) -> str:
    """`<float, 4>` from `fLi4E...`; empty where an argument is more than a built-in type or an integer."""
    found = []
    while text and text[0] != "E":
        literal = re.match(r"L([a-z])(n?)(\d+)E", text)
        if literal is not None:
            number = ("-" if literal.group(2) else "") + literal.group(3)
            found.append({"0": "false", "1": "true"}[number] if literal.group(1) == "b" else number)
            text = text[literal.end() :]
        elif text[0] in _BUILTIN:
            found.append(_BUILTIN[text[0]])
            text = text[1:]
        else:
            return ""
    return f"<{', '.join(found)}>"


def _name_arguments(launch: Launched, parameters: Sequence[tuple[str, str]], draft: _Draft) -> None:
    """Give arrays, axes and scalars the names of the parameters they are first passed as."""
    for position, data in enumerate(launch.args):
        kind, name = parameters[position] if position < len(parameters) else ("", "")
        name = name or f"arg{position}"
        place = _place(data)
        if place is not None:
            memory = draft.memory.get(place.slot)
            if memory is not None:
                memory.constant = memory.constant and "const" in kind.split()
                if not memory.name:
                    memory.name = _free_name(name, draft)
                    memory.dtype = dtype_of(kind) or memory.dtype
        elif _is_floating(kind, data):
            if name not in draft.scalars:
                draft.scalars[name] = ("float64" if len(data) == 8 else "float32", _float(data))
        elif len(data) in (4, 8):
            value = int.from_bytes(data, "little", signed=True)
            if value not in draft.axes.values() and value > 0:
                draft.axes[_free_name(name, draft)] = value


def _free_name(name: str, draft: _Draft) -> str:
    taken = {memory.name for memory in draft.memory.values()} | set(draft.axes) | set(draft.scalars)
    return next(text for text in (name, *(f"{name}_{count}" for count in range(2, 1000))) if text not in taken)


def _place(data: bytes) -> Place | None:
    return place_of(int.from_bytes(data, "little")) if len(data) == 8 else None


def _is_floating(kind: str, data: bytes) -> bool:
    return "*" not in kind and bool({"float", "double"} & set(kind.split())) and len(data) in (4, 8)


def _float(data: bytes) -> float:
    (value,) = struct.unpack("<f" if len(data) == 4 else "<d", data)
    return float(value)


def _shape(memory: _Memory, axes: Mapping[str, int]) -> tuple[Size, ...]:
    """The sizes that multiply to the number of elements: one axis, a product of two, a multiple of one, or a number."""
    count = memory.nbytes // element_bytes(memory.dtype)
    for name, value in axes.items():
        if value == count:
            return (name,)
    for first, rows in axes.items():
        for second, columns in axes.items():
            if rows * columns == count and (first != second or rows > 1):
                return (first, second)
    for name, value in axes.items():
        if value > 1 and count % value == 0:
            return (count // value, name)
    return (count,)


def _launch(launch: Launched, name: str, parameters: Sequence[tuple[str, str]], draft: _Draft) -> Launch:
    args: list[Size | float] = []
    for position, data in enumerate(launch.args):
        kind, written = parameters[position] if position < len(parameters) else ("", "")
        place = _place(data)
        if place is not None and place.slot in draft.memory:
            if place.offset:
                draft.notes.append(
                    f"{name} gets an address inside {draft.memory[place.slot].name}; a plan passes whole arrays: give "
                    "the kernel the offset as an argument"
                )
            args.append(draft.memory[place.slot].name)
        elif _is_floating(kind, data):
            same = draft.scalars.get(written) == ("float64" if len(data) == 8 else "float32", _float(data))
            args.append(written if same else _float(data))
        elif len(data) in (1, 2, 4, 8):
            value = int.from_bytes(data, "little", signed=True)
            args.append(next((axis for axis, size in draft.axes.items() if size == value), value))
        else:
            draft.notes.append(f"{name} takes a struct by value, which a plan in formulas cannot pass")
            args.append(0)
    block = _trimmed(launch.block)
    grid = tuple(
        _extent_formula(blocks, threads, draft.axes)
        for blocks, threads in zip(_trimmed(launch.grid), launch.block, strict=False)
    )
    return Launch(
        kernel=name,
        grid=grid,
        block=block,
        args=tuple(args),
        shared_bytes=launch.shared_bytes,
        cluster=launch.cluster,
        cooperative=launch.cooperative,
    )


def _trimmed(extent: tuple[int, int, int]) -> tuple[int, ...]:
    last = max((index for index, size in enumerate(extent) if size != 1), default=0)
    return extent[: last + 1]


def _extent_formula(blocks: int, threads: int, axes: Mapping[str, int]) -> Size:
    """The first formula of an axis that gives this many blocks; the number itself where none does."""
    if blocks == 1 and not any(value <= threads and value > 1 for value in axes.values()):
        return 1
    for per in (threads, *(threads * times for times in (2, 4, 8, 16))):
        for name, value in axes.items():
            if -(-value // per) == blocks and value > 1:
                return f"ceil_div({name}, {per})" if per > 1 else name
    return next((name for name, value in axes.items() if value == blocks), blocks)


def _problem(plan: Sequence[Launch], draft: _Draft) -> tuple[dict[str, Any], dict[str, Workspace]]:
    """Fields of the problem, and the scratch memory that is the kernel's own."""
    used = [memory for memory in draft.memory.values() if memory.name]
    inputs = {m.name: _tensor(m) for m in used if m.uploaded or m.constant}
    has_results = any(memory.downloaded for memory in used)
    outputs, workspace = {}, {}
    for memory in used:
        if memory.constant:
            continue
        if memory.downloaded or not (has_results or memory.uploaded):
            outputs[memory.name] = _tensor(memory)
            if memory.cleared and memory.name not in inputs:
                draft.notes.append(
                    f"{memory.name} is cleared before the launches; in a plan an output is undefined on entry: "
                    "clear it in a kernel, or use a launcher"
                )
        elif memory.name not in inputs:
            workspace[memory.name] = Workspace(
                dtype=memory.dtype,  # type: ignore[arg-type]  # from the table of dtypes
                shape=memory.shape,
                init="zero" if memory.cleared else "none",
            )
    if not outputs:
        draft.notes.append("nothing was seen to come back from the device: say which arrays are outputs")
    for name, (dtype, _) in draft.scalars.items():
        inputs[name] = {"dtype": dtype, "shape": None}
    name = plan[0].kernel.split("<")[0]
    axes = draft.axes or {"n": 1}
    sizes: dict[str, Any] = {"axes": dict(axes)}
    if draft.scalars:
        sizes["scalars"] = {name: value for name, (_, value) in draft.scalars.items()}
    return {
        "name": name,
        "description": f"what {name} computes",
        "axes": {axis: {"type": "var", "min": 1} for axis in axes},
        "inputs": inputs,
        "outputs": outputs,
        "reference": f"def run({', '.join((*inputs, *axes))}):\n"
        f"    raise NotImplementedError('return {', '.join(outputs)} with numpy')",
        "workloads": [sizes],
        "bench": [sizes],
    }, workspace


def _tensor(memory: _Memory) -> dict[str, Any]:
    return {"dtype": memory.dtype, "shape": list(memory.shape)}
