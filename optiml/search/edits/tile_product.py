"""Stage both factors of a matrix product in shared memory and give each thread a small tile of the result."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tree_sitter import Node

from optiml.search import polynomial as poly
from optiml.search.edit import (
    INSTRUCTIONS,
    LOAD_REQUESTS,
    LOAD_SECTORS,
    Edit,
    EditContext,
    Proposal,
    down,
    with_launch,
    with_source,
)
from optiml.search.estimate import launch_shape, sizes
from optiml.search.grid import ceil_div, ceiling, times
from optiml.search.items import fresh_name
from optiml.search.loops import ForLoop, outermost_loops, reductions
from optiml.search.source import (
    Access,
    Change,
    Local,
    Site,
    bounds_change,
    call_arguments,
    called,
    contains,
    identifiers,
    integer,
    mentions,
    named,
    statements_of,
    text_of,
    unwrap,
    walk,
)

THREADS = 16  # along each side of the block
DEPTH = 16  # of a staged tile along the summed axis
PER_THREAD = (4, 2, 8)  # results along each side of a thread's tile
SMS = 108  # of an A100: fewer blocks leave some idle


@dataclass(frozen=True, kw_only=True, eq=False)
class Factor:
    """One factor of the summed product, and the index variable it depends on."""

    node: Node
    access: Access
    variable: str
    along_sum: bool  # whether neighbouring values of the summed index are neighbours in memory


@dataclass(frozen=True, kw_only=True, eq=False)
class Product:
    """`for k: acc += P(row, k) * Q(column, k)` with one thread per result; `across` is contiguous in the output."""

    site: Site
    down: Local
    across: Local
    down_bound: str
    across_bound: str
    down_axis: str
    across_axis: str
    loop: ForLoop
    total: Local
    first: Factor  # depends on `down`
    second: Factor  # depends on `across`
    prologue: tuple[str, ...]
    epilogue: str
    span: tuple[int, int]


def propose(context: EditContext) -> Iterator[Proposal]:
    """Kernels with one thread per result on a two-dimensional grid, which sum products of two loads."""
    for site in context.sites:
        product = _product(site)
        if product is None:
            continue
        for size in sorted(PER_THREAD, key=lambda item: _idle(context, product, item)):
            proposal = _proposal(context, product, size)
            if proposal is not None:
                yield proposal


def _idle(context: EditContext, product: Product, size: int) -> float:
    """How many SMs' worth of blocks a tile size leaves idle at the bench size, as a factor of at least 1."""
    names = sizes(context.kernel, context.problem)
    shape = launch_shape(product.site, names)
    if shape is None:
        return 1.0
    results = math.prod(shape[0]) * math.prod(shape[1])
    return max(1.0, SMS * (THREADS * size) ** 2 / results)


# --- analysis --------------------------------------------------------------------------------------------------------
def _product(site: Site) -> Product | None:
    function = site.function
    if function.is_cooperative or site.launches != 1 or len(site.launch.grid) < 2:
        return None
    axes = {axis: site.thread_indices(axis) for axis in ("x", "y")}
    if any(len(found) != 1 for found in axes.values()) or not _geometry_only_in(site, [axes["x"][0], axes["y"][0]]):
        return None
    loops = outermost_loops(function.body)
    if len(loops) != 1 or len(function.loops) != 1:
        return None
    loop = loops[0]
    folded = reductions(function, loop)
    if loop.step != 1 or loop.comparison != "<" or integer(text_of(loop.start)) != 0 or not loop.declared:
        return None
    if folded is None or len(folded) != 1 or folded[0].operator != "sum":
        return None
    total = folded[0].local
    if total.initial is None or text_of(total.initial).rstrip("fF").rstrip("0").rstrip(".") not in ("", "0"):
        return None
    pair = _factors(site, loop, total, axes["x"][0], axes["y"][0])
    frame = _frame(site, loop, total, axes["x"][0], axes["y"][0])
    if pair is None or frame is None:
        return None
    bounds, prologue, epilogue, span = frame
    across_axis = _contiguous_axis(site, {axis: found[0] for axis, found in axes.items()}, loop)
    down_axis = "y" if across_axis == "x" else "x"
    across, down_ = axes[across_axis][0], axes[down_axis][0]
    first, second = pair if pair[0].variable == down_.name else (pair[1], pair[0])
    if first.variable != down_.name or second.variable != across.name:
        return None
    return Product(
        site=site, down=down_, across=across, down_bound=bounds[down_.name], across_bound=bounds[across.name],
        down_axis=down_axis, across_axis=across_axis, loop=loop, total=total, first=first, second=second,
        prologue=prologue, epilogue=epilogue, span=span,
    )  # fmt: skip


