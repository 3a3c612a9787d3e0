"""Verdicts on the embedded device: what must be accepted, what must be rejected, and why."""

from __future__ import annotations

from typing import Any

import pytest

from optiml.errors import InvalidInput
from optiml.problems.problem import builtin_names, kernel_from_text, load_builtin
from optiml.records import Verdict
from optiml.workbench import Workbench

ABS: dict[str, Any] = {
    "name": "absolute",
    "axes": {"n": {"type": "var"}},
    "inputs": {"x": {"dtype": "float32", "shape": ["n"]}},
    "outputs": {"y": {"dtype": "float32", "shape": ["n"]}},
    "reference": "def run(x):\n    return np.abs(x)",
    "workloads": [{"axes": {"n": 256}}, {"axes": {"n": 1000}}],
}
ALIGNED = {**ABS, "name": "aligned", "constraints": ["n % 16 == 0"], "workloads": [{"axes": {"n": 256}}]}
IDENTITY = "if (i < n) y[i] = x[i];"


def kernel(body: str, **fields: Any) -> dict[str, Any]:
    launch = {"kernel": "k", "grid": ["ceil_div(n, 256)"], "block": [256], "args": ["x", "y", "n"]}
    source = (
        'extern "C" __global__ void k(float* x, float* y, int n) {\n'
        f"    int i = blockIdx.x * blockDim.x + threadIdx.x;\n    {body}\n}}\n"
    )
    return {"source": source, "launches": [launch], **fields}


def verdict(bench: Workbench, body: str, problem: Any = ABS, **fields: Any) -> Verdict:
    return bench.verify(kernel(body, **fields), problem, seed=11)


def test_an_honest_kernel_is_accepted_with_its_evidence(bench: Workbench) -> None:
    found = verdict(bench, "if (i < n) y[i] = fabsf(x[i]);")
    assert (found.status, found.reason, found.levels) == ("accepted", None, ("L0", "L1"))
    assert sum(case.hidden for case in found.cases) >= 5
    assert found.build is not None
    assert found.build.registers_per_thread is not None
    assert found.device is not None
    assert found.device.kind == "emulator"
    assert "sizes in" in found.domain


@pytest.mark.parametrize("problem", ["relu", "gelu", ABS], ids=["relu", "gelu", "absolute"])
def test_the_identity_is_no_activation(bench: Workbench, problem: Any) -> None:
    found = verdict(bench, IDENTITY, problem)
    assert found.status == "rejected"
    assert found.reason in ("wrong_values", "imprecise")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("", "unwritten_output"),
        ("if (i == 0) y[i] = fabsf(x[i]);", "unwritten_output"),
        ("if (i < n && n % 256 == 0) y[i] = fabsf(x[i]); else if (i < n) y[i] = 0.0f;", "wrong_values"),
        ("if (i < n) { y[i] = fabsf(x[i]); x[i] = 0.0f; }", "mutated_input"),
        ("y[i] = fabsf(i < n ? x[i] : 0.0f);", "fault"),
        ("if (i < n) y[i] = fabsf(x[i + 1]);", "fault"),
        ("if (i < n) *(float*)(16 + 4 * i) = 1.0f;", "fault"),
        ("if (i < n) y[i] = sqrtf(-x[i] * x[i] - 1.0f);", "nonfinite"),
        ("if (i < n) atomicAdd(&y[i], fabsf(x[i]));", "unwritten_output"),
        ("if (i < n) y[i] = fabsf(x[i]) * 1.01f;", "wrong_values"),
        ("if (i < n) y[i] = fabsf(x[i]) * 1.00001f;", "imprecise"),
        ("if (i < n) { volatile float* p = y + i; *p = 1.0f; while (*p > 0.0f) { } }", "timed_out"),
        ("if (i < n) y[i] = fabsf(x[i])", "compile_failed"),
    ],
)
def test_a_wrong_kernel_is_rejected_with_its_reason(bench: Workbench, body: str, reason: str) -> None:
    found = verdict(bench, body)
    assert (found.status, found.reason) == ("rejected", reason)
    assert found.detail
    assert found.next_action


