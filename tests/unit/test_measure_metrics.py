"""The metric table: names, units, and values that NVIDIA documents for simple access patterns."""

from __future__ import annotations

import re
from typing import Any

import pytest
from measure_samples import copy_counters, copy_module, copy_shape

from optiml.measure.hardware import A100
from optiml.measure.metrics import METRICS, Observation, metric_values
from optiml.measure.model import model_launch
from optiml.ptx.counters import SharedCounters

PER_REQUEST = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio"


def observe(**counters: Any) -> Observation:
    launch = model_launch(copy_shape(), copy_counters(**counters), module=copy_module(), hardware=A100)
    return Observation(
        counts=launch.counts, terms_us=launch.terms_us, time_us=launch.total_us, longest=launch, hardware=A100
    )


def test_names_are_those_of_nsight_compute() -> None:
    unit = r"(gpu|gpc|sm|smsp|l1tex|lts|dram|launch)"
    odd = [name for name in METRICS if not re.fullmatch(unit + r"__[a-z0-9_]+(\.[a-z0-9_]+)*", name)]
    assert odd == []
    assert all(row.description and row.source in ("counted", "modelled", "ncu") for row in METRICS.values())


@pytest.mark.parametrize("sectors", [4, 8, 16, 32])
def test_sectors_per_request_follow_the_stride(sectors: int) -> None:
    values = metric_values(observe(sectors_per_request=sectors))
    assert values[PER_REQUEST] == sectors
    assert values["smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.ratio"] == 128 / sectors


def test_counts_are_scaled_to_the_whole_grid() -> None:
    values = metric_values(observe(blocks=16))
    assert values["l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"] == 65536 * 8
    assert values["l1tex__t_sectors.sum"] == 2 * 65536 * 8 * 4
    assert values["dram__bytes.sum"] == 2 * (64 << 20)
    assert values["smsp__thread_inst_executed_per_inst_executed.ratio"] == 32.0


def test_what_cannot_be_told_is_none_and_not_zero() -> None:
    values = metric_values(observe(branches=0), (PER_REQUEST, "smsp__cycles_active.avg",
                           "smsp__sass_average_branch_targets_threads_uniform.pct"))  # fmt: skip
    assert list(values) == [
        PER_REQUEST, "smsp__cycles_active.avg", "smsp__sass_average_branch_targets_threads_uniform.pct",
    ]  # fmt: skip
    assert values["smsp__cycles_active.avg"] is None
    assert values["smsp__sass_average_branch_targets_threads_uniform.pct"] is None


def test_bank_conflicts_are_wavefronts_beyond_the_least() -> None:
    values = metric_values(observe(shared_load=SharedCounters(requests=10, wavefronts=320, ideal_wavefronts=10)))
    scale = 65536 / 16
    assert values["l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"] == 310 * scale
    assert values["l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"] == 320 * scale


def test_launch_metrics_describe_the_longest_launch() -> None:
    values = metric_values(observe())
    assert values["launch__grid_size"] == 65536
    assert values["launch__block_size"] == 256
    assert values["launch__registers_per_thread"] == 16
    assert values["launch__occupancy_limit_warps"] == 8
    assert values["launch__occupancy_limit_shared_mem"] is None
    assert values["sm__maximum_warps_per_active_cycle_pct"] == 100.0


def test_time_is_in_nanoseconds_and_throughputs_in_per_cent() -> None:
    seen = observe()
    values = metric_values(seen)
    assert values["gpu__time_duration.sum"] == pytest.approx(1000 * seen.time_us)
    percentages = {name: value for name, value in values.items() if METRICS[name].unit == "%" and value is not None}
    assert all(0.0 <= value <= 100.0 for value in percentages.values()), percentages
    dram = percentages["dram__throughput.avg.pct_of_peak_sustained_elapsed"]
    assert dram == pytest.approx(100 * 2 * (64 << 20) / (A100.dram_bytes_per_s * seen.time_us * 1e-6))
