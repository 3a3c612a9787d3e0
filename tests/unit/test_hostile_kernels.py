"""Kernels that try to pass without being right, and right ones that look odd: the first are rejected, these are not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from test_verify_reach import ROWS

from optiml.workbench import Workbench

SPECIAL: dict[str, Any] = {
    "name": "double_it",
    "axes": {"n": {"type": "const", "value": 6}},
    "inputs": {"x": {"dtype": "float32", "shape": ["n"]}},
    "outputs": {"y": {"dtype": "float32", "shape": ["n"]}},
    "reference": "def run(x):\n    return 2 * x",
    "workloads": [
        {"axes": {}, "inputs": {"x": {"values": [1.0, "inf", "-inf", "nan", 3.0, 0.5]}}},
        {"axes": {}, "inputs": {"x": {"values": [1e-40, 3e-40, -2e-41, 5e-42, 1e-43, -1e-40]}}},
    ],
}


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A kernel body for `k(x, y, n)` or, for rows, `k(x, y, r, c)`; `i` is the thread's number in the grid."""

    body: str
    problem: Any = "relu"
    before: str = ""
    grid: tuple[Any, ...] = ("ceil_div(n, 256)",)
    block: tuple[Any, ...] = (256,)
    shared: Any = 0
    workspace: dict[str, Any] = field(default_factory=dict)
    more: tuple[dict[str, Any], ...] = ()  # launches after the first


def kernel_of(attempt: Attempt) -> dict[str, Any]:
    rows = attempt.problem is ROWS
    output = "out" if attempt.problem == "sum" else "y"
    sizes = ["r", "c"] if rows else ["n"]
    scratch = [*attempt.workspace]
    parameters = ["const float* x", "float* y", *(f"float* {name}" for name in scratch), *(f"int {s}" for s in sizes)]
    source = (
        f'{attempt.before}\nextern "C" __global__ void k({", ".join(parameters)}) {{\n'
        f" int i = blockIdx.x * blockDim.x + threadIdx.x;\n{attempt.body}\n}}"
    )
    grid = ["ceil_div(r, 256)"] if rows and attempt.grid == ("ceil_div(n, 256)",) else [*attempt.grid]
    first = {
        "kernel": "k", "grid": grid, "block": [*attempt.block], "args": ["x", output, *scratch, *sizes],
        "shared_bytes": attempt.shared,
    }  # fmt: skip
    return {"source": source, "launches": [first, *attempt.more], "workspace": attempt.workspace}


RELU = "if (i < n) y[i] = fmaxf(x[i], 0.0f);"
ZEROED = {"sums": {"dtype": "float32", "shape": [1], "init": "zero"}}

