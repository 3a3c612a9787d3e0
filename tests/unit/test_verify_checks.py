"""Races, reads of unwritten memory and what else no kernel may rely on; level 2 on the embedded device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from optiml.ptx import engine_name
from optiml.records import Verdict
from optiml.workbench import Workbench

native = pytest.mark.skipif(engine_name() != "native", reason="the native engine was not built")
ABS: dict[str, Any] = {
    "name": "absolute",
    "axes": {"n": {"type": "var"}},
    "inputs": {"x": {"dtype": "float32", "shape": ["n"]}},
    "outputs": {"y": {"dtype": "float32", "shape": ["n"]}},
    "reference": "def run(x):\n    return np.abs(x)",
    "workloads": [{"axes": {"n": 256}}, {"axes": {"n": 1000}}],
}
TOTAL = {
    **ABS,
    "name": "total",
    "outputs": {"y": {"dtype": "float32", "shape": [1]}},
    "reference": "def run(x):\n    return x.sum(keepdims=True)",
    "accumulation": "n",
}
LARGEST = {**TOTAL, "name": "largest", "reference": "def run(x):\n    return x.max(keepdims=True)"}


def verdict(
    bench: Workbench, body: str, problem: Any = ABS, *, grid: Any = "ceil_div(n, 256)", level: str = "L1", **fields: Any
) -> Verdict:
    launch = {"kernel": "k", "grid": [grid], "block": [256], "args": ["x", "y", *fields.get("workspace", {}), "n"]}
    spaces = "".join(f"float* {name}, " for name in fields.get("workspace", {}))
    source = (
        f'__device__ unsigned int ticket; extern "C" __global__ void k(const float* x, float* y, {spaces}int n) {{\n'
        f"int t = threadIdx.x, i = blockIdx.x * 256 + t;\n{body}\n}}\n"
    )
    return bench.verify({"source": source, "launches": [launch], **fields}, problem, level=level, seed=11)


TREE = """__shared__ float s[256]; float v = 0; for (int k = t; k < n; k += 256) v += x[k];
s[t] = v; __syncthreads();
for (int o = 128; o > 0; o /= 2) { if (t < o) s[t] += s[t + o]; BARRIER }
if (t == 0) y[0] = s[0];"""
LAST_BLOCK = """__shared__ float s[256]; __shared__ bool last; s[t] = i < n ? x[i] : 0; __syncthreads();
for (int o = 128; o > 0; o /= 2) { if (t < o) s[t] += s[t + o]; __syncthreads(); }
if (t == 0) { part[blockIdx.x] = s[0]; FENCE
last = atomicInc(&ticket, gridDim.x - 1) == gridDim.x - 1; } __syncthreads();
if (!last) return;
float v = 0; for (int k = t; k < gridDim.x; k += 256) v += ((volatile float*)part)[k];
s[t] = v; __syncthreads();
for (int o = 128; o > 0; o /= 2) { if (t < o) s[t] += s[t + o]; __syncthreads(); }
if (t == 0) y[0] = s[0];"""


@native
def test_a_dropped_barrier_is_a_race_with_both_parties_though_the_engine_happens_to_get_it_right(
    bench: Workbench,
) -> None:
    assert verdict(bench, TREE.replace("BARRIER", "__syncthreads();"), TOTAL, grid=1).status == "accepted"
    found = verdict(bench, TREE.replace("BARRIER", ""), TOTAL, grid=1)
    assert (found.status, found.reason) == ("rejected", "race")
    assert found.fault is not None
    assert found.fault.kind == "race"
    assert found.fault.other is not None
    assert found.fault.line is not None


@native
def test_blocks_that_add_to_one_sum_race_and_with_atomics_do_not(bench: Workbench) -> None:
    clear = {"kernel": "clear", "grid": [1], "block": [1], "args": ["y"]}
    add = {"kernel": "add", "grid": ["ceil_div(n, 256)"], "block": [256], "args": ["x", "y", "n"]}
    for statement, status in (("y[0] += v;", "rejected"), ("atomicAdd(y, v);", "accepted")):
        source = (
            'extern "C" __global__ void clear(float* y) { y[0] = 0; }\n'
            'extern "C" __global__ void add(const float* x, float* y, int n) { float v = 0;'
            " for (int k = 0; k < 256 && blockIdx.x * 256 + k < n; k++) v += x[blockIdx.x * 256 + k];"
            f" if (threadIdx.x == 0) {statement} }}\n"
        )
        found = bench.verify({"source": source, "launches": [clear, add]}, TOTAL, seed=4)
        assert found.status == status, found.summary
        assert found.reason in (None, "race")


@native
def test_the_last_block_may_add_up_what_the_others_left(bench: Workbench) -> None:
    space = {"part": {"dtype": "float32", "shape": ["ceil_div(n, 256)"]}}
    body = LAST_BLOCK.replace("FENCE", "__threadfence();")
    found = verdict(bench, body, TOTAL, level="L2", workspace=space)
    assert found.status == "accepted", found.summary
    assert found.sanitizer == dict.fromkeys(("memcheck", "racecheck", "initcheck", "synccheck"), "clean")


@native
def test_a_maximum_that_starts_from_unwritten_shared_memory_is_a_fault(bench: Workbench) -> None:
    body = """__shared__ float s[512]; float v = -INFINITY; for (int k = t; k < n; k += 256) v = fmaxf(v, x[k]);
    s[t] = v; __syncthreads();
    if (t == 0) { for (int k = 0; k < 512; k++) v = fmaxf(v, s[k]); y[0] = v; }"""
    found = verdict(bench, body, LARGEST, grid=1)
    assert (found.status, found.reason) == ("rejected", "fault")
    assert found.fault is not None
    assert found.fault.kind == "uninitialised"
    assert verdict(bench, body.replace("k < 512", "k < 256"), LARGEST, grid=1).status == "accepted"


@native
def test_unwritten_shared_memory_that_no_output_depends_on_is_a_warning(bench: Workbench) -> None:
    body = """__shared__ float s[256]; if (i < n) s[t] = fabsf(x[i]); __syncthreads();
    float v = ((volatile float*)s)[t]; if (i < n) y[i] = v;"""
    found = verdict(bench, body, level="L2")
    assert found.status == "accepted", found.summary
    assert any("nothing has written" in warning for warning in found.warnings)


@native
def test_a_result_that_depends_on_the_order_of_blocks_is_a_race(bench: Workbench) -> None:
    body = """__shared__ unsigned int mine; if (t == 0) mine = atomicInc(&ticket, gridDim.x - 1); __syncthreads();
    i = mine * 256 + t; if (i < n) y[blockIdx.x * 256 + t < n ? blockIdx.x * 256 + t : i] = fabsf(x[i]);"""
    found = verdict(bench, body)
    assert (found.status, found.reason) == ("rejected", "race")
    assert "order in which blocks run" in (found.detail or "")


def test_a_result_that_depends_on_addresses_is_hard_coded(bench: Workbench) -> None:
    found = verdict(bench, "if (i < n) y[i] = ((size_t)x & 0xfffff) ? 0.0f : fabsf(x[i]);")
    assert (found.status, found.reason) == ("rejected", "hard_coded")
    assert "addresses" in (found.detail or "")


@native
def test_level_two_names_its_four_checks(bench: Workbench) -> None:
    found = verdict(bench, "if (i < n) y[i] = fabsf(x[i]);", level="L2")
    assert (found.status, found.levels) == ("accepted", ("L0", "L1", "L2"))
    assert found.sanitizer == dict.fromkeys(("memcheck", "racecheck", "initcheck", "synccheck"), "clean")


def test_level_two_is_not_claimed_without_the_native_engine(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    device = bench.evaluator("emulator").device
    monkeypatch.setattr(device, "info", dataclasses.replace(device.info, engine="numpy"))
    found = verdict(bench, "if (i < n) y[i] = fabsf(x[i]); // numpy", level="L2")
    assert (found.status, found.levels) == ("unverified", ("L0", "L1"))
    assert "native engine" in (found.detail or "")


def test_sizes_are_named_in_words(bench: Workbench) -> None:
    assert "at n=" in (verdict(bench, "if (i < n) y[i] = fabsf(x[i + 1]);").detail or "")


@pytest.mark.parametrize(
    ("functions", "call", "named"),
    [
        ("__device__ __noinline__ float f(float v, int d) { return d ? f(fabsf(v), d - 1) + v * 0.0f : fabsf(v); }",
         "f(x[i], n % 7)", "recursive call"),
        ("__device__ float a(float v) { return fabsf(v); } __device__ float b(float v) { return v < 0 ? -v : v; }"
         " typedef float (*F)(float); __device__ F table[2] = {a, b};", "table[i & 1](x[i])", "indirect call"),
    ],
)  # fmt: skip
def test_calls_that_the_engine_cannot_follow_are_unverified_by_name(
    bench: Workbench, functions: str, call: str, named: str
) -> None:
    source = (
        f"{functions}\n"
        'extern "C" __global__ void k(const float* x, float* y, int n) {'
        f" int i = blockIdx.x * 256 + threadIdx.x; if (i < n) y[i] = {call}; }}"
    )
    launch = {"kernel": "k", "grid": ["ceil_div(n, 256)"], "block": [256], "args": ["x", "y", "n"]}
    found = bench.verify({"source": source, "launches": [launch]}, ABS, seed=1)
    assert (found.status, found.reason) == ("unverified", None)
    assert named in (found.detail or "")
