"""The catalogue of strategies, and which problem a strategy may be used for."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from optiml.errors import InvalidInput
from optiml.generate import catalogue
from optiml.generate.catalogue import Strategy, applicable, is_builtin, strategies, strategy_kernel
from optiml.problems.kernel_check import check_kernel
from optiml.problems.problem import builtin_names, load_builtin, with_axes, with_dtype
from optiml.records import Axis, Problem

METRIC_NAME = re.compile(r"[a-z0-9]+__[a-z0-9_]+(\.(sum|avg|max|min|pct|ratio|per_second)(\.[a-z_]+)?)?")
ALL = [strategy for name in builtin_names() for strategy in strategies(name)]


@pytest.mark.parametrize("name", builtin_names())
def test_every_problem_has_at_least_two_strategies_beside_its_seed(name: str) -> None:
    assert len(strategies(name)) >= 2
    assert len({strategy.title for strategy in strategies(name)}) == len(strategies(name))


@pytest.mark.parametrize("strategy", ALL, ids=lambda item: f"{item.problem}-{item.name}")
def test_a_strategy_is_a_sound_kernel_of_its_problem_in_each_of_its_dtypes(strategy: Strategy) -> None:
    builtin = load_builtin(strategy.problem)
    assert strategy.title
    assert strategy.rationale
    assert set(strategy.dtypes) <= set(builtin.dtypes)
    for dtype in strategy.dtypes:
        kernel = check_kernel(strategy_kernel(strategy, dtype), with_dtype(builtin, dtype))
        assert kernel.launches
        assert "//@ types" not in kernel.source


def test_strategies_name_what_they_lower_as_nsight_compute_does() -> None:
    odd = {metric for strategy in ALL for metric in strategy.moves if not METRIC_NAME.fullmatch(metric)}
    assert odd == set()


def test_a_problem_that_is_not_built_in_has_no_strategies() -> None:
    assert strategies("frobnicate") == ()


def softmax() -> Problem:
    return load_builtin("softmax").problem


def first_strategy() -> Strategy:
    return strategies("softmax")[0]


def test_a_strategy_applies_to_its_problem_at_any_size_and_dtype() -> None:
    assert applicable(first_strategy(), with_axes(softmax(), {"R": 3, "C": 5}), "float32")
    assert applicable(first_strategy(), with_dtype(load_builtin("softmax"), "float16"), "float16")


def test_a_strategy_does_not_apply_to_a_dtype_it_was_not_written_for() -> None:
    narrow = dataclasses.replace(first_strategy(), dtypes=("float16",))
    assert not applicable(narrow, softmax(), "float32")


def test_a_problem_that_only_looks_like_a_built_in_one_is_not_taken_for_it() -> None:
    other = dataclasses.replace(softmax(), reference="def run(x):\n    return x")
    renamed = dataclasses.replace(softmax(), name="my_softmax")
    assert not is_builtin(other, "softmax")
    assert not is_builtin(renamed, "softmax")
    assert not applicable(first_strategy(), other, "float32")


def test_a_narrower_domain_is_still_the_built_in_problem_and_a_wider_one_is_not() -> None:
    def with_columns(axis: Axis) -> Problem:
        return dataclasses.replace(softmax(), axes={**softmax().axes, "C": axis})

    assert is_builtin(with_columns(Axis(type="const", value=4096)), "softmax")
    assert is_builtin(with_columns(Axis(type="var", min=1, max=100)), "softmax")
    assert is_builtin(with_columns(Axis(type="var", choices=(128, 256))), "softmax")
    assert not is_builtin(with_columns(Axis(type="var", min=1, max=1 << 30)), "softmax")


def test_a_requirement_holds_if_the_problem_says_so_or_all_its_sizes_meet_it() -> None:
    strategy = dataclasses.replace(first_strategy(), requires=("C % 4 == 0",))
    constrained = dataclasses.replace(softmax(), constraints=("C%4 == 0",))
    fixed = dataclasses.replace(softmax(), axes={**softmax().axes, "C": Axis(type="const", value=64)})
    odd = dataclasses.replace(softmax(), axes={**softmax().axes, "C": Axis(type="var", choices=(64, 65))})
    assert not applicable(strategy, softmax(), "float32")
    assert applicable(strategy, constrained, "float32")
    assert applicable(strategy, fixed, "float32")
    assert not applicable(strategy, odd, "float32")


def test_a_file_without_its_table_names_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "relu"
    folder.mkdir()
    (folder / "odd.cu").write_text("/* optiml\n[params]\nBLOCK = 1\n*/\n", encoding="utf-8")
    monkeypatch.setattr(catalogue, "FOLDER", folder.parent)
    strategies.cache_clear()
    try:
        with pytest.raises(InvalidInput, match=r"relu/odd\.cu \[strategy\]"):
            strategies("relu")
    finally:
        strategies.cache_clear()