def test_a_kernel_that_is_right_only_for_multiples_of_256_is_hard_coded_when_shown_no_other(bench: Workbench) -> None:
    shown = {**ABS, "name": "shown", "workloads": [{"axes": {"n": 256}}, {"axes": {"n": 1024}}]}
    found = verdict(bench, "if (i < n / 256 * 256) y[i] = fabsf(x[i]); else if (i < n) y[i] = 1.0f;", shown)
    assert (found.status, found.reason) == ("rejected", "hard_coded")


def test_a_kernel_may_rely_on_the_constraints_of_its_problem(bench: Workbench) -> None:
    body = """float4* a = (float4*)x; float4* b = (float4*)y;
    if (4 * i < n) { float4 v = a[i]; b[i] = make_float4(fabsf(v.x), fabsf(v.y), fabsf(v.z), fabsf(v.w)); }"""
    assert verdict(bench, body, ALIGNED).status == "accepted"
    assert verdict(bench, body, ABS).reason == "fault"


def test_a_result_remembered_from_the_first_run_is_state(bench: Workbench) -> None:
    body = """if (i < n) { if (filled[i] == 0) { saved[i] = fabsf(x[i]); filled[i] = 1; } y[i] = saved[i]; }"""
    launch = {"kernel": "k", "grid": ["ceil_div(n, 256)"], "block": [256], "args": ["x", "y", "n"]}
    source = (
        "__device__ int filled[1 << 20];\n__device__ float saved[1 << 20];\n"
        'extern "C" __global__ void k(const float* x, float* y, int n) {\n'
        f"    int i = blockIdx.x * blockDim.x + threadIdx.x;\n    {body}\n}}\n"
    )
    found = bench.verify({"source": source, "launches": [launch]}, ABS, seed=3)
    assert (found.status, found.reason) == ("rejected", "state_across_runs")


def test_a_kernel_that_counts_its_calls_and_stops_late_is_state(bench: Workbench) -> None:
    source = (
        "__device__ int calls;\n"
        'extern "C" __global__ void k(const float* x, float* y, int n) {'
        " int i = blockIdx.x * 256 + threadIdx.x; if (i < n) y[i] = calls >= 4 ? 0.0f : fabsf(x[i]); }\n"
        'extern "C" __global__ void count() { calls++; }\n'
    )
    launches = [
        {"kernel": "k", "grid": ["ceil_div(n, 256)"], "block": [256], "args": ["x", "y", "n"]},
        {"kernel": "count", "grid": [1], "block": [1], "args": []},
    ]
    found = bench.verify({"source": source, "launches": launches}, ABS, seed=3)
    assert (found.status, found.reason) == ("rejected", "state_across_runs")


@pytest.mark.parametrize(("identity", "status"), [("-INFINITY", "accepted"), ("-0.005f", "rejected")])
def test_an_identity_that_is_not_low_enough_for_a_maximum_is_found(
    bench: Workbench, identity: str, status: str
) -> None:
    rows = {
        "name": "row_max",
        "axes": {"r": {"type": "var", "min": 1}, "c": {"type": "var", "min": 1}},
        "inputs": {"x": {"dtype": "float32", "shape": ["r", "c"]}},
        "outputs": {"y": {"dtype": "float32", "shape": ["r"]}},
        "reference": "def run(x):\n    return x.max(axis=1)",
        "workloads": [{"axes": {"r": 4, "c": 33}}, {"axes": {"r": 7, "c": 100}}],
    }
    source = (
        'extern "C" __global__ void k(const float* x, float* y, int r, int c) {'
        f" int i = blockIdx.x * 64 + threadIdx.x; if (i >= r) return; float m = {identity};"
        " for (int j = 0; j < c; j++) m = fmaxf(m, x[i * c + j]); y[i] = m; }"
    )
    launch = {"kernel": "k", "grid": ["ceil_div(r, 64)"], "block": [64], "args": ["x", "y", "r", "c"]}
    assert bench.verify({"source": source, "launches": [launch]}, rows, seed=3).status == status


