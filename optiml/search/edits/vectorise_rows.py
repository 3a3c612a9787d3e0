"""Vector accesses in loops that a warp or a block shares out: `for (c = lane; c < C; c += 32)`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tree_sitter import Node

from optiml.search import polynomial as poly
from optiml.search.edit import INSTRUCTIONS, LOAD_REQUESTS, Edit, EditContext, Proposal, down, with_source
from optiml.search.estimate import ELEMENT_BYTES
from optiml.search.items import fresh_name, insertion_point
from optiml.search.loops import ForLoop, for_loop, has_barrier, is_invariant, leaves_early, reductions, unit_stride
from optiml.search.source import (
    BARRIERS,
    Access,
    Change,
    Site,
    called,
    calls,
    contains,
    statements_of,
    text_of,
    walk,
)

VECTOR_BYTES = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class TeamLoop:
    """A loop in which each thread of a team takes every stride-th element, starting at its own place."""

    loop: ForLoop
    accesses: tuple[Access, ...]  # those with unit stride in the counter


def propose(context: EditContext) -> Iterator[Proposal]:
    """All shared-out loops of a kernel at once, so that each thread keeps the same elements in every loop."""
    for site in context.sites:
        if f"_x{_width(context)}" in context.kernel.source:
            continue
        found = _team_loops(site)
        if not found:
            continue
        proposal = _proposal(context, site, found)
        if proposal is not None:
            yield proposal


def _width(context: EditContext) -> int:
    return VECTOR_BYTES // ELEMENT_BYTES.get(f"T:{context.dtype}", 4)


def _team_loops(site: Site) -> list[TeamLoop]:
    """The loops over a team's range; none if one of them could not follow the others."""
    loops = [loop for node in site.function.loops if (loop := for_loop(node)) is not None and _is_team(site, loop)]
    found = []
    for loop in loops:
        inside = [item for item in site.accesses if contains(loop.body, item.node)]
        folded = reductions(site.function, loop)
        if folded is None or leaves_early(loop.body) or has_barrier(loop.node) or not loop.declared:
            return []
        if any(item.space != "global" or item.kind in ("atomic", "address") for item in inside):
            return []
        if any(contains(loop.body, node) for node in site.function.loops) or not is_invariant(site, loop.bound, loop):
            return []
        unit = [
            item for item in inside if unit_stride(item, loop.variable) and item.node.type == "subscript_expression"
        ]
        stored = {item.array for item in inside if item.writes}
        if any(item.writes and item not in unit for item in inside) or not _stores_always(loop, unit):
            return []
        if stored & {item.array for item in inside if item not in unit} or not _one_place_each(unit, stored):
            return []
        if unit:
            found.append(TeamLoop(loop=loop, accesses=tuple(unit)))
    starts = {(poly.canonical(site.polynomial(item.loop.start))) for item in found}
    return found if len(starts) == 1 and len(found) == len(loops) and _ordered(site, found) else []


def _ordered(site: Site, found: list[TeamLoop]) -> bool:
    """Whether loops that hand elements of an array to each other agree on who owns them, or wait in between.

    A loop falls back to scalar accesses where any of its arrays is not aligned; two loops over other sets of arrays
    may then give an element to different threads.
    """
    waits = [item.start_byte for item in calls(site.function.body) if called(item) in BARRIERS]
    for earlier, later in itertools.pairwise(found):
        shared = {item.array for item in earlier.accesses if item.writes} & {item.array for item in later.accesses}
        shared |= {item.array for item in later.accesses if item.writes} & {item.array for item in earlier.accesses}
        same = {item.array for item in earlier.accesses} == {item.array for item in later.accesses}
        between = any(earlier.loop.node.end_byte <= place <= later.loop.node.start_byte for place in waits)
        if shared and not same and not between:
            return False
    return True


def _is_team(site: Site, loop: ForLoop) -> bool:
    """Start and step that belong together: threadIdx.x and the block size, or a lane and 32."""
    if loop.step_node is None or loop.comparison != "<":
        return False
    start, step = site.polynomial(loop.start), site.polynomial(loop.step_node)
    size = site.block[0]
    block = poly.atom("blockDim.x") if size is None else poly.constant(size)
    lane = (poly.atom("((threadIdx.x) % (32))"), poly.atom("((1*threadIdx.x) % (32))"))
    if start == poly.atom("threadIdx.x") and all(extent in (1, None) for extent in site.block[1:]):
        return step == block
    return start in lane and step == poly.constant(32)


def _one_place_each(unit: list[Access], stored: set[str]) -> bool:
    """Whether each stored array is touched at one index only."""
    for array in stored:
        indices = {poly.canonical(item.index) for item in unit if item.array == array and item.index is not None}
        if len(indices) != 1:
            return False
    return True


def _stores_always(loop: ForLoop, unit: list[Access]) -> bool:
    """Whether every store is a statement at the top of the body."""
    top = {node.id for node in statements_of(loop.body)}
    for access in unit:
        if not access.writes:
            continue
        statement: Node | None = access.node
        while statement is not None and statement.type != "expression_statement":
            statement = statement.parent
        if statement is None or statement.id not in top:
            return False
    return True


