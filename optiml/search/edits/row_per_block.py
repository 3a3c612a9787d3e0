"""Give each row to a block instead of a thread: for few, long rows."""

from __future__ import annotations

from collections.abc import Iterator

from optiml.search.edit import (
    LOAD_REQUESTS,
    LOAD_SECTORS,
    STORE_SECTORS,
    WARPS_ACTIVE,
    Edit,
    EditContext,
    Proposal,
    down,
    up,
)
from optiml.search.rows import divide, row_kernels


def propose(context: EditContext) -> Iterator[Proposal]:
    """Kernels in which each thread walks a contiguous row; folds are finished in shared memory."""
    for where, kernel in row_kernels(context):
        stores = any(item.stored for item in kernel.loops)
        yield Proposal(
            kernel=divide(where, kernel, "block"),
            rationale="A block walks each row together, so its threads read neighbouring columns and many more "
            "loads are in flight",
            expected=(
                down(LOAD_SECTORS, 4.0 / context.ratio(LOAD_SECTORS, LOAD_REQUESTS, otherwise=32.0)),
                *((down(STORE_SECTORS, 0.25),) if stores else ()),
                up(WARPS_ACTIVE, 1.1),
            ),
        )


EDIT = Edit(
    name="row_per_block",
    metric=LOAD_SECTORS,
    why="A thread per row reads scattered addresses, and a problem of few rows leaves most of the GPU idle.",
    source="CUDA C++ Best Practices Guide, Coalesced Access; Harris, Optimizing Parallel Reduction in CUDA",
    propose=propose,
)
