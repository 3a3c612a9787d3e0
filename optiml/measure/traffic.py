"""Memory traffic behind L1: what reaches L2 and DRAM, from what each allocation saw in the blocks that ran."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from optiml.measure.hardware import SECTOR_BYTES
from optiml.ptx.counters import AllocationCounters


@dataclass(frozen=True, kw_only=True)
class Grid:
    """How much of a launch ran, and how it spreads over the GPU."""

    blocks_run: int
    blocks_total: int
    busy_sms: int
    resident_blocks: int  # on all SMs together
    l1_bytes: float  # of one SM, beside its shared memory

    @property
    def scale(self) -> float:
        """From the blocks that ran to the whole grid."""
        return self.blocks_total / self.blocks_run

    @property
    def waves(self) -> float:
        """Rounds of resident blocks, at least 1."""
        return max(1.0, self.blocks_total / self.resident_blocks)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Sectors of one allocation over the whole grid."""

    asked: float  # loads that miss L1
    touched: float  # distinct, by loads
    together: float  # distinct, by the loads of the blocks resident at one time
    stores: float
    stored: float  # distinct, by stores
    atomics: float
    updated: float  # distinct, by atomics

    @property
    def distinct(self) -> float:
        """Sectors touched at all; loads, stores and atomics of one allocation are taken to touch the same ones."""
        return max(self.touched, self.stored, self.updated)


def traffic_of(item: AllocationCounters, grid: Grid) -> Traffic:
    """Scale the counts of one allocation from the blocks that ran to the grid.

        asked    = s x L1 misses; where what is touched fits in half of L1, it stays there from block to block, and
                   each busy SM misses it once: asked <= busy SMs x touched
        touched  = min(size, s x distinct, s x misses)      streams grow with the grid, shared arrays end at their size
        together = m x resident^e, within touched / waves .. touched
                   m = misses per block run, e = ln(distinct / m) / ln(blocks run) in 0..1: how much blocks share

    with s = blocks / blocks run. Atomics that touch fewer sectors than half the blocks run all update the same ones;
    others grow with the grid up to the allocation's size.
    """
    size = float(-(-item.bytes // SECTOR_BYTES))
    misses = grid.scale * item.load_misses
    touched = min(size, grid.scale * item.distinct_load_sectors, misses)
    asked = misses
    if SECTOR_BYTES * touched <= 0.5 * grid.l1_bytes:
        asked = min(misses, grid.busy_sms * touched)
    return Traffic(
        asked=asked,
        touched=touched,
        together=_together(item, grid, touched),
        stores=grid.scale * item.store_sectors,
        stored=min(size, grid.scale * item.distinct_store_sectors),
        atomics=grid.scale * item.atomic_sectors,
        updated=_updated(item, grid, size),
    )


def _updated(item: AllocationCounters, grid: Grid, size: float) -> float:
    seen = float(item.distinct_atomic_sectors)
    return seen if 2.0 * seen < grid.blocks_run else min(size, grid.scale * seen)


def _together(item: AllocationCounters, grid: Grid, touched: float) -> float:
    if not item.load_misses or not item.distinct_load_sectors:
        return 0.0
    per_block = item.load_misses / grid.blocks_run
    exponent = 1.0
    if grid.blocks_run > 1:
        sharing = max(1.0, item.distinct_load_sectors / per_block)
        exponent = min(1.0, math.log(sharing) / math.log(grid.blocks_run))
    resident = min(grid.blocks_total, grid.resident_blocks)
    return min(touched, max(touched / grid.waves, per_block * math.pow(resident, exponent)))


def dram_bytes(traffic: Sequence[Traffic], grid: Grid, *, l2_bytes: int) -> tuple[float, float]:
    """Bytes that one launch reads from and writes to DRAM if it finds L2 empty.

        read  = touched + (first - touched) x over(footprint) + (asked - first) x over(footprint of resident blocks)
        first = waves x together, within touched .. asked: sectors that the blocks of one wave touch first
        over(x) = max(0, 1 - L2 / x)                        share of a re-used set that L2 cannot hold

    The footprints are sums over the launch's allocations. So touched <= read <= asked, and data that fits in L2 is read
    once. Written are the distinct sectors, and those rewrites that L2 could not merge; atomics read and write.
    """
    footprint_miss = overflow(SECTOR_BYTES * sum(item.distinct for item in traffic), l2_bytes)
    resident_miss = overflow(SECTOR_BYTES * sum(item.together + item.stored / grid.waves for item in traffic), l2_bytes)
    read = written = 0.0
    for item in traffic:
        first = min(item.asked, max(item.touched, grid.waves * item.together))
        read += item.touched + (first - item.touched) * footprint_miss + (item.asked - first) * resident_miss
        written += item.stored + max(0.0, item.stores - item.stored) * resident_miss
        read += item.updated
        written += item.updated
    return SECTOR_BYTES * read, SECTOR_BYTES * written


def overflow(needed: float, capacity: float) -> float:
    """Share of `needed` that does not fit."""
    return max(0.0, 1.0 - capacity / needed) if needed > 0 else 0.0
