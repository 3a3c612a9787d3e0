"""Let each block do the work of several neighbouring ones, and do once what they have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tree_sitter import Node

from optiml.records import Size
from optiml.search.edit import (
    INSTRUCTIONS,
    LOAD_REQUESTS,
    LOAD_SECTORS,
    Edit,
    EditContext,
    Proposal,
    down,
    with_launch,
    with_source,
)
from optiml.search.estimate import launch_shape, sizes, trips_around
from optiml.search.grid import coarsened
from optiml.search.loops import has_barrier
from optiml.search.source import Change, Site, ancestors, mentions, named, statements_of, text_of, walk

FACTORS = (4, 2)
LEAST_SHARED = 0.15  # of the memory requests; merging blocks that have less in common gains nothing by it
LEAST_BLOCKS = 108  # of the merged grid, at the bench size: one for each SM of an A100
_LEAVING = frozenset({"return_statement", "goto_statement", "break_statement", "continue_statement"})


def propose(context: EditContext) -> Iterator[Proposal]:
    """Merges along the axes of the grid whose neighbours load the same data, the most shared axis first."""
    for site in context.sites:
        if site.launches != 1 or site.function.is_template:
            continue
        shared = [(share, axis) for axis in "xyz" if (share := _shared_requests(context, site, axis)) >= LEAST_SHARED]
        for share, axis in sorted(shared, key=lambda pair: (-pair[0], pair[1])):
            for factor in FACTORS:
                proposal = _merged(context, site, axis, factor, share)
                if proposal is not None:
                    yield proposal


def _merged(context: EditContext, site: Site, axis: str, factor: int, share: float) -> Proposal | None:
    position = "xyz".index(axis)
    if position >= len(site.launch.grid) or _blocks(context, site) / factor < LEAST_BLOCKS:
        return None
    varying = _varying(site, axis)
    if varying is None or not _can_merge(site, axis, varying):
        return None
    changes = _copies(site, site.function.body, axis, factor, varying)
    if not changes:
        return None
    grid: list[Size] = list(site.launch.grid)
    grid[position] = coarsened(grid[position], factor, context.params)
    kernel = with_launch(
        with_source(context.kernel, site.source.rewrite(changes)), site.index, grid=tuple(grid)
    )  # fmt: skip
    left = 1.0 - share + share / factor
    return Proposal(
        kernel=kernel,
        rationale=f"Each block does the work of {factor} neighbours along {axis} and loads once what they all read",
        expected=(down(LOAD_REQUESTS, round(left, 4)), down(LOAD_SECTORS, round(left, 4)), down(INSTRUCTIONS, 0.8)),
        risks=("each thread keeps more values in registers",) if factor > 2 else (),
    )


def _can_merge(site: Site, axis: str, varying: frozenset[str]) -> bool:
    """Whether nothing counts the blocks: no gridDim, and no update of memory that is the same in every block."""
    for node in walk(site.function.body):
        if node.type == "field_expression" and text_of(node) == f"gridDim.{axis}":
            return False
    for access in site.accesses:
        if access.kind not in ("atomic", "update", "address") or access.space == "local":
            continue
        around = (item for item in ancestors(access.node, below=site.function.body) if item.type.endswith("_statement"))
        statement = next(around, None)
        if statement is None or not _depends(statement, axis, varying):
            return False
    return True


def _blocks(context: EditContext, site: Site) -> float:
    shape = launch_shape(site, sizes(context.kernel, context.problem))
    return math.inf if shape is None else float(math.prod(shape[0]))


def _shared_requests(context: EditContext, site: Site, axis: str) -> float:
    """Share of the loads, global and shared, that are the same for neighbouring blocks of one axis."""
    if "xyz".index(axis) >= len(site.launch.grid) or site.launch.grid["xyz".index(axis)] == 1:
        return 0.0
    varying = _varying(site, axis)
    if varying is None:
        return 0.0
    names = sizes(context.kernel, context.problem)
    total = common = 0.0
    for access in site.accesses:
        if not access.reads or access.space == "local":
            continue
        weight = trips_around(site, access.node, names)
        total += weight
        if not _depends(access.node, axis, varying):
            common += weight
    return common / total if total else 0.0


def _varying(site: Site, axis: str) -> frozenset[str] | None:
    """Locals whose value depends on the block's place along the axis; None where a copy could not be told apart.

    A name is varying if any of its values, indices or conditions are. Names must mean one thing in the whole function.
    """
    function = site.function
    declared = [local.name for local in function.locals]
    found: set[str] = set()
    while True:
        before = len(found)
        for local in function.locals:
            if local.initial is not None and _depends(local.initial, axis, found):
                found.add(local.name)
            if _controlled(local.declaration, site.function.body, axis, found):
                found.add(local.name)
        for node in walk(function.body):
            if node.type not in ("assignment_expression", "update_expression"):
                continue
            if _depends(node, axis, found) or _controlled(node, function.body, axis, found):
                found |= _written(node)
        if len(found) == before:
            break
    found &= set(declared)
    if any(declared.count(name) > 1 for name in found):
        return None
    opaque = any(
        node.type in ("lambda_expression", "goto_statement", "gnu_asm_expression") for node in walk(function.body)
    )
    return None if opaque else frozenset(found)


def _written(node: Node) -> set[str]:
    """The variable or array that an assignment changes."""
    target = node.child_by_field_name("left") or node.child_by_field_name("argument")
    while target is not None and target.type in (
        "subscript_expression",
        "field_expression",
        "parenthesized_expression",
    ):
        target = target.child_by_field_name("argument") or (named(target)[0] if named(target) else None)
    return {text_of(target)} if target is not None and target.type == "identifier" else set()


def _controlled(node: Node, below: Node, axis: str, varying: set[str]) -> bool:
    """Whether a varying condition or loop header decides if the node runs."""
    current = node.parent
    while current is not None and current.id != below.id:
        if current.type in ("if_statement", "while_statement", "switch_statement", "do_statement"):
            condition = current.child_by_field_name("condition")
            if condition is not None and _depends(condition, axis, varying):
                return True
        if current.type == "for_statement":
            header = [current.child_by_field_name(name) for name in ("initializer", "condition", "update")]
            if any(part is not None and _depends(part, axis, varying) for part in header):
                return True
        current = current.parent
    return False


def _depends(node: Node, axis: str, varying: set[str] | frozenset[str]) -> bool:
    if mentions(node, varying):
        return True
    return any(item.type == "field_expression" and text_of(item) == f"blockIdx.{axis}" for item in walk(node))


def _copies(site: Site, body: Node, axis: str, factor: int, varying: frozenset[str]) -> list[Change]:
    """Changes that repeat every varying statement for each of the merged blocks; [] where that cannot be done."""
    changes: list[Change] = []
    for statement in statements_of(body):
        if not _depends(statement, axis, varying) or statement.type == "preproc_call":
            continue
        if statement.type in ("for_statement", "if_statement", "while_statement", "compound_statement"):
            inside = _inside(statement, axis, varying)
            if inside is not None:
                for part in inside:
                    nested = _copies(site, part, axis, factor, varying)
                    if not nested:
                        return []
                    changes += nested
                continue
        if has_barrier(statement) or any(node.type in _LEAVING for node in walk(statement)):
            return []
        if statement.type == "declaration":
            changes += _declaration(site, statement, axis, factor, varying)
        else:
            changes.append(_repeated(site, statement, axis, factor, varying))
    return changes


def _inside(statement: Node, axis: str, varying: frozenset[str]) -> list[Node] | None:
    """The parts of a statement that vary, if its own conditions do not; else None."""
    if statement.type == "compound_statement":
        return [statement]
    header = [statement.child_by_field_name(name) for name in ("initializer", "condition", "update")]
    if any(part is not None and _depends(part, axis, varying) for part in header):
        return None
    parts = [statement.child_by_field_name(name) for name in ("body", "consequence")]
    other = statement.child_by_field_name("alternative")
    parts += named(other)[:1] if other is not None else []
    used = [part for part in parts if part is not None and _depends(part, axis, varying)]
    return used or None


def _declaration(site: Site, statement: Node, axis: str, factor: int, varying: frozenset[str]) -> list[Change]:
    """A declaration keeps its common variables once and gets the varying ones for each merged block."""
    locals_here = [local for local in site.function.locals if local.declaration.id == statement.id]
    first = statement.children_by_field_name("declarator")[0]
    prefix = site.source.data[statement.start_byte : first.start_byte].decode("utf-8")
    kept = [text_of(local.declarator) for local in locals_here if local.name not in varying]
    order = sorted(locals_here, key=lambda local: local.declarator.start_byte)
    if any(local.name in varying and later.name not in varying and mentions(later.declarator, (local.name,))
           for index, local in enumerate(order) for later in order[index + 1 :]):  # fmt: skip
        return []
    lines = [f"{prefix}{', '.join(kept)};"] if kept else []
    for copy in range(factor):
        own = [
            _for_block(local.declarator, axis, factor, copy, varying) for local in locals_here if local.name in varying
        ]
        if own:
            lines.append(f"{prefix}{', '.join(own)};")
    indent = site.source.line_indent(statement)
    return [(statement.start_byte, statement.end_byte, f"\n{indent}".join(lines))]


def _repeated(site: Site, statement: Node, axis: str, factor: int, varying: frozenset[str]) -> Change:
    indent = site.source.line_indent(statement)
    copies = [_for_block(statement, axis, factor, copy, varying) for copy in range(factor)]
    text = f"\n{indent}".join(copies)
    if statement.parent is not None and statement.parent.type != "compound_statement":
        text = f"{{ {text} }}"
    return statement.start_byte, statement.end_byte, text


def _for_block(node: Node, axis: str, factor: int, copy: int, varying: frozenset[str]) -> str:
    """The text of a node for one of the merged blocks: its own place along the axis and its own variables."""
    data, start = node.text or b"", node.start_byte
    replaced: list[Change] = []
    for item in walk(node):
        if item.type == "field_expression" and text_of(item) == f"blockIdx.{axis}":
            replaced.append((item.start_byte, item.end_byte, f"(blockIdx.{axis} * {factor} + {copy})"))
        elif item.type == "identifier" and text_of(item) in varying:
            replaced.append((item.start_byte, item.end_byte, f"{text_of(item)}_{axis}{copy}"))
    for first, last, text in sorted(replaced, reverse=True):
        data = data[: first - start] + text.encode("utf-8") + data[last - start :]
    return data.decode("utf-8")


EDIT = Edit(
    name="merge_blocks",
    metric=LOAD_REQUESTS,
    why="Neighbouring blocks of a tiled kernel load the same tile; a merged block loads it once for all of them.",
    source="Yang et al., A GPGPU Compiler for Memory Optimization and Parallelism Management, 2010 (block merge)",
    propose=propose,
)
