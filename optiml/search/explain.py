"""From a finished tree to the answer: the path of edits, what each changed, and sentences that cite metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from optiml.records import (
    Comparison,
    Evaluated,
    Evaluation,
    PathStep,
    Profile,
    Reward,
    RunStatus,
    SearchResult,
    Speedup,
    Spent,
)
from optiml.search.edit import (
    ATOMICS,
    BANK_CONFLICTS,
    BLOCKS,
    DRAM_BYTES,
    INSTRUCTIONS,
    LOAD_REQUESTS,
    LOAD_SECTORS,
    STORE_SECTORS,
    WARPS_ACTIVE,
)
from optiml.search.judge import diagnose
from optiml.search.tree import Node, Tree

CHANGED = 0.005  # a metric that moved by less is not listed
NOTABLE_FALL = 0.25  # a metric that fell by at least this much carries a sentence of the explanation
SENTENCES = 4

# What a reader calls each metric that an explanation may cite, and how much its fall tells compared with others.
LABELS: Mapping[str, tuple[str, float]] = {
    LOAD_SECTORS: ("Global load sectors", 1.0),
    DRAM_BYTES: ("DRAM bytes", 0.95),
    ATOMICS: ("L2 sectors of atomics", 0.95),
    BANK_CONFLICTS: ("Shared memory bank conflicts", 0.9),
    STORE_SECTORS: ("Global store sectors", 0.8),
    LOAD_REQUESTS: ("Global load requests", 0.8),
    INSTRUCTIONS: ("Warp instructions executed", 0.8),
    "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum": ("Global store requests", 0.7),
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": ("Shared memory wavefronts", 0.7),
    "lts__t_sectors.sum": ("L2 sectors", 0.7),
    BLOCKS: ("Blocks launched", 0.4),
}


@dataclass(frozen=True, kw_only=True)
class Fall:
    """A metric that fell between the input and the best kernel, and the step with the largest share of the fall."""

    metric: str
    before: float
    after: float
    step: Node

    @property
    def size(self) -> float:
        """Logarithm of before / after; a fall to zero counts like one to a millionth."""
        return math.log(self.before / max(self.after, 1e-6 * self.before))


def summarise(
    tree: Tree, best: Node, *, run_id: str, status: RunStatus, seed: int, problem: str, stopped_because: str | None,
    evaluations: int, seconds: float, duplicates: int,
) -> SearchResult:  # fmt: skip
    """The result of a run whose answer is `best`."""
    root = tree.root
    nodes = [node for node in tree.nodes if node.evaluation is not None]
    spent = Spent(
        evaluations=evaluations, seconds=round(seconds, 3), accepted=sum(_accepted(node) for node in nodes),
        rejected=sum(not _accepted(node) for node in nodes),
        duplicates=duplicates + sum(node.state == "duplicate" for node in nodes),
    )  # fmt: skip
    baseline, answer = _evaluated(root), _evaluated(best)
    if not _accepted(root) or baseline is None or answer is None:
        return SearchResult(
            run_id=run_id, status=status, seed=seed, problem=problem, best=None, baseline=baseline, speedup=None,
            path=(), explanation=(), spent=spent, stopped_because=stopped_because,
            summary=stopped_because or "The input kernel has not been evaluated yet.",
            next_action="Verify the input kernel and repair it." if status == "failed" else "Ask again later.",
        )  # fmt: skip
    path = tuple(_step(node, best) for node in best.path()[1:])
    speedup = _speedup(root, best)
    return SearchResult(
        run_id=run_id, status=status, seed=seed, problem=problem, best=answer, baseline=baseline, speedup=speedup,
        path=path, explanation=explain(root, best), spent=spent, stopped_because=stopped_because,
        summary=_summary(root, best, speedup, stopped_because), next_action=_next_action(status, best),
        warnings=_warnings(best),
    )  # fmt: skip


def explain(root: Node, best: Node) -> tuple[str, ...]:
    """Sentences that each cite a metric before and after; the fall that tells most comes first."""
    if best.index == root.index:
        return ("No edit lowered the time: the input kernel is the answer.",)
    before, after = _profile(root), _profile(best)
    falls = falls_of(root, best)
    sentences = (
        _rises(before, after)
        if not falls
        else [
            f"{LABELS[item.metric][0]} ({item.metric}) fell from {_number(item.before)} to {_number(item.after)} "
            f"(x{_number(item.after / item.before)}), because {_clause(item.step.rationale)}."
            for item in falls[:SENTENCES]
        ]
    )
    if before is not None and after is not None:
        sentences.append(
            f"The {after.time.source} time fell from {_number(before.time.median_us)} to "
            f"{_number(after.time.median_us)} us (x{_number(after.time.median_us / before.time.median_us)}); "
            f"the kernel was {before.bottleneck.kind}-bound and is now {after.bottleneck.kind}-bound."
        )
    return tuple(sentences)


def _rises(before: Profile | None, after: Profile | None) -> list[str]:
    """Where no work fell: what keeps the GPU busier."""
    was = None if before is None else before.metrics.get(WARPS_ACTIVE)
    now = None if after is None else after.metrics.get(WARPS_ACTIVE)
    if was is None or now is None or now <= was * (1.0 + CHANGED):
        return []
    return [
        f"Active warps ({WARPS_ACTIVE}) rose from {_number(was)} to {_number(now)} % of the peak "
        f"(x{_number(now / was) if was else 'inf'}), so more loads and instructions are in flight."
    ]


def falls_of(root: Node, best: Node) -> list[Fall]:
    """Metrics that fell along the path, the most telling first: by logarithm of the fall times the metric's weight.

    Only falls of at least a quarter count, unless there is none.
    """
    before, after = _profile(root), _profile(best)
    if before is None or after is None:
        return []
    found = []
    for metric in LABELS:
        was, now = before.metrics.get(metric), after.metrics.get(metric)
        if was is not None and now is not None and was > 0 and 0 <= now < was * (1.0 - CHANGED):
            found.append(Fall(metric=metric, before=was, after=now, step=_responsible(metric, best)))
    notable = [item for item in found if item.after <= item.before * (1.0 - NOTABLE_FALL)]
    return sorted(notable or found, key=lambda item: -item.size * LABELS[item.metric][1])


def metric_changes(before: Profile | None, after: Profile | None) -> dict[str, float]:
    """new / old of every metric that both profiles have and that moved."""
    if before is None or after is None:
        return {}
    changes = {}
    for metric, was in before.metrics.items():
        now = after.metrics.get(metric)
        if was is not None and now is not None and was > 0 and now >= 0 and abs(now / was - 1.0) >= CHANGED:
            changes[metric] = round(now / was, 6)
    return changes


def _responsible(metric: str, best: Node) -> Node:
    """The step of the path with the largest share of the metric's fall."""
    shares = []
    for node in best.path()[1:]:
        before = None if node.parent is None else _profile(node.parent)
        after = _profile(node)
        was = None if before is None else before.metrics.get(metric)
        now = None if after is None else after.metrics.get(metric)
        shares.append((math.log(was / max(now, 1e-6 * was)) if was and now is not None else 0.0, node))
    return max(shares, key=lambda pair: pair[0])[1]


