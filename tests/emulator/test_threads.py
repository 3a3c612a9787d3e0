"""Several host threads for one launch leave and report what one thread does, and leave some kernels to one thread."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from launching import (
    CHECKS,
    always_divided,
    compare_fault_of_two_threads,
    compare_two_threads,
    compiled,
    corpus_module,
    launch_divided,
    launch_once,
)

from optiml.device.cores import cores_taken
from optiml.device.emulated import EmulatedDevice, emulated_info
from optiml.device.plan import resolve_plan
from optiml.device.worker import handle
from optiml.errors import InvalidInput, KernelFault
from optiml.generate.catalogue import applicable, strategies, strategy_kernel
from optiml.problems.data import draw
from optiml.problems.problem import builtin_names, kernel_from_text, load_builtin, main_dtype
from optiml.ptx import Limits, Machine, engine_name, parse, usable_threads
from optiml.ptx.native import splitting
from optiml.ptx.native.lowering import NativeLowering
from optiml.records import Build
from optiml.toolchain.nvrtc import Compiler
from optiml.verify.contents import filled
from optiml.verify.inputs import cost

pytestmark = pytest.mark.skipif(engine_name() != "native", reason="the native engine was not built")
GROUPS = "#include <cooperative_groups.h>\nnamespace cg = cooperative_groups;\n"
PRINTF = 'extern "C" __device__ int printf(const char*, ...);\n'
FAIL = 'extern "C" __device__ void __assertfail(const char*, const char*, unsigned, const char*, size_t);\n'
HEAD = 'extern "C" __global__ void k(const int* x, int* y) {\nint t = blockIdx.x * blockDim.x + threadIdx.x;\n'
BLOCKS, THREADS = 8, 64
N = BLOCKS * THREADS


def kernel(body: str, before: str = "") -> Any:
    return parse(compiled(before + HEAD + body + "\n}"))


def arguments(size: int = N) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return np.arange(1, size + 1, dtype=np.int32), np.zeros(size, np.int32)


def divided(body: str, *, before: str = "", threads: int = 2, **options: Any) -> int:
    """Run a body on one thread and on two, with and without counting; how many threads shared the work."""
    module = kernel(body, before)
    one = launch_once(module, "k", BLOCKS, THREADS, *arguments(), **options)
    compare_two_threads(one, module, "k", BLOCKS, THREADS, *arguments(), **options)
    counting = {**options, "count": True}
    counted = launch_once(module, "k", BLOCKS, THREADS, *arguments(), **counting)
    compare_two_threads(counted, module, "k", BLOCKS, THREADS, *arguments(), **counting)
    return launch_divided(module, "k", BLOCKS, THREADS, *arguments(), threads=threads, **options).result.threads


SHARED = {
    "elementwise": "y[t] = 2 * x[t];",
    "in place": "y[t] += x[t];",
    "in place, twice": "y[t] += x[t]; y[t] += 1;",
    "divergent": "int v = x[t]; while (v != 1) v = v & 1 ? 3 * v + 1 : v / 2; y[t] = v;",
    "early exit": "if (threadIdx.x > 40) return; y[t] = x[t];",
    "block reduction": "__shared__ int s[64]; s[threadIdx.x] = x[t]; __syncthreads();"
    " for (int n = 32; n; n /= 2) { if (threadIdx.x < n) s[threadIdx.x] += s[threadIdx.x + n]; __syncthreads(); }"
    " y[t] = s[0];",
    "shared atomics": "__shared__ int s; if (!threadIdx.x) s = 0; __syncthreads(); int was = atomicAdd(&s, 1);"
    " __syncthreads(); y[t] = s + (was < 64);",
    "shared flag": "__shared__ volatile int f; if (!threadIdx.x) f = 0; __syncthreads();"
    " if (threadIdx.x == 40) f = 7; while (f != 7) {} y[t] = f;",
    "local arrays": "int a[16]; for (int i = 0; i < 16; i++) a[i] = x[t] * i; y[t] = a[x[t] & 15];",
    "shuffles": "y[t] = __shfl_xor_sync(~0u, x[t], 3) + __popc(__ballot_sync(~0u, x[t] & 1));",
    "fences": "y[t] = x[t]; __threadfence();",
    "scattered": "y[t * 7 % 512] = x[t];",
    "reads of its own": "y[t] = x[t]; y[t] = y[t] + 1;",
    "bytes": "((char*)y)[t] = (char)x[t]; ((short*)y)[t + 512] = (short)x[t];",
    "wide words": "if (threadIdx.x < 16) ((int4*)y)[t - 48 * blockIdx.x] = ((const int4*)x)[t - 48 * blockIdx.x];",
}
ALONE = {
    "atomics": "atomicAdd(y, x[t]);",
    "float atomics": "atomicAdd((float*)y, 1.0f / x[t]);",
    "the result of an atomic": "y[atomicAdd(y, 1) % 511 + 1] = x[t];",
    "maximum": "atomicMax(y, x[t]);",
    "compare and swap": "int a = y[0]; while (true) { int b = atomicCAS(y, a, a * 3 + 1); if (a == b) break; a = b; }",
    "lock": "if (threadIdx.x == 0) { while (atomicCAS(y, 0, 1)) {} y[1] += x[t]; __threadfence(); atomicExch(y, 0); }",
    "the last block": "__shared__ bool last; y[t / 64 + 1] = x[t]; __threadfence(); __syncthreads();"
    " if (!threadIdx.x) last = atomicInc((unsigned*)y, 7u) == 7; __syncthreads();"
    " if (last) y[t / 64 + 20] = y[1] + y[2];",
    "volatile": "volatile int* v = y; if (blockIdx.x) { if (!threadIdx.x) while (v[blockIdx.x - 1] == 0) {} }"
    " __syncthreads(); if (!threadIdx.x) v[blockIdx.x] = x[t];",
    "clock": "y[t] = (int)clock64();",
    "generic atomics": "__shared__ int s; int* p = x[0] ? y : &s; atomicAdd(p, 1);",
}


@pytest.mark.parametrize("name", SHARED)
def test_threads_share_blocks_that_have_nothing_to_do_with_each_other(name: str) -> None:
    assert divided(SHARED[name]) == 2


@pytest.mark.parametrize("name", ALONE)
def test_blocks_that_work_together_stay_on_one_thread(name: str) -> None:
    assert divided(ALONE[name]) == 1


@pytest.mark.parametrize(("before", "body"), [
    (GROUPS, "cg::this_grid().sync(); y[t] = x[t];"),
    (PRINTF, 'if (threadIdx.x == 0) printf("%d\\n", blockIdx.x); y[t] = x[t];'),
    (FAIL, 'if (x[t] < 0) __assertfail("x", "f", 1, "k", 1); y[t] = x[t];'),
], ids=["grid barrier", "printf", "assert"])  # fmt: skip
def test_so_do_grid_barriers_and_printed_text(before: str, body: str) -> None:
    assert divided(body, before=before) == 1


def test_checks_keep_a_launch_on_one_thread() -> None:
    module = kernel(SHARED["in place"])
    assert launch_divided(module, "k", BLOCKS, THREADS, *arguments(), checks=CHECKS).result.threads == 1


def test_which_kernels_of_the_corpus_may_be_divided() -> None:
    modules = {name: corpus_module(name) for name in "abc"}
    every = {name: NativeLowering(module, function).native for module in modules.values()
             for name, function in module.kernels.items()}  # fmt: skip
    assert len(every) == 71
    assert {name for name, native in every.items() if not native.divisible} == {
        "hist", "atomf", "hang", "k_cg", "k_printf", "k_lock", "k_lockbad", "k_atom", "k_misc"}  # fmt: skip


@pytest.mark.parametrize("threads", [2, 3, 4, 7, 100])
def test_any_number_of_threads_leaves_the_same(threads: int) -> None:
    module = kernel("y[t] = x[t]; if (t % 3 == 0) y[t] = x[t] * t;")
    for count in (False, True):
        one = launch_once(module, "k", BLOCKS, THREADS, *arguments(), count=count)
        many = launch_divided(module, "k", BLOCKS, THREADS, *arguments(), threads=threads, count=count)
        assert many.result.threads == min(threads, BLOCKS)
        assert many.arrays[1].tobytes() == one.arrays[1].tobytes()
        assert many.result.counters == one.result.counters


def test_copies_take_no_more_memory_than_the_launch_itself() -> None:
    module = kernel(SHARED["in place"])
    assert launch_divided(module, "k", BLOCKS, THREADS, *arguments(), threads=8).result.threads == 3


@pytest.mark.parametrize("blocks", [None, range(BLOCKS - 1, -1, -1), [5, 2, 2, 7, 0]])
def test_the_last_block_in_the_order_of_the_launch_has_the_last_word(blocks: Sequence[int] | None) -> None:
    body = "y[threadIdx.x] = x[t]; if (blockIdx.x & 1) y[threadIdx.x + 64] = x[t];"
    assert divided(body, blocks=blocks) == 2


@pytest.mark.parametrize("body", [
    "y[t + 64] = y[t] + x[t];",  # what the block before has written
    "if (blockIdx.x == 0) y[threadIdx.x] = 9; else y[t] = y[threadIdx.x] + 1;",
    "y[t] = y[t % 64 + 128] + x[t];",
    "if (blockIdx.x == 7) y[t] = y[0]; else y[threadIdx.x] += x[t];",
    "y[t] = ((char*)y)[256 * 3 + 1] + x[t];",
])  # fmt: skip
def test_a_part_that_read_what_an_earlier_one_wrote_is_run_again(body: str) -> None:
    module = kernel(body)
    x, y = arguments(2 * N)
    for count in (False, True):
        one = launch_once(module, "k", BLOCKS, THREADS, x, y, count=count)
        compare_two_threads(one, module, "k", BLOCKS, THREADS, x, y, count=count)
    assert launch_divided(module, "k", BLOCKS, THREADS, x, y).result.threads == 1


def test_a_part_that_waits_for_ever_on_old_memory_is_run_again() -> None:
    module = kernel("if (blockIdx.x == 0) y[threadIdx.x] = 1;"
                    " if (blockIdx.x == 7) { int i = 0; while (y[i & 63] == 0) i++; } y[t + 64] = x[t];")  # fmt: skip
    x, y = arguments(2 * N)
    one = launch_once(module, "k", BLOCKS, THREADS, x, y)
    compare_two_threads(one, module, "k", BLOCKS, THREADS, x, y)


@pytest.mark.parametrize("body", [
    "y[((1ll << 36) >> 2) + t] = x[t];",  # reaches the allocation after y, which no argument leads to
    "if (blockIdx.x == 1) y[((1ll << 36) >> 2) + t] = x[t]; else y[t] = x[t];",
    "if (blockIdx.x == 7) y[((1ll << 36) >> 2) + t] = x[t]; else y[t] = x[t];",
    "y[t] = x[((1ll << 36) >> 2) + 5] + 1;",  # reaches y, which is only written
])  # fmt: skip
def test_wild_pointers_into_other_memory_change_nothing(body: str) -> None:
    module = kernel(body)
    left = []
    for threads in (1, 2):
        machine = Machine(threads=threads)
        addresses = [machine.allocate(4 * N) for _ in range(3)]
        machine.memory(addresses[0]).view(np.int32)[:] = np.arange(N)
        with always_divided():
            machine.launch(machine.load(module), "k", grid=(BLOCKS, 1, 1), block=(THREADS, 1, 1), shared_bytes=0,
                           args=[address.to_bytes(8, "little") for address in addresses[:2]])  # fmt: skip
        left.append([machine.memory(address).tobytes() for address in addresses])
    assert left[0] == left[1]


FAULTS = {
    "in the first part": "y[t + (blockIdx.x == 1) * 99999] = x[t];",
    "in a later part": "y[t + (blockIdx.x == 6) * 99999] = x[t];",
    "in two parts": "y[t + (blockIdx.x == 2 || blockIdx.x == 5) * 99999] = x[t];",
    "in every block": "y[t + 99999] = x[t];",
    "a trap": "y[t] = x[t]; if (blockIdx.x == 5 && threadIdx.x == 33) __trap();",
    "after what only an earlier part can cause": "if (blockIdx.x == 0 && t == 0) y[N] = 1;"
    " if (blockIdx.x == 7) y[t + y[N] * 99999] = x[t];".replace("N", str(N - 1)),
    "not after what an earlier part prevents": "if (blockIdx.x == 0 && t == 0) y[N] = 1; if (blockIdx.x == 7)"
    " y[t + !y[N] * 99999] = x[t]; if (blockIdx.x == 7 && t == 511) y[99999] = 1;".replace("N", str(N - 1)),
    "a skipped barrier": "if (blockIdx.x != 5 || threadIdx.x < 16) __syncthreads(); y[t] = x[t];",
    "misaligned": "*(int*)((char*)y + 4 * t + (blockIdx.x == 6)) = x[t];",
}


def left_behind(module: Any, threads: int, limits: Limits | None = None) -> tuple[Any, bytes]:
    """The fault of a launch and what it left in memory."""
    machine = Machine(threads=threads)
    x, y = machine.allocate(4 * N), machine.allocate(4 * N)
    machine.memory(x).view(np.int32)[:] = np.arange(1, N + 1)
    with always_divided(), pytest.raises(KernelFault) as caught:
        machine.launch(machine.load(module), "k", grid=(BLOCKS, 1, 1), block=(THREADS, 1, 1), shared_bytes=0,
                       args=[x.to_bytes(8, "little"), y.to_bytes(8, "little")], limits=limits)  # fmt: skip
    return caught.value.fault, machine.memory(y).tobytes()


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_the_one_that_a_single_thread_meets_first_and_memory_is_left_as_it_leaves_it(name: str) -> None:
    module = kernel(FAULTS[name])
    one = left_behind(module, 1)
    for threads in (2, 3, 8):
        assert left_behind(module, threads) == one


ENDLESS = {
    "in the first block": "while (blockIdx.x == 0 && y[t] != -1) y[t] += x[t] & 1;",
    "in the last block": "while (blockIdx.x == 7 && y[t] != -1) y[t] += x[t] & 1;",
    "in the last block, after long work": "for (int i = 0; i < 500; i++) y[t] += x[t + i & 511] >> (i & 7);"
    " while (blockIdx.x == 7 && y[t] >= 0) y[t] = x[t] + (y[t] & 1);",
    "in every block": "while (y[t] != -1) y[t] += x[t] & 1;",
    "in shared memory": "__shared__ volatile int s; s = 0; while (blockIdx.x > 2 && s != -1) {} y[t] = 1;",
}


@pytest.mark.parametrize("budget", [0, 100, 3_000, 70_000, 400_000])
@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_loop_ends_at_the_same_place(name: str, budget: int) -> None:
    module = kernel(ENDLESS[name])
    limits = Limits(warp_instructions=budget)
    one = left_behind(module, 1, limits)
    assert one[0].kind == "timed_out"
    assert left_behind(module, 2, limits) == one


@pytest.mark.parametrize("name", ["in the first block", "in the last block", "in every block"])
def test_an_endless_loop_in_any_part_ends_at_the_deadline(name: str) -> None:
    fault, _ = left_behind(kernel(ENDLESS[name]), 2, Limits(deadline=time.monotonic() + 0.1))
    assert fault.kind == "timed_out"


def test_a_budget_is_spent_by_all_parts_together() -> None:
    module = kernel(SHARED["in place"])
    enough = next(budget for budget in range(1, 10_000) if fits(module, budget, 1))
    for budget in (enough - 1, enough // 2, enough // 2 + 1):
        compare_fault_of_two_threads(left_behind(module, 1, Limits(warp_instructions=budget))[0], module, "k", BLOCKS,
                                     THREADS, *arguments(), limits=Limits(warp_instructions=budget))  # fmt: skip
    assert fits(module, enough, 2)


def fits(module: Any, budget: int, threads: int) -> bool:
    try:
        launch_divided(module, "k", BLOCKS, THREADS, *arguments(), threads=threads,
                       limits=Limits(warp_instructions=budget))  # fmt: skip
    except KernelFault:
        return False
    return True


def test_little_work_is_not_worth_dividing() -> None:
    assert launch_once(kernel(SHARED["elementwise"]), "k", BLOCKS, THREADS, *arguments(), threads=2).result.threads == 1


def test_a_launch_with_enough_to_do_is_divided() -> None:
    module = kernel("int v = x[t]; for (int i = 0; i < 400; i++) v = v * x[i] ^ i; y[t] = v;")
    one = launch_once(module, "k", 64, 64, *arguments(4096))
    two = launch_once(module, "k", 64, 64, *arguments(4096), threads=2)
    assert two.result.threads == 2
    assert two.arrays[1].tobytes() == one.arrays[1].tobytes()


def test_big_arrays_are_not_copied_for_a_few_blocks() -> None:
    module = kernel("int v = y[t]; for (int i = 0; i < 400; i++) v = v * x[i] ^ i; y[t] = v;")
    x, y = arguments(1 << 22)
    assert launch_once(module, "k", 64, 64, x, y, threads=2).result.threads == 1


def test_there_is_at_least_one_thread() -> None:
    with pytest.raises(InvalidInput, match="at least one thread"):
        Machine(threads=0)


# -- built-in kernels -------------------------------------------------------------------------------------------------


class InThisProcess(EmulatedDevice):
    """The embedded device without its child."""

    def __init__(self, threads: int) -> None:
        super().__init__(emulated_info("emulator:h100"))
        self.threads = threads

    def _call(
        self, header: dict[str, Any], blobs: list[memoryview], timeout_s: float
    ) -> tuple[dict[str, Any], list[memoryview]]:
        reply, answers = handle({**header, "threads": self.threads}, blobs)
        return reply, list(answers)


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    made = Compiler()
    yield made
    made.close()


@pytest.mark.parametrize("name", builtin_names())
def test_built_in_kernels_leave_the_same_with_two_threads(name: str, compiler: Compiler) -> None:
    builtin = load_builtin(name)
    problem, dtype = builtin.problem, main_dtype(builtin.problem)
    kernels = [kernel_from_text(builtin.seed_text, dtype=dtype)]
    kernels += [strategy_kernel(found, dtype) for found in strategies(name) if applicable(found, problem, dtype)]
    workload = min(problem.workloads, key=lambda each: cost(problem, each))
    for kernel in kernels:
        one, two = InThisProcess(1), InThisProcess(2)
        build = compiler.compile(kernel, one.info.arch)
        assert isinstance(build, Build), build
        plan = resolve_plan(kernel, build, problem, workload, one.info)
        contents = filled(plan, draw(problem, workload, seed=1), random.Random(1), quiet_nan=True)
        for count in (False, True):
            first = one.run(build, plan, (contents,), timeout_s=60.0, count=count)
            with always_divided():
                second = two.run(build, plan, (contents,), timeout_s=60.0, count=count)
            assert bytes_of(first.runs[0]) == bytes_of(second.runs[0])
            assert tuple(replace(each, threads=1) for each in second.launches) == first.launches


def bytes_of(arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays.items()}


# -- how many threads -------------------------------------------------------------------------------------------------


def test_launches_at_the_same_time_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting.os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    name = f"\0optiml-test-{os.getpid()}-{{}}"
    with contextlib.ExitStack() as launches:
        taken = [launches.enter_context(cores_taken(usable_threads(), name=name)) for _ in range(3)]
        assert taken == [4, 2, 1]
    with cores_taken(usable_threads(), name=name) as alone:
        assert alone == 4


@pytest.mark.skipif(usable_threads() < 2, reason="one core")
def test_threads_work_in_the_sandbox_of_the_device(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_from_text(load_builtin("gelu").seed_text, dtype="float32")
    device = EmulatedDevice(emulated_info("emulator:a100"))
    problem = load_builtin("gelu").problem
    build = compiler.compile(kernel, device.info.arch)
    assert isinstance(build, Build), build
    workload = replace(problem.workloads[0], axes={"n": 1 << 17})
    plan = resolve_plan(kernel, build, problem, workload, device.info)
    contents = filled(plan, draw(problem, workload, seed=1), random.Random(1), quiet_nan=True)
    monkeypatch.setattr("optiml.device.emulated.cores_taken", lambda most: contextlib.nullcontext(most))
    try:
        (report,) = device.run(build, plan, (contents,), timeout_s=60.0).launches
    finally:
        device.close()
    assert report.threads == usable_threads()
