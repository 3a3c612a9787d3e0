"""Global memory traffic of a kernel read off its text, at the sizes of the problem's first bench entry.

An estimate to rank edits with before anything is built: the first warp's addresses are worked out from the index
formulas, loops are taken to run their whole range, and guards to hold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tree_sitter import Node

from optiml.errors import InvalidInput
from optiml.expressions import evaluate
from optiml.problems.dtypes import CUDA_TYPES
from optiml.records import Kernel, Problem
from optiml.search.loops import ForLoop, for_loop
from optiml.search.polynomial import Polynomial
from optiml.search.source import Access, Function, Site, ancestors, sites

SECTOR_BYTES = 32
WARP = 32
UNKNOWN_TRIPS = 16.0  # of a loop whose range the text does not tell
# Bytes by C++ type; "T:<dtype>" is what `T` of the type prelude stands for.
ELEMENT_BYTES = {
    "float": 4, "int": 4, "unsigned": 4, "unsigned int": 4, "uint32_t": 4, "int32_t": 4, "double": 8, "long long": 8,
    "unsigned long long": 8, "int64_t": 8, "half": 2, "__half": 2, "__nv_bfloat16": 2, "short": 2, "unsigned short": 2,
    "char": 1, "signed char": 1, "unsigned char": 1, "int8_t": 1, "uint8_t": 1, "bool": 1,
    "float4": 16, "int4": 16, "uint4": 16, "float2": 8, "int2": 8, "double2": 16,
    **{f"T:{dtype}": cuda.element_bytes for dtype, cuda in CUDA_TYPES.items()},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Requests are warp-level; sectors are 32 bytes. All are totals over the grid."""

    load_requests: float
    load_sectors: float
    store_requests: float
    store_sectors: float
    threads: float


def traffic(kernel: Kernel, problem: Problem) -> Traffic | None:
    """The estimate, summed over the launches; None where the text or the problem does not tell enough."""
    if not problem.bench:
        return None
    names = sizes(kernel, problem)
    found = sites(kernel)
    if not found or len(found) != len(kernel.launches):
        return None
    total = [0.0] * 5
    for site in found:
        shape = launch_shape(site, names)
        if shape is None:
            return None
        grid, block = shape
        warps = math.prod(grid) * math.ceil(math.prod(block) / WARP)
        for access in site.accesses:
            if access.space != "global" or access.kind == "address":
                continue
            requests = warps * trips_around(site, access.node, names)
            sectors = requests * lane_sectors(site, access, names, block)
            if access.reads:
                total[0] += requests
                total[1] += sectors
            if access.writes:
                total[2] += requests
                total[3] += sectors
        total[4] += math.prod(grid) * math.prod(block)
    return Traffic(
        load_requests=total[0], load_sectors=total[1], store_requests=total[2], store_sectors=total[3], threads=total[4]
    )


def sizes(kernel: Kernel, problem: Problem) -> dict[str, int]:
    """Axes, integer scalars and params at the first bench entry."""
    names: dict[str, int] = {name: axis.value for name, axis in problem.axes.items() if axis.value is not None}
    if problem.bench:
        names.update(problem.bench[0].axes)
        names.update({name: v for name, v in problem.bench[0].scalars.items() if isinstance(v, int)})
    names.update({name: int(value) for name, value in kernel.params.items() if isinstance(value, int)})
    return names