HOSTILE = {
    "a constant for each size": Attempt(
        problem="sum", grid=(1,), body="if (i == 0) y[0] = n == 1000 ? 498.7f : n == 1 ? 0.4f : 0.5f * n;"
    ),
    "keeps what the output held where it is finite": Attempt(
        body="if (i < n) { float old = y[i]; y[i] = isfinite(old) ? old : fmaxf(x[i], 0.0f); }"
    ),
    "looks for the answer behind its input": Attempt(body="if (i < n) y[i] = x[n + i];"),
    "adds without atomics beyond some size": Attempt(
        problem="sum", workspace=ZEROED,
        body="""if (n <= 16384) { if (i < n) atomicAdd(sums, x[i]); } else if (i < n) sums[0] += x[i];""",
        more=({"kernel": "out", "grid": [1], "block": [1], "args": ["sums", "out"]},),
    ),
    "computes in half precision": Attempt(
        before="#include <cuda_fp16.h>",
        body="if (i < n) y[i] = __half2float(__float2half(fmaxf(x[i], 0.0f)));",
    ),
    "maps what is not a number to zero": Attempt(
        problem=SPECIAL, grid=(1,), body="if (i < n) y[i] = x[i] == x[i] ? 2 * x[i] : 0.0f;"
    ),
    "clips infinities": Attempt(
        problem=SPECIAL, grid=(1,), body="if (i < n) y[i] = isnan(x[i]) ? x[i] : fminf(fmaxf(2 * x[i], -3e38f), 3e38f);"
    ),
    "flushes subnormals": Attempt(
        problem=SPECIAL, grid=(1,), body="if (i < n) y[i] = fabsf(x[i]) < 1.2e-38f ? 0.0f : 2 * x[i];"
    ),
    "is wrong for one rest of the size": Attempt(body="if (i < n) y[i] = n % 97 == 13 ? 0.0f : fmaxf(x[i], 0.0f);"),
    "is wrong in the last of many blocks": Attempt(
        body="if (i < n) y[i] = gridDim.x > 40 && blockIdx.x == gridDim.x - 1 ? -0.5f : fmaxf(x[i], 0.0f);"
    ),
    "adds to what the output held": Attempt(body="if (i < n) y[i] += fmaxf(x[i], 0.0f);"),
    "returns the results of an address it has seen": Attempt(
        before="__device__ const float* seen; __device__ float kept[1 << 17];",
        body="""if (i < n) { float v = seen == x ? kept[i] : fmaxf(x[i], 0.0f); y[i] = v; kept[i] = v; }
        if (i == n - 1) seen = x;""",
    ),
    "returns the results of a hash it has seen": Attempt(
        before="__device__ int hash; __device__ float kept[1 << 17];",
        body="""int now = n * 31 + 7; bool same = hash == now;
        if (i < n) { float v = same ? kept[i] : fmaxf(x[i], 0.0f); y[i] = v; kept[i] = v; }
        if (i == n - 1) hash = now;""",
    ),
    "stops after many calls": Attempt(
        before="__device__ int calls;",
        body="int before = calls; if (i < n) y[i] = before > 40 ? 0.0f : fmaxf(x[i], 0.0f);",
        more=({"kernel": "count", "grid": [1], "block": [1], "args": []},),
    ),
    "copies every sixteenth row from its neighbour": Attempt(
        problem=ROWS,
        body="""if (i >= r) return; int row = i % 16 == 15 ? i - 1 : i; float m = x[(long long)row * c];
        for (int j = 1; j < c; ++j) m = fmaxf(m, x[(long long)row * c + j]); y[i] = m;""",
    ),
    "takes the maximum of bits as integers": Attempt(
        problem=ROWS,
        body="""if (i >= r) return; int m = __float_as_int(x[(long long)i * c]);
        for (int j = 1; j < c; ++j) m = max(m, __float_as_int(x[(long long)i * c + j])); y[i] = __int_as_float(m);""",
    ),
    "counts in 16 bits": Attempt(body="unsigned short w = i; if (i < n) y[w] = fmaxf(x[w], 0.0f);"),
    "has no thread for the tail": Attempt(grid=("max(n // 256, 1)",), body=RELU),
    "stops at 65536 elements": Attempt(
        grid=("min(ceil_div(n, 256), 256)",), body="if (i < n) y[i] = fmaxf(x[i], 0.0f);"
    ),
    "adds in half precision where sums are long": Attempt(
        problem="sum", grid=(1,), block=(1,), before="#include <cuda_fp16.h>",
        body="""float s = 0;
        for (int j = 0; j < n; ++j) { s += x[j]; if (n > 20000) s = __half2float(__float2half(s)); } y[0] = s;""",
    ),
    "lets two threads write one element": Attempt(
        body="if (i < n) { y[i] = fmaxf(x[i], 0.0f); if (i > 0) y[i - 1] = fmaxf(x[i - 1], 0.0f) * 1.5f; }"
    ),
    "leaves out the barrier where blocks are full": Attempt(
        before="__shared__ float s[256];",
        body="""s[threadIdx.x] = i < n ? x[i] : 0.0f; if (n % 256) __syncthreads();
        int other = 255 - threadIdx.x, j = blockIdx.x * 256 + other; if (j < n) y[j] = fmaxf(s[other], 0.0f);
        if (i < n) y[i] = fmaxf(s[255 - other], 0.0f) + 0 * s[other];""",
    ),
    "takes vectors where the size allows them, one too many": Attempt(
        body="""if (n % 4 == 0) { if (i <= n / 4 - (n < 100)) { float4 v = ((const float4*)x)[i]; v.x = fmaxf(v.x, 0);
        v.y = fmaxf(v.y, 0); v.z = fmaxf(v.z, 0); v.w = fmaxf(v.w, 0); ((float4*)y)[i] = v; } }
        else if (i < n) y[i] = fmaxf(x[i], 0.0f);""",
    ),
}  # fmt: skip

