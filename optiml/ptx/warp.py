"""Instructions that let the threads of a warp see one another: shuffles, votes, matches, warp reductions."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from optiml.ptx.memory import Step
from optiml.ptx.numerics import BOOL, I32, I64, U32
from optiml.ptx.simt import POISON, WARP, Group

Array = Any
_LANE = np.arange(WARP)
_BIT = np.left_shift(np.uint32(1), _LANE.astype(np.uint32))


@lru_cache(maxsize=256)
def shuffle_sources(mode: str, b: int, c: int) -> tuple[Array, Array]:
    """Source lane and predicate of each of 32 lanes, for operands that all lanes share (PTX ISA, shfl.sync)."""
    return _sources(mode, _LANE, np.full(WARP, b), np.full(WARP, c))


def _sources(mode: str, lane: Array, b: Array, c: Array) -> tuple[Array, Array]:
    segment = c >> 8 & 31
    low = lane & segment
    high = low | (c & 31 & ~segment)
    b = b & 31
    if mode == "up":
        j = lane - b
        inside = j >= high
    elif mode == "down":
        j = lane + b
        inside = j <= high
    elif mode == "bfly":
        j = lane ^ b
        inside = j <= high
    else:
        j = low | (b & ~segment)
        inside = j <= high
    return np.where(inside, j, lane), inside


def shuffle(mode: str, target: int | None, flag: int | None, source: int, b: int, c: int) -> Step:
    """shfl.sync: `target` gets the value of another lane, `flag` whether that lane was in range."""

    def run(frame: list[Array], group: Group) -> None:
        values, shift, clamp = frame[source], frame[b], frame[c]
        rows = group.count_warps()
        if len(shift) == 1 and len(clamp) == 1:
            j, inside = shuffle_sources(mode, int(shift[0]), int(clamp[0]))
            if group.full_rows:
                if target is not None:
                    if len(values) == 1:
                        frame[target] = values
                    else:
                        frame[target] = values.reshape(-1, WARP).take(j, axis=1).reshape(-1)
                if flag is not None:
                    frame[flag] = np.broadcast_to(inside, (rows, WARP)).reshape(-1)
                return
            j = np.broadcast_to(j, (rows, WARP))
            inside = np.broadcast_to(inside, (rows, WARP))
        else:
            j, inside = _sources(
                mode, _LANE, group.matrix(shift.astype(np.int64), 0), group.matrix(clamp.astype(np.int64), 0)
            )
        if target is not None:
            moved = np.take_along_axis(group.matrix(values, 0), j, axis=1)
            here = np.take_along_axis(group.present(), j, axis=1)
            poison = np.array(POISON, U32).view(values.dtype)
            frame[target] = group.flat(np.where(here, moved, poison))
        if flag is not None:
            frame[flag] = group.flat(inside)

    return run


def ballots(group: Group, votes: Array) -> Array:
    """`[warps]` uint32: one bit per thread of the group whose vote is set."""
    return np.packbits(group.matrix(votes, False), axis=1, bitorder="little").view(U32).reshape(-1)


def to_lanes(group: Group, per_warp: Array) -> Array:
    """One value per warp, handed to each of its threads."""
    return group.flat(np.broadcast_to(per_warp[:, None], (len(per_warp), WARP)))


def vote(mode: str, target: int, source: int, negated: bool, mask: int) -> Step:
    """vote.sync.{ballot,all,any,uni}: threads outside the mask are not counted."""

    def run(frame: list[Array], group: Group) -> None:
        votes = frame[source]
        if negated:
            votes = ~votes
        group.count_warps()
        member = frame[mask].astype(U32)
        yes = to_lanes(group, ballots(group, votes)) & member
        if mode == "ballot":
            frame[target] = yes
            return
        if mode == "any":
            frame[target] = yes != 0
            return
        everyone = to_lanes(group, ballots(group, np.ones(1, BOOL))) & member
        if mode == "all":
            frame[target] = yes == everyone
        else:
            frame[target] = (yes == everyone) | (yes == 0)

    return run


def match(mode: str, target: int, flag: int | None, source: int, mask: int) -> Step:
    """match.sync: the threads with an equal value ("any"), or all of them if every value is equal ("all")."""

    def run(frame: list[Array], group: Group) -> None:
        group.count_warps()
        values = group.matrix(frame[source], 0)
        present = group.present()
        member = np.broadcast_to(frame[mask].astype(U32), group.n)
        equal = (values[:, :, None] == values[:, None, :]) & present[:, None, :]
        bits = group.flat(np.where(equal, _BIT, np.uint32(0)).sum(axis=2, dtype=np.uint32)) & member
        if mode == "any":
            frame[target] = bits
            return
        same = bits == (to_lanes(group, ballots(group, np.ones(1, BOOL))) & member)
        frame[target] = np.where(same, bits, np.uint32(0))
        if flag is not None:
            frame[flag] = same

    return run


_REDUCTIONS: dict[str, tuple[Any, Callable[[np.dtype[Any]], int]]] = {
    "add": (np.add, lambda d: 0),
    "min": (np.minimum, lambda d: int(np.iinfo(d).max)),
    "max": (np.maximum, lambda d: int(np.iinfo(d).min)),
    "and": (np.bitwise_and, lambda d: -1 if d.kind == "i" else int(np.iinfo(d).max)),
    "or": (np.bitwise_or, lambda d: 0),
    "xor": (np.bitwise_xor, lambda d: 0),
}


def reduction_known(operation: str) -> bool:
    """Whether redux.sync has this operation."""
    return operation in _REDUCTIONS


def redux(operation: str, target: int, source: int, mask: int) -> Step:
    """redux.sync: the reduction over all threads that share a mask."""
    combine, neutral = _REDUCTIONS[operation]

    def run(frame: list[Array], group: Group) -> None:
        group.count_warps()
        values = frame[source]
        identity = neutral(values.dtype)
        matrix = group.matrix(values, identity)
        masks = group.matrix(frame[mask].astype(I64) & 0xFFFFFFFF, -1)
        result = np.zeros(matrix.shape, matrix.dtype)
        for wanted in np.unique(masks):
            if wanted < 0:
                continue
            member = masks == wanted
            total = combine.reduce(
                np.where(member, matrix, np.array(identity, matrix.dtype)), axis=1, dtype=matrix.dtype
            )
            result = np.where(member, total[:, None], result)
        frame[target] = group.flat(result)

    return run


def active_mask(target: int) -> Step:
    """activemask: the threads of the warp that execute this together."""

    def run(frame: list[Array], group: Group) -> None:
        group.count_warps()
        frame[target] = to_lanes(group, ballots(group, np.ones(1, BOOL)))

    return run


def elect(target: int | None, flag: int | None, mask: int) -> Step:
    """elect.sync: the lowest thread of the mask is the leader."""

    def run(frame: list[Array], group: Group) -> None:
        group.count_warps()
        here = to_lanes(group, ballots(group, np.ones(1, BOOL))) & frame[mask].astype(U32)
        lowest = here & (~here + np.uint32(1))
        leader = np.bitwise_count(lowest - np.uint32(1)).astype(I32)
        if target is not None:
            frame[target] = leader
        if flag is not None:
            frame[flag] = leader == (group.lanes & 31)

    return run
