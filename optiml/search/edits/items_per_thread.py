"""Let each thread handle several items a block apart, or walk the range in grid strides."""

from __future__ import annotations

from collections.abc import Iterator

from optiml.records import Kernel, Size
from optiml.search.edit import (
    BLOCKS,
    INSTRUCTIONS,
    WARPS_ACTIVE,
    Edit,
    EditContext,
    Proposal,
    down,
    up,
    with_launch,
    with_source,
)
from optiml.search.grid import coarsened
from optiml.search.items import ItemKernel, fresh_name, item_kernel
from optiml.search.source import Change, Site

FACTORS = (4, 2, 8)
GRID_CAPS = (864, 2048)  # 8 blocks for each SM of an A100; about 16 for one of an H100


def propose(context: EditContext) -> Iterator[Proposal]:
    """Any kernel with one independent item per thread."""
    for site in context.sites:
        item = item_kernel(site)
        if item is None or item.stride is not None or item.walks_memory:
            continue
        for factor in FACTORS:
            yield _several(context, site, item, factor)
        for cap in GRID_CAPS:
            yield _grid_stride(context, site, item, cap)


def _block_text(site: Site) -> str:
    entry = site.launch.block[0]
    return str(entry) if entry in site.constants else "blockDim.x"


def _several(context: EditContext, site: Site, item: ItemKernel, factor: int) -> Proposal:
    first, count = fresh_name(site, "first"), fresh_name(site, "k")
    kind, index, block = item.index_type, item.index, _block_text(site)
    lines = [
        f"const {kind} {first} = ({kind})blockIdx.x * ({block} * {factor}) + threadIdx.x;",
        "#pragma unroll",
        f"for (int {count} = 0; {count} < {factor}; ++{count}) {{",
        f"    const {kind} {index} = {first} + {count} * {block};",
        f"    if ({index} >= {item.bound}) break;",
        f"    {item.body_with(item.returns)}",
        "}",
    ]
    grid: tuple[Size, ...] = (coarsened(site.launch.grid[0], factor, context.params), *site.launch.grid[1:])
    return Proposal(
        kernel=with_launch(_rewritten(context, site, item, lines), site.index, grid=grid),
        rationale=f"Each thread handles {factor} items a block apart: its loads overlap and fewer blocks come and go",
        expected=(down(INSTRUCTIONS, 0.9), up(WARPS_ACTIVE, 1.05), down(BLOCKS, 1.0 / factor)),
    )


def _grid_stride(context: EditContext, site: Site, item: ItemKernel, cap: int) -> Proposal:
    kind, index = item.index_type, item.index
    stride = f"({kind})gridDim.x * {_block_text(site)}"
    lines = [
        f"for ({kind} {index} = {item.index_text}; {index} < {item.bound}; {index} += {stride}) {{",
        f"    {item.body_with(item.returns)}",
        "}",
    ]
    grid: tuple[Size, ...] = (f"min({site.launch.grid[0]}, {cap})", *site.launch.grid[1:])
    return Proposal(
        kernel=with_launch(_rewritten(context, site, item, lines), site.index, grid=grid),
        rationale=f"At most {cap} blocks walk the range in grid strides, so the cost of starting a thread is paid once",
        expected=(down(INSTRUCTIONS, 0.92), down(BLOCKS, 0.1)),
    )


def _rewritten(context: EditContext, site: Site, item: ItemKernel, lines: list[str]) -> Kernel:
    changes: list[Change] = [(start, end, "") for start, end in item.replaced[:-1]]
    start, end = item.replaced[-1]
    changes.append((start, end, "\n    ".join(lines) + "\n"))
    return with_source(context.kernel, site.source.rewrite(changes))


EDIT = Edit(
    name="items_per_thread",
    metric=INSTRUCTIONS,
    why="A thread that does little work is dominated by its start-up and by the latency of its one load.",
    source="Harris, CUDA Pro Tip: Write Flexible Kernels with Grid-Stride Loops, 2013; Volkov, Better Performance at "
    "Lower Occupancy, 2010",
    propose=propose,
)
