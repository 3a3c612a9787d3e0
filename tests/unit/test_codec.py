"""Records to JSON and back, strictly."""

from __future__ import annotations

import dataclasses
import math

import pytest

from optiml.codec import decode, digest, encode, kernel_id, normalised_source, restore
from optiml.errors import InvalidInput
from optiml.records import Kernel, Launch, Problem, Time

LAUNCH = {"kernel": "relu", "grid": ["ceil_div(n, BLOCK)"], "block": ["BLOCK"], "args": ["x", "y", "n"]}
KERNEL = {"source": "void k();", "launches": [LAUNCH], "params": {"BLOCK": 256}}


def test_a_kernel_survives_the_round_trip() -> None:
    kernel = decode(Kernel, KERNEL, what="kernel")
    assert restore(Kernel, encode(kernel)) == kernel


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"launchs": []}, "did you mean 'launches'"),
        ({"launches": [{**LAUNCH, "gird": [1]}]}, "did you mean 'grid'"),
        ({"workspace": {"w": {"dtype": "float32", "shap": [1]}}}, "did you mean 'shape'"),
        ({"source": 3}, "source"),
        ({"source": None}, "source"),
        ({"params": {"N": "x"}}, "params.N"),
        ({"params": {"N": math.nan}}, "not plain JSON"),
        ({"language": "opencl"}, "language"),
        ({"launches": [{**LAUNCH, "cooperative": "yes"}]}, "cooperative"),
        ({"flags": "--use_fast_math"}, "flags"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        decode(Kernel, {**KERNEL, **change}, what="kernel")


def test_a_boolean_is_no_grid_size() -> None:
    with pytest.raises(InvalidInput, match="grid"):
        decode(Kernel, {**KERNEL, "launches": [{**LAUNCH, "grid": [True]}]}, what="kernel")


def test_deep_nesting_is_refused_without_a_traceback() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidInput, match="nested too deeply"):
        decode(Problem, {"name": deep}, what="problem")


def test_the_kernel_id_ignores_line_ends_and_the_byte_order_mark() -> None:
    plain = Kernel(source="a\nb\n")
    windows = Kernel(source="\ufeffa\r\nb\r\n")
    assert kernel_id(plain) == kernel_id(windows)


def test_the_kernel_id_covers_everything_that_runs_but_not_the_tunables() -> None:
    kernel = Kernel(source="a", params={"B": 1})
    changes: list[dict[str, object]] = [
        {"source": "b"},
        {"params": {"B": 2}},
        {"flags": ("--use_fast_math",)},
        {"launches": (Launch(kernel="k", grid=(1,), block=(1,), args=()),)},
        {"launcher": "go"},
        {"language": "ptx"},
    ]
    others = {kernel_id(dataclasses.replace(kernel, **change)) for change in changes}  # type: ignore[arg-type]
    assert len(others | {kernel_id(kernel)}) == len(changes) + 1
    assert kernel_id(dataclasses.replace(kernel, tunables={"B": (1, 2)})) == kernel_id(kernel)


def test_non_finite_numbers_travel_as_words() -> None:
    time = Time(median_us=math.inf, p10_us=None, p90_us=math.nan, runs=1, noise_pct=-math.inf, source="modelled")
    wire = encode(time)
    assert (wire["median_us"], wire["p90_us"], wire["noise_pct"]) == ("inf", "nan", "-inf")
    back = restore(Time, wire)
    assert back.median_us == math.inf
    assert back.p90_us is not None
    assert math.isnan(back.p90_us)


def test_a_digest_does_not_depend_on_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": [1, 2]}) == digest({"b": (1, 2), "a": 1})


@pytest.mark.parametrize(
    ("source", "code"), [("a\0b", "invalid_params"), ("x" * (2 << 20), "too_large"), ("\ud800", "invalid_params")]
)
def test_text_that_cannot_be_compiled_as_written_is_refused(source: str, code: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        normalised_source(source)
    assert caught.value.code == code
