"""Semantic checks of a Kernel against its Problem, beyond field types (contract §2)."""

from __future__ import annotations

import math
import re

from optiml.codec import normalised_source
from optiml.errors import InvalidInput
from optiml.expressions import names_in
from optiml.records import Kernel, Problem, Scalar

PARAM_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
MAX_PARAMS = 64
MAX_LAUNCHES = 64
MAX_TUNABLE_VALUES = 64
_FLAG = re.compile(r"--use_fast_math|-fmad=(?:true|false)|--maxrregcount=(\d+)|-std=c\+\+(?:17|20)|-lineinfo")
_KEYWORDS = frozenset(
    """alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t class compl
    concept const consteval constexpr constinit const_cast continue co_await co_return co_yield decltype default
    delete do double dynamic_cast else enum explicit export extern false float for friend goto if inline int
    long mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public register
    reinterpret_cast requires return short signed sizeof static static_assert static_cast struct switch template
    this thread_local throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t
    while xor xor_eq __global__ __device__ __shared__ __host__ __constant__ __restrict__ blockIdx blockDim
    threadIdx gridDim warpSize""".split()  # noqa: SIM905 (a list of literals would be harder to read)
)


def check_kernel(kernel: Kernel, problem: Problem) -> Kernel:
    """Check params, flags, launches and workspace; returns the kernel unchanged.

    Raises:
        InvalidInput: the first thing wrong, by name.
    """
    normalised_source(kernel.source)
    if not kernel.source.strip():
        raise InvalidInput("the kernel's source is empty")
    taken = {*problem.axes, *problem.inputs, *problem.outputs, *kernel.workspace}
    if len(kernel.params) > MAX_PARAMS:
        raise InvalidInput(f"the kernel has {len(kernel.params)} params; at most {MAX_PARAMS} are taken")
    for name, value in kernel.params.items():
        if not PARAM_NAME.fullmatch(name) or name in _KEYWORDS:
            raise InvalidInput(f"param {name[:40]!r}: use letters, digits and underscores, and no keyword")
        if name in taken:
            raise InvalidInput(f"param {name!r} has the name of an axis, an array or a workspace; rename it")
        _check_value(value, f"params.{name}")
    for name, values in kernel.tunables.items():
        if name not in kernel.params:
            raise InvalidInput(f"tunables.{name}: there is no param of that name; add it to params")
        if not 1 <= len(values) <= MAX_TUNABLE_VALUES:
            raise InvalidInput(f"tunables.{name}: give 1 to {MAX_TUNABLE_VALUES} values")
        for value in values:
            _check_value(value, f"tunables.{name}")
    for flag in kernel.flags:
        match = _FLAG.fullmatch(flag)
        if match is None or (match.group(1) is not None and not 16 <= int(match.group(1)) <= 255):
            raise InvalidInput(
                f"flag {flag[:60]!r} is not allowed; choose from --use_fast_math, -fmad=true|false, "
                "--maxrregcount=16..255, -std=c++17|c++20, -lineinfo"
            )
    _check_workspace(kernel, problem)
    _check_launches(kernel, problem)
    return kernel


def _check_value(value: Scalar, where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidInput(f"{where} must be finite")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise InvalidInput(f"{where} leaves the 64-bit range")


def _check_workspace(kernel: Kernel, problem: Problem) -> None:
    for name, space in kernel.workspace.items():
        if not PARAM_NAME.fullmatch(name) or name in {*problem.axes, *problem.inputs, *problem.outputs}:
            raise InvalidInput(f"workspace {name[:40]!r}: choose a plain name that the problem does not use")
        for size in space.shape:
            _check_formula(size, kernel, problem, f"workspace.{name}.shape")


def _check_launches(kernel: Kernel, problem: Problem) -> None:
    if len(kernel.launches) > MAX_LAUNCHES:
        raise InvalidInput(f"the plan has {len(kernel.launches)} launches; at most {MAX_LAUNCHES} are taken")
    if kernel.launcher is not None and kernel.launches:
        raise InvalidInput("give either launches or a launcher, not both")
    arrays = {name for name, tensor in problem.inputs.items() if tensor.shape is not None}
    arrays |= {*problem.outputs, *kernel.workspace}
    for index, launch in enumerate(kernel.launches):
        where = f"launches.{index}"
        for label, sizes in (("grid", launch.grid), ("block", launch.block)):
            if not 1 <= len(sizes) <= 3:
                raise InvalidInput(f"{where}.{label} has {len(sizes)} entries; give 1 to 3")
            for size in sizes:
                _check_formula(size, kernel, problem, f"{where}.{label}")
        _check_formula(launch.shared_bytes, kernel, problem, f"{where}.shared_bytes")
        for position, arg in enumerate(launch.args):
            if isinstance(arg, str) and arg not in arrays:
                _check_formula(arg, kernel, problem, f"{where}.args.{position}")
            if isinstance(arg, float) and not math.isfinite(arg):
                raise InvalidInput(f"{where}.args.{position} must be finite")


def _check_formula(formula: int | str, kernel: Kernel, problem: Problem, where: str) -> None:
    scalars = {name for name, tensor in problem.inputs.items() if tensor.shape is None}
    known = {*problem.axes, *scalars, *kernel.params}
    unknown = sorted(names_in(formula) - known)
    if unknown:
        raise InvalidInput(
            f"{where}: {formula!r} uses {unknown[0]!r}, which is no axis, scalar, array or param; "
            f"known are {', '.join(sorted(known | set(problem.inputs) | set(problem.outputs)))}"
        )
