"""Input data and the dtypes that numpy lacks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from optiml.codec import decode
from optiml.errors import InvalidInput
from optiml.problems.data import DISTRIBUTIONS, draw, from_float64, to_float64
from optiml.records import Problem, Workload


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3", "float8_e5m2", "float16"])
def test_every_finite_value_of_a_narrow_float_survives_the_round_trip(dtype: str) -> None:
    bits = np.arange(256, dtype=np.uint8) if dtype.startswith("float8") else np.arange(1 << 16, dtype=np.uint16)
    stored = bits.view(np.float16) if dtype == "float16" else bits
    values = to_float64(stored, dtype)
    finite = np.isfinite(values)
    back = from_float64(values[finite], dtype)
    assert back.tobytes() == stored[finite].tobytes()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0 + 2.0**-8, 1.0),
        (1.0 + 3 * 2.0**-8, 1.0 + 2 * 2.0**-7),
        (1.0 + 2.0**-8 + 2.0**-40, 1.0 + 2.0**-7),
        (1e39, math.inf),
    ],
)
def test_bfloat16_rounds_once_to_nearest_even(value: float, expected: float) -> None:
    assert to_float64(from_float64(np.array([value]), "bfloat16"), "bfloat16")[0] == expected


def test_float8_e4m3_saturates_and_e5m2_overflows() -> None:
    assert to_float64(from_float64(np.array([1e6, -1e6]), "float8_e4m3"), "float8_e4m3").tolist() == [448.0, -448.0]
    assert to_float64(from_float64(np.array([1e6]), "float8_e5m2"), "float8_e5m2")[0] == math.inf


def problem(
    distribution: object, dtype: str = "float32", shape: tuple[object, ...] = ("n",)
) -> tuple[Problem, Workload]:
    record = decode(
        Problem,
        {
            "name": "p",
            "axes": {"n": {"type": "var"}, "classes": {"type": "var"}},
            "inputs": {"x": {"dtype": dtype, "shape": list(shape)}},
            "outputs": {"y": {"dtype": dtype, "shape": ["n"]}},
            "reference": "def run(x): return x",
            "workloads": [{"axes": {"n": 1000, "classes": 7}, "inputs": {"x": distribution}}],
        },
        what="problem",
    )
    return record, record.workloads[0]


def test_the_same_seed_gives_the_same_data_and_another_seed_other_data() -> None:
    record, workload = problem("normal")
    first, again, other = (draw(record, workload, seed=seed)["x"] for seed in (1, 1, 2))
    assert first.tobytes() == again.tobytes() != other.tobytes()


@pytest.mark.parametrize(
    ("distribution", "dtype", "low", "high"),
    [
        ("uniform", "float32", 0.0, 1.0),
        ("negative", "float32", -10.0, -0.01),
        ("labels", "int32", 0, 6),
        ("labels_ignore", "int64", -100, 6),
        ({"distribution": "integers", "low": -3, "high": 4}, "int32", -3, 3),
        ("zeros_and_ones", "int32", 0, 1),
    ],
)
def test_distributions_stay_in_their_range(distribution: object, dtype: str, low: float, high: float) -> None:
    record, workload = problem(distribution, dtype)
    values = draw(record, workload, seed=3)["x"]
    assert low <= values.min() < values.max() <= high


@pytest.mark.parametrize("name", [item for item in DISTRIBUTIONS if item != "csr_indptr"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
def test_every_distribution_fills_every_kind_of_array(name: str, dtype: str) -> None:
    record, workload = problem(name, dtype)
    assert draw(record, workload, seed=0)["x"].shape == (1000,)


def test_literal_values_must_fill_the_array() -> None:
    record, workload = problem({"values": [1.0, 2.0]})
    with pytest.raises(InvalidInput, match="do not fill"):
        draw(record, workload, seed=0)


@pytest.mark.parametrize("values", [[[1], 2, 3], [1, "a", 3], [2**70, 1, 2]])
def test_literal_values_that_are_no_plain_numbers_are_refused(values: list[object]) -> None:
    record, workload = problem({"values": values}, shape=(3,))
    with pytest.raises(InvalidInput, match="literal value"):
        draw(record, workload, seed=0)


def test_a_pickled_npy_file_is_refused(tmp_path: object) -> None:
    path = f"{tmp_path}/x.npy"
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    record, workload = problem({"npy": path})
    with pytest.raises(InvalidInput, match="plain array"):
        draw(record, workload, seed=0)


def test_a_tile_is_the_beginning_of_the_whole() -> None:
    record, workload = problem("normal")
    tile, whole = draw(record, workload, seed=0, tile=100)["x"], draw(record, workload, seed=0)["x"]
    assert tile.shape == (100,)
    assert np.array_equal(tile, whole[:100])
