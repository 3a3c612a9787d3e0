"""Built-in problems that map, reduce, normalise or copy: their files, references, strategies and CUDA types."""

from __future__ import annotations

import itertools
import math
import re
import statistics
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import nvrtc

import optiml
from optiml.errors import InvalidInput
from optiml.expressions import evaluate
from optiml.problems.dtypes import CUDA_TYPES, prelude

ROOT = Path(optiml.__file__).parent
NAMES = (
    "relu", "gelu", "vector_add", "dot", "sum", "softmax", "layernorm", "rmsnorm", "cross_entropy", "matrix_copy",
)  # fmt: skip
Array = np.ndarray[Any, Any]
CHEATS = [path for name in NAMES for path in sorted((ROOT / "problems" / name).glob("cheat_*.cu"))]
STRATEGIES = [path for name in NAMES for path in sorted((ROOT / "generate" / "catalogue" / name).glob("*.cu"))]
SOUND = [*(ROOT / "problems" / name / "seed.cu" for name in NAMES), *STRATEGIES]

each_problem = pytest.mark.parametrize("name", NAMES)


def named_after(path: Path) -> str:
    return f"{path.parent.name}-{path.stem}"


each_kernel = pytest.mark.parametrize("path", [*SOUND, *CHEATS], ids=named_after)
each_sound_kernel = pytest.mark.parametrize("path", SOUND, ids=named_after)
each_strategy = pytest.mark.parametrize("path", STRATEGIES, ids=named_after)


def problem_table(name: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / "problems" / name / "problem.toml").read_text(encoding="utf-8"))


def reference(name: str) -> Callable[..., Array]:
    scope: dict[str, Any] = {}
    exec((ROOT / "problems" / name / "reference.py").read_text(encoding="utf-8"), scope)
    run: Callable[..., Array] = scope["run"]
    return run


def plan_and_code(path: Path) -> tuple[dict[str, Any], str]:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("/* optiml\n")
    block, _, code = text.removeprefix("/* optiml\n").partition("*/")
    return tomllib.loads(block), code