def _geometry_only_in(site: Site, places: list[Local]) -> bool:
    for node in identifiers(site.function.body):
        if text_of(node) not in ("threadIdx", "blockIdx", "blockDim"):
            continue
        parent = node.parent
        if parent is not None and text_of(parent) == "blockIdx.z":
            continue
        if not any(contains(place.declarator, node) for place in places):
            return False
    return True


def _factors(site: Site, loop: ForLoop, total: Local, x: Local, y: Local) -> tuple[Factor, Factor] | None:
    statements = statements_of(loop.body)
    if len(statements) != 1 or statements[0].type != "expression_statement":
        return None
    expression = statements[0].named_children[0]
    if expression.type != "assignment_expression":
        return None
    value, operator = expression.child_by_field_name("right"), expression.child_by_field_name("operator")
    if value is None or operator is None:
        return None
    sides = _multiplied(unwrap(value), total.name, text_of(operator))
    if sides is None:
        return None
    factors = []
    for side in sides:
        loads = [item for item in site.accesses if contains(side, item.node)]
        variables = [local.name for local in (x, y) if mentions(side, (local.name,))]
        others = {local.name for local in site.function.locals} - {x.name, y.name, loop.variable}
        if len(loads) != 1 or len(variables) != 1 or loads[0].space != "global" or mentions(side, others):
            return None
        if loads[0].index is None or not mentions(side, (loop.variable,)):
            return None
        stride = poly.coefficient(loads[0].index, loop.variable)
        factors.append(
            Factor(
                node=side, access=loads[0], variable=variables[0],
                along_sum=stride is not None and poly.as_constant(stride) == 1,
            )
        )  # fmt: skip
    return (factors[0], factors[1]) if factors[0].variable != factors[1].variable else None


def _multiplied(value: Node, total: str, operator: str) -> tuple[Node, Node] | None:
    """The two factors in `acc += p * q`, `acc = acc + p * q` and `acc = fmaf(p, q, acc)`."""
    if operator == "+=":
        return _product_sides(value)
    if operator != "=":
        return None
    if value.type == "call_expression" and called(value) in ("fmaf", "fma", "__fmaf_rn"):
        arguments = call_arguments(value)
        return (arguments[0], arguments[1]) if len(arguments) == 3 and text_of(arguments[2]) == total else None
    left, right = value.child_by_field_name("left"), value.child_by_field_name("right")
    sign = value.child_by_field_name("operator")
    if left is None or right is None or sign is None or text_of(sign) != "+":
        return None
    if text_of(unwrap(left)) == total:
        return _product_sides(unwrap(right))
    return _product_sides(unwrap(left)) if text_of(unwrap(right)) == total else None


def _product_sides(value: Node) -> tuple[Node, Node] | None:
    if value.type != "binary_expression":
        return None
    left, right = value.child_by_field_name("left"), value.child_by_field_name("right")
    sign = value.child_by_field_name("operator")
    return (
        (left, right) if left is not None and right is not None and sign is not None and text_of(sign) == "*" else None
    )


