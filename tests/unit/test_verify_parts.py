"""Tolerances, controls, hidden sizes: the parts of a verdict that need no device."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from optiml.codec import decode
from optiml.device.sampling import sampled_blocks
from optiml.errors import Busy, InvalidInput, WorkerTimeout
from optiml.problems.problem import builtin_names, check_problem, load_builtin, named_distributions, satisfies
from optiml.records import Problem, Tolerance
from optiml.verify.compare import CAP, compare, first_mismatch, floor_rtol, tolerance_for
from optiml.verify.controls import passing_control
from optiml.verify.inputs import RUNS, cost, hidden_cases, visible_cases
from optiml.verify.reference import References


# --- tolerance -------------------------------------------------------------------------------------------------------
def tolerance(**changes: Any) -> Tolerance | None:
    given: dict[str, Any] = {
        "accumulation": 1, "magnitude": 1.0, "exact": np.ones(4), "same_dtype": None, "caller": None, "data_scale": 1.0,
        **changes,
    }  # fmt: skip
    return tolerance_for("float32", **given)


def test_the_floor_grows_with_the_accumulation_length() -> None:
    assert floor_rtol("float32", 4096) == pytest.approx(2 * 2**-23 + 8 * 2**-23 * 64)
    assert floor_rtol("float16", 1) == pytest.approx(2 * 2**-10 + 8 * 2**-23)


def test_the_absolute_part_scales_with_the_output_so_that_zeros_fail() -> None:
    small = tolerance(magnitude=1e-3)
    assert small is not None
    assert not compare(np.zeros(4, np.float32), np.full(4, 1e-3), "float32", small).ok


def test_outputs_among_the_subnormals_are_granted_their_spacing() -> None:
    exact = np.full(4, 1.4e-7)
    allowed = tolerance_for(
        "float16", accumulation=1, magnitude=1.4e-7, exact=exact, same_dtype=None, caller=None, data_scale=1.0
    )
    assert compare(exact.astype(np.float16), exact, "float16", allowed).ok
    assert not compare(np.zeros(4, np.float16), exact, "float16", allowed).ok


def test_a_caller_may_tighten_but_not_loosen_past_the_cap() -> None:
    tight, loose = tolerance(caller=Tolerance(rtol=1e-7, atol=1e-9)), tolerance(caller=Tolerance(rtol=1e9, atol=1e9))
    assert tight == Tolerance(rtol=1e-7, atol=1e-9)
    assert loose is not None
    assert loose.rtol == pytest.approx(CAP * floor_rtol("float32", 1))


def test_a_caller_who_asks_for_zero_gets_exact_comparison() -> None:
    assert tolerance(caller=Tolerance(rtol=0.0, atol=0.0)) is None


def test_a_computation_that_is_hard_in_its_dtype_is_granted_more_up_to_the_cap() -> None:
    exact = np.ones(4)
    hard, hopeless = tolerance(exact=exact, same_dtype=exact + 3e-6), tolerance(exact=exact, same_dtype=exact + 1.0)
    easy = tolerance(exact=exact, same_dtype=exact)
    assert easy is not None
    assert hard is not None
    assert hopeless is not None
    assert easy.rtol < hard.rtol < hopeless.rtol == pytest.approx(CAP * easy.rtol)


@pytest.mark.parametrize(
    ("actual", "expected", "ok"),
    [
        (math.nan, 1.0, False), (1.0, math.nan, False), (math.nan, math.nan, True), (math.inf, math.inf, True),
        (-math.inf, math.inf, False), (1e30, math.inf, False), (math.inf, 1e30, False), (-0.0, 0.0, True),
    ],
)  # fmt: skip
def test_nan_matches_only_nan_and_an_infinity_only_itself(actual: float, expected: float, ok: bool) -> None:
    found = compare(np.array([actual], np.float32), np.array([expected]), "float32", Tolerance(rtol=1e-5, atol=1e-5))
    assert found.ok is ok
    assert found.nonfinite is (not math.isfinite(actual) and math.isfinite(expected))


def test_integers_compare_exactly_even_beyond_the_doubles() -> None:
    expected = np.array([2**60 + 1], dtype=np.int64)
    assert compare(expected, expected, "int64", None).ok
    assert not compare(expected - 1, expected, "int64", None).ok


def test_the_first_mismatch_says_whether_the_element_was_written() -> None:
    poison = np.full((2, 3), 7.0, np.float32)
    actual = poison.copy()
    actual[0] = 1.0
    found = compare(actual, np.ones((2, 3)), "float32", Tolerance(rtol=1e-5, atol=1e-5))
    mismatch = first_mismatch("y", actual, np.ones((2, 3)), "float32", found.wrong, poison, {"n": 6})
    assert (mismatch.index, mismatch.actual, mismatch.unwritten) == ((1, 0), 7.0, True)


# --- controls --------------------------------------------------------------------------------------------------------
MATRIX = decode(
    Problem,
    {
        "name": "m",
        "axes": {"R": {"type": "var"}, "C": {"type": "var"}},
        "inputs": {"x": {"dtype": "float32", "shape": ["R", "C"]}},
        "outputs": {"y": {"dtype": "float32", "shape": ["R", "C"]}},
        "reference": "def run(x): return x",
        "workloads": [{"axes": {"R": 4, "C": 8}}],
    },
    what="problem",
)
EXACT = {"y": Tolerance(rtol=1e-6, atol=1e-6)}


@pytest.mark.parametrize(
    ("output", "control"),
    [
        (np.zeros((4, 8)), "an all-zero output"),
        (np.full((4, 8), 3.0), "one constant"),
        (np.random.default_rng(0).standard_normal((4, 8)), None),
    ],
)
def test_a_problem_whose_outputs_need_no_work_is_found(output: Any, control: str | None) -> None:
    assert passing_control(MATRIX, [({"y": output}, EXACT)]) == control


def test_a_tolerance_that_hides_the_order_of_rows_is_found() -> None:
    rows = np.ones((4, 8)) + np.arange(4)[:, None] * 1e-3 + np.arange(8) * 5.0
    loose = {"y": Tolerance(rtol=0.0, atol=0.01)}
    assert passing_control(MATRIX, [({"y": rows}, loose)]) in ("the first row everywhere", "rows in another order")


def test_nan_everywhere_is_a_control() -> None:
    assert passing_control(MATRIX, [({"y": np.full((4, 8), np.nan)}, EXACT)]) == "NaN everywhere"


def test_an_output_that_needs_no_work_is_found_beside_one_that_does() -> None:
    both = dataclasses.replace(MATRIX, outputs={"y": MATRIX.outputs["y"], "z": MATRIX.outputs["y"]})
    busy = np.random.default_rng(0).standard_normal((4, 8))
    case = ({"y": busy, "z": np.zeros((4, 8))}, {**EXACT, "z": EXACT["y"]})
    assert passing_control(both, [case]) == "an all-zero output in z"


def test_one_case_that_tells_the_control_apart_is_enough() -> None:
    other = np.random.default_rng(1).standard_normal((4, 8))
    assert passing_control(MATRIX, [({"y": np.zeros((4, 8))}, EXACT), ({"y": other}, EXACT)]) is None


# --- hidden sizes ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", builtin_names())
def test_hidden_cases_stay_in_the_domain_and_differ_from_the_shown_ones(name: str) -> None:
    problem = load_builtin(name).problem
    shown = {
        tuple(sorted(case.workload.axes.items())) for case in visible_cases(problem, random.Random(0), reduced=False)
    }
    hidden = hidden_cases(problem, random.Random(5), reduced=False)
    assert len(hidden) >= 5
    for case in hidden:
        assert satisfies(problem, case.workload.axes, case.workload.scalars)
        assert tuple(sorted(case.workload.axes.items())) not in shown
        dearest = 5e7 if case.optional else max(3e5, 4 * max(cost(problem, w) for w in problem.workloads))
        assert cost(problem, case.workload) <= dearest


def test_hidden_sizes_reach_one_and_beyond_many_blocks() -> None:
    sizes = [
        case.workload.axes["n"] for case in hidden_cases(load_builtin("relu").problem, random.Random(1), reduced=False)
    ]
    assert min(sizes) <= 1
    assert max(sizes) > 1024
    assert any(size % 2 for size in sizes if size > 1)


@pytest.mark.parametrize("seed", range(4))
def test_every_axis_is_tried_long_beside_short_ones(seed: int) -> None:
    shapes = [
        (case.workload.axes["R"], case.workload.axes["C"])
        for case in hidden_cases(load_builtin("softmax").problem, random.Random(seed), reduced=False)
    ]
    assert any(rows > 4000 and 1 <= columns < 100 for rows, columns in shapes)
    assert any(columns > 4000 and 1 <= rows < 100 for rows, columns in shapes)


def test_the_smallest_hidden_size_comes_with_every_distribution_and_many_runs() -> None:
    problem = load_builtin("relu").problem
    cases = hidden_cases(problem, random.Random(3), reduced=False)
    least = min(case.workload.axes["n"] for case in cases if case.workload.axes["n"] > 0)
    seen = {str(case.workload.inputs["x"]) for case in cases if case.workload.axes["n"] == least}
    assert seen == {*(str(item) for item in named_distributions(problem, "x")), "low"}
    assert [case.workload.axes["n"] for case in cases if case.runs > RUNS] == [least]


def custom(**changes: Any) -> Problem:
    fields: dict[str, Any] = {
        "name": "custom", "axes": {"n": {"type": "var", "min": 1}},
        "inputs": {"x": {"dtype": "float32", "shape": ["n"]}}, "outputs": {"y": {"dtype": "float32", "shape": ["n"]}},
        "reference": "def run(x):\n    return np.abs(x)", "workloads": [{"axes": {"n": 256}}, {"axes": {"n": 64}}],
    }  # fmt: skip
    return check_problem(decode(Problem, {**fields, **changes}, what="problem"))


@pytest.mark.parametrize("constraint", ["m == 3 * n + 1", "3 * n + 1 == m"])
def test_an_axis_tied_to_another_by_a_constraint_gets_hidden_sizes(constraint: str) -> None:
    tied = custom(
        axes={"n": {"type": "var", "min": 1}, "m": {"type": "var"}}, constraints=[constraint],
        workloads=[{"axes": {"n": 64, "m": 193}}],
    )  # fmt: skip
    cases = hidden_cases(tied, random.Random(0), reduced=False)
    assert len({case.workload.axes["n"] for case in cases}) >= 5


def test_a_domain_without_other_sizes_hides_data_only() -> None:
    closed = custom(axes={"n": {"type": "var", "choices": [64, 256]}})
    cases = hidden_cases(closed, random.Random(0), reduced=False)
    assert {case.workload.axes["n"] for case in cases} == {64, 256}


def test_scalars_that_only_the_bench_names_are_tried() -> None:
    scaled = custom(
        inputs={"x": {"dtype": "float32", "shape": ["n"]}, "a": {"dtype": "float32", "shape": None}},
        workloads=[{"axes": {"n": 64}, "scalars": {"a": 2.0}}], bench=[{"axes": {"n": 4096}, "scalars": {"a": 3.0}}],
    )  # fmt: skip
    cases = hidden_cases(scaled, random.Random(0), reduced=False)
    assert {case.workload.scalars["a"] for case in cases} == {2.0, 3.0}


def test_constraints_bind_hidden_sizes_too() -> None:
    relu = load_builtin("relu").problem
    aligned = check_problem(
        decode(
            Problem,
            {
                "name": "aligned", "axes": {"n": {"type": "var"}}, "constraints": ["n % 16 == 0"],
                "inputs": {"x": {"dtype": "float32", "shape": ["n"]}},
                "outputs": {"y": {"dtype": "float32", "shape": ["n"]}}, "reference": relu.reference,
                "workloads": [{"axes": {"n": 256}}],
            },
            what="problem",
        )
    )  # fmt: skip
    cases = hidden_cases(aligned, random.Random(2), reduced=False)
    assert len(cases) >= 5
    assert all(case.workload.axes["n"] % 16 == 0 for case in cases)


def test_a_big_grid_is_sampled_in_neighbouring_pairs_without_its_end() -> None:
    chosen = sampled_blocks(1024, 8)
    assert chosen is not None
    assert len(chosen) == 8
    assert all(second == first + 1 for first, second in zip(chosen[::2], chosen[1::2], strict=True))
    assert 1023 not in chosen
    assert len({block % 32 for block in chosen[::2]}) == 4  # not one column of a 32 x 32 grid
    assert sampled_blocks(8, 8) is None
    assert sampled_blocks(3, 2) == (0, 1)
    assert sampled_blocks(2, 1) == (0,)


# --- references ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def references() -> Iterator[References]:
    made = References(timeout_s=3.0)
    yield made
    made.close()


def with_reference(source: str) -> Problem:
    return decode(
        Problem,
        {
            "name": "p", "axes": {"n": {"type": "var"}}, "inputs": {"x": {"dtype": "float32", "shape": ["n"]}},
            "outputs": {"y": {"dtype": "float32", "shape": ["n"]}}, "reference": source,
            "workloads": [{"axes": {"n": 4}}],
        },
        what="problem",
    )  # fmt: skip


def test_integers_that_the_output_cannot_hold_are_the_references_mistake(references: References) -> None:
    problem = with_reference("def run(x):\n    return np.rint(x) * 100")
    narrow = dataclasses.replace(problem, outputs={"y": dataclasses.replace(problem.outputs["y"], dtype="int8")})
    with pytest.raises(InvalidInput, match="int8 cannot hold"):
        references.expected(narrow, narrow.workloads[0], {"x": np.arange(4, dtype=np.float32)})


def test_a_built_in_reference_that_gets_no_time_is_nobodys_mistake_and_may_be_tried_again(
    references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*_: object, **__: object) -> None:
        raise WorkerTimeout("too slow")

    monkeypatch.setattr(references._worker, "call", slow)
    problem = load_builtin("relu").problem
    with pytest.raises(Busy, match="try again"):
        references.expected(problem, problem.workloads[0], {"x": np.zeros(256, dtype=np.float32)})
    with pytest.raises(InvalidInput, match="did not end"):
        run(references, "def run(x):\n    return x + 0")


def run(references: References, source: str) -> Any:
    problem = with_reference(source)
    return references.expected(problem, problem.workloads[0], {"x": np.arange(4, dtype=np.float32)})


def test_a_reference_computes_in_float64_and_again_in_the_declared_dtype(references: References) -> None:
    expected = run(references, "def run(x, n):\n    return x / 3 + n")
    assert expected.exact["y"].dtype == np.float64
    assert expected.exact["y"][1] == 1 / 3 + 4
    assert expected.same_dtype["y"][1] == np.float64(np.float32(1) / np.float32(3) + np.float32(4))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def run(x):\n    raise ValueError('no')", "ValueError: no .reference line 2"),
        ("def run(x):\n    return x[:2]", "shape"),
        ("def run(x):\n    while True: pass", "did not end"),
        ("def run(x):\n    import os\n    os._exit(3)", "ended its process"),
        ("def run(x):\n    return open('/etc/passwd').read()", "Permission"),
        ("def run(x):\n    import socket\n    socket.socket()", "failed"),
        ("def run(x):\n    import os\n    os.fork()", "failed"),
        ("def run(x):\n    return x.reshape(2, 2)", "shape"),
        ("def run(x):\n    return 'text'", "no array of real numbers"),
        ("def run(x):\n    return x * 1j", "no array of real numbers"),
        ("def run(x):\n    raise ValueError(np.__file__)", "ValueError: <path> "),
        ("def run(x):\n    return x, x", "2 arrays for 1 outputs"),
        ("def run(", "SyntaxError"),
        ("import sys; sys.exit(1)\ndef run(x): pass", "SystemExit"),
    ],
)
def test_a_reference_that_misbehaves_is_the_callers_mistake(references: References, source: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        run(references, source)
    assert run(references, "def run(x):\n    return x").exact["y"][1] == 1.0