def shape_of(tensor: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(evaluate(extent, sizes) for extent in tensor["shape"])


def inputs_of(table: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Array]:
    random = np.random.default_rng(11)
    arrays: dict[str, Array] = {}
    for name, tensor in table["inputs"].items():
        shape = shape_of(tensor, sizes)
        if tensor["dtype"] == "int32":
            arrays[name] = np.where(random.random(shape) < 0.2, -100, random.integers(0, sizes["C"], shape))
        else:
            arrays[name] = 3.0 * random.standard_normal(shape) - 1.0
    return arrays


# --- the same operators, one Python number at a time -----------------------------------------------------------------
def softmax_of(row: list[float]) -> list[float]:
    return [1.0 / math.fsum(math.exp(other - value) for other in row) for value in row]


def layernorm_of(row: list[float], weight: Array, bias: Array) -> list[float]:
    mean, deviation = statistics.fmean(row), math.sqrt(statistics.pvariance(row) + 1e-5)
    return [(v - mean) / deviation * w + b for v, w, b in zip(row, weight, bias, strict=True)]


def rmsnorm_of(row: list[float], weight: Array) -> list[float]:
    size = math.sqrt(math.fsum(v * v for v in row) / len(row) + 1e-6)
    return [v / size * w for v, w in zip(row, weight, strict=True)]


def loss_of(row: list[float], label: int) -> float:
    return 0.0 if label == -100 else math.log(math.fsum(math.exp(v - row[label]) for v in row))


PLAIN: Mapping[str, Callable[..., Any]] = {
    "relu": lambda x: [v if v > 0 else 0.0 for v in x],
    "gelu": lambda x: [v * 0.5 * math.erfc(-v / math.sqrt(2.0)) for v in x],
    "vector_add": lambda a, b: [p + q for p, q in zip(a, b, strict=True)],
    "dot": lambda a, b: [math.fsum(p * q for p, q in zip(a, b, strict=True))],
    "sum": lambda x: [math.fsum(x)],
    "softmax": lambda x: [softmax_of(row.tolist()) for row in x],
    "layernorm": lambda x, weight, bias: [layernorm_of(row.tolist(), weight, bias) for row in x],
    "rmsnorm": lambda x, weight: [rmsnorm_of(row.tolist(), weight) for row in x],
    "cross_entropy": lambda x, labels: [loss_of(row.tolist(), int(k)) for row, k in zip(x, labels, strict=True)],
    "matrix_copy": lambda x: [[x[r, c] for c in range(x.shape[1])] for r in range(x.shape[0])],
}
SMALL_SIZES: Mapping[tuple[str, ...], tuple[dict[str, int], ...]] = {
    ("n",): ({"n": 1}, {"n": 2}, {"n": 257}),
    ("R", "C"): ({"R": 1, "C": 1}, {"R": 5, "C": 2}, {"R": 2, "C": 33}, {"R": 3, "C": 130}),
}


@each_problem
def test_a_reference_agrees_with_plain_arithmetic(name: str) -> None:
    table = problem_table(name)
    for sizes in SMALL_SIZES[tuple(table["axes"])]:
        inputs = inputs_of(table, sizes)
        np.testing.assert_allclose(reference(name)(**inputs), PLAIN[name](**inputs), rtol=1e-11, atol=1e-12)


@each_problem
def test_a_reference_has_the_declared_shape_down_to_the_least_size(name: str) -> None:
    table = problem_table(name)
    (output,) = table["outputs"].values()
    least = {axis: domain["min"] for axis, domain in table["axes"].items()}
    for sizes in [least, *(workload["axes"] for workload in table["workloads"])]:
        result = reference(name)(**inputs_of(table, sizes))
        assert result.shape == shape_of(output, sizes)
        assert np.isfinite(result).all()


def test_the_normal_tail_behind_gelu_keeps_its_relative_accuracy() -> None:
    x = np.concatenate([np.linspace(-6.0, 6.0, 1001), [-1.25, 1.25, -1e-9, 300.0, -300.0]])
    exact = np.array([0.5 * v * math.erfc(-v / math.sqrt(2.0)) for v in x])
    np.testing.assert_allclose(reference("gelu")(x), exact, rtol=2e-14, atol=0.0)


def test_gelu_works_in_blocks_that_do_not_show_and_keeps_the_dtype_that_it_was_given() -> None:
    x = np.random.default_rng(5).standard_normal(3 * 16384 + 5)
    whole = reference("gelu")(x)
    for part in (slice(0, 7), slice(16380, 16390), slice(3 * 16384 - 2, None)):
        np.testing.assert_array_equal(reference("gelu")(x[part]), whole[part])
    for dtype in (np.float32, np.float16):
        narrow = reference("gelu")(x.astype(dtype))
        assert narrow.dtype == dtype
        np.testing.assert_allclose(narrow, whole, rtol=2 * np.finfo(dtype).eps, atol=2 * np.finfo(dtype).eps)


def test_gelu_hands_on_what_is_not_finite() -> None:
    with np.errstate(invalid="ignore"):
        found = reference("gelu")(np.array([np.nan, np.inf, 0.0, -300.0]))
    np.testing.assert_array_equal(found, [np.nan, np.inf, 0.0, 0.0])


@pytest.mark.parametrize("name", ["softmax", "cross_entropy"])
def test_rows_beyond_the_range_of_exp_stay_finite(name: str) -> None:
    x = np.array([[1e4, -1e4, 9999.0], [-1e5, -1e5, -1e5]])
    labels = {"labels": np.array([1, 2])} if name == "cross_entropy" else {}
    assert np.isfinite(reference(name)(x=x, **labels)).all()


@each_problem
def test_sizes_lie_in_the_domain_and_workloads_are_small(name: str) -> None:
    table = problem_table(name)
    tensors = [*table["inputs"].values(), *table["outputs"].values()]
    assert 3 <= len(table["workloads"]) <= 6
    for entries, most in ((table["workloads"], 100_000), (table["bench"], 2**24)):
        for sizes in (entry["axes"] for entry in entries):
            assert sizes.keys() == table["axes"].keys()
            assert all(table["axes"][axis]["min"] <= size <= table["axes"][axis]["max"] for axis, size in sizes.items())
            assert all(math.prod(shape_of(tensor, sizes)) <= most for tensor in tensors)


@each_problem
def test_workloads_hold_sizes_that_no_block_divides(name: str) -> None:
    sizes = [workload["axes"] for workload in problem_table(name)["workloads"]]
    assert any(size[axis] % 32 and size[axis] > 256 for size in sizes for axis in size)


@each_problem
def test_no_constant_passes_for_an_answer(name: str) -> None:
    table = problem_table(name)
    answers = [reference(name)(**inputs_of(table, load["axes"])) for load in table["workloads"]]
    loosest = 16 * 2 * 2.0**-7  # of the tolerance policy, in bfloat16
    for constant in (0.0, float(np.concatenate([answer.ravel() for answer in answers]).mean())):
        assert any(
            (np.abs(constant - answer) > loosest * (np.abs(answer) + np.sqrt(np.mean(answer**2)))).any()
            for answer in answers
        )


@each_problem
def test_the_words_of_an_intent_name_axes_without_overlap(name: str) -> None:
    table = problem_table(name)
    words = [word for group in table["intent"]["axes"].values() for word in group]
    assert table["intent"]["names"]
    assert table["intent"]["axes"].keys() <= table["axes"].keys()
    assert table["intent"]["shape_order"] == list(table["axes"])
    assert len(words) == len(set(words))


@each_problem
def test_the_bytes_formula_of_float32_is_the_declared_one(name: str) -> None:
    table = problem_table(name)
    sizes = table["bench"][0]["axes"]
    assert evaluate(table["catalogue"]["bytes"], {**sizes, "E": 4}) == evaluate(table["bytes"], sizes)


@each_problem
def test_a_problem_has_cheats_and_two_strategies_for_every_dtype(name: str) -> None:
    tables = [plan_and_code(path)[0]["strategy"] for path in STRATEGIES if path.parent.name == name]
    assert sum(path.parent.name == name for path in CHEATS) >= 2
    for dtype in problem_table(name)["catalogue"]["dtypes"]:
        assert sum(dtype in table["dtypes"] for table in tables) >= 2


@each_strategy
def test_a_strategy_gives_its_reasons_and_the_metrics_it_lowers(path: Path) -> None:
    table = plan_and_code(path)[0]["strategy"]
    assert table.keys() == {"title", "rationale", "moves", "dtypes", "requires"}
    assert len(table["rationale"].split()) > 15
    assert table["moves"]
    assert all(re.fullmatch(r"[a-z0-9]+__[a-z0-9_]+\.sum", metric) for metric in table["moves"])
    assert set(table["dtypes"]) <= set(problem_table(path.parent.name)["catalogue"]["dtypes"])


@each_kernel
def test_a_plan_launches_kernels_of_its_file(path: Path) -> None:
    plan, code = plan_and_code(path)
    assert plan["launch"]
    for launch in plan["launch"]:
        assert re.search(rf"__global__ void\b[^;{{}}]*\b{launch['kernel']}\(", code)


@each_sound_kernel
def test_every_choice_of_tunables_stays_within_launch_limits_up_to_the_largest_size(path: Path) -> None:
    plan, _ = plan_and_code(path)
    table = problem_table(path.parent.name)
    arrays = table["inputs"].keys() | table["outputs"].keys() | plan.get("workspace", {}).keys()
    largest = {axis: domain["max"] for axis, domain in table["axes"].items()}
    for sizes, params in itertools.product((largest, table["bench"][0]["axes"]), every_choice(plan)):
        names = {**sizes, **params}
        for launch in plan["launch"]:
            grid = [evaluate(extent, names) for extent in launch["grid"]]
            assert 1 <= grid[0] < 2**31
            assert all(1 <= extent <= 65535 for extent in grid[1:])
            assert 1 <= math.prod(evaluate(extent, names) for extent in launch["block"]) <= 1024
            assert all(evaluate(argument, names) >= 1 for argument in launch["args"] if argument not in arrays)


@each_kernel
def test_params_default_to_a_value_worth_trying_and_shadow_nothing(path: Path) -> None:
    plan, _ = plan_and_code(path)
    table = problem_table(path.parent.name)
    taken = table["axes"].keys() | table["inputs"].keys() | table["outputs"].keys() | plan.get("workspace", {}).keys()
    assert not plan.get("params", {}).keys() & taken
    assert all(plan["params"][name] in values for name, values in plan.get("tunables", {}).items())


def every_choice(plan: Mapping[str, Any]) -> Iterator[dict[str, int]]:
    tunables = plan.get("tunables", {})
    for values in itertools.product(*tunables.values()):
        yield {**plan.get("params", {}), **dict(zip(tunables, values, strict=True))}


# --- CUDA types ------------------------------------------------------------------------------------------------------
HEADERS = sorted(parent / "include" for parent in Path(nvrtc.__file__).parents[2].glob("nvidia/cu*"))
TYPED_KERNEL = """
extern "C" __global__ void copy_packs(const Pack<2>* x, Pack<2>* y)
{
    static_assert(sizeof(T) == ELEMENT_BYTES && alignof(Pack<2>) == 2 * ELEMENT_BYTES, "one vector");
    A low = up(x[0].v[0]);
    y[0].v[1] = down(low);
}
"""


def compiler_log(source: str, definitions: Mapping[str, int]) -> str | None:
    """What NVRTC has against the source; None if it compiles."""
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    options = [
        "--gpu-architecture=compute_80",
        "-std=c++17",
        *(f"-D{key}={value}" for key, value in definitions.items()),
    ]
    options += [f"-I{folder}" for header in HEADERS for folder in (header, header / "cccl")]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    _, length = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(length)  # bytes would be written to in place, even the one-byte ones that all share
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(program)
    return None if status == nvrtc.nvrtcResult.NVRTC_SUCCESS else log.decode()


@pytest.mark.parametrize("dtype", CUDA_TYPES)
def test_the_prelude_of_every_dtype_compiles_and_packs_without_padding(dtype: str) -> None:
    assert compiler_log(prelude(dtype) + TYPED_KERNEL, {}) is None


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="float24"):
        prelude("float24")


@each_kernel
def test_a_kernel_compiles_with_its_default_params(path: Path) -> None:
    plan, code = plan_and_code(path)
    assert compiler_log(code.replace("//@ types\n", prelude("float32")), plan.get("params", {})) is None
