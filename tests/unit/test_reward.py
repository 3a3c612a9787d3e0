"""The composite reward: gates, parts, weights, and what it may never do."""

from __future__ import annotations

import math
from typing import Any

import pytest

from optiml.records import Bottleneck, Evaluation, Profile, SpeedOfLight, Time, Verdict
from optiml.reward import (
    DRAM_BYTES,
    DRAM_PCT,
    INSTRUCTIONS,
    ISSUE_PCT,
    L1_SECTORS,
    OCCUPANCY_PCT,
    REGISTERS,
    SM_PCT,
    SPILL_CONDITION,
    gate_reward,
    reward,
)

MEMORY_BOUND = {
    DRAM_BYTES: 1e8, L1_SECTORS: 1e7, INSTRUCTIONS: 1e6, DRAM_PCT: 80.0, SM_PCT: 20.0, OCCUPANCY_PCT: 100.0,
    REGISTERS: 32.0, ISSUE_PCT: 10.0,
}  # fmt: skip


def verdict(status: str = "accepted", reason: str | None = None, levels: tuple[str, ...] = ("L0", "L1")) -> Verdict:
    fields: dict[str, Any] = {"status": status, "reason": reason, "levels": levels}
    return Verdict(kernel_id="k", detail=None, summary="", next_action="", **fields)


def profile(
    time_us: float, *, metrics: dict[str, float | None] | None = None, floor_us: float | None = 10.0, spills: int = 0,
    source: Any = "modelled",
) -> Profile:  # fmt: skip
    return Profile(
        kernel_id="k",
        axes={},
        time=Time(median_us=time_us, p10_us=None, p90_us=None, runs=0, noise_pct=None, source=source),
        metrics=MEMORY_BOUND if metrics is None else metrics,
        metric_source={},
        bottleneck=Bottleneck(kind="memory", evidence=(), advice=()),
        hot_lines=(),
        occupancy=None,
        speed_of_light=None if floor_us is None else SpeedOfLight(us=floor_us, pct=0.0, bound="dram"),
        summary="",
        next_action="",
        conditions={SPILL_CONDITION: str(spills)},
    )


def evaluation(profiled: Profile | None) -> Evaluation:
    return Evaluation(kernel_id="k", verdict=verdict(), profile=profiled, fingerprint=None, seconds=0.0)


@pytest.mark.parametrize(
    ("reason", "levels", "gate"),
    [
        ("compile_failed", (), -1.0),
        ("forbidden_source", (), -1.0),
        ("bad_launch", ("L0",), -0.9),
        ("timed_out", ("L0", "L1"), -0.9),
        ("wrong_values", ("L0",), -0.8),
        ("fault", ("L0",), -0.8),
        ("wrong_values", ("L0", "L1"), -0.6),
        ("hard_coded", ("L0", "L1"), -0.6),
        ("nonfinite", ("L0",), -0.6),
        ("race", ("L0", "L1", "L2"), -0.6),
    ],
)
def test_a_failure_is_scored_by_how_far_the_kernel_came(reason: str, levels: tuple[str, ...], gate: float) -> None:
    scored = gate_reward(verdict("rejected", reason, levels))
    assert (scored.total, scored.guardrails) == (gate, gate)
    assert (scored.time, scored.proxies, scored.judge) == (0.0, 0.0, 0.0)


def test_an_unverified_kernel_is_scored_below_every_accepted_one() -> None:
    assert gate_reward(verdict("unverified")).total == -0.6


def test_an_accepted_kernel_has_no_gate() -> None:
    with pytest.raises(ValueError, match="accepted"):
        gate_reward(verdict())


def test_a_rejected_evaluation_gets_its_gate_and_an_unprofiled_one_the_mildest() -> None:
    rejected = Evaluation(
        kernel_id="k", verdict=verdict("rejected", "compile_failed"), profile=None, fingerprint=None, seconds=0.0
    )
    assert reward(rejected, profile(100.0), judge_score=1.0, visits=0).total == -1.0
    assert reward(evaluation(None), profile(100.0), judge_score=1.0, visits=0).total == -0.6


def test_the_root_itself_scores_zero() -> None:
    root = profile(100.0)
    scored = reward(evaluation(root), root, judge_score=0.5, visits=1)
    assert (scored.time, scored.proxies, scored.guardrails, scored.judge, scored.total) == (0.0, 0.0, 0.0, 0.0, 0.0)


def test_the_time_part_is_one_at_the_speed_of_light_and_half_of_it_halfway_in_logs() -> None:
    root = profile(1000.0)
    assert reward(evaluation(profile(10.0)), root, judge_score=0.5, visits=1).time == pytest.approx(1.0)
    assert reward(evaluation(profile(100.0)), root, judge_score=0.5, visits=1).time == pytest.approx(0.5)


def test_a_root_at_the_speed_of_light_is_scored_against_a_ten_per_cent_gap() -> None:
    root = profile(10.0)
    slower = reward(evaluation(profile(10.5)), root, judge_score=0.5, visits=1)
    assert slower.time == pytest.approx(-math.log(1.05) / math.log(1.10))


