"""Add up in registers and across the block before one atomic per block."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from optiml.records import Size
from optiml.search.edit import ATOMICS, INSTRUCTIONS, Edit, EditContext, Proposal, down, with_launch, with_source
from optiml.search.items import ItemKernel, fresh_name, item_kernel
from optiml.search.source import Change, Site, call_arguments, called, calls, mentions, text_of, unwrap

GRID_CAPS = (864, 216)  # 8 and 2 blocks for each SM of an A100


def propose(context: EditContext) -> Iterator[Proposal]:
    """Kernels whose items each end in one atomic on the same address."""
    for site in context.sites:
        item = item_kernel(site)
        if item is None or site.block[0] is None or site.block[0] % 32:
            continue
        call = _the_atomic(site, item)
        if call is None:
            continue
        for cap in GRID_CAPS:
            proposal = _proposal(context, site, item, call, cap)
            if proposal is not None:
                yield proposal


def _the_atomic(site: Site, item: ItemKernel) -> Node | None:
    """The single atomic of the body, if it is a statement of its own and its address is the same for all threads."""
    start, end = item.span
    found = [
        call
        for call in calls(site.function.body)
        if called(call).startswith("atomic") and start <= call.start_byte and call.end_byte <= end
    ]
    if len(found) != 1 or called(found[0]) != "atomicAdd":
        return None
    call = found[0]
    if call.parent is None or call.parent.type != "expression_statement" or len(call_arguments(call)) != 2:
        return None
    others = [access for access in item.accesses if access.writes and access.kind != "atomic"]
    target = call_arguments(call)[0]
    inner = {local.name for local in site.function.locals if start <= local.declaration.start_byte < end}
    varying = mentions(target, {item.index, "threadIdx", "blockIdx", *inner}) or "[" in text_of(target).replace(
        "[0]", ""
    )
    return None if others or varying else call


def _proposal(context: EditContext, site: Site, item: ItemKernel, call: Node, cap: int) -> Proposal | None:
    target, value = call_arguments(call)
    kind = _value_type(site, target)
    if kind is None:
        return None
    total, lane, parts = (fresh_name(site, name) for name in ("total", "offset", "parts"))
    statement = call.parent
    assert statement is not None  # `_the_atomic` saw it
    added = f"{total} += {text_of(value)};"
    body = item.body_with({**item.returns, (statement.start_byte, statement.end_byte): added})
    entry = site.launch.block[0]
    block = str(entry) if entry in site.constants else "blockDim.x"
    stride = item.stride if item.stride is not None else f"({item.index_type})gridDim.x * {block}"
    shuffled = f"__shfl_down_sync(0xffffffffu, {total}, {lane})"
    butterfly = [
        "#pragma unroll",
        f"for (int {lane} = 16; {lane} > 0; {lane} /= 2) {total} += {shuffled};",
    ]
    lines = [
        f"{kind} {total} = 0;",
        f"for ({item.index_type} {item.index} = {item.index_text}; {item.index} < {item.bound}; "
        f"{item.index} += {stride}) {{",
        f"    {body}",
        "}",
        *butterfly,
        f"__shared__ {kind} {parts}[32];",
        f"if (threadIdx.x % 32 == 0) {parts}[threadIdx.x / 32] = {total};",
        "__syncthreads();",
        "if (threadIdx.x < 32) {",
        f"    {total} = threadIdx.x < {block} / 32 ? {parts}[threadIdx.x] : ({kind})0;",
        *(f"    {line}" for line in butterfly),
        f"    if (threadIdx.x == 0) atomicAdd({text_of(target)}, {total});",
        "}",
    ]
    changes: list[Change] = [(start, end, "") for start, end in item.replaced[:-1]]
    start, end = item.replaced[-1]
    changes.append((start, end, "\n    ".join(lines) + "\n"))
    kernel = with_source(context.kernel, site.source.rewrite(changes))
    if item.stride is None:
        grid: tuple[Size, ...] = (f"min({site.launch.grid[0]}, {cap})", *site.launch.grid[1:])
        kernel = with_launch(kernel, site.index, grid=grid)
    elif cap != GRID_CAPS[0]:
        return None
    return Proposal(
        kernel=kernel,
        rationale="Threads add up in registers and shuffle their sums together, so one atomic per block is left where "
        "each item had its own",
        expected=(down(ATOMICS, 0.01), down(INSTRUCTIONS, 0.8)),
        risks=("sums are added in another order",),
    )


def _value_type(site: Site, target: Node) -> str | None:
    node = unwrap(target)
    if node.type == "pointer_expression":
        argument = node.child_by_field_name("argument")
        node = argument if argument is not None else node
    if node.type == "subscript_expression":
        argument = node.child_by_field_name("argument")
        node = argument if argument is not None else node
    parameter = site.function.parameter(text_of(node))
    return None if parameter is None or not parameter.is_pointer else parameter.type_text


EDIT = Edit(
    name="reduce_atomics",
    metric=ATOMICS,
    why="Atomics on one address go one after another in L2; sums in registers and shuffles run side by side.",
    source="Luitjens, Faster Parallel Reductions on Kepler, 2014; Adinets, Warp-Aggregated Atomics, 2014",
    propose=propose,
)
