"""Kernels in which one thread walks a whole row, and their rewrite to a warp or a block per row.

The threads of a team (a warp, or a block) run the row's code together: counted loops whose iterations are independent,
or only fold into sums, products, maxima and minima, are shared out over the team; everything else is done by each of
its threads alike, and one of them stores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from tree_sitter import Node

from optiml.records import Kernel, Size
from optiml.search import polynomial as poly
from optiml.search.edit import EditContext, with_launch, with_source
from optiml.search.grid import ceiling, scaled_extent, times
from optiml.search.loops import (
    ForLoop,
    Reduction,
    RescaledSum,
    has_barrier,
    independent_stores,
    is_invariant,
    leaves_early,
    outermost_loops,
    reductions,
    rescaled_sum,
)
from optiml.search.normalise import indexed_pointers
from optiml.search.source import (
    Access,
    Change,
    Local,
    Site,
    ancestors,
    contains,
    identifiers,
    integer,
    mentions,
    text_of,
    walk,
)

Team = Literal["warp", "block"]
WARP = 32
LONE_BLOCK = 128  # threads given to a row that one thread had
_WIDE = frozenset({"long long", "unsigned long long", "size_t", "int64_t", "uint64_t", "long", "ptrdiff_t"})
_STORES = frozenset({"assignment_expression", "call_expression", "update_expression"})
_GEOMETRY = frozenset({"threadIdx", "blockIdx", "gridDim"})


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedLoop:
    """A loop whose iterations a team can divide among its threads."""

    loop: ForLoop
    reductions: tuple[Reduction, ...]
    rescaled: RescaledSum | None  # the one fold of the loop, if it is a running maximum with a sum under it
    stored: frozenset[str]  # arrays it writes
    gain: int  # accesses that become coalesced, less those that cease to be


@dataclass(frozen=True, kw_only=True, eq=False)
class RowKernel:
    """A kernel with one thread per row that is understood well enough to be divided."""

    site: Site
    row: Local | None  # the variable that holds the row; None where a grid-stride loop counts the rows
    row_loop: ForLoop | None
    loops: tuple[SharedLoop, ...]
    single_stores: tuple[Node, ...]  # statements outside the shared loops that store
    lone: bool = False  # a block of one thread has the row: nothing about the row changes


def row_kernel(site: Site) -> RowKernel | None:
    """Read a kernel as one thread per row; None where that is unsure, or where nothing would be won."""
    function = site.function
    if function.is_cooperative or site.launches != 1 or site.launch.shared_bytes not in (0, "0"):
        return None
    if any(size != 1 for size in site.block[1:]) or site.block[0] is None:
        return None
    lone = site.launch.block[0] == 1 and not mentions(function.body, ("threadIdx", "blockDim"))
    row, row_loop = (None, None) if lone else _row_of(site)
    if not lone and (site.block[0] % WARP or (row is None and row_loop is None)):
        return None
    if not lone and not _only_geometry(site, row, row_loop):
        return None
    body = function.body if row_loop is None else row_loop.body
    across = "blockIdx.x" if lone else "threadIdx.x" if row_loop is None else row_loop.variable
    shared = tuple(found for loop in outermost_loops(body) if (found := _shared(site, loop, across)) is not None)
    if not shared or sum(item.gain for item in shared) <= 0:
        return None
    stores = _single_stores(site, shared)
    if stores is None:
        return None
    return RowKernel(site=site, row=row, row_loop=row_loop, loops=shared, single_stores=stores, lone=lone)


def row_kernels(context: EditContext) -> Iterator[tuple[EditContext, RowKernel]]:
    """The kernels of a plan that have one thread per row, and the context to divide them in.

    Rows that are walked with a pointer are rewritten to a counter first.
    """
    for site in context.sites:
        found = row_kernel(site)
        if found is not None:
            yield context, found
            continue
        indexed = indexed_pointers(site)
        if indexed is None:
            continue
        again = dataclasses.replace(context, kernel=with_source(context.kernel, indexed))
        for other in again.sites:
            found = row_kernel(other) if other.index == site.index else None
            if found is not None:
                yield again, found


def divide(context: EditContext, kernel: RowKernel, team: Team) -> Kernel:
    """The kernel with a warp or a block on each row, and the launch plan to match."""
    site = kernel.site
    names = _Names(site, team, lone=kernel.lone)
    changes: list[Change] = []
    changes += _row_changes(kernel, names)
    stored_and_read = _stored_and_read(site)
    for shared in kernel.loops:
        changes += _loop_changes(site, shared, names, sync=bool(shared.stored & stored_and_read))
    for statement in kernel.single_stores:
        changes += _guard(site, statement, names, stored_and_read)
    result = with_source(context.kernel, site.source.rewrite(changes))
    if kernel.lone:
        return with_launch(result, site.index, block=(WARP if team == "warp" else LONE_BLOCK,))
    grid: tuple[Size, ...] = (_grid(context, site, team), *site.launch.grid[1:])
    return _whole_warps(with_launch(result, site.index, grid=grid))


# --- analysis --------------------------------------------------------------------------------------------------------
def _row_of(site: Site) -> tuple[Local | None, ForLoop | None]:
    """The variable that holds the thread's row, or the grid-stride loop that counts rows."""
    candidates = [item for item in site.thread_indices("x") if item.scope.type != "for_statement"]
    if len(candidates) == 1:
        return candidates[0], None
    if candidates:
        return None, None
    size = site.block[0]
    stride = poly.multiply(poly.atom("gridDim.x"), poly.constant(size or 0))
    for loop in outermost_loops(site.function.body):
        if loop.step_node is None or not loop.declared or site.polynomial(loop.step_node) != stride:
            continue
        if site.polynomial(loop.start) in site.thread_index("x"):
            return None, loop
    return None, None


