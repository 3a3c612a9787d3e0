"""First kernels for an intent or a problem: from the catalogue, or written by a language model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from optiml.codec import kernel_id
from optiml.errors import InvalidInput, ModelFailed
from optiml.generate.catalogue import Strategy, applicable, is_builtin, strategies, strategy_kernel
from optiml.generate.intent import intended_problem, read_intent
from optiml.generate.request import MAX_CHARACTERS
from optiml.generate.template import CONTRACT, blank_problem, kernel_template
from optiml.generate.writer import Admit, Checks, Fingerprint, Measure, Verify, Written, draft_problem, write_kernels
from optiml.llm.model import Model
from optiml.problems.problem import kernel_from_text, load_builtin, main_dtype, with_axes, with_dtype
from optiml.records import Candidate, Generated, Kernel, Problem, Verdict

ENABLE = {  # the generators that need a model, in the order in which `auto` takes the first that is set up
    "mixture": "install the extra `mixture` and train or point to its weights, or use generator `catalogue`",
    "text_mixture": "list two or more chat experts below [text_mixture] in optiml.toml, or use generator `catalogue`",
    "chat": "give name, url and key_env of a chat model below [chat] in optiml.toml, or use generator `catalogue`",
}
GENERATORS = ("auto", "catalogue", *ENABLE)
SEED = "seed"
MAX_COUNT = 16


@dataclass(frozen=True, kw_only=True)
class Writing:
    """What is needed to let a model write.

    Attributes:
        models: those that are set up, by generator name.
        admit: checks the record of a drafted problem and runs its reference; None drafts no problems.
        fingerprint, measure: see `optiml.generate.writer.Checks`.
    """

    models: Mapping[str, Model] = field(default_factory=dict)
    admit: Admit | None = None
    fingerprint: Fingerprint | None = None
    measure: Measure | None = None


def generate(
    intent: str | None = None,
    problem: str | Problem | None = None,
    *,
    axes: Mapping[str, int] | None = None,
    dtype: str | None = None,
    count: int = 1,
    generator: str = "auto",
    verify: Verify | None = None,
    writing: Writing | None = None,
) -> Generated:
    """Kernels for what is asked, the most promising first.

    The catalogue's candidates are the strategies of the problem in the order of `expected_order`, then its naive seed.
    With `verify` they are tried in that order until `count` are accepted; accepted ones stand first in the answer. An
    operator is known by its name or its own reference only: a problem that merely looks like a built-in one gets a
    template. A model gets what is not in the catalogue, or everything where its generator is asked for by name.

    Args:
        intent: plain English. It may add sizes and a dtype to a built-in `problem`.
        problem: a built-in name, or a Problem; then nothing is guessed.
        axes: sizes asked for; they become the bench entry.
        dtype: element type asked for.
        count: how many kernels to return, 1 to 16.
        generator: `catalogue`; one of ENABLE; or `auto`, the catalogue and beyond it the first model that is set up.
        verify: checks one kernel; None leaves `verdict` empty.
        writing: the models and what they need; None for none.

    Returns:
        `done` with candidates, or `needs_kernel` with a kernel file to fill in and the reason.

    Raises:
        InvalidInput: neither intent nor problem; an argument outside its range; an unknown problem.
        ModelFailed: `model_unavailable`: the generator named has no model, or that cannot be reached;
            `model_reply_unusable`: none of its texts held a kernel.
    """
    if generator not in GENERATORS:
        raise InvalidInput(f"unknown generator {generator[:40]!r}; choose from {', '.join(GENERATORS)}")
    writing = writing or Writing()
    if generator in ENABLE and generator not in writing.models:
        raise ModelFailed(f"the {generator} generator has no model: {ENABLE[generator]}", code="model_unavailable")
    if not 1 <= count <= MAX_COUNT:
        raise InvalidInput(f"count is {count}; give 1 to {MAX_COUNT}")
    if intent is None and problem is None:
        raise InvalidInput("give an intent in plain English or a problem")
    wanted, assumed, refused = _understand(intent, problem, axes, dtype)
    if generator in ENABLE:
        asked = _Asked(intent=intent, axes=axes or {}, dtype=dtype, count=count, verify=verify)
        return _written(writing.models[generator], asked, wanted, assumed, refused, writing)
    answer = _from_catalogue(wanted, assumed, refused, count, verify)
    helper = next((writing.models[name] for name in ENABLE if name in writing.models), None)
    if answer.status == "done" or generator == "catalogue" or helper is None:
        return answer
    asked = _Asked(intent=intent, axes=axes or {}, dtype=dtype, count=count, verify=verify)
    try:
        return _written(helper, asked, wanted, assumed, refused, writing)
    except ModelFailed as error:
        return dataclasses.replace(answer, warnings=(*answer.warnings, f"{helper.name}: {error}"))


def _from_catalogue(
    wanted: Problem | None, assumed: tuple[str, ...], refused: str | None, count: int, verify: Verify | None
) -> Generated:
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
        summary=_summary(wanted, chosen, assumed, source="from the catalogue"),
        next_action=_next_action(wanted, chosen),
        warnings=warnings,
    )


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The arguments of one call, for a model."""

    intent: str | None
    axes: Mapping[str, int]
    dtype: str | None
    count: int
    verify: Verify | None

    @property
    def text(self) -> str:
        """The intent with what was given beside it."""
        sizes = ", ".join(f"{name}={size}" for name, size in self.axes.items())
        beside = [f"element type {self.dtype}"] * (self.dtype is not None) + [f"sizes {sizes}"] * bool(sizes)
        return "\n".join([self.intent or "", *beside])


