"""Threads, warps and blocks that wait for one another make progress; divergence and convergence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from launching import compiled, launch, snippet

from optiml.errors import Unsupported
from optiml.ptx import Machine, parse

Run = Callable[..., Any]
F32, U32, I32 = np.float32, np.uint32, np.int32


def zeros(*shape: int, dtype: Any = I32) -> Any:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize("kernel", ["k_lock", "k_lockbad"])
def test_a_spin_lock_lets_every_thread_through(corpus: Run, kernel: str) -> None:
    assert corpus("c", kernel, 2, 64, zeros(1), zeros(1), same=False).arrays[1][0] == 128


def test_a_warp_may_spin_on_another(corpus: Run) -> None:
    assert (corpus("c", "k_xwarp", 1, 64, zeros(1), zeros(32), same=False).arrays[1] == 7).all()


def test_blocks_may_wait_for_later_blocks() -> None:
    source = """extern "C" __global__ void k(volatile int* arrived, int* y) {
    if (threadIdx.x == 0) { atomicAdd((int*)arrived, 1); while (*arrived < gridDim.x); }
    __syncthreads(); y[blockIdx.x * 32 + threadIdx.x] = *arrived; }"""
    got = launch(parse(compiled(source)), "k", 16, 32, zeros(1), zeros(512), same=False).arrays[1]
    assert (got == 16).all()


GRID_BARRIER = """#include <cooperative_groups.h>
extern "C" __global__ void k(int* x, int* y) { auto grid = cooperative_groups::this_grid(); int i = grid.thread_rank();
x[i] = i; grid.sync(); y[i] = x[gridDim.x * blockDim.x - 1 - i]; grid.sync(); x[i] = y[i] + 1; }"""


def test_a_barrier_over_the_whole_grid() -> None:
    module = parse(compiled(GRID_BARRIER))
    got = launch(module, "k", 20, 64, zeros(1280), zeros(1280), same=False).arrays  # other counts of polls
    assert np.array_equal(got[1], np.arange(1280)[::-1])
    assert np.array_equal(got[0], got[1] + 1)
    with pytest.raises(Unsupported, match="grid-wide barrier"):
        launch(module, "k", 5000, 64, zeros(1280), zeros(1280))


def test_a_chain_of_blocks_through_flags() -> None:
    source = """extern "C" __global__ void k(const int* x, int* total) { volatile int* t = total;
    if (blockIdx.x > 0) while (t[blockIdx.x - 1] < 0);
    t[blockIdx.x] = x[blockIdx.x] + (blockIdx.x ? t[blockIdx.x - 1] : 0); }"""
    x = np.arange(1, 51, dtype=I32)
    got = launch(parse(compiled(source)), "k", 50, 1, x, zeros(50) - 1, same=False).arrays[1]
    assert np.array_equal(got, np.cumsum(x))


def test_threads_meet_again_after_nested_loops_of_their_own_length() -> None:
    source = """extern "C" __global__ void k(int* y) { int t = threadIdx.x, s = 0;
    for (int i = 0; i < t % 5; i++) for (int j = 0; j < (t + i) % 4; j++) s += i * j + 1;
    y[t] = s + __popc(__activemask()); }"""
    want = [sum(i * j + 1 for i in range(t % 5) for j in range((t + i) % 4)) + 32 for t in range(64)]
    assert np.array_equal(launch(parse(compiled(source)), "k", 1, 64, zeros(64)).arrays[0], want)


def test_a_shuffle_waits_for_threads_that_took_another_way() -> None:
    body = """and.b32 %r1, %x0, 1; setp.eq.u32 %p1, %r1, 0; mov.u32 %r2, 10;
    @%p1 bra $far;
    $join: shfl.sync.bfly.b32 %y, %r2, 1, 31, -1; bra $end;
    $far: mov.u32 %r2, 20; bra $join;
    $end:"""
    x = np.arange(32, dtype=U32)
    got = launch(parse(snippet(body, [x], U32)), "k", 1, 32, x, zeros(32, dtype=U32)).arrays[1]
    assert np.array_equal(got, np.where(x % 2, 20, 10))


def test_a_shuffle_among_some_threads_of_a_warp_does_not_wait_for_the_others() -> None:
    source = """extern "C" __global__ void k(int* y) { int t = threadIdx.x, v = t;
    if (t < 8) { for (int o = 4; o; o >>= 1) v += __shfl_down_sync(0xff, v, o); if (t == 0) y[0] = v; }
    __syncthreads(); y[t + 1] = v; }"""
    got = launch(parse(compiled(source)), "k", 1, 32, zeros(33)).arrays[0]
    assert got[0] == 28
    assert np.array_equal(got[9:], np.arange(8, 32))


def test_a_shuffle_whose_mask_names_threads_that_never_come_goes_on_without_them() -> None:
    source = """extern "C" __global__ void k(int* y) { int t = threadIdx.x, v = t;
    if (t < 8) { for (int o = 4; o; o >>= 1) v += __shfl_down_sync(~0u, v, o); if (t == 0) y[0] = v; }
    __syncthreads(); y[t + 1] = t; }"""
    got = launch(parse(compiled(source)), "k", 1, 32, zeros(33)).arrays[0]
    assert got[0] == 28


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("width", [32, 16, 8])
def test_shuffles_of_every_mode_and_width(mode: str, width: int) -> None:
    clamp = (32 - width) << 8 | (0 if mode == "up" else 31)
    body = f"shfl.sync.{mode}.b32 %y|%p1, %x0, %x1, {clamp}, -1; @%p1 add.u32 %y, %y, 1000;"
    values = np.arange(64, dtype=U32) * 3
    amounts = np.random.default_rng(0).integers(0, 32, 64).astype(U32)
    for amount in (amounts, np.full(64, 3, U32)):
        want = []
        for t in range(64):
            lane, b = t % 32, int(amount[t])
            low = lane // width * width
            j = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": low | (b & (width - 1))}[mode]
            inside = j >= low if mode == "up" else j < low + width
            want.append(int(values[t // 32 * 32 + (j if inside else lane)]) + (1000 if inside else 0))
        launched = launch(parse(snippet(body, [values, amount], U32)), "k", 1, 64, values, amount, zeros(64, dtype=U32))
        assert np.array_equal(launched.arrays[2], want)


def test_votes_in_part_of_a_warp() -> None:
    source = """extern "C" __global__ void k(unsigned* y) { int t = threadIdx.x; unsigned r = 0;
    if (t % 4 == 1) { unsigned m = 0x22222222u;
      r = __ballot_sync(m, t > 10) ^ (__all_sync(m, t > 0) << 1) ^ __any_sync(m, t == 13); }
    y[t] = r; }"""
    got = launch(parse(compiled(source)), "k", 1, 32, zeros(32, dtype=U32)).arrays[0]
    ballot = sum(1 << t for t in range(32) if t % 4 == 1 and t > 10) ^ 2 ^ 1
    assert np.array_equal(got, [ballot if t % 4 == 1 else 0 for t in range(32)])


@pytest.mark.parametrize("operation", ["add", "min", "max", "and", "or", "xor"])
def test_warp_reductions(operation: str) -> None:
    rng = np.random.default_rng(4)
    x = rng.integers(0, 2**32, 64).astype(U32)
    kind = "b32" if operation in ("and", "or", "xor") else "u32"
    body = f"redux.sync.{operation}.{kind} %y, %x0, -1;"
    got = launch(parse(snippet(body, [x], U32)), "k", 1, 64, x, zeros(64, dtype=U32)).arrays[1]
    functions: dict[str, Any] = {
        "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }  # fmt: skip
    want = functions[operation].reduce(x.reshape(2, 32), axis=1, dtype=U32)
    assert np.array_equal(got, np.repeat(want, 32))


def test_matches() -> None:
    x = np.random.default_rng(5).integers(0, 4, 64).astype(U32)
    x[32:] = 9
    got = launch(parse(snippet("match.any.sync.b32 %y, %x0, -1;", [x], U32)), "k", 1, 64, x, zeros(64, dtype=U32))
    want = [sum(1 << j for j in range(32) if x[i // 32 * 32 + j] == x[i]) for i in range(64)]
    assert np.array_equal(got.arrays[1], np.array(want, U32))
    body = "match.all.sync.b32 %y|%p1, %x0, -1; @!%p1 mov.u32 %y, 5;"
    got = launch(parse(snippet(body, [x], U32)), "k", 1, 64, x, zeros(64, dtype=U32))
    assert np.array_equal(got.arrays[1], np.repeat(np.array([5, 0xFFFFFFFF], U32), 32))


def test_named_barriers_with_counts() -> None:
    source = """extern "C" __global__ void k(int* y) { __shared__ int s[128]; int t = threadIdx.x, half = t / 64;
    s[t] = t; asm volatile("bar.sync %0, 64;" :: "r"(half + 1)); y[t] = s[half * 64 + 63 - t % 64]; }"""
    got = launch(parse(compiled(source)), "k", 3, 128, zeros(128)).arrays[0]
    t = np.arange(128)
    assert np.array_equal(got, t // 64 * 64 + 63 - t % 64)


def test_producers_arrive_and_consumers_wait() -> None:
    source = """extern "C" __global__ void k(int* y) { __shared__ int s[32]; int t = threadIdx.x;
    if (t >= 32) { s[t - 32] = t * 2; asm volatile("bar.arrive 1, 64;" ::: "memory"); }
    else { asm volatile("bar.sync 1, 64;" ::: "memory"); y[t] = s[t]; } }"""
    got = launch(parse(compiled(source)), "k", 1, 64, zeros(32)).arrays[0]
    assert np.array_equal(got, 2 * np.arange(32, 64))


def test_barrier_reductions() -> None:
    source = """extern "C" __global__ void k(const int* x, int* y) { int v = x[blockIdx.x * 64 + threadIdx.x];
    int r = __syncthreads_count(v > 0) * 4 + (__syncthreads_and(v > -9) ? 2 : 0) + (__syncthreads_or(v > 7) ? 1 : 0);
    y[blockIdx.x * 64 + threadIdx.x] = r; }"""
    x = np.random.default_rng(6).integers(-10, 9, 192).astype(I32)
    rows = x.reshape(3, 64)
    want = (rows > 0).sum(1) * 4 + (rows > -9).all(1) * 2 + (rows > 7).any(1)
    got = launch(parse(compiled(source)), "k", 3, 64, x, zeros(192)).arrays[1]
    assert np.array_equal(got, np.repeat(want, 64))


@pytest.mark.parametrize(
    ("operation", "kind", "dtype"),
    [
        ("add", "u32", U32), ("add", "s32", I32), ("add", "u64", np.uint64), ("add", "f32", F32), ("add", "f64", float),
        ("min", "s32", I32), ("max", "u32", U32), ("min", "u64", np.uint64), ("max", "s64", np.int64),
        ("and", "b32", U32), ("or", "b64", np.uint64), ("xor", "b32", U32), ("exch", "b32", U32), ("inc", "u32", U32),
        ("dec", "u32", U32),
    ],
)  # fmt: skip
@pytest.mark.parametrize("places", [1, 3, 64])
def test_atomics_return_values_as_if_threads_took_turns(operation: str, kind: str, dtype: Any, places: int) -> None:
    rng = np.random.default_rng(7)
    where = rng.integers(0, places, 96).astype(U32)
    values = rng.integers(0, 100, 96).astype(dtype)
    if operation == "add" and np.dtype(dtype).kind == "f":
        values = (rng.standard_normal(96) * 10.0 ** rng.integers(-3, 4, 96)).astype(dtype)
    memory = rng.integers(0, 50, 64).astype(dtype)
    size = np.dtype(dtype).itemsize
    body = f"mad.wide.u32 %rd1, %x0, {size}, %base2; sub.u32 %r1, 0, %tid;"
    body += f"mad.wide.s32 %rd1, %r1, {size}, %rd1; atom.global.{operation}.{kind} %y, [%rd1], %x1;"
    padded = np.concatenate([memory, np.zeros(32, dtype)])
    text = snippet(body, [where, values, padded], dtype)
    # every thread also reads an element without need, which races with the atomics
    launched = launch(parse(text), "k", 1, 96, where, values, padded, np.zeros(96, dtype), clean=False)
    state = memory.copy()
    want = np.empty(96, dtype)
    for i in range(96):
        old, new = state[where[i]], values[i]
        want[i] = old
        state[where[i]] = {
            "add": lambda o, n: o + n, "min": min, "max": max, "and": lambda o, n: o & n, "or": lambda o, n: o | n,
            "xor": lambda o, n: o ^ n, "exch": lambda o, n: n, "inc": lambda o, n: 0 if o >= n else o + 1,
            "dec": lambda o, n: n if o == 0 or o > n else o - 1,
        }[operation](old, new)  # fmt: skip
    assert np.array_equal(launched.arrays[3], want)
    assert np.array_equal(launched.arrays[2][:64], state)


def test_compare_and_swap_takes_turns() -> None:
    where = np.repeat(np.arange(8, dtype=U32), 8)
    compare = np.tile(np.array([0, 5, 1, 0, 2, 2, 7, 1], U32), 8)
    fresh = np.tile(np.array([1, 9, 2, 4, 7, 3, 0, 8], U32), 8)
    body = """mad.wide.u32 %rd1, %x0, 4, %base3; sub.u32 %r1, 0, %tid; mad.wide.s32 %rd1, %r1, 4, %rd1;
    atom.global.cas.b32 %y, [%rd1], %x1, %x2;"""
    memory = zeros(64, dtype=U32)
    text = snippet(body, [where, compare, fresh, memory], U32)
    launched = launch(parse(text), "k", 1, 64, where, compare, fresh, memory, zeros(64, dtype=U32), clean=False)
    want, state = [], [0] * 8
    for w, c, f in zip(where.tolist(), compare.tolist(), fresh.tolist(), strict=True):
        want.append(state[w])
        state[w] = f if state[w] == c else state[w]
    assert np.array_equal(launched.arrays[4], want)
    assert np.array_equal(launched.arrays[3][:8], state)


def test_unused_results_of_float_atomics_add_in_order() -> None:
    source = """extern "C" __global__ void k(const float* x, float* y) {
    atomicAdd(y + (threadIdx.x & 1), x[threadIdx.x]); }"""
    x = (np.random.default_rng(8).standard_normal(64) * 1000).astype(F32)
    want = np.zeros(2, F32)
    for i, v in enumerate(x):
        want[i & 1] += v
    assert np.array_equal(launch(parse(compiled(source)), "k", 1, 64, x, np.zeros(2, F32)).arrays[1], want)


def test_two_launches_of_one_module_share_its_device_variables() -> None:
    source = """__device__ int counter = 5; __constant__ int step = 3;
    extern "C" __global__ void k(int* y) {
    if (threadIdx.x == 0) counter += step; __syncthreads(); y[threadIdx.x] = counter; }"""
    machine = Machine()
    loaded = machine.load(parse(compiled(source)))
    out = machine.allocate(128)
    for want in (8, 11):
        machine.launch(loaded, "k", grid=(1, 1, 1), block=(32, 1, 1), shared_bytes=0, args=[out.to_bytes(8, "little")])
        assert (machine.memory(out).view(I32) == want).all()
    fresh = machine.load(loaded.module)
    machine.launch(fresh, "k", grid=(1, 1, 1), block=(32, 1, 1), shared_bytes=0, args=[out.to_bytes(8, "little")])
    assert (machine.memory(out).view(I32) == 8).all()


def test_runs_are_repeatable(corpus: Run) -> None:
    x = np.random.default_rng(9).standard_normal(1000).astype(F32)
    first = corpus("a", "atomf", 4, 256, x, np.zeros(1, F32), np.zeros(3, F32), 1000).arrays
    second = corpus("a", "atomf", 4, 256, x, np.zeros(1, F32), np.zeros(3, F32), 1000).arrays
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


BARRIER_OBJECT = """#include <cuda/barrier>
extern "C" __global__ void k(const int* a, int* y) { __shared__ cuda::barrier<cuda::thread_scope_block> bar;
__shared__ int s[128]; int t = threadIdx.x; if (t == 0) init(&bar, blockDim.x); __syncthreads();
for (int r = 0; r < 3; r++) { s[t] = a[t] + r; bar.arrive_and_wait(); y[t] += s[127 - t]; bar.arrive_and_wait(); } }"""


@pytest.mark.parametrize("arch", ["compute_80", "compute_90"])
def test_barrier_objects_in_shared_memory(arch: str) -> None:
    a = np.random.default_rng(10).integers(0, 100, 128).astype(I32)
    got = launch(parse(compiled(BARRIER_OBJECT, arch)), "k", 1, 128, a, zeros(128), same=False).arrays[1]
    assert np.array_equal(got, 3 * a[::-1] + 3)
