"""Built-in problems that multiply, move, pool, count or scan: their files, references and catalogue strategies."""

from __future__ import annotations

import importlib.util
import itertools
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import optiml
from optiml.expressions import evaluate

ROOT = Path(optiml.__file__).parent
NAMES = ("matmul", "transpose", "max_pool3d", "multi_head_attention", "histogram", "prefix_sum", "conv2d")
SEEDS = [ROOT / "problems" / name / "seed.cu" for name in NAMES]
CHEATS = [path for name in NAMES for path in sorted((ROOT / "problems" / name).glob("cheat_*.cu"))]
STRATEGIES = [path for name in NAMES for path in sorted((ROOT / "generate" / "catalogue" / name).glob("*.cu"))]
Array = np.ndarray[Any, Any]

every_problem = pytest.mark.parametrize("name", NAMES)


def named_by_folder(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


every_kernel = pytest.mark.parametrize("path", SEEDS + CHEATS + STRATEGIES, ids=named_by_folder)
every_strategy = pytest.mark.parametrize("path", STRATEGIES, ids=named_by_folder)


def read_problem(name: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / "problems" / name / "problem.toml").read_text(encoding="utf-8"))


def read_plan(path: Path) -> tuple[dict[str, Any], str]:
    """The TOML block of a kernel file, and the code that follows it."""
    block, code = path.read_text(encoding="utf-8").removeprefix("/* optiml\n").split("*/", 1)
    return tomllib.loads(block), code