def _only_geometry(site: Site, row: Local | None, row_loop: ForLoop | None) -> bool:
    """Whether thread and block indices are used for nothing but the row."""
    allowed = [row.declarator] if row is not None else []
    if row_loop is not None:
        header = row_loop.node.child_by_field_name("initializer")
        allowed = [item for item in (header, row_loop.update) if item is not None]
    helpers: set[str] = set()
    for node in identifiers(site.function.body):
        if text_of(node) not in _GEOMETRY or any(contains(place, node) for place in allowed):
            continue
        owner = next((item for item in site.function.locals if contains(item.declarator, node)), None)
        if owner is None:
            return False
        helpers.add(owner.name)
    return all(
        any(contains(place, node) for place in allowed)
        or any(contains(item.declarator, node) for item in site.function.locals if item.name in helpers)
        for node in identifiers(site.function.body)
        if text_of(node) in helpers
    )


def _shared(site: Site, loop: ForLoop, across: str) -> SharedLoop | None:
    if not loop.step or not loop.declared or leaves_early(loop.body) or has_barrier(loop.node):
        return None
    if not is_invariant(site, loop.start, loop) or not is_invariant(site, loop.bound, loop):
        return None
    folded = reductions(site.function, loop)
    rescaled = rescaled_sum(site.function, loop) if folded is None else None
    if (folded is None and rescaled is None) or not independent_stores(site, loop):
        return None
    inside = [item for item in site.accesses if contains(loop.body, item.node)]
    if not inside:
        return None
    return SharedLoop(
        loop=loop, reductions=tuple(folded or ()), rescaled=rescaled,
        stored=frozenset(item.array for item in inside if item.writes),
        gain=sum(_gain(site, loop, item, across) for item in inside),
    )  # fmt: skip


def _gain(site: Site, loop: ForLoop, access: Access, thread: str) -> int:
    """+1 for an access that is scattered over the threads now and would be contiguous, -1 for the reverse.

    `thread` is the name in index formulas by which neighbouring threads differ.
    """
    if access.space != "global" or access.index is None:
        return 0
    along = poly.coefficient(access.index, loop.variable)
    across = poly.coefficient(access.index, thread)
    if along is None or across is None:
        return 0
    start = site.polynomial(loop.start)
    starts_apart = thread in poly.names(start)
    contiguous_now = poly.as_constant(across) == 1 and not starts_apart
    contiguous_then = poly.as_constant(along) == 1
    scattered_now = starts_apart or poly.as_constant(across) not in (0, 1)
    if contiguous_then and scattered_now:
        return 1
    return -1 if contiguous_now and not contiguous_then and along else 0


