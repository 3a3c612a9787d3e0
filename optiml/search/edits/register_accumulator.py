"""Sum in a register what a loop adds to one element of global memory again and again."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from optiml.search import polynomial as poly
from optiml.search.edit import (
    INSTRUCTIONS,
    LOAD_REQUESTS,
    STORE_SECTORS,
    Edit,
    EditContext,
    Proposal,
    down,
    with_source,
)
from optiml.search.items import fresh_name
from optiml.search.loops import for_loop, has_barrier, leaves_early
from optiml.search.source import Access, Change, Site, ancestors, contains, same_node, text_of


def propose(context: EditContext) -> Iterator[Proposal]:
    """Loops that hold `y[i] += …` (or -=, *=) with an index that the loop does not change."""
    for site in context.sites:
        for access in site.accesses:
            loop = _loop_of(site, access)
            if loop is None:
                continue
            yield _proposal(context, site, access, loop)
            break  # one at a time: the next one is found in the result


def _loop_of(site: Site, access: Access) -> Node | None:
    """The outermost loop over which the access stays on one element and is the only one to its array."""
    if access.kind != "update" or access.space != "global" or access.index is None:
        return None
    statement = access.node.parent
    if statement is None or statement.type != "assignment_expression":
        return None
    left = statement.child_by_field_name("left")
    if not same_node(left, access.node) or site.function.parameter(access.array) is None:
        return None
    found = None
    for outer in ancestors(access.node, below=site.function.body):
        if outer.type in ("while_statement", "do_statement", "lambda_expression"):
            break
        if outer.type != "for_statement":
            continue
        loop = for_loop(outer)
        inside = [item for item in site.accesses if contains(outer, item.node) and item.array == access.array]
        changed = {write.name for write in site.function.writes if contains(outer, write.node)}
        changed |= {local.name for local in site.function.locals if contains(outer, local.declaration)}
        if loop is None or len(inside) != 1 or has_barrier(outer) or leaves_early(loop.body):
            break
        if changed & poly.names(access.index):
            break
        found = outer
    return found


def _proposal(context: EditContext, site: Site, access: Access, loop: Node) -> Proposal:
    parameter = site.function.parameter(access.array)
    assert parameter is not None  # `_loop_of` saw it
    name = fresh_name(site, f"{access.array}_total")
    element = text_of(access.node)
    indent = site.source.line_indent(loop)
    previous = loop.prev_sibling
    place = previous if previous is not None and previous.type == "preproc_call" else loop
    changes: list[Change] = [
        (access.node.start_byte, access.node.end_byte, name),
        (place.start_byte, place.start_byte, f"{{\n{indent}{parameter.type_text} {name} = {element};\n{indent}"),
        (loop.end_byte, loop.end_byte, f"\n{indent}{element} = {name};\n{indent}}}"),
    ]
    return Proposal(
        kernel=with_source(context.kernel, site.source.rewrite(changes)),
        rationale=f"The loop keeps {element} in a register instead of loading and storing it in every iteration",
        expected=(down(LOAD_REQUESTS, 0.6), down(STORE_SECTORS, 0.05), down(INSTRUCTIONS, 0.7)),
    )


EDIT = Edit(
    name="register_accumulator",
    metric=STORE_SECTORS,
    why="A sum kept in global memory costs a load and a store per term, one after another.",
    source="CUDA C++ Best Practices Guide, Memory Optimizations",
    propose=propose,
)