def _proposal(context: EditContext, site: Site, found: list[TeamLoop]) -> Proposal | None:
    sizes: dict[str, int] = {}
    types: dict[str, str] = {}
    for team in found:
        for access in team.accesses:
            parameter = site.function.parameter(access.array)
            if parameter is None:
                return None
            kind = parameter.type_text
            size = ELEMENT_BYTES.get(f"T:{context.dtype}" if kind == "T" else kind)
            if size is None:
                return None
            sizes[access.array], types[access.array] = size, kind
    if len(set(sizes.values())) != 1 or max(sizes.values()) > VECTOR_BYTES // 2:
        return None
    width = VECTOR_BYTES // max(sizes.values())
    changes: list[Change] = []
    for number, team in enumerate(found):
        changes += _vectorised(site, team, width, types, number)
    structs = "".join(
        f"struct alignas({VECTOR_BYTES}) {_pack(kind, width)} {{ {kind} v[{width}]; }};\n"
        for kind in dict.fromkeys(types.values())
        if f" {_pack(kind, width)} {{" not in context.kernel.source
    )
    changes.append((insertion_point(site), insertion_point(site), structs))
    return Proposal(
        kernel=with_source(context.kernel, site.source.rewrite(changes)),
        rationale=f"Each thread takes {width} neighbouring elements of a row in one 16-byte access where it is aligned",
        expected=(down(LOAD_REQUESTS, 1.0 / width), down(INSTRUCTIONS, 0.65)),
    )


def _vectorised(site: Site, team: TeamLoop, width: int, types: dict[str, str], number: int) -> list[Change]:
    """The vector loop before the scalar one, which keeps what is not aligned."""
    loop = team.loop
    suffix = f"_{number}"
    first, lane = fresh_name(site, "at") + suffix, fresh_name(site, "v") + suffix
    done = fresh_name(site, "vectors") + suffix
    packs: dict[str, tuple[str, str, str, bool, bool]] = {}
    for access in team.accesses:
        base, index = access.node.child_by_field_name("argument"), access.node.child_by_field_name("indices")
        if base is None or index is None or access.index is None:
            return []
        key = f"{access.array}:{poly.canonical(access.index)}"
        # The element's address with the counter at the first element of the vector.
        address = f"&{text_of(base)}{_with_name(index, loop.variable, first)}"
        known = packs.get(key)
        name = known[0] if known else fresh_name(site, f"{access.array}_pack{len(packs)}") + suffix
        reads = access.reads or (known is not None and known[3])
        writes = access.writes or (known is not None and known[4])
        packs[key] = (name, address, _pack(types[access.array], width), reads, writes)
    names = {f"{access.array}:{poly.canonical(access.index or {})}": access for access in team.accesses}
    replacements = {
        (access.node.start_byte, access.node.end_byte): (
            f"{packs[f'{access.array}:{poly.canonical(access.index or {})}'][0]}.v[{lane}]"
        )
        for access in team.accesses
    }
    data = site.source.data[loop.body.start_byte : loop.body.end_byte]
    for (begin, end), text in sorted(replacements.items(), reverse=True):
        data = data[: begin - loop.body.start_byte] + text.encode() + data[end - loop.body.start_byte :]
    body = data.decode()
    kind = _counter_type(loop)
    aligned = " | ".join(f"reinterpret_cast<size_t>({_at_zero(access, loop.variable)})" for access in names.values())
    bound, start = text_of(loop.bound), text_of(loop.start)
    step = text_of(loop.step_node) if loop.step_node is not None else "1"
    lines = [
        f"const {kind} {done} = (({aligned}) % {VECTOR_BYTES} == 0) ? ({bound}) / {width} * {width} : 0;",
        f"for ({kind} {first} = ({start}) * {width}; {first} < {done}; {first} += ({step}) * {width}) {{",
        *(
            f"    {'' if writes else 'const '}{pack} {name} = *reinterpret_cast<const {pack}*>({address});"
            if reads
            else f"    {pack} {name};"
            for name, address, pack, reads, writes in packs.values()
        ),
        "    #pragma unroll",
        f"    for (int {lane} = 0; {lane} < {width}; ++{lane}) {{",
        f"        const {kind} {loop.variable} = {first} + {lane};",
        f"        {body}",
        "    }",
        *(
            f"    *reinterpret_cast<{pack}*>({address}) = {name};"
            for name, address, pack, _, writes in packs.values()
            if writes
        ),
        "}",
    ]
    previous = loop.node.prev_sibling
    place = previous if previous is not None and previous.type == "preproc_call" else loop.node
    indent = site.source.line_indent(place)
    nested = loop.node.parent is not None and loop.node.parent.type != "compound_statement"
    lead = "".join(f"{line}\n{indent}" for line in ((["{"] if nested else []) + lines))
    changes: list[Change] = [
        (place.start_byte, place.start_byte, lead),
        (loop.start.start_byte, loop.start.end_byte, f"{done} + {start}"),
    ]
    if nested:
        changes.append((loop.node.end_byte, loop.node.end_byte, "}"))
    return changes


def _with_name(index: Node, name: str, other: str) -> str:
    data = index.text or b""
    for node in reversed([item for item in walk(index) if item.type == "identifier" and text_of(item) == name]):
        start = node.start_byte - index.start_byte
        data = data[:start] + other.encode() + data[start + len(name.encode()) :]
    return data.decode()


def _at_zero(access: Access, name: str) -> str:
    """C++ text of the address of the element with the counter at 0."""
    base, index = access.node.child_by_field_name("argument"), access.node.child_by_field_name("indices")
    return "" if base is None or index is None else f"&{text_of(base)}{_with_name(index, name, '0')}"


def _pack(kind: str, width: int) -> str:
    return f"{kind.replace(' ', '_').strip('_')}_x{width}"


def _counter_type(loop: ForLoop) -> str:
    declaration = loop.node.child_by_field_name("initializer")
    kind = None if declaration is None else declaration.child_by_field_name("type")
    text = "int" if kind is None else text_of(kind)
    return "long long" if text == "auto" else text


EDIT = Edit(
    name="vectorise_rows",
    metric=LOAD_REQUESTS,
    why="A row walked one element per thread and step takes four times the load instructions of 16-byte accesses.",
    source="Luitjens, CUDA Pro Tip: Increase Performance with Vectorized Memory Access, 2013",
    propose=propose,
)
