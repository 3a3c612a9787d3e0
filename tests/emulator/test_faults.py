"""Wrong programs are stopped with block, thread, source line and a sentence that says what happened."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from launching import compiled, corpus_module, launch, snippet

from optiml.errors import Fault, InvalidInput, KernelFault
from optiml.ptx import Limits, Machine, parse

Run = Callable[..., Any]
F32, U32, I32 = np.float32, np.uint32, np.int32


def zeros(*shape: int, dtype: Any = F32) -> Any:
    return np.zeros(shape, dtype)


def fault(run: Callable[[], Any]) -> Fault:
    with pytest.raises(KernelFault) as raised:
        run()
    return raised.value.fault


def test_a_write_past_the_end_is_caught(corpus: Run) -> None:
    found = fault(lambda: corpus("a", "oob", 4, 256, zeros(1000), zeros(1000), 1000))
    assert (found.kind, found.access, found.bytes) == ("out_of_bounds", "write", 4)
    assert (found.block, found.thread, found.line) == ((3, 0, 0), (232, 0, 0), 18)
    assert found.detail == 'out of bounds: write of 4 bytes at offset 4000 in an allocation of 4000 bytes ("arg1")'


@pytest.mark.parametrize(
    ("address", "kind", "words"),
    [
        ("mov.u64 %rd1, 0;", "out_of_bounds", "null pointer"),
        ("mov.u64 %rd1, 16;", "out_of_bounds", "null pointer"),
        ("mov.u64 %rd1, 0x1234567890ABCD00;", "out_of_bounds", "in no allocation"),
        ("add.s64 %rd1, %base0, -4;", "out_of_bounds", "offset -4"),
        ("add.s64 %rd1, %base0, 2;", "misaligned", "misaligned: read of 4 bytes at offset 2"),
        ("mov.u64 %rd1, 0x1000000010;", "illegal", "not global memory"),
    ],
)
def test_wild_pointers(address: str, kind: str, words: str) -> None:
    body = f".loc 1 9 1\n{address} ld.global.u32 %y, [%rd1];"
    x = zeros(4, dtype=U32)
    found = fault(lambda: launch(parse(snippet(body, [x], U32)), "k", 1, 1, x, x))
    assert (found.kind, found.line, found.access) == (kind, 9, "read")
    assert words in found.detail


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("space", ["global", "shared", "shared64", "local"])
@pytest.mark.parametrize("write", [False, True])
def test_nothing_just_outside_is_reachable(size: int, blocks: int, space: str, write: bool) -> None:
    register = {"global": "%rd1", "shared": "%r1", "shared64": "%rd1", "local": "%rd1"}[space]
    start = {
        "global": "ld.param.u64 %rd1, [p0];",
        "shared": "mov.u32 %r1, s;",
        "shared64": "mov.u64 %rd1, s;",
        "local": "mov.u64 %rd1, l;",
    }[space]
    kind = "b64" if size == 8 else "b32" if size == 4 else "b16"
    name = "%rd2" if size == 8 else "%r2" if size == 4 else "%h2"
    opcode = f"{'st' if write else 'ld'}.{space.removesuffix('64')}.u{8 * size}"
    for offset, fails in ((-size, True), (0, False), (64 - size, False), (64, True)):
        place = f"[{register}+{offset}]"
        access = f"{opcode} {place}, {name};" if write else f"{opcode} {name}, {place};"
        body = f".shared .align 8 .b8 s[64]; .local .align 8 .b8 l[64]; mov.{kind} {name}, 0; {start} {access}"
        x = np.zeros(64 * blocks, np.uint8)
        text = snippet(f"{body} mov.u16 %y, 0;", [x[:64]], np.uint8)

        def run(text: str = text, x: Any = x) -> Any:
            return launch(parse(text), "k", blocks, 32, x[:64], x, clean=False)  # reads what nothing has written

        if fails:
            assert fault(run).kind == "out_of_bounds", offset
        else:
            run()


def test_only_the_thread_that_errs_is_named() -> None:
    body = ".loc 1 5 1\nmad.wide.u32 %rd1, %x0, 4, %base1; ld.global.u32 %y, [%rd1];"
    index = np.zeros(300, U32)
    index[[77, 200]] = 1 << 20
    data = np.arange(300, dtype=U32)
    found = fault(lambda: launch(parse(snippet(body, [index, data], U32)), "k", 1, 300, index, data, data))
    assert found.thread == (77, 0, 0)


def test_threads_may_use_different_allocations() -> None:
    source = """extern "C" __global__ void k(const int* a, const int* b, int* y) {
    const int* p = threadIdx.x & 1 ? a : b; y[threadIdx.x] = p[threadIdx.x]; }"""
    a, b = np.arange(64, dtype=I32), np.arange(64, dtype=I32) + 1000
    got = launch(parse(compiled(source)), "k", 1, 64, a, b, zeros(64, dtype=I32)).arrays[2]
    assert np.array_equal(got, np.where(np.arange(64) & 1, a, b))


def test_misaligned_vector_load(corpus: Run) -> None:
    found = fault(lambda: corpus("c", "k_misal2", 1, 8, zeros(64), zeros(64)))
    assert (found.kind, found.bytes) == ("misaligned", 16)


@pytest.mark.parametrize("blocks", [1, 3])
def test_shared_memory_has_an_end_in_every_block(corpus: Run, blocks: int) -> None:
    found = fault(lambda: corpus("c", "k_shoob", blocks, 64, zeros(64)))
    assert (found.kind, found.access, found.block, found.thread) == ("out_of_bounds", "write", (0, 0, 0), (63, 0, 0))
    assert "offset 256 in 256 bytes of shared memory" in found.detail


def test_negative_shared_indices_are_out_of_bounds() -> None:
    body = """.shared .align 4 .b8 s[256]; mov.u32 %r1, s; sub.u32 %r1, %r1, 4;
    st.shared.u32 [%r1], %x0; mov.u32 %y, 0;"""
    x = zeros(64, dtype=U32)
    for blocks in (1, 2):
        found = fault(lambda blocks=blocks: launch(parse(snippet(body, [x], U32)), "k", blocks, 32, x, x))
        assert found.kind == "out_of_bounds"


def test_local_memory_has_an_end() -> None:
    body = """.local .align 4 .b8 s[16]; mov.u64 %rd1, s; mad.wide.u32 %rd1, %x0, 4, %rd1;
    st.local.u32 [%rd1], %x0; ld.local.u32 %y, [%rd1];"""
    x = np.arange(8, dtype=U32)
    found = fault(lambda: launch(parse(snippet(body, [x], U32)), "k", 1, 8, x, x))
    assert (found.kind, found.thread) == ("out_of_bounds", (4, 0, 0))


def test_atomics_are_checked_too() -> None:
    body = "add.s64 %rd1, %base0, 1024; atom.global.add.u32 %y, [%rd1], 1;"
    x = zeros(8, dtype=U32)
    found = fault(lambda: launch(parse(snippet(body, [x], U32)), "k", 1, 8, x, x))
    assert (found.kind, found.access) == ("out_of_bounds", "atomic")


@pytest.mark.parametrize("threads", [32, 256])
def test_a_barrier_that_some_threads_go_around(corpus: Run, threads: int) -> None:
    found = fault(lambda: corpus("a", "bardiv", 1, threads, zeros(threads)))
    assert (found.kind, found.line, found.thread) == ("barrier_divergence", 52, (0, 0, 0))


def test_threads_of_one_warp_at_two_barriers() -> None:
    source = """extern "C" __global__ void k(float* y) {
    if (threadIdx.x & 1) { y[threadIdx.x] = 1; __syncthreads(); y[threadIdx.x] = 2; }
    else { y[threadIdx.x + 64] = 3; __syncthreads(); y[threadIdx.x + 64] = 4; } }"""
    found = fault(lambda: launch(parse(compiled(source)), "k", 1, 64, zeros(128)))
    assert found.kind == "barrier_divergence"


@pytest.mark.parametrize("early", ["return;", "{ y[threadIdx.x] = -1; return; }"])
def test_threads_that_return_early_do_not_block_a_barrier(early: str) -> None:
    source = (
        'extern "C" __global__ void k(float* y, int n) { __shared__ float s[256]; int t = threadIdx.x;'
        f" if (t >= n) {early} s[t] = t; __syncthreads(); y[t] = s[n - 1 - t]; }}"
    )
    got = launch(parse(compiled(source)), "k", 2, 256, zeros(256), 100).arrays[0]
    assert np.array_equal(got[:100], np.arange(99, -1, -1))


def test_a_barrier_that_can_never_complete_is_a_deadlock() -> None:
    body = "setp.lt.u32 %p1, %x0, 32; mov.u32 %y, 0; @%p1 bra $a; bar.sync 1, 128; bra $b; $a: bar.sync 2, 128; $b:"
    x = np.arange(64, dtype=U32)
    found = fault(lambda: launch(parse(snippet(body, [x], U32)), "k", 1, 64, x, x))
    assert found.kind == "deadlock"


def test_an_endless_loop_uses_up_its_budget(corpus: Run) -> None:
    found = fault(lambda: corpus("a", "hang", 1, 32, zeros(2, dtype=I32), limits=Limits(warp_instructions=5000)))
    assert (found.kind, found.line) == ("timed_out", 53)


def test_an_endless_loop_ends_at_its_deadline(corpus: Run) -> None:
    late = Limits(deadline=time.monotonic() - 1)
    found = fault(lambda: corpus("a", "hang", 1, 32, zeros(2, dtype=I32), limits=late))
    assert found.kind == "timed_out"


def test_a_budget_that_suffices_is_no_fault(corpus: Run) -> None:
    x = zeros(256)
    corpus("a", "vadd", 1, 256, x, x, x, 256, limits=Limits(warp_instructions=8 * 22))
    found = fault(lambda: corpus("a", "vadd", 1, 256, x, x, x, 256, limits=Limits(warp_instructions=8 * 10)))
    assert found.kind == "timed_out"


def test_a_failed_assertion_traps_with_its_text(corpus: Run) -> None:
    found = fault(lambda: corpus("c", "k_printf", 1, 32, zeros(1, dtype=I32)))
    assert (found.kind, found.line) == ("trap", 20)
    assert "x[0]>0" in found.detail


def test_trap_instruction() -> None:
    body = ".loc 1 3 1\nsetp.eq.u32 %p1, %x0, 5; @%p1 trap; mov.u32 %y, 0;"
    x = np.arange(8, dtype=U32)
    found = fault(lambda: launch(parse(snippet(body, [x], U32)), "k", 1, 8, x, x))
    assert (found.kind, found.thread, found.line) == ("trap", (5, 0, 0), 3)


@pytest.mark.parametrize(
    "change",
    [
        {"grid": (0, 1, 1)}, {"grid": (1, 70000, 1)}, {"block": (1025, 1, 1)}, {"block": (512, 4, 1)},
        {"block": (1, 1, 65)}, {"args": [b"12345678"]}, {"args": [b"1", b"2", b"3", b"4"]}, {"shared_bytes": -1},
        {"blocks": [5]}, {"blocks": [-1]},
    ],
)  # fmt: skip
def test_a_launch_that_no_driver_would_accept(corpus: Run, change: dict[str, Any]) -> None:
    machine = Machine()
    loaded = machine.load(corpus_module("a"))
    call: dict[str, Any] = {
        "grid": (4, 1, 1), "block": (32, 1, 1), "shared_bytes": 0, "args": [bytes(8)] * 3 + [bytes(4)], **change,
    }  # fmt: skip
    with pytest.raises(InvalidInput):
        machine.launch(loaded, "vadd", **call)
    with pytest.raises(InvalidInput):
        machine.launch(loaded, "nothing", grid=(1, 1, 1), block=(1, 1, 1), shared_bytes=0, args=[])


def test_launch_bounds_limit_the_block(corpus: Run) -> None:
    with pytest.raises(InvalidInput):
        corpus("c", "k_cub", 1, 512, zeros(512), zeros(1))
