"""The time model: what a launch asks of each part of the GPU, and how long each part takes.

Every term is the time that one resource would need if it worked alone. The largest one binds:

    T = launch + max(terms) + overlap_loss x (sum of the other terms)

The constants come from `optiml.measure.hardware` and are not calibrated: the order of clearly different kernels is
meant to be right, the microseconds are not a measurement.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from optiml.errors import InvalidInput
from optiml.measure.hardware import SECTOR_BYTES, WARP_THREADS, Hardware
from optiml.measure.instructions import Cost, cost
from optiml.measure.occupancy import occupancy
from optiml.ptx import Module
from optiml.ptx.counters import AllocationCounters, Counters
from optiml.ptx.dataflow import Timing, function_cycles
from optiml.ptx.parse import Instruction
from optiml.records import Occupancy

MODEL_VERSION = "model-1"  # part of every cache key of a profile: change it with any formula or constant

WHOLE_WAVES_BELOW = 4.0
TERMS = (
    "issue", "fp32", "int", "fp16", "fp64", "sfu", "tensor", "lsu", "atomics", "l2", "dram", "latency", "launch",
)  # fmt: skip
_SPACES = ("global_load", "global_store", "global_atomic", "local_load", "local_store")
_SHARED = ("shared_load", "shared_store", "shared_atomic")


@dataclass(frozen=True, kw_only=True)
class LaunchShape:
    """What the host decides about a launch, and what ptxas made of the kernel."""

    symbol: str
    blocks: int
    threads_per_block: int
    registers_per_thread: int | None
    shared_bytes_per_block: int  # static and dynamic


@dataclass(frozen=True, kw_only=True)
class LaunchModel:
    """One launch, modelled. `counts` are totals over the whole grid, scaled up from the blocks that ran."""

    shape: LaunchShape
    blocks_run: int
    occupancy: Occupancy
    waves: float
    counts: Mapping[str, float]  # see `counts_of`
    terms_us: Mapping[str, float]  # one entry per TERMS
    total_us: float
    binding: str  # the largest term, `launch` included


def model_launch(shape: LaunchShape, counters: Counters, *, module: Module, hardware: Hardware) -> LaunchModel:
    """Model one launch from the counters of the blocks that ran.

    Raises:
        InvalidInput: not one block ran, or the block does not fit on an SM of this device.
    """
    if counters.blocks < 1:
        raise InvalidInput(f"{shape.symbol}: no block ran, so there is nothing to model")
    resident = occupancy(
        hardware,
        threads_per_block=shape.threads_per_block,
        registers_per_thread=shape.registers_per_thread,
        shared_bytes_per_block=shape.shared_bytes_per_block,
    )
    if resident.blocks_per_sm < 1:
        raise InvalidInput(f"{shape.symbol}: one block needs more {resident.limiter} than an SM of {hardware.name} has")
    waves = shape.blocks / (hardware.sms * resident.blocks_per_sm)
    counts = counts_of(shape, counters, module=module, hardware=hardware, blocks_per_sm=resident.blocks_per_sm)
    terms = _terms_us(shape, counts, hardware)
    cycles = _warp_cycles(counters, counts, module, hardware)
    terms["latency"] = 1e6 * max(1.0, _effective_waves(waves)) * cycles / hardware.clock_hz
    terms["launch"] = hardware.launch_us
    return LaunchModel(
        shape=shape,
        blocks_run=counters.blocks,
        occupancy=resident,
        waves=waves,
        counts=counts,
        terms_us={name: terms[name] for name in TERMS},
        total_us=_total_us(terms, hardware),
        binding=max(TERMS, key=lambda name: terms[name]),
    )


def l1_share_bytes(hardware: Hardware, *, shared_bytes_per_block: int, blocks_per_sm: int) -> int:
    """L1 that one resident block may count on: what shared memory leaves, split evenly; at least 4 KiB."""
    reserved = shared_bytes_per_block + hardware.shared_reserved_bytes if shared_bytes_per_block else 0
    left = hardware.l1_shared_bytes - blocks_per_sm * reserved
    return max(4096, left // max(1, blocks_per_sm))


# --- counts ----------------------------------------------------------------------------------------------------------
def counts_of(
    shape: LaunchShape, counters: Counters, *, module: Module, hardware: Hardware, blocks_per_sm: int
) -> dict[str, float]:
    """Everything countable about a launch as totals over the whole grid: blocks that ran x blocks / blocks run.

    Keys: `blocks` `warps` `warp_instructions` `thread_instructions` `branches` `divergent_branches` `barriers`;
    `thread_ops.<class>` and `warp_ops.<class>` with the engine's classes; `slots.<pipe>` and `tensor_fmas.<element>`,
    the estimated machine instructions; `<space>.requests|sectors|bytes|ideal_sectors` for global and local memory;
    `<shared>.requests|wavefronts|ideal_wavefronts`; `l1.hit_sectors`; `l2.read_sectors|write_sectors|atomic_sectors`;
    `dram.read_bytes|write_bytes` (modelled, see `dram_bytes`); `distinct_bytes`, the memory touched at all;
    `atomic.clocks`.
    """
    scale = shape.blocks / counters.blocks
    counts: Counter[str] = Counter()
    for name in ("warps", "warp_instructions", "thread_instructions", "branches", "divergent_branches", "barriers"):
        counts[name] = getattr(counters, name)
    for group in ("thread_ops", "warp_ops"):
        for kind, number in getattr(counters, group).items():
            counts[f"{group}.{kind}"] = number
    for name in _SPACES:
        space = getattr(counters, name)
        for part in ("requests", "sectors", "bytes", "ideal_sectors"):
            counts[f"{name}.{part}"] = getattr(space, part)
    for name in _SHARED:
        shared = getattr(counters, name)
        for part in ("requests", "wavefronts", "ideal_wavefronts"):
            counts[f"{name}.{part}"] = getattr(shared, part)
    for instruction, executions in _executed(counters, module):
        price = cost(instruction.opcode)
        for pipe, slots in price.slots.items():
            counts[f"slots.{pipe}"] += slots * executions  # type: ignore[assignment]  # Counter of floats
        for element, fmas in price.tensor_fmas.items():
            counts[f"tensor_fmas.{element}"] += fmas * executions  # type: ignore[assignment]
    totals: dict[str, float] = {name: number * scale for name, number in counts.items()}
    totals["blocks"] = float(shape.blocks)
    totals.update(
        _memory_counts(shape, counters, totals, module=module, hardware=hardware, blocks_per_sm=blocks_per_sm)
    )
    return totals


def _executed(counters: Counters, module: Module) -> Iterable[tuple[Instruction, int]]:
    for (function, index), executions in counters.block_executions.items():
        for instruction in module.functions[function].blocks[index].instructions:
            yield instruction, executions


def _memory_counts(
    shape: LaunchShape,
    counters: Counters,
    totals: Mapping[str, float],
    *,
    module: Module,
    hardware: Hardware,
    blocks_per_sm: int,
) -> dict[str, float]:
    scale = shape.blocks / counters.blocks
    allocations = counters.allocations.values()
    misses = scale * sum(item.load_misses for item in allocations)
    stores = scale * sum(item.store_sectors for item in allocations)
    atomics = scale * sum(item.atomic_sectors for item in allocations)
    local = totals["local_load.sectors"] + totals["local_store.sectors"]
    spilled = local * _local_miss_rate(shape, module, hardware, blocks_per_sm)
    loads = totals["global_load.sectors"]
    read_bytes, write_bytes, distinct = dram_bytes(
        tuple(allocations),
        blocks_run=counters.blocks,
        blocks_total=shape.blocks,
        resident_blocks=hardware.sms * blocks_per_sm,
        l2_bytes=hardware.l2_bytes,
    )
    return {
        "l1.hit_sectors": max(0.0, loads - misses) + local - spilled,
        "l2.read_sectors": misses + spilled,
        "l2.write_sectors": stores,
        "l2.atomic_sectors": atomics,
        "dram.read_bytes": read_bytes,
        "dram.write_bytes": write_bytes,
        "distinct_bytes": distinct,
        "atomic.clocks": _atomic_clocks(counters, scale, hardware),
    }


def _local_miss_rate(shape: LaunchShape, module: Module, hardware: Hardware, blocks_per_sm: int) -> float:
    """Share of local accesses that leave L1: the part of the resident threads' local memory that does not fit."""
    needed = module.functions[shape.symbol].local_bytes * shape.threads_per_block * blocks_per_sm
    share = blocks_per_sm * l1_share_bytes(
        hardware, shared_bytes_per_block=shape.shared_bytes_per_block, blocks_per_sm=blocks_per_sm
    )
    return _overflow(needed, share)


