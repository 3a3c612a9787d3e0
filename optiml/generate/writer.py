"""Kernels and problems from a language model: ask, read strictly, check, and let it repair what the checks found.

One writer for every model: a chat endpoint, a text mixture, a mixture of local experts. Only the verdict of
`optiml.verify` says what a kernel is worth; nothing that a model says about its own text is used.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from optiml.codec import encode, kernel_id
from optiml.errors import InvalidInput, ModelFailed
from optiml.generate.reply import kernel_in, object_in
from optiml.generate.template import blank_problem, kernel_template
from optiml.llm.model import MAX_TOKENS, Completion, Message, Model
from optiml.llm.prompting import prompt, quoted
from optiml.records import Candidate, Kernel, Problem, Reason, Verdict

REPAIRS = 2
SPREAD = 0.8  # temperature where several samples should differ
KEPT_REPLY_CHARACTERS = 2_000
REMEMBERED_CHARACTERS = 24_000  # of an earlier reply, shown again when it is to be repaired
LOG_CHARACTERS = 2_000
PROBLEM_TOKENS = 2048
_REASONS: tuple[str, ...] = get_args(Reason)

Verify = Callable[[Kernel, Problem], Verdict]
Measure = Callable[[Kernel, Problem], float | None]
Fingerprint = Callable[[Kernel], str | None]
Admit = Callable[[Mapping[str, Any]], Problem]


@dataclass(frozen=True, kw_only=True)
class Checks:
    """What the writer asks about a kernel; None where it is not asked.

    Attributes:
        verify: the verdict.
        fingerprint: of the code it compiles to; None where it does not compile.
        measure: microseconds of an accepted kernel, modelled or measured; None where unknown.
    """

    verify: Verify | None = None
    fingerprint: Fingerprint | None = None
    measure: Measure | None = None


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One text of a model and what came of it."""

    sample: int
    repair: int  # 0 for the first text of a sample
    outcome: str  # accepted | unverified | duplicate | unreadable | a reason of contract §6 | written (not verified)
    built: bool | None  # None where it was not tried
    reply: str  # its start
    tokens_out: int | None


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a model wrote for one problem. Candidates stand in the order of `rank`."""

    candidates: tuple[Candidate, ...]
    attempts: tuple[Attempt, ...]
    warnings: tuple[str, ...] = ()
    failure: ModelFailed | None = None  # what ended the writing early


def write_kernels(
    model: Model,
    problem: Problem,
    *,
    intent: str | None,
    count: int,
    checks: Checks,
    repairs: int = REPAIRS,
    temperature: float | None = None,
    max_tokens: int = MAX_TOKENS,
    seed: int | None = None,
) -> Written:
    """`count` kernels, each with up to `repairs` corrections by what its reader, compiler or verdict said.

    A model that fails ends the writing; what was written before stays. Kernels that are equal in text or compile to
    equal code are kept once.

    Args:
        intent: the request in the user's words, shown to the model beside the problem.
        temperature: 0 for one sample and SPREAD for several, unless given.
    """
    session = _Session(model=model, problem=problem, checks=checks, max_tokens=max_tokens, seed=seed)
    question = kernel_task(problem, intent)
    if temperature is None:
        temperature = 0.0 if count == 1 else SPREAD
    try:
        firsts = model.complete(question, samples=count, max_tokens=max_tokens, temperature=temperature, seed=seed)
    except ModelFailed as error:
        return Written(candidates=(), attempts=(), failure=error)
    for sample, first in enumerate(firsts, start=1):
        session.follow(sample, question, first, repairs)
    return session.written()


def kernel_task(problem: Problem, intent: str | None) -> tuple[Message, ...]:
    """The messages that ask for a kernel of a problem."""
    wish = "" if intent is None else quoted(intent, label="the request")
    template = quoted(kernel_template(problem), label="the file")
    return (
        Message(role="system", text=prompt("kernel_system")),
        Message(role="user", text=prompt("kernel_task", intent=wish, template=template)),
    )


@dataclass(kw_only=True)
class _Session:
    """The kernels of one call so far."""

    model: Model
    problem: Problem
    checks: Checks
    max_tokens: int
    seed: int | None
    candidates: list[Candidate] = dataclasses.field(default_factory=list)
    attempts: list[Attempt] = dataclasses.field(default_factory=list)
    seen: set[str] = dataclasses.field(default_factory=set)  # kernel ids and fingerprints
    failure: ModelFailed | None = None

    def follow(self, sample: int, asked: tuple[Message, ...], completion: Completion, repairs: int) -> None:
        """Check one text, and its repairs until one is accepted or a duplicate."""
        messages = asked
        last: Candidate | None = None
        for repair in range(repairs + 1):
            candidate, why, facts = self._checked(sample, repair, completion)
            last = candidate or last
            if not why or repair == repairs or self.failure is not None:
                break
            messages = (
                *asked,
                Message(role="assistant", text=completion.text[:REMEMBERED_CHARACTERS] or "(nothing)"),
                Message(role="user", text=prompt("kernel_repair", why=why, facts=facts)),
            )
            try:
                completion = self.model.complete(messages, max_tokens=self.max_tokens, seed=self.seed)[0]
            except ModelFailed as error:
                self.failure = error
                break
        if last is not None:
            self.candidates.append(last)

    def _checked(self, sample: int, repair: int, completion: Completion) -> tuple[Candidate | None, str, str]:
        """The candidate of a text, and what to tell its writer; nothing to tell ends the sample."""
        try:
            kernel = kernel_in(completion, self.problem)
        except InvalidInput as error:
            self._note(sample, repair, completion, "unreadable", None)
            return None, str(error), ""
        fingerprint = None if self.checks.fingerprint is None else self.checks.fingerprint(kernel)
        built = None if self.checks.fingerprint is None else fingerprint is not None
        names = {kernel_id(kernel), *(() if fingerprint is None else (fingerprint,))}
        if names & self.seen:
            self._note(sample, repair, completion, "duplicate", built)
            return None, "", ""
        self.seen |= names
        verdict = None if self.checks.verify is None else self.checks.verify(kernel, self.problem)
        candidate = Candidate(
            kernel_id=kernel_id(kernel),
            kernel=kernel,
            generator=self.model.name,
            strategy=f"sample {sample}" + (f", repair {repair}" if repair else ""),
            rationale=f"written by {self.model.name}" + (f" and repaired {repair} times" if repair else ""),
            verdict=verdict,
        )
        if verdict is None:
            self._note(sample, repair, completion, "written", built)
            return candidate, "", ""
        self._note(sample, repair, completion, verdict.reason or verdict.status, verdict.build is not None)
        if verdict.status == "rejected":
            why = f"{verdict.reason}: {verdict.detail or verdict.summary}"
            return candidate, why[:LOG_CHARACTERS], _facts(verdict)
        return candidate, "", ""

    def _note(self, sample: int, repair: int, completion: Completion, outcome: str, built: bool | None) -> None:
        self.attempts.append(
            Attempt(
                sample=sample,
                repair=repair,
                outcome=outcome,
                built=built,
                reply=completion.text[:KEPT_REPLY_CHARACTERS],
                tokens_out=completion.tokens_out,
            )
        )

    def written(self) -> Written:
        counts: dict[str, int] = {}
        for attempt in self.attempts:
            counts[attempt.outcome] = counts.get(attempt.outcome, 0) + 1
        told = {
            "unreadable": "held no usable kernel",
            "duplicate": "were equal to an earlier one and left out",
        }
        warnings = [
            f"{counts[name]} of {len(self.attempts)} texts {what}" for name, what in told.items() if name in counts
        ]
        if self.failure is not None:
            warnings.append(f"the model failed: {self.failure}")
        return Written(
            candidates=rank(self.candidates, self.problem, self.checks.measure),
            attempts=tuple(self.attempts),
            warnings=tuple(warnings),
            failure=self.failure,
        )


def rank(candidates: list[Candidate], problem: Problem, measure: Measure | None) -> tuple[Candidate, ...]:
    """By verdict (accepted, unverified or unasked, rejected by how far it came), then by time, then by age."""

    def key(item: Candidate) -> tuple[int, float, int]:
        verdict = item.verdict
        if verdict is None or verdict.status == "unverified":
            return 1, 0.0, 0
        if verdict.status == "rejected":
            return 2, 0.0, -_REASONS.index(verdict.reason or _REASONS[0])
        time = None if measure is None else measure(item.kernel, problem)
        return 0, float("inf") if time is None else time, 0

    return tuple(sorted(candidates, key=key))


def _facts(verdict: Verdict) -> str:
    """What helps to find the mistake: the compiler's log, the fault, the first wrong value. All of it quoted."""
    facts = []
    if verdict.build is None and verdict.summary:
        facts.append(verdict.summary)
    if verdict.build is not None and verdict.build.log:
        facts.append(verdict.build.log)
    if verdict.fault is not None:
        facts.append(f"fault: {json.dumps(encode(verdict.fault), default=str)}")
    if verdict.first_mismatch is not None:
        facts.append(f"first mismatch: {json.dumps(encode(verdict.first_mismatch), default=str)}")
    return quoted("\n".join(facts), label="facts", limit=LOG_CHARACTERS) if facts else ""