def launch_shape(site: Site, names: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Grid and block in numbers."""
    try:
        grid = tuple(max(0, evaluate(entry, names)) for entry in site.launch.grid)
        block = tuple(evaluate(entry, names) for entry in site.launch.block)
    except InvalidInput:  # a formula over names that the bench entry does not give
        return None
    return (grid, block) if all(size > 0 for size in block) else None


def trips_around(site: Site, node: Node, names: Mapping[str, int]) -> float:
    """How often a thread reaches `node`: the product of the trip counts of the loops around it."""
    trips = 1.0
    for outer in ancestors(node, below=site.function.node):
        if outer.type == "for_statement":
            loop = for_loop(outer)
            trips *= UNKNOWN_TRIPS if loop is None else trip_count(site, loop, names)
        elif outer.type in ("while_statement", "do_statement"):
            trips *= UNKNOWN_TRIPS
    return trips


def trip_count(site: Site, loop: ForLoop, names: Mapping[str, int]) -> float:
    """Iterations of the first thread; `UNKNOWN_TRIPS` where the text does not tell."""
    lanes = _first_thread(site, names)
    start, bound = value_of(site.polynomial(loop.start), lanes), value_of(site.polynomial(loop.bound), lanes)
    step = 1 if loop.step_node is None else value_of(site.polynomial(loop.step_node), lanes)
    if start is None or bound is None or not step or step < 0:
        return UNKNOWN_TRIPS
    return max(0.0, math.ceil((bound - start + (loop.comparison == "<=")) / step))


def lane_sectors(site: Site, access: Access, names: Mapping[str, int], block: tuple[int, ...]) -> float:
    """Sectors that one request of the first warp touches; the worst case where the index cannot be read."""
    size = element_bytes(site.function, access.array)
    if access.index is None:
        return float(WARP)
    addresses = []
    for lane in _warp(site, names, block):
        value = value_of(access.index, lane)
        if value is None:
            return float(WARP)
        addresses.append(value * size)
    return float(len({(address + byte) // SECTOR_BYTES for address in addresses for byte in (0, size - 1)}))


def element_bytes(function: Function, array: str) -> int:
    """Bytes of an element of a pointer parameter; 4 for a type it does not know."""
    parameter = function.parameter(array)
    return 4 if parameter is None else ELEMENT_BYTES.get(parameter.type_text, 4)


def value_of(polynomial: Polynomial, names: Mapping[str, int]) -> int | None:
    """The polynomial in numbers; loop counters and other unknown names count as 0 unless they hide in an atom."""
    total = 0
    for monomial, factor in polynomial.items():
        product = factor
        for item in monomial:
            if item in names:
                product *= names[item]
            elif re.fullmatch(r"[A-Za-z_]\w*", item):
                product = 0
            else:
                value = _opaque(item, names)
                if value is None:
                    return None
                product *= value
        total += product
    return total


def _opaque(text: str, names: Mapping[str, int]) -> int | None:
    """Value of a division, remainder or the like, from its canonical text."""
    readable = re.sub(r"\b(blockIdx|threadIdx|blockDim|gridDim)\.([xyz])", r"\1_\2", text).replace(" / ", " // ")
    known = {name.replace(".", "_"): value for name, value in names.items()}
    for name in set(re.findall(r"[A-Za-z_]\w*", readable)) - set(known) - {"min", "max"}:
        known[name] = 0  # a loop counter
    try:
        return evaluate(readable, known)
    except InvalidInput:  # a call or an operator outside the formula language
        return None


def _first_thread(site: Site, names: Mapping[str, int]) -> dict[str, int]:
    known = dict(names)
    for name, text in site.arguments.items():
        try:
            known[name] = evaluate(int(text) if text.isdigit() else text, names)
        except InvalidInput:  # a pointer, or a floating scalar
            continue
    shape = launch_shape(site, names)
    grid, block = shape if shape is not None else ((1,), (1,))
    for axis, letter in enumerate("xyz"):
        known[f"threadIdx.{letter}"] = known[f"blockIdx.{letter}"] = 0
        known[f"blockDim.{letter}"] = block[axis] if axis < len(block) else 1
        known[f"gridDim.{letter}"] = grid[axis] if axis < len(grid) else 1
    return known


def _warp(site: Site, names: Mapping[str, int], block: tuple[int, ...]) -> Iterator[dict[str, int]]:
    """Names as each lane of the first warp sees them."""
    first = _first_thread(site, names)
    width, height = block[0], block[1] if len(block) > 1 else 1
    for lane in range(min(WARP, math.prod(block))):
        first["threadIdx.x"] = lane % width
        first["threadIdx.y"] = lane // width % height
        first["threadIdx.z"] = lane // (width * height)
        yield first
