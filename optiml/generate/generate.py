"""First kernels for an intent or a problem, without a language model: from the catalogue."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from optiml.codec import kernel_id
from optiml.errors import InvalidInput, ModelFailed
from optiml.generate.catalogue import Strategy, applicable, is_builtin, strategies, strategy_kernel
from optiml.generate.intent import intended_problem, read_intent
from optiml.generate.template import CONTRACT, blank_problem, kernel_template
from optiml.problems.problem import kernel_from_text, load_builtin, main_dtype, with_axes, with_dtype
from optiml.records import Candidate, Generated, Kernel, Problem, Verdict

GENERATORS = ("auto", "catalogue", "mixture", "chat")
SEED = "seed"
MAX_COUNT = 16
ENABLE = {
    "mixture": "install the extra `mixture` and train or point to its weights, or use generator `catalogue`",
    "chat": "set a chat model's endpoint and key in the settings, or use generator `catalogue`",
}

Verify = Callable[[Kernel, Problem], Verdict]


def generate(
    intent: str | None = None,
    problem: str | Problem | None = None,
    *,
    axes: Mapping[str, int] | None = None,
    dtype: str | None = None,
    count: int = 1,
    generator: str = "auto",
    verify: Verify | None = None,
) -> Generated:
    """Kernels of the catalogue for what is asked, the most promising first.

    Candidates are the strategies of the problem in the order of `expected_order`, then its naive seed. With `verify`
    they are tried in that order until `count` are accepted; accepted ones stand first in the answer. An operator
    is known by its name or its own reference only: a problem that merely looks like a built-in one gets a template.

    Args:
        intent: plain English. It may add sizes and a dtype to a built-in `problem`.
        problem: a built-in name, or a Problem; then nothing is guessed.
        axes: sizes asked for; they become the bench entry.
        dtype: element type asked for.
        count: how many kernels to return, 1 to 16.
        generator: `auto` and `catalogue` are this; the others need a model.
        verify: checks one kernel; None leaves `verdict` empty.

    Returns:
        `done` with candidates, or `needs_kernel` with a kernel file to fill in and the reason.

    Raises:
        InvalidInput: neither intent nor problem; an argument outside its range; an unknown problem.
        ModelFailed: code `model_unavailable`, the generator needs a model.
    """
    if generator not in GENERATORS:
        raise InvalidInput(f"unknown generator {generator[:40]!r}; choose from {', '.join(GENERATORS)}")
    if generator in ENABLE:
        raise ModelFailed(f"the {generator} generator has no model: {ENABLE[generator]}", code="model_unavailable")
    if not 1 <= count <= MAX_COUNT:
        raise InvalidInput(f"count is {count}; give 1 to {MAX_COUNT}")
    if intent is None and problem is None:
        raise InvalidInput("give an intent in plain English or a problem")
    wanted, assumed, refused = _understand(intent, problem, axes, dtype)
    if wanted is None:
        return _needs_kernel(None, assumed, refused or "")
    if not is_builtin(wanted, wanted.name):
        reason = f"{wanted.name} is not a built-in problem, so the catalogue has no kernel for it"
        return _needs_kernel(wanted, assumed, reason)
    found = catalogue_candidates(wanted)
    if not found:
        return _needs_kernel(wanted, assumed, f"the catalogue has no kernel of {wanted.name} for these element types")
    chosen, warnings = (found[:count], ()) if verify is None else _verified(found, wanted, count, verify)
    return Generated(
        status="done",
        candidates=chosen,
        problem=wanted,
        assumed=assumed,
        summary=_summary(wanted, chosen, assumed),
        next_action=_next_action(wanted, chosen),
        warnings=warnings,
    )


def catalogue_candidates(problem: Problem) -> tuple[Candidate, ...]:
    """Every kernel that the catalogue has for a built-in problem, in the order of `expected_order`, the seed last."""
    dtype = main_dtype(problem)
    builtin = load_builtin(problem.name)
    fitting = [strategy for strategy in strategies(problem.name) if applicable(strategy, problem, dtype)]
    candidates = [
        _candidate(strategy_kernel(strategy, dtype), strategy.name, f"{strategy.title}: {strategy.rationale}")
        for strategy in sorted(fitting, key=expected_order)
    ]
    if dtype in builtin.dtypes:
        seed = kernel_from_text(builtin.seed_text, dtype=dtype)
        candidates.append(_candidate(seed, SEED, "the plainest way to write it: a starting point, not a fast kernel"))
    return tuple(candidates)


def expected_order(strategy: Strategy) -> tuple[int, int, str]:
    """Sort key by expectation, before anything is measured.

    A strategy for fewer element types uses something special to them (tensor cores) and comes first; then the one
    that expects to lower more metrics; names settle the rest, so that the order is always the same.
    """
    return len(strategy.dtypes), -len(strategy.moves), strategy.name


def _understand(
    intent: str | None, problem: str | Problem | None, axes: Mapping[str, int] | None, dtype: str | None
) -> tuple[Problem | None, tuple[str, ...], str | None]:
    """The problem as understood, what was assumed, and why not where it was not."""
    if isinstance(problem, Problem) and not is_builtin(problem, problem.name):
        if dtype is not None and dtype != main_dtype(problem):
            raise InvalidInput(f"the dtypes of {problem.name} are its own; change them in the problem")
        ignored = ("the intent was not read: the problem says what to compute",) if intent is not None else ()
        return with_axes(problem, axes or {}), ignored, None
    name = problem.name if isinstance(problem, Problem) else problem
    if intent is None:
        if isinstance(problem, Problem):
            fixed = _with_dtype_of(problem, dtype)
        else:
            builtin = load_builtin(name or "")
            fixed = with_dtype(builtin, dtype) if dtype is not None else builtin.problem
        return with_axes(fixed, axes or {}), (), None
    intention = read_intent(intent, problem=name, axes=axes, dtype=dtype)
    if intention.refused is not None:
        return None, intention.assumed, intention.refused
    return intended_problem(intention), intention.assumed, None


def _with_dtype_of(problem: Problem, dtype: str | None) -> Problem:
    """A built-in problem as the caller holds it (its domain, its bench), in another dtype."""
    if dtype is None or dtype == main_dtype(problem):
        return problem
    other = with_dtype(load_builtin(problem.name), dtype)
    return dataclasses.replace(
        problem, inputs=other.inputs, outputs=other.outputs, bytes=other.bytes, tolerance=other.tolerance
    )


def _candidate(kernel: Kernel, strategy: str, rationale: str) -> Candidate:
    return Candidate(
        kernel_id=kernel_id(kernel),
        kernel=kernel,
        generator="catalogue",
        strategy=strategy,
        rationale=rationale,
        verdict=None,
    )


def _verified(
    found: tuple[Candidate, ...], problem: Problem, count: int, verify: Verify
) -> tuple[tuple[Candidate, ...], tuple[str, ...]]:
    """Candidates with their verdicts, accepted ones first, tried until `count` are accepted."""
    accepted: list[Candidate] = []
    others: list[Candidate] = []
    for candidate in found:
        verdict = verify(candidate.kernel, problem)
        judged = dataclasses.replace(candidate, verdict=verdict)
        (accepted if verdict.status == "accepted" else others).append(judged)
        if len(accepted) == count:
            break
    warnings = tuple(f"{item.strategy} was not accepted: {_why_not(item.verdict)}" for item in others)
    return tuple([*accepted, *others][:count]), warnings


def _why_not(verdict: Verdict | None) -> str:
    if verdict is None:
        return "it was not verified"
    return f"{verdict.reason or verdict.status}: {verdict.detail or verdict.summary}"


def _summary(problem: Problem, chosen: tuple[Candidate, ...], assumed: tuple[str, ...]) -> str:
    entry = problem.bench[0] if problem.bench else problem.workloads[0]
    sizes = ", ".join(f"{name}={value}" for name, value in {**entry.axes, **entry.scalars}.items())
    accepted = sum(item.verdict is not None and item.verdict.status == "accepted" for item in chosen)
    kernels = f"{len(chosen)} kernel{'s' if len(chosen) != 1 else ''} from the catalogue"
    state = "not verified" if all(item.verdict is None for item in chosen) else f"{accepted} accepted"
    names = ", ".join(item.strategy for item in chosen)
    noted = f" Assumed: {'; '.join(assumed[:3])}{' …' if len(assumed) > 3 else ''}." if assumed else ""
    return f"{problem.name} in {main_dtype(problem)} at {sizes}: {kernels} ({names}), {state}.{noted}"


def _next_action(problem: Problem, chosen: tuple[Candidate, ...]) -> str:
    best = chosen[0]
    if best.verdict is None:
        return f"Verify kernel {best.kernel_id} with compile_verify, then profile it."
    if best.verdict.status != "accepted":
        return f"Read the verdict of {best.kernel_id}; {best.verdict.next_action}"
    return (
        f"Profile kernel {best.kernel_id} with profile_ncu, or make it faster: "
        f"run_mcts with action start, problem {problem.name} and this kernel."
    )


def _needs_kernel(problem: Problem | None, assumed: tuple[str, ...], reason: str) -> Generated:
    if problem is None:
        action = (
            "Say it in other words if it is a built-in operator (optiml problems lists them). Otherwise describe it "
            "as a Problem (name, axes, inputs, outputs, a numpy reference, workloads), write the kernel from the "
            "template and send both to compile_verify. "
        )
    else:
        action = "Write the kernel from the template and send it with the problem to compile_verify. "
    return Generated(
        status="needs_kernel",
        candidates=(),
        problem=problem,
        assumed=assumed,
        summary=f"No kernel was generated: {reason}.",
        next_action=action + CONTRACT,
        template=kernel_template(problem or blank_problem()),
    )
