"""Problems: semantic checks, domains, overrides."""

from __future__ import annotations

from typing import Any

import pytest

from optiml.codec import decode
from optiml.errors import InvalidInput
from optiml.problems.kernel_check import check_kernel
from optiml.problems.problem import (
    builtin_names,
    check_problem,
    kernel_from_text,
    load_builtin,
    named_distributions,
    satisfies,
    with_axes,
    with_dtype,
)
from optiml.records import Kernel, Problem

SCALE: dict[str, Any] = {
    "name": "scale",
    "axes": {"n": {"type": "var", "min": 1, "multiple_of": 2}, "k": {"type": "const", "value": 3}},
    "inputs": {"x": {"dtype": "float32", "shape": ["n", "k"]}, "a": {"dtype": "float32", "shape": None}},
    "outputs": {"y": {"dtype": "float32", "shape": ["n", "k"]}},
    "reference": "def run(x, a):\n    return a * x",
    "workloads": [{"axes": {"n": 4}, "scalars": {"a": 2.0}}],
    "bench": [{"axes": {"n": 4096}, "scalars": {"a": 2.0}}],
    "constraints": ["n <= 8192"],
}


INTEGERS_BEYOND_64_BITS = {"distribution": "integers", "low": 0, "high": 10**30}
INTEGERS_BEYOND_INT8 = {"distribution": "integers", "low": 0, "high": 1000}


def problem(**changes: object) -> Problem:
    return check_problem(decode(Problem, {**SCALE, **changes}, what="problem"))


def test_a_sound_problem_passes_unchanged() -> None:
    assert problem().workloads[0].axes == {"n": 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outputs": {}}, "no outputs"),
        ({"workloads": []}, "no workloads"),
        ({"reference": "x = 1"}, "run"),
        ({"constraints": ["m > 1"]}, "no axis or scalar"),
        ({"outputs": {"y": {"dtype": "float32", "shape": ["n", "z"]}}}, "'z'"),
        ({"outputs": {"y": {"dtype": "float32", "shape": None}}}, "no shape"),
        ({"outputs": {"x": {"dtype": "float64", "shape": ["n", "k"]}}}, "updated in place"),
        ({"workloads": [{"axes": {"n": 3}, "scalars": {"a": 1.0}}]}, "outside its domain"),
        ({"workloads": [{"axes": {"n": 10000}, "scalars": {"a": 1.0}}]}, "constraint"),
        ({"workloads": [{"axes": {}, "scalars": {"a": 1.0}}]}, "has no size"),
        ({"workloads": [{"axes": {"n": 4}}]}, "scalar 'a' has no value"),
        ({"workloads": [{"axes": {"n": 4}, "scalars": {"a": 1.0}, "inputs": {"x": "norml"}}]}, "did you mean 'normal'"),
        ({"axes": {"n": {"type": "const"}}}, "needs a value"),
        ({"axes": {"x": {"type": "var"}}}, "axis and an array"),
        ({"axes": {"n": {"type": "var", "min": 5, "max": 4}}}, "above max"),
        ({"name": "../evil"}, "usable name"),
        ({"tolerance": {"rtol": -1.0, "atol": 0.0}}, "negative"),
        ({"flops": "q"}, "flops"),
        (
            {"workloads": [{"axes": {"n": 4}, "scalars": {"a": 1.0}, "inputs": {"x": INTEGERS_BEYOND_64_BITS}}]},
            "holds integers from",
        ),
        (
            {
                "inputs": {"x": {"dtype": "int8", "shape": ["n", "k"]}, "a": {"dtype": "float32", "shape": None}},
                "workloads": [{"axes": {"n": 4}, "scalars": {"a": 1.0}, "inputs": {"x": INTEGERS_BEYOND_INT8}}],
            },
            "int8 holds integers from -128 to 127",
        ),
        (
            {
                "inputs": {"x": {"dtype": "float32", "shape": ["n", "k"]}, "a": {"dtype": "int8", "shape": None}},
                "workloads": [{"axes": {"n": 4}, "scalars": {"a": 300}}],
            },
            "scalar a = 300 is no int8",
        ),
    ],
)
def test_what_is_wrong_with_a_problem_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        problem(**changes)


