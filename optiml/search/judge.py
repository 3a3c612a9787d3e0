"""The judge by rules: from measured facts and comment-stripped code, does an edit answer what limits the kernel?

It ranks what to try and never accepts a kernel. Comments are removed before anything is read, so that no text in them
can move the score.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from optiml.codec import kernel_id
from optiml.records import (
    Build,
    BuildReport,
    Diagnosis,
    ExpectedChange,
    Judgement,
    Kernel,
    Problem,
    Profile,
    Suggestion,
)
from optiml.search.edit import (
    ATOMICS,
    BANK_CONFLICTS,
    BLOCKS,
    DRAM_BYTES,
    INSTRUCTIONS,
    LOAD_REQUESTS,
    LOAD_SECTORS,
    REGISTERS,
    STORE_SECTORS,
    WARPS_ACTIVE,
    down,
    up,
)
from optiml.search.estimate import traffic
from optiml.search.source import called, calls, parse, sites, text_of, walk
from optiml.toolchain.scan import without_comments

JUDGE = "rules"
Call = Literal["try", "reject", "measure_again"]
OVERLAP_LOSS = 0.15  # of the time model: the share of the terms that do not bind which still costs time
UNKNOWN_FACTOR = 0.85  # a change that is claimed without a factor counts as this much
NEUTRAL_SCORE = 0.3  # of a patch that promises nothing
RISK_COST = 0.06  # of the score, for each risk
TRY_ABOVE, REJECT_BELOW = 0.45, 0.25

# How a metric acts on the terms of the time model: the term's time scales with the metric to this power.
_TERMS_OF: Mapping[str, Mapping[str, float]] = {
    LOAD_SECTORS: {"lsu": 1.0, "l2": 0.8, "dram": 0.3, "latency": 0.3},
    STORE_SECTORS: {"lsu": 0.5, "l2": 0.8, "dram": 0.3},
    LOAD_REQUESTS: {"lsu": 0.5, "latency": 0.6, "issue": 0.3},
    DRAM_BYTES: {"dram": 1.0, "l2": 0.5},
    INSTRUCTIONS: {"issue": 1.0, "fp32": 0.5, "int": 0.8, "sfu": 0.5, "latency": 0.4},
    BANK_CONFLICTS: {"lsu": 0.8, "latency": 0.3},
    ATOMICS: {"atomics": 1.0, "l2": 0.5, "latency": 0.5},
    WARPS_ACTIVE: {"latency": -1.0},
    BLOCKS: {"dispatch": 1.0},
    REGISTERS: {"latency": 0.3},
}
_TERMS_OF_KIND: Mapping[str, Mapping[str, float]] = {
    "memory": {"dram": 0.5, "l2": 0.3, "lsu": 0.2, "issue": 0.1, "latency": 0.1},
    "compute": {"issue": 0.7, "fp32": 0.3, "sfu": 0.2, "lsu": 0.2, "latency": 0.1},
    "latency": {"latency": 0.8, "lsu": 0.1, "issue": 0.1, "atomics": 0.1},
    "launch": {"launch": 0.9, "latency": 0.1},
}
_VECTOR = re.compile(r"\b(?:float|int|uint|double|half|short|char|uchar|long|longlong)[234]\b|\b\w*Pack\w*\b")
_FAST = re.compile(r"\b(__expf|__logf|__powf|__sinf|__cosf|__fdividef|__frcp_rn|__frsqrt_rn)\b")


# --- scores ----------------------------------------------------------------------------------------------------------
def score_expected(expected: Sequence[ExpectedChange], profile: Profile | None, *, risks: Sequence[str] = ()) -> float:
    """How promising a set of expected metric changes is for a profiled kernel, 0..1.

        score = 0.3 + 0.7 tanh(ln(T / T') / ln 2) - 0.06 * risks        (0.3: NEUTRAL_SCORE)

    T is the time model's `max(terms) + 0.15 * (sum of the others)` over the profile's terms, T' the same with each
    term scaled by the expected changes of the metrics that act on it. So an edit that promises nothing scores 0.3,
    and one that should halve the modelled time 0.83.
    """
    terms = _terms(profile)
    scaled = dict(terms)
    for change in expected:
        factor = change.factor if change.factor is not None else UNKNOWN_FACTOR
        if change.factor is None and change.direction == "up":
            factor = 1.0 / UNKNOWN_FACTOR
        for term, power in _TERMS_OF.get(change.metric, {}).items():
            if term in scaled:
                scaled[term] *= max(factor, 1e-3) ** power
    gain = math.log(_total(terms) / _total(scaled)) if terms else 0.0
    promised = NEUTRAL_SCORE + (1.0 - NEUTRAL_SCORE) * math.tanh(gain / math.log(2.0))
    return min(1.0, max(0.0, promised - RISK_COST * len(risks)))


def addresses(expected: Sequence[ExpectedChange], profile: Profile | None) -> bool | None:
    """Whether any expected change acts on the term that binds; None without a profile."""
    if profile is None:
        return None
    terms = _terms(profile)
    if not terms:
        return None
    binding = max(terms, key=lambda name: (terms[name], name))
    return any(_TERMS_OF.get(change.metric, {}).get(binding, 0.0) for change in expected)


def diagnose(profile: Profile | None) -> Diagnosis:
    """What limits the kernel, as the profile says it."""
    if profile is None:
        return Diagnosis(kind="unknown", evidence=("no profile was given",))
    return Diagnosis(kind=profile.bottleneck.kind, evidence=profile.bottleneck.evidence)


def _terms(profile: Profile | None) -> dict[str, float]:
    """Terms of the time model over the bench entries; shares by the kind of bottleneck where there are none."""
    total: dict[str, float] = {}
    if profile is not None:
        for entry in profile.bench:
            for name, microseconds in entry.terms_us.items():
                total[name] = total.get(name, 0.0) + entry.weight * microseconds
    kind = "memory" if profile is None else profile.bottleneck.kind
    return total if sum(total.values()) > 0 else dict(_TERMS_OF_KIND[kind])


def _total(terms: Mapping[str, float]) -> float:
    largest = max(terms.values())
    return max(1e-12, largest + OVERLAP_LOSS * (sum(terms.values()) - largest))


# --- one patch -------------------------------------------------------------------------------------------------------
def judge_by_rules(
    problem: Problem,
    before: Kernel,
    after: Kernel | None,
    *,
    before_build: Build | BuildReport | None = None,
    after_build: Build | BuildReport | None = None,
    profile: Profile | None = None,
    suggestions: Sequence[Suggestion] = (),
) -> Judgement:
    """Judge the step from `before` to `after` against the profile of `before`.

    Args:
        before_build, after_build: what the compiler said, for the static deltas; None where it was not built.
        profile: of `before`; None lowers what can be said.
        suggestions: edits that apply to `before` (`optiml.search.propose.suggest`).
    """
    diagnosis = diagnose(profile)
    if after is None:
        return _judgement(
            diagnosis, score=0.0, verdict="measure_again", addressed=None, expected=(), risks=(), deltas={},
            suggestions=suggestions, summary="No patch was given; the suggestions apply to the kernel as it is.",
        )  # fmt: skip
    plain_before, plain_after = without_words(before), without_words(after)
    if kernel_id(plain_before) == kernel_id(plain_after):
        return _judgement(
            diagnosis, score=0.0, verdict="reject", addressed=False, expected=(), risks=("the patch changes no code",),
            deltas={}, suggestions=suggestions, summary="The patch changes nothing but comments or white space.",
        )  # fmt: skip
    expected = expected_changes(plain_before, plain_after, problem)
    deltas = static_deltas(before_build, after_build)
    risks = (*fatal_risks(plain_before, plain_after, problem), *risks_of(plain_before, plain_after, deltas))
    fatal = fatal_risks(plain_before, plain_after, problem)
    addressed = addresses(expected, profile)
    score = score_expected(expected, profile, risks=risks)
    if fatal:
        score = min(score, 0.05)
    score = round(score, 4)
    verdict: Call
    if fatal or score < REJECT_BELOW:
        verdict = "reject"
    elif profile is None or (score < TRY_ABOVE and not addressed):
        verdict = "measure_again"
    else:
        verdict = "try"
    return _judgement(
        diagnosis, score=score, verdict=verdict, addressed=addressed, expected=expected, risks=risks, deltas=deltas,
        suggestions=suggestions, summary=_summary(diagnosis, expected, addressed, fatal),
    )  # fmt: skip


def static_deltas(
    before: Build | BuildReport | None, after: Build | BuildReport | None
) -> dict[str, tuple[float | None, float | None]]:  # fmt: skip
    """Before and after of what ptxas reports; None where a side was not built."""
    names = ("registers_per_thread", "shared_bytes_per_block", "stack_bytes", "spill_bytes")
    return {name: (_field(before, name), _field(after, name)) for name in names}


def expected_changes(before: Kernel, after: Kernel, problem: Problem) -> tuple[ExpectedChange, ...]:
    """Metric changes that the code promises: traffic worked out from index formulas, then known idioms."""
    changes: list[ExpectedChange] = []
    old, new = traffic(before, problem), traffic(after, problem)
    if old is not None and new is not None:
        for metric, was, now in (
            (LOAD_SECTORS, old.load_sectors, new.load_sectors),
            (STORE_SECTORS, old.store_sectors, new.store_sectors),
            (LOAD_REQUESTS, old.load_requests, new.load_requests),
        ):
            if was > 0 and now > 0 and abs(math.log(now / was)) > math.log(1.1):
                direction = down if now < was else up
                changes.append(direction(metric, round(now / was, 4)))
    a, b = before.source, after.source
    if len(_VECTOR.findall(b)) > len(_VECTOR.findall(a)):
        changes += [down(LOAD_REQUESTS, 0.25), down(INSTRUCTIONS, 0.6)]
    if b.count("#pragma unroll") > a.count("#pragma unroll"):
        changes.append(down(INSTRUCTIONS, 0.85))
    if b.count("__restrict__") > a.count("__restrict__"):
        changes.append(down(LOAD_REQUESTS, 0.9))
    if _uses_fast_math(after) and not _uses_fast_math(before):
        changes.append(down(INSTRUCTIONS, 0.7))
    if _count_calls(after, "__shfl") > _count_calls(before, "__shfl") and _global_atomics(before) and old is None:
        changes.append(down(ATOMICS, 1 / 32))
    if _padded(before) < _padded(after):
        changes.append(down(BANK_CONFLICTS, 0.1))
    if "__launch_bounds__" in b and "__launch_bounds__" not in a:
        changes.append(down(REGISTERS, 0.9))
    return tuple(changes)


def fatal_risks(before: Kernel, after: Kernel, problem: Problem) -> tuple[str, ...]:
    """What makes a patch not worth building."""
    found = []
    functions = sites(after)
    if after.language == "cuda" and parse(after.source).root.has_error and not parse(before.source).root.has_error:
        found.append("the patched code does not parse")
    elif functions and len(functions) == len(after.launches):
        stored = {
            site.arguments.get(access.array, access.array)
            for site in functions
            for access in site.accesses
            if access.writes
        }
        passed = {str(argument) for site in functions for argument in site.launch.args}
        missing = [name for name in problem.outputs if name in passed and name not in stored]
        if missing and not any(called(item) for site in functions for item in calls(site.function.body)):
            found.append(f"the patched kernel never stores to {', '.join(missing)}")
    return tuple(found)


def risks_of(
    before: Kernel, after: Kernel, deltas: Mapping[str, tuple[float | None, float | None]]
) -> tuple[str, ...]:  # fmt: skip
    """What may go wrong with a patch that is worth building."""
    found = []
    was, now = deltas.get("registers_per_thread", (None, None))
    if was is not None and now is not None and now > was * 1.25 and now > 32:
        found.append(f"registers per thread grow from {was:g} to {now:g}: occupancy may fall")
    was, now = deltas.get("shared_bytes_per_block", (None, None))
    if was is not None and now is not None and now > was and now > 32 * 1024:
        found.append(f"shared memory per block grows from {was:g} to {now:g} bytes: fewer blocks fit on an SM")
    was, now = deltas.get("spill_bytes", (None, None))
    if was is not None and now is not None and now > was:
        found.append(f"spills grow from {was:g} to {now:g} bytes: local memory traffic is added")
    if _uses_fast_math(after) and not _uses_fast_math(before):
        found.append("fast-math intrinsics lose precision: the tolerance decides")
    if _vector_casts(after) > _vector_casts(before):
        found.append("vector accesses need aligned addresses and a tail for sizes that the width does not divide")
    if _guards(after) < _guards(before):
        found.append("a bounds check is gone: sizes that the block does not divide may fault")
    if _count_calls(after, "__syncthreads") < _count_calls(before, "__syncthreads"):
        found.append("a barrier is gone: shared memory may be read before it is written")
    if _global_atomics(after) > _global_atomics(before):
        found.append("floating atomics add in any order: results differ from run to run")
    return tuple(found)


def without_words(kernel: Kernel) -> Kernel:
    """The kernel without comments, and with white space that means nothing evened out."""
    lines = (line.rstrip() for line in without_comments(kernel.source).splitlines())
    return dataclasses.replace(kernel, source="\n".join(re.sub(r"[ \t]+", " ", line) for line in lines if line.strip()))


def _field(build: Build | BuildReport | None, name: str) -> float | None:
    report = build.report if isinstance(build, Build) else build
    value: int | None = None if report is None else getattr(report, name)
    return value


def _uses_fast_math(kernel: Kernel) -> bool:
    return "--use_fast_math" in kernel.flags or _FAST.search(kernel.source) is not None


def _count_calls(kernel: Kernel, prefix: str) -> int:
    return sum(called(item).startswith(prefix) for item in calls(parse(kernel.source).root))


def _global_atomics(kernel: Kernel) -> int:
    accesses = (access for site in sites(kernel) for access in site.accesses)
    return sum(access.kind == "atomic" and access.space == "global" for access in accesses)


def _vector_casts(kernel: Kernel) -> int:
    return sum(
        called(item) == "reinterpret_cast" and _VECTOR.search(text_of(item)) is not None
        for item in calls(parse(kernel.source).root)
    )


def _guards(kernel: Kernel) -> int:
    """Conditions that compare something with a size parameter, loops and conditional expressions included."""
    total = 0
    for site in sites(kernel):
        sizes = {item.name for item in site.function.parameters if not item.is_pointer}
        conditions = [
            node.child_by_field_name("condition")
            for node in walk(site.function.body)
            if node.type in ("if_statement", "for_statement", "conditional_expression", "while_statement")
        ]
        total += sum(
            any(text_of(item) in sizes for item in walk(condition) if item.type == "identifier")
            for condition in conditions
            if condition is not None
        )
    return min(total, 1)  # one guard may stand for several; only losing the last one is a sign


def _padded(kernel: Kernel) -> int:
    """Shared arrays whose rows are not a multiple of 32 elements."""
    return sum(
        local.is_shared and len(local.dimensions) > 1 and text_of(local.dimensions[-1]).strip().isdigit()
        and int(text_of(local.dimensions[-1])) % 32 != 0
        for site in sites(kernel)
        for local in site.function.locals
    )  # fmt: skip


def _summary(
    diagnosis: Diagnosis, expected: Sequence[ExpectedChange], addressed: bool | None, fatal: Sequence[str]
) -> str:  # fmt: skip
    if fatal:
        return f"Not worth building: {fatal[0]}."
    changes = ", ".join(f"{item.metric} {item.direction}" for item in expected[:2]) or "no change that rules know"
    if diagnosis.kind == "unknown":
        return f"Without a profile the limit is unknown; the patch promises {changes}."
    fit = {True: "which acts on it", False: "which does not act on it", None: "which cannot be weighed"}[addressed]
    return f"The kernel is {diagnosis.kind}-bound; the patch promises {changes}, {fit}."


def _judgement(
    diagnosis: Diagnosis, *, score: float, verdict: Call, addressed: bool | None, expected: Sequence[ExpectedChange],
    risks: Sequence[str], deltas: Mapping[str, tuple[float | None, float | None]], suggestions: Sequence[Suggestion],
    summary: str,
) -> Judgement:  # fmt: skip
    actions = {
        "try": "Verify the patched kernel, then profile it against the old one.",
        "reject": "Leave this patch and take a suggestion, or rewrite the part that the diagnosis names.",
        "measure_again": "Profile the kernel first, or compare both kernels: rules alone cannot tell.",
    }
    return Judgement(
        summary=summary, next_action=actions[verdict], score=score, verdict=verdict, diagnosis=diagnosis,
        addresses_diagnosis=addressed, expected=tuple(expected), risks=tuple(risks), static_deltas=dict(deltas),
        suggestions=tuple(suggestions), judge=JUDGE,
    )  # fmt: skip