def _single_stores(site: Site, shared: tuple[SharedLoop, ...]) -> tuple[Node, ...] | None:
    """Statements outside the shared loops that store to global memory; None if one of them does more than store."""
    found: dict[int, Node] = {}
    for access in site.accesses:
        if not access.writes or any(contains(item.loop.node, access.node) for item in shared):
            continue
        if access.space != "global":
            continue  # a thread's own array: every thread of the team keeps the same copy
        if access.kind == "address":
            return None
        around = ancestors(access.node, below=site.function.body)
        statement = next((item for item in around if item.type == "expression_statement"), None)
        if statement is None or any(contains(statement, write.node) for write in site.function.writes):
            return None
        expression = statement.named_children[0] if statement.named_children else None
        if expression is None or expression.type not in _STORES:
            return None
        found[statement.id] = statement
    return tuple(found.values())


def _stored_and_read(site: Site) -> frozenset[str]:
    """Global arrays that the function both writes and reads: their accesses need an order within a team."""
    written = {item.array for item in site.accesses if item.writes and item.space == "global"}
    return frozenset(item.array for item in site.accesses if item.reads and item.array in written)


# --- rewriting -------------------------------------------------------------------------------------------------------
class _Names:
    """Fresh names and the C++ text of a team's geometry."""

    def __init__(self, site: Site, team: Team, *, lone: bool) -> None:
        self.team = team
        self._lone = lone
        self._used = {text_of(node) for node in identifiers(site.function.node)} | set(site.constants)
        entry = site.launch.block[0]
        params = {name for name in site.constants if name == entry}
        self.block = str(entry) if params else "blockDim.x"
        self.lane = self.fresh("lane")
        self.width = str(WARP) if team == "warp" else self.block
        self.sync = "__syncwarp();" if team == "warp" else "__syncthreads();"

    def fresh(self, base: str) -> str:
        name = base
        while name in self._used:
            name += "_"
        self._used.add(name)
        return name

    def row(self, wide: str) -> str:
        cast = f"({wide})" if wide else ""
        if self.team == "block":
            return f"{cast}blockIdx.x"
        return f"{cast}blockIdx.x * ({self.block} / {WARP}) + threadIdx.x / {WARP}"

    def rows_of_grid(self, wide: str) -> str:
        cast = f"({wide})" if wide else ""
        return f"{cast}gridDim.x" if self.team == "block" else f"{cast}gridDim.x * ({self.block} / {WARP})"

    @property
    def lane_declaration(self) -> str:
        value = "threadIdx.x" if self.team == "block" or self._lone else f"threadIdx.x % {WARP}"
        return f"const int {self.lane} = {value};"


def _row_changes(kernel: RowKernel, names: _Names) -> list[Change]:
    site = kernel.site
    if kernel.lone:
        opening = site.function.body.children[0].end_byte
        return [(opening, opening, f"\n    {names.lane_declaration}")]
    if kernel.row is not None:
        initial, declaration = kernel.row.initial, kernel.row.declaration
        assert initial is not None  # thread_indices lists initialised locals only
        wide = kernel.row.type_text if kernel.row.type_text in _WIDE else "long long" if _is_wide(initial) else ""
        indent = site.source.line_indent(declaration)
        return [
            (declaration.start_byte, declaration.start_byte, f"{names.lane_declaration}\n{indent}"),
            (initial.start_byte, initial.end_byte, names.row(wide)),
        ]
    loop = kernel.row_loop
    assert loop is not None
    wide = "long long" if _is_wide(loop.start) or any(name in text_of(loop.node)[:40] for name in _WIDE) else ""
    place = _with_pragma(loop.node)
    indent = site.source.line_indent(place)
    return [
        (place.start_byte, place.start_byte, f"{names.lane_declaration}\n{indent}"),
        (loop.start.start_byte, loop.start.end_byte, names.row(wide)),
        (loop.update.start_byte, loop.update.end_byte, f"{loop.variable} += {names.rows_of_grid(wide)}"),
    ]


