"""The table of metrics: Nsight Compute's name, unit, meaning, and how each is computed here.

`counted` metrics follow from what the engine executed, scaled to the whole grid; `modelled` ones need the time model, a
cache model or a hardware table; `ncu` ones only a GPU's counters give. A new metric is a new row of `METRICS`, and the
command line of Nsight Compute is made from the same rows. What a run cannot give is None, never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from optiml.measure.hardware import SECTOR_BYTES, Hardware
from optiml.measure.model import LaunchModel, lsu_clocks
from optiml.measure.occupancy import block_limits


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What metrics are computed from: one launch, or a weighted sum of several."""

    counts: Mapping[str, float]  # totals as `model.counts_of` describes them
    terms_us: Mapping[str, float]
    time_us: float
    longest: LaunchModel  # the launch that takes most of the time; stands for the launch__ metrics
    hardware: Hardware


Compute = Callable[[Observation], float | None]
Better = Literal["down", "up"] | None  # None: neither, on its own
Across = Literal["sum", "mean", "longest"]  # of several launches: added, averaged by time, or that of the longest


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One row: a name of Nsight Compute, in base units (bytes, nanoseconds, per cent)."""

    name: str
    unit: str
    better: Better
    source: Literal["counted", "modelled", "ncu"]
    description: str
    compute: Compute
    across: Across = "mean"


def metric_values(observation: Observation, names: tuple[str, ...] | None = None) -> dict[str, float | None]:
    """Values by name, in the order asked for; every metric of the table if `names` is None.

    A name that the table lacks is None: it exists in Nsight Compute or not, but it is not known here.
    """
    wanted = tuple(METRICS) if names is None else names
    return {name: METRICS[name].compute(observation) if name in METRICS else None for name in wanted}


# --- how a value is computed -----------------------------------------------------------------------------------------
def _sum(*keys: str) -> Compute:
    return lambda seen: sum(seen.counts.get(key, 0.0) for key in keys)


def _ratio(top: str, bottom: str, *, factor: float = 1.0) -> Compute:
    def compute(seen: Observation) -> float | None:
        below = seen.counts.get(bottom, 0.0)
        return factor * seen.counts.get(top, 0.0) / below if below else None

    return compute


def _conflicts(*spaces: str) -> Compute:
    return lambda seen: sum(
        seen.counts.get(f"{space}.wavefronts", 0.0) - seen.counts.get(f"{space}.ideal_wavefronts", 0.0)
        for space in spaces
    )


def _share_of_time(*terms: str) -> Compute:
    """The busiest of some terms as per cent of the modelled time."""
    return lambda seen: 100.0 * max(seen.terms_us[term] for term in terms) / seen.time_us


def _dram_pct(seen: Observation) -> float:
    moved = seen.counts["dram.read_bytes"] + seen.counts["dram.write_bytes"]
    return 100.0 * moved / (seen.hardware.dram_bytes_per_s * seen.time_us * 1e-6)


def _l1_pct(seen: Observation) -> float:
    available = seen.hardware.sms * seen.hardware.clock_hz * seen.time_us * 1e-6
    return 100.0 * lsu_clocks(seen.counts, seen.hardware) / available


def _issue_pct(seen: Observation) -> float:
    issued = sum(number for name, number in seen.counts.items() if name.startswith("slots."))
    available = seen.hardware.schedulers_per_sm * seen.hardware.sms * seen.hardware.clock_hz * seen.time_us * 1e-6
    return 100.0 * issued / available


def _l1_hit_pct(seen: Observation) -> float | None:
    sectors = sum(seen.counts[f"{space}.sectors"] for space in ("global_load", "local_load", "local_store"))
    return 100.0 * min(1.0, seen.counts["l1.hit_sectors"] / sectors) if sectors else None


def _l2_hit_pct(seen: Observation) -> float | None:
    asked = sum(seen.counts[f"l2.{kind}_sectors"] for kind in ("read", "write", "atomic"))
    if not asked:
        return None
    return 100.0 * max(0.0, 1.0 - seen.counts["dram.read_bytes"] / SECTOR_BYTES / asked)


def _uniform_branch_pct(seen: Observation) -> float | None:
    branches = seen.counts["branches"]
    return 100.0 * (1.0 - seen.counts["divergent_branches"] / branches) if branches else None


def _limit(resource: str) -> Compute:
    def compute(seen: Observation) -> float | None:
        shape = seen.longest.shape
        limits = block_limits(
            seen.hardware,
            threads_per_block=shape.threads_per_block,
            registers_per_thread=shape.registers_per_thread,
            shared_bytes_per_block=shape.shared_bytes_per_block,
        )
        return float(limits[resource]) if resource in limits else None

    return compute


def _registers(seen: Observation) -> float | None:
    registers = seen.longest.shape.registers_per_thread
    return None if registers is None else float(registers)


_GLOBAL = ("global_load.sectors", "global_store.sectors", "global_atomic.sectors")
_LOCAL = ("local_load.sectors", "local_store.sectors")
_L2 = ("l2.read_sectors", "l2.write_sectors", "l2.atomic_sectors")


def _across(name: str) -> Across:
    if name.startswith("launch__"):
        return "longest"
    return "sum" if name.endswith(".sum") else "mean"


def _counted(name: str, unit: str, better: Better, description: str, compute: Compute) -> Metric:
    return Metric(
        name=name, unit=unit, better=better, source="counted", description=description, compute=compute,
        across=_across(name),
    )  # fmt: skip


def _modelled(name: str, unit: str, better: Better, description: str, compute: Compute) -> Metric:
    return Metric(
        name=name, unit=unit, better=better, source="modelled", description=description, compute=compute,
        across=_across(name),
    )  # fmt: skip


def _only_ncu(name: str, unit: str, better: Better, description: str) -> Metric:
    return Metric(
        name=name, unit=unit, better=better, source="ncu", description=description, compute=lambda seen: None,
        across=_across(name),
    )  # fmt: skip


_ROWS = (
    _modelled("gpu__time_duration.sum", "ns", "down", "time of the launches", lambda seen: 1e3 * seen.time_us),
    # instructions
    _counted(
        "smsp__inst_executed.sum",
        "inst",
        "down",
        "warp instructions executed (PTX, a proxy of machine code)",
        _sum("warp_instructions"),
    ),
    _counted(
        "smsp__thread_inst_executed.sum",
        "inst",
        "down",
        "thread instructions executed (PTX)",
        _sum("thread_instructions"),
    ),
    _counted(
        "smsp__thread_inst_executed_per_inst_executed.ratio",
        "",
        "up",
        "active threads per warp instruction; 32 = no divergence",
        _ratio("thread_instructions", "warp_instructions"),
    ),
    _modelled("smsp__issue_active.avg.pct_of_peak_sustained_active", "%", "up", "issue slots used", _issue_pct),
    _counted(
        "smsp__sass_branch_targets_threads_divergent.sum",
        "branches",
        "down",
        "warp branches whose threads part ways",
        _sum("divergent_branches"),
    ),
    _counted(
        "smsp__sass_average_branch_targets_threads_uniform.pct",
        "%",
        "up",
        "warp branches whose threads stay together",
        _uniform_branch_pct,
    ),
    _counted(
        "smsp__sass_thread_inst_executed_op_fadd_pred_on.sum", "inst", "down", "fp32 additions", _sum("thread_ops.fadd")
    ),
    _counted(
        "smsp__sass_thread_inst_executed_op_fmul_pred_on.sum",
        "inst",
        "down",
        "fp32 multiplications",
        _sum("thread_ops.fmul"),
    ),
    _counted(
        "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",
        "inst",
        "down",
        "fp32 multiply-adds",
        _sum("thread_ops.ffma"),
    ),
    _counted(
        "smsp__sass_thread_inst_executed_op_fp16_pred_on.sum",
        "inst",
        "down",
        "half-precision operations",
        _sum("thread_ops.fp16"),
    ),
    _counted(
        "smsp__sass_thread_inst_executed_op_fp64_pred_on.sum",
        "inst",
        "down",
        "fp64 operations",
        _sum("thread_ops.fp64"),
    ),
    _counted(
        "smsp__sass_thread_inst_executed_op_integer_pred_on.sum",
        "inst",
        "down",
        "integer operations",
        _sum("thread_ops.int"),
    ),
    _counted(
        "smsp__sass_thread_inst_executed_op_conversion_pred_on.sum",
        "inst",
        "down",
        "conversions",
        _sum("thread_ops.cvt"),
    ),
    _counted(
        "smsp__sass_thread_inst_executed_op_control_pred_on.sum",
        "inst",
        "down",
        "branches, calls, barriers",
        _sum("thread_ops.control"),
    ),
    _counted(
        "smsp__sass_thread_inst_executed_op_memory_pred_on.sum",
        "inst",
        "down",
        "loads, stores, atomics",
        _sum("thread_ops.memory"),
    ),
    _counted(
        "sm__inst_executed_pipe_xu.sum",
        "inst",
        "down",
        "special functions (exp2, log2, 1/x, sin)",
        _sum("warp_ops.sfu"),
    ),
    _modelled("sm__inst_executed_pipe_fma.sum", "inst", "down", "fp32 machine instructions", _sum("slots.fp32")),
    _counted("sm__inst_executed_pipe_tensor.sum", "inst", None, "tensor-core instructions", _sum("warp_ops.tensor")),
    # global and local memory
    _counted(
        "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
        "requests",
        "down",
        "global load requests of warps",
        _sum("global_load.requests"),
    ),
    _counted(
        "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
        "requests",
        "down",
        "global store requests of warps",
        _sum("global_store.requests"),
    ),
    _counted(
        "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
        "sectors",
        "down",
        "32-byte sectors that global loads touch",
        _sum("global_load.sectors"),
    ),
    _counted(
        "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
        "sectors",
        "down",
        "32-byte sectors that global stores touch",
        _sum("global_store.sectors"),
    ),
    _counted(
        "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
        "sectors",
        "down",
        "sectors per global load request; 4 for coalesced 4-byte loads",
        _ratio("global_load.sectors", "global_load.requests"),
    ),
    _counted(
        "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio",
        "sectors",
        "down",
        "sectors per global store request; 4 for coalesced 4-byte stores",
        _ratio("global_store.sectors", "global_store.requests"),
    ),
    _counted(
        "smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.ratio",
        "bytes",
        "up",
        "bytes used of each 32-byte sector loaded",
        _ratio("global_load.bytes", "global_load.sectors"),
    ),
    _counted(
        "smsp__sass_average_data_bytes_per_sector_mem_global_op_st.ratio",
        "bytes",
        "up",
        "bytes used of each 32-byte sector stored",
        _ratio("global_store.bytes", "global_store.sectors"),
    ),
    _counted(
        "l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum",
        "sectors",
        "down",
        "sectors of local loads, without register spills",
        _sum("local_load.sectors"),
    ),
    _counted(
        "l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum",
        "sectors",
        "down",
        "sectors of local stores, without register spills",
        _sum("local_store.sectors"),
    ),
    _counted(
        "l1tex__t_sectors.sum", "sectors", "down", "sectors of all global and local accesses", _sum(*_GLOBAL, *_LOCAL)
    ),
    _modelled("l1tex__t_sector_hit_rate.pct", "%", "up", "loads found in L1", _l1_hit_pct),
    _modelled(
        "lts__t_sectors.sum", "sectors", "down", "sectors that reach L2: load misses, stores, atomics", _sum(*_L2)
    ),
    _modelled("lts__t_sectors_op_read.sum", "sectors", "down", "sectors read from L2", _sum("l2.read_sectors")),
    _modelled("lts__t_sectors_op_write.sum", "sectors", "down", "sectors written to L2", _sum("l2.write_sectors")),
    _counted(
        "lts__t_sectors_op_atom.sum",
        "sectors",
        "down",
        "sectors of global atomics and reductions",
        _sum("l2.atomic_sectors"),
    ),
    _modelled("lts__t_sector_hit_rate.pct", "%", "up", "sectors found in L2", _l2_hit_pct),
    _modelled(
        "dram__bytes.sum", "bytes", "down", "bytes moved to and from DRAM", _sum("dram.read_bytes", "dram.write_bytes")
    ),
    _modelled("dram__bytes_read.sum", "bytes", "down", "bytes read from DRAM", _sum("dram.read_bytes")),
    _modelled("dram__bytes_write.sum", "bytes", "down", "bytes written to DRAM", _sum("dram.write_bytes")),
    # shared memory
    _counted(
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
        "wavefronts",
        "down",
        "passes that shared loads take",
        _sum("shared_load.wavefronts"),
    ),
    _counted(
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
        "wavefronts",
        "down",
        "passes that shared stores take",
        _sum("shared_store.wavefronts"),
    ),
    _counted(
        "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
        "wavefronts",
        "down",
        "passes that all shared accesses take",
        _sum("shared_load.wavefronts", "shared_store.wavefronts", "shared_atomic.wavefronts"),
    ),
    _counted(
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
        "wavefronts",
        "down",
        "passes of shared loads lost to bank conflicts",
        _conflicts("shared_load"),
    ),
    _counted(
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
        "wavefronts",
        "down",
        "passes of shared stores lost to bank conflicts",
        _conflicts("shared_store"),
    ),
    _counted(
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
        "wavefronts",
        "down",
        "passes lost to bank conflicts",
        _conflicts("shared_load", "shared_store", "shared_atomic"),
    ),
    _counted(
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_atom.sum",
        "wavefronts",
        "down",
        "passes that shared atomics take",
        _sum("shared_atomic.wavefronts"),
    ),
    _counted(
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_atom.sum",
        "wavefronts",
        "down",
        "passes of shared atomics lost to bank conflicts",
        _conflicts("shared_atomic"),
    ),
    _counted(
        "smsp__inst_executed_op_shared_atom.sum",
        "inst",
        "down",
        "warp instructions that are shared atomics",
        _sum("shared_atomic.requests"),
    ),
    # atomics whose result nobody reads, which machine code turns into reductions; the engine counts all as such
    _counted(
        "l1tex__t_requests_pipe_lsu_mem_global_op_red.sum",
        "requests",
        "down",
        "global reduction requests of warps",
        _sum("global_atomic.requests"),
    ),
    _counted(
        "l1tex__t_sectors_pipe_lsu_mem_global_op_red.sum",
        "sectors",
        "down",
        "32-byte sectors that global reductions touch",
        _sum("global_atomic.sectors"),
    ),
    _counted(
        "lts__t_sectors_op_red.sum", "sectors", "down", "sectors of global reductions in L2", _sum("l2.atomic_sectors")
    ),
    # local memory
    _counted(
        "smsp__inst_executed_op_local_ld.sum",
        "inst",
        "down",
        "warp instructions that load local memory, without register spills",
        _sum("local_load.requests"),
    ),
    _counted(
        "smsp__inst_executed_op_local_st.sum",
        "inst",
        "down",
        "warp instructions that store local memory, without register spills",
        _sum("local_store.requests"),
    ),
    # throughput
    _modelled(
        "sm__throughput.avg.pct_of_peak_sustained_elapsed",
        "%",
        None,
        "busiest pipe of the SMs",
        _share_of_time("issue", "fp32", "int", "fp16", "fp64", "sfu", "tensor", "lsu"),
    ),
    _modelled(
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "%",
        None,
        "DRAM bandwidth used, of the data sheet's peak",
        _dram_pct,
    ),
    _modelled(
        "l1tex__throughput.avg.pct_of_peak_sustained_elapsed",
        "%",
        None,
        "load/store and shared-memory pipe used",
        _l1_pct,
    ),
    _modelled(
        "lts__throughput.avg.pct_of_peak_sustained_elapsed",
        "%",
        None,
        "L2 bandwidth used",
        _share_of_time("l2", "atomics"),
    ),
    _modelled(
        "sm__warps_active.avg.pct_of_peak_sustained_active",
        "%",
        "up",
        "theoretical occupancy (achieved is not modelled)",
        lambda seen: seen.longest.occupancy.theoretical_pct,
    ),
    _counted(
        "sm__maximum_warps_per_active_cycle_pct",
        "%",
        "up",
        "theoretical occupancy",
        lambda seen: seen.longest.occupancy.theoretical_pct,
    ),
    _only_ncu(
        "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
        "warps",
        "down",
        "warps waiting at a barrier, per instruction issued",
    ),
    _only_ncu(
        "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
        "warps",
        "down",
        "warps waiting for global or local memory, per instruction issued",
    ),
    # launch, of the launch that takes most of the time
    _counted("launch__registers_per_thread", "registers", "down", "registers per thread, from ptxas", _registers),
    _counted(
        "launch__shared_mem_per_block",
        "bytes",
        None,
        "static and dynamic shared memory",
        lambda seen: float(seen.longest.shape.shared_bytes_per_block),
    ),
    _counted(
        "launch__grid_size", "blocks", None, "blocks of the launch", lambda seen: float(seen.longest.shape.blocks)
    ),
    _counted(
        "launch__block_size",
        "threads",
        None,
        "threads per block",
        lambda seen: float(seen.longest.shape.threads_per_block),
    ),
    _counted(
        "launch__thread_count",
        "threads",
        None,
        "threads of the launch",
        lambda seen: float(seen.longest.shape.blocks * seen.longest.shape.threads_per_block),
    ),
    _counted(
        "launch__waves_per_multiprocessor", "waves", None, "rounds of resident blocks", lambda seen: seen.longest.waves
    ),
    _counted(
        "launch__occupancy_limit_blocks", "blocks", None, "blocks per SM that the block limit allows", _limit("blocks")
    ),
    _counted(
        "launch__occupancy_limit_registers", "blocks", None, "blocks per SM that registers allow", _limit("registers")
    ),
    _counted(
        "launch__occupancy_limit_shared_mem",
        "blocks",
        None,
        "blocks per SM that shared memory allows",
        _limit("shared_memory"),
    ),
    _counted(
        "launch__occupancy_limit_warps", "blocks", None, "blocks per SM that the thread limit allows", _limit("threads")
    ),
)

METRICS: Mapping[str, Metric] = {row.name: row for row in _ROWS}
