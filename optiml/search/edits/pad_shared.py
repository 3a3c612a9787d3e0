"""Pad the rows of shared tiles so that a column no longer falls into one bank."""

from __future__ import annotations

from collections.abc import Iterator

from optiml.search.edit import BANK_CONFLICTS, Edit, EditContext, Proposal, down, with_source
from optiml.search.source import Change, Local, Site, identifiers, text_of

BANKS = 32


def propose(context: EditContext) -> Iterator[Proposal]:
    """`t[32][32]` becomes `t[32][33]`, for arrays that are only used with all their subscripts."""
    for site in context.sites:
        changes: list[Change] = []
        padded: list[str] = []
        for local in site.function.locals:
            if (
                local.is_shared
                and len(local.dimensions) >= 2
                and _conflicts(site, local)
                and _only_subscripted(site, local)
            ):
                size = local.dimensions[-1]
                changes.append((size.end_byte, size.end_byte, " + 1"))
                padded.append(local.name)
        if changes:
            yield Proposal(
                kernel=with_source(context.kernel, site.source.rewrite(changes)),
                rationale=f"One more element per row of {', '.join(padded)} spreads each column over all banks",
                expected=(down(BANK_CONFLICTS, 0.05),),
            )


def _conflicts(site: Site, local: Local) -> bool:
    """Whether the row length is a multiple of 16 words, so that columns share banks."""
    size = local.dimensions[-1]
    value = site.polynomial(size).get(())
    return value is not None and set(site.polynomial(size)) == {()} and value % (BANKS // 2) == 0


def _only_subscripted(site: Site, local: Local) -> bool:
    """Whether every use gives all subscripts: a flat pointer into the array would see the padding."""
    depth = len(local.dimensions)
    for node in identifiers(site.function.body):
        if text_of(node) != local.name or node.start_byte == _name_start(local):
            continue
        levels, current = 0, node
        while current.parent is not None and current.parent.type == "subscript_expression":
            argument = current.parent.child_by_field_name("argument")
            if argument is None or argument.id != current.id:
                break
            levels, current = levels + 1, current.parent
        if levels != depth or (current.parent is not None and current.parent.type == "pointer_expression"):
            return False
    return True


def _name_start(local: Local) -> int:
    return min(node.start_byte for node in identifiers(local.declarator))


EDIT = Edit(
    name="pad_shared",
    metric=BANK_CONFLICTS,
    why="Elements 32 words apart lie in one bank, and a warp that reads a column of such rows takes 32 turns.",
    source="CUDA C++ Best Practices Guide, Shared Memory and Memory Banks",
    propose=propose,
)
