"""Try other values of the kernel's compile-time params."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from optiml.records import Kernel, Scalar
from optiml.search.edit import INSTRUCTIONS, WARPS_ACTIVE, Edit, EditContext, Proposal, down, up
from optiml.search.grid import reads_param
from optiml.search.source import block_of

MAX_THREADS = 1024


def propose(context: EditContext) -> Iterator[Proposal]:
    """Declared tunables first, the nearest value first; then powers of two around other integer params."""
    for name, value in sorted(context.kernel.params.items()):
        for other in _values(context.kernel, name, value):
            params = {**context.kernel.params, name: other}
            kernel = dataclasses.replace(context.kernel, params=params)
            if not _fits(kernel):
                continue
            in_block = any(reads_param(entry, name) for launch in kernel.launches for entry in launch.block)
            yield Proposal(
                kernel=kernel,
                rationale=f"{name} = {other} instead of {value} gives each thread or block another share of the work",
                expected=(up(WARPS_ACTIVE, 1.1),) if in_block else (down(INSTRUCTIONS, 0.93),),
                target=name,
            )


def _values(kernel: Kernel, name: str, value: Scalar) -> list[Scalar]:
    declared = kernel.tunables.get(name)
    if declared:
        others = [item for item in declared if item != value]
        if all(isinstance(item, int | float) for item in (*others, value)):
            return sorted(others, key=lambda item: (abs(float(item) - float(value)), float(item)))
        return others
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0 or value & (value - 1):
        return []
    return [item for item in (value * 2, value // 2, value * 4) if item >= 1]


def _fits(kernel: Kernel) -> bool:
    """Whether every block that params alone decide is one a GPU can launch."""
    params = {name: int(item) for name, item in kernel.params.items() if isinstance(item, int)}
    for launch in kernel.launches:
        threads = 1
        for size in block_of(launch, params):
            if size is not None and size <= 0:
                return False
            threads *= size or 1
        if threads > MAX_THREADS:
            return False
    return True


EDIT = Edit(
    name="retune_param",
    metric=WARPS_ACTIVE,
    why="The best block or tile size depends on registers, shared memory and the problem's sizes.",
    source="CUDA C++ Best Practices Guide, Execution Configuration Optimizations",
    propose=propose,
    repeatable=False,
)
