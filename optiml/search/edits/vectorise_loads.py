"""Load and store several neighbouring elements at once in elementwise kernels."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from optiml.records import Size
from optiml.search import polynomial as poly
from optiml.search.edit import (
    BLOCKS,
    INSTRUCTIONS,
    LOAD_REQUESTS,
    Edit,
    EditContext,
    Proposal,
    down,
    with_launch,
    with_source,
)
from optiml.search.estimate import ELEMENT_BYTES
from optiml.search.grid import coarsened
from optiml.search.items import ItemKernel, fresh_name, insertion_point, item_kernel
from optiml.search.source import Access, Change, Site, ancestors, contains, named, statements_of

VECTOR_BYTES = 16


def propose(context: EditContext) -> Iterator[Proposal]:
    """Vectors of 16 bytes, then of 8, for kernels that read and write `array[i]`.

    The vector path runs where the whole vector lies inside the range and every pointer is aligned to it; a scalar loop
    does the rest, so any size and any base address stay right.
    """
    for site in context.sites:
        item = item_kernel(site)
        if item is None or item.walks_memory:
            continue
        found = _vector_accesses(site, item)
        if found is None:
            continue
        sizes = {name: _bytes(site, name, context.dtype) for name in {access.array for access in found}}
        largest = max((size for size in sizes.values() if size is not None), default=0)
        if None in sizes.values() or largest == 0 or largest > VECTOR_BYTES // 2:
            continue
        for width in (VECTOR_BYTES // largest, VECTOR_BYTES // largest // 2):
            if width >= 2:
                yield _proposal(context, site, item, found, width, {k: v for k, v in sizes.items() if v is not None})


def _vector_accesses(site: Site, item: ItemKernel) -> list[Access] | None:
    """Accesses at exactly the item's index; None where vectors would change what the kernel computes."""
    index = _index_polynomial(site, item)
    found = []
    for access in item.accesses:
        if access.space != "global" or access.kind in ("atomic", "address"):
            return None
        if access.index == index and access.node.type == "subscript_expression":
            found.append(access)
        elif access.writes:
            return None
    stored = {access.array for access in found if access.writes}
    scalar_reads = {access.array for access in item.accesses if access not in found}
    if not found or stored & scalar_reads or not all(_always_stores(site, item, name) for name in stored):
        return None
    return found


def _index_polynomial(site: Site, item: ItemKernel) -> poly.Polynomial:
    """What the item index expands to: the thread index, or the counter of a grid-stride loop."""
    return poly.atom(item.index) if item.stride is not None else site.thread_index("x")[0]


def _always_stores(site: Site, item: ItemKernel, array: str) -> bool:
    """Whether every path through the body writes the array's element, so that no old value need be kept."""
    start, end = item.span
    top = [
        node
        for node in _body_statements(site, item)
        if start <= node.start_byte and node.end_byte <= end
    ]  # fmt: skip
    writes = [access.node for access in item.accesses if access.array == array and access.writes]
    inside_loop = any(
        outer.type in ("for_statement", "while_statement", "do_statement", "switch_statement")
        and start <= outer.start_byte and outer.end_byte <= end and outer.start_byte > start
        for node in writes
        for outer in ancestors(node, below=site.function.body)
    )  # fmt: skip
    return not inside_loop and not item.returns and any(_stores(node, writes) for node in top)


def _body_statements(site: Site, item: ItemKernel) -> list[Node]:
    start, end = item.span
    for node in site.function.body.children:
        if node.start_byte <= start and end <= node.end_byte:  # a guard or a loop around the body
            body = node.child_by_field_name("consequence") or node.child_by_field_name("body")
            return statements_of(body) if body is not None else []
    return named(site.function.body)


def _stores(statement: Node, writes: list[Node]) -> bool:
    if statement.type == "expression_statement":
        return any(contains(statement, node) for node in writes) and not _is_conditional(statement, writes)
    if statement.type == "compound_statement":
        return any(_stores(item, writes) for item in named(statement))
    if statement.type == "if_statement":
        then, other = statement.child_by_field_name("consequence"), statement.child_by_field_name("alternative")
        if then is None or other is None:
            return False
        otherwise = named(other)[0] if other.type == "else_clause" and named(other) else other
        return _stores(then, writes) and _stores(otherwise, writes)
    return False


def _is_conditional(statement: Node, writes: list[Node]) -> bool:
    """A store inside an expression that may not be evaluated: `p && (y[i] = v)`."""
    return any(
        outer.type in ("conditional_expression", "lambda_expression")
        or (outer.type == "binary_expression" and any(child.type in ("&&", "||") for child in outer.children))
        for node in writes
        if contains(statement, node)
        for outer in ancestors(node, below=statement)
    )


