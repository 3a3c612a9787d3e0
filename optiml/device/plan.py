"""From a launch plan in formulas to concrete launches: sizes, argument bytes, arrays."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping

import numpy as np

from optiml.device.entries import Parameter, entry_parameters, required_block
from optiml.device.recorded import recorded_plan
from optiml.device.steps import (
    BadLaunch,
    Copy,
    Memset,
    Plan,
    PlannedArray,
    PlannedLaunch,
    Pointer,
    Role,
    Step,
    Upload,
    Value,
    check_limits,
)
from optiml.errors import InvalidInput
from optiml.expressions import evaluate, evaluate_float, names_in
from optiml.problems.data import array_shape, from_float64, is_float, storage_dtype
from optiml.problems.problem import names_of
from optiml.records import Build, DeviceInfo, Kernel, Launch, Problem, Scalar, Size, Workload

__all__ = [
    "BadLaunch", "Copy", "Memset", "Parameter", "Plan", "PlannedArray", "PlannedLaunch", "Pointer", "Role", "Step",
    "Upload", "Value", "entry_parameters", "resolve_plan",
]  # fmt: skip
MAX_ARRAY_BYTES = 1 << 34


def resolve_plan(kernel: Kernel, build: Build, problem: Problem, workload: Workload, limits: DeviceInfo) -> Plan:
    """Evaluate the launch plan at one workload.

    A launch whose grid has a 0 is left out. Dynamic shared memory above 48 KiB is granted up to the device's opt-in
    limit.

    A launcher is called under the recorder instead, once for each size (`recorded`).

    Raises:
        BadLaunch: a size the device refuses, or arguments that do not fit the kernel's parameters.
        Unsupported: a launcher that cannot be recorded here.
    """
    names: dict[str, Scalar] = {**names_of(problem, workload.axes, workload.scalars), **kernel.params}
    arrays = _arrays(kernel, problem, names)
    if kernel.launcher is not None:
        return recorded_plan(kernel.launcher, kernel.source, build, problem, workload, arrays, limits)
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
        cluster = None if launch.cluster is None else _extent(launch, "cluster", names, index)
        check_limits(f"launch {index}", grid, block, shared, static, limits, cluster=cluster)
        required = required_block(build.ptx, symbol)
        if required is not None and block != required:
            raise BadLaunch(f"launch {index}: a block of {block}, but {launch.kernel} requires {required}")
        taken = parameters.get(symbol, ())
        given = _without_scratch(launch, taken) if kernel.language == "ptx" else launch
        args = _arguments(given, taken, arrays, problem, names, index)
        launches.append(
            PlannedLaunch(
                symbol=symbol, grid=grid, block=block, shared_bytes=shared, args=args, cluster=cluster,
                cooperative=launch.cooperative,
            )
        )  # fmt: skip
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
    sizes: tuple[Size, ...] = {"grid": launch.grid, "block": launch.block, "cluster": launch.cluster or ()}[label]
    values = [_evaluated(size, names, f"launch {index}: {label}") for size in sizes]
    x, y, z = (*values, *([1] * (3 - len(values))))
    return x, y, z


def _without_scratch(launch: Launch, parameters: tuple[Parameter, ...]) -> Launch:
    """The launch with null for the last parameters if they are pointers that it leaves out.

    Triton adds such pointers, to scratch memory that a kernel need not have.
    """
    missing = parameters[len(launch.args) :]
    if not missing or any(p.bytes != 8 or p.type[0] == "f" for p in missing):
        return launch
    return dataclasses.replace(launch, args=(*launch.args, *[0] * len(missing)))


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