def _loop_changes(site: Site, shared: SharedLoop, names: _Names, *, sync: bool) -> list[Change]:
    loop = shared.loop
    step = loop.step or 1
    offset = names.lane if step == 1 else f"{names.lane} * {step}"
    start = text_of(loop.start)
    begin = offset if integer(start) == 0 else f"{start} + {offset}"
    stride = names.width if step == 1 else f"{names.width} * {step}"
    changes: list[Change] = [
        (loop.start.start_byte, loop.start.end_byte, begin),
        (loop.update.start_byte, loop.update.end_byte, f"{loop.variable} += {stride}"),
    ]
    sign = loop.condition.child_by_field_name("operator")
    if sign is not None and loop.comparison == "!=":
        changes.append((sign.start_byte, sign.end_byte, "<"))  # a stride may step over the end
    before, after = ([names.sync] if sync else []), ([names.sync] if sync else [])
    for reduction in shared.reductions:
        saved = None
        if reduction.neutral is not None and not _starts_neutral(site, reduction, loop):
            saved = names.fresh(f"{reduction.name}_before")
            kind = reduction.local.type_text
            before += [f"const {kind} {saved} = {reduction.name};", f"{reduction.name} = {reduction.neutral};"]
        after += _folding(reduction, names)
        if names.team == "block" and _is_repeated(site, loop):
            after.append(names.sync)  # the next round writes the parts that slower warps may still read
        if saved is not None:
            after.append(f"{reduction.name} = {reduction.combine(saved, reduction.name)};")
    if shared.rescaled is not None:
        after += _rescaling(shared.rescaled, names)
        if names.team == "block" and _is_repeated(site, loop):
            after.append(names.sync)
    place = _with_pragma(loop.node)
    indent = site.source.line_indent(place)
    # Two shared loops may stand side by side in a branch without braces; a block of its own is always right.
    needs_block = loop.node.parent is not None and loop.node.parent.type != "compound_statement"
    lead = "".join(f"{line}\n{indent}" for line in (["{"] if needs_block else []) + before)
    tail = "".join(f"\n{indent}{line}" for line in after + (["}"] if needs_block else []))
    if lead:
        changes.append((place.start_byte, place.start_byte, lead))
    if tail:
        changes.append((loop.node.end_byte, loop.node.end_byte, tail))
    return changes


def _folding(reduction: Reduction, names: _Names) -> list[str]:
    """C++ lines after which every thread of the team holds the folded value."""
    name, kind = reduction.name, reduction.local.type_text
    offset, other = names.fresh("offset"), names.fresh("other")
    butterfly = [
        "#pragma unroll",
        f"for (int {offset} = {WARP // 2}; {offset} > 0; {offset} /= 2) {{",
        f"    const {kind} {other} = __shfl_xor_sync(0xffffffffu, {name}, {offset});",
        f"    {name} = {reduction.combine(name, other)};",
        "}",
    ]
    if names.team == "warp":
        return butterfly
    parts = names.fresh(f"{name}_parts")
    first = f"threadIdx.x % {WARP}"
    idle = reduction.neutral if reduction.neutral is not None else f"{parts}[0]"
    return [
        f"__shared__ {kind} {parts}[{WARP}];",
        *butterfly,
        f"if ({first} == 0) {parts}[threadIdx.x / {WARP}] = {name};",
        "__syncthreads();",
        f"{name} = {first} < {names.block} / {WARP} ? {parts}[{first}] : {_typed(kind, idle, reduction)};",
        *butterfly,
    ]