def reference_of(name: str) -> Callable[..., Array]:
    spec = importlib.util.spec_from_file_location(f"{name}_reference", ROOT / "problems" / name / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    run: Callable[..., Array] = module.run
    return run


def sizes_of(workload: Mapping[str, Any]) -> dict[str, int]:
    return {**workload["axes"], **workload.get("scalars", {})}


def shape_of(tensor: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(evaluate(size, sizes) for size in tensor["shape"])


def draw_inputs(problem: Mapping[str, Any], workload: Mapping[str, Any]) -> dict[str, Array]:
    random = np.random.default_rng(7)
    sizes = sizes_of(workload)
    arrays = {key: shape_of(tensor, sizes) for key, tensor in problem["inputs"].items() if "shape" in tensor}
    if problem["name"] == "histogram":
        return {"x": random.integers(-2, sizes["bins"] + 2, arrays["x"], dtype=np.int32)}
    return {key: random.standard_normal(shape) for key, shape in arrays.items()}


def run_reference(problem: Mapping[str, Any], workload: Mapping[str, Any], inputs: Mapping[str, Array]) -> Array:
    run = reference_of(problem["name"])
    known = {**sizes_of(workload), **inputs}
    return run(**{key: known[key] for key in run.__code__.co_varnames[: run.__code__.co_argcount]})


# --- independent formulas, element by element ------------------------------------------------------------------------
def plain_matmul(a: Array, b: Array) -> Array:
    return np.array([[math.fsum(row * column) for column in b.T] for row in a])


def plain_transpose(x: Array) -> Array:
    return np.array([[x[r, c] for r in range(x.shape[0])] for c in range(x.shape[1])])


def plain_max_pool3d(x: Array, window: int, stride: int, padding: int) -> Array:
    def taps(position: int, size: int) -> slice:
        first = position * stride - padding
        return slice(max(first, 0), min(first + window, size))

    counts = [(size + 2 * padding - window) // stride + 1 for size in x.shape[2:]]
    y = np.empty((*x.shape[:2], *counts))
    for d, h, w in itertools.product(*map(range, counts)):
        box = x[:, :, taps(d, x.shape[2]), taps(h, x.shape[3]), taps(w, x.shape[4])]
        y[:, :, d, h, w] = box.max(axis=(2, 3, 4))
    return y


def plain_attention(q: Array, k: Array, v: Array) -> Array:
    y = np.empty_like(q)
    for batch, head, i in np.ndindex(q.shape[:3]):
        scores = [float(q[batch, head, i] @ key) / math.sqrt(q.shape[3]) for key in k[batch, head]]
        weights = [math.exp(score - max(scores)) for score in scores]
        y[batch, head, i] = np.array(weights) @ v[batch, head] / sum(weights)
    return y


def plain_histogram(x: Array, bins: int) -> Array:
    return np.array([int((x == bin_).sum()) for bin_ in range(bins)], dtype=np.int32)


def plain_prefix_sum(x: Array) -> Array:
    return np.array(list(itertools.accumulate(float(value) for value in x)))


def plain_conv2d(x: Array, w: Array, stride: int, padding: int) -> Array:
    rows, columns = ((x.shape[axis] + 2 * padding - w.shape[axis]) // stride + 1 for axis in (2, 3))
    y = np.zeros((x.shape[0], w.shape[0], rows, columns))
    for p, q, r, s in itertools.product(range(rows), range(columns), *map(range, w.shape[2:])):
        i, j = p * stride - padding + r, q * stride - padding + s
        if 0 <= i < x.shape[2] and 0 <= j < x.shape[3]:
            y[:, :, p, q] += x[:, :, i, j] @ w[:, :, r, s].T
    return y


PLAIN: Mapping[str, Callable[..., Array]] = {
    "matmul": plain_matmul,
    "transpose": plain_transpose,
    "max_pool3d": plain_max_pool3d,
    "multi_head_attention": plain_attention,
    "histogram": plain_histogram,
    "prefix_sum": plain_prefix_sum,
    "conv2d": plain_conv2d,
}


@every_problem
def test_a_reference_agrees_with_a_plain_loop_on_every_workload(name: str) -> None:
    problem = read_problem(name)
    plain = PLAIN[name]
    for workload in problem["workloads"]:
        inputs = draw_inputs(problem, workload)
        expected = run_reference(problem, workload, inputs)
        known = {**sizes_of(workload), **inputs}
        arguments = {key: known[key] for key in plain.__code__.co_varnames[: plain.__code__.co_argcount]}
        np.testing.assert_allclose(expected, plain(**arguments), rtol=1e-11, atol=1e-11)


@every_problem
def test_a_reference_returns_the_declared_shape_and_dtype(name: str) -> None:
    problem = read_problem(name)
    (output,) = problem["outputs"].values()
    for workload in problem["workloads"]:
        y = run_reference(problem, workload, draw_inputs(problem, workload))
        assert y.shape == shape_of(output, sizes_of(workload))
        assert y.dtype == (np.int32 if output["dtype"] == "int32" else np.float64)


def test_attention_stays_finite_for_scores_beyond_the_range_of_exp() -> None:
    q = np.full((1, 1, 3, 4), 300.0)
    k = np.arange(12.0).reshape(1, 1, 3, 4)
    y = reference_of("multi_head_attention")(q=q, k=k, v=k)
    np.testing.assert_allclose(y, np.broadcast_to(k[:, :, -1:], y.shape))


def test_padding_never_wins_a_maximum_of_negative_numbers() -> None:
    y = reference_of("max_pool3d")(x=np.full((1, 1, 3, 3, 3), -2.0), window=3, stride=2, padding=1)
    assert (y == -2.0).all()


def test_values_outside_the_bins_are_not_counted() -> None:
    x = np.array([-1, 0, 2, 3, 2, 7], dtype=np.int32)
    assert reference_of("histogram")(x=x, bins=3).tolist() == [1, 0, 2]


@every_problem
def test_sizes_of_workloads_and_bench_lie_in_the_domain(name: str) -> None:
    problem = read_problem(name)
    for workload in problem["workloads"] + problem["bench"]:
        assert workload["axes"].keys() == problem["axes"].keys()
        for axis, size in workload["axes"].items():
            assert problem["axes"][axis]["min"] <= size <= problem["axes"][axis]["max"]
        for constraint in problem.get("constraints", []):
            assert evaluate(constraint, sizes_of(workload))


@every_problem
def test_workloads_are_small_and_bench_entries_fit_a_laptop(name: str) -> None:
    problem = read_problem(name)
    tensors = [tensor for tensor in (problem["inputs"] | problem["outputs"]).values() if "shape" in tensor]
    assert 3 <= len(problem["workloads"]) <= 6
    for entries, limit in ((problem["workloads"], 100_000), (problem["bench"], 2**24)):
        for workload in entries:
            assert all(math.prod(shape_of(tensor, sizes_of(workload))) <= limit for tensor in tensors)


@every_problem
def test_zeros_and_the_mean_are_wrong_even_at_the_loosest_tolerance(name: str) -> None:
    problem = read_problem(name)
    loosest = 0.25  # 16 * 2 * eps(bfloat16)
    outputs = [run_reference(problem, load, draw_inputs(problem, load)) for load in problem["workloads"]]
    mean = float(np.concatenate([y.ravel() for y in outputs]).mean())
    for constant in (0.0, mean):
        bounds = [loosest * (np.sqrt((y.astype(np.float64) ** 2).mean()) + np.abs(y)) for y in outputs]
        assert any((np.abs(constant - y) > bound).any() for y, bound in zip(outputs, bounds, strict=True))


@every_problem
def test_intent_words_name_axes_of_the_problem(name: str) -> None:
    problem = read_problem(name)
    intent = problem["intent"]
    assert intent["axes"].keys() <= problem["axes"].keys()
    assert sorted(intent["shape_order"]) == sorted(problem["axes"])
    words = [word for group in intent["axes"].values() for word in group]
    assert len(words) == len(set(words))


@every_problem
def test_a_problem_has_a_seed_cheats_and_at_least_two_strategies(name: str) -> None:
    assert ROOT / "problems" / name / "seed.cu" in SEEDS
    assert any(path.parent.name == name for path in CHEATS)
    assert sum(path.parent.name == name for path in STRATEGIES) >= 2


@every_problem
def test_every_dtype_of_a_problem_has_at_least_two_strategies(name: str) -> None:
    dtypes = read_problem(name)["catalogue"]["dtypes"]
    tables = [read_plan(path)[0]["strategy"] for path in STRATEGIES if path.parent.name == name]
    for dtype in dtypes:
        assert sum(dtype in table["dtypes"] for table in tables) >= 2


@every_strategy
def test_a_strategy_says_why_it_is_faster_and_what_it_moves(path: Path) -> None:
    table = read_plan(path)[0]["strategy"]
    assert len(table["rationale"]) > 40
    assert table["title"]
    assert all("__" in metric for metric in table["moves"])
    assert table["moves"]
    assert set(table["dtypes"]) <= set(read_problem(path.parent.name)["catalogue"]["dtypes"])


@every_kernel
def test_a_launch_plan_names_kernels_of_its_file_and_known_sizes(path: Path) -> None:
    plan, code = read_plan(path)
    problem = read_problem(path.parent.name)
    workload = problem["bench"][0]
    names = {**sizes_of(workload), **plan.get("params", {})}
    arrays = {key for key, tensor in (problem["inputs"] | problem["outputs"]).items() if "shape" in tensor}
    arrays |= plan.get("workspace", {}).keys()
    for launch in plan["launch"]:
        assert re.search(rf"__global__ void\b[^;{{}}]*\b{launch['kernel']}\(", code)
        sizes = [*launch["grid"], *launch["block"], launch.get("shared_bytes", 0)]
        sizes += [arg for arg in launch["args"] if arg not in arrays]
        assert all(evaluate(size, names) >= 0 for size in sizes)
        assert 1 <= math.prod(evaluate(size, names) for size in launch["block"]) <= 1024


@every_kernel
def test_a_param_is_tried_at_its_default_and_shadows_nothing(path: Path) -> None:
    plan, _ = read_plan(path)
    problem = read_problem(path.parent.name)
    params = plan.get("params", {})
    taken = problem["axes"].keys() | problem["inputs"].keys() | problem["outputs"].keys()
    assert not params.keys() & (taken | plan.get("workspace", {}).keys())
    for name, values in plan.get("tunables", {}).items():
        assert params[name] in values


@every_kernel
def test_every_combination_of_tunables_keeps_to_launch_limits(path: Path) -> None:
    plan, _ = read_plan(path)
    problem = read_problem(path.parent.name)
    tunables = plan.get("tunables", {})
    for workload in problem["workloads"] + problem["bench"]:
        for values in itertools.product(*tunables.values()):
            names = {**sizes_of(workload), **plan.get("params", {}), **dict(zip(tunables, values, strict=True))}
            for launch in plan["launch"]:
                assert math.prod(evaluate(size, names) for size in launch["block"]) <= 1024
                assert evaluate(launch.get("shared_bytes", 0), names) <= 160 * 1024  # what one A100 block can have
                grid = [evaluate(size, names) for size in launch["grid"]]
                assert all(0 <= size <= 65535 for size in grid[1:])
                assert grid[0] < 2**31
