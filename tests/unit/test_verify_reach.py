"""What hidden cases reach: sizes near the benchmark and beside the kernel's own numbers, data far below zero, single
elements, outputs that are zero.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from optiml.codec import decode
from optiml.problems.problem import load_builtin
from optiml.records import Problem, Tolerance, Verdict, Workload
from optiml.verify.constants import constants_of
from optiml.verify.inputs import block_cases, fixed_scalars, hidden_cases, saturating_case
from optiml.verify.probes import probes, unmoved
from optiml.workbench import Workbench

ROWS: dict[str, Any] = {
    "name": "row_max",
    "axes": {"r": {"type": "var", "min": 1}, "c": {"type": "var", "min": 1}},
    "inputs": {"x": {"dtype": "float32", "shape": ["r", "c"]}},
    "outputs": {"y": {"dtype": "float32", "shape": ["r"]}},
    "reference": "def run(x):\n    return x.max(axis=1)",
    "workloads": [{"axes": {"r": 4, "c": 33}}, {"axes": {"r": 7, "c": 100}}],
}
RELU = """extern "C" __global__ void relu(const float* x, float* y, int n) {
int i = blockIdx.x * 256 + threadIdx.x; GUARD if (i < n) y[i] = fmaxf(x[i], 0.0f); }"""


def rows_verdict(bench: Workbench, body: str, problem: Any) -> Verdict:
    source = (
        'extern "C" __global__ void k(const float* x, float* y, int r, int c) {'
        f" int i = blockIdx.x * 64 + threadIdx.x; if (i >= r) return; {body} }}"
    )
    launch = {"kernel": "k", "grid": ["ceil_div(r, 64)"], "block": [64], "args": ["x", "y", "r", "c"]}
    return bench.verify({"source": source, "launches": [launch]}, problem, seed=3)


def test_a_kernel_that_gives_up_beyond_some_size_is_found(bench: Workbench) -> None:
    launch = {"kernel": "relu", "grid": ["ceil_div(n, 256)"], "block": [256], "args": ["x", "y", "n"]}
    gives_up = {"source": RELU.replace("GUARD", "if (n > 200000) return;"), "launches": [launch]}
    found = bench.verify(gives_up, "relu", seed=3)
    assert (found.status, found.reason) == ("rejected", "unwritten_output")


@pytest.mark.parametrize(("identity", "status"), [("-1e4f", "rejected"), ("-3.4e38f", "accepted")])
def test_a_low_identity_of_a_maximum_that_is_not_low_enough_is_found(
    bench: Workbench, identity: str, status: str
) -> None:
    body = f"float m = {identity}; for (int j = 0; j < c; j++) m = fmaxf(m, x[i * c + j]); y[i] = m;"
    assert rows_verdict(bench, body, ROWS).status == status


def test_low_data_are_left_out_where_the_workloads_name_the_data() -> None:
    named = {**ROWS, "workloads": [{"axes": {"r": 4, "c": 33}, "inputs": {"x": "uniform"}}]}
    for problem, expected in ((ROWS, True), (named, False)):
        cases = hidden_cases(decode(Problem, problem, what="problem"), random.Random(1), reduced=False)
        assert any(case.workload.inputs["x"] == "low" for case in cases) is expected


def test_an_output_that_is_zero_but_for_rounding_is_judged_on_the_scale_of_its_inputs(bench: Workbench) -> None:
    centred = {
        **ROWS,
        "name": "log_softmax_of_one",
        "axes": {"r": {"type": "var", "min": 1}, "c": {"type": "var", "min": 1}},
        "outputs": {"y": {"dtype": "float32", "shape": ["r"]}},
        "reference": "def run(x):\n    m = x.max(axis=1)\n"
        "    return m + np.log(np.exp(x - m[:, None]).sum(axis=1)) - x[:, 0]",
        "workloads": [{"axes": {"r": 4, "c": 33}}, {"axes": {"r": 7, "c": 1}}],
        "accumulation": "c",
    }
    body = """float m = x[i * c]; for (int j = 1; j < c; j++) m = fmaxf(m, x[i * c + j]);
    float s = 0; for (int j = 0; j < c; j++) s += exp2f((x[i * c + j] - m) * 1.44269504f);
    y[i] = (m * 1.44269504f + log2f(s)) / 1.44269504f - x[i * c];"""
    assert rows_verdict(bench, body, centred).status == "accepted"


def test_a_scalar_with_one_value_is_warned_about() -> None:
    assert fixed_scalars(load_builtin("rmsnorm").problem).keys() <= {"eps"}
    varied = {
        **ROWS,
        "inputs": {**ROWS["inputs"], "alpha": {"dtype": "float32", "shape": None}},
        "workloads": [{"axes": {"r": 4, "c": 33}, "scalars": {"alpha": value}} for value in (1.0, 2.0)],
    }
    assert fixed_scalars(decode(Problem, varied, what="problem")) == {}
    once = {**varied, "workloads": varied["workloads"][:1]}  # type: ignore[index]
    assert fixed_scalars(decode(Problem, once, what="problem")) == {"alpha": 1.0}


def test_long_sums_without_accumulation_are_named_in_a_warning(bench: Workbench) -> None:
    sums = {**ROWS, "name": "row_sum", "reference": "def run(x):\n    return x.cumsum(axis=1)[:, -1]"}
    body = "float s = 0; for (int j = 0; j < c; j++) s += x[i * c + j]; y[i] = s;"
    found = rows_verdict(bench, body, {**sums, "workloads": [{"axes": {"r": 4, "c": 20001}}]})
    assert any("`accumulation`" in warning for warning in found.warnings)
    told = {**sums, "accumulation": "c", "workloads": [{"axes": {"r": 4, "c": 20001}}]}
    assert rows_verdict(bench, body, told).warnings == ()


def test_a_probe_changes_one_element_to_a_value_of_the_same_array() -> None:
    problem = decode(Problem, ROWS, what="problem")
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    found = probes(problem, Workload(axes={"r": 3, "c": 4}, inputs={"x": "normal"}), {"x": x}, random.Random(0))
    assert found
    for probe in found:
        assert int((probe.inputs["x"] != x).sum()) == 1
        assert probe.inputs["x"][probe.index] == probe.after != x[probe.index]
        assert probe.after in x


def test_an_output_that_stays_where_the_reference_moves_is_unmoved() -> None:
    floor = Tolerance(rtol=1e-6, atol=1e-6)
    expected, changed = np.array([1.0, 1.0]), np.array([1.01, 1.0])
    assert list(unmoved(np.array([1.0, 1.0]), np.array([1.0, 1.0]), expected, changed, floor)) == [True, False]
    assert not unmoved(np.array([1.0, 1.0]), np.array([1.01, 1.0]), expected, changed, floor).any()


@pytest.mark.parametrize(("flops", "reason"), [("n", "unwritten_output"), ("1000*n", "too_fast")])
def test_a_kernel_that_gives_up_only_at_the_sizes_of_bench_is_found(bench: Workbench, flops: str, reason: str) -> None:
    launch = {"kernel": "relu", "grid": ["ceil_div(n, 256)"], "block": [256], "args": ["x", "y", "n"]}
    problem = {
        "name": "rectify",
        "axes": {"n": {"type": "var"}},
        "inputs": {"x": {"dtype": "float32", "shape": ["n"]}},
        "outputs": {"y": {"dtype": "float32", "shape": ["n"]}},
        "reference": "def run(x):\n    return np.maximum(x, 0)",
        "workloads": [{"axes": {"n": 256}}, {"axes": {"n": 1000}}],
        "bench": [{"axes": {"n": 1 << 21}}],
        "bytes": "8*n",
        "flops": flops,  # so many that no run at that size is affordable
    }
    gives_up = {"source": RELU.replace("GUARD", "if (n > 1100000) return;"), "launches": [launch]}
    found = bench.verify(gives_up, problem, seed=3)
    assert (found.status, found.reason) == ("rejected", reason), found.summary


def test_the_numbers_of_a_kernel_are_those_it_compares_with_and_steps_by() -> None:
    ptx = """
    setp.ge.s32     %p1, %r1, 777;
    @%p1 bra        $L__BB0_2;
    add.s32         %r2, %r1, -224;
    and.b32         %r3, %r1, 7;
    and.b32         %r3, %r1, 12;
    @!%p2 or.b32    %r4, %r1, 96;
    mul.wide.s32    %rd1, %r1, 4;
    shl.b32         %r5, %r1, 5;
    mov.u32         %r6, 999;
    setp.lt.f32     %p2, %f1, 0f42280000;
    ld.global.f32   %f1, [%rd1+400];
    add.s32         %r7, %r7, 2000000;
    """
    found = constants_of(ptx)
    assert found.compared == (777,)
    assert found.stepped == (4, 8, 32, 96, 224)  # 12 is no mask of low bits


def test_every_number_of_a_kernel_gets_sizes_beside_it_and_before_the_next() -> None:
    problem = decode(Problem, ROWS, what="problem")
    cases = [case for seed in range(3) for case in block_cases(problem, (100, 200, 300), random.Random(seed))]
    for axis in ("r", "c"):
        sizes = {case.workload.axes[axis] for case in cases}
        for low, high in ((99, 200), (199, 300), (299, 600)):
            assert any(low <= size <= high for size in sizes)


def test_some_sizes_beside_a_kernels_numbers_are_multiples_of_a_vector_on_every_axis() -> None:
    problem = decode(Problem, ROWS, what="problem")
    cases = block_cases(problem, (64,), random.Random(1))
    wide = [case for case in cases if all(size % 4 == 0 for size in case.workload.axes.values())]
    assert any(case.workload.axes["c"] % 64 for case in wide)
    assert any(case.workload.inputs["x"] == "mixed_rows" for case in wide)


@pytest.mark.parametrize("name", ["uniform", "large"])
def test_rows_far_below_zero_stand_among_others_only_where_large_data_are_allowed(name: str) -> None:
    problem = {**ROWS, "workloads": [{"axes": {"r": 4, "c": 33}, "inputs": {"x": name}}]}
    cases = block_cases(decode(Problem, problem, what="problem"), (64,), random.Random(1))
    assert any(case.workload.inputs["x"] == "mixed_rows" for case in cases) is (name == "large")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "fault",
    [
        "if (c == 611) v += 1.0f;",
        "if (c % 4 == 0 && r % 4 == 0 && i == r - 1) v += 1.0f;",
        "if (c % 8 == 6) v += 1.0f;",
        "if (c > 96 && c <= 128) v = -3.0f;",
    ],
    ids=["one size", "the last row of a wide path", "one rest", "one chunk"],
)
def test_a_fault_at_sizes_that_the_code_itself_tells_is_found(bench: Workbench, fault: str, seed: int) -> None:
    source = (
        'extern "C" __global__ void k(const float* x, float* y, int r, int c) {'
        " int i = blockIdx.x * 64 + threadIdx.x; if (i >= r) return; float v = x[i * c];"
        f" for (int j = 1; j < c; j++) v = fmaxf(v, x[i * c + j]); {fault} y[i] = v; }}"
    )
    launch = {"kernel": "k", "grid": ["ceil_div(r, 64)"], "block": [64], "args": ["x", "y", "r", "c"]}
    found = bench.verify({"source": source, "launches": [launch]}, ROWS, seed=seed)
    assert found.status == "rejected", found.summary


def test_a_maximum_that_starts_too_high_only_on_its_wide_path_is_found(bench: Workbench) -> None:
    body = """float m = c % 4 == 0 && c > 64 ? -50.0f : -3.4e38f;
    for (int j = 0; j < c; j++) m = fmaxf(m, x[i * c + j]);
    y[i] = m;"""
    assert rows_verdict(bench, body, ROWS).status == "rejected"


@pytest.mark.parametrize("fault", [False, True])
def test_a_fault_in_a_loop_that_goes_round_only_once_all_blocks_are_busy_is_found(
    bench: Workbench, fault: bool
) -> None:
    body = "y[i] = fmaxf(x[i], FAULT);".replace("FAULT", "round < 3 ? 0.0f : 0.001f" if fault else "0.0f")
    source = (
        'extern "C" __global__ void relu(const float* x, float* y, int n) { int round = 0;'
        " for (long long i = blockIdx.x * 256 + threadIdx.x; i < n; i += 256LL * gridDim.x, ++round)"
        f" {{ {body} }} }}"
    )
    launch = {"kernel": "relu", "grid": ["min(ceil_div(n, 256), 4096)"], "block": [256], "args": ["x", "y", "n"]}
    found = bench.verify({"source": source, "launches": [launch]}, "relu", seed=3)
    assert found.status == ("rejected" if fault else "accepted"), found.summary


def test_only_a_grid_that_stops_growing_gets_sizes_that_fill_it() -> None:
    problem = load_builtin("relu").problem
    for grid, sizes in ((lambda n: -(-n // 256), []), (lambda n: min(-(-n // 256), 4096), [4194303])):
        found = saturating_case(problem, lambda workload, grid=grid: grid(workload.axes["n"]), (), random.Random(1))
        assert [case.workload.axes["n"] for case in found] == sizes