def test_without_a_speed_of_light_a_tenfold_gain_counts_as_one() -> None:
    root = profile(100.0, floor_us=None)
    assert reward(evaluation(profile(10.0, floor_us=None)), root, judge_score=0.5, visits=1).time == pytest.approx(1.0)


def test_halved_dram_bytes_count_more_than_halved_instructions_when_memory_bound() -> None:
    root = profile(100.0)
    bytes_halved = profile(100.0, metrics={**MEMORY_BOUND, DRAM_BYTES: 5e7})
    instructions_halved = profile(100.0, metrics={**MEMORY_BOUND, INSTRUCTIONS: 5e5})
    of_bytes = reward(evaluation(bytes_halved), root, judge_score=0.5, visits=1).proxies
    of_instructions = reward(evaluation(instructions_halved), root, judge_score=0.5, visits=1).proxies
    assert of_bytes == pytest.approx(0.4 / (0.3 + 0.2 + 0.4), rel=0.02)  # L1 % is missing: its weight is shared
    assert 0.0 < of_instructions < 0.01


def test_halved_instructions_count_most_when_compute_bound() -> None:
    compute_bound = {**MEMORY_BOUND, DRAM_PCT: 10.0, SM_PCT: 90.0}
    better = profile(100.0, metrics={**compute_bound, INSTRUCTIONS: 5e5})
    scored = reward(evaluation(better), profile(100.0, metrics=compute_bound), judge_score=0.5, visits=1)
    assert scored.proxies == pytest.approx(0.45 / 0.9, rel=0.02)


def test_occupancy_counts_when_neither_dram_nor_sm_is_busy() -> None:
    latency_bound: dict[str, float | None] = {**MEMORY_BOUND, DRAM_PCT: 20.0, SM_PCT: 20.0, OCCUPANCY_PCT: 25.0}
    better = profile(100.0, metrics={**latency_bound, OCCUPANCY_PCT: 100.0})
    scored = reward(evaluation(better), profile(100.0, metrics=latency_bound), judge_score=0.5, visits=1)
    assert scored.proxies == pytest.approx(0.3 * 75 / 80)


def test_a_missing_metric_is_left_out_rather_than_taken_as_zero() -> None:
    missing: dict[str, float | None] = {**MEMORY_BOUND, DRAM_BYTES: None}
    scored = reward(evaluation(profile(100.0, metrics=missing)), profile(100.0), judge_score=0.5, visits=1)
    assert scored.proxies == 0.0


def test_better_proxies_never_turn_a_slower_kernel_into_a_win() -> None:
    better_looking = profile(101.0, metrics={**MEMORY_BOUND, DRAM_BYTES: 1e7, L1_SECTORS: 1e6})
    scored = reward(evaluation(better_looking), profile(100.0), judge_score=1.0, visits=0)
    assert scored.proxies > 0.5
    assert scored.total <= 0.0


def test_new_spills_and_lost_occupancy_are_penalised() -> None:
    root = profile(100.0)
    spilling = reward(evaluation(profile(50.0, spills=16)), root, judge_score=0.5, visits=1)
    assert spilling.guardrails == pytest.approx(-0.3)
    hungry = profile(50.0, metrics={**MEMORY_BOUND, REGISTERS: 64.0, OCCUPANCY_PCT: 50.0})
    assert reward(evaluation(hungry), root, judge_score=0.5, visits=1).guardrails == pytest.approx(-0.3 * math.log(2))
    harmless = profile(50.0, metrics={**MEMORY_BOUND, REGISTERS: 64.0})
    assert reward(evaluation(harmless), root, judge_score=0.5, visits=1).guardrails == 0.0


def test_more_work_is_penalised_only_where_the_time_did_not_improve() -> None:
    more_work = {**MEMORY_BOUND, DRAM_BYTES: 2e8}
    root = profile(100.0)
    slower = reward(evaluation(profile(100.0, metrics=more_work)), root, judge_score=0.5, visits=1)
    faster = reward(evaluation(profile(90.0, metrics=more_work)), root, judge_score=0.5, visits=1)
    assert slower.guardrails == pytest.approx(-0.4 * math.log(2))
    assert faster.guardrails == 0.0


def test_the_judge_fades_with_visits() -> None:
    root = profile(100.0)
    parts = [reward(evaluation(root), root, judge_score=1.0, visits=visits).judge for visits in (0, 1, 3)]
    assert parts == [1.0, 0.5, 0.25]


def test_a_measured_time_below_the_speed_of_light_is_not_believed() -> None:
    root = profile(100.0, source="measured")
    assert reward(evaluation(profile(9.0, source="measured")), root, judge_score=0.5, visits=1).total == -0.6
    assert reward(evaluation(profile(9.0)), profile(100.0), judge_score=0.5, visits=1).total > 0.6


def test_the_total_weighs_the_four_parts() -> None:
    root = profile(1000.0)
    better = profile(100.0, metrics={**MEMORY_BOUND, DRAM_BYTES: 5e7}, spills=8)
    scored = reward(evaluation(better), root, judge_score=1.0, visits=0)
    expected = 0.7 * scored.time + 0.2 * scored.proxies + 0.2 * scored.guardrails + 0.1 * scored.judge
    assert scored.total == pytest.approx(expected)
    assert scored.guardrails == pytest.approx(-0.3)