def _step(node: Node, best: Node) -> PathStep:
    parent = node.parent
    before, after = None if parent is None else _profile(parent), _profile(node)
    ratio = before.time.median_us / after.time.median_us if before is not None and after is not None else 1.0
    return PathStep(
        edit=node.edit, rationale=node.rationale, diagnosis=_diagnosis(before), kernel_id=node.kernel_id,
        metric_changes=metric_changes(before, after),
        reward=node.reward or Reward(time=0.0, proxies=0.0, guardrails=0.0, judge=0.0, total=0.0), time_ratio=ratio,
        ci95=None, kept_because=None if ratio > 1.0 else _kept_because(node, best),
    )  # fmt: skip


def _kept_because(node: Node, best: Node) -> str:
    """Why a step that did not lower the time is on the path."""
    path = best.path()
    later = path[path.index(node) + 1 :]
    parent, end = node.parent, later[-1] if later else node
    if parent is None or not later:
        return "it is the last step, and its time equals that of the step before"
    names = ", ".join(item.edit for item in later)
    return (
        f"the steps after it ({names}) were built on it: together they took the time from "
        f"{_number(parent.time_us)} to {_number(end.time_us)} us"
    )


def _diagnosis(profile: Profile | None) -> str:
    found = diagnose(profile)
    return f"{found.kind}: {'; '.join(found.evidence)}" if found.evidence else found.kind