def _frame(
    site: Site, loop: ForLoop, total: Local, x: Local, y: Local
) -> tuple[dict[str, str], tuple[str, ...], str, tuple[int, int]] | None:  # fmt: skip
    """Bounds of both indices, statements to keep before the tile loop, statements after the sum, bytes to replace."""
    body = site.function.body
    top = named(body)
    guards = [item for item in top if item.type == "if_statement" and mentions(item, (x.name,))]
    if not guards:
        return None
    guard = guards[0]
    condition, then = guard.child_by_field_name("condition"), guard.child_by_field_name("consequence")
    if condition is None or then is None or guard.child_by_field_name("alternative") is not None:
        return None
    inside = contains(then, loop.node)
    bounds = _bounds(unwrap(condition), "&&" if inside else "||", "<" if inside else ">=")
    if bounds is None or set(bounds) != {x.name, y.name}:
        return None
    statements = statements_of(then) if inside else [item for item in top if item.start_byte >= guard.end_byte]
    if not inside and not any(item.type == "return_statement" for item in walk(then)):
        return None
    if inside and top[-1].id != guard.id:
        return None
    if not any(item.id == loop.node.id for item in statements):
        return None
    before = [item for item in statements if item.end_byte <= loop.node.start_byte and item.type != "preproc_call"]
    after = [item for item in statements if item.start_byte >= loop.node.end_byte]
    first = [item for item in top if item.start_byte < guard.start_byte]
    kept = []
    for item in (*first, *before):
        if any(contains(item, place.declarator) for place in (x, y, total)):
            declared = item.children_by_field_name("declarator")
            if any(child.id not in {x.declarator.id, y.declarator.id, total.declarator.id} for child in declared):
                return None
            continue
        if mentions(item, (x.name, y.name, total.name)) or item.type != "declaration":
            return None
        kept.append(text_of(item))
    if not after or any(node.type == "return_statement" for item in after for node in walk(item)):
        return None
    data = site.source.data
    epilogue = data[after[0].start_byte : after[-1].end_byte].decode("utf-8")
    start = min(item.start_byte for item in top)
    return bounds, tuple(kept), epilogue, (start, body.children[-1].start_byte)


def _bounds(test: Node, junction: str, comparison: str) -> dict[str, str] | None:
    """`r < M && c < N` as {"r": "M", "c": "N"}."""
    if test.type != "binary_expression":
        return None
    left, right = test.child_by_field_name("left"), test.child_by_field_name("right")
    sign = test.child_by_field_name("operator")
    if left is None or right is None or sign is None:
        return None
    if text_of(sign) == junction:
        a, b = _bounds(unwrap(left), junction, comparison), _bounds(unwrap(right), junction, comparison)
        return None if a is None or b is None else {**a, **b}
    if text_of(sign) == comparison and unwrap(left).type == "identifier":
        return {text_of(unwrap(left)): text_of(right)}
    return None


def _contiguous_axis(site: Site, indices: dict[str, Local], loop: ForLoop) -> str:
    """The axis whose index runs along the memory of the output."""
    for access in site.accesses:
        if not access.writes or access.index is None or contains(loop.node, access.node):
            continue
        for axis in indices:
            stride = poly.coefficient(access.index, f"threadIdx.{axis}")
            if stride is not None and poly.as_constant(stride) == 1:
                return axis
    return "x"


# --- rewriting -------------------------------------------------------------------------------------------------------
def _proposal(context: EditContext, product: Product, size: int) -> Proposal | None:
    site = product.site
    covered = THREADS * size
    grid = list(site.launch.grid)
    extents = {}
    for axis in ("x", "y"):
        position = "xyz".index(axis)
        found = ceiling(grid[position], context.params)
        threads = site.block[position]
        if found is not None and found.divisor == threads:
            extents[axis] = found.extent
        elif threads is not None:
            extents[axis] = str(times(grid[position], threads))
        else:
            return None
    grid[0], grid[1] = ceil_div(extents[product.across_axis], covered), ceil_div(extents[product.down_axis], covered)
    idle = _idle(context, product, size)
    lines = _lines(product, size)
    changes: list[Change] = [(product.span[0], product.span[1], "\n    ".join(lines) + "\n")]
    changes += bounds_change(site.function, THREADS * THREADS)
    kernel = with_source(context.kernel, site.source.rewrite(changes))
    kernel = with_launch(kernel, site.index, grid=tuple(grid), block=(THREADS, THREADS))
    return Proposal(
        kernel=kernel,
        rationale=f"Tiles of {covered}x{DEPTH} of both factors are staged in shared memory and each thread sums "
        f"{size}x{size} results in registers, so every loaded element is used {covered} times",
        expected=(
            down(LOAD_REQUESTS, idle / covered),
            down(LOAD_SECTORS, idle / covered),
            down(INSTRUCTIONS, min(1.0, idle * (0.35 if size > 2 else 0.5))),
        ),
    )


