"""The built-in problems, and the semantic checks of a Problem beyond its field types."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from optiml.codec import decode
from optiml.errors import InvalidInput
from optiml.expressions import evaluate, names_in
from optiml.kernel_file import kernel_of_fields, split_block
from optiml.problems.data import DEFAULT_DISTRIBUTIONS, DISTRIBUTIONS, element_bytes, is_float, storage_dtype
from optiml.problems.dtypes import prelude
from optiml.records import Axis, Distribution, Kernel, Problem, Scalar, Tensor, Workload

FOLDER = Path(__file__).parent
TYPES_MARKER = "//@ types"
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Intent:
    """The words that name an operator and its axes in plain English."""

    names: tuple[str, ...]
    axes: Mapping[str, tuple[str, ...]]
    shape_order: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Builtin:
    """A built-in problem with its naive seed, its cheats and the words that name it."""

    name: str
    problem: Problem
    dtypes: tuple[str, ...]
    intent: Intent
    seed_text: str
    cheats: Mapping[str, str]  # name -> text of a kernel that must be rejected
    bytes_formula: str | None  # with E for the element size


@cache
def builtin_names() -> tuple[str, ...]:
    """Names of the built-in problems, sorted."""
    return tuple(sorted(path.parent.name for path in FOLDER.glob("*/problem.toml")))


@cache
def load_builtin(name: str) -> Builtin:
    """Read one built-in problem.

    Raises:
        InvalidInput: code `unknown_problem`, naming the nearest known one.
    """
    if name not in builtin_names():
        near = difflib.get_close_matches(name[:100], builtin_names(), n=1, cutoff=0.0)
        raise InvalidInput(
            f"{name[:100]!r} is no built-in problem; the nearest is {near[0]!r} (optiml problems lists them): for a "
            "problem of your own send the problem object each time, its name alone is not kept",
            code="unknown_problem",
        )
    folder = FOLDER / name
    fields = tomllib.loads((folder / "problem.toml").read_text(encoding="utf-8"))
    catalogue = fields.pop("catalogue")
    intent = decode(Intent, fields.pop("intent"), what=f"{name}/problem.toml [intent]")
    fields["reference"] = (folder / "reference.py").read_text(encoding="utf-8")
    for tensor in fields["inputs"].values():
        tensor.setdefault("shape", None)  # TOML has no null: an input without a shape is a scalar
    problem = check_problem(decode(Problem, fields, what=f"{name}/problem.toml"))
    return Builtin(
        name=name,
        problem=problem,
        dtypes=tuple(catalogue["dtypes"]),
        intent=intent,
        seed_text=(folder / "seed.cu").read_text(encoding="utf-8"),
        cheats={path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("cheat_*.cu"))},
        bytes_formula=catalogue.get("bytes"),
    )


def with_dtype(builtin: Builtin, dtype: str) -> Problem:
    """The problem with every float32 array and scalar in `dtype`; arrays that are integer already stay.

    In an integer dtype the data are integers from -100 to 100, so that no sum of a workload overflows.

    Raises:
        InvalidInput: the problem's kernels are not written for that dtype.
    """
    if dtype not in builtin.dtypes:
        raise InvalidInput(f"{builtin.name} is not available in {dtype}; choose from {', '.join(builtin.dtypes)}")
    problem = builtin.problem
    declared = builtin.dtypes[0]
    if dtype == declared:
        return problem

    def swapped(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: dataclasses.replace(tensor, dtype=dtype) if tensor.dtype == declared else tensor  # type: ignore[arg-type]
            for name, tensor in tensors.items()
        }

    formula = problem.bytes
    if builtin.bytes_formula is not None:
        formula = builtin.bytes_formula.replace("E", str(element_bytes(dtype)))
    changed = dataclasses.replace(
        problem, inputs=swapped(problem.inputs), outputs=swapped(problem.outputs), bytes=formula, tolerance=None
    )
    return changed if is_float(dtype) else _with_integer_data(changed, dtype)


def _with_integer_data(problem: Problem, dtype: str) -> Problem:
    drawn = {
        name: Distribution(distribution="integers", low=-100, high=101)
        for name, tensor in problem.inputs.items()
        if tensor.dtype == dtype and tensor.shape is not None
    }

    def redrawn(workload: Workload) -> Workload:
        return dataclasses.replace(workload, inputs={**workload.inputs, **drawn})

    return dataclasses.replace(
        problem, workloads=tuple(map(redrawn, problem.workloads)), bench=tuple(map(redrawn, problem.bench))
    )


def with_axes(problem: Problem, axes: Mapping[str, int]) -> Problem:
    """The problem asked for at given sizes: they become the bench entry. The domain stays.

    Raises:
        InvalidInput: an unknown axis, or a size outside its domain or the constraints.
    """
    if not axes:
        return problem
    for name in axes:
        if name not in problem.axes:
            raise InvalidInput(f"{name!r} is no axis of {problem.name}; its axes are {', '.join(problem.axes)}")
    model = problem.bench[0] if problem.bench else problem.workloads[0]
    bench = dataclasses.replace(model, axes={**model.axes, **axes}, weight=1.0)
    check_workload(problem, bench, where="axes")
    return dataclasses.replace(problem, bench=(bench,))


def kernel_from_text(text: str, *, dtype: str | None = None) -> Kernel:
    """A Kernel from a built-in `.cu` text: block read, `//@ types` replaced by the prelude of `dtype`."""
    fields, source = split_block(text)
    fields.pop("strategy", None)
    if dtype is not None and TYPES_MARKER in source:
        source = source.replace(TYPES_MARKER, prelude(dtype).rstrip("\n"), 1)
    return kernel_of_fields(fields, source)


def main_dtype(problem: Problem) -> str:
    """The dtype that built-in kernels are written for: that of the first floating array, else of the first array."""
    tensors = [*problem.inputs.values(), *problem.outputs.values()]
    floating = [tensor.dtype for tensor in tensors if tensor.shape is not None and "float" in tensor.dtype]
    return floating[0] if floating else tensors[0].dtype


# --- checks ----------------------------------------------------------------------------------------------------------
def check_problem(problem: Problem) -> Problem:
    """Check names, formulas, distributions and sizes; returns the problem unchanged.

    Raises:
        InvalidInput: the first thing wrong, by name.
    """
    if not problem.outputs:
        raise InvalidInput("the problem has no outputs; give at least one")
    if not problem.workloads:
        raise InvalidInput("the problem has no workloads; give at least one set of sizes")
    _check_names(problem)
    if isinstance(problem.reference, str) and "def run" not in problem.reference:
        raise InvalidInput("the reference must define run(...)")
    sizes = set(problem.axes) | {name for name, tensor in problem.inputs.items() if tensor.shape is None}
    formulas: list[tuple[str, Any]] = [("constraints", item) for item in problem.constraints]
    for name, tensor in (*problem.inputs.items(), *problem.outputs.items()):
        formulas += [(f"{name}.shape", item) for item in tensor.shape or ()]
    formulas += [
        (n, getattr(problem, n)) for n in ("accumulation", "flops", "bytes") if getattr(problem, n) is not None
    ]
    for where, formula in formulas:
        unknown = names_in(formula) - sizes
        if unknown:
            raise InvalidInput(f"{where}: {formula!r} uses {sorted(unknown)[0]!r}, which is no axis or scalar input")
    for index, workload in enumerate(problem.workloads):
        check_workload(problem, workload, where=f"workloads.{index}")
    for index, workload in enumerate(problem.bench):
        check_workload(problem, workload, where=f"bench.{index}")
    if problem.tolerance is not None and (problem.tolerance.rtol < 0 or problem.tolerance.atol < 0):
        raise InvalidInput("tolerance: rtol and atol may not be negative")
    return problem


def _check_names(problem: Problem) -> None:
    for name in (problem.name, *problem.axes, *problem.inputs, *problem.outputs):
        if not name.replace("_", "a").isalnum() or not name.isascii() or name[0].isdigit() or len(name) > 64:
            raise InvalidInput(f"{name[:80]!r} is no usable name; use letters, digits and underscores")
    for name, tensor in problem.outputs.items():
        if tensor.shape is None:
            raise InvalidInput(f"output {name!r} has no shape; an output is an array")
        if name in problem.inputs and problem.inputs[name] != tensor:
            raise InvalidInput(f"{name!r} is updated in place: its dtype and shape must be equal in inputs and outputs")
    shared = set(problem.axes) & (set(problem.inputs) | set(problem.outputs))
    if shared:
        raise InvalidInput(f"{sorted(shared)[0]!r} names both an axis and an array or scalar")
    for name, axis in problem.axes.items():
        if axis.type == "const" and axis.value is None:
            raise InvalidInput(f"axes.{name}: a const axis needs a value")
        if axis.min is not None and axis.max is not None and axis.min > axis.max:
            raise InvalidInput(f"axes.{name}: min {axis.min} is above max {axis.max}")
        if axis.multiple_of is not None and axis.multiple_of < 1:
            raise InvalidInput(f"axes.{name}: multiple_of must be at least 1")


def in_domain(axis: Axis, value: int) -> bool:
    """Whether one size lies inside its axis's domain. The least size is 0; hidden cases start at 1."""
    if axis.type == "const":
        return value == axis.value
    return (
        max(axis.min or 0, 0) <= value <= (INT32_MAX if axis.max is None else axis.max)
        and value % (axis.multiple_of or 1) == 0
        and (axis.choices is None or value in axis.choices)
    )


