"""Comparing two profiles: deterministic, and never fooled by a small share of the time."""

from __future__ import annotations

from typing import Any

import pytest

from optiml.errors import InvalidInput
from optiml.measure.compare import COSTS, compare
from optiml.records import BenchProfile, Bottleneck, Comparison, Profile, Time

DRAM, L2, L1, SHARED, INSTRUCTIONS = COSTS
BASE: dict[str, float | None] = {DRAM: 128e6, L2: 4e6, L1: 4e6, SHARED: 0.0, INSTRUCTIONS: 1e6}


def profile(time_us: float = 100.0, *, identity: str = "new", **fields: Any) -> Profile:
    costs = {**BASE, **fields.pop("costs", {})}
    spread = fields.pop("spread", (None, None))
    shown = fields.pop("metrics", costs)
    time = Time(
        median_us=time_us, p10_us=spread[0], p90_us=spread[1], runs=0, noise_pct=None,
        source=fields.pop("source", "modelled"),
    )  # fmt: skip
    entry = BenchProfile(
        axes=fields.pop("axes", {"n": 1024}),
        weight=1.0,
        time=time,
        metrics=costs,
        terms_us={},
        blocks_total=1,
        blocks_run=1,
    )
    return Profile(
        kernel_id=identity,
        axes=entry.axes,
        time=time,
        metrics=shown,
        metric_source={},
        bottleneck=Bottleneck(kind="memory", evidence=(), advice=()),
        hot_lines=(),
        occupancy=None,
        speed_of_light=None,
        summary="",
        next_action="",
        conditions={"device": fields.pop("device", "NVIDIA A100 (emulated)")},
        bench=(entry,),
        **fields,
    )


OLD = profile(identity="old")


def against_old(time_us: float = 100.0, **costs: float) -> Comparison:
    names = {"dram": DRAM, "l2": L2, "l1": L1, "shared": SHARED, "instructions": INSTRUCTIONS}
    return compare(profile(time_us, costs={names[name]: value for name, value in costs.items()}), OLD)


def test_the_same_kernel_is_the_same() -> None:
    answer = compare(OLD, OLD)
    assert (answer.verdict, answer.ratio, dict(answer.metric_changes)) == ("same", 1.0, {})


def test_another_text_with_the_same_costs_is_the_same() -> None:
    answer = against_old()
    assert (answer.verdict, answer.ratio, dict(answer.metric_changes)) == ("same", 1.0, {})


def test_differences_below_one_per_cent_are_the_same() -> None:
    assert against_old(100.5, instructions=1.005e6).verdict == "same"
    assert against_old(99.5, dram=127.5e6).verdict == "same"


def test_an_extra_pass_is_slower_even_where_another_resource_binds() -> None:
    hidden = against_old(100.0, l1=4e6 + 0.025 * 128e6 / 32, l2=4.1e6)
    assert hidden.verdict == "slower"
    assert "more bytes through L1" in hidden.reasons[0]


def test_an_extra_pass_that_hides_in_a_huge_kernel_is_slower() -> None:
    # A matrix product requests 1e9 sectors; one more pass over its 128 MB is 0.4 % of them and of the time.
    old = profile(3000.0, identity="old", costs={L1: 1e9})
    new = profile(3001.0, costs={L1: 1e9 + 4e6})
    assert compare(new, old).verdict == "slower"


def test_an_extra_pass_that_the_model_calls_faster_is_not_believed() -> None:
    assert against_old(90.0, l1=8e6).verdict == "inconclusive"


def test_less_time_and_less_traffic_is_faster() -> None:
    answer = against_old(80.0, l1=2e6, dram=64e6)
    assert (answer.verdict, answer.ratio) == ("faster", 1.25)
    assert answer.metric_changes == {L1: 0.5, DRAM: 0.5}


def test_a_trade_of_one_cost_for_another_follows_the_time() -> None:
    assert against_old(80.0, l1=2e6, shared=1e6).verdict == "faster"
    assert against_old(120.0, l1=2e6, shared=1e8).verdict == "slower"


def test_a_decisive_gain_overrules_costs_that_rose() -> None:
    assert against_old(60.0, instructions=1.2e6).verdict == "faster"


def test_more_time_while_every_cost_fell_is_inconclusive() -> None:
    answer = against_old(110.0, l1=2e6)
    assert answer.verdict == "inconclusive"
    assert any("not calibrated" in reason for reason in answer.reasons)


def test_traffic_that_rises_without_a_gain_is_slower() -> None:
    assert against_old(100.0, l2=4.2e6).verdict == "slower"


def test_instructions_that_rise_in_the_shadow_of_memory_are_the_same() -> None:
    answer = against_old(100.0, instructions=1.2e6)
    assert answer.verdict == "same"
    assert any("warp instructions" in reason for reason in answer.reasons)


def test_costs_that_were_not_asked_for_still_count() -> None:
    new = profile(identity="new", costs={L1: 8e6}, metrics={})
    assert compare(new, profile(identity="old", metrics={})).verdict == "slower"


def test_measured_and_modelled_never_mix() -> None:
    with pytest.raises(InvalidInput, match="measured"):
        compare(profile(source="measured"), OLD)


def test_profiles_of_two_devices_or_sizes_are_refused() -> None:
    with pytest.raises(InvalidInput, match="H100"):
        compare(profile(device="NVIDIA H100 (emulated)"), OLD)
    with pytest.raises(InvalidInput, match="sizes"):
        compare(profile(axes={"n": 2048}), OLD)


@pytest.mark.parametrize(
    ("time_us", "spread", "verdict"),
    [
        (50.0, (49.0, 51.0), "faster"),
        (150.0, (149.0, 151.0), "slower"),
        (97.0, (90.0, 104.0), "inconclusive"),
        (100.2, (99.0, 101.0), "same"),
        (50.0, (None, None), "inconclusive"),
    ],
)
def test_measured_times_are_told_apart_by_their_ranges(
    time_us: float, spread: tuple[float | None, float | None], verdict: str
) -> None:
    old = profile(identity="old", source="measured", spread=(95.0, 105.0))
    assert compare(profile(time_us, source="measured", spread=spread), old).verdict == verdict
