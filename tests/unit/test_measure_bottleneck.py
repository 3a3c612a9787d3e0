"""What binds a kernel, the evidence with figures, and advice that fits."""

from __future__ import annotations

from typing import Any

import pytest
from measure_samples import copy_counters, copy_module, copy_shape

from optiml.measure.bottleneck import binding_resource, bottleneck
from optiml.measure.hardware import A100
from optiml.measure.hotlines import hot_lines
from optiml.measure.metrics import Observation
from optiml.measure.model import model_launch
from optiml.ptx.counters import AllocationCounters, LineCounters, SharedCounters, SpaceCounters
from optiml.records import Bottleneck

MIB = 1 << 20


def observe(*, shape: dict[str, Any] | None = None, **counters: Any) -> Observation:
    launch = model_launch(
        copy_shape(**(shape or {})), copy_counters(**counters), module=copy_module(), hardware=A100
    )  # fmt: skip
    return Observation(
        counts=launch.counts, terms_us=launch.terms_us, time_us=launch.total_us, longest=launch, hardware=A100
    )


def diagnose(*, least_bytes: float | None = 128.0 * MIB, launches: int = 1, **fields: Any) -> Bottleneck:
    return bottleneck(observe(**fields), least_bytes=least_bytes, launches=launches, hot_line=3)


def test_a_coalesced_copy_is_bound_by_dram_and_has_little_left() -> None:
    found = diagnose()
    assert found.kind == "memory"
    assert "DRAM" in found.evidence[0]
    assert "(modelled)" in found.evidence[0]
    assert any("fewer bytes" in advice for advice in found.advice)


def test_scattered_loads_are_told_with_sectors_per_request_and_line() -> None:
    found = diagnose(sectors_per_request=32, lines_per_request=32)
    assert found.kind == "memory"
    assert "global loads move 32.0 sectors per request (4 would be ideal) (most at line 3)" in found.evidence
    assert any("neighbouring" in advice for advice in found.advice)


def test_reading_the_input_twice_is_told_against_what_the_problem_needs() -> None:
    found = diagnose(least_bytes=64.0 * MIB)
    assert any("134 MB cross the DRAM interface where the problem needs 67.1 MB" in item for item in found.evidence)
    assert any("once" in advice for advice in found.advice)


def test_bank_conflicts_call_for_padding() -> None:
    shared = SharedCounters(requests=128, wavefronts=32 * 128, ideal_wavefronts=128)
    found = diagnose(shared_load=shared)
    assert any("97 % of them are bank conflicts" in item for item in found.evidence)
    assert "pad" in found.advice[0]


def test_tiny_blocks_are_launch_bound() -> None:
    found = diagnose(shape={"blocks": 2_000_000, "threads_per_block": 32})
    assert found.kind == "launch"
    assert "starting 2,000,000 blocks of 32 threads" in found.evidence[1]
    assert "fewer blocks" in found.advice[0]


def test_a_tiny_problem_is_launch_bound() -> None:
    found = diagnose(shape={"blocks": 4}, blocks=4, array_bytes=4096, least_bytes=8192.0)
    assert found.kind == "launch"
    assert any("launching takes" in item for item in found.evidence)


def test_a_few_long_warps_are_latency_bound() -> None:
    warps = 16 * 8
    found = diagnose(
        shape={"blocks": 32},
        array_bytes=MIB,
        least_bytes=2.0 * MIB,
        block_executions={("copy", 0): warps, ("copy", 1): 1000 * warps, ("copy", 2): warps},
    )
    assert found.kind == "latency"
    assert any("32 blocks leave 70 % of 108 SMs idle" in item for item in found.evidence)
    assert any("more blocks" in advice for advice in found.advice)


def test_low_occupancy_names_its_limiter() -> None:
    found = diagnose(shape={"registers_per_thread": 255})
    assert any("occupancy is 12 %, limited by registers (1 blocks per SM)" in item for item in found.evidence)
    assert any("__launch_bounds__" in advice for advice in found.advice)


def test_queueing_atomics_call_for_reduction_first() -> None:
    atomic = SpaceCounters(requests=128, sectors=128, bytes=512, ideal_sectors=128, lines=128)
    found = diagnose(
        global_atomic=atomic,
        allocations={"total": AllocationCounters(bytes=4, atomic_sectors=128, distinct_atomic_sectors=1)},
    )
    assert found.kind == "memory"
    assert "one global atomic per block" in found.advice[0]


def test_local_arrays_are_told() -> None:
    local = SpaceCounters(requests=1280, sectors=5120, bytes=1280 * 128, ideal_sectors=5120, lines=1280)
    found = diagnose(local_load=local, local_store=local)
    assert any("local memory" in item for item in found.evidence)


def test_divergence_is_told_as_active_threads() -> None:
    warps = 16 * 8
    found = diagnose(
        thread_instructions=8 * 14 * warps,
        divergent_branches=warps,
        array_bytes=MIB,
        block_executions={("copy", 0): warps, ("copy", 1): 500 * warps, ("copy", 2): warps},
    )
    assert any(item.startswith("8.0 of 32 threads are active") and "diverge" in item for item in found.evidence)


def test_evidence_and_advice_are_never_empty_and_always_the_same() -> None:
    cases: list[dict[str, Any]] = [{}, {"sectors_per_request": 32}, {"least_bytes": None}, {"shape": {"blocks": 3}}]
    for fields in cases:
        found = diagnose(**fields)
        assert len(found.evidence) >= 2
        assert found.advice
        assert found == diagnose(**fields)


# --- hot lines -------------------------------------------------------------------------------------------------------
SOURCE = "// one\nint i = 0;\n    if (i < n) y[i] = x[i];\n"


def test_lines_are_ranked_by_the_binding_resource() -> None:
    assert binding_resource(observe()) == "sectors"
    lines = hot_lines(SOURCE, [(4096.0, copy_counters(sectors_per_request=32))], "sectors")
    assert [(line.line, line.source, line.sectors_per_request, line.share_pct) for line in lines] == [
        (3, "if (i < n) y[i] = x[i];", 32.0, 100.0)
    ]


def test_lines_without_memory_have_no_sectors_per_request() -> None:
    lines = hot_lines(SOURCE, [(1.0, copy_counters())], "instructions")
    assert [(line.line, line.sectors_per_request) for line in lines] == [(3, 4.0), (2, None)]
    assert sum(line.share_pct for line in lines) == pytest.approx(100.0)


def test_a_kernel_without_the_resource_is_ranked_by_instructions() -> None:
    lines = hot_lines(SOURCE, [(1.0, copy_counters())], "wavefronts")
    assert lines[0].line == 3


def test_at_most_five_lines_are_shown_and_a_line_outside_the_text_has_none() -> None:
    many = {number: LineCounters(warp_instructions=100 - number) for number in range(1, 30)}
    lines = hot_lines(SOURCE, [(1.0, copy_counters(lines=many))], "instructions")
    assert [line.line for line in lines] == [1, 2, 3, 4, 5]
    assert lines[4].source == ""


def test_the_weight_of_a_launch_counts() -> None:
    first = copy_counters(lines={1: LineCounters(warp_instructions=10)})
    second = copy_counters(lines={2: LineCounters(warp_instructions=10)})
    lines = hot_lines(SOURCE, [(1.0, first), (3.0, second)], "instructions")
    assert [(line.line, line.share_pct) for line in lines] == [(2, 75.0), (1, 25.0)]
