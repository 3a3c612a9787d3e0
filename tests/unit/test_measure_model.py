"""The time model on hand-made counters: scaling, terms, and the order of kernels that differ in one thing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from measure_samples import copy_counters, copy_module, copy_shape

from optiml.errors import InvalidInput
from optiml.measure.hardware import A100, H200, Hardware
from optiml.measure.model import TERMS, LaunchModel, l1_share_bytes, model_launch
from optiml.measure.traffic import Grid, dram_bytes, traffic_of
from optiml.ptx.counters import AllocationCounters, SharedCounters, SpaceCounters


def modelled(
    *, hardware: Hardware = A100, shape: dict[str, Any] | None = None, **counters: Any
) -> LaunchModel:  # fmt: skip
    return model_launch(copy_shape(**(shape or {})), copy_counters(**counters), module=copy_module(), hardware=hardware)


def test_a_copy_of_64_mib_runs_at_about_dram_speed() -> None:
    launch = modelled()
    moved = 2 * (64 << 20)
    assert launch.counts["dram.read_bytes"] + launch.counts["dram.write_bytes"] == moved
    assert launch.binding == "dram"
    assert 0.65 < moved / A100.dram_bytes_per_s * 1e6 / launch.total_us < 0.9


def test_more_dram_bandwidth_makes_a_copy_faster() -> None:
    assert modelled(hardware=H200).total_us < 0.6 * modelled().total_us


def test_a_sample_of_any_size_gives_the_same_answer() -> None:
    small, large = modelled(blocks=8), modelled(blocks=64)
    assert small.total_us == pytest.approx(large.total_us)
    assert small.counts == pytest.approx(large.counts)


def test_scattered_accesses_cost_more_than_coalesced_ones() -> None:
    scattered = modelled(sectors_per_request=32, lines_per_request=32)
    assert scattered.total_us > 2.0 * modelled().total_us
    assert scattered.binding in ("lsu", "l2")


def test_lines_matter_not_only_sectors() -> None:
    together = modelled(sectors_per_request=32, lines_per_request=8)
    apart = modelled(sectors_per_request=32, lines_per_request=32)
    assert apart.terms_us["lsu"] == pytest.approx(4 * together.terms_us["lsu"])


def test_many_tiny_blocks_are_bound_by_starting_them() -> None:
    tiny = modelled(shape={"blocks": 2_000_000, "threads_per_block": 32})
    assert tiny.binding == "dispatch"


def test_bank_conflicts_lengthen_the_load_store_term() -> None:
    free = SharedCounters(requests=128, wavefronts=128, ideal_wavefronts=128)
    conflicting = SharedCounters(requests=128, wavefronts=32 * 128, ideal_wavefronts=128)
    assert modelled(shared_load=conflicting).terms_us["lsu"] > 5 * modelled(shared_load=free).terms_us["lsu"]


def test_atomics_on_one_address_queue() -> None:
    atomic = SpaceCounters(requests=128, sectors=128, bytes=128 * 4, ideal_sectors=128, lines=128)
    counter = {"total": AllocationCounters(bytes=4, atomic_sectors=128, distinct_atomic_sectors=1)}
    spread = {"bins": AllocationCounters(bytes=1 << 24, atomic_sectors=128, distinct_atomic_sectors=128)}
    contended = modelled(global_atomic=atomic, allocations=counter)
    relaxed = modelled(global_atomic=atomic, allocations=spread)
    assert contended.binding == "atomics"
    assert contended.terms_us["atomics"] > 50 * relaxed.terms_us["atomics"]


def test_few_blocks_leave_sms_idle() -> None:
    full = modelled(shape={"blocks": 108 * 8}, array_bytes=1 << 20)
    one = modelled(shape={"blocks": 108}, array_bytes=1 << 20)
    lonely = modelled(shape={"blocks": 1}, blocks=1, array_bytes=1 << 20)
    assert one.terms_us["issue"] == pytest.approx(full.terms_us["issue"] / 8)
    assert lonely.terms_us["issue"] == pytest.approx(one.terms_us["issue"])


def test_a_block_more_than_fits_costs_another_round() -> None:
    fits = modelled(shape={"blocks": 108 * 8}, array_bytes=1 << 20)
    spills_over = modelled(shape={"blocks": 108 * 8 + 1}, array_bytes=1 << 20)
    assert (fits.waves, spills_over.waves > 1.0) == (1.0, True)
    assert spills_over.terms_us["latency"] == pytest.approx(2 * fits.terms_us["latency"])


def test_low_occupancy_lengthens_the_latency_term() -> None:
    hungry = modelled(shape={"registers_per_thread": 255})
    assert hungry.occupancy.limiter == "registers"
    assert hungry.terms_us["latency"] > 5 * modelled().terms_us["latency"]


def test_every_term_is_reported_and_the_total_follows_from_them() -> None:
    launch = modelled()
    assert tuple(launch.terms_us) == TERMS
    working = [value for name, value in launch.terms_us.items() if name != "launch"]
    expected = launch.terms_us["launch"] + max(working) + A100.overlap_loss * (sum(working) - max(working))
    assert launch.total_us == pytest.approx(expected)


def test_a_block_that_fits_on_no_sm_is_refused() -> None:
    with pytest.raises(InvalidInput, match="shared_memory"):
        modelled(shape={"shared_bytes_per_block": 200 * 1024})


def test_no_block_no_model() -> None:
    with pytest.raises(InvalidInput, match="no block ran"):
        modelled(blocks=0)


def test_resident_blocks_share_what_shared_memory_leaves_of_l1() -> None:
    assert l1_share_bytes(A100, shared_bytes_per_block=0, blocks_per_sm=8) == 24 * 1024
    assert l1_share_bytes(A100, shared_bytes_per_block=31 * 1024, blocks_per_sm=4) == 16 * 1024


# --- traffic behind L1 -----------------------------------------------------------------------------------------------
GRID = Grid(blocks_run=16, blocks_total=1600, busy_sms=100, resident_blocks=800, l1_bytes=192 * 1024.0)
L2 = 40 << 20


def loads(**fields: int) -> AllocationCounters:
    return AllocationCounters(**{"bytes": 1 << 30, "load_sectors": 0, **fields})


def test_a_stream_grows_with_the_grid_up_to_its_size() -> None:
    streamed = traffic_of(loads(load_misses=1600, distinct_load_sectors=1600), GRID)
    assert (streamed.touched, streamed.asked) == (160_000, 160_000)
    assert dram_bytes([streamed], GRID, l2_bytes=L2)[0] == 160_000 * 32
    small = traffic_of(loads(bytes=320_000, load_misses=1600, distinct_load_sectors=1600), GRID)
    assert small.touched == 10_000


def test_an_array_that_all_blocks_read_is_read_from_dram_once() -> None:
    shared = traffic_of(loads(bytes=32 << 20, load_misses=16 * 50_000, distinct_load_sectors=50_000), GRID)
    read, _ = dram_bytes([shared], GRID, l2_bytes=L2)
    assert read <= 32 << 20
    assert shared.asked == 16 * 50_000 * 100


def test_a_small_shared_array_stays_in_l1_from_block_to_block() -> None:
    weights = traffic_of(loads(bytes=16_384, load_misses=16 * 512, distinct_load_sectors=512), GRID)
    assert weights.asked == 100 * 512  # once per SM instead of once per block


def test_passes_over_more_than_l2_go_to_dram_each_time() -> None:
    # 800 resident blocks read 100 KB each, three times, and L1 holds none of it: 80 MB at a time against 40 MB of L2.
    three_passes = traffic_of(loads(load_misses=16 * 3 * 3200, distinct_load_sectors=16 * 3200), GRID)
    once = 3200 * 1600 * 32
    read, _ = dram_bytes([three_passes], GRID, l2_bytes=L2)
    assert once + 0.9 * once < read < 3 * once
    assert dram_bytes([three_passes], GRID, l2_bytes=1 << 30)[0] == pytest.approx(once)


def test_read_bytes_lie_between_what_is_touched_and_what_l2_is_asked_for() -> None:
    for misses, distinct in ((100, 100), (1600, 100), (16_000, 1600), (480_000, 160_000)):
        item = traffic_of(loads(load_misses=misses, distinct_load_sectors=distinct), GRID)
        read, _ = dram_bytes([item], GRID, l2_bytes=L2)
        assert 32 * item.touched <= read <= 32 * item.asked + 1e-6


def test_stores_to_one_sector_are_written_once() -> None:
    item = traffic_of(loads(store_sectors=64_000, distinct_store_sectors=1600), GRID)
    assert dram_bytes([item], GRID, l2_bytes=L2)[1] == 160_000 * 32


def test_atomics_read_and_write_what_they_update() -> None:
    item = traffic_of(loads(bytes=1024, atomic_sectors=1600, distinct_atomic_sectors=32), GRID)
    assert dram_bytes([item], GRID, l2_bytes=L2) == (1024, 1024)


def test_atomics_on_few_sectors_stay_there_and_others_grow_with_the_grid() -> None:
    hot = traffic_of(loads(atomic_sectors=1600, distinct_atomic_sectors=4), GRID)
    spread = traffic_of(loads(atomic_sectors=1600, distinct_atomic_sectors=1600), GRID)
    assert (hot.updated, spread.updated) == (4, 160_000)


def test_local_memory_beyond_l1_reaches_l2() -> None:
    module = copy_module()
    spread = SpaceCounters(requests=128, sectors=512, bytes=128 * 128, ideal_sectors=512, lines=128)
    counters = copy_counters(local_load=spread)
    small, large = (
        dataclasses.replace(
            module, functions={"copy": dataclasses.replace(module.functions["copy"], local_bytes=local_bytes)}
        )
        for local_bytes in (16, 1024)
    )
    fits = model_launch(copy_shape(), counters, module=small, hardware=A100)
    spilled = model_launch(copy_shape(), counters, module=large, hardware=A100)
    assert fits.counts["l2.read_sectors"] < spilled.counts["l2.read_sectors"]
