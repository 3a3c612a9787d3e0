"""Loops that walk with a pointer, rewritten to walk with a counter: what the row edits can read."""

from __future__ import annotations

from tree_sitter import Node

from optiml.search.items import fresh_name
from optiml.search.loops import for_loop, leaves_early
from optiml.search.source import Change, Local, Site, contains, text_of, unwrap, walk

_BRANCHING = frozenset(
    {"if_statement", "conditional_expression", "for_statement", "while_statement", "do_statement", "switch_statement"}
)


def indexed_pointers(site: Site) -> str | None:
    """The source with `*p++` in counted loops as `p[i]`, and `while (p < end)` as a counted loop; None without either.

    A pointer qualifies where the loop advances it once per round, at one place, and reads or writes through it there
    only; after the loop it is moved to where it would have been.
    """
    changes: list[Change] = []
    for node in walk(site.function.body):
        if node.type == "for_statement":
            changes += _counted(site, node)
        elif node.type == "while_statement":
            changes += _while(site, node)
    return site.source.rewrite(changes) if changes else None


def _counted(site: Site, node: Node) -> list[Change]:
    loop = for_loop(node)
    if loop is None or loop.step != 1 or leaves_early(loop.body) or loop.comparison == "<=" or not loop.declared:
        return []
    changes: list[Change] = []
    indent = site.source.line_indent(node)
    for local, place in _walkers(site, node, loop.body):
        start = text_of(loop.start)
        offset = loop.variable if start == "0" else f"{loop.variable} - ({start})"
        changes.append((place.start_byte, place.end_byte, f"{local.name}[{offset}]"))
        count = text_of(loop.bound) if start == "0" else f"({text_of(loop.bound)}) - ({start})"
        if _used_after(site, local, node):
            changes.append((node.end_byte, node.end_byte, f"\n{indent}{local.name} += {count};"))
    return changes


def _while(site: Site, node: Node) -> list[Change]:
    condition, body = node.child_by_field_name("condition"), node.child_by_field_name("body")
    if condition is None or body is None or leaves_early(body):
        return []
    test = unwrap(condition)
    left, right = test.child_by_field_name("left"), test.child_by_field_name("right")
    sign = test.child_by_field_name("operator")
    if left is None or right is None or sign is None or text_of(sign) not in ("<", "!=") or right.type != "identifier":
        return []
    walkers = _walkers(site, node, body)
    if len(walkers) != 1 or text_of(left) != walkers[0][0].name:
        return []
    end = site.function.local_at(text_of(right), right)
    if end is None or any(contains(node, write.node) for write in site.function.writes_to(end)):
        return []
    local, place = walkers[0]
    counter = fresh_name(site, "at")
    header = f"for (int {counter} = 0; {counter} < (int)({end.name} - {local.name}); ++{counter}) "
    changes: list[Change] = [
        (node.start_byte, body.start_byte, header),
        (place.start_byte, place.end_byte, f"{local.name}[{counter}]"),
    ]
    if _used_after(site, local, node):
        changes.append((node.end_byte, node.end_byte, f" {local.name} = {end.name};"))
    return changes


def _walkers(site: Site, node: Node, body: Node) -> list[tuple[Local, Node]]:
    """Local pointers that the loop moves by one per round through a single `*p++`, and that expression."""
    found = []
    for local in site.function.locals:
        if not local.is_pointer or local.initial is None or contains(node, local.declaration):
            continue
        writes = [write for write in site.function.writes_to(local) if contains(node, write.node)]
        if len(writes) != 1 or writes[0].operator != "++" or not contains(body, writes[0].node):
            continue
        if len(site.function.writes_to(local)) != 1:
            continue  # it starts this loop somewhere that another one decides
        update = writes[0].node
        place = update.parent
        while place is not None and place.type == "parenthesized_expression":
            place = place.parent
        if place is None or place.type != "pointer_expression" or not text_of(place).startswith("*"):
            continue
        if not text_of(update).endswith("++") or _is_conditional(place, body) or _mentions(body, local, place):
            continue
        found.append((local, place))
    return found


def _is_conditional(place: Node, body: Node) -> bool:
    """Whether a round may skip the place, or pass it more than once."""
    node = place.parent
    while node is not None and node.id != body.id:
        if node.type in _BRANCHING or any(child.type in ("&&", "||") for child in node.children):
            return True
        node = node.parent
    return False


def _mentions(body: Node, local: Local, place: Node) -> bool:
    return any(
        item.type == "identifier" and text_of(item) == local.name and not contains(place, item) for item in walk(body)
    )


def _used_after(site: Site, local: Local, node: Node) -> bool:
    return any(
        item.type == "identifier" and text_of(item) == local.name and item.start_byte >= node.end_byte
        for item in walk(site.function.body)
    )
