"""Hand out single elements in turn where each thread takes a contiguous chunk."""

from __future__ import annotations

from collections.abc import Iterator

from optiml.search import polynomial as poly
from optiml.search.edit import LOAD_SECTORS, STORE_SECTORS, Edit, EditContext, Proposal, down, with_source
from optiml.search.loops import ForLoop, for_loop, leaves_early, reductions
from optiml.search.source import Change, Local, Site, call_arguments, contains, text_of


def propose(context: EditContext) -> Iterator[Proposal]:
    """`for (k < K) { i = t * K + k; … }` and `for (i = t * K; i < min(t * K + K, n); ++i)`, t the thread index.

    The items of a block stay with the block; its threads take them one each in turn. Iterations must be independent,
    up to sums and the like.
    """
    for site in context.sites:
        if site.function.is_cooperative or site.block[0] is None or any(size != 1 for size in site.block[1:]):
            continue
        for node in site.function.loops:
            loop = for_loop(node)
            if loop is None or leaves_early(loop.body) or reductions(site.function, loop) is None:
                continue
            found = _inner_index(site, loop) or _counter(site, loop)
            if found is None or not _pays(site, loop, found[0]):
                continue
            length, changes = found
            yield Proposal(
                kernel=with_source(context.kernel, site.source.rewrite(changes)),
                rationale=f"Threads take elements in turn instead of {length} in a row each, so a warp's request is "
                "contiguous",
                expected=(down(LOAD_SECTORS, 1 / min(8, length)), down(STORE_SECTORS, 1 / min(8, length))),
            )


def _inner_index(site: Site, loop: ForLoop) -> tuple[int, list[Change]] | None:
    """A local `i = t * K + k` in the body of a loop over k in 0..K-1."""
    length = poly.as_constant(site.polynomial(loop.bound))
    if poly.as_constant(site.polynomial(loop.start)) != 0 or loop.step != 1 or length is None or length < 2:
        return None
    if loop.comparison != "<":
        return None
    for local in site.function.locals:
        if local.initial is None or local.is_pointer or not contains(loop.body, local.declaration):
            continue
        value = site.polynomial(local.initial)
        if value == poly.add(_first(site, length), poly.atom(loop.variable)) and not site.function.writes_to(local):
            own = f"{_base(site, local, length)} + {loop.variable} * {site.block[0]} + threadIdx.x"
            return length, [(local.initial.start_byte, local.initial.end_byte, own)]
    return None


def _counter(site: Site, loop: ForLoop) -> tuple[int, list[Change]] | None:
    """A loop whose own counter runs over the chunk; its end is `start + K`, possibly cut off at the range's end."""
    if loop.step != 1 or not loop.declared or loop.comparison != "<":
        return None
    start, bound = site.polynomial(loop.start), loop.bound
    factor = start.get(("threadIdx.x",))
    if factor is None or factor < 2 or start != _first(site, factor):
        return None
    end = poly.add(start, poly.constant(factor))
    block = site.block[0]
    first = f"(blockIdx.x * {block}) * {factor}"
    cast = "(long long)" if _is_wide(loop) else ""
    ends = f"{cast}{first} + {block} * {factor}"
    if site.polynomial(bound) == end:
        new_bound = ends
    elif poly.canonical(end) in poly.canonical(site.polynomial(bound)) and text_of(bound).startswith("min("):
        inside = text_of(bound)[len("min(") : -1].split(",")
        kept = [part.strip() for part in inside if not _is_end(site, loop, part, end)]
        if len(inside) != 2 or len(kept) != 1:
            return None
        new_bound = f"min({ends}, {kept[0]})" if not cast else f"min({ends}, (long long)({kept[0]}))"
    else:
        return None
    update = f"{loop.variable} += {block}"
    return factor, [
        (loop.start.start_byte, loop.start.end_byte, f"{cast}{first} + threadIdx.x"),
        (bound.start_byte, bound.end_byte, new_bound),
        (loop.update.start_byte, loop.update.end_byte, update),
    ]


def _is_end(site: Site, loop: ForLoop, part: str, end: poly.Polynomial) -> bool:
    """Whether one argument of the bound's min() is the end of the chunk."""
    return any(text_of(node) == part.strip() and site.polynomial(node) == end for node in call_arguments(loop.bound))


def _first(site: Site, length: int) -> poly.Polynomial:
    return poly.multiply(site.thread_index("x")[0], poly.constant(length))


def _base(site: Site, local: Local, length: int) -> str:
    wide = "(long long)" if local.type_text in ("long long", "size_t", "auto") else ""
    return f"{wide}blockIdx.x * {site.block[0]} * {length}"


def _is_wide(loop: ForLoop) -> bool:
    declaration = loop.node.child_by_field_name("initializer")
    kind = None if declaration is None else declaration.child_by_field_name("type")
    return kind is not None and text_of(kind) in ("long long", "size_t")


def _pays(site: Site, loop: ForLoop, length: int) -> bool:
    """Whether an access moves by the chunk's length from thread to thread and by one from iteration to iteration."""
    for access in site.accesses:
        if access.space != "global" or access.index is None or not contains(loop.body, access.node):
            continue
        across = poly.coefficient(access.index, "threadIdx.x")
        along = poly.coefficient(access.index, loop.variable)
        if across is None or along is None or poly.as_constant(along) != 1:
            continue
        if poly.as_constant(across) in (0, length):  # 0: the counter itself carries the thread index
            return True
    return False


EDIT = Edit(
    name="interleave_chunks",
    metric=LOAD_SECTORS,
    why="Threads that each walk a chunk read addresses a chunk apart: a sector per lane instead of one for eight.",
    source="CUDA C++ Best Practices Guide, Strided Accesses",
    propose=propose,
)