def _rescaling(fold: RescaledSum, names: _Names) -> list[str]:
    """C++ lines after which every thread of the team holds the largest value and the sum scaled to it."""
    top, total, kind = fold.largest.name, fold.total.name, fold.largest.type_text
    offset, other, part, both = (names.fresh(name) for name in ("offset", "other_top", "other_total", "both"))
    butterfly = [
        "#pragma unroll",
        f"for (int {offset} = {WARP // 2}; {offset} > 0; {offset} /= 2) {{",
        f"    const {kind} {other} = __shfl_xor_sync(0xffffffffu, {top}, {offset});",
        f"    const {kind} {part} = __shfl_xor_sync(0xffffffffu, {total}, {offset});",
        f"    const {kind} {both} = {fold.maximum}({top}, {other});",
        # Where both are minus infinity their difference is no number: nothing is scaled then.
        f"    {total} = ({top} == {both} ? {total} : {total} * {fold.exponential}({top} - {both}))",
        f"        + ({other} == {both} ? {part} : {part} * {fold.exponential}({other} - {both}));",
        f"    {top} = {both};",
        "}",
    ]
    if names.team == "warp":
        return butterfly
    tops, totals = names.fresh(f"{top}_parts"), names.fresh(f"{total}_parts")
    first = f"threadIdx.x % {WARP}"
    return [
        f"__shared__ {kind} {tops}[{WARP}], {totals}[{WARP}];",
        *butterfly,
        f"if ({first} == 0) {{ {tops}[threadIdx.x / {WARP}] = {top}; {totals}[threadIdx.x / {WARP}] = {total}; }}",
        "__syncthreads();",
        f"{top} = {first} < {names.block} / {WARP} ? {tops}[{first}] : {tops}[0];",
        f"{total} = {first} < {names.block} / {WARP} ? {totals}[{first}] : ({kind})0;",
        *butterfly,
    ]


def _typed(kind: str, value: str, reduction: Reduction) -> str:
    return value if reduction.neutral is None else f"({kind}){value}"


def _guard(site: Site, statement: Node, names: _Names, stored_and_read: frozenset[str]) -> list[Change]:
    """Let one thread of the team do a store, and the others wait if they read it back."""
    inside = {item.array for item in site.accesses if item.writes and contains(statement, item.node)}
    text = f"if ({names.lane} == 0) {{ {text_of(statement)} }}"
    if inside & stored_and_read:
        text = f"{names.sync} {text} {names.sync}"
    if statement.parent is not None and statement.parent.type != "compound_statement":
        text = f"{{ {text} }}"
    return [(statement.start_byte, statement.end_byte, text)]


def _starts_neutral(site: Site, reduction: Reduction, loop: ForLoop) -> bool:
    """Whether the variable is known to hold the neutral element when the loop begins."""
    initial = reduction.local.initial
    if initial is None or any(item.type == "for_statement" for item in ancestors(loop.node, below=site.function.body)):
        return False
    if text_of(initial).rstrip("fFlLuU").rstrip("0").rstrip(".") not in ("", "0") or reduction.operator != "sum":
        return False
    writes = site.function.writes_to(reduction.local)
    return not any(write.node.start_byte < loop.node.start_byte for write in writes)


def _is_repeated(site: Site, loop: ForLoop) -> bool:
    around = ancestors(loop.node, below=site.function.body)
    return any(item.type in ("for_statement", "while_statement", "do_statement") for item in around)


def _grid(context: EditContext, site: Site, team: Team) -> Size:
    entry = site.launch.grid[0]
    if team == "warp":
        return scaled_extent(entry, WARP, context.params)
    found = ceiling(entry, context.params)
    if found is not None and found.divisor == site.block[0]:
        return found.extent
    return times(entry, site.launch.block[0])


def _whole_warps(kernel: Kernel) -> Kernel:
    """Tunables of the block are kept to whole warps, on which the shuffles rely."""
    blocks = {str(entry) for launch in kernel.launches for entry in launch.block}
    tunables: Mapping[str, tuple[int | float | bool, ...]] = {
        name: tuple(v for v in values if not isinstance(v, int) or v % WARP == 0) if name in blocks else values
        for name, values in kernel.tunables.items()
    }
    return kernel if tunables == kernel.tunables else dataclasses.replace(kernel, tunables=tunables)


def _is_wide(node: Node) -> bool:
    types = (item for item in walk(node) if item.type in ("sized_type_specifier", "primitive_type"))
    return any(text_of(item) in _WIDE for item in types)


def _with_pragma(node: Node) -> Node:
    """The unroll pragma right before a loop, or the loop itself."""
    previous = node.prev_sibling
    return previous if previous is not None and previous.type == "preproc_call" else node
