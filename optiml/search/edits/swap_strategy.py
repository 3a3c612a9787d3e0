"""Swap the kernel for a strategy of the catalogue, where the problem is a built-in one."""

from __future__ import annotations

from collections.abc import Iterator

from optiml.generate.catalogue import applicable, strategies, strategy_kernel
from optiml.search.edit import LOAD_SECTORS, Edit, EditContext, Proposal, down

ASSUMED_FACTOR = 0.35  # of each metric that a strategy says it lowers; only the order of proposals depends on it


def propose(context: EditContext) -> Iterator[Proposal]:
    """Every strategy that computes this very problem in this dtype."""
    for strategy in strategies(context.problem.name):
        if applicable(strategy, context.problem, context.dtype):
            yield Proposal(
                kernel=strategy_kernel(strategy, context.dtype),
                rationale=strategy.rationale,
                expected=tuple(down(metric, ASSUMED_FACTOR) for metric in strategy.moves),
                target=strategy.name,
            )


EDIT = Edit(
    name="swap_strategy",
    metric=LOAD_SECTORS,
    why="The catalogue holds proven ways to write each built-in operator.",
    source="optiml.generate.catalogue",
    propose=propose,
)
