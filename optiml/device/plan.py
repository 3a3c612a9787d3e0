"""From a launch plan in formulas to concrete launches: sizes, argument bytes, arrays."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from optiml.errors import InvalidInput, OptimlError
from optiml.expressions import evaluate, evaluate_float, names_in
from optiml.problems.data import array_shape, element_bytes, from_float64, is_float, storage_dtype
from optiml.problems.problem import names_of
from optiml.records import Build, DeviceInfo, Kernel, Launch, Problem, Reason, Scalar, Workload

Role = Literal["input", "output", "inout", "workspace"]
MAX_ARRAY_BYTES = 1 << 34


class BadLaunch(OptimlError):
    """The launch plan cannot be carried out at these sizes: the kernel's fault, for `reason` of contract §6."""

    code = "bad_launch"

    def __init__(self, message: str, *, reason: Reason = "bad_launch") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """An address: `offset` bytes from the start of a named array, or of a module-scope variable if `symbol`."""

    name: str
    offset: int = 0
    symbol: bool = False


@dataclass(frozen=True, kw_only=True)
class Value:
    """Bytes: an argument passed by value, or what a launcher uploads.

    Each of `pointers` (byte position, address) is written over eight bytes of `data` once addresses are known.
    """

    data: bytes
    pointers: tuple[tuple[int, Pointer], ...] = ()


@dataclass(frozen=True, kw_only=True)
class PlannedLaunch:
    """One launch with every size known. `grid` and `block` are x, y, z."""

    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    args: tuple[Pointer | Value, ...]


@dataclass(frozen=True, kw_only=True)
class Memset:
    """Set `nbytes` bytes from `target` on to `value` (0..255)."""

    target: Pointer
    value: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Copy:
    """Copy `nbytes` bytes of device memory; the two ranges do not overlap."""

    source: Pointer
    target: Pointer
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Upload:
    """Write bytes that the launcher computed on the host into device memory."""

    target: Pointer
    content: Value


Step = PlannedLaunch | Memset | Copy | Upload


@dataclass(frozen=True, kw_only=True)
class PlannedArray:
    """One array of device memory. Workspaces with `zero` are cleared before every run."""

    dtype: str
    shape: tuple[int, ...]
    role: Role
    zero: bool = False

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * element_bytes(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one call of a kernel does: steps in order on one stream, over arrays.

    A plan in formulas holds launches only; one recorded from a launcher may hold every kind of step, and what the
    launcher allocated is among the arrays as a workspace.
    """

    steps: tuple[Step, ...]
    arrays: Mapping[str, PlannedArray]

    @property
    def launches(self) -> tuple[PlannedLaunch, ...]:
        """The launches among the steps."""
        return tuple(step for step in self.steps if isinstance(step, PlannedLaunch))


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A kernel parameter as the PTX declares it."""

    type: str  # "u64", "f32", "b8" for structs
    bytes: int


_TYPE_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}


@lru_cache(maxsize=64)
def entry_parameters(ptx: str) -> Mapping[str, tuple[Parameter, ...]]:
    """Parameters of every kernel entry in a PTX text."""
    entries: dict[str, tuple[Parameter, ...]] = {}
    for match in re.finditer(r"\.entry\s+([\w$.]+)\s*(?:\(([^)]*)\))?", ptx):
        parameters = []
        for item in re.finditer(r"\.param\s+([^,]*)", match.group(2) or ""):
            words = item.group(1)
            kind = re.search(r"\.([usfb])(8|16|32|64)\b", words)
            count = re.search(r"\[(\d+)\]", words)
            if kind is not None:
                size = _TYPE_BYTES[kind.group(2)] * (int(count.group(1)) if count else 1)
                parameters.append(Parameter(type=kind.group(1) + kind.group(2), bytes=size))
        entries[match.group(1)] = tuple(parameters)
    return entries


def resolve_plan(kernel: Kernel, build: Build, problem: Problem, workload: Workload, limits: DeviceInfo) -> Plan:
    """Evaluate the launch plan at one workload.

    A launch whose grid has a 0 is left out. Dynamic shared memory above 48 KiB is granted up to the device's opt-in
    limit.

    Raises:
        BadLaunch: a size the device refuses, or arguments that do not fit the kernel's parameters.
    """
    names: dict[str, Scalar] = {**names_of(problem, workload.axes, workload.scalars), **kernel.params}
    arrays = _arrays(kernel, problem, names)
    parameters = entry_parameters(build.ptx)
    launches = []
    for index, launch in enumerate(kernel.launches):
        grid = _extent(launch, "grid", names, index)
        block = _extent(launch, "block", names, index)
        if 0 in grid:
            continue
        shared = _evaluated(launch.shared_bytes, names, f"launch {index}: shared_bytes")
        symbol = build.entries[launch.kernel]
        static = build.resources[symbol].shared_bytes_per_block if symbol in build.resources else 0
        _check_limits(index, grid, block, shared, static, limits)
        args = _arguments(launch, parameters.get(symbol, ()), arrays, problem, names, index)
        launches.append(PlannedLaunch(symbol=symbol, grid=grid, block=block, shared_bytes=shared, args=args))
    return Plan(steps=tuple(launches), arrays=arrays)


