"""How often the generators write a kernel that builds and is right: build@k and pass@k over the prompts.

Arms: the catalogue, and for the models that are set up: each expert alone (the best of them is named), the router
alone (the expert that it chooses answers by itself), the best of as many texts of the best expert as cost the tokens of
one text of the mixture, and the mixture. The problem of the prompt says whether a kernel is right, never the
generator's own reading of it. An arm whose model is not set up is reported as not run.

One attempt of an arm is one text, but for best-of-k, whose attempt is k texts of which the verifier chooses: it passes
where any of them does. k is the ratio of the tokens that the mixture and the expert spent on a text, which is no whole
number: the ones below and above are mixed so that both sides spend the same on average. `counted` says so in results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from optiml.bench.estimators import at_budget, interval, paired
from optiml.bench.prompts import Prompt
from optiml.errors import InvalidInput, ModelFailed
from optiml.generate.reply import kernel_in
from optiml.generate.writer import SPREAD, kernel_task
from optiml.llm.model import Ensemble, Model
from optiml.records import Generated, Kernel, Verdict
from optiml.workbench import Workbench

KS = (1, 5, 10)
ARMS = ("catalogue", "chat", "experts", "router_only", "best_of_k", "mixture")
MOST_DRAWN = 64  # texts of one expert that stand against one text of the mixture
ONE_TEXT = "an attempt is one text; it passes where the kernel in it is accepted"
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class PromptResult:
    """What one arm made of one prompt."""

    prompt: str
    inside: bool
    samples: int
    built: int
    passed: int
    tokens_out: int | None
    outcome: str  # of the first sample: accepted, a reason of contract §6, refused, wrong_problem, unreadable


@dataclass(frozen=True, kw_only=True)
class Rates:
    """build@k and pass@k of k attempts, with a 95 % interval of pass@1; None where too few texts were drawn."""

    prompts: int
    build_at: Mapping[str, float | None]
    pass_at: Mapping[str, float | None]
    pass_at_1_ci95: tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """One generator over all prompts."""

    arm: str
    model: str | None
    status: str  # done | not run | failed
    why: str | None = None
    every: Rates | None = None
    inside: Rates | None = None  # prompts whose operator the catalogue has
    outside: Rates | None = None
    wrong_problems: int = 0  # kernels for another problem than the one asked for
    refused: int = 0
    tokens_out: int | None = None
    results: tuple[PromptResult, ...] = ()
    texts: float = 1.0  # in one attempt, on average
    tokens_per_attempt: float | None = None  # written, by all experts at work; what they read first is not counted
    counted: str = ""  # what an attempt is and when it passes


@dataclass(frozen=True, kw_only=True)
class Difference:
    """pass@1 of `first` minus that of `second`, paired over the prompts."""

    first: str
    second: str
    mean: float
    ci95: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class GenerateBench:
    """The whole measurement."""

    prompts: int
    inside: int
    samples: int
    seed: int
    device: str
    arms: tuple[ArmResult, ...]
    best_single_expert: str | None
    differences: tuple[Difference, ...]
    schema: int = 1


def bench_generate(
    bench: Workbench,
    prompts: Sequence[Prompt],
    *,
    arms: Sequence[str] = ARMS,
    samples: int = 1,
    seed: int = 0,
    device: str = "auto",
    on_progress: Progress = lambda text: None,
) -> GenerateBench:
    """Run the arms over the prompts.

    Args:
        samples: texts of each model for each prompt; pass@k needs k of them.

    Raises:
        InvalidInput: an unknown arm, or no prompts.
    """
    for arm in arms:
        if arm not in ARMS:
            raise InvalidInput(f"unknown arm {arm[:40]!r}: choose from {', '.join(ARMS)}")
    if not prompts:
        raise InvalidInput("there are no prompts to run")
    runner = _Runner(bench=bench, prompts=prompts, samples=samples, seed=seed, device=device, tell=on_progress)
    models = dict(bench.models)
    found: list[ArmResult] = []
    if "catalogue" in arms:
        found.append(runner.catalogue())
    if "chat" in arms:
        found.append(runner.model("chat", models.get("chat"), "no chat model is set up ([chat] in optiml.toml)"))
    ensembles = {name: model for name, model in models.items() if isinstance(model, Ensemble)}
    if not ensembles:
        why = "no mixture is set up ([mixture] or [text_mixture] in optiml.toml)"
        found += [_not_run(arm, why) for arm in ("experts", "router_only", "best_of_k", "mixture") if arm in arms]
    for name, mixture in ensembles.items():
        found += runner.ensemble(name, mixture, arms)
    best = _best([item for item in found if item.arm.startswith("expert:")])
    return GenerateBench(
        prompts=len(prompts),
        inside=sum(prompt.inside for prompt in prompts),
        samples=samples,
        seed=seed,
        device=bench.evaluator(device).device.info.name,
        arms=tuple(found),
        best_single_expert=None if best is None else best.arm,
        differences=_differences(found, best),
    )


@dataclass(frozen=True, kw_only=True)
class _Runner:
    bench: Workbench
    prompts: Sequence[Prompt]
    samples: int
    seed: int
    device: str
    tell: Progress

    # --- arms --------------------------------------------------------------------------------------------------------
    def catalogue(self) -> ArmResult:
        """Its first kernel for each text; the text alone decides the problem."""
        return _arm("catalogue", None, [self._from_catalogue(prompt) for prompt in self.prompts])

    def model(self, arm: str, model: Model | None, why_not: str) -> ArmResult:
        if model is None:
            return _not_run(arm, why_not)
        results = []
        for prompt in self.prompts:
            try:
                results.append(self._written(arm, prompt, model))
            except ModelFailed as error:
                return ArmResult(arm=arm, model=model.name, status="failed", why=f"{error.code}: {error}")
        return _arm(arm, model.name, results)

    def ensemble(self, name: str, mixture: Ensemble, arms: Sequence[str]) -> list[ArmResult]:
        """The mixture, its parts, and the best part at the mixture's cost."""
        found = []
        if "experts" in arms:
            found += [self.model(f"expert:{part.name}", part, "") for part in mixture.experts()]
        if "router_only" in arms:
            found.append(self.model(f"router_only:{name}", mixture.router_only(), ""))
        whole = self.model(name, mixture, "") if {"mixture", "best_of_k"} & set(arms) else None
        if "best_of_k" in arms:
            best = _best([item for item in found if item.arm.startswith("expert:")])
            found.append(self._best_of_k(name, mixture, best, whole))
        if whole is not None and "mixture" in arms:
            found.append(whole)
        return found

    def _best_of_k(
        self, name: str, mixture: Ensemble, best: ArmResult | None, whole: ArmResult | None
    ) -> ArmResult:  # fmt: skip
        """As many texts of the best expert as the tokens of one text of the mixture pay for; one right one counts."""
        arm = f"best_of_k:{name}"
        if best is None or whole is None or whole.status != "done":
            return _not_run(arm, "it needs the arms experts and mixture")
        if not best.tokens_per_attempt or not whole.tokens_per_attempt:
            return _not_run(arm, "a model does not say how many tokens it wrote")
        expert = next(part for part in mixture.experts() if f"expert:{part.name}" == best.arm)
        ratio = whole.tokens_per_attempt / best.tokens_per_attempt
        texts = round(min(float(MOST_DRAWN), max(1.0, ratio)), 3)
        results: Sequence[PromptResult] = best.results
        if ceil(texts) > self.samples:
            try:
                results = [self._written(arm, prompt, expert, samples=ceil(texts)) for prompt in self.prompts]
            except ModelFailed as error:
                return ArmResult(arm=arm, model=expert.name, status="failed", why=f"{error.code}: {error}")
        return _arm(arm, expert.name, results, texts=texts, counted=_equal_tokens(best, whole, texts, ratio))

    # --- one prompt --------------------------------------------------------------------------------------------------
    def _from_catalogue(self, prompt: Prompt) -> PromptResult:
        made: Generated = self.bench.generate(prompt.text, generator="catalogue", verify=False, device=self.device)
        if not made.candidates or made.problem is None:
            return self._result("catalogue", prompt, [("refused", False, False)], tokens=0)
        if not prompt.inside or made.problem.name != prompt.problem.name:
            return self._result("catalogue", prompt, [("wrong_problem", False, False)], tokens=0)
        return self._result("catalogue", prompt, [self._judged(made.candidates[0].kernel, prompt)], tokens=0)

    def _written(
        self, arm: str, prompt: Prompt, model: Model, *, samples: int | None = None
    ) -> PromptResult:  # fmt: skip
        count = samples or self.samples
        question = kernel_task(prompt.problem, prompt.text)
        try:
            texts = model.complete(question, samples=count, temperature=SPREAD, seed=self.seed)
        except ModelFailed as error:
            if error.code != "model_reply_unusable":
                raise
            return self._result(arm, prompt, [("unreadable", False, False)] * count, tokens=None)
        outcomes = []
        for text in texts:
            try:
                outcomes.append(self._judged(kernel_in(text, prompt.problem), prompt))
            except InvalidInput:
                outcomes.append(("unreadable", False, False))
        return self._result(arm, prompt, outcomes, tokens=_total([text.tokens_out for text in texts]))

    def _judged(self, kernel: Kernel, prompt: Prompt) -> tuple[str, bool, bool]:
        """Outcome, built, passed."""
        try:
            verdict: Verdict = self.bench.verify(kernel, prompt.problem, device=self.device, seed=self.seed)
        except InvalidInput:
            return "unreadable", False, False
        return verdict.reason or verdict.status, verdict.build is not None, verdict.status == "accepted"

    def _result(
        self, arm: str, prompt: Prompt, outcomes: Sequence[tuple[str, bool, bool]], *, tokens: int | None
    ) -> PromptResult:
        self.tell(f"{arm}: {prompt.id}: {outcomes[0][0]}")
        return PromptResult(
            prompt=prompt.id,
            inside=prompt.inside,
            samples=len(outcomes),
            built=sum(built for _, built, _ in outcomes),
            passed=sum(passed for _, _, passed in outcomes),
            tokens_out=tokens,
            outcome=outcomes[0][0],
        )