def _bytes(site: Site, array: str, dtype: str) -> int | None:
    parameter = site.function.parameter(array)
    if parameter is None:
        return None
    return ELEMENT_BYTES.get("T:" + dtype if parameter.type_text == "T" else parameter.type_text)


def _proposal(
    context: EditContext, site: Site, item: ItemKernel, found: list[Access], width: int, sizes: dict[str, int]
) -> Proposal:
    first, lane = fresh_name(site, "first"), fresh_name(site, "k")
    loaded = list(dict.fromkeys(access.array for access in found if access.reads))
    stored = list(dict.fromkeys(access.array for access in found if access.writes))
    arrays = list(dict.fromkeys([*loaded, *stored]))
    packs = {name: fresh_name(site, f"{name}_pack") for name in arrays}
    kinds = {name: f"{_identifier(_type(site, name))}_x{width}" for name in arrays}
    body = item.body_with(
        {(access.node.start_byte, access.node.end_byte): f"{packs[access.array]}.v[{lane}]" for access in found}
    )
    scalar = item.body_with(item.returns)
    kind, index = item.index_type, item.index
    alignment = max(sizes.values()) * width
    pointers = " | ".join(f"reinterpret_cast<size_t>({name})" for name in arrays)
    inner = [
        f"if (({pointers}) % {alignment} == 0 && {first} + {width - 1} < {item.bound}) {{",
        *(f"    {_load(site, name, kinds[name], packs[name], first, name in stored)}" for name in loaded),
        *(f"    {kinds[name]} {packs[name]};" for name in stored if name not in loaded),
        "    #pragma unroll",
        f"    for (int {lane} = 0; {lane} < {width}; ++{lane}) {{",
        f"        const {kind} {index} = {first} + {lane};",
        f"        {body}",
        "    }",
        *(f"    *reinterpret_cast<{kinds[name]}*>({name} + {first}) = {packs[name]};" for name in stored),
        "} else {",
        f"    for ({kind} {index} = {first}; {index} < {item.bound} && {index} < {first} + {width}; ++{index}) {{",
        f"        {scalar}",
        "    }",
        "}",
    ]
    start = f"({item.index_text}) * {width}"
    if item.stride is None:
        lines = [f"const {kind} {first} = {start};", *inner]
    else:
        header = f"for ({kind} {first} = {start}; {first} < {item.bound}; {first} += ({item.stride}) * {width}) {{"
        lines = [header, *(f"    {line}" for line in inner), "}"]
    changes: list[Change] = [(a, b, "") for a, b in item.replaced[:-1]]
    last = item.replaced[-1]
    changes.append((last[0], last[1], "\n    ".join(lines) + "\n"))
    structs = "".join(
        f"struct alignas({sizes[name] * width}) {kinds[name]} {{ {_type(site, name)} v[{width}]; }};\n"
        for name in {kinds[name]: name for name in arrays}.values()
        if f"struct alignas({sizes[name] * width}) {kinds[name]} " not in context.kernel.source
    )
    changes.append((insertion_point(site), insertion_point(site), structs))
    kernel = with_source(context.kernel, site.source.rewrite(changes))
    if item.stride is None:
        grid: tuple[Size, ...] = (coarsened(site.launch.grid[0], width, context.params), *site.launch.grid[1:])
        kernel = with_launch(kernel, site.index, grid=grid)
    return Proposal(
        kernel=kernel,
        rationale=f"Each thread moves {width} neighbouring elements in one {alignment}-byte access, so a warp issues "
        f"1/{width} of the requests and of the address arithmetic",
        expected=(
            down(LOAD_REQUESTS, 1.0 / width),
            down(INSTRUCTIONS, 0.4 + 0.6 / width),
            *((down(BLOCKS, 1.0 / width),) if item.stride is None else ()),
        ),
    )


def _load(site: Site, array: str, kind: str, pack: str, first: str, changes: bool) -> str:
    qualifier = "" if changes else "const "
    return f"{qualifier}{kind} {pack} = *reinterpret_cast<const {kind}*>({array} + {first});"


def _type(site: Site, array: str) -> str:
    parameter = site.function.parameter(array)
    return "" if parameter is None else parameter.type_text


def _identifier(kind: str) -> str:
    return kind.replace(" ", "_").strip("_")


EDIT = Edit(
    name="vectorise_loads",
    metric=LOAD_REQUESTS,
    why="A 4-byte access per thread needs four times the instructions of a 16-byte one for the same bytes.",
    source="Luitjens, CUDA Pro Tip: Increase Performance with Vectorized Memory Access, 2013",
    propose=propose,
)