def test_hidden_sizes_are_not_given_up_for_data_on_which_the_reference_is_not_finite(bench: Workbench) -> None:
    root = {
        **ABS,
        "name": "root",
        "reference": "def run(x):\n    return np.sqrt(x)",
        "workloads": [{"axes": {"n": 256}, "inputs": {"x": "uniform"}}, {"axes": {"n": 1000}}],
    }
    found = verdict(bench, "if (i < n) y[i] = sqrtf(x[i]);", root)
    assert found.status == "accepted"
    assert sum(case.hidden for case in found.cases) >= 9
    never = {**root, "name": "never", "workloads": [{"axes": {"n": 256}, "inputs": {"x": "normal"}}]}
    found = verdict(bench, "if (i < n) y[i] = sqrtf(x[i]);", never)
    assert (found.status, found.reason) == ("unverified", None)
    assert "hidden sizes, whatever the data" in (found.detail or "")


def test_a_launch_beyond_the_bounds_of_its_kernel_is_a_bad_launch(bench: Workbench) -> None:
    source = (
        'extern "C" __global__ void __launch_bounds__(64) k(const float* x, float* y, int n) {'
        " int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) y[i] = fabsf(x[i]); }"
    )
    launch = {"kernel": "k", "grid": ["ceil_div(n, 256)"], "block": [256], "args": ["x", "y", "n"]}
    found = bench.verify({"source": source, "launches": [launch]}, ABS, seed=3)
    assert (found.status, found.reason) == ("rejected", "bad_launch")


def test_a_workspace_too_large_to_poison_leaves_the_kernel_unverified(bench: Workbench) -> None:
    space = {"w": {"dtype": "float32", "shape": [1 << 31]}}
    found = verdict(bench, "if (i < n) y[i] = fabsf(x[i]);", workspace=space)
    assert (found.status, found.reason) == ("unverified", None)


def test_sizes_that_the_embedded_device_cannot_run_are_refused(bench: Workbench) -> None:
    with pytest.raises(InvalidInput) as caught:
        verdict(bench, "", {**ABS, "workloads": [{"axes": {"n": 10**9}}]})
    assert caught.value.code == "too_large"


def test_a_kernel_that_fails_only_on_the_second_data_has_no_state(bench: Workbench) -> None:
    one = {**ABS, "name": "one", "workloads": [{"axes": {"n": 1}}, {"axes": {"n": 2}}]}
    reasons = {bench.verify(kernel(IDENTITY), one, seed=seed).reason for seed in range(6)}
    assert reasons <= {"wrong_values", "hard_coded"}


def test_scratch_that_every_run_rewrites_is_no_state(bench: Workbench) -> None:
    source = (
        "__device__ float scratch[1 << 20];\n"
        'extern "C" __global__ void a(const float* x, int n) { int i = blockIdx.x * 256 + threadIdx.x;'
        " if (i < n) scratch[i] = fabsf(x[i]); }\n"
        'extern "C" __global__ void b(float* y, int n) { int i = blockIdx.x * 256 + threadIdx.x;'
        " if (i < n) y[i] = scratch[i]; }\n"
    )
    grid = {"grid": ["ceil_div(n, 256)"], "block": [256]}
    launches = [{"kernel": "a", "args": ["x", "n"], **grid}, {"kernel": "b", "args": ["y", "n"], **grid}]
    assert bench.verify({"source": source, "launches": launches}, ABS, seed=3).status == "accepted"


def test_a_zeroed_workspace_is_zero_before_every_run(bench: Workbench) -> None:
    source = """extern "C" __global__ void k(const float* x, float* y, int* count, int n) {
    int i = blockIdx.x * 256 + threadIdx.x;
    if (i < n) y[i] = fabsf(x[i]) + (atomicAdd(count, 1) >= n ? 1.0f : 0.0f); }"""
    launch = {"kernel": "k", "grid": ["ceil_div(n, 256)"], "block": [256], "args": ["x", "y", "count", "n"]}
    space = {"count": {"dtype": "int32", "shape": [1], "init": "zero"}}
    assert bench.verify({"source": source, "launches": [launch], "workspace": space}, ABS, seed=3).status == "accepted"


