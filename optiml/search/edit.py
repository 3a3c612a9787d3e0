"""What an edit is: a rewrite of a kernel, the metric it should move, and the reasons."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from optiml.records import ExpectedChange, Kernel, Problem, Profile
from optiml.search.source import Site, sites

# Nsight Compute names of the metrics that edits aim at.
LOAD_SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"
STORE_SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum"
LOAD_REQUESTS = "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"
DRAM_BYTES = "dram__bytes.sum"
INSTRUCTIONS = "smsp__inst_executed.sum"
BANK_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
ATOMICS = "lts__t_sectors_op_atom.sum"
WARPS_ACTIVE = "sm__warps_active.avg.pct_of_peak_sustained_active"
BLOCKS = "launch__grid_size"
REGISTERS = "launch__registers_per_thread"


@dataclass(frozen=True, kw_only=True)
class EditContext:
    """What an edit may look at."""

    kernel: Kernel
    problem: Problem
    profile: Profile | None
    dtype: str

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        return sites(self.kernel)

    @cached_property
    def params(self) -> Mapping[str, int]:
        """The integer params."""
        return {name: int(value) for name, value in self.kernel.params.items() if isinstance(value, int)}

    def ratio(self, name: str, per: str, *, otherwise: float) -> float:
        """metric `name` / metric `per` of the profile, `otherwise` where it does not say."""
        if self.profile is None:
            return otherwise
        above, below = self.profile.metrics.get(name), self.profile.metrics.get(per)
        return above / below if above and below else otherwise


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One rewritten kernel.

    Attributes:
        target: what was edited, where an edit has several independent targets (the name of a param); proposals of one
            edit and target are variants of each other, and the search tries other things before a second variant.
    """

    kernel: Kernel
    rationale: str
    expected: tuple[ExpectedChange, ...]
    risks: tuple[str, ...] = ()
    target: str = ""


@dataclass(frozen=True, kw_only=True)
class Edit:
    """A kind of rewrite.

    Attributes:
        metric: Nsight Compute name of the metric it should lower or raise.
        why: one sentence, why that helps.
        source: where the idea comes from.
        propose: the rewrites that make sense for a kernel, best first; none where it does not apply.
        repeatable: whether doing it twice in a row to one target is more than doing the second alone.
    """

    name: str
    metric: str
    why: str
    source: str
    propose: Callable[[EditContext], Iterable[Proposal]]
    repeatable: bool = True


def with_source(kernel: Kernel, source: str) -> Kernel:
    """The kernel with other text."""
    return dataclasses.replace(kernel, source=source)


def with_launch(kernel: Kernel, index: int, **fields: Any) -> Kernel:
    """The kernel with some fields of one launch replaced."""
    launches = list(kernel.launches)
    launches[index] = dataclasses.replace(launches[index], **fields)
    return dataclasses.replace(kernel, launches=tuple(launches))


def down(metric: str, factor: float | None = None) -> ExpectedChange:
    return ExpectedChange(metric=metric, direction="down", factor=factor)


def up(metric: str, factor: float | None = None) -> ExpectedChange:
    return ExpectedChange(metric=metric, direction="up", factor=factor)
