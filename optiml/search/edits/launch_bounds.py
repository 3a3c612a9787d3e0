"""Tell the compiler the block size, so that it may trade registers against resident warps."""

from __future__ import annotations

from collections.abc import Iterator

from optiml.search.edit import REGISTERS, WARPS_ACTIVE, Edit, EditContext, Proposal, down, up, with_source
from optiml.search.source import Site, walk

MAX_THREADS = 1024
WARP = 32
FULL_PCT = 100.0
RESIDENT_THREADS = 2048  # of an SM of the A100, H100 and H200


def propose(context: EditContext) -> Iterator[Proposal]:
    """`__launch_bounds__(threads)`, alone and with a minimum of resident blocks, where registers are the limit."""
    occupancy = None if context.profile is None else context.profile.occupancy
    if occupancy is not None and (occupancy.limiter != "registers" or occupancy.theoretical_pct >= FULL_PCT):
        return
    for site in context.sites:
        threads = _threads(site)
        bounded = any(node.type == "launch_bounds" for node in walk(site.function.node))
        if threads is None or threads < WARP or site.launches != 1 or bounded:
            continue
        place = next((child for child in site.function.node.children if child.type == "__global__"), None)
        if place is None:
            continue
        text = _text(site)
        for blocks in (None, RESIDENT_THREADS // threads, RESIDENT_THREADS // (2 * threads)):
            if blocks is not None and not 1 < blocks <= 32:
                continue
            bounds = text if blocks is None else f"{text}, {blocks}"
            yield Proposal(
                kernel=with_source(
                    context.kernel,
                    site.source.rewrite([(place.end_byte, place.end_byte, f" __launch_bounds__({bounds})")]),
                ),
                rationale=f"__launch_bounds__({bounds}) lets the compiler fit registers to blocks of {threads} threads"
                + ("" if blocks is None else f", {blocks} of them on an SM"),
                expected=(down(REGISTERS, 0.9), up(WARPS_ACTIVE, 1.1))
                if blocks is not None
                else (down(REGISTERS, 0.97),),
            )


def _threads(site: Site) -> int | None:
    total = 1
    for size in site.block:
        if size is None:
            return None
        total *= size
    return total if total <= MAX_THREADS else None


def _text(site: Site) -> str:
    """The block size in C++: params stay params, so that retuning keeps the bound right."""
    entries = [str(entry) for entry in site.launch.block if entry != 1]
    simple = all(entry.isdigit() or entry in site.constants for entry in entries)
    threads = _threads(site)
    return " * ".join(entries) if entries and simple else str(threads)


EDIT = Edit(
    name="launch_bounds",
    metric=WARPS_ACTIVE,
    why="Without bounds the compiler allows for 1024 threads a block and guesses how many registers are free.",
    source="CUDA C++ Programming Guide, Launch Bounds",
    propose=propose,
)
