"""Ask the compiler to unroll the innermost loops."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from optiml.search.edit import INSTRUCTIONS, LOAD_REQUESTS, Edit, EditContext, Proposal, down, with_source
from optiml.search.loops import for_loop
from optiml.search.source import Change, Site, integer, text_of, walk

FACTORS = (4, 8, 2)
SMALL_TRIPS = 32


def propose(context: EditContext) -> Iterator[Proposal]:
    """A pragma before every innermost counted loop that has none; loops of few literal trips are unrolled whole."""
    targets = [(site, node) for site in _distinct(context.sites) for node in _innermost(site)]
    if not targets:
        return
    whole = [pair for pair in targets if _literal_trips(pair[1]) is not None]
    partial = [pair for pair in targets if pair not in whole]
    if not partial:
        yield _proposal(context, whole, None)
        return
    for factor in FACTORS:
        yield _proposal(context, targets, factor)


def _proposal(context: EditContext, targets: list[tuple[Site, Node]], factor: int | None) -> Proposal:
    changes: list[Change] = []
    for site, node in targets:
        count = "" if factor is None or _literal_trips(node) is not None else f" {factor}"
        before = site.source.data[: node.start_byte].rstrip(b" \t")
        # A pragma needs a line of its own, also where the loop shares its line with other statements.
        lead = "" if not before or before.endswith(b"\n") else "\n"
        pragma = f"{lead}#pragma unroll{count}\n{site.source.line_indent(node)}"
        changes.append((node.start_byte, node.start_byte, pragma))
    text = "whole" if factor is None else f"by {factor}"
    return Proposal(
        kernel=with_source(context.kernel, targets[0][0].source.rewrite(changes)),
        rationale=f"Inner loops unrolled {text} spend fewer instructions on counting and overlap more loads",
        expected=(down(INSTRUCTIONS, 0.85), down(LOAD_REQUESTS, 0.97)),
    )


def _distinct(sites: tuple[Site, ...]) -> list[Site]:
    return list({site.function.name: site for site in sites}.values())


def _innermost(site: Site) -> list[Node]:
    found = []
    for node in site.function.loops:
        inner = any(item.type == "for_statement" and item.id != node.id for item in walk(node))
        if not inner and for_loop(node) is not None and not _has_pragma(node) and _braced(node):
            found.append(node)
    return found


def _has_pragma(node: Node) -> bool:
    previous = node.prev_sibling
    while previous is not None and previous.type == "comment":
        previous = previous.prev_sibling
    return previous is not None and previous.type == "preproc_call" and "unroll" in text_of(previous)


def _braced(node: Node) -> bool:
    """Whether the loop stands in a block: `if (p) for …` would lose its branch to the pragma's line."""
    return node.parent is not None and node.parent.type == "compound_statement"


def _literal_trips(node: Node) -> int | None:
    """Trips of a loop between two literals, if they are few."""
    loop = for_loop(node)
    if loop is None or not loop.step:
        return None
    start, bound = integer(text_of(loop.start)), integer(text_of(loop.bound))
    if start is None or bound is None:
        return None
    trips = max(0, -(-(bound - start) // loop.step))
    return trips if trips <= SMALL_TRIPS else None


EDIT = Edit(
    name="unroll",
    metric=INSTRUCTIONS,
    why="Each iteration of a short loop pays for a comparison, an addition and a branch.",
    source="CUDA C++ Programming Guide, #pragma unroll",
    propose=propose,
)