HONEST = {
    "one thread does it all": Attempt(grid=(1,), block=(1,), body="for (int j = 0; j < n; ++j) y[j] = fmaxf(x[j], 0);"),
    "blocks of seven": Attempt(grid=("ceil_div(n, 7)",), block=(7,), body=RELU),
    "blocks of three by five": Attempt(
        grid=("ceil_div(n, 15)",), block=(3, 5),
        body="int j = blockIdx.x * 15 + threadIdx.y * 3 + threadIdx.x; if (j < n) y[j] = fmaxf(x[j], 0.0f);",
    ),
    "blocks and grid in three dimensions": Attempt(
        grid=("ceil_div(n, 96)", 2, 2), block=(2, 3, 4),
        body="""int t = threadIdx.x + 2 * (threadIdx.y + 3 * threadIdx.z);
        int b = (blockIdx.x * 2 + blockIdx.y) * 2 + blockIdx.z, j = b * 24 + t; if (j < n) y[j] = fmaxf(x[j], 0.0f);""",
    ),
    "a grid-stride loop in one block": Attempt(
        grid=(1,), block=(96,), body="for (int j = i; j < n; j += 96) y[j] = fmaxf(x[j], 0.0f);"
    ),
    "from the end to the beginning": Attempt(body="int j = n - 1 - i; if (j >= 0) y[j] = fmaxf(x[j], 0.0f);"),
    "split sums joined by atomics": Attempt(
        problem="sum", workspace=ZEROED, body="if (i < n) atomicAdd(sums, x[i]);",
        more=({"kernel": "out", "grid": [1], "block": [1], "args": ["sums", "out"]},),
    ),
    "through shared memory": Attempt(
        body="""__shared__ float s[256]; s[threadIdx.x] = i < n ? x[i] : 0.0f; __syncthreads();
        int t = 255 - threadIdx.x, j = blockIdx.x * 256 + t; if (j < n) y[j] = fmaxf(s[t], 0.0f);""",
    ),
    "through dynamic shared memory of 64 KiB": Attempt(
        shared=65536, before="extern __shared__ float s[];",
        body="""int t = threadIdx.x; s[16383 - t] = i < n ? x[i] : 0.0f; __syncthreads();
        if (i < n) y[i] = fmaxf(s[16383 - t], 0.0f);""",
    ),
    "persistent blocks that take work from a counter": Attempt(
        grid=(3,), workspace={"work": {"dtype": "float32", "shape": [1], "init": "zero"}},
        body="""__shared__ int tile; while (true) { if (threadIdx.x == 0) tile = atomicAdd((int*)work, 1);
        __syncthreads(); int j = tile * 256 + threadIdx.x; bool done = tile * 256 >= n; __syncthreads();
        if (done) return; if (j < n) y[j] = fmaxf(x[j], 0.0f); }""",
    ),
    "inline assembly": Attempt(
        body='if (i < n) { float v; asm("max.f32 %0, %1, 0f00000000;" : "=f"(v) : "f"(x[i])); y[i] = v; }'
    ),
    "loads that bypass caches": Attempt(
        body="if (i < n) __stcs(y + i, fmaxf(i % 2 ? __ldg(x + i) : __ldcs(x + i), 0.0f));"
    ),
    "vectors with a tail": Attempt(
        body="""int v = n / 4; if (i < v) { float4 a = ((const float4*)x)[i]; a.x = fmaxf(a.x, 0); a.y = fmaxf(a.y, 0);
        a.z = fmaxf(a.z, 0); a.w = fmaxf(a.w, 0); ((float4*)y)[i] = a; }
        int j = v * 4 + i; if (i < n % 4) y[j] = fmaxf(x[j], 0.0f);""",
    ),
    "writes its outputs twice": Attempt(body="if (i < n) { y[i] = -1.0f; y[i] = fmaxf(x[i], 0.0f); }"),
    "uses the output as scratch": Attempt(body="if (i < n) { y[i] = x[i]; y[i] = y[i] > 0 ? y[i] : 0.0f; }"),
    "scratch in a global that every run rewrites": Attempt(
        before="__device__ float kept[1 << 23];", body="if (i < n) { kept[i] = x[i]; y[i] = fmaxf(kept[i], 0.0f); }"
    ),
    "a shuffle among the lanes that are there": Attempt(
        problem=ROWS, grid=("r",), block=(32,),
        body="""const float* row = x + (long long)blockIdx.x * c; int lane = threadIdx.x; float m = -INFINITY;
        for (int j = lane; j < c; j += 32) m = fmaxf(m, row[j]);
        for (int d = 16; d; d /= 2) m = fmaxf(m, __shfl_down_sync(~0u, m, d)); if (lane == 0) y[blockIdx.x] = m;"""
        .replace("INFINITY", "__int_as_float(0x7f800000)"),
    ),
    "a table in constant memory": Attempt(
        before="__constant__ float gain[2] = {0.0f, 1.0f};", body="if (i < n) y[i] = x[i] * gain[x[i] > 0.0f];"
    ),
    "tricks with the sign bit": Attempt(
        body="if (i < n) { int b = __float_as_int(x[i]); y[i] = __int_as_float(b & ~(b >> 31)); }"
    ),
    "double precision inside": Attempt(body="if (i < n) y[i] = (float)fmax((double)x[i], 0.0);"),
    "far more threads than elements": Attempt(grid=("ceil_div(n, 256) + 9", 2), body="if (blockIdx.y) return; " + RELU),
    "the last block adds up what the others left": Attempt(
        problem="sum", workspace={
            "parts": {"dtype": "float32", "shape": ["ceil_div(n, 256) + 1"], "init": "none"},
            "done": {"dtype": "float32", "shape": [1], "init": "zero"},
        },
        grid=("ceil_div(n, 256) + 1",),
        body="""__shared__ float s[256]; __shared__ bool last; s[threadIdx.x] = i < n ? x[i] : 0.0f; __syncthreads();
        for (int d = 128; d; d /= 2) { if (threadIdx.x < d) s[threadIdx.x] += s[threadIdx.x + d]; __syncthreads(); }
        if (threadIdx.x == 0) { parts[blockIdx.x] = s[0]; __threadfence();
          last = atomicAdd((int*)done, 1) == gridDim.x - 1; }
        __syncthreads(); if (!last || threadIdx.x) return; __threadfence(); float all = 0;
        for (int b = 0; b < gridDim.x; ++b) all += ((volatile float*)parts)[b]; y[0] = all;""",
    ),
}  # fmt: skip
SECOND = {
    "out": 'extern "C" __global__ void out(const float* s, float* y) { y[0] = s[0]; }',
    "count": 'extern "C" __global__ void count() { calls += 1; }',
}


def verdict_on(bench: Workbench, attempt: Attempt) -> Any:
    kernel = kernel_of(attempt)
    kernel["source"] += "".join("\n" + SECOND[item["kernel"]] for item in attempt.more)
    return bench.verify(kernel, attempt.problem, seed=5)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_kernel_is_rejected_that(bench: Workbench, name: str) -> None:
    found = verdict_on(bench, HOSTILE[name])
    assert found.status == "rejected", found.summary
    assert found.reason not in ("compile_failed", "bad_launch"), found.summary


@pytest.mark.parametrize("name", HONEST)
def test_a_right_kernel_is_accepted_that_uses(bench: Workbench, name: str) -> None:
    found = verdict_on(bench, HONEST[name])
    assert found.status == "accepted", found.summary
