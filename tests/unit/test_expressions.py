"""The formula language of contract §3."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optiml.errors import InvalidInput
from optiml.expressions import INT64_MAX, evaluate, evaluate_float, names_in


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("ceil_div(n, 256)", 4),
        ("round_up(n, 256)", 1024),
        ("-7 // 2", -4),
        ("-7 % 3", 2),
        ("n if n > 5 else 1", 1000),
        ("min(n, 3) + max(2, n)", 1003),
        ("not (n == 1000) or n >= 1000 and 1", 1),
        ("1 < 2 < 3", 1),
        (17, 17),
    ],
)
def test_formulas_follow_python_semantics(formula: int | str, expected: int) -> None:
    assert evaluate(formula, {"n": 1000}) == expected


@pytest.mark.parametrize(
    "formula",
    [
        "n / 2", "n ** 2", "n << 1", "__import__('os')", "n.real", "[n]", "lambda: 1", "f'{n}'", "m", "1 // 0", "n % 0",
        "ceil_div(n, 0)", "ceil_div(n)", "", "1.5", "n n", "9223372036854775807 + 1", "'a'", "(" * 300,
        "1" + "+1" * 300,
    ],
)  # fmt: skip
def test_everything_outside_the_language_is_refused(formula: str) -> None:
    with pytest.raises(InvalidInput):
        evaluate(formula, {"n": 1000})


def test_overflow_is_refused_in_the_middle_of_a_formula() -> None:
    with pytest.raises(InvalidInput, match="64-bit"):
        evaluate("n * n - n * n", {"n": INT64_MAX})


def test_flops_may_exceed_64_bits_and_divide() -> None:
    assert evaluate_float("2 * n * n / 4", {"n": 2**40}) == 2.0**79


def test_the_names_of_a_formula_leave_out_functions() -> None:
    assert names_in("ceil_div(n, BLOCK) if R else min(C, 1)") == {"n", "BLOCK", "R", "C"}


@given(st.text(max_size=60))
def test_no_text_raises_anything_but_invalid_input(text: str) -> None:
    try:
        evaluate(text, {"n": 3})
    except InvalidInput:
        return
