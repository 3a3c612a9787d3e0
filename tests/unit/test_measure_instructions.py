"""Estimated machine cost of PTX opcodes."""

from __future__ import annotations

import pytest

from optiml.measure.instructions import cost


@pytest.mark.parametrize("opcode", ["mov.u32", "ld.param.u64", "cvta.to.global.u64", "cp.async.commit_group"])
def test_what_vanishes_in_machine_code_costs_nothing(opcode: str) -> None:
    assert cost(opcode).issue_slots == 0.0


@pytest.mark.parametrize(
    ("opcode", "pipe"),
    [
        ("fma.rn.f32", "fp32"),
        ("mad.lo.s32", "int"),
        ("fma.rn.f16x2", "fp16"),
        ("add.f64", "fp64"),
        ("ex2.approx.ftz.f32", "sfu"),
        ("popc.b32", "sfu"),
        ("cvt.rn.f16.f32", "convert"),
        ("shfl.sync.down.b32", "shuffle"),
        ("ld.global.nc.v4.f32", "memory"),
        ("st.shared.f32", "memory"),
        ("atom.global.add.f32", "memory"),
        ("bra.uni", "control"),
    ],
)
def test_an_instruction_takes_one_slot_of_its_pipe(opcode: str, pipe: str) -> None:
    assert dict(cost(opcode).slots) == {pipe: 1}


def test_division_costs_far_more_than_multiplication() -> None:
    assert cost("div.s32").issue_slots > 10 * cost("mul.lo.s32").issue_slots
    assert cost("rem.u64").issue_slots > 3 * cost("rem.u32").issue_slots
    assert cost("div.rn.f32").issue_slots > 2 * cost("div.approx.f32").issue_slots


def test_flushing_denormals_makes_exp2_cheaper() -> None:
    assert cost("ex2.approx.f32").issue_slots > cost("ex2.approx.ftz.f32").issue_slots


@pytest.mark.parametrize(
    ("opcode", "element", "fmas"),
    [
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "f16", 2048),
        ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", "tf32", 1024),
        ("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", "s8", 4096),
        ("wmma.mma.sync.aligned.row.row.m16n16k16.f32.f32", "f16", 4096),
        ("wmma.mma.sync.aligned.row.row.m16n16k16.f32.bf16.bf16.f32", "f16", 4096),
        ("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64", "f64", 256),
    ],
)
def test_a_tensor_instruction_counts_its_multiply_adds(opcode: str, element: str, fmas: int) -> None:
    assert dict(cost(opcode).tensor_fmas) == {element: fmas}


def test_a_store_or_reduction_is_not_waited_for() -> None:
    assert not cost("st.global.f32").latency
    assert not cost("red.global.add.f32").latency
    assert dict(cost("atom.global.add.f32").latency) == {"atomic": 1}