def sizes_of(problem: Problem, axes: Mapping[str, int]) -> dict[str, int]:
    """All axis values of a workload: the given ones plus the constants."""
    constants = {
        name: axis.value for name, axis in problem.axes.items() if axis.type == "const" and axis.value is not None
    }
    return {**constants, **axes}


def names_of(problem: Problem, axes: Mapping[str, int], scalars: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """What formulas of the problem may read: axes and scalars."""
    return {**sizes_of(problem, axes), **scalars}


def satisfies(problem: Problem, axes: Mapping[str, int], scalars: Mapping[str, Scalar]) -> bool:
    """Whether sizes lie in their domains and every constraint holds."""
    sizes = sizes_of(problem, axes)
    if not all(in_domain(problem.axes[name], value) for name, value in sizes.items()):
        return False
    names = names_of(problem, axes, scalars)
    return all(evaluate(item, names) for item in problem.constraints)


def check_workload(problem: Problem, workload: Workload, *, where: str) -> None:
    """Raise InvalidInput where a workload's sizes, scalars or distributions cannot be used."""
    sizes = sizes_of(problem, workload.axes)
    for name in workload.axes:
        if name not in problem.axes:
            raise InvalidInput(f"{where}: {name!r} is no axis; the axes are {', '.join(problem.axes)}")
    for name, axis in problem.axes.items():
        if name not in sizes:
            raise InvalidInput(f"{where}: axis {name!r} has no size")
        if not in_domain(axis, sizes[name]):
            raise InvalidInput(f"{where}: {name} = {sizes[name]} is outside its domain ({describe_axis(axis)})")
    scalars = {name for name, tensor in problem.inputs.items() if tensor.shape is None}
    missing, extra = scalars - set(workload.scalars), set(workload.scalars) - scalars
    if missing:
        raise InvalidInput(f"{where}: scalar {sorted(missing)[0]!r} has no value")
    if extra:
        raise InvalidInput(f"{where}: {sorted(extra)[0]!r} is no scalar input")
    for name, value in workload.scalars.items():
        dtype = problem.inputs[name].dtype
        least, most = _integers_of(dtype)
        if not is_float(dtype) and not (isinstance(value, int) and least <= value <= most):
            raise InvalidInput(f"{where}: scalar {name} = {value!r} is no {dtype}; give an integer in {least}..{most}")
    names = names_of(problem, workload.axes, workload.scalars)
    for item in problem.constraints:
        if not evaluate(item, names):
            raise InvalidInput(f"{where}: the constraint {item!r} does not hold at {dict(workload.axes)}")
    total = 0
    for name, tensor in (*problem.inputs.items(), *problem.outputs.items()):
        count = 1
        for size in tensor.shape or ():
            extent = evaluate(size, names)
            if extent < 0:
                raise InvalidInput(f"{where}: {name} has a negative extent {extent}")
            count *= extent
        total += count * element_bytes(tensor.dtype)
    if total > 2**36:
        raise InvalidInput(f"{where}: the arrays need {total} bytes; that is more than 64 GiB", code="too_large")
    for name, spec in workload.inputs.items():
        if name not in problem.inputs or problem.inputs[name].shape is None:
            raise InvalidInput(f"{where}: {name!r} is no input array")
        _check_distribution(spec, problem.inputs[name].dtype, where=f"{where}.inputs.{name}")


def _check_distribution(spec: str | Distribution, dtype: str, *, where: str) -> None:
    name = spec if isinstance(spec, str) else spec.distribution
    if isinstance(spec, Distribution):
        given = sum(item is not None for item in (spec.distribution, spec.values, spec.npy))
        if given != 1:
            raise InvalidInput(f"{where}: give exactly one of distribution, values and npy")
        if spec.low is not None and spec.high is not None and spec.low >= spec.high:
            raise InvalidInput(f"{where}: low {spec.low} must be below high {spec.high}")
        least, most = _integers_of(dtype)
        if (spec.low or 0) < least or (spec.low or 0) > most or (spec.high is not None and spec.high > most + 1):
            raise InvalidInput(f"{where}: {dtype} holds integers from {least} to {most} only")
    if name is not None and name not in DISTRIBUTIONS:
        near = difflib.get_close_matches(name[:50], DISTRIBUTIONS, n=1, cutoff=0.0)[0]
        raise InvalidInput(f"{where}: {name[:50]!r} is no distribution; did you mean {near!r}?")


def _integers_of(dtype: str) -> tuple[int, int]:
    """Least and largest integer that data of a dtype may be drawn from; 64 bits for floating ones."""
    if is_float(dtype):
        return -(2**63), 2**63 - 2
    if dtype == "bool":
        return 0, 1
    info = np.iinfo(storage_dtype(dtype))
    return int(info.min), min(int(info.max), 2**63 - 2)


def describe_axis(axis: Axis) -> str:
    """The domain of an axis in words."""
    if axis.type == "const":
        return f"always {axis.value}"
    if axis.choices is not None:
        return "one of " + ", ".join(map(str, axis.choices))
    text = f"{axis.min or 0}..{INT32_MAX if axis.max is None else axis.max}"
    return text if not axis.multiple_of or axis.multiple_of == 1 else f"{text}, multiples of {axis.multiple_of}"


def named_distributions(problem: Problem, name: str) -> tuple[str | Distribution, ...]:
    """The distributions that hidden cases may use for one input array (contract §1)."""
    integer = "float" not in problem.inputs[name].dtype
    entries = [*problem.workloads, *problem.bench]
    named: list[str | Distribution] = []
    for workload in entries:
        spec = workload.inputs.get(name)
        if spec is not None and not (
            isinstance(spec, Distribution) and (spec.values is not None or spec.npy is not None)
        ):
            named += [] if spec in named else [spec]
    open_anywhere = any(name not in workload.inputs for workload in entries)
    if open_anywhere and not integer:
        named += [item for item in DEFAULT_DISTRIBUTIONS if item not in named]
    if open_anywhere and integer and not named:
        named.append("integers")
    return tuple(named)
