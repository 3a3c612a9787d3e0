"""The catalogue: for each built-in problem, `.cu` files that each hold one way to write its kernel.

A strategy is a kernel file whose block carries one more table, `[strategy]`. Files are collected by folder, so a
new one needs no registration.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from optiml.codec import decode
from optiml.expressions import evaluate, names_in
from optiml.kernel_file import split_block
from optiml.problems.problem import INT32_MAX, builtin_names, in_domain, kernel_from_text, load_builtin
from optiml.records import STRICT, Axis, Kernel, Problem, Size, Tensor

FOLDER = Path(__file__).parent
MAX_COMBINATIONS = 4096


@dataclass(frozen=True, kw_only=True)
class StrategyFields:
    """The `[strategy]` table of a catalogue file."""

    __pydantic_config__ = STRICT
    title: str
    rationale: str
    moves: tuple[str, ...]  # Nsight Compute metrics that it should lower against the seed
    dtypes: tuple[str, ...]
    requires: tuple[str, ...] = ()  # formulas over axes and scalars under which it is right; none: the whole domain


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to write the kernel of a built-in problem."""

    name: str  # the file name without its suffix
    problem: str
    title: str
    rationale: str
    moves: tuple[str, ...]
    dtypes: tuple[str, ...]
    requires: tuple[str, ...]
    text: str


@cache
def strategies(problem_name: str) -> tuple[Strategy, ...]:
    """The strategies of a built-in problem by name; none for a problem that is not built in.

    Raises:
        InvalidInput: a file of the catalogue is malformed.
    """
    if problem_name not in builtin_names():
        return ()
    return tuple(_read_strategy(path) for path in sorted((FOLDER / problem_name).glob("*.cu")))


def strategy_kernel(strategy: Strategy, dtype: str) -> Kernel:
    """The kernel of a strategy with its element type set to `dtype`."""
    return kernel_from_text(strategy.text, dtype=dtype)


def applicable(strategy: Strategy, problem: Problem, dtype: str) -> bool:
    """Whether the strategy computes this very problem, in this dtype, everywhere in its domain."""
    return (
        dtype in strategy.dtypes
        and is_builtin(problem, strategy.problem)
        and all(_holds_in_domain(requirement, problem) for requirement in strategy.requires)
    )


def is_builtin(problem: Problem, name: str) -> bool:
    """Whether `problem` is the built-in one of that name, in any dtype and with any domain inside the built-in's.

    What it computes is compared, never guessed from its shape: the reference has to be the built-in's own text.
    """
    if name not in builtin_names() or problem.name != name:
        return False
    own = load_builtin(name).problem
    return (
        problem.reference == own.reference
        and _shapes(problem.inputs) == _shapes(own.inputs)
        and _shapes(problem.outputs) == _shapes(own.outputs)
        and set(own.constraints) <= set(problem.constraints)
        and problem.axes.keys() == own.axes.keys()
        and all(_inside(axis, own.axes[axis_name]) for axis_name, axis in problem.axes.items())
    )


def _shapes(tensors: Mapping[str, Tensor]) -> list[tuple[str, tuple[Size, ...] | None]]:
    return [(name, tensor.shape) for name, tensor in tensors.items()]


def _inside(axis: Axis, domain: Axis) -> bool:
    """Whether every size of `axis` lies in `domain`; False where that cannot be told."""
    if axis == domain:
        return True
    if axis.type == "const":
        return axis.value is not None and in_domain(domain, axis.value)
    if axis.choices is not None:
        return all(in_domain(domain, size) for size in axis.choices)
    if domain.type == "const" or domain.choices is not None:
        return False
    return (
        (axis.min or 0) >= (domain.min or 0)
        and (INT32_MAX if axis.max is None else axis.max) <= (INT32_MAX if domain.max is None else domain.max)
        and (axis.multiple_of or 1) % (domain.multiple_of or 1) == 0
    )


def _holds_in_domain(requirement: str, problem: Problem) -> bool:
    """Whether `requirement` is one of the problem's constraints, or holds for each of its few possible sizes."""
    if _unspaced(requirement) in {_unspaced(constraint) for constraint in problem.constraints}:
        return True
    names = sorted(names_in(requirement))
    sizes = [_possible_sizes(problem.axes[name]) if name in problem.axes else () for name in names]
    if not all(sizes) or math.prod(map(len, sizes)) > MAX_COMBINATIONS:
        return False
    return all(evaluate(requirement, dict(zip(names, values, strict=True))) for values in itertools.product(*sizes))


def _possible_sizes(axis: Axis) -> tuple[int, ...]:
    """All sizes of a constant axis or of one with choices; none for an open range."""
    if axis.type == "const":
        return () if axis.value is None else (axis.value,)
    return tuple(size for size in axis.choices or () if in_domain(axis, size))


def _unspaced(formula: str) -> str:
    return "".join(formula.split())


def _read_strategy(path: Path) -> Strategy:
    text = path.read_text(encoding="utf-8")
    fields, _ = split_block(text)
    where = f"{path.parent.name}/{path.name} [strategy]"
    table = decode(StrategyFields, fields.get("strategy", {}), what=where)
    return Strategy(
        name=path.stem,
        problem=path.parent.name,
        title=table.title,
        rationale=table.rationale,
        moves=table.moves,
        dtypes=table.dtypes,
        requires=table.requires,
        text=text,
    )