# --- problems --------------------------------------------------------------------------------------------------------
def draft_problem(model: Model, intent: str, *, admit: Admit, repairs: int = REPAIRS) -> Problem:
    """The Problem that an intent describes, as a model specifies it, marked `drafted`.

    Args:
        admit: checks a record and runs its reference in the sandbox; raises InvalidInput where it is not usable.

    Raises:
        ModelFailed: `model_unavailable`; or `model_reply_unusable`: no text was a usable specification, or the model
            finds that the intent does not say what to compute.
    """
    system = Message(role="system", text=prompt("problem_system", example=_example()))
    task = Message(role="user", text=prompt("problem_task", intent=quoted(intent, label="the request")))
    messages: tuple[Message, ...] = (system, task)
    why, reply = "", ""
    for _ in range(repairs + 1):
        completion = model.complete(messages, max_tokens=PROBLEM_TOKENS)[0]
        reply = completion.text
        try:
            fields = object_in(completion)
            if "unclear" in fields:
                said = " ".join(str(fields["unclear"]).split())[:200]
                raise ModelFailed(f"the intent does not say what to compute: {said}", code="model_reply_unusable")
            return dataclasses.replace(admit(_drafted_fields(fields)), drafted=True)
        except InvalidInput as error:
            why = str(error)[:LOG_CHARACTERS]
        messages = (
            system,
            task,
            Message(role="assistant", text=reply[:REMEMBERED_CHARACTERS] or "(nothing)"),
            Message(role="user", text=prompt("problem_repair", why=why)),
        )
    raise ModelFailed(
        f"the model gave no usable specification of the problem: {why}",
        code="model_reply_unusable",
        reply=reply[:KEPT_REPLY_CHARACTERS],
    )


