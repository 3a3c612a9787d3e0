"""What `optiml bench` computes: the estimators by hand, the prompts, and the arms with scripted models."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from llm_fakes import ScriptedModel, fenced

from optiml.bench.estimators import at_budget, at_k, interval, paired
from optiml.bench.generate import PromptResult, bench_generate
from optiml.bench.prompts import load_prompts
from optiml.bench.search import SUITE, bench_search
from optiml.errors import InvalidInput, ModelFailed
from optiml.generate.intent import read_intent
from optiml.generate.template import kernel_template
from optiml.kernel_file import write_kernel_text
from optiml.llm.model import Completion, Ensemble, Message, Model
from optiml.llm.text_mixture import Expert, TextMixture
from optiml.problems.problem import builtin_names
from optiml.settings import Settings
from optiml.workbench import Workbench, seed_kernel

PROMPTS = {item.id: item for item in load_prompts()}


# --- estimators ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("samples", "right", "k"), [(5, 2, 1), (5, 2, 3), (6, 1, 2), (4, 0, 2), (4, 4, 4), (4, 2, 3)])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_one(samples: int, right: int, k: int) -> None:
    draws = list(itertools.combinations(range(samples), k))
    assert at_k(samples, right, k) == pytest.approx(sum(min(draw) < right for draw in draws) / len(draws))


def test_pass_at_k_needs_k_samples() -> None:
    assert at_k(4, 4, 5) is None
    with pytest.raises(ValueError):
        at_k(4, 5, 1)


def test_a_budget_between_two_numbers_of_texts_mixes_their_rates() -> None:
    assert at_budget(4, 1, 1.25) == pytest.approx(0.75 * 0.25 + 0.25 * 0.5)
    assert at_budget(4, 1, 2.0) == at_k(4, 1, 2)
    assert at_budget(2, 1, 2.1) is None


def test_a_paired_interval_is_narrower_than_two_separate_ones() -> None:
    easy_and_hard = [0.0, 1.0] * 20
    better = [min(1.0, value + 0.1) for value in easy_and_hard]
    mean, (low, high) = paired(better, easy_and_hard)
    assert mean == pytest.approx(0.05)
    alone = interval(better)
    assert alone is not None
    assert high - low < alone[1] - alone[0]
    assert low < mean < high


def test_intervals_are_the_same_each_time() -> None:
    assert interval([0.0, 1.0, 1.0]) == interval([0.0, 1.0, 1.0])
    assert interval([]) is None


# --- prompts ---------------------------------------------------------------------------------------------------------
def test_the_prompts_are_enough_and_a_third_lies_outside_the_catalogue() -> None:
    assert len(PROMPTS) >= 60
    outside = [item for item in PROMPTS.values() if not item.inside]
    assert len(outside) >= len(PROMPTS) / 3
    assert {item.problem.name for item in PROMPTS.values() if item.inside} == set(builtin_names())
    assert not {item.problem.name for item in outside} & set(builtin_names())


def test_no_prompt_outside_the_catalogue_is_taken_for_a_built_in_problem() -> None:
    taken = [item.id for item in PROMPTS.values() if not item.inside and read_intent(item.text).problem_name]
    assert taken == []


def test_every_prompt_can_be_put_to_a_model() -> None:
    for item in PROMPTS.values():
        assert "__global__" in kernel_template(item.problem)


def test_the_suite_asks_for_what_it_names() -> None:
    assert {name: read_intent(text).problem_name for name, text in SUITE.items()} == {name: name for name in SUITE}


# --- arms ------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return Workbench(Settings(home=tmp_path_factory.mktemp("home")))


def with_models(bench: Workbench, models: dict[str, Model]) -> Workbench:
    bench._models = models
    return bench


RELU = PROMPTS["relu_plain"]
GOOD = fenced(write_kernel_text(seed_kernel(RELU.problem)))


def arms_of(bench: Workbench, models: dict[str, Model], *, samples: int = 2, ids: tuple[str, ...] = ("relu_plain",)):  # type: ignore[no-untyped-def]
    chosen = tuple(PROMPTS[name] for name in ids)
    found = bench_generate(with_models(bench, models), chosen, samples=samples)
    return found, {item.arm: item for item in found.arms}


def test_without_models_their_arms_are_reported_as_not_run(bench: Workbench) -> None:
    found, arms = arms_of(bench, {}, ids=("relu_plain", "sigmoid"))
    assert (found.prompts, found.inside) == (2, 1)
    catalogue = arms["catalogue"]
    assert [item.outcome for item in catalogue.results] == ["accepted", "refused"]
    assert catalogue.every is not None
    assert catalogue.every.pass_at == {"1": 0.5, "5": None, "10": None}
    assert {item.status for name, item in arms.items() if name != "catalogue"} == {"not run"}


def test_texts_of_a_model_are_counted_as_they_are(bench: Workbench) -> None:
    found, arms = arms_of(bench, {"chat": ScriptedModel(["no kernel", GOOD])})
    assert arms["chat"].results == (
        PromptResult(
            prompt="relu_plain", inside=True, samples=2, built=1, passed=1,
            tokens_out=2 + len(GOOD.split()), outcome="unreadable",
        ),
    )  # fmt: skip
    assert [(item.first, item.second) for item in found.differences] == [("chat", "catalogue")]


class Counting:
    """An `Ensemble` whose mixture is always wrong, and spends 3 tokens where its only expert spends 2."""

    name = "mixture"

    def __init__(self, texts: list[str]) -> None:
        self.expert = Fixed("only", texts, tokens=2)

    def experts(self) -> tuple[Model, ...]:
        return (self.expert,)

    def router_only(self) -> Model:
        return Fixed("router", ["no"] * 4, tokens=2)

    def complete(self, messages: Sequence[Message], **options: Any) -> tuple[Completion, ...]:
        return Fixed("mixture", ["no"] * 4, tokens=3).complete(messages, **options)

    def close(self) -> None:
        pass


class Fixed:
    """A `Model` that always writes the same texts."""

    def __init__(self, name: str, texts: list[str], *, tokens: int) -> None:
        self.name, self._texts, self._tokens = name, texts, tokens

    def complete(self, messages: Sequence[Message], *, samples: int = 1, **_: Any) -> tuple[Completion, ...]:
        return tuple(
            Completion(text=text, finish_reason="stop", tokens_in=1, tokens_out=self._tokens)
            for text in self._texts[:samples]
        )

    def close(self) -> None:
        pass


def test_best_of_k_has_the_tokens_of_the_mixture_and_says_so(bench: Workbench) -> None:
    found, arms = arms_of(bench, {"mixture": Counting([GOOD, "no", "no", "no"])}, samples=4)
    best = arms["best_of_k:mixture"]
    assert (best.texts, best.tokens_per_attempt, arms["mixture"].tokens_per_attempt) == (1.5, 3.0, 3.0)
    assert best.every is not None
    assert best.every.pass_at["1"] == pytest.approx((0.25 + 0.5) / 2)
    assert "1 or 2 (mean 1.50) texts of expert:only, 3 tokens against 3" in best.counted
    assert "any of them" in best.counted
    (gap,) = [item for item in found.differences if item.second == "best_of_k:mixture"]
    assert gap.mean == pytest.approx(-0.375)


def test_best_of_k_draws_again_where_too_few_texts_are_there(bench: Workbench) -> None:
    _, arms = arms_of(bench, {"mixture": Counting(["no", GOOD])}, samples=1)
    assert arms["expert:only"].results[0].passed == 0
    assert arms["best_of_k:mixture"].results[0].samples == 2
    assert arms["best_of_k:mixture"].every is not None
    assert arms["best_of_k:mixture"].every.pass_at["1"] == pytest.approx(0.75)


def test_a_mixture_is_measured_against_its_parts_at_its_own_cost(bench: Workbench) -> None:
    first = ScriptedModel([GOOD, *["no"] * 3, *["no", GOOD, "no", "no"] * 8], name="chat:first")
    second = ScriptedModel(["no"] * 40, name="chat:second")
    mixture = TextMixture([Expert(model=first), Expert(model=second)], active=2)
    assert isinstance(mixture, Ensemble)
    found, arms = arms_of(bench, {"text_mixture": mixture}, samples=1)
    assert list(arms) == [
        "catalogue", "chat", "expert:chat:first", "expert:chat:second", "router_only:text_mixture",
        "best_of_k:text_mixture", "text_mixture",
    ]  # fmt: skip
    assert found.best_single_expert == "expert:chat:first"
    assert arms["expert:chat:first"].results[0].passed == 1
    assert {item.second for item in found.differences} >= {"expert:chat:first", "catalogue"}


def test_a_model_that_is_gone_fails_its_arm_and_no_other(bench: Workbench) -> None:
    _, arms = arms_of(bench, {"chat": ScriptedModel([ModelFailed("gone")])})
    assert (arms["chat"].status, arms["catalogue"].status) == ("failed", "done")


def test_unknown_arms_and_problems_are_named(bench: Workbench) -> None:
    with pytest.raises(InvalidInput, match="magic"):
        bench_generate(bench, (RELU,), arms=("magic",))
    with pytest.raises(InvalidInput, match="no prompts"):
        bench_generate(bench, ())
    with pytest.raises(InvalidInput, match="softmax"):
        bench_search(bench, problems=("sofmax",))


def test_the_search_bench_reports_every_problem(tmp_path: Path) -> None:
    with Workbench(Settings(home=tmp_path)) as bench:
        found = bench_search(bench, problems=("prefix_sum",), evaluations=1)
    (row,) = found.rows
    assert (row.problem, row.start, row.status, row.evaluations) == ("prefix_sum", "seed", "finished", 1)
    assert found.geometric_mean == row.speedup
