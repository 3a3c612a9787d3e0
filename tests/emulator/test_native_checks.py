"""Kernels with one seeded bug each: found with kind, line and both parties. Their repaired twins raise no alarm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from launching import CHECKS, Launched, built, compiled, launch_once, triple

from optiml.errors import Fault, KernelFault
from optiml.ptx import Limits, Machine, engine_name, parse

pytestmark = pytest.mark.skipif(engine_name() != "native", reason="the native engine was not built")
F32, I32 = np.float32, np.int32
HEAD = 'extern "C" __global__ void k(const float* x, float* y, int n) {\n'


@dataclass(frozen=True, kw_only=True)
class Bug:
    """A kernel body whose marked line (`// BUG`) errs, what is found there, and a body that is right."""

    name: str
    kind: str
    body: str
    fixed: str
    grid: int = 2
    block: int = 128
    hazard: str = ""


SHARED = "__shared__ float s[128]; int t = threadIdx.x, i = blockIdx.x * 128 + t;\n"
BUGS = [
    Bug(name="write past the end", kind="out_of_bounds",
        body="int i = blockIdx.x * 128 + threadIdx.x;\ny[i + 1] = x[i]; // BUG\n}",
        fixed="int i = blockIdx.x * 128 + threadIdx.x;\ny[i] = x[i];\n}"),
    Bug(name="read before the start", kind="out_of_bounds",
        body="int i = blockIdx.x * 128 + threadIdx.x;\ny[i] = x[i - 1]; // BUG\n}",
        fixed="int i = blockIdx.x * 128 + threadIdx.x;\ny[i] = i ? x[i - 1] : 0;\n}"),
    Bug(name="wrong stride", kind="out_of_bounds",
        body="int i = blockIdx.x * 128 + threadIdx.x;\ny[i] = x[i * 2]; // BUG\n}",
        fixed="int i = blockIdx.x * 128 + threadIdx.x;\ny[i] = x[i / 2 * 2];\n}"),
    Bug(name="null pointer", kind="out_of_bounds",
        body="float* p = (float*)(unsigned long long)(n - 1);\np[threadIdx.x] = x[threadIdx.x]; // BUG\n}",
        fixed="float* p = n > 0 ? y : 0;\np[blockIdx.x * 128 + threadIdx.x] = x[threadIdx.x];\n}"),
    Bug(name="shared array too small", kind="out_of_bounds",
        body="__shared__ float s[64]; int t = threadIdx.x;\ns[t] = x[t]; // BUG\n__syncthreads();\n"
        "y[blockIdx.x * 128 + t] = s[t ^ 1];\n}",
        fixed="__shared__ float s[128]; int t = threadIdx.x;\ns[t] = x[t];\n__syncthreads();\n"
        "y[blockIdx.x * 128 + t] = s[t ^ 1];\n}"),
    Bug(name="local array overrun", kind="out_of_bounds",
        body="float a[4] = {1, 2, 3, 4}; int t = threadIdx.x;\na[t & 7] = x[t]; // BUG\n"
        "y[blockIdx.x * 128 + t] = a[n & 3];\n}",
        fixed="float a[8] = {1, 2, 3, 4}; int t = threadIdx.x;\na[t & 7] = x[t];\n"
        "y[blockIdx.x * 128 + t] = a[n & 3];\n}"),
    Bug(name="misaligned vector read", kind="misaligned",
        body="int t = threadIdx.x & 15;\nfloat4 v = *(const float4*)(x + 4 * t + 1); // BUG\n"
        "y[blockIdx.x * 128 + threadIdx.x] = v.x + v.y + v.z + v.w;\n}",
        fixed="int t = threadIdx.x & 15;\nfloat4 v = *(const float4*)(x + 4 * t);\n"
        "y[blockIdx.x * 128 + threadIdx.x] = v.x + v.y + v.z + v.w;\n}"),
    Bug(name="misaligned write", kind="misaligned",
        body="char* p = (char*)(y + blockIdx.x * 120 + (threadIdx.x & 63));\n"
        "*(float*)(p + 2) = x[threadIdx.x]; // BUG\n}",
        fixed="char* p = (char*)(y + blockIdx.x * 128 + threadIdx.x);\n*(float*)(p) = x[threadIdx.x];\n}"),
    Bug(name="missing barrier before reading neighbours", kind="race",
        body=SHARED + "s[t] = x[i];\ny[i] = s[127 - t]; // BUG\n}",
        fixed=SHARED + "s[t] = x[i];\n__syncthreads(); y[i] = s[127 - t];\n}"),
    Bug(name="missing barrier before the next round overwrites", kind="race",
        body=SHARED + "for (int r = 0; r < 3; r++) {\ns[t] = x[i] + r; // BUG\n__syncthreads();\n"
        "y[i] = s[127 - t] + r;\n} }",
        fixed=SHARED + "for (int r = 0; r < 3; r++) {\ns[t] = x[i] + r;\n__syncthreads();\ny[i] = s[127 - t] + r;\n"
        "__syncthreads(); } }"),
    Bug(name="two warps write one word", kind="race", hazard="write-after-write",
        body=SHARED + "s[t & 31] = x[i]; // BUG\n__syncthreads();\ny[i] = s[t & 31];\n}",
        fixed=SHARED + "if (t < 32) s[t & 31] = x[i];\n__syncthreads();\ny[i] = s[t & 31];\n}"),
    Bug(name="reduction without barriers", kind="race",
        body=SHARED + "s[t] = x[i]; __syncthreads();\n"
        "for (int o = 64; o; o >>= 1) if (t < o) s[t] += s[t + o]; // BUG\n"
        "__syncthreads();\nif (t == 0) y[blockIdx.x] = s[0];\n}",
        fixed=SHARED + "s[t] = x[i]; __syncthreads();\nfor (int o = 64; o; o >>= 1) { if (t < o) s[t] += s[t + o];"
        " __syncthreads(); }\nif (t == 0) y[blockIdx.x] = s[0];\n}"),
    Bug(name="result published without a barrier", kind="race",
        body="__shared__ float total[2]; int t = threadIdx.x; if (t == 127) total[0] = x[0]; "
        "if (t == 0) total[1] = x[1];\n"
        "y[blockIdx.x * 128 + t] = total[1]; // BUG\nif (n < 0) y[0] = total[0]; }",
        fixed="__shared__ float total[2]; int t = threadIdx.x; if (t == 127) total[0] = x[0]; "
        "if (t == 0) total[1] = x[1];\n"
        "__syncthreads(); y[blockIdx.x * 128 + t] = total[1];\nif (n < 0) y[0] = total[0]; }"),
    Bug(name="histogram without atomics", kind="race",
        body="__shared__ int h[4]; int t = threadIdx.x; if (t < 4) h[t] = 0; __syncthreads();\nh[t & 3] += 1; // BUG\n"
        "__syncthreads(); if (t < 4) y[blockIdx.x * 4 + t] = h[t];\n}",
        fixed="__shared__ int h[4]; int t = threadIdx.x; if (t < 4) h[t] = 0; __syncthreads();\n"
        "atomicAdd(&h[t & 3], 1);\n"
        "__syncthreads(); if (t < 4) y[blockIdx.x * 4 + t] = h[t];\n}"),
    Bug(name="counters cleared without a barrier", kind="race",
        body="__shared__ int h[128]; int t = threadIdx.x; h[t] = 0;\natomicAdd(&h[127 - t], 1); // BUG\n"
        "__syncthreads(); y[blockIdx.x * 128 + t] = h[t];\n}",
        fixed="__shared__ int h[128]; int t = threadIdx.x; h[t] = 0; __syncthreads();\natomicAdd(&h[127 - t], 1);\n"
        "__syncthreads(); y[blockIdx.x * 128 + t] = h[t];\n}"),
    Bug(name="read while others still add", kind="race",
        body="__shared__ int h; int t = threadIdx.x; if (t == 0) h = 0; __syncthreads();\natomicAdd(&h, 1);\n"
        "y[blockIdx.x * 128 + t] = h; // BUG\n}",
        fixed="__shared__ int h; int t = threadIdx.x; if (t == 0) h = 0; __syncthreads();\natomicAdd(&h, 1);\n"
        "__syncthreads(); y[blockIdx.x * 128 + t] = h;\n}"),
    Bug(name="byte races", kind="race",
        body="__shared__ unsigned char b[128]; int t = threadIdx.x;\nb[t & 63] = t; // BUG\n__syncthreads();\n"
        "y[blockIdx.x * 128 + t] = b[t & 63];\n}",
        fixed="__shared__ unsigned char b[128]; int t = threadIdx.x;\nb[t] = t;\n__syncthreads();\n"
        "y[blockIdx.x * 128 + t] = b[t & 63];\n}"),
    Bug(name="tile swapped without a barrier", kind="race",
        body="__shared__ float s[2][64]; int t = threadIdx.x;\ns[t >> 6][t & 63] = x[t]; __syncthreads();\n"
        "float v = s[1 - (t >> 6)][t & 63];\ns[t >> 6][t & 63] = v; // BUG\n__syncthreads();\n"
        "y[blockIdx.x * 128 + t] = s[t >> 6][t & 63]; }",
        fixed="__shared__ float s[2][64]; int t = threadIdx.x;\ns[t >> 6][t & 63] = x[t]; __syncthreads();\n"
        "float v = s[1 - (t >> 6)][t & 63];\n__syncthreads(); s[t >> 6][t & 63] = v;\n__syncthreads();\n"
        "y[blockIdx.x * 128 + t] = s[t >> 6][t & 63]; }"),
    Bug(name="blocks add to one sum", kind="race",
        body="if (threadIdx.x == 0)\ny[0] += x[blockIdx.x] + 1; // BUG\n}",
        fixed="if (threadIdx.x == 0)\natomicAdd(y, x[blockIdx.x] + 1);\n}"),
    Bug(name="blocks write one element", kind="race", hazard="write-after-write",
        body="y[threadIdx.x] = x[threadIdx.x] + blockIdx.x + 1; // BUG\n}",
        fixed="y[blockIdx.x * 128 + threadIdx.x] = x[threadIdx.x] + blockIdx.x + 1;\n}"),
    Bug(name="overlapping halos", kind="race",
        body="int i = blockIdx.x * 127 + threadIdx.x;\ny[i] = x[threadIdx.x] * 2 + blockIdx.x + 1; // BUG\n}",
        fixed="int i = blockIdx.x * 128 + threadIdx.x;\ny[i] = x[threadIdx.x] * 2 + blockIdx.x + 1;\n}"),
    Bug(name="reads what another block writes", kind="race",
        body="int i = blockIdx.x * 128 + threadIdx.x;\nfloat v = y[(i + 128) & 255]; // BUG\n"
        "y[i] = v + x[i] + 1;\n}",
        fixed="int i = blockIdx.x * 128 + threadIdx.x;\nfloat v = y[i];\ny[i] = v + x[i] + 1;\n}"),
    Bug(name="in-place stencil", kind="race",
        body="int i = blockIdx.x * 128 + threadIdx.x;\nif (i > 0) y[i] = y[i - 1] + 1 + x[i]; // BUG\n}",
        fixed="int i = blockIdx.x * 128 + threadIdx.x;\nif (i > 0) y[i] = x[i - 1] + 1 + x[i];\n}"),
    Bug(name="atomic and plain writes mixed", kind="race",
        body="if (threadIdx.x == 0) { if (blockIdx.x == 0) atomicAdd(y, 1.f); else\ny[0] = 5; // BUG\n} }",
        fixed="if (threadIdx.x == 0) { if (blockIdx.x == 0) atomicAdd(y, 1.f); else\natomicAdd(y, 5.f);\n} }"),
    Bug(name="accumulator not cleared", kind="uninitialised",
        body="__shared__ float acc[128]; int t = threadIdx.x;\nacc[t] += x[t]; // BUG\n__syncthreads();\n"
        "y[blockIdx.x * 128 + t] = acc[t];\n}",
        fixed="__shared__ float acc[128]; int t = threadIdx.x; acc[t] = 0;\nacc[t] += x[t];\n__syncthreads();\n"
        "y[blockIdx.x * 128 + t] = acc[t];\n}"),
    Bug(name="tile half filled", kind="uninitialised",
        body="__shared__ float s[128]; int t = threadIdx.x; if (t < 100) s[t] = x[t]; __syncthreads();\n"
        "y[blockIdx.x * 128 + t] = s[t]; // BUG\n}",
        fixed="__shared__ float s[128]; int t = threadIdx.x; s[t] = t < 100 ? x[t] : 0; __syncthreads();\n"
        "y[blockIdx.x * 128 + t] = s[t];\n}"),
    Bug(name="padding column read", kind="uninitialised",
        body="__shared__ float s[4][33]; int t = threadIdx.x; s[t >> 5][t & 31] = x[t]; __syncthreads();\n"
        "y[blockIdx.x * 128 + t] = s[t >> 5][(t & 31) + 1]; // BUG\n}",
        fixed="__shared__ float s[4][33]; int t = threadIdx.x; s[t >> 5][t & 31] = x[t]; __syncthreads();\n"
        "y[blockIdx.x * 128 + t] = s[t >> 5][t & 31];\n}"),
    Bug(name="atomics on memory that was never set", kind="uninitialised",
        body="__shared__ int h[32]; int t = threadIdx.x;\natomicAdd(&h[t & 31], 1); // BUG\n__syncthreads();\n"
        "y[blockIdx.x * 128 + t] = h[t & 31];\n}",
        fixed="__shared__ int h[32]; int t = threadIdx.x; if (t < 32) h[t] = 0; __syncthreads();\n"
        "atomicAdd(&h[t & 31], 1);\n"
        "__syncthreads();\ny[blockIdx.x * 128 + t] = h[t & 31];\n}"),
    Bug(name="barrier that half a warp skips", kind="barrier_divergence",
        body=SHARED + "s[t] = x[i];\nif (t < 16) __syncthreads(); // BUG\ny[i] = s[t];\n}",
        fixed=SHARED + "s[t] = x[i];\n__syncthreads();\ny[i] = s[t];\n}"),
    Bug(name="barrier that other warps skip", kind="barrier_divergence",
        body=SHARED + "s[t] = x[i];\nif (t >= 32) __syncthreads(); // BUG\ny[i] = s[t];\n}",
        fixed=SHARED + "s[t] = x[i];\n__syncthreads();\ny[i] = s[t];\n}"),
    Bug(name="endless loop", kind="timed_out",
        body="volatile float* p = y;\nwhile (p[0] == 0); // BUG\n}",
        fixed="volatile float* p = y + blockIdx.x * 128 + threadIdx.x;\np[0] = 1; while (p[0] == 0);\n}"),
    Bug(name="failed assertion", kind="trap",
        body="int t = threadIdx.x;\nif (t == n + 70) __trap(); // BUG\ny[blockIdx.x * 128 + t] = x[t];\n}",
        fixed="int t = threadIdx.x;\nif (t == n + 700) __trap();\ny[blockIdx.x * 128 + t] = x[t];\n}"),
]  # fmt: skip


def run(bug: Bug, body: str, **mode: Any) -> Launched:
    x = np.arange(1, 257, dtype=F32)
    return launch_once(built(HEAD + body), "k", bug.grid, bug.block, x, np.zeros(256, F32), 1,
                       limits=Limits(warp_instructions=200_000), **(mode or {"checks": CHECKS}))  # fmt: skip


def found(bug: Bug) -> Fault:
    with pytest.raises(KernelFault) as raised:
        run(bug, bug.body)
    return raised.value.fault


@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.name)
def test_a_seeded_bug_is_found_where_it_is(bug: Bug) -> None:
    fault = found(bug)
    assert fault.kind == bug.kind, fault
    assert fault.block is not None
    assert fault.thread is not None
    (marked,) = [number for number, line in enumerate((HEAD + bug.body).split("\n"), 1) if "// BUG" in line]
    assert marked in {fault.line, fault.other.line if fault.other else None}, fault
    if bug.kind == "race":
        assert fault.other is not None
        assert fault.other != (fault.block, fault.thread)
        assert bug.hazard in fault.detail
    if bug.kind in ("race", "uninitialised", "out_of_bounds", "misaligned"):
        assert fault.address is not None
        assert fault.bytes is not None


@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.name)
def test_its_repaired_twin_raises_no_alarm(bug: Bug) -> None:
    run(bug, bug.fixed)


def test_workspace_that_no_kernel_has_written_is_reported() -> None:
    source = HEAD + "int i = threadIdx.x; if (n == 0) y[i] = 1;\nelse y[i + 128] = y[i] + y[i ^ 64];\n}"
    machine = Machine()
    loaded = machine.load(parse(compiled(source)))
    x, y = machine.allocate(512), machine.allocate(1024, name="y")
    machine.track_writes(y)

    def go(n: int) -> None:
        machine.launch(loaded, "k", grid=triple(1), block=triple(128), shared_bytes=0,
                       args=[x.to_bytes(8, "little"), y.to_bytes(8, "little"), n.to_bytes(4, "little")],
                       checks=frozenset({"uninitialised"}))  # fmt: skip

    with pytest.raises(KernelFault) as raised:
        go(1)
    assert (raised.value.fault.kind, raised.value.fault.line, raised.value.fault.address) == ("uninitialised", 3, y)
    go(0)
    go(1)


def test_a_lock_is_no_race() -> None:
    source = """extern "C" __global__ void k(int* lock, int* count) {
    if (threadIdx.x == 0) { while (atomicCAS(lock, 0, 1)); *count += 1; __threadfence(); atomicExch(lock, 0); } }"""
    got: Any = launch_once(parse(compiled(source)), "k", 8, 32, np.zeros(1, I32), np.zeros(1, I32), checks=CHECKS)
    assert got.arrays[1][0] == 8


def test_the_last_block_may_read_what_all_have_written() -> None:
    source = """extern "C" __global__ void k(const float* x, float* part, int* done, float* y) {
    __shared__ bool last; int t = threadIdx.x;
    if (t == 0) { part[blockIdx.x] = x[blockIdx.x]; __threadfence(); last = atomicAdd(done, 1) == gridDim.x - 1; }
    __syncthreads();
    if (last && t == 0) { float s = 0; for (int b = 0; b < gridDim.x; b++) s += part[b]; *y = s; } }"""
    x = np.arange(8, dtype=F32)
    got = launch_once(parse(compiled(source)), "k", 8, 64, x, np.zeros(8, F32), np.zeros(1, I32), np.zeros(1, F32),
                      checks=CHECKS)  # fmt: skip
    assert got.arrays[3][0] == x.sum()
