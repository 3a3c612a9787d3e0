"""Which blocks of a big grid to run when a profile needs rates rather than results."""

from __future__ import annotations

GOLDEN_RATIO = 0.6180339887498949  # its multiples spread evenly and never line up with the rows of a grid


def sampled_blocks(total: int, count: int) -> tuple[int, ...] | None:
    """Linear ids of about `count` blocks: neighbours in pairs, spread over the grid. None means the whole grid.

    Neighbours show what blocks share. The last block is left out: it is often only partly filled, and among a few
    others it would count for a large part of the grid.
    """
    if count >= total:
        return None
    chosen: set[int] = set()
    for index in range(max(count // 2, 1)):
        first = int(index * GOLDEN_RATIO % 1.0 * (total - 1))
        chosen.update((first, min(first + 1, total - 2)))
    return tuple(sorted(chosen))
