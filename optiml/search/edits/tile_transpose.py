"""Stage a transposing copy in a shared tile, so that loads and stores are both contiguous."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tree_sitter import Node

from optiml.records import Size
from optiml.search import polynomial as poly
from optiml.search.edit import LOAD_SECTORS, STORE_SECTORS, Edit, EditContext, Proposal, down, with_launch, with_source
from optiml.search.estimate import lane_sectors, launch_shape, sizes
from optiml.search.grid import ceil_div
from optiml.search.items import fresh_name
from optiml.search.source import (
    Access,
    Change,
    Local,
    Site,
    bounds_change,
    contains,
    identifiers,
    mentions,
    named,
    statements_of,
    text_of,
    unwrap,
    walk,
)

TILE, ROWS = 32, 8


@dataclass(frozen=True, kw_only=True, eq=False)
class Copy:
    """`if (inside) y[f(row, column)] = g(x[h(row, column)])`; loads run along `column`, stores along `row`."""

    site: Site
    row: Local
    column: Local
    row_bound: str
    column_bound: str
    prologue: tuple[str, ...]
    statement: Node
    target: Node
    value: Node
    kind: str
    flat: str  # C++ declaration of the flat index, where the copy uses it; else ""


def propose(context: EditContext) -> Iterator[Proposal]:
    """Kernels with one element per thread whose load and store run along different indices."""
    for site in context.sites:
        copy = _copy(context, site)
        if copy is not None:
            yield _proposal(context, copy)


def _copy(context: EditContext, site: Site) -> Copy | None:
    function = site.function
    if function.is_cooperative or site.launches != 1 or function.loops:
        return None
    stores = [item for item in site.accesses if item.writes]
    loads = [item for item in site.accesses if not item.writes]
    if len(stores) != 1 or stores[0].kind != "store" or len(loads) != 1 or stores[0].array == loads[0].array:
        return None
    if not _one_side_scattered(context, site, loads[0], stores[0]):
        return None
    indices = _flat_parts(site) or _axes(site)
    if indices is None:
        return None
    (first, first_bound), (second, second_bound), frame = indices
    assignment = stores[0].node.parent
    statement = None if assignment is None else assignment.parent
    if assignment is None or assignment.type != "assignment_expression" or statement is None:
        return None
    value, target = assignment.child_by_field_name("right"), assignment.child_by_field_name("left")
    parameter = function.parameter(stores[0].array)
    if value is None or target is None or statement.type != "expression_statement" or parameter is None:
        return None
    flat = frame[0] if frame[0] not in (first, second) else None
    along_load = [local for local in (first, second) if _runs_along(site, loads[0], local, flat, second)]
    along_store = [local for local in (first, second) if _runs_along(site, stores[0], local, flat, second)]
    if len(along_load) != 1 or len(along_store) != 1 or along_load[0] is along_store[0]:
        return None
    bounds = {first.name: first_bound, second.name: second_bound}
    prologue = _prologue(site, frame, (first, second), statement)
    if prologue is None or not {text_of(n) for n in identifiers(statement)} & {first.name, second.name}:
        return None
    return Copy(
        site=site, row=along_store[0], column=along_load[0], row_bound=bounds[along_store[0].name],
        column_bound=bounds[along_load[0].name], prologue=prologue, statement=statement, target=target, value=value,
        kind=parameter.type_text, flat=_flat_text(flat, first, second, second_bound, statement),
    )  # fmt: skip


def _one_side_scattered(context: EditContext, site: Site, load: Access, store: Access) -> bool:
    names = sizes(context.kernel, context.problem)
    shape = launch_shape(site, names)
    if shape is None:
        return False
    sectors = [lane_sectors(site, access, names, shape[1]) for access in (load, store)]
    return min(sectors) <= 8 < max(sectors)


def _flat_text(flat: Local | None, high: Local, low: Local, extent: str, statement: Node) -> str:
    if flat is None or not mentions(statement, (flat.name,)):
        return ""
    kind = "long long" if flat.type_text == "auto" else flat.type_text
    return f"const {kind} {flat.name} = ({kind}){high.name} * {extent} + {low.name};"


def _runs_along(site: Site, access: Access, local: Local, flat: Local | None, low: Local) -> bool:
    """Whether the index holds the bare local as a term: neighbours in it are neighbours in memory.

    A flat index runs along its low part.
    """
    indices = access.node.child_by_field_name("indices")
    if indices is None or len(named(indices)) != 1:
        return False
    terms = {text_of(unwrap(term)) for term in _terms(named(indices)[0])}
    return local.name in terms or (flat is not None and flat.name in terms and local is low)


def _terms(node: Node) -> list[Node]:
    node = unwrap(node)
    sign = node.child_by_field_name("operator") if node.type == "binary_expression" else None
    left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
    if sign is not None and text_of(sign) == "+" and left is not None and right is not None:
        return [*_terms(left), *_terms(right)]
    return [node]


Indices = tuple[tuple[Local, str], tuple[Local, str], list[Local]]


def _axes(site: Site) -> Indices | None:
    """Thread indices along x and y under a guard of both."""
    found = [site.thread_indices(axis) for axis in "xy"]
    if any(len(item) != 1 for item in found):
        return None
    x, y = found[0][0], found[1][0]
    bounds: dict[str, str] = {}
    for node in walk(site.function.body):
        if node.type != "binary_expression":
            continue
        left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
        sign = node.child_by_field_name("operator")
        if left is None or right is None or sign is None or text_of(sign) not in ("<", ">="):
            continue
        if text_of(unwrap(left)) in (x.name, y.name):
            bounds[text_of(unwrap(left))] = text_of(unwrap(right))
    if set(bounds) != {x.name, y.name} or not _geometry_in(site, (x, y)):
        return None
    return (x, bounds[x.name]), (y, bounds[y.name]), [x, y]


def _flat_parts(site: Site) -> Indices | None:
    """`a = t / W, b = t % W` of a flat thread index under a guard `t < H * W`."""
    flats = site.thread_indices("x")
    if len(flats) != 1 or not _geometry_in(site, (flats[0],)):
        return None
    flat = flats[0]
    parts: dict[str, tuple[Local, str]] = {}
    for local in site.function.locals:
        value = None if local.initial is None or local.is_pointer else unwrap(local.initial)
        sign = (
            value.child_by_field_name("operator") if value is not None and value.type == "binary_expression" else None
        )
        if value is None or sign is None or text_of(sign) not in ("/", "%"):
            continue
        left, right = value.child_by_field_name("left"), value.child_by_field_name("right")
        if left is None or right is None or text_of(unwrap(left)) != flat.name:
            continue
        parts[text_of(sign)] = (local, text_of(unwrap(right)))
    if set(parts) != {"/", "%"} or parts["/"][1] != parts["%"][1]:
        return None
    inner = parts["%"][1]
    outer = _other_extent(site, flat, inner)
    if outer is None:
        return None
    return (parts["/"][0], outer), (parts["%"][0], inner), [flat, parts["/"][0], parts["%"][0]]


def _other_extent(site: Site, flat: Local, inner: str) -> str | None:
    for node in walk(site.function.body):
        left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
        sign = node.child_by_field_name("operator")
        if node.type != "binary_expression" or left is None or right is None or sign is None:
            continue
        if text_of(sign) not in ("<", ">=") or text_of(unwrap(left)) != flat.name:
            continue
        for parameter in site.function.parameters:
            if not parameter.is_pointer and site.polynomial(right) == poly.multiply(
                poly.atom(inner), poly.atom(parameter.name)
            ):
                return parameter.name
    return None


def _geometry_in(site: Site, places: tuple[Local, ...]) -> bool:
    return all(
        any(contains(place.declarator, node) for place in places)
        for node in identifiers(site.function.body)
        if text_of(node) in ("threadIdx", "blockIdx", "blockDim", "gridDim")
    )


def _prologue(site: Site, frame: list[Local], pair: tuple[Local, Local], statement: Node) -> tuple[str, ...] | None:
    """Declarations to keep; None if the function does anything but guard and copy."""
    kept = []
    names = {local.name for local in frame}
    for item in named(site.function.body):
        if contains(item, statement):
            if item.id == statement.id:
                continue
            then = item.child_by_field_name("consequence")
            if item.type != "if_statement" or then is None or item.child_by_field_name("alternative") is not None:
                return None
            for inner in statements_of(then):
                if inner.id != statement.id and not _declares(inner, frame):
                    return None
        elif item.type == "if_statement":
            then = item.child_by_field_name("consequence")
            inside = [] if then is None else statements_of(then)
            if len(inside) != 1 or inside[0].type != "return_statement":
                return None
        elif not _declares(item, frame):
            if item.type != "declaration" or mentions(item, names):
                return None
            kept.append(text_of(item))
    return tuple(kept)


def _declares(item: Node, frame: list[Local]) -> bool:
    """Whether a statement declares index variables and nothing else."""
    own = {local.declarator.id for local in frame}
    declared = item.children_by_field_name("declarator")
    return item.type == "declaration" and bool(declared) and all(child.id in own for child in declared)


def _proposal(context: EditContext, copy: Copy) -> Proposal:
    site = copy.site
    tile, step = fresh_name(site, "tile"), fresh_name(site, "k")
    row, column = copy.row.name, copy.column.name
    row_type, column_type = (
        "int" if local.type_text == "auto" else local.type_text for local in (copy.row, copy.column)
    )
    inside = f"{row} < {copy.row_bound} && {column} < {copy.column_bound}"
    lines = [
        *copy.prologue,
        f"__shared__ {copy.kind} {tile}[{TILE}][{TILE} + 1];",
        f"for (int {step} = threadIdx.y; {step} < {TILE}; {step} += {ROWS}) {{",
        f"    const {row_type} {row} = blockIdx.y * {TILE} + {step};",
        f"    const {column_type} {column} = blockIdx.x * {TILE} + threadIdx.x;",
        *([f"    {copy.flat}"] if copy.flat else []),
        f"    if ({inside}) {tile}[{step}][threadIdx.x] = {text_of(copy.value)};",
        "}",
        "__syncthreads();",
        f"for (int {step} = threadIdx.y; {step} < {TILE}; {step} += {ROWS}) {{",
        f"    const {row_type} {row} = blockIdx.y * {TILE} + threadIdx.x;",
        f"    const {column_type} {column} = blockIdx.x * {TILE} + {step};",
        *([f"    {copy.flat}"] if copy.flat else []),
        f"    if ({inside}) {text_of(copy.target)} = {tile}[threadIdx.x][{step}];",
        "}",
    ]
    body = site.function.body
    start = named(body)[0].start_byte
    changes: list[Change] = [(start, body.children[-1].start_byte, "\n    ".join(lines) + "\n")]
    changes += bounds_change(site.function, TILE * ROWS)
    grid: tuple[Size, ...] = tuple(
        ceil_div(_in_plan(site, bound), TILE) for bound in (copy.column_bound, copy.row_bound)
    )
    kernel = with_source(context.kernel, site.source.rewrite(changes))
    return Proposal(
        kernel=with_launch(kernel, site.index, grid=grid, block=(TILE, ROWS)),
        rationale=f"A {TILE}x{TILE} tile in shared memory turns the data around: loads and stores are both contiguous",
        expected=(down(STORE_SECTORS, 0.25), down(LOAD_SECTORS, 0.5)),
    )


def _in_plan(site: Site, bound: str) -> str:
    """The launch plan's text for a size parameter of the kernel."""
    return site.arguments.get(bound, bound)


EDIT = Edit(
    name="tile_transpose",
    metric=STORE_SECTORS,
    why="A direct transpose is contiguous on one side only; the other side moves a whole sector per element.",
    source="Harris, An Efficient Matrix Transpose in CUDA C/C++, 2013",
    propose=propose,
)