def _drafted_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Only what a draft may decide: no oracle kernel, no other framework, no tolerance, no files."""
    given = {name: value for name, value in fields.items() if name not in ("tolerance", "baselines", "schema")}
    if not isinstance(given.get("reference"), str) or given.get("reference_framework", "numpy") != "numpy":
        raise InvalidInput("reference must be the text of a numpy function run(...)")
    for workload in (*_tables(given.get("workloads")), *_tables(given.get("bench"))):
        inputs = workload.get("inputs")
        if any("npy" in spec for spec in _tables(list(inputs.values()) if isinstance(inputs, dict) else [])):
            raise InvalidInput("workloads may not name files")
    return {**given, "drafted": True}


def _tables(value: object) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list | tuple) else []


def _example() -> str:
    shown = dataclasses.replace(
        blank_problem(),
        name="clamp",
        description="y[i] = min(max(x[i], low), high)",
        reference="def run(x):\n    return np.clip(x, -1.0, 1.0)",
    )
    kept = ("name", "description", "axes", "inputs", "outputs", "reference", "workloads")
    encoded = encode(shown)
    return json.dumps({name: _compact(encoded[name]) for name in kept}, indent=1)


def _compact(value: Any) -> Any:
    """Without empty fields."""
    if isinstance(value, dict):
        return {name: _compact(item) for name, item in value.items() if item not in (None, {}, [])}
    return [_compact(item) for item in value] if isinstance(value, list) else value
