"""A kernel against a baseline, from their profiles.

On an emulator nothing is noisy: the verdict follows from the modelled time and from counted costs, and the same two
profiles always give the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from optiml.errors import InvalidInput
from optiml.records import Comparison, Profile

Verdict = Literal["faster", "same", "slower", "inconclusive"]

SMALL = 0.01  # times and metrics that differ by less are the same
EXTRA_PASS = 0.02  # global traffic that grew by this share of what the memory system had to move is an extra pass
DECISIVE_RATIO = 1.5  # below this the uncalibrated model alone does not overrule what was counted

L1_SECTORS = "l1tex__t_sectors.sum"
DRAM_BYTES = "dram__bytes.sum"
COSTS: Mapping[str, str] = {  # what a kernel pays with, and how to call it
    DRAM_BYTES: "DRAM bytes",
    "lts__t_sectors.sum": "L2 sectors",
    L1_SECTORS: "L1 sectors",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": "shared-memory wavefronts",
    "smsp__inst_executed.sum": "warp instructions",
}
_TRAFFIC = frozenset({DRAM_BYTES, "lts__t_sectors.sum", L1_SECTORS})
SECTOR_BYTES = 32


def compare(new: Profile, old: Profile) -> Comparison:
    """Whether `new` is faster than `old`; `ratio` is the old time over the new one.

    Modelled, in this order:

    - the same kernel, or no cost moved by 1 % and the time not either: `same`
    - an extra pass over memory (L1 sectors grew by 2 % of the DRAM traffic or more while no cost fell) and no gain in
      time: `slower`, however small its part of the time is
    - time and costs point the same way, or the time differs by 1.5x or more: what the time says
    - the time says one thing and all costs that moved say the other: `inconclusive`
    - costs moved, the time did not: `slower` if memory traffic rose and nothing fell, else `same`

    Measured: faster or slower only where the 10–90 % ranges do not overlap and the medians differ by 1 %.

    Raises:
        InvalidInput: one profile is measured and the other modelled, or they are of different devices or sizes.
    """
    _check_comparable(new, old)
    ratio = old.time.median_us / new.time.median_us
    verdict, reasons = _modelled(new, old, ratio) if new.time.source == "modelled" else _measured(new, old, ratio)
    return Comparison(
        ratio=ratio,
        ci95=None,
        noise_pct=None if new.time.noise_pct is None else max(new.time.noise_pct, old.time.noise_pct or 0.0),
        verdict=verdict,
        metric_changes=metric_changes(new, old),
        source=new.time.source,
        baseline_kernel_id=old.kernel_id,
        reasons=reasons,
    )


def metric_changes(new: Profile, old: Profile) -> dict[str, float]:
    """new / old of every metric that both have and that moved by 1 % or more; a metric that was 0 has no ratio."""
    changes = {}
    for name, value in new.metrics.items():
        before = old.metrics.get(name)
        if value is None or not before:
            continue
        if abs(value / before - 1.0) >= SMALL:
            changes[name] = value / before
    return changes


def _check_comparable(new: Profile, old: Profile) -> None:
    if new.time.source != old.time.source:
        raise InvalidInput(
            f"a {new.time.source} time cannot be compared with a {old.time.source} one; profile both on one device"
        )
    devices = new.conditions.get("device"), old.conditions.get("device")
    if devices[0] != devices[1]:
        raise InvalidInput(
            f"profiles of {devices[0]} and of {devices[1]} cannot be compared; profile both on one device"
        )
    if [entry.axes for entry in new.bench] != [entry.axes for entry in old.bench]:
        raise InvalidInput("the two profiles were taken at different sizes; profile both at the same ones")


def _modelled(new: Profile, old: Profile, ratio: float) -> tuple[Verdict, tuple[str, ...]]:
    if new.kernel_id == old.kernel_id:
        return "same", ("it is the same kernel",)
    costs, before = _costs(new), _costs(old)
    grew = {name: _growth(costs[name], before[name]) for name in COSTS if name in costs and name in before}
    rose = [name for name, growth in grew.items() if growth >= 1.0 + SMALL]
    fell = [name for name, growth in grew.items() if growth <= 1.0 - SMALL]
    told = tuple(_told(name, costs[name], before[name]) for name in (*rose, *fell))
    faster, slower = ratio >= 1.0 + SMALL, ratio <= 1.0 / (1.0 + SMALL)
    time = f"the modelled time went from {old.time.median_us:.4g} to {new.time.median_us:.4g} µs"
    if not faster and not fell and _extra_pass(costs, before):
        extra = SECTOR_BYTES * (costs[L1_SECTORS] - before[L1_SECTORS])
        return "slower", (f"it moves {extra:.3g} more bytes through L1 and saves nothing", time, *told)
    if not faster and not slower:
        if _TRAFFIC & set(rose) and not fell:
            return "slower", ("it moves more through memory and the modelled time did not improve", *told)
        return "same", (f"{time}, within 1 %", *told)
    decisive = max(ratio, 1.0 / ratio) >= DECISIVE_RATIO
    if faster and rose and not fell and not decisive:
        return "inconclusive", (f"{time}, but every cost that moved rose; the model is not calibrated", *told)
    if slower and fell and not rose and not decisive:
        return "inconclusive", (f"{time}, but every cost that moved fell; the model is not calibrated", *told)
    return ("faster" if faster else "slower"), (time, *told)


def _measured(new: Profile, old: Profile, ratio: float) -> tuple[Verdict, tuple[str, ...]]:
    ranges = (new.time.p10_us, new.time.p90_us, old.time.p10_us, old.time.p90_us)
    if abs(ratio - 1.0) < SMALL:
        return "same", ("the medians differ by less than 1 %",)
    new_low, new_high, old_low, old_high = ranges
    if new_low is None or new_high is None or old_low is None or old_high is None:
        return "inconclusive", ("the spread of the times is not known",)
    if new_high < old_low or old_high < new_low:
        return ("faster" if ratio > 1.0 else "slower"), ("the 10–90 % ranges of the times do not overlap",)
    return "inconclusive", ("the 10–90 % ranges of the times overlap",)


def _costs(profile: Profile) -> dict[str, float]:
    """The costs that the profile knows; those that were not asked for are summed over its bench entries."""
    costs = {}
    for name in COSTS:
        total = profile.metrics.get(name)
        if total is None:
            parts = [(entry.weight, entry.metrics.get(name)) for entry in profile.bench]
            known = [weight * part for weight, part in parts if part is not None]
            total = sum(known) if known and len(known) == len(parts) else None
        if total is not None:
            costs[name] = total
    return costs


def _growth(new: float, old: float) -> float:
    if new == old:
        return 1.0
    return new / old if old else float("inf")


def _extra_pass(new: Mapping[str, float], old: Mapping[str, float]) -> bool:
    if L1_SECTORS not in new or L1_SECTORS not in old:
        return False
    grown = SECTOR_BYTES * (new[L1_SECTORS] - old[L1_SECTORS])
    moved = old.get(DRAM_BYTES, SECTOR_BYTES * old[L1_SECTORS])
    return grown > 0 and grown >= EXTRA_PASS * moved


def _told(name: str, new: float, old: float) -> str:
    return f"{COSTS[name]}: {old:.4g} -> {new:.4g}"
