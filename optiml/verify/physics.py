"""Times and traffic that no kernel doing the whole work could have."""

from __future__ import annotations

import math
from collections.abc import Sequence

from optiml.problems.data import array_shape, element_bytes
from optiml.problems.problem import names_of
from optiml.records import Kernel, Problem, Profile, Workload

SECTOR_BYTES = 32
STORED = (  # what may write an output
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "lts__t_sectors_op_atom.sum",
)
STORED_SHARE = 0.9  # counts of a sample of the blocks are scaled to the grid, so they may be a little off


def why_implausible(kernel: Kernel, problem: Problem, bench: Sequence[Workload], profile: Profile) -> str | None:
    """Why this profile cannot be that of a kernel that does the problem's whole work; None where it can.

    A launcher may clear outputs by memsets, which the counts leave out.
    """
    for entry, workload in zip(profile.bench, bench, strict=False):
        stored = [entry.metrics.get(name) for name in STORED]
        needed = _output_bytes(problem, workload)
        if kernel.launcher is None and None not in stored and needed:
            written = SECTOR_BYTES * sum(value or 0.0 for value in stored)
            if written < STORED_SHARE * needed:
                sizes = ", ".join(f"{name}={size}" for name, size in workload.axes.items())
                return f"at {sizes} it stores {written:.4g} of the {needed} bytes of its outputs"
    light = profile.speed_of_light
    if light is not None and light.pct > 100.0:
        return (
            f"its {profile.time.source} time of {profile.time.median_us:.4g} µs lies below the speed of light of "
            f"{light.us:.4g} µs ({light.bound}) for the bytes and operations that the problem says it needs"
        )
    return None


def _output_bytes(problem: Problem, workload: Workload) -> int:
    names = names_of(problem, workload.axes, workload.scalars)
    return sum(
        math.prod(array_shape(tensor.shape or (), names)) * element_bytes(tensor.dtype)
        for tensor in problem.outputs.values()
    )
