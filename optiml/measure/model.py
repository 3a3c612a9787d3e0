"""The time model: what a launch asks of each part of the GPU, and how long each part takes.

Every term is the time that one resource would need if it worked alone. The largest one binds:

    T = launch + max(terms) + overlap_loss x (sum of the other terms)

The constants come from `optiml.measure.hardware`. Those of the H200 were fitted to 170 kernels of 17 problems (the
catalogue with its tunables, L2 overwritten before each run) timed on one: half of the kernels of a problem that was
held out of the fit are predicted within 11 %, their ranks correlate with the measured ones by 0.82 on average, and the
kernel that the model picks is 1 % slower than the best in the median (`benchmarks/h200.json`, stage `calibrate`). For
the other GPUs nothing was checked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from optiml.errors import InvalidInput
from optiml.measure.hardware import SECTOR_BYTES, WARP_THREADS, Hardware
from optiml.measure.instructions import Cost, cost
from optiml.measure.occupancy import occupancy
from optiml.measure.traffic import Grid, Traffic, dram_bytes, overflow, traffic_of
from optiml.ptx import Module
from optiml.ptx.counters import Counters
from optiml.ptx.dataflow import Timing, function_cycles
from optiml.ptx.parse import Instruction
from optiml.records import Occupancy

MODEL_VERSION = "model-2"  # part of every cache key of a profile: change it with any formula or constant

WHOLE_WAVES_BELOW = 4.0
SECTORS_PER_LINE = 4
TERMS = (
    "issue", "fp32", "int", "fp16", "fp64", "sfu", "tensor", "lsu", "atomics", "l2", "dram", "latency", "dispatch",
    "launch",
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
    cycles = _warp_cycles(shape, counters, counts, module, hardware)
    cycles += hardware.block_turnover_clocks + hardware.warp_start_clocks * counters.warps / counters.blocks
    if counters.barriers:
        cycles = math.hypot(cycles, _block_clocks(counts, hardware))
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
    the estimated machine instructions; `<space>.requests|sectors|bytes|ideal_sectors|lines` for global and local
    memory; `<shared>.requests|wavefronts|ideal_wavefronts`; modelled (see `traffic`): `l1.hit_sectors`,
    `l2.read_sectors|write_sectors|atomic_sectors|lines`, `dram.read_bytes|write_bytes`, `distinct_bytes` (the memory
    touched at all) and `atomic.clocks`.
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
        for part in ("requests", "sectors", "bytes", "ideal_sectors", "lines"):
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
    grid = Grid(
        blocks_run=counters.blocks,
        blocks_total=shape.blocks,
        busy_sms=min(hardware.sms, shape.blocks),
        resident_blocks=hardware.sms * blocks_per_sm,
        l1_bytes=float(blocks_per_sm * _l1_share(shape, hardware, blocks_per_sm)),
    )
    traffic = [traffic_of(item, grid) for item in counters.allocations.values()]
    read_bytes, write_bytes = dram_bytes(traffic, grid, l2_bytes=hardware.l2_bytes)
    local = totals["local_load.sectors"] + totals["local_store.sectors"]
    needed = module.functions[shape.symbol].local_bytes * shape.threads_per_block * blocks_per_sm
    spilled = local * overflow(needed, grid.l1_bytes)  # local memory of the resident threads that L1 cannot hold
    asked = sum(item.asked for item in traffic)
    stores = sum(item.stores for item in traffic)
    return {
        "l1.hit_sectors": max(0.0, totals["global_load.sectors"] - asked) + local - spilled,
        "l2.read_sectors": asked + spilled,
        "l2.write_sectors": stores,
        "l2.atomic_sectors": sum(item.atomics for item in traffic),
        "l2.lines": asked * _lines_per_sector(totals, "global_load")
        + stores * _lines_per_sector(totals, "global_store")
        + spilled / SECTORS_PER_LINE,
        "dram.read_bytes": read_bytes,
        "dram.write_bytes": write_bytes,
        "distinct_bytes": SECTOR_BYTES * sum(item.distinct for item in traffic),
        "atomic.clocks": _atomic_clocks(counters, traffic, grid.scale, hardware),
    }


def _l1_share(shape: LaunchShape, hardware: Hardware, blocks_per_sm: int) -> int:
    return l1_share_bytes(
        hardware, shared_bytes_per_block=shape.shared_bytes_per_block, blocks_per_sm=blocks_per_sm
    )  # fmt: skip


def _lines_per_sector(totals: Mapping[str, float], space: str) -> float:
    sectors = totals[f"{space}.sectors"]
    return totals[f"{space}.lines"] / sectors if sectors else 0.0


def _atomic_clocks(counters: Counters, traffic: Sequence[Traffic], scale: float, hardware: Hardware) -> float:
    """Clocks that L2 spends on global atomics: their throughput, or the queue at the busiest place.

    Requests that update one place of L2 (`atomic_place_bytes` in one piece) go one after another: a fixed cost each,
    and more for every further sector. Updates are taken to spread evenly over the sectors they touch.
    """
    total = counters.global_atomic
    if not total.requests:
        return 0.0
    further = total.sectors / total.requests - 1.0
    clocks = hardware.atomic_request_clocks + hardware.atomic_sector_clocks * further
    sectors = sum(item.atomics for item in traffic)
    queues = [
        total.requests * scale * clocks * (item.atomics / sectors)
        / max(1.0, item.updated * SECTOR_BYTES / hardware.atomic_place_bytes)
        for item in traffic
        if sectors
    ]  # fmt: skip
    return max([total.bytes / 4.0 * scale / hardware.atomic_lanes_per_clock, *queues])


# --- terms -----------------------------------------------------------------------------------------------------------
def _terms_us(shape: LaunchShape, counts: Mapping[str, float], hardware: Hardware) -> dict[str, float]:
    """Throughput terms. The SM clocks available count only busy SMs: with few blocks the fullest SM sets the end."""
    rounds = math.ceil(shape.blocks / hardware.sms)
    clocks_per_us = hardware.clock_hz * (shape.blocks / rounds) / 1e6

    def lanes(pipe: str, width: int) -> float:
        return counts.get(f"slots.{pipe}", 0.0) * WARP_THREADS / width / clocks_per_us

    issued = sum(number for name, number in counts.items() if name.startswith("slots."))
    l2_sectors = counts["l2.read_sectors"] + counts["l2.write_sectors"] + counts["l2.atomic_sectors"]
    l2_bytes = max(SECTOR_BYTES * l2_sectors, hardware.l2_line_bytes * counts["l2.lines"])
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
        "dispatch": max(
            shape.blocks / hardware.blocks_started_per_clock / (hardware.clock_hz / 1e6),
            counts["warps"] * hardware.warp_start_clocks / clocks_per_us,
        ),
    }  # fmt: skip


def lsu_clocks(counts: Mapping[str, float], hardware: Hardware) -> float:
    """Clocks of the load/store pipes, summed over SMs: one for each 128-byte line that a request touches, one for each
    wavefront of shared memory, one for a shuffle, a little more for a barrier."""
    return global_clocks(counts) + shared_clocks(counts, hardware)


def global_clocks(counts: Mapping[str, float]) -> float:
    """The part of `lsu_clocks` that global and local accesses take."""
    return sum(counts[f"{space}.lines"] for space in _SPACES)


def shared_clocks(counts: Mapping[str, float], hardware: Hardware) -> float:
    """The part of `lsu_clocks` that shared memory, shuffles and barriers take."""
    return (
        counts["shared_load.wavefronts"]
        + counts["shared_store.wavefronts"]
        + hardware.shared_atomic_clocks * counts["shared_atomic.wavefronts"]
        + counts.get("slots.shuffle", 0.0) * WARP_THREADS / hardware.shuffle_lanes
        + hardware.barrier_clocks * counts["barriers"]
    )


def _block_clocks(counts: Mapping[str, float], hardware: Hardware) -> float:
    """Clocks in which a block issues its own instructions and accesses.

    Barriers keep the warps of a block in one phase, where they get in each other's way instead of filling each other's
    gaps; only other blocks fill those.
    """
    issued = sum(number for name, number in counts.items() if name.startswith("slots."))
    return max(issued / hardware.schedulers_per_sm, lsu_clocks(counts, hardware)) / counts["blocks"]


def _effective_waves(waves: float) -> float:
    """Few waves end together, so a part of one costs a whole one; many waves overlap."""
    return float(math.ceil(waves)) if waves < WHOLE_WAVES_BELOW else waves


def _total_us(terms: Mapping[str, float], hardware: Hardware) -> float:
    working = [terms[name] for name in TERMS if name != "launch"]
    longest = max(working)
    return terms["launch"] + longest + hardware.overlap_loss * (sum(working) - longest)


def _warp_cycles(
    shape: LaunchShape, counters: Counters, counts: Mapping[str, float], module: Module, hardware: Hardware
) -> float:
    """Cycles of an average warp from its first to its last instruction, alone on its scheduler.

    Every execution of a basic block counts the dataflow length of the block; where it loops onto itself, all but the
    first count its steady-state length.
    """
    passes = {
        "load": max(1.0, _per_request(counts, "global_load", "lines")),
        "shared": max(1.0, _per_request(counts, "shared_load", "wavefronts")),
    }

    def timing(instruction: Instruction, loads: int) -> Timing:
        price = cost(instruction.opcode)
        extra = sum(number - 1.0 for part, number in passes.items() if part in price.latency)
        latency = _latency(price, _load_latency(counts, loads, hardware), hardware)
        return Timing(slots=price.issue_slots + extra, latency=latency + extra)

    executions: dict[str, dict[int, int]] = {}
    for (name, index), count in counters.block_executions.items():
        executions.setdefault(name, {})[index] = count
    total = 0.0
    for name, counted in executions.items():
        lengths = function_cycles(module.functions[name], counted, timing, registers=shape.registers_per_thread)
        for index, cycles in lengths.items():
            entered = min(counted[index], counters.warps)
            total += entered * cycles.first + (counted[index] - entered) * cycles.steady
    return total / counters.warps


def _per_request(counts: Mapping[str, float], space: str, part: str) -> float:
    requests = counts[f"{space}.requests"]
    return counts[f"{space}.{part}"] / requests if requests else 0.0


def _latency(price: Cost, load: float, hardware: Hardware) -> float:
    return sum(
        number * (load if part == "load" else float(getattr(hardware.latency, part)))
        for part, number in price.latency.items()
    )


def _load_latency(counts: Mapping[str, float], together: int, hardware: Hardware) -> float:
    """Mean latency of a global load by where its sectors were found.

    Of loads that are under way together the slowest counts: with `together` of them the chance that one misses L1 is
    that many times the miss rate, at most 1.
    """
    sectors = counts["global_load.sectors"]
    latency = hardware.latency
    if not sectors or not counts["l2.read_sectors"]:
        return latency.l1
    missed = min(1.0, counts["l2.read_sectors"] / sectors)
    from_dram = min(1.0, counts["dram.read_bytes"] / SECTOR_BYTES / counts["l2.read_sectors"])
    behind_l1 = (1.0 - from_dram) * latency.l2 + from_dram * latency.dram
    waits = min(1.0, missed * max(1, together))
    return (1.0 - waits) * latency.l1 + waits * behind_l1


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
