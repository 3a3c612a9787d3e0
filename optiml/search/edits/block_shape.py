"""Change the threads of a block, and keep the grid formula and hard-coded copies of the size consistent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from optiml.records import Size
from optiml.search.edit import (
    LOAD_SECTORS,
    WARPS_ACTIVE,
    Edit,
    EditContext,
    Proposal,
    down,
    up,
    with_launch,
    with_source,
)
from optiml.search.grid import with_divisor
from optiml.search.source import Change, Site, integer, text_of, walk

MAX_THREADS = 1024
LINEAR = (256, 128, 512, 1024, 64)
PLANES = ((32, 8), (32, 4), (32, 16), (16, 16), (64, 4), (32, 32), (128, 2))


def propose(context: EditContext) -> Iterator[Proposal]:
    """Other shapes for blocks with literal sizes; blocks made of params are left to retune_param.

    Where the source holds the size as a literal of its own, that literal changes too: in thread index formulas,
    shared array sizes and loop bounds alike. Verification decides whether that was all.
    """
    for site in context.sites:
        if site.launches != 1:
            continue
        sizes = [entry for entry in site.launch.block if isinstance(entry, int)]
        if len(sizes) != len(site.launch.block) or any(size < 1 for size in sizes):
            continue
        for shape in _shapes(sizes):
            proposal = _reshaped(context, site, sizes, shape)
            if proposal is not None:
                yield proposal


def _shapes(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    used = [size for size in sizes if size > 1] or [1]
    if len(used) == 1:
        axis = next((index for index, size in enumerate(sizes) if size > 1), 0)
        around = [size for size in LINEAR if size != used[0]]
        return [tuple(size if index == axis else 1 for index in range(len(sizes))) for size in around]
    if len(sizes) == 2:
        return [shape for shape in PLANES if list(shape) != list(sizes)]
    return []


def _reshaped(context: EditContext, site: Site, old: Sequence[int], new: tuple[int, ...]) -> Proposal | None:
    if math.prod(new) > MAX_THREADS:
        return None
    grid: list[Size] = list(site.launch.grid)
    literals = _size_literals(site, old)
    for axis, (before, after) in enumerate(zip(old, new, strict=True)):
        if before == after or axis >= len(grid):
            continue
        adapted = with_divisor(grid[axis], before, after, context.params)
        if adapted is not None:
            grid[axis] = adapted
        elif _thread_index_used(site, "xyz"[axis]):
            return None  # the grid was written for this size in a way that cannot be read
    changes: list[Change] = []
    for axis, nodes in literals.items():
        if old[axis] != new[axis]:
            changes += [(start, end, str(new[axis])) for start, end in nodes]
    if len(set(old)) == 1 and len(old) > 1 and len(set(new)) > 1 and changes:
        return None  # one literal stands for both sides: it cannot become two
    kernel = with_launch(context.kernel, site.index, block=tuple(new), grid=tuple(grid))
    if changes:
        kernel = with_source(kernel, site.source.rewrite(changes))
    shape = "x".join(str(size) for size in new)
    before_shape = "x".join(str(size) for size in old)
    wider = len(old) > 1 and new[0] > old[0]
    small = math.prod(old) < 128 <= math.prod(new)
    factor = max(1.05, min(2.0, 128 / math.prod(old))) if small else 1.05
    return Proposal(
        kernel=kernel,
        rationale=f"Blocks of {shape} threads instead of {before_shape} change how many warps an SM holds",
        expected=(up(WARPS_ACTIVE, factor), *((down(LOAD_SECTORS, 0.8),) if wider else ())),
        risks=("the source holds the block size as a literal, which was changed with it",) if changes else (),
    )


def _size_literals(site: Site, sizes: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """Literals in the function that equal a block size of at least 16, by axis; the first equal axis counts."""
    found: dict[int, list[tuple[int, int]]] = {}
    for node in walk(site.function.body):
        if node.type != "number_literal":
            continue
        value = integer(text_of(node))
        if value is None or value < 16 or value not in sizes or text_of(node) != str(value):
            continue
        found.setdefault(list(sizes).index(value), []).append((node.start_byte, node.end_byte))
    # 32 is as likely the warp size as a block size: it changes only where it multiplies a block index.
    if 32 in sizes and not _multiplies_block_index(site, 32):
        found.pop(list(sizes).index(32), None)
    return found


def _multiplies_block_index(site: Site, size: int) -> bool:
    for node in walk(site.function.body):
        if node.type == "binary_expression":
            left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
            sides = {text_of(side) for side in (left, right) if side is not None}
            if str(size) in sides and any(side.startswith("blockIdx.") for side in sides):
                return True
    return False


def _thread_index_used(site: Site, axis: str) -> bool:
    """Whether the function forms `blockIdx.a * size + threadIdx.a`."""
    wanted = site.thread_index(axis)
    return any(
        node.type == "binary_expression" and site.polynomial(node) in wanted for node in walk(site.function.body)
    )


EDIT = Edit(
    name="block_shape",
    metric=WARPS_ACTIVE,
    why="Small blocks hit the limit of resident blocks, large ones waste registers and whole waves.",
    source="CUDA C++ Best Practices Guide, Thread and Block Heuristics",
    propose=propose,
)