def _written(
    model: Model,
    asked: _Asked,
    wanted: Problem | None,
    assumed: tuple[str, ...],
    refused: str | None,
    writing: Writing,
) -> Generated:
    """Kernels that a model writes, for the problem as understood or as the model drafts it."""
    if wanted is None:
        intent = asked.intent or ""
        if len(intent) > MAX_CHARACTERS or not any(char.isalpha() for char in intent) or writing.admit is None:
            return _needs_kernel(None, assumed, refused or "")
        wanted = draft_problem(model, asked.text, admit=writing.admit)
        assumed = (
            *assumed,
            f"the problem {wanted.name} was drafted by {model.name}: read its reference before you rely on a verdict",
        )
    checks = Checks(verify=asked.verify, fingerprint=writing.fingerprint, measure=writing.measure)
    written = write_kernels(model, wanted, intent=asked.intent, count=asked.count, checks=checks)
    if not written.candidates:
        raise _nothing_written(model, written)
    return Generated(
        status="done",
        candidates=written.candidates,
        problem=wanted,
        assumed=assumed,
        summary=_summary(wanted, written.candidates, assumed, source=f"by {model.name}"),
        next_action=_next_action(wanted, written.candidates),
        warnings=written.warnings,
    )


def _nothing_written(model: Model, written: Written) -> ModelFailed:
    if written.failure is not None:
        return written.failure
    last = written.attempts[-1] if written.attempts else None
    return ModelFailed(
        f"none of the {len(written.attempts)} texts of {model.name} held a usable kernel: try another model",
        code="model_reply_unusable",
        reply="" if last is None else last.reply,
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
        verdict = _verdict_in_time(candidate.kernel, problem, verify)
        judged = dataclasses.replace(candidate, verdict=verdict)
        (accepted if verdict.status == "accepted" else others).append(judged)
        if len(accepted) == count:
            break
    warnings = tuple(f"{item.strategy} was not accepted: {_why_not(item.verdict)}" for item in others)
    return tuple([*accepted, *others][:count]), warnings


def _verdict_in_time(kernel: Kernel, problem: Problem, verify: Verify) -> Verdict:
    """The verdict of a kernel of the catalogue. These kernels end: one that did not in its time was kept from running.

    So it is tried once more, and a second time-out says nothing against it: it stays unverified, to be tried later.
    """
    verdict = verify(kernel, problem)
    if verdict.reason == "timed_out":
        verdict = verify(kernel, problem)
    if verdict.reason != "timed_out":
        return verdict
    detail = f"{verdict.detail}, twice; this kernel ends where the machine has time for it"
    again = "Try again when less runs on this machine, or give kernels longer with OPTIML_KERNEL_TIMEOUT_S."
    summary = f"Not verified: {detail}."
    return dataclasses.replace(
        verdict, status="unverified", reason=None, detail=detail, summary=summary, next_action=again
    )


def _why_not(verdict: Verdict | None) -> str:
    if verdict is None:
        return "it was not verified"
    return f"{verdict.reason or verdict.status}: {verdict.detail or verdict.summary}"


def _summary(problem: Problem, chosen: tuple[Candidate, ...], assumed: tuple[str, ...], *, source: str) -> str:
    entry = problem.bench[0] if problem.bench else problem.workloads[0]
    sizes = ", ".join(f"{name}={value}" for name, value in {**entry.axes, **entry.scalars}.items())
    accepted = sum(item.verdict is not None and item.verdict.status == "accepted" for item in chosen)
    kernels = f"{len(chosen)} kernel{'s' if len(chosen) != 1 else ''} {source}"
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
    which = f"problem {problem.name}" if is_builtin(problem, problem.name) else "this problem"
    return (
        f"Profile kernel {best.kernel_id} with profile_ncu, or make it faster: "
        f"run_mcts with action start, {which} and this kernel."
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
