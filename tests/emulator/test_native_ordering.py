"""Threads that nothing orders are reported; threads that something unusual orders are not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from launching import CHECKS, Launched, built, compiled, launch_once

from optiml.errors import Fault, KernelFault
from optiml.ptx import Limits, engine_name, parse
from optiml.ptx.native.lowering import NativeLowering

pytestmark = pytest.mark.skipif(engine_name() != "native", reason="the native engine was not built")
F32, I32 = np.float32, np.int32
HEAD = 'extern "C" __global__ void k(const float* x, float* y, int* flags, int n) {\n'
TAIL = "__shared__ float s[256]; int t = threadIdx.x, i = blockIdx.x * 128 + t; if (n < 0) s[t] = s[t + 1];\n"
COPY = (
    "auto copy = [&](int to, const float* from) {\n"
    'asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"((unsigned)__cvta_generic_to_shared(s + to)), '
    '"l"(from) : "memory"); }; auto commit = [] { asm volatile("cp.async.commit_group;" ::: "memory"); };\n'
)


@dataclass(frozen=True, kw_only=True)
class Bug:
    """A body with `// BUG` on a line that errs, which the fault or its other party must name; and a repaired body."""

    name: str
    body: str
    fixed: str
    kind: str = "race"
    says: str = ""
    same_warp: bool = False


BUGS = [
    Bug(name="neighbour in the warp read without __syncwarp", same_warp=True, says="read-after-write",
        body="s[t] = x[i];\ny[i] = s[t ^ 1]; // BUG\n}", fixed="s[t] = x[i]; __syncwarp();\ny[i] = s[t ^ 1];\n}"),
    Bug(name="neighbour in the warp overwritten without __syncwarp", same_warp=True, says="write-after-read",
        body="s[t] = x[i]; __syncwarp(); float v = s[t ^ 1];\ns[t] = v + 1; // BUG\n__syncwarp(); y[i] = s[t ^ 2];\n}",
        fixed="s[t] = x[i]; __syncwarp(); float v = s[t ^ 1]; __syncwarp();\ns[t] = v + 1;\n"
        "__syncwarp(); y[i] = s[t ^ 2];\n}"),
    Bug(name="lanes of a warp write different values to one word", same_warp=True, says="write-after-write",
        body="if (t < 32)\ns[t / 2] = x[i]; // BUG\n__syncthreads(); y[i] = s[t % 16];\n}",
        fixed="if (t < 32)\ns[t] = x[i];\n__syncthreads(); y[i] = s[t % 16];\n}"),
    Bug(name="tree of a warp without __syncwarp", same_warp=True,
        body="s[t] = x[i]; __syncwarp();\nfor (int o = 16; o; o >>= 1) { if ((t & 31) < o)\ns[t] += s[t + o]; // BUG\n}"
        "\n__syncwarp(); y[i] = s[t & ~31];\n}",
        fixed="s[t] = x[i]; __syncwarp();\nfor (int o = 16; o; o >>= 1) { if ((t & 31) < o)\ns[t] += s[t + o];\n"
        "__syncwarp(); } y[i] = s[t & ~31];\n}"),
    Bug(name="cp.async without a wait", says="missing wait",
        body=COPY + "copy(t, x + i); commit(); __syncthreads();\ny[i] = s[127 - t]; // BUG\n}",
        fixed=COPY + 'copy(t, x + i); commit(); asm volatile("cp.async.wait_group 0;" ::: "memory"); __syncthreads();\n'
        "y[i] = s[127 - t];\n}"),
    Bug(name="cp.async that waits for the stage before", says="missing wait",
        body=COPY + "copy(t, x + i); commit(); copy(t + 128, x + i); commit();\n"
        'asm volatile("cp.async.wait_group 1;" ::: "memory"); __syncthreads();\ny[i] = s[255 - t]; // BUG\n}',
        fixed=COPY + "copy(t, x + i); commit(); copy(t + 128, x + i); commit();\n"
        'asm volatile("cp.async.wait_group 1;" ::: "memory"); __syncthreads();\ny[i] = s[127 - t];\n'
        'asm volatile("cp.async.wait_all;" ::: "memory"); __syncthreads(); y[i] += s[255 - t];\n}'),
    Bug(name="cp.async without a barrier",
        body=COPY + 'copy(t, x + i); asm volatile("cp.async.wait_all;" ::: "memory");\ny[i] = s[127 - t]; // BUG\n}',
        fixed=COPY + 'copy(t, x + i); asm volatile("cp.async.wait_all;" ::: "memory"); __syncthreads();\n'
        "y[i] = s[127 - t];\n}"),
    Bug(name="tile refilled by cp.async while others read it",
        body=COPY + 'for (int r = 0; r < 2; r++) {\ncopy(t, x + i); // BUG\nasm volatile("cp.async.wait_all;" '
        '::: "memory"); __syncthreads();\ny[i] = s[127 - t] + r; } }',
        fixed=COPY + 'for (int r = 0; r < 2; r++) {\ncopy(t, x + i);\nasm volatile("cp.async.wait_all;" ::: "memory"); '
        "__syncthreads();\ny[i] = s[127 - t] + r; __syncthreads(); } }"),
    Bug(name="warps of a block exchange through global memory",
        body="y[i] = x[i];\nfloat v = y[i ^ 64]; // BUG\n__syncthreads(); y[i] = v;\n}",
        fixed="y[i] = x[i]; __syncthreads();\nfloat v = y[i ^ 64];\n__syncthreads(); y[i] = v;\n}"),
    Bug(name="warps of a block overwrite in global memory",
        body="float v = y[i ^ 64];\ny[i] = v + x[i] + 1; // BUG\n}",
        fixed="float v = y[i ^ 64]; __syncthreads();\ny[i] = v + x[i] + 1;\n}"),
    Bug(name="lanes exchange through global memory", says="read-after-write", same_warp=True,
        body="y[i] = x[i];\nfloat v = y[i ^ 1]; // BUG\n__syncthreads(); y[i] = v;\n}",
        fixed="y[i] = x[i]; __syncwarp();\nfloat v = y[i ^ 1];\n__syncthreads(); y[i] = v;\n}"),
    Bug(name="a total read while other blocks add to it",
        body="if (t == 0) atomicAdd(flags, 1);\n__syncthreads(); y[i] = flags[0]; // BUG\n}",
        fixed="if (t == 0) s[0] = atomicAdd(flags, 1) >= 0;\n__syncthreads(); y[i] = s[0];\n}"),
    Bug(name="a barrier of half the block does not order the rest",
        body='s[t] = x[i];\nif (t < 64) asm volatile("bar.sync 1, 64;" ::: "memory");\ny[i] = s[127 - t]; // BUG\n}',
        fixed='s[t] = x[i];\nif (t < 64) asm volatile("bar.sync 1, 64;" ::: "memory");\n'
        "if (t < 64) y[i] = s[63 - t];\n}"),
    Bug(name="threads wait at two barriers for each other", kind="deadlock",
        body='if (t < 64) asm volatile("bar.sync 1, 128;" ::: "memory"); // BUG\n'
        'else asm volatile("bar.sync 2, 128;" ::: "memory");\ny[i] = x[i];\n}',
        fixed='if (t < 64) asm volatile("bar.sync 1, 128;" ::: "memory");\n'
        'else asm volatile("bar.sync 1, 128;" ::: "memory");\ny[i] = x[i];\n}'),
    Bug(name="a barrier that waits for threads that have ended", kind="deadlock",
        body='if (t >= 96) return;\nasm volatile("bar.sync 1, 128;" ::: "memory"); // BUG\ny[i] = x[i];\n}',
        fixed='if (t >= 96) return;\nasm volatile("bar.sync 1, 96;" ::: "memory");\ny[i] = x[i];\n}'),
    Bug(name="a barrier in one branch only", kind="barrier_divergence",
        body="s[t] = x[i];\nif (x[t] > 20) __syncthreads(); // BUG\ny[i] = s[t];\n}",
        fixed="s[t] = x[i];\nif (n > 0) __syncthreads();\ny[i] = s[127 - t];\n}"),
]  # fmt: skip


def run(body: str, *, grid: int = 2, before: str = "", arch: str = "compute_80", **mode: Any) -> Launched:
    x, y = np.arange(1, 257, dtype=F32), np.zeros(256, F32)
    return launch_once(built(before + HEAD + TAIL + body, arch), "k", grid, 128, x, y, np.zeros(64, I32), 1,
                       limits=Limits(warp_instructions=400_000), **(mode or {"checks": CHECKS}))  # fmt: skip


def found(bug: Bug) -> Fault:
    with pytest.raises(KernelFault) as raised:
        run(bug.body)
    return raised.value.fault


@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.name)
def test_what_nothing_orders_is_found_with_both_parties(bug: Bug) -> None:
    fault = found(bug)
    assert fault.kind == bug.kind, fault
    assert bug.says in fault.detail
    assert fault.other is not None
    assert (fault.other.block, fault.other.thread) != (fault.block, fault.thread)
    marked = [number for number, line in enumerate((HEAD + TAIL + bug.body).split("\n"), 1) if "// BUG" in line]
    assert marked[0] in (fault.line, fault.other.line), fault
    if bug.same_warp:
        assert fault.thread is not None
        assert fault.thread[0] // 32 == fault.other.thread[0] // 32
        assert fault.block == fault.other.block


@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.name)
def test_the_repaired_twin_raises_no_alarm(bug: Bug) -> None:
    run(bug.fixed)


GROUPS = "#include <cooperative_groups.h>\nnamespace cg = cooperative_groups;\n"
SOUND = {
    "adding doubles by compare and swap":
        "unsigned long long* a = (unsigned long long*)y; unsigned long long old = *a, seen;\n"
        "do { seen = old; old = atomicCAS(a, seen, __double_as_longlong(1. + __longlong_as_double(seen))); }"
        " while (seen != old); }",
    "a look before an atomic maximum": "int v = (int)x[i]; if (v > flags[0]) atomicMax(flags, v); }",
    "a lock that every thread takes":
        "for (bool done = false; !done;) if (atomicCAS(flags, 0, 1) == 0) { y[0] += 1; __threadfence();"
        " atomicExch(flags, 0); done = true; } }",
    "a message from block to block by a flag":
        "volatile int* f = flags; if (blockIdx.x == 0) { y[t] = x[t]; __threadfence(); __syncthreads();"
        " if (t == 0) f[0] = 1; } else { if (t == 0) while (f[0] == 0); __syncthreads(); y[i] = y[t] + 1; } }",
    "the last block sums what all have written, with all its threads":
        "__shared__ bool last; y[i] = x[i]; __threadfence(); __syncthreads(); if (t == 0) last = atomicAdd(flags, 1) =="
        " gridDim.x - 1; __syncthreads(); if (last) { float v = 0; for (int b = 0; b < gridDim.x; b++)"
        " v += y[b * 128 + t]; y[t] = v; } }",
    "producer and consumer with named barriers":
        'for (int r = 0; r < 3; r++) { if (t < 64) { asm volatile("bar.sync 2, 128;" ::: "memory"); s[t] = x[t] + r;'
        ' asm volatile("bar.arrive 1, 128;" ::: "memory"); } else { asm volatile("bar.arrive 2, 128;" ::: "memory");'
        ' asm volatile("bar.sync 1, 128;" ::: "memory"); y[blockIdx.x * 64 + t - 64] = s[t - 64]; } } }',
    "halves of a warp synchronise on their own":
        "s[t] = x[i]; __syncwarp((t & 16) ? 0xffff0000u : 0xffffu); y[i] = s[t ^ 1]; }",
    "a shuffle orders a warp": "s[t] = x[i]; __shfl_sync(~0u, t, 0); y[i] = s[t ^ 1]; }",
    "a vote orders a warp": "s[t] = x[i]; if (__any_sync(~0u, n > 0)) y[i] = s[t ^ 1]; }",
    "tiles of cooperative groups":
        "auto tile = cg::tiled_partition<16>(cg::this_thread_block()); s[t] = x[i]; tile.sync(); y[i] = s[t ^ 3];"
        " tile.sync(); s[t] = 2; cg::this_thread_block().sync(); y[i] += s[127 - t]; }",
    "a pipeline of two stages":
        COPY + "copy(t, x + i); commit(); float v = 0; for (int r = 0; r < 4; r++) { if (r < 3) copy((r + 1) % 2 * 128"
        ' + t, x + i); commit(); asm volatile("cp.async.wait_group 1;" ::: "memory"); __syncthreads();'
        " v += s[r % 2 * 128 + 127 - t]; __syncthreads(); } y[i] = v; }",
    "bytes of one word by different warps":
        "unsigned char* b = (unsigned char*)s; b[(t & 31) * 4 + t / 32] = t; __syncthreads(); y[i] = b[t]; }",
    "halves of one word in global memory by different blocks":
        "short* h = (short*)y; h[2 * t + blockIdx.x] = t; }",
    "many writers of one value": "if (x[i] > 0) { flags[0] = 1; s[0] = 7; } __syncthreads(); y[i] = s[0]; }",
    "reads after everybody has left": "s[t] = x[i]; __syncthreads(); if (t & 1) return; y[i] = s[t ^ 1]; }",
    "threads that leave early are waited for no more":
        "if (t >= 100) return; s[t] = x[i]; __syncthreads(); y[i] = s[99 - t]; }",
    "histogram of shared atomics, then of global ones":
        "int* h = (int*)s; h[t] = 0; h[t + 128] = 0; __syncthreads(); atomicAdd(h + (t * 7 & 63), 1); __syncthreads();"
        " if (t < 64) atomicAdd(flags + t, h[t]); }",
    "a warp reduces by shuffles and one lane writes":
        "float v = x[i]; for (int o = 16; o; o >>= 1) v += __shfl_down_sync(~0u, v, o);"
        " if ((t & 31) == 0) s[t / 32] = v; __syncthreads(); if (t == 0) y[blockIdx.x] = s[0] + s[1] + s[2] + s[3]; }",
    "a transpose through padded shared memory":
        "__shared__ float q[8][17]; q[t / 16][t % 16] = x[i]; __syncthreads(); y[i] = q[t % 8][t / 8]; }",
    "a scan with two barriers a step":
        "s[t] = x[i]; __syncthreads(); for (int o = 1; o < 128; o *= 2) { float v = t >= o ? s[t - o] : 0;"
        " __syncthreads(); s[t] += v; __syncthreads(); } y[i] = s[t]; }",
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_sound_kernels_raise_no_alarm(name: str) -> None:
    run(SOUND[name], before=GROUPS if "cg::" in SOUND[name] else "")


def test_race_words_are_kept_for_memory_that_the_kernel_may_write_only() -> None:
    def roots(body: str) -> Any:
        module = parse(compiled(HEAD + "int t = threadIdx.x;\n" + body))
        return NativeLowering(module, module.kernels["k"]).native.roots.written

    assert roots("y[t] = x[flags[t]]; }") == {8}
    assert roots("atomicAdd(flags + t, 1); y[t] = 1; }") == {8, 16}
    assert roots("float* p = *(float**)x; p[t] = 1; }") is None
    assert roots("((float*)((unsigned long long)flags[0] << 32 | flags[1]))[t] = 1; }") is None
