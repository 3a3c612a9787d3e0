"""Exchange the roles of thread indices so that neighbouring threads touch neighbouring elements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tree_sitter import Node

from optiml.records import Kernel, Size
from optiml.search import polynomial as poly
from optiml.search.edit import LOAD_SECTORS, STORE_SECTORS, Edit, EditContext, Proposal, down, with_launch, with_source
from optiml.search.estimate import Traffic, traffic
from optiml.search.grid import ceil_div, ceiling
from optiml.search.source import Change, Local, Site, contains, identifiers, mentions, text_of, unwrap, walk

LEAST_GAIN = 0.9  # share of the sectors that may remain; an exchange that saves less is not proposed
_GEOMETRY = frozenset({"threadIdx", "blockIdx", "blockDim", "gridDim"})


def propose(context: EditContext) -> Iterator[Proposal]:
    """Exchanges that the index formulas say lower the sectors moved: of two axes of the block, of two index variables,
    or of the parts of a flat index."""
    before = traffic(context.kernel, context.problem)
    if before is None:
        return
    for site in context.sites:
        if site.launches != 1:
            continue
        candidates: list[tuple[Kernel, str]] = []
        for other in ("y", "z"):
            candidates += _exchanged_axes(context, site, other)
        candidates += _exchanged_variables(context, site)
        candidates += _exchanged_parts(context, site)
        for kernel, what in candidates:
            after = traffic(kernel, context.problem)
            if after is not None and _sectors(after) < LEAST_GAIN * _sectors(before):
                yield _proposal(kernel, what, before, after)


def _sectors(estimate: Traffic) -> float:
    return estimate.load_sectors + estimate.store_sectors


def _proposal(kernel: Kernel, what: str, before: Traffic, after: Traffic) -> Proposal:
    expected = [
        down(metric, round(new / old, 4))
        for metric, old, new in (
            (LOAD_SECTORS, before.load_sectors, after.load_sectors),
            (STORE_SECTORS, before.store_sectors, after.store_sectors),
        )
        if old > 0 and new < old
    ]
    return Proposal(
        kernel=kernel,
        rationale=f"{what}, so neighbouring threads touch neighbouring elements and a request needs fewer sectors",
        expected=tuple(expected),
    )


# --- two axes of the block -------------------------------------------------------------------------------------------
def _exchanged_axes(context: EditContext, site: Site, other: str) -> list[tuple[Kernel, str]]:
    """x and another axis exchanged everywhere: the same threads under other coordinates, so always right."""
    axis = "xyz".index(other)
    if len(site.launch.block) <= axis or site.function.calls_any(("__shfl_sync",)):
        return []
    changes: list[Change] = []
    for node in walk(site.function.body):
        if node.type != "field_expression":
            continue
        argument, name = node.child_by_field_name("argument"), node.child_by_field_name("field")
        if argument is None or name is None or text_of(argument) not in _GEOMETRY:
            continue
        renamed = {"x": other, other: "x"}.get(text_of(name))
        if renamed is not None:
            changes.append((name.start_byte, name.end_byte, renamed))
    if not changes:
        return []
    kernel = with_source(context.kernel, site.source.rewrite(changes))
    grid = [*site.launch.grid, 1, 1][: max(len(site.launch.grid), axis + 1)]
    block = list(site.launch.block)
    grid[0], grid[axis] = grid[axis], grid[0]
    block[0], block[axis] = block[axis], block[0]
    kernel = with_launch(kernel, site.index, grid=tuple(grid), block=tuple(block))
    return [(kernel, f"The x and {other} indices of threads and blocks exchange their roles")]


# --- two index variables ---------------------------------------------------------------------------------------------
def _exchanged_variables(context: EditContext, site: Site) -> list[tuple[Kernel, str]]:
    """`i = thread index, j = blockIdx.y` becomes `j = thread index, i = blockIdx.y`, with the grid to match."""
    if len(site.launch.grid) < 2 or any(size != 1 for size in site.block[1:]) or site.function.is_cooperative:
        return []
    rows = site.thread_indices("x")
    columns = [
        local
        for local in site.function.locals
        if local.initial is not None and not local.is_pointer and not site.function.writes_to(local)
        and site.polynomial(local.initial) == poly.atom("blockIdx.y")
    ]  # fmt: skip
    if len(rows) != 1 or len(columns) != 1:
        return []
    i, j = rows[0], columns[0]
    covered = ceiling(site.launch.grid[0], context.params)
    if i.initial is None or j.initial is None or covered is None or covered.divisor != site.block[0]:
        return []
    if not _only_in(site, (i, j)):
        return []
    changes: list[Change] = [
        (i.initial.start_byte, i.initial.end_byte, text_of(j.initial)),
        (j.initial.start_byte, j.initial.end_byte, text_of(i.initial)),
    ]
    if not _is_guarded(site, j.name):
        bound = next((name for name, text in site.arguments.items() if text == str(site.launch.grid[1])), None)
        if bound is None:
            return []
        last = max(i.declaration.end_byte, j.declaration.end_byte)
        changes.append((last, last, f"\n    if ({j.name} >= {bound}) return;"))
    grid: tuple[Size, ...] = (
        ceil_div(str(site.launch.grid[1]), covered.divisor_text), covered.extent, *site.launch.grid[2:]
    )  # fmt: skip
    kernel = with_launch(with_source(context.kernel, site.source.rewrite(changes)), site.index, grid=grid)
    return [(kernel, f"{j.name} follows the thread index and {i.name} the block")]


def _only_in(site: Site, places: Sequence[Local]) -> bool:
    return all(
        any(contains(place.declaration, node) for place in places)
        for node in identifiers(site.function.body)
        if text_of(node) in ("threadIdx", "blockIdx")
    )


def _is_guarded(site: Site, name: str) -> bool:
    """Whether some condition of the function bounds `name` from above."""
    for node in walk(site.function.body):
        if node.type == "binary_expression":
            left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
            sign = node.child_by_field_name("operator")
            if left is None or right is None or sign is None or text_of(sign) not in ("<", ">="):
                continue
            if text_of(unwrap(left)) == name and re.fullmatch(r"\w+", text_of(unwrap(right))):
                return True
    return False


# --- parts of a flat index -------------------------------------------------------------------------------------------
def _exchanged_parts(context: EditContext, site: Site) -> list[tuple[Kernel, str]]:
    """`i = t % H, j = t / H` under `t < H * W` becomes `j = t % W, i = t / W`."""
    found = []
    for low in site.function.locals:
        parts = _operands(low, "%")
        if parts is None or site.function.writes_to(low):
            continue
        flat, inner = parts
        for high in site.function.locals:
            other = _operands(high, "/")
            if other is None or text_of(other[0]) != text_of(flat) or text_of(other[1]) != text_of(inner):
                continue
            if not _only_split(site, flat, low, high):
                continue
            outer = _outer_extent(site, flat, inner)
            if outer is None or low.initial is None or high.initial is None or site.function.writes_to(high):
                continue
            changes: list[Change] = [
                (low.initial.start_byte, low.initial.end_byte, f"{text_of(flat)} / {outer}"),
                (high.initial.start_byte, high.initial.end_byte, f"{text_of(flat)} % {outer}"),
            ]
            kernel = with_source(context.kernel, site.source.rewrite(changes))
            found.append((kernel, f"{high.name} is the part of the flat index that changes fastest"))
    return found


def _operands(local: Local, operator: str) -> tuple[Node, Node] | None:
    if local.initial is None or local.is_pointer:
        return None
    value = unwrap(local.initial)
    if value.type != "binary_expression":
        return None
    sign = value.child_by_field_name("operator")
    left, right = value.child_by_field_name("left"), value.child_by_field_name("right")
    if sign is None or left is None or right is None or text_of(sign) != operator:
        return None
    return left, right


def _only_split(site: Site, flat: Node, low: Local, high: Local) -> bool:
    """Whether the flat index serves its guard and its two parts only: elsewhere it would keep the old order."""
    for node in identifiers(site.function.body):
        if text_of(node) != text_of(flat) or contains(low.declarator, node) or contains(high.declarator, node):
            continue
        local = site.function.local_at(text_of(flat), node)
        declares = local is not None and contains(local.declarator, node)
        compared = node.parent is not None and any(child.type in ("<", ">=") for child in node.parent.children)
        if not declares and not compared:
            return False
    return True


def _outer_extent(site: Site, flat: Node, inner: Node) -> str | None:
    """The W of a guard `flat < H * W`, where `inner` is H; a parameter of the kernel."""
    for node in walk(site.function.body):
        if node.type != "binary_expression":
            continue
        left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
        sign = node.child_by_field_name("operator")
        if left is None or right is None or sign is None or text_of(sign) not in ("<", ">="):
            continue
        if text_of(unwrap(left)) != text_of(unwrap(flat)) or mentions(right, (text_of(flat),)):
            continue
        total, part = site.polynomial(right), site.polynomial(inner)
        for parameter in site.function.parameters:
            if not parameter.is_pointer and poly.multiply(part, poly.atom(parameter.name)) == total:
                return parameter.name
    return None


EDIT = Edit(
    name="swap_indices",
    metric=LOAD_SECTORS,
    why="Threads of a warp differ in threadIdx.x first: if it walks down a column, each lane needs its own sector.",
    source="CUDA C++ Best Practices Guide, Coalesced Access to Global Memory",
    propose=propose,
)
