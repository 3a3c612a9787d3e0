"""Divide once before a loop and multiply inside it."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from optiml.search.edit import INSTRUCTIONS, Edit, EditContext, Proposal, down, with_source
from optiml.search.items import fresh_name
from optiml.search.loops import for_loop
from optiml.search.source import Change, Local, Site, ancestors, contains, text_of, unwrap, walk

FLOATING = frozenset({"float", "double", "A"})


def propose(context: EditContext) -> Iterator[Proposal]:
    """Divisions inside loops by a floating local that the loop does not change."""
    if "int" in context.dtype:
        return
    for site in context.sites:
        changes: list[Change] = []
        names: dict[tuple[int, str], str] = {}
        for node in walk(site.function.body):
            found = _division(site, node)
            if found is None:
                continue
            divisor, local, loop, sign = found
            key = (loop.start_byte, local.name)
            if key not in names:
                names[key] = fresh_name(site, f"{local.name}_inverse") + (f"_{len(names)}" if names else "")
                indent = site.source.line_indent(loop)
                place = _place(loop)
                declaration = f"const {local.type_text} {names[key]} = {local.type_text}(1) / {local.name};"
                changes.append((place.start_byte, place.start_byte, f"{declaration}\n{indent}"))
            changes.append((sign.start_byte, sign.end_byte, text_of(sign).replace("/", "*")))
            changes.append((divisor.start_byte, divisor.end_byte, names[key]))
        if changes:
            yield Proposal(
                kernel=with_source(context.kernel, site.source.rewrite(changes)),
                rationale="One division before the loop and a multiplication inside it replace a division per element",
                expected=(down(INSTRUCTIONS, 0.8),),
                risks=("a product with the reciprocal rounds twice",),
            )


def _division(site: Site, node: Node) -> tuple[Node, Local, Node, Node] | None:
    """Divisor, its declaration, the outermost loop in which it is invariant, and the operator's node."""
    if node.type not in ("binary_expression", "assignment_expression"):
        return None
    sign, right = node.child_by_field_name("operator"), node.child_by_field_name("right")
    if sign is None or right is None or text_of(sign) not in ("/", "/=") or unwrap(right).type != "identifier":
        return None
    divisor = unwrap(right)
    local = site.function.local_at(text_of(divisor), divisor)
    if local is None or local.is_array or local.is_pointer or local.type_text not in FLOATING:
        return None
    best = None
    for outer in ancestors(node, below=site.function.body):
        if outer.type != "for_statement":
            continue
        written = any(contains(outer, write.node) for write in site.function.writes_to(local))
        if contains(outer, local.declaration) or written or for_loop(outer) is None:
            break
        if outer.parent is not None and outer.parent.type == "compound_statement":
            best = outer
    return None if best is None else (right, local, best, sign)


def _place(loop: Node) -> Node:
    previous = loop.prev_sibling
    return previous if previous is not None and previous.type == "preproc_call" else loop


EDIT = Edit(
    name="reciprocal",
    metric=INSTRUCTIONS,
    why="An IEEE division takes about ten times the instructions of a multiplication.",
    source="CUDA C++ Best Practices Guide, Arithmetic Instructions",
    propose=propose,
)
