"""Give each row to a warp instead of a thread: neighbouring lanes then read neighbouring columns."""

from __future__ import annotations

from collections.abc import Iterator

from optiml.search.edit import LOAD_REQUESTS, LOAD_SECTORS, STORE_SECTORS, Edit, EditContext, Proposal, down
from optiml.search.rows import divide, row_kernels


def propose(context: EditContext) -> Iterator[Proposal]:
    """Kernels in which each thread walks a contiguous row; the folds are finished with warp shuffles."""
    for where, kernel in row_kernels(context):
        stores = any(item.stored for item in kernel.loops)
        yield Proposal(
            kernel=divide(where, kernel, "warp"),
            rationale="A warp walks each row together, so its lanes read neighbouring columns in one request "
            "instead of columns 32 rows apart",
            expected=(
                down(LOAD_SECTORS, 4.0 / context.ratio(LOAD_SECTORS, LOAD_REQUESTS, otherwise=32.0)),
                *((down(STORE_SECTORS, 0.25),) if stores else ()),
            ),
        )


EDIT = Edit(
    name="row_per_warp",
    metric=LOAD_SECTORS,
    why="A thread per row makes the lanes of a warp read addresses a whole row apart, 32 sectors for one request.",
    source="CUDA C++ Best Practices Guide, Coalesced Access; Luitjens, Faster Parallel Reductions on Kepler, 2014",
    propose=propose,
)
