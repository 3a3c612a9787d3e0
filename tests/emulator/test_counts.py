"""Counters against the values that NVIDIA documents for simple access patterns, and against one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from launching import compiled, launch, snippet

from optiml.ptx import Limits, parse

Run = Callable[..., Any]
F32, U32 = np.float32, np.uint32


def zeros(*shape: int, dtype: Any = F32) -> Any:
    return np.zeros(shape, dtype)


def test_coalesced_floats_take_four_sectors_per_request(corpus: Run) -> None:
    c = corpus("a", "copy_coal", 2, 256, zeros(512), zeros(512), count=True).counters
    assert (c.global_load.requests, c.global_load.sectors) == (16, 64)
    assert (c.global_store.requests, c.global_store.sectors) == (16, 64)
    assert c.global_load.bytes == 2048
    assert c.global_load.ideal_sectors == 64


@pytest.mark.parametrize(("stride", "sectors"), [(1, 4), (2, 8), (4, 16), (8, 32), (16, 32)])
def test_strided_floats_waste_sectors(corpus: Run, stride: int, sectors: int) -> None:
    n = 128 * stride
    c = corpus("a", "copy_stride", 1, 128, zeros(n), zeros(n), stride, count=True).counters
    assert c.global_load.sectors == c.global_load.requests * sectors
    assert c.global_store.sectors == c.global_store.requests * sectors
    assert c.global_load.ideal_sectors == c.global_load.requests * 4
    assert c.global_load.lines == c.global_load.requests * stride


def test_vectors_of_four_take_sixteen_sectors(corpus: Run) -> None:
    c = corpus("a", "relu4", 1, 128, zeros(512), zeros(512), 128, count=True).counters
    assert (c.global_load.requests, c.global_load.sectors) == (4, 64)


def test_column_reads_of_a_tile_conflict_32_ways_unless_padded(corpus: Run) -> None:
    x = zeros(64, 64)
    plain = corpus("a", "transp", (2, 2), (32, 8), x, x, 64, count=True).counters
    assert plain.shared_load.wavefronts == 32 * plain.shared_load.requests
    assert plain.shared_load.ideal_wavefronts == plain.shared_load.requests
    assert plain.shared_store.wavefronts == plain.shared_store.requests
    padded = corpus("a", "transp_pad", (2, 2), (32, 8), x, x, 64, count=True).counters
    assert padded.shared_load.wavefronts == padded.shared_load.requests == plain.shared_load.requests
    assert sum(line.shared_conflicts for line in padded.lines.values()) == 0
    assert sum(line.shared_conflicts for line in plain.lines.values()) == 31 * plain.shared_load.requests


def test_naive_matmul_takes_two_sectors_per_load(corpus: Run) -> None:
    a = zeros(64, 64)
    c = corpus("a", "matmul_naive", (4, 4), (16, 16), a, a, a, 64, count=True).counters
    assert c.global_load.requests == 64 * 64 * 64 * 2 // 32
    assert c.global_load.sectors == 2 * c.global_load.requests


def test_a_sample_of_blocks_scales_to_the_whole_grid(corpus: Run) -> None:
    a = zeros(64, 64)
    whole = corpus("a", "matmul_naive", (4, 4), (16, 16), a, a, a, 64, count=True)
    part = corpus("a", "matmul_naive", (4, 4), (16, 16), a, a, a, 64, count=True, blocks=[1, 6, 11, 12])
    assert (part.result.blocks_run, part.result.blocks_total) == (4, 16)
    for name in ("warp_instructions", "thread_instructions", "branches", "warps"):
        assert 4 * getattr(part.counters, name) == getattr(whole.counters, name)
    assert 4 * part.counters.global_load.sectors == whole.counters.global_load.sectors
    loads = [sum(a.load_misses for a in c.counters.allocations.values()) for c in (part, whole)]
    assert 4 * loads[0] == loads[1]


def test_a_huge_grid_may_be_sampled(corpus: Run) -> None:
    a = zeros(16)
    c = corpus("a", "vadd", (2**31 - 1, 65535, 65535), 256, a, a, a, 16, count=True, blocks=[7, 2**40])
    assert c.result.blocks_total == (2**31 - 1) * 65535 * 65535
    assert c.counters.blocks == 2


def test_instructions_are_counted_per_warp_and_per_thread(corpus: Run) -> None:
    a = zeros(1000)
    c = corpus("a", "vadd", 4, 256, a, a, a, 1000, count=True).counters
    assert (c.blocks, c.warps) == (4, 32)
    # 10 instructions up to the branch, 11 of the body, ret; 24 threads of the last warp skip the body
    assert c.warp_instructions == 32 * (10 + 11 + 1)
    assert c.thread_instructions == 1024 * 11 + 1000 * 11
    assert (c.branches, c.divergent_branches) == (32, 1)
    assert c.warp_ops["fadd"] == 32
    assert c.thread_ops["fadd"] == 1000
    assert sum(c.warp_ops.values()) == c.warp_instructions
    assert sum(c.thread_ops.values()) == c.thread_instructions
    assert sum(line.warp_instructions for line in c.lines.values()) == c.warp_instructions
    assert c.block_executions == {("vadd", 0): 32, ("vadd", 1): 32, ("vadd", 2): 32}


def test_counts_do_not_depend_on_how_blocks_are_batched(corpus: Run) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(1, 10000, 4096).astype(np.int32)
    whole = corpus("a", "diverge", 32, 128, x, x, 4096, count=True).counters
    singles = [corpus("a", "diverge", 32, 128, x, x, 4096, count=True, blocks=[b]).counters for b in range(32)]
    for name in ("warp_instructions", "thread_instructions", "branches", "divergent_branches"):
        assert sum(getattr(c, name) for c in singles) == getattr(whole, name)


def test_a_divided_warp_counts_both_sides(corpus: Run) -> None:
    body = """and.b32 %r1, %x0, 1; setp.eq.s32 %p1, %r1, 0; mov.u32 %y, 0;
    @%p1 bra $even; add.u32 %y, %y, 1; bra $join;
    $even: add.u32 %y, %y, 2; $join:"""
    x = np.arange(64, dtype=U32)
    x[32:] = 0
    c = launch(parse(snippet(body, [x], U32)), "k", 1, 64, x, zeros(64, dtype=U32), count=True).counters
    assert (c.branches, c.divergent_branches) == (2, 1)
    straight = launch(parse(snippet(body, [x], U32)), "k", 1, 64, x[32:].repeat(2), zeros(64, dtype=U32), count=True)
    # the divided warp runs the odd side (an add and a branch) too
    assert c.warp_instructions == straight.counters.warp_instructions + 2


def test_barriers_are_counted_per_warp(corpus: Run) -> None:
    x = zeros(2, 256)
    c = corpus("a", "softmax", 2, 256, x, x, 256, count=True).counters
    assert c.barriers == 2 * 8 * (1 + 8 + 1 + 1 + 8)


def test_atomics_are_counted_apart(corpus: Run) -> None:
    x = np.zeros(512, np.uint8)
    c = corpus("a", "hist", 2, 256, x, zeros(256, dtype=U32), 512, count=True).counters
    assert c.shared_atomic.requests == 16
    assert c.shared_atomic.wavefronts == 16  # one word for all
    assert (c.global_atomic.requests, c.global_atomic.sectors) == (16, 64)
    assert c.allocations["arg1"].atomic_sectors == 64


def test_wide_shared_accesses_are_served_in_parts() -> None:
    source = """extern "C" __global__ void k(float4* y) { __shared__ float4 s[64];
    s[threadIdx.x] = make_float4(1, 2, 3, 4); __syncthreads(); y[threadIdx.x] = s[threadIdx.x ^ 1]; }"""
    c = launch(parse(compiled(source)), "k", 1, 64, zeros(256), count=True).counters
    assert (c.shared_store.requests, c.shared_store.wavefronts, c.shared_store.ideal_wavefronts) == (2, 8, 8)
    assert c.shared_load.wavefronts == 8


def test_local_memory_is_interleaved_between_threads(corpus: Run) -> None:
    index = np.arange(16, dtype=np.int32)
    c = corpus("a", "locarr", 1, 32, zeros(32, 16), zeros(32), index, count=True).counters
    assert (c.local_store.requests, c.local_store.sectors) == (4, 64)
    assert (c.local_load.requests, c.local_load.sectors) == (16, 64)


def test_traffic_is_attributed_to_allocations(corpus: Run) -> None:
    a, b = zeros(64, 64), zeros(64, 64)
    c = corpus("a", "matmul_naive", (4, 4), (16, 16), a, b, zeros(64, 64), 64, count=True).counters
    x, y, z = (c.allocations[f"arg{i}"] for i in range(3))
    assert x.load_sectors + y.load_sectors == c.global_load.sectors
    assert x.distinct_load_sectors == y.distinct_load_sectors == 64 * 64 * 4 // 32
    assert z.distinct_store_sectors == z.store_sectors == 64 * 64 * 4 // 32
    # each block reads 16 rows of one and 16 columns of the other, each sector once from beyond L1
    assert x.load_misses == y.load_misses == 16 * (16 * 64 * 4 // 32)


def test_a_small_l1_forgets(corpus: Run) -> None:
    a = zeros(64, 64)
    run = lambda **kw: corpus("a", "matmul_naive", (4, 4), (16, 16), a, a, a, 64, count=True, limits=Limits(**kw))  # noqa: E731
    misses = lambda c: sum(x.load_misses for x in c.counters.allocations.values())  # noqa: E731
    assert misses(run(l1_bytes=64)) > misses(run(l1_bytes=4096)) >= misses(run(l1_bytes=1 << 20))
    assert misses(run(l1_bytes=1 << 20, resident_blocks=1 << 8)) == misses(run(l1_bytes=4096))


def test_loads_that_bypass_l1_always_miss() -> None:
    source = """extern "C" __global__ void k(const float* x, float* y) {
    float s = 0; for (int i = 0; i < 4; i++) s += __ldcg(x + threadIdx.x) + i; y[threadIdx.x] = s; }"""
    c = launch(parse(compiled(source)), "k", 1, 32, zeros(32), zeros(32), count=True).counters
    assert c.allocations["arg0"].load_misses == c.allocations["arg0"].load_sectors == c.global_load.sectors


def test_random_gathers_match_a_direct_count() -> None:
    rng = np.random.default_rng(1)
    index = rng.integers(0, 5000, 256).astype(U32)
    body = "ld.param.u64 %rd1, [p1]; mad.wide.u32 %rd1, %x0, 4, %rd1; ld.global.u32 %y, [%rd1];"
    data = np.arange(5000, dtype=U32)
    text = snippet(body, [index, data], U32)
    c = launch(parse(text), "k", 1, 256, index, data, zeros(256, dtype=U32), count=True)
    first = np.arange(256) // 32
    want = sum(len(np.unique(index[first == w] * 4 // 32)) for w in range(8))
    ideal = sum(-(-len(np.unique(index[first == w])) * 4 // 32) for w in range(8))
    regular = 4 * 8  # the loads of the index and of x1 are coalesced
    assert c.counters.global_load.sectors == want + 2 * regular
    assert c.counters.global_load.ideal_sectors == ideal + 2 * regular


def test_random_bank_conflicts_match_a_direct_count() -> None:
    rng = np.random.default_rng(2)
    index = rng.integers(0, 512, 250).astype(U32)
    body = """.shared .align 4 .b8 s[2048]; mov.u32 %r1, s; mad.lo.u32 %r1, %x0, 4, %r1; st.shared.u32 [%r1], %x0;
    setp.lt.u32 %p1, %x0, 256; mov.u32 %y, 0; @%p1 ld.shared.u32 %y, [%r1];"""
    text = snippet(body, [index], U32)
    c = launch(parse(text), "k", 1, 250, index, zeros(250, dtype=U32), count=True, clean=False).counters

    def wavefronts(words: Any) -> int:
        words = np.unique(words)
        return int(np.bincount(words % 32).max()) if len(words) else 0

    warps = [index[w : w + 32] for w in range(0, 250, 32)]
    assert c.shared_store.wavefronts == sum(wavefronts(w) for w in warps)
    assert c.shared_load.wavefronts == sum(wavefronts(w[w < 256]) for w in warps)


def test_counting_does_not_change_results(corpus: Run) -> None:
    x = np.random.default_rng(3).standard_normal((3, 300)).astype(F32)
    plain = corpus("a", "softmax", 3, 256, x, x, 300).arrays[1]
    counted = corpus("a", "softmax", 3, 256, x, x, 300, count=True)
    again = corpus("a", "softmax", 3, 256, x, x, 300, count=True)
    assert np.array_equal(plain, counted.arrays[1])
    assert counted.counters == again.counters
