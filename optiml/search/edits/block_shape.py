"""Change the threads of a block, and keep the grid formula and hard-coded copies of the size consistent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

from tree_sitter import Node

from optiml.records import Size
from optiml.search.edit import (
    BLOCKS,
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
from optiml.search.source import Change, Site, ancestors, bounds_change, integer, text_of, walk

MAX_THREADS = 1024
LINEAR = (256, 128, 512, 1024, 64)
PLANES = ((32, 8), (32, 4), (32, 16), (16, 16), (64, 4), (32, 32), (128, 2))
LEAST_LITERAL = 16  # smaller numbers in the source are too often something else than a block size

_SUBSCRIPTS = frozenset({"subscript_argument_list", "subscript_expression"})
_TRANSPARENT = frozenset({"parenthesized_expression", "cast_expression"})
Multiplier = Literal["none", "dimension", "literal", "other"]


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
    changes: list[Change] = []
    for axis, (before, after) in enumerate(zip(old, new, strict=True)):
        if before == after:
            continue
        letter = "xyz"[axis]
        multiplier = _multiplier(site, letter, before)
        if multiplier == "other" or not _reads_thread_index(site, letter):
            return None
        if multiplier == "literal" and list(old).count(before) > 1 and new[0] != new[1]:
            return None  # one literal stands for both sides: it cannot become two
        if multiplier in ("dimension", "literal") and axis < len(grid):
            adapted = with_divisor(grid[axis], before, after, context.params)
            if adapted is None:
                return None  # the grid was written for this size in a way that cannot be read
            grid[axis] = adapted
        changes += _literals(site, before, after, multiplier)
    if site.function.is_cooperative and len(old) > 1 and not changes and "blockDim" not in text_of(site.function.body):
        return None  # a tile of fixed size: its threads have fixed places
    unique = sorted({*changes, *bounds_change(site.function, math.prod(new))})
    if len({start for start, _, _ in unique}) < len(unique):
        return None  # one literal would have to become two numbers
    kernel = with_launch(context.kernel, site.index, block=tuple(new), grid=tuple(grid))
    if unique:
        kernel = with_source(kernel, site.source.rewrite(unique))
    before_text, after_text = ("x".join(str(size) for size in shape) for shape in (old, new))
    fewer = math.prod(old) / math.prod(new) if tuple(grid) != site.launch.grid else 1.0
    wider = len(old) > 1 and new[0] > old[0]
    return Proposal(
        kernel=kernel,
        rationale=f"Blocks of {after_text} threads instead of {before_text} change how many warps an SM holds",
        expected=(
            up(WARPS_ACTIVE, _occupancy_gain(context, old, new)),
            *((down(BLOCKS, fewer),) if fewer < 1.0 else ()),
            *((down(LOAD_SECTORS, 0.8),) if wider else ()),
        ),
        risks=("the source holds the block size as a literal, which was changed with it",) if changes else (),
    )


def _occupancy_gain(context: EditContext, old: Sequence[int], new: Sequence[int]) -> float:
    """What a limit on resident blocks costs now and would not with larger ones."""
    before, after = math.prod(old), math.prod(new)
    occupancy = None if context.profile is None else context.profile.occupancy
    if occupancy is not None and after > before:
        if occupancy.limiter == "blocks":
            return min(100.0 / max(1.0, occupancy.theoretical_pct), after / before)
        return 1.02
    return min(2.0, 128 / before) if before < 128 <= after else 1.03


def _multiplier(site: Site, axis: str, size: int) -> Multiplier:
    """How the source forms the start of a block along one axis: what it multiplies blockIdx with."""
    found: set[Multiplier] = set()
    for node in walk(site.function.body):
        if node.type != "field_expression" or text_of(node) != f"blockIdx.{axis}":
            continue
        formula = _formula_around(node, site.function.body)
        if f"blockDim.{axis}" in text_of(formula):
            found.add("dimension")
        elif any(integer(text_of(item)) == size for item in walk(formula) if item.type == "number_literal"):
            found.add("literal")
        else:
            value = site.polynomial(formula).get((f"blockIdx.{axis}",))
            found.add("other" if value is not None and value % size == 0 else "none")
    for kind in ("other", "literal", "dimension"):
        if kind in found:
            return kind
    return "none"


def _formula_around(node: Node, below: Node) -> Node:
    """The largest sum of products that a node stands in."""
    formula = node
    for outer in ancestors(node, below=below):
        sign = outer.child_by_field_name("operator") if outer.type == "binary_expression" else None
        if outer.type not in _TRANSPARENT and (sign is None or text_of(sign) not in ("+", "-", "*")):
            break
        formula = outer
    return formula


def _reads_thread_index(site: Site, axis: str) -> bool:
    return any(
        node.type == "field_expression" and text_of(node) == f"threadIdx.{axis}" for node in walk(site.function.body)
    )


def _literals(site: Site, before: int, after: int, multiplier: Multiplier) -> list[Change]:
    """Literals of the function that stand for the block size."""
    # 32 is as likely the warp size as a block size: it counts only where it multiplies a block index.
    if before < LEAST_LITERAL or (before == 32 and multiplier != "literal"):
        return []
    changes: list[Change] = []
    for node in walk(site.function.body):
        if node.type != "number_literal":
            continue
        if text_of(node) == str(before):
            changes.append((node.start_byte, node.end_byte, str(after)))
        elif text_of(node) == str(before - 1) and node.parent is not None and node.parent.type in _SUBSCRIPTS:
            changes.append((node.start_byte, node.end_byte, str(after - 1)))  # the last thread's element
        elif text_of(node) == str(before + 1) and node.parent is not None and node.parent.type == "array_declarator":
            changes.append((node.start_byte, node.end_byte, str(after + 1)))  # a padded row of a tile
    return changes


EDIT = Edit(
    name="block_shape",
    metric=WARPS_ACTIVE,
    why="Small blocks hit the limit of resident blocks, large ones waste registers and whole waves.",
    source="CUDA C++ Best Practices Guide, Thread and Block Heuristics",
    propose=propose,
    repeatable=False,
)