# --- summing up ------------------------------------------------------------------------------------------------------
def _arm(
    arm: str, model: str | None, results: Sequence[PromptResult], *, texts: float = 1.0, counted: str = ONE_TEXT
) -> ArmResult:
    tokens = _total([item.tokens_out for item in results])
    written = sum(item.samples for item in results)
    return ArmResult(
        arm=arm,
        model=model,
        status="done",
        every=_rates(results, texts),
        inside=_rates([item for item in results if item.inside], texts),
        outside=_rates([item for item in results if not item.inside], texts),
        wrong_problems=sum(item.outcome == "wrong_problem" for item in results),
        refused=sum(item.outcome == "refused" for item in results),
        tokens_out=tokens,
        results=tuple(results),
        texts=texts,
        tokens_per_attempt=None if tokens is None or not written else round(texts * tokens / written, 1),
        counted=counted,
    )


def _equal_tokens(best: ArmResult, whole: ArmResult, texts: float, ratio: float) -> str:
    """What an attempt of best-of-k is, with the tokens of both sides."""
    few = int(texts)
    drawn = f"{few}" if few == texts else f"{few} or {few + 1} (mean {texts:.2f})"
    spent = texts * (best.tokens_per_attempt or 0.0)
    limited = (
        ""
        if 1 <= ratio <= MOST_DRAWN
        else f"; the tokens would pay for {ratio:.2f}, at least 1 and at most {MOST_DRAWN} count"
    )
    return (
        f"an attempt is {drawn} texts of {best.arm}, {spent:.0f} tokens against {whole.tokens_per_attempt:.0f} of the "
        f"mixture's one text{limited}; it passes where the verifier accepts any of them"
    )