def test_arrays_that_cannot_be_held_are_refused() -> None:
    with pytest.raises(InvalidInput) as caught:
        problem(
            axes={"n": {"type": "var"}, "k": {"type": "const", "value": 1 << 20}},
            constraints=[],
            workloads=[{"axes": {"n": 1 << 28}, "scalars": {"a": 1.0}}],
        )
    assert caught.value.code == "too_large"


def test_sizes_satisfy_domain_and_constraints() -> None:
    sound = problem()
    assert satisfies(sound, {"n": 8192}, {"a": 1.0})
    assert not satisfies(sound, {"n": 7}, {"a": 1.0})
    assert not satisfies(sound, {"n": 8194}, {"a": 1.0})


def test_axes_become_the_bench_entry() -> None:
    assert with_axes(problem(), {"n": 16}).bench[0].axes == {"n": 16}
    with pytest.raises(InvalidInput, match="no axis"):
        with_axes(problem(), {"rows": 16})
    with pytest.raises(InvalidInput, match="domain"):
        with_axes(problem(), {"n": 15})


def test_hidden_data_comes_from_the_named_distributions() -> None:
    named = problem(
        workloads=[
            {"axes": {"n": 4}, "scalars": {"a": 1.0}, "inputs": {"x": "negative"}},
            {"axes": {"n": 4}, "scalars": {"a": 1.0}, "inputs": {"x": {"values": [0.0] * 12}}},
        ],
        bench=[],
    )
    assert named_distributions(named, "x") == ("negative",)
    assert named_distributions(problem(), "x") == ("normal", "uniform", "negative", "large", "tiny")


def test_an_unknown_problem_names_the_nearest() -> None:
    with pytest.raises(InvalidInput, match="'softmax'") as caught:
        load_builtin("sofmax")
    assert caught.value.code == "unknown_problem"


def test_all_promised_problems_exist() -> None:
    promised = """relu gelu vector_add dot sum softmax layernorm rmsnorm matmul matrix_copy transpose max_pool3d
    cross_entropy multi_head_attention histogram prefix_sum conv2d"""
    assert set(promised.split()) <= set(builtin_names())


@pytest.mark.parametrize("name", builtin_names())
def test_every_seed_and_cheat_is_a_sound_kernel_record(name: str) -> None:
    builtin = load_builtin(name)
    for dtype in builtin.dtypes:
        wanted = with_dtype(builtin, dtype)
        for text in (builtin.seed_text, *builtin.cheats.values()):
            check_kernel(kernel_from_text(text, dtype=dtype), wanted)
    assert builtin.cheats


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ({"params": {"n": 1}}, "name of an axis"),
        ({"params": {"int": 1}}, "keyword"),
        ({"params": {"A B": 1}}, "letters"),
        ({"tunables": {"B": [1]}}, "no param"),
        ({"flags": ["-Xcompiler"]}, "not allowed"),
        ({"flags": ["--maxrregcount=8"]}, "not allowed"),
        ({"flags": ["-I/etc"]}, "not allowed"),
        ({"launches": [{"kernel": "k", "grid": [1, 1, 1, 1], "block": [1], "args": []}]}, "1 to 3"),
        ({"launches": [{"kernel": "k", "grid": ["m"], "block": [1], "args": []}]}, "'m'"),
        ({"launches": [{"kernel": "k", "grid": [1], "block": [1], "args": ["z"]}]}, "'z'"),
        ({"workspace": {"x": {"dtype": "float32", "shape": [1]}}}, "does not use"),
        ({"source": "  \n"}, "empty"),
        ({"params": {f"P{i}": i for i in range(65)}}, "at most 64"),
    ],
)
def test_what_is_wrong_with_a_kernel_is_named(kernel: dict[str, object], message: str) -> None:
    record = decode(Kernel, {"source": "void k();", **kernel}, what="kernel")
    with pytest.raises(InvalidInput, match=message):
        check_kernel(record, problem())
