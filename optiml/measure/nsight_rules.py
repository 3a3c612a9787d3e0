"""What bounds a kernel, told from hardware counters alone: for reports, and for kernels profiled on a GPU.

Source of the thresholds: the "GPU Speed Of Light Throughput" section of the Nsight Compute documentation: above 80 % of
a unit's peak it is the bottleneck, below 60 % of every peak the kernel waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from optiml.records import Bottleneck

Metrics = Mapping[str, float | None]
Kind = Literal["memory", "compute", "latency", "launch"]
BUSY_PCT = 60.0
MOST_FINDINGS = 5
LAUNCH_NS = 6000.0  # under the profiler an empty kernel takes a few microseconds

_SM = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
_COMPUTE_MEMORY = "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"
_MEMORY = {
    "dram": ("DRAM", "dram__throughput.avg.pct_of_peak_sustained_elapsed"),
    "dram_of_sol": ("DRAM", "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"),
    "l2": ("L2", "lts__throughput.avg.pct_of_peak_sustained_elapsed"),
    "l1": ("L1 and shared memory", "l1tex__throughput.avg.pct_of_peak_sustained_elapsed"),
    "l1_of_sol": ("L1 and shared memory", "l1tex__throughput.avg.pct_of_peak_sustained_active"),
}
_LD = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio"
_ST = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio"
_LD_USED = "smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.ratio"
_ST_USED = "smsp__sass_average_data_bytes_per_sector_mem_global_op_st.ratio"
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
_WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
_ACTIVE = "sm__warps_active.avg.pct_of_peak_sustained_active"
_ISSUE = "smsp__issue_active.avg.pct_of_peak_sustained_active"
_THREADS = "smsp__thread_inst_executed_per_inst_executed.ratio"
_WAVES = "launch__waves_per_multiprocessor"
_BARRIER = "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio"
_LONG = "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"
_SPILLED = "smsp__inst_executed_op_local_ld.sum"
_DURATION = "gpu__time_duration.sum"

BASICS = (
    _SM, _COMPUTE_MEMORY, *(name for _, name in _MEMORY.values()), _LD, _ST, _LD_USED, _ST_USED, _CONFLICTS,
    _WAVEFRONTS, _ACTIVE, _ISSUE, _THREADS, _WAVES, _BARRIER, _LONG, _SPILLED, _DURATION,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Seen:
    metrics: Metrics
    where: str
    kind: Kind

    def __getitem__(self, name: str) -> float | None:
        return self.metrics.get(name)


@dataclass(frozen=True, kw_only=True)
class _Finding:
    weight: float  # 0..1
    evidence: str
    advice: str


def bottleneck_of(metrics: Metrics, *, hot_line: int | None = None) -> Bottleneck | None:
    """What bounds a kernel by its counters; None where they do not tell.

    Args:
        metrics: by name; those of `BASICS` are looked at.
        hot_line: the source line with most samples, named in the evidence.
    """
    compute = metrics.get(_SM)
    loads = [(label, value) for label, name in _MEMORY.values() if (value := metrics.get(name)) is not None]
    whole = metrics.get(_COMPUTE_MEMORY)
    if compute is None or (not loads and whole is None):
        return None
    label, memory = max(loads, key=lambda item: item[1]) if loads else ("memory", 0.0)
    memory = max(memory, whole or 0.0)
    kind, first = _kind(metrics, compute, memory, label)
    seen = _Seen(metrics=metrics, where="" if hot_line is None else f" (most samples at line {hot_line})", kind=kind)
    found = sorted((item for finder in _FINDERS if (item := finder(seen)) is not None), key=lambda item: -item.weight)
    told = found[:MOST_FINDINGS]
    advice = tuple(dict.fromkeys(item.advice for item in told)) or (_DEFAULT_ADVICE[kind],)
    return Bottleneck(kind=kind, evidence=(first, *(item.evidence for item in told)), advice=advice)


def _kind(metrics: Metrics, compute: float, memory: float, label: str) -> tuple[Kind, str]:
    duration, waves = metrics.get(_DURATION), metrics.get(_WAVES)
    busiest = f"{label} {memory:.0f} % of peak, the SMs {compute:.0f} %"
    if max(compute, memory) >= BUSY_PCT:
        return ("memory", busiest) if memory >= compute else ("compute", busiest)
    if duration is not None and duration < LAUNCH_NS and (waves is None or waves < 1.0):
        return "launch", f"{duration / 1e3:.2g} µs in all, and {busiest}"
    return "latency", f"no unit is busy: {busiest}"


_DEFAULT_ADVICE: Mapping[Kind, str] = {
    "memory": "move fewer bytes: a narrower dtype, fusion with what comes before or after, each element once",
    "compute": "do less arithmetic, or use the tensor cores where the dtype allows it",
    "latency": "give the schedulers independent work: more loads in flight per thread, more warps, shorter chains",
    "launch": "do more in one launch: fuse kernels, or replay them as a CUDA graph",
}


def _scattered(seen: _Seen) -> _Finding | None:
    worst: _Finding | None = None
    for ratio, used, what, verb in ((_LD, _LD_USED, "loads", "read"), (_ST, _ST_USED, "stores", "write")):
        sectors, share = seen[ratio], seen[used]
        if not share or share > 24.0:
            continue
        finding = _Finding(
            weight=1.0 - share / 32.0,
            evidence=f"global {what} use {share:.3g} of the 32 bytes of a sector"
            + ("" if not sectors else f", {sectors:.3g} sectors a request")
            + seen.where,
            advice=f"let neighbouring threads {verb} neighbouring addresses, or stage a tile through shared memory",
        )
        worst = finding if worst is None or finding.weight > worst.weight else worst
    return worst


def _bank_conflicts(seen: _Seen) -> _Finding | None:
    lost, all_of_them = seen[_CONFLICTS], seen[_WAVEFRONTS]
    if not lost or not all_of_them or lost < 0.1 * all_of_them:
        return None
    return _Finding(
        weight=0.8 * lost / all_of_them,
        evidence=f"{100 * lost / all_of_them:.0f} % of the passes through shared memory are bank conflicts",
        advice="pad the inner dimension of the shared array by one element ([N][N + 1]) or swizzle its index",
    )


def _occupancy(seen: _Seen) -> _Finding | None:
    active = seen[_ACTIVE]
    if active is None or active >= 40.0 or seen.kind not in ("latency", "launch"):
        return None
    return _Finding(
        weight=0.6 * (1.0 - active / 100.0),
        evidence=f"{active:.0f} % of the warps that an SM can hold are there",
        advice="let more warps run: larger or more blocks, fewer registers, less shared memory per block",
    )


def _few_blocks(seen: _Seen) -> _Finding | None:
    waves = seen[_WAVES]
    if waves is None or waves >= 1.0:
        return None
    return _Finding(
        weight=0.5 * (1.0 - waves),
        evidence=f"{waves:.2f} waves: the grid does not fill the GPU once",
        advice="split the work into more blocks: smaller tiles, or several blocks per row or per reduction",
    )


def _divergence(seen: _Seen) -> _Finding | None:
    threads = seen[_THREADS]
    if threads is None or threads >= 26.0:
        return None
    return _Finding(
        weight=0.5 * (1.0 - threads / 32.0),
        evidence=f"{threads:.1f} of 32 threads are active in an average instruction",
        advice="let the threads of a warp take the same path, and reduce with __shfl_down_sync",
    )


def _barriers(seen: _Seen) -> _Finding | None:
    waiting = seen[_BARRIER]
    if waiting is None or waiting < 2.0:
        return None
    return _Finding(
        weight=min(0.5, 0.05 * waiting),
        evidence=f"{waiting:.1f} warps wait at a barrier for each instruction issued",
        advice="synchronise less: more work between barriers, warp shuffles instead of shared memory, smaller blocks",
    )


def _waiting_for_memory(seen: _Seen) -> _Finding | None:
    waiting = seen[_LONG]
    if waiting is None or waiting < 4.0:
        return None
    return _Finding(
        weight=min(0.55, 0.01 * waiting),
        evidence=f"{waiting:.0f} warps wait for global memory for each instruction issued{seen.where}",
        advice="keep more loads in flight: unroll, load 16 bytes per thread (float4), prefetch into shared memory",
    )


def _local_memory(seen: _Seen) -> _Finding | None:
    loads = seen[_SPILLED]
    if not loads:
        return None
    return _Finding(
        weight=0.3,
        evidence=f"{loads:,.0f} warp instructions load local memory (spilled registers or indexed arrays)",
        advice="use fewer registers or index arrays by constants, so that they stay in registers",
    )


_FINDERS: tuple[Callable[[_Seen], _Finding | None], ...] = (
    _scattered, _bank_conflicts, _occupancy, _few_blocks, _divergence, _barriers, _waiting_for_memory, _local_memory,
)  # fmt: skip