def _speedup(root: Node, best: Node) -> Speedup | None:
    before, after = _profile(root), _profile(best)
    if before is None or after is None or before.time.source != after.time.source:
        return None
    paired = _timed_against(root, best)
    if paired is not None:
        return Speedup(median=paired.ratio, ci95=paired.ci95, source=paired.source)
    return Speedup(median=before.time.median_us / after.time.median_us, ci95=None, source=after.time.source)


def _timed_against(root: Node, best: Node) -> Comparison | None:
    """What came of timing the best kernel in turns with the input: of its confirmation, else of its full check."""
    for evaluation in (best.confirmed, best.full):
        comparison = None if evaluation is None or evaluation.profile is None else evaluation.profile.comparison
        if comparison is not None and comparison.baseline_kernel_id == root.kernel_id:
            return comparison
    return None


def _evaluated(node: Node) -> Evaluated | None:
    if node.evaluation is None:
        return None
    final = node.confirmed or node.full or node.evaluation
    return Evaluated(
        kernel_id=node.kernel_id, kernel=node.kernel, verdict=final.verdict, profile=_profile(node)
    )  # fmt: skip


def _profile(node: Node) -> Profile | None:
    """The profile that the search compared: one depth for all nodes, so that ratios are like with like."""
    evaluation: Evaluation | None = node.evaluation
    return None if evaluation is None else evaluation.profile


def _accepted(node: Node) -> bool:
    return node.state in ("open", "duplicate") and node.evaluation is not None


def _summary(root: Node, best: Node, speedup: Speedup | None, stopped_because: str | None) -> str:
    because = f" The search ended because {stopped_because}." if stopped_because else " The search goes on."
    if best.index == root.index:
        return "No kernel was found that is faster than the input." + because
    factor = "" if speedup is None else f"{speedup.median:.2f}x faster ({speedup.source})"
    steps = " -> ".join(node.edit for node in best.path()[1:])
    final = best.confirmed or best.full
    checked = "accepted at " + "/".join(final.verdict.levels) if final is not None else "not yet fully verified"
    confirmed = " and confirmed with fresh seeds" if best.confirmed is not None else ""
    return f"{factor} by {steps}; {checked}{confirmed}." + because


def _next_action(status: RunStatus, best: Node) -> str:
    if status == "running":
        return "Ask again for the result, or let the run go on."
    if status == "needs_proposals":
        return "Answer the open requests with proposals, or tell an empty list to end the search."
    if best.index == 0:
        return "Keep the input kernel, or give the search other edits or a larger budget."
    return "Read the diff, then use the best kernel."


def _warnings(best: Node) -> tuple[str, ...]:
    profile = _profile(best)
    if profile is not None and profile.time.source == "modelled":
        return ("times are modelled from counted work, not measured on a GPU",)
    return ()


def _clause(rationale: str) -> str:
    """The first sentence of a rationale, as the second half of another one."""
    text = rationale.strip().split(". ")[0].rstrip(".")
    keeps_case = len(text) > 1 and (text[1].isupper() or not text[0].isalpha())
    return text if keeps_case else text[:1].lower() + text[1:]


def _number(value: float) -> str:
    """Three significant digits; whole numbers below ten thousand in full."""
    if value == int(value) and abs(value) < 10_000:
        return str(int(value))
    return f"{value:.3g}"