def _atomic_clocks(counters: Counters, scale: float, hardware: Hardware) -> float:
    """Clocks that L2 spends on global atomics: their throughput, or the queue at the busiest sector.

    Lanes that update one sector go one after another. Which sector is busiest is not counted; every allocation is
    taken to spread its updates evenly over its sectors.
    """
    total = counters.global_atomic
    if not total.sectors:
        return 0.0
    lanes_per_sector = max(1.0, total.bytes / 4.0 / total.sectors)
    queue = max(
        item.atomic_sectors * scale * lanes_per_sector / max(1, _sectors_in(item))
        for item in counters.allocations.values()
    )
    return max(
        total.sectors * scale / hardware.atomic_sectors_per_clock,
        queue / hardware.atomic_lanes_per_clock_and_sector,
    )


def dram_bytes(
    allocations: tuple[AllocationCounters, ...],
    *,
    blocks_run: int,
    blocks_total: int,
    resident_blocks: int,
    l2_bytes: int,
) -> tuple[float, float, float]:
    """Bytes read from and written to DRAM by one launch that finds L2 empty, and distinct bytes touched.

    For each allocation, in sectors of 32 bytes, with s = blocks_total / blocks_run:

        T = s x L1 misses                              what L2 is asked for
        W = min(size, s x distinct, T)                 what the launch touches at all: streams scale with the grid,
                                                       an array that all blocks share is bounded by its size
        R = what the blocks resident at one time touch  = m x resident^e, m = misses per block run and
            e = ln(distinct / m) / ln(blocks_run) in 0..1   how much neighbours share; W / waves <= R <= W
        read = W + (waves x R - W) x over(footprint) + (T - waves x R) x over(resident footprint)
        over(x) = max(0, 1 - L2 / x)                   share of a re-used set that L2 cannot hold

    The footprints are sums over the launch's allocations. So W <= read <= T; data that fits in L2 is read once.
    Writes: distinct sectors once, and the rewrites that L2 could not merge. Atomics read and write what they touch.
    """
    scale = blocks_total / blocks_run
    waves = max(1.0, blocks_total / resident_blocks)
    resident = min(blocks_total, resident_blocks)
    asked, touched, together = [], [], []
    for item in allocations:
        size = _sectors_in(item)
        total = scale * item.load_misses
        distinct = min(float(size), scale * item.distinct_load_sectors, total)
        asked.append(total)
        touched.append(distinct)
        together.append(_resident_sectors(item, blocks_run, resident, distinct, waves))
    stored = [min(float(_sectors_in(item)), scale * item.distinct_store_sectors) for item in allocations]
    atomic = [min(float(_sectors_in(item)), scale * item.atomic_sectors) for item in allocations]
    footprint_miss = _overflow(SECTOR_BYTES * (sum(touched) + sum(stored) + sum(atomic)), l2_bytes)
    resident_miss = _overflow(SECTOR_BYTES * sum(together), l2_bytes)
    read, written = sum(atomic), sum(atomic)
    for index, item in enumerate(allocations):
        first_per_wave = min(asked[index], max(touched[index], waves * together[index]))
        read += touched[index]
        read += (first_per_wave - touched[index]) * footprint_miss
        read += (asked[index] - first_per_wave) * resident_miss
        written += stored[index] + max(0.0, scale * item.store_sectors - stored[index]) * resident_miss
    union = sum(
        min(float(_sectors_in(item)), max(touched[index], stored[index], atomic[index]))
        for index, item in enumerate(allocations)
    )
    return SECTOR_BYTES * read, SECTOR_BYTES * written, SECTOR_BYTES * union


