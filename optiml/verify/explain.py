"""Verdicts in words that a model or a person can act on."""

from __future__ import annotations

from collections.abc import Mapping

from optiml.problems.data import is_float
from optiml.records import Problem, Reason, Verdict
from optiml.verify.compare import CAP, SAFETY

_CURE: Mapping[Reason, str] = {
    "host_escape": "Remove the host code that reaches outside the launch plan.",
    "problem_degenerate": "Change the problem's workloads so that wrong outputs differ from right ones.",
    "forbidden_source": "Include only CUDA headers by name, and drop the construct named in `detail`.",
    "compile_failed": "Fix the compiler error in `detail` and send the kernel again.",
    "resource_limit": "Shrink the source: fewer template instances, smaller unrolls, smaller static arrays.",
    "bad_launch": "Correct the launch plan: kernel name, argument list, grid and block within the device's limits.",
    "timed_out": (
        "Look for a loop that never ends or a wait that nobody answers; then for far too much work a thread. On a busy "
        "machine verify again when less runs beside it."
    ),
    "fault": "Guard the access named in `fault` with a bounds check, or correct its index.",
    "race": "Order the two accesses named in `fault` with a barrier or an atomic.",
    "mutated_input": "Write to outputs and workspaces only; an array updated in place must be declared in both.",
    "unwritten_output": "Write every element of every output; clear an output before adding to it, or use a workspace.",
    "nonfinite": "Guard against overflow and division by zero: subtract the maximum before exp, add eps before rsqrt.",
    "state_across_runs": "Compute everything anew in every run; reset counters and scratch in the first launch.",
    "hard_coded": "Handle every size in the problem's domain, not only the ones shown.",
    "imprecise": (
        "Accumulate in float32 or wider and in a tree order; avoid fast-math where it costs digits. Where outputs sum "
        "many terms, the problem must say how many in `accumulation`."
    ),
    "wrong_values": "Compare the indexing of the element in `first_mismatch` with the reference.",
    "too_fast": "The time lies below the speed of light; check that the kernel does the whole work.",
}


def at_sizes(axes: Mapping[str, int]) -> str:
    """`at R=64, C=100`."""
    sizes = ", ".join(f"{name}={value}" for name, value in axes.items())
    return f"at {sizes}" if sizes else "at the only size"


def tolerance_policy(problem: Problem) -> str:
    """How values are compared, in words."""
    floating = {name: tensor.dtype for name, tensor in problem.outputs.items() if is_float(tensor.dtype)}
    exact = [name for name in problem.outputs if name not in floating]
    parts = [f"{', '.join(exact)}: exactly"] if exact else []
    if floating and problem.tolerance is not None and problem.tolerance.rtol == problem.tolerance.atol == 0:
        parts.append(f"{', '.join(floating)}: exactly, as the problem asks")
    elif floating:
        length = problem.accumulation if problem.accumulation is not None else "1 (no `accumulation` given)"
        shown = ", ".join(f"{name} ({dtype})" for name, dtype in floating.items())
        parts.append(
            f"{shown}: |actual - expected| <= atol + rtol |expected|, expected in float64; floor: rtol = 2 eps(dtype) "
            f"+ 8 eps(accumulator) sqrt(L) with L = {length}, atol = rtol times the rms of the expected output; up to "
            f"{CAP:g} floors, "
            + (
                f"{SAFETY:g} times the error of the reference in the declared dtype"
                if problem.tolerance is None
                else f"the problem's rtol {problem.tolerance.rtol:g} and atol {problem.tolerance.atol:g} below that"
            )
        )
    return "; ".join(parts)


def summary(verdict: Verdict, problem: Problem, log: str = "") -> str:
    """One or two sentences: what was decided, on what grounds."""
    where = f" on {verdict.device.name}" if verdict.device is not None else ""
    if verdict.status == "accepted":
        hidden = sum(case.hidden for case in verdict.cases)
        shown = len(verdict.cases) - hidden
        return (
            f"Accepted at {verdict.levels[-1]}{where}: right in {shown} given and {hidden} hidden cases of "
            f"{problem.name} ({verdict.domain})."
        )
    if verdict.status == "unverified":
        label = f" ({verdict.reason})" if verdict.reason else ""
        return f"Not verified{label}: {verdict.detail}."
    text = f"Rejected, {verdict.reason}: {verdict.detail}."
    return text if not log else f"{text}\n{log}"


def next_action(verdict: Verdict) -> str:
    """What to do next."""
    if verdict.status == "accepted":
        return "Profile it with profile_ncu, or improve it with run_mcts."
    if verdict.reason is not None:
        return _CURE[verdict.reason]
    return "See `detail`: it names what is missing."
