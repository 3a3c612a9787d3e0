"""Critical paths of basic blocks, on hand-written PTX with round latencies: load 100, everything else 10."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from optiml.ptx import parse
from optiml.ptx.dataflow import BlockCycles, Timing, function_cycles
from optiml.ptx.parse import Instruction

HEADER = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k()\n{\n.reg .f32 %f<9>; .reg .b64 %rd<9>; .reg .pred %p<9>;\n"  # noqa: E501


def timing(instruction: Instruction, loads: int) -> Timing:
    latency = {"ld": 100.0, "st": 0.0, "bra": 0.0, "ret": 0.0}.get(instruction.parts[0], 10.0)
    return Timing(slots=1.0, latency=latency)


def lengths(body: str, executions: Mapping[int, int] | None = None) -> dict[int, BlockCycles]:
    function = parse(f"{HEADER}{body}\n}}\n").functions["k"]
    counted = executions or dict.fromkeys(range(len(function.blocks)), 1)
    return function_cycles(function, counted, timing)


def total(body: str) -> float:
    return sum(block.first for block in lengths(body).values())


def steady(body: str) -> float:
    return max(block.steady for block in lengths(body).values())


def test_a_chain_costs_the_sum_of_its_latencies() -> None:
    assert total("ld.global.f32 %f1, [%rd1]; add.f32 %f2, %f1, %f1; add.f32 %f3, %f2, %f2; st.global.f32 [%rd1], %f3; ret;") == pytest.approx(121.0)  # noqa: E501 # fmt: skip


def test_independent_loads_overlap() -> None:
    one = total("ld.global.f32 %f1, [%rd1]; add.f32 %f3, %f1, %f1; st.global.f32 [%rd1], %f3; ret;")
    two = total("ld.global.f32 %f1, [%rd1]; ld.global.f32 %f2, [%rd2]; add.f32 %f3, %f1, %f2; st.global.f32 [%rd1], %f3; ret;")  # noqa: E501 # fmt: skip
    assert two - one < 5.0


def test_a_load_behind_a_store_waits_for_it_unless_it_is_read_only() -> None:
    body = "ld.global.f32 %f1, [%rd1]; st.global.f32 [%rd2], %f1; ld.global{nc}.f32 %f2, [%rd3]; st.global.f32 [%rd4], %f2; ret;"  # noqa: E501 # fmt: skip
    assert total(body.format(nc="")) > 200.0
    assert total(body.format(nc=".nc")) < 110.0


def test_a_barrier_waits_for_the_accesses_before_it() -> None:
    body = "ld.global.f32 %f1, [%rd1]; {barrier} ld.shared.f32 %f2, [%rd2]; st.global.f32 [%rd4], %f2; ret;"
    assert total(body.format(barrier="bar.sync 0;")) > 200.0
    assert total(body.format(barrier="")) < 110.0


def test_a_loop_that_waits_for_each_load_costs_its_latency_every_time() -> None:
    loop = "$L: ld.global.f32 %f1, [%rd1]; add.f32 %f2, %f2, %f1; add.s64 %rd1, %rd1, 4; setp.ne.s64 %p1, %rd1, %rd2; @%p1 bra $L; ret;"  # noqa: E501 # fmt: skip
    assert steady(loop) == pytest.approx(100.0, abs=15.0)


def test_an_unrolled_loop_costs_one_latency_for_all_its_loads() -> None:
    loads = "".join(f"ld.global.f32 %f{i}, [%rd1+{4 * i}]; " for i in range(1, 5))
    sums = "".join(f"add.f32 %f8, %f8, %f{i}; " for i in range(1, 5))
    loop = f"$L: {loads}{sums}add.s64 %rd1, %rd1, 16; setp.ne.s64 %p1, %rd1, %rd2; @%p1 bra $L; ret;"
    assert steady(loop) < 160.0


def test_a_load_used_in_the_next_block_is_waited_for_there() -> None:
    found = lengths("ld.global.f32 %f1, [%rd1]; setp.ne.s64 %p1, %rd1, %rd2; @%p1 bra $END; add.f32 %f2, %f1, %f1; $END: ret;")  # noqa: E501 # fmt: skip
    assert found[0].first < 20.0
    assert found[1].first > 80.0


def test_blocks_that_never_ran_are_left_out() -> None:
    body = "setp.ne.s64 %p1, %rd1, %rd2; @%p1 bra $END; ld.global.f32 %f1, [%rd1]; add.f32 %f2, %f1, %f1; $END: ret;"
    assert set(lengths(body, {0: 4, 2: 4})) == {0, 2}


def test_a_rare_detour_does_not_hold_up_what_follows() -> None:
    body = "ld.global.f32 %f1, [%rd1]; setp.ne.s64 %p1, %rd1, %rd2; @%p1 bra $END; add.f32 %f2, %f1, %f1; st.global.f32 [%rd2], %f2; $END: add.f32 %f3, %f1, %f1; st.global.f32 [%rd3], %f3; ret;"  # noqa: E501 # fmt: skip
    found = lengths(body, {0: 100, 1: 2, 2: 100})
    assert found[1].first > 80.0  # the detour pays for the wait
    assert found[2].first > 80.0  # and so does the common path


def test_a_predicated_write_keeps_the_old_value_alive() -> None:
    chain = total("ld.global.f32 %f1, [%rd1]; @%p1 add.f32 %f1, %f2, %f2; st.global.f32 [%rd1], %f1; ret;")
    assert chain > 100.0
