"""The composite reward: time, proxy metrics, guardrails and the judge, kept apart and then summed.

The reward says where to search on. It never decides what the answer is: that is time and correctness alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from optiml.records import Evaluation, Profile, Reason, Reward, Verdict

FORMULA = "reward-1"  # change it with any change of the formulas below: cached and journalled rewards depend on it

TIME_WEIGHT, PROXY_WEIGHT, GUARDRAIL_WEIGHT, JUDGE_WEIGHT = 0.70, 0.20, 0.20, 0.10

BUILD_GATE, LAUNCH_GATE, L0_GATE, L1_GATE = -1.0, -0.9, -0.8, -0.6
_BUILD_REASONS: frozenset[Reason] = frozenset({"host_escape", "forbidden_source", "compile_failed", "resource_limit"})
_LAUNCH_REASONS: frozenset[Reason] = frozenset({"bad_launch", "timed_out"})
_VALUE_REASONS: frozenset[Reason] = frozenset({"wrong_values", "imprecise", "unwritten_output", "fault"})

LEAST_LOG_GAP = math.log(1.10)  # an input kernel closer to the speed of light than this is scored as if 10 % away
LOG_GAP_WITHOUT_FLOOR = math.log(10.0)  # a problem without flops and bytes: a tenfold gain counts as 1
LOWER_TRUST = 0.95  # a measured time below this share of the speed of light is not believed

DRAM_PCT = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
SM_PCT = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
L1_PCT = "l1tex__throughput.avg.pct_of_peak_sustained_elapsed"
OCCUPANCY_PCT = "sm__warps_active.avg.pct_of_peak_sustained_active"
ISSUE_PCT = "smsp__issue_active.avg.pct_of_peak_sustained_active"
DRAM_BYTES = "dram__bytes.sum"
L1_SECTORS = "l1tex__t_sectors.sum"
INSTRUCTIONS = "smsp__inst_executed.sum"
REGISTERS = "launch__registers_per_thread"
SPILL_CONDITION = "spill_bytes_per_thread"  # in Profile.conditions: ptxas reports it, Nsight Compute has no name for it

_WORK = (DRAM_BYTES, L1_SECTORS, INSTRUCTIONS)
_MEMORY_WEIGHTS = {DRAM_BYTES: 0.40, L1_SECTORS: 0.30, DRAM_PCT: 0.20, L1_PCT: 0.10}
_COMPUTE_WEIGHTS = {INSTRUCTIONS: 0.45, SM_PCT: 0.35, L1_PCT: 0.10, L1_SECTORS: 0.10}
_LATENCY_WEIGHTS = {OCCUPANCY_PCT: 0.30, ISSUE_PCT: 0.30, L1_SECTORS: 0.20, INSTRUCTIONS: 0.20}
LATENCY_BOUND_BELOW_PCT = 60.0


def gate_reward(verdict: Verdict) -> Reward:
    """Reward of a kernel that was not accepted; the gate stands in the guardrail part.

        does not build, or reaches for the host      -1.0
        does not launch or does not end              -0.9
        wrong at L0                                  -0.8
        wrong at L1 or above, or unverified          -0.6

    Non-finite values, races and every sign of cheating count as an L1 failure wherever they show. Nothing is known of
    an unverified kernel; it is scored like the mildest failure, so that it is never preferred to an accepted one.

    Raises:
        ValueError: the verdict is `accepted`.

    Source: design note on search, §3.2.
    """
    if verdict.status == "accepted":
        raise ValueError("an accepted kernel is scored by reward(), not by its gate")
    if verdict.reason in _BUILD_REASONS:
        gate = BUILD_GATE
    elif verdict.reason in _LAUNCH_REASONS:
        gate = LAUNCH_GATE
    elif verdict.reason in _VALUE_REASONS and not {"L1", "L2"} & set(verdict.levels):
        gate = L0_GATE
    else:
        gate = L1_GATE
    return _gated(gate)


def reward(evaluation: Evaluation, root: Profile, *, judge_score: float, visits: int) -> Reward:
    """Reward of one evaluated kernel against the kernel that the search started from.

        time        R_t = clip(ln(T_root / T) / max(ln(T_root / T_sol), ln 1.10), -1, 1)
        proxies     R_p = sum of weight x d over the metrics that both profiles have
                    d = clip(-ln(m / m_root) / ln 2, -1, 1)                 for work (bytes, sectors, instructions)
                    d = clip((m - m_root) / (100 - m_root + 5), -1, 1)      for per cent of peak
        guardrails  -P; P = 0.3 [spills grew] + 0.3 ln+(registers / root's) if occupancy fell too
                            + 0.4 max ln+(work / root's) if the time did not improve; at most 1
        judge       (2 J - 1) / (1 + N), J in 0..1; fades as the node is measured
        total       clip(0.70 time + 0.20 proxies + 0.20 guardrails + 0.10 judge, -1, 1)

    Weights of the proxies follow what bounds the ROOT: memory and compute weights mixed by
    b = sigmoid((DRAM % - SM %) / 10); occupancy, issue and work when both are below 60 % (latency-bound). A metric that
    either profile lacks is left out and the others share its weight. Utilisation may rise on a slower kernel, so a
    kernel slower than the root never totals more than the root itself (0). A measured time below 0.95 T_sol is not
    believed and gets the L1 gate; a modelled one cannot cheat and is clipped at 1. Without T_sol (a problem without
    `flops` and `bytes`) a tenfold gain counts as 1.

    Args:
        judge_score: J, 0..1; 0.5 is neutral.
        visits: N, finished evaluations of this node, at least 0.

    Source: design note on search, §3.2; the latency-bound weights are ours.
    """
    profile = evaluation.profile
    if evaluation.verdict.status != "accepted":
        return gate_reward(evaluation.verdict)
    if profile is None:
        return _gated(L1_GATE)  # right, but it could not be profiled: nothing speaks for it
    floor_us = None if root.speed_of_light is None else root.speed_of_light.us
    time_us, root_us = profile.time.median_us, root.time.median_us
    if profile.time.source == "measured" and floor_us is not None and time_us < LOWER_TRUST * floor_us:
        return _gated(L1_GATE)
    time = _time_part(time_us, root_us, floor_us)
    proxies = _proxy_part(profile.metrics, root.metrics)
    guardrails = -_penalty(profile, root)
    judge = (2.0 * min(1.0, max(0.0, judge_score)) - 1.0) / (1.0 + visits)
    total = (
        TIME_WEIGHT * time + PROXY_WEIGHT * proxies + GUARDRAIL_WEIGHT * guardrails + JUDGE_WEIGHT * judge
    )  # fmt: skip
    if time_us > root_us:
        total = min(total, 0.0)
    return Reward(time=time, proxies=proxies, guardrails=guardrails, judge=judge, total=_clip(total))


def _gated(gate: float) -> Reward:
    return Reward(time=0.0, proxies=0.0, guardrails=gate, judge=0.0, total=gate)


def _time_part(time_us: float, root_us: float, floor_us: float | None) -> float:
    gap = LOG_GAP_WITHOUT_FLOOR if floor_us is None else max(math.log(root_us / floor_us), LEAST_LOG_GAP)
    return _clip(math.log(root_us / time_us) / gap)


def _proxy_part(metrics: Mapping[str, float | None], root: Mapping[str, float | None]) -> float:
    weighted, used = 0.0, 0.0
    for name, weight in _proxy_weights(root).items():
        new, old = metrics.get(name), root.get(name)
        if new is None or old is None:
            continue
        used += weight
        weighted += weight * (_work_gain(new, old) if name in _WORK else _utilisation_gain(new, old))
    return _clip(weighted / used) if used else 0.0


def _proxy_weights(root: Mapping[str, float | None]) -> dict[str, float]:
    dram, sm = root.get(DRAM_PCT), root.get(SM_PCT)
    if dram is None or sm is None:
        memory_bound = 0.5
    elif max(dram, sm) < LATENCY_BOUND_BELOW_PCT:
        return _LATENCY_WEIGHTS
    else:
        memory_bound = 1.0 / (1.0 + math.exp(-(dram - sm) / 10.0))
    mixed = {name: memory_bound * weight for name, weight in _MEMORY_WEIGHTS.items()}
    for name, weight in _COMPUTE_WEIGHTS.items():
        mixed[name] = mixed.get(name, 0.0) + (1.0 - memory_bound) * weight
    return mixed


def _work_gain(new: float, old: float) -> float:
    """+1 where the work halved, -1 where it doubled."""
    if new == old:
        return 0.0
    if new <= 0 or old <= 0:
        return 1.0 if new < old else -1.0
    return _clip(-math.log(new / old) / math.log(2.0))


def _utilisation_gain(new: float, old: float) -> float:
    return _clip((new - old) / (100.0 - min(old, 100.0) + 5.0))


def _penalty(profile: Profile, root: Profile) -> float:
    penalty = 0.0
    if _spills(profile) > _spills(root):
        penalty += 0.3
    occupancy, root_occupancy = profile.metrics.get(OCCUPANCY_PCT), root.metrics.get(OCCUPANCY_PCT)
    if occupancy is not None and root_occupancy is not None and occupancy < root_occupancy:
        penalty += 0.3 * _log_growth(profile.metrics.get(REGISTERS), root.metrics.get(REGISTERS))
    if profile.time.median_us >= root.time.median_us:
        penalty += 0.4 * max(_log_growth(profile.metrics.get(name), root.metrics.get(name)) for name in _WORK)
    return min(1.0, penalty)


def _spills(profile: Profile) -> int:
    """Spill bytes per thread that ptxas reported; an unknown count is taken as none, which penalises nothing."""
    return int(profile.conditions.get(SPILL_CONDITION, "0"))


def _log_growth(new: float | None, old: float | None) -> float:
    if not new or not old:
        return 0.0
    return max(0.0, math.log(new / old))


def _clip(value: float) -> float:
    return min(1.0, max(-1.0, value))