def _lines(product: Product, size: int) -> list[str]:
    site, loop, kind = product.site, product.loop, product.total.type_text
    covered = THREADS * size
    names = {
        name: fresh_name(site, name)
        for name in (
            "down0",
            "across0",
            "thread",
            "sums",
            "down_tile",
            "across_tile",
            "k0",
            "e",
            "kk",
            "i",
            "j",
            "p",
            "q",
        )
    }
    n = names
    k = loop.variable
    lines = [
        *product.prologue,
        f"__shared__ {kind} {n['down_tile']}[{DEPTH}][{covered} + 1], {n['across_tile']}[{DEPTH}][{covered} + 1];",
        f"const int {n['thread']} = threadIdx.y * {THREADS} + threadIdx.x;",
        f"const int {n['down0']} = blockIdx.y * {covered}, {n['across0']} = blockIdx.x * {covered};",
        f"{kind} {n['sums']}[{size}][{size}] = {{}};",
        f"for (int {n['k0']} = 0; {n['k0']} < {text_of(loop.bound)}; {n['k0']} += {DEPTH}) {{",
    ]
    for factor, index, bound, base, tile in (
        (product.first, product.down, product.down_bound, n["down0"], n["down_tile"]),
        (product.second, product.across, product.across_bound, n["across0"], n["across_tile"]),
    ):
        inner, outer = (DEPTH, "k") if factor.along_sum else (covered, "row")
        low, high = f"{n['e']} % {inner}", f"{n['e']} / {inner}"
        depth, row = (low, high) if outer == "k" else (high, low)
        lines += [
            "    #pragma unroll",
            f"    for (int {n['e']} = {n['thread']}; {n['e']} < {DEPTH * covered}; {n['e']} += {THREADS * THREADS}) {{",
            f"        const int {k} = {n['k0']} + {depth};",
            f"        const {_type(index)} {index.name} = {base} + {row};",
            f"        {tile}[{depth}][{row}] = {index.name} < {bound} && {k} < {text_of(loop.bound)} "
            f"? ({kind})({text_of(factor.node)}) : ({kind})0;",
            "    }",
        ]
    lines += [
        "    __syncthreads();",
        "    #pragma unroll",
        f"    for (int {n['kk']} = 0; {n['kk']} < {DEPTH}; ++{n['kk']}) {{",
        f"        {kind} {n['p']}[{size}], {n['q']}[{size}];",
        "        #pragma unroll",
        f"        for (int {n['i']} = 0; {n['i']} < {size}; ++{n['i']}) {{",
        f"            {n['p']}[{n['i']}] = {n['down_tile']}[{n['kk']}][threadIdx.y + {n['i']} * {THREADS}];",
        f"            {n['q']}[{n['i']}] = {n['across_tile']}[{n['kk']}][threadIdx.x + {n['i']} * {THREADS}];",
        "        }",
        "        #pragma unroll",
        f"        for (int {n['i']} = 0; {n['i']} < {size}; ++{n['i']})",
        "            #pragma unroll",
        f"            for (int {n['j']} = 0; {n['j']} < {size}; ++{n['j']}) "
        f"{n['sums']}[{n['i']}][{n['j']}] += {n['p']}[{n['i']}] * {n['q']}[{n['j']}];",
        "    }",
        "    __syncthreads();",
        "}",
        "#pragma unroll",
        f"for (int {n['i']} = 0; {n['i']} < {size}; ++{n['i']}) {{",
        "    #pragma unroll",
        f"    for (int {n['j']} = 0; {n['j']} < {size}; ++{n['j']}) {{",
        f"        const {_type(product.down)} {product.down.name} = {n['down0']} + threadIdx.y + {n['i']} * {THREADS};",
        f"        const {_type(product.across)} {product.across.name} = "
        f"{n['across0']} + threadIdx.x + {n['j']} * {THREADS};",
        f"        if ({product.down.name} < {product.down_bound} && {product.across.name} < {product.across_bound}) {{",
        f"            {kind} {product.total.name} = {n['sums']}[{n['i']}][{n['j']}];",
        f"            {product.epilogue}",
        "        }",
        "    }",
        "}",
    ]
    return lines


def _type(local: Local) -> str:
    return "int" if local.type_text == "auto" else local.type_text


EDIT = Edit(
    name="tile_product",
    metric=LOAD_REQUESTS,
    why="Each thread of a naive matrix product loads both factors for each multiplication; a tile serves all threads.",
    source="CUDA C++ Programming Guide, Shared Memory; Volkov and Demmel, Tuning Dense Linear Algebra, 2008",
    propose=propose,
)