def _not_run(arm: str, why: str) -> ArmResult:
    return ArmResult(arm=arm, model=None, status="not run", why=why)


def _rates(results: Sequence[PromptResult], texts: float) -> Rates:
    def mean_at(k: int, count: Callable[[PromptResult], int]) -> float | None:
        values = [at_budget(item.samples, count(item), k * texts) for item in results]
        known = [value for value in values if value is not None]
        return round(float(np.mean(known)), 4) if known and len(known) == len(values) else None

    return Rates(
        prompts=len(results),
        build_at={str(k): mean_at(k, lambda item: item.built) for k in KS},
        pass_at={str(k): mean_at(k, lambda item: item.passed) for k in KS},
        pass_at_1_ci95=interval(_passes(results, texts)),
    )


def _passes(results: Sequence[PromptResult], texts: float) -> list[float]:
    """pass@1 of each prompt."""
    return [at_budget(item.samples, item.passed, texts) or 0.0 for item in results]


def _best(experts: Sequence[ArmResult]) -> ArmResult | None:
    """The expert with the highest pass@1 on these very prompts, which favours it a little."""
    done = [(item, item.every.pass_at["1"] or 0.0) for item in experts if item.status == "done" and item.every]
    return max(done, key=lambda pair: pair[1])[0] if done else None


def _differences(arms: Sequence[ArmResult], best: ArmResult | None) -> tuple[Difference, ...]:
    """Each mixture against everything else, and every model against the catalogue."""
    done = [item for item in arms if item.status == "done"]
    mixtures = [item for item in done if item.arm in ("mixture", "text_mixture")]
    pairs = [(first, second) for first in mixtures for second in done if second is not first]
    pairs += [(first, second) for first in done for second in done if second.arm == "catalogue" and first.arm == "chat"]
    found = []
    for first, second in pairs:
        if second.arm.startswith("expert:") and second is not best:
            continue
        mean, ci95 = paired(*(_passes(arm.results, arm.texts) for arm in (first, second)))
        found.append(Difference(first=first.arm, second=second.arm, mean=mean, ci95=ci95))
    return tuple(found)


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