def _arrays(kernel: Kernel, problem: Problem, names: Mapping[str, Scalar]) -> dict[str, PlannedArray]:
    arrays: dict[str, PlannedArray] = {}
    for name, tensor in problem.inputs.items():
        if tensor.shape is not None:
            role: Role = "inout" if name in problem.outputs else "input"
            arrays[name] = PlannedArray(dtype=tensor.dtype, shape=array_shape(tensor.shape, names), role=role)
    for name, tensor in problem.outputs.items():
        if name not in arrays:
            arrays[name] = PlannedArray(dtype=tensor.dtype, shape=array_shape(tensor.shape or (), names), role="output")
    for name, space in kernel.workspace.items():
        try:
            shape = array_shape(space.shape, names)
        except InvalidInput as error:
            raise BadLaunch(f"workspace {name}: {error}") from error
        arrays[name] = PlannedArray(dtype=space.dtype, shape=shape, role="workspace", zero=space.init == "zero")
        if arrays[name].nbytes > MAX_ARRAY_BYTES:
            raise BadLaunch(f"workspace {name} of {arrays[name].nbytes} bytes is too large")
    return arrays


def _evaluated(formula: int | str, names: Mapping[str, Scalar], where: str) -> int:
    try:
        return evaluate(formula, names)
    except InvalidInput as error:
        raise BadLaunch(f"{where}: {error}") from error


def _extent(launch: Launch, label: str, names: Mapping[str, Scalar], index: int) -> tuple[int, int, int]:
    sizes = launch.grid if label == "grid" else launch.block
    values = [_evaluated(size, names, f"launch {index}: {label}") for size in sizes]
    x, y, z = (*values, *([1] * (3 - len(values))))
    return x, y, z


def _check_limits(
    index: int, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int, static: int, limits: DeviceInfo
) -> None:
    where = f"launch {index}"
    if min(grid) < 0 or any(size > most for size, most in zip(grid, limits.max_grid, strict=True)):
        raise BadLaunch(f"{where}: a grid of {grid} is outside the device's limits {limits.max_grid}")
    if min(block) <= 0 or any(size > most for size, most in zip(block, limits.max_block, strict=True)):
        raise BadLaunch(f"{where}: a block of {block} is outside the device's limits {limits.max_block}")
    threads = block[0] * block[1] * block[2]
    if threads > limits.max_threads_per_block:
        raise BadLaunch(f"{where}: {threads} threads a block exceed the limit of {limits.max_threads_per_block}")
    if shared < 0 or shared + static > limits.max_shared_bytes_per_block:
        raise BadLaunch(
            f"{where}: {shared} bytes of dynamic and {static} of static shared memory were asked for; "
            f"the device allows {limits.max_shared_bytes_per_block} a block"
        )


def _arguments(
    launch: Launch,
    parameters: tuple[Parameter, ...],
    arrays: Mapping[str, PlannedArray],
    problem: Problem,
    names: Mapping[str, Scalar],
    index: int,
) -> tuple[Pointer | Value, ...]:
    if len(launch.args) != len(parameters):
        raise BadLaunch(
            f"launch {index}: {launch.kernel} takes {len(parameters)} parameters and the plan gives {len(launch.args)}"
        )
    return tuple(
        _argument(arg, parameter, arrays, problem, names, f"launch {index}, argument {position} ({arg!r})")
        for position, (arg, parameter) in enumerate(zip(launch.args, parameters, strict=True))
    )


def _argument(
    arg: int | float | str,
    parameter: Parameter,
    arrays: Mapping[str, PlannedArray],
    problem: Problem,
    names: Mapping[str, Scalar],
    where: str,
) -> Pointer | Value:
    if isinstance(arg, str) and arg in arrays:
        if parameter.bytes != 8 or parameter.type[0] == "f":
            raise BadLaunch(f"{where}: an array is passed where the kernel takes a {parameter.bytes}-byte value")
        return Pointer(name=arg)
    scalar = problem.inputs.get(arg) if isinstance(arg, str) else None
    if scalar is not None and scalar.shape is None:
        return Value(data=_scalar_bytes(names[str(arg)], scalar.dtype, parameter, where))
    if parameter.type in ("f32", "f64"):
        value = evaluate_float(arg, names)
        return Value(data=struct.pack("<f" if parameter.type == "f32" else "<d", value))
    if isinstance(arg, float) or any(isinstance(names.get(name), float) for name in names_in(arg)):
        raise BadLaunch(f"{where}: a fraction is passed where the kernel takes an integer")
    if parameter.type == "b8" and parameter.bytes not in (1, 2, 4, 8):
        raise BadLaunch(f"{where}: the kernel takes a struct of {parameter.bytes} bytes, which a plan cannot pass")
    integer = _evaluated(arg, names, where)
    bits = 8 * parameter.bytes
    if not -(1 << (bits - 1)) <= integer < (1 << bits):
        raise BadLaunch(f"{where}: {integer} does not fit in the kernel's {bits}-bit parameter")
    return Value(data=(integer & ((1 << bits) - 1)).to_bytes(parameter.bytes, "little"))


def _scalar_bytes(value: Scalar, dtype: str, parameter: Parameter, where: str) -> bytes:
    """A scalar input goes at its own dtype, or at the wider one of the same kind that the kernel declares."""
    if is_float(dtype):
        if parameter.type in ("f32", "f64"):
            return struct.pack("<f" if parameter.type == "f32" else "<d", float(value))
        data = from_float64(np.array([float(value)]), dtype).tobytes()
    elif parameter.type in ("f32", "f64"):
        return struct.pack("<f" if parameter.type == "f32" else "<d", float(value))
    else:
        integer = int(value)
        if parameter.bytes > storage_dtype(dtype).itemsize and parameter.bytes <= 8:
            return integer.to_bytes(parameter.bytes, "little", signed=integer < 0)
        data = np.array([integer]).astype(storage_dtype(dtype)).tobytes()
    if len(data) != parameter.bytes:
        raise BadLaunch(f"{where}: a {dtype} is passed where the kernel takes {parameter.bytes} bytes")
    return data
