"""Which blocks of a big grid to run when a profile needs rates rather than results."""

from __future__ import annotations


def sampled_blocks(total: int, count: int) -> tuple[int, ...] | None:
    """Linear ids of about `count` blocks: neighbours in pairs, pairs spread evenly, the last block always there.

    Neighbours show what blocks share; the spread and the last block show edges. None means the whole grid.
    """
    if count >= total:
        return None
    pairs = max(count // 2, 1)
    chosen = {total - 1}
    for index in range(pairs):
        first = (total - 1) * index // pairs
        chosen.update((first, min(first + 1, total - 1)))
    return tuple(sorted(chosen))