def test_a_problem_whose_answer_is_always_zero_accepts_nothing(bench: Workbench) -> None:
    trivial = {**ABS, "name": "trivial", "reference": "def run(x):\n    return 0 * x"}
    found = verdict(bench, "if (i < n) y[i] = 0.0f;", trivial)
    assert (found.status, found.reason) == ("unverified", "problem_degenerate")


def test_an_opcode_the_engine_lacks_leaves_the_kernel_unverified(bench: Workbench) -> None:
    found = verdict(bench, 'asm volatile("wgmma.fence.sync.aligned;"); if (i < n) y[i] = fabsf(x[i]);')
    assert found.status in ("unverified", "rejected")
    assert found.status == "unverified" or found.reason == "compile_failed"  # sm_80 has no wgmma at all


def test_a_missing_launch_plan_is_derived_from_parameter_names(bench: Workbench) -> None:
    record = kernel("if (i < n) y[i] = fabsf(x[i]);")
    found = bench.verify(record["source"], ABS, seed=1)
    assert found.status == "accepted"
    assert "no launch plan was given" in found.warnings[0]


def test_a_plan_that_cannot_be_derived_shows_the_block_to_fill_in(bench: Workbench) -> None:
    source = 'extern "C" __global__ void k(const float* in, float* out, int count) { }'
    with pytest.raises(InvalidInput, match=r"\[\[launch\]\]"):
        bench.verify(source, ABS)


def test_the_reference_may_be_a_trusted_kernel(bench: Workbench) -> None:
    oracle = {**ABS, "reference": {"kernel": kernel("if (i < n) y[i] = fabsf(x[i]);")}}
    assert verdict(bench, "if (i < n) y[i] = x[i] < 0.0f ? -x[i] : x[i];", oracle).oracle == "kernel"
    assert verdict(bench, IDENTITY, oracle).reason == "wrong_values"


def test_the_next_kernel_is_judged_right_after_a_crash_and_a_hang(bench: Workbench) -> None:
    assert verdict(bench, "for (;;) { y[0] += 1.0f; if (n < 0) break; }").reason == "timed_out"
    assert verdict(bench, "if (i < n) y[i] = fabsf(x[i]); ").status == "accepted"


def test_the_same_question_is_answered_from_the_store(bench: Workbench) -> None:
    body = "if (i < n) y[i] = fabsf(x[i]); // again"
    assert verdict(bench, body).cached is False
    again = verdict(bench, body)
    assert again.cached is True
    assert again.status == "accepted"


def test_axes_that_the_engine_cannot_afford_are_refused_at_once(bench: Workbench) -> None:
    with pytest.raises(InvalidInput) as caught:
        bench.verify(kernel("if (i < n) y[i] = fabsf(x[i]);"), ABS, axes={"n": 2**30})
    assert caught.value.code == "too_large"


@pytest.mark.parametrize("name", builtin_names())
def test_every_seed_is_accepted(bench: Workbench, name: str) -> None:
    builtin = load_builtin(name)
    found = bench.verify(kernel_from_text(builtin.seed_text, dtype=builtin.dtypes[0]), name, seed=5)
    assert found.status == "accepted", found.summary


@pytest.mark.parametrize(
    ("name", "cheat"), [(name, cheat) for name in builtin_names() for cheat in load_builtin(name).cheats]
)
def test_every_cheat_is_rejected(bench: Workbench, name: str, cheat: str) -> None:
    builtin = load_builtin(name)
    found = bench.verify(kernel_from_text(builtin.cheats[cheat], dtype=builtin.dtypes[0]), name, seed=5)
    assert found.status == "rejected", found.summary


def test_the_last_profile_is_kept_though_a_verification_made_it_before(bench: Workbench) -> None:
    name = bench.generate(problem="relu", count=1, verify=False).candidates[0].kernel_id
    assert bench.verify(name, "relu").status == "accepted"
    assert bench.last_profile(name) is None
    profile = bench.known_profile(name, "relu") or bench.profile(name, "relu")
    kept = bench.last_profile(name)
    assert kept is not None
    assert kept.metrics == profile.metrics