def _resident_sectors(
    item: AllocationCounters, blocks_run: int, resident: int, distinct: float, waves: float
) -> float:  # fmt: skip
    if not item.load_misses or not item.distinct_load_sectors:
        return 0.0
    per_block = item.load_misses / blocks_run
    if blocks_run == 1:
        exponent = 1.0
    else:
        sharing = item.distinct_load_sectors / per_block
        exponent = min(1.0, max(0.0, math.log(max(sharing, 1.0)) / math.log(blocks_run)))
    return min(distinct, max(distinct / waves, per_block * resident**exponent))


def _sectors_in(item: AllocationCounters) -> int:
    return -(-item.bytes // SECTOR_BYTES)


def _overflow(needed: float, capacity: float) -> float:
    return max(0.0, 1.0 - capacity / needed) if needed > 0 else 0.0


# --- terms -----------------------------------------------------------------------------------------------------------
def _terms_us(shape: LaunchShape, counts: Mapping[str, float], hardware: Hardware) -> dict[str, float]:
    """Throughput terms. The SM clocks available count only busy SMs: with few blocks the fullest SM sets the end."""
    rounds = math.ceil(shape.blocks / hardware.sms)
    clocks_per_us = hardware.clock_hz * (shape.blocks / rounds) / 1e6

    def lanes(pipe: str, width: int) -> float:
        return counts.get(f"slots.{pipe}", 0.0) * WARP_THREADS / width / clocks_per_us

    issued = sum(number for name, number in counts.items() if name.startswith("slots."))
    l2_bytes = SECTOR_BYTES * (counts["l2.read_sectors"] + counts["l2.write_sectors"] + counts["l2.atomic_sectors"])
    dram = counts["dram.read_bytes"] + counts["dram.write_bytes"]
    return {
        "issue": issued / hardware.schedulers_per_sm / clocks_per_us,
        "fp32": lanes("fp32", hardware.fp32_lanes),
        "int": lanes("int", hardware.int_lanes),
        "fp16": lanes("fp16", hardware.fp16_lanes),
        "fp64": lanes("fp64", hardware.fp64_lanes),
        "sfu": lanes("sfu", hardware.sfu_lanes) + lanes("convert", hardware.convert_lanes),
        "tensor": sum(
            counts.get(f"tensor_fmas.{element}", 0.0) / fmas / clocks_per_us
            for element, fmas in hardware.tensor_fmas.items()
        ),
        "lsu": lsu_clocks(counts, hardware) / clocks_per_us,
        "atomics": counts["atomic.clocks"] / (hardware.clock_hz / 1e6),
        "l2": max(
            l2_bytes / hardware.l2_bytes_per_s * 1e6, l2_bytes / hardware.sm_l2_bytes_per_clock / clocks_per_us
        ),
        "dram": dram / (hardware.dram_bytes_per_s * hardware.dram_efficiency) * 1e6,
    }  # fmt: skip


def lsu_clocks(counts: Mapping[str, float], hardware: Hardware) -> float:
    """Clocks of the load/store pipes, summed over SMs: a request takes one, or one per four sectors, if that is more;
    shared memory takes one per wavefront, a shuffle one."""
    return global_clocks(counts, hardware) + shared_clocks(counts, hardware)


def global_clocks(counts: Mapping[str, float], hardware: Hardware) -> float:
    """The part of `lsu_clocks` that global and local accesses take."""
    return sum(
        max(counts[f"{space}.requests"], counts[f"{space}.sectors"] / hardware.l1_sectors_per_clock)
        for space in _SPACES
    )


def shared_clocks(counts: Mapping[str, float], hardware: Hardware) -> float:
    """The part of `lsu_clocks` that shared memory and shuffles take."""
    return (
        counts["shared_load.wavefronts"]
        + counts["shared_store.wavefronts"]
        + hardware.shared_atomic_clocks * counts["shared_atomic.wavefronts"]
        + counts.get("slots.shuffle", 0.0) * WARP_THREADS / hardware.shuffle_lanes
    )


def _effective_waves(waves: float) -> float:
    """Few waves end together, so a part of one costs a whole one; many waves overlap."""
    return float(math.ceil(waves)) if waves < WHOLE_WAVES_BELOW else waves


def _total_us(terms: Mapping[str, float], hardware: Hardware) -> float:
    working = [terms[name] for name in TERMS if name != "launch"]
    longest = max(working)
    return terms["launch"] + longest + hardware.overlap_loss * (sum(working) - longest)


def _warp_cycles(
    counters: Counters, counts: Mapping[str, float], module: Module, hardware: Hardware
) -> float:  # fmt: skip
    """Cycles of an average warp from its first to its last instruction, alone on its scheduler.

    Every execution of a basic block counts the dataflow length of the block; where it loops onto itself, all but the
    first count its steady-state length.
    """
    load = _load_latency(counts, hardware)

    def timing(instruction: Instruction) -> Timing:
        price = cost(instruction.opcode)
        return Timing(slots=price.issue_slots, latency=_latency(price, load, hardware))

    executions: dict[str, dict[int, int]] = {}
    for (name, index), count in counters.block_executions.items():
        executions.setdefault(name, {})[index] = count
    total = 0.0
    for name, counted in executions.items():
        for index, cycles in function_cycles(module.functions[name], counted, timing).items():
            entered = min(counted[index], counters.warps)
            total += entered * cycles.first + (counted[index] - entered) * cycles.steady
    return total / counters.warps


def _latency(price: Cost, load: float, hardware: Hardware) -> float:
    return sum(
        number * (load if part == "load" else float(getattr(hardware.latency, part)))
        for part, number in price.latency.items()
    )


def _load_latency(counts: Mapping[str, float], hardware: Hardware) -> float:
    """Mean latency of a global load by where its sectors were found."""
    sectors = counts["global_load.sectors"]
    if not sectors:
        return hardware.latency.l1
    missed = min(1.0, counts["l2.read_sectors"] / sectors)
    from_dram = min(missed, counts["dram.read_bytes"] / SECTOR_BYTES / sectors)
    latency = hardware.latency
    return (1.0 - missed) * latency.l1 + (missed - from_dram) * latency.l2 + from_dram * latency.dram


# --- several launches ------------------------------------------------------------------------------------------------
def weighted_counts(launches: Iterable[tuple[float, LaunchModel]]) -> dict[str, float]:
    """Sums of the counts of several launches, each with its weight."""
    totals: dict[str, float] = {}
    for weight, launch in launches:
        for name, number in launch.counts.items():
            totals[name] = totals.get(name, 0.0) + weight * number
    return totals


def weighted_terms_us(launches: Iterable[tuple[float, LaunchModel]]) -> dict[str, float]:
    """Sums of the terms of several launches, each with its weight, in µs."""
    totals = dict.fromkeys(TERMS, 0.0)
    for weight, launch in launches:
        for name in TERMS:
            totals[name] += weight * launch.terms_us[name]
    return totals
