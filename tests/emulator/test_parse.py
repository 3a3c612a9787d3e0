"""The PTX reader: scopes, locations, data, layouts, blocks, errors."""

from __future__ import annotations

import time

import numpy as np
import pytest
from launching import compiled, corpus_module, launch

from optiml.errors import PtxSyntaxError
from optiml.ptx import Module, parse
from optiml.ptx.parse import Address, Immediate, Instruction, Register, Symbol, Vector

HEAD = ".version 9.0\n.target sm_80\n.address_size 64\n"


def body(text: str, params: str = "") -> Module:
    return parse(f"{HEAD}.visible .entry k({params})\n{{\n{text}\nret;\n}}\n")


def first(text: str) -> Instruction:
    module = body(".reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .f32 %f<9>; .reg .pred %p<9>;\n" + text)
    return next(module.kernels["k"].instructions())


def test_target_and_functions() -> None:
    module = corpus_module("c")
    assert module.target == "sm_80"
    assert "k_call" in module.kernels
    assert "_Z4devffi" in module.functions
    assert "_Z4devffi" not in module.kernels
    assert not module.functions["vprintf"].defined
    assert module.globals["cw"].bytes == 256
    assert module.globals["cw"].space == "const"


def test_parameters_have_offsets_and_sizes() -> None:
    params = ".param .u8 a, .param .u64 .ptr .global .align 4 b, .param .align 4 .b8 c[12], .param .f64 d"
    found = body("", params).kernels["k"].params
    assert [(p.name, p.type, p.bytes, p.align, p.offset) for p in found] == [
        ("a", "u8", 1, 1, 0), ("b", "u64", 8, 8, 8), ("c", "b8", 12, 4, 16), ("d", "f64", 8, 8, 32),
    ]  # fmt: skip


def test_operands() -> None:
    assert first("ld.global.f32 %f1, [%rd1+-8];").src == (Address(base=Register(name="%rd1"), offset=-8),)
    assert first("mad.lo.s32 %r1, %r2, -3, 0x10;").src[1:] == (Immediate(value=-3), Immediate(value=16))
    assert first("mov.f32 %f1, 0f3F800000;").src == (Immediate(value=0x3F800000, kind="f32"),)
    stored = first("st.global.v2.f32 [%rd1], {%f1, %f2};")
    assert stored.dst == ()
    assert stored.src[1] == Vector(elements=(Register(name="%f1"), Register(name="%f2")))
    guarded = first("@!%p1 setp.lt.and.s32 %p2|%p3, %r1, %r2, !%p4;")
    assert guarded.predicate == ("%p1", True)
    assert guarded.dst == (Register(name="%p2"), Register(name="%p3"))
    assert guarded.src[-1] == Register(name="%p4", negated=True)
    assert guarded.parts == ("setp", "lt", "and", "s32")


def test_nested_scopes_hide_outer_names_guards_and_labels_included() -> None:
    module = body("""
    .reg .pred %p<2>; .reg .b32 %r<4>;
    { .reg .pred p; .reg.b32 x; setp.eq.s32 p, %r1, 0; @p mov.u32 x, 1; @p bra DONE; mov.u32 %r2, x; DONE: }
    { .reg .pred p; .reg .b32 x; setp.ne.s32 p, %r1, 0; @p mov.u32 x, 2; @p bra DONE; mov.u32 %r3, x; DONE: }
    """)
    function = module.kernels["k"]
    guards = [i.predicate[0] for i in function.instructions() if i.predicate is not None]
    assert guards == ["p@1", "p@1", "p@2", "p@2"]
    targets = [i.src[0] for i in function.instructions() if i.parts[0] == "bra"]
    assert targets == [Symbol(name="DONE@1"), Symbol(name="DONE@2")]
    assert {b.label for b in function.blocks} >= {"DONE@1", "DONE@2"}
    assert function.registers["x@1"] == "b32"


def test_locations_follow_inlining_out_to_the_kernel() -> None:
    module = body("""
    .local .align 4 .b8 buffer[16];
    .reg .b32 %r<4>;
    .loc 1 10 3
    mov.u32 %r1, 1;
    .loc 2 500 5, function_name $L__info_string0, inlined_at 1 12 9
    mov.u32 %r1, 2;
    .loc 3 77 1, function_name $L__info_string1, inlined_at 2 500 5
    mov.u32 %r1, 3;
    .loc 1 0 3
    mov.u32 %r1, 4;
    .loc 1 8 1, function_name $L__info_string2, inlined_at 1 13 2
    mov.u32 %r1, 5;
    """)
    lines = [i.line for i in module.kernels["k"].instructions()]
    assert lines == [10, 12, 12, 12, 13, 13]
    assert module.kernels["k"].local_bytes == 16


def test_blocks_begin_at_labels_and_end_at_branches() -> None:
    module = body("""
    .reg .pred %p<2>; .reg .b32 %r<4>;
    mov.u32 %r1, 0;
    $L1: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 9; @%p1 bra $L1;
    mov.u32 %r2, %r1;
    $L2:
    $L3: mov.u32 %r3, %r2;
    """)
    blocks = module.kernels["k"].blocks
    assert [(b.label, len(b.instructions)) for b in blocks] == [("", 1), ("$L1", 3), ("", 1), ("$L2", 0), ("$L3", 2)]


def test_shared_variables_are_laid_out_for_each_kernel() -> None:
    text = f"""{HEAD}
    .shared .align 4 .b8 common[6];
    .extern .shared .align 16 .b8 dynamic[];
    .visible .entry a() {{ .shared .align 8 .b8 own[10]; .reg .b32 %r<3>;
      mov.u32 %r1, own; mov.u32 %r2, common; mov.u32 %r1, dynamic; ret; }}
    .visible .entry b() {{ ret; }}
    """
    module = parse(text)
    layout = module.kernels["a"].shared_layout
    assert module.kernels["a"].static_shared_bytes == 18
    assert layout == {"own": 0, "common": 12, "dynamic": 32}
    assert module.kernels["b"].static_shared_bytes == 0


def test_initialised_data_and_addresses_within_it() -> None:
    text = f"""{HEAD}
    .const .align 4 .f32 table[4] = {{0f3F800000, 0f40000000, 3.0}};
    .global .align 8 .u64 pointers[3] = {{table+4, generic(plain), 7}};
    .global .align 4 .u32 plain = 42;
    .global .align 1 .b8 word[6] = {{104, 105, 0}};
    .visible .entry k(.param .u64 out) {{
      .reg .b64 %rd<9>; .reg .f32 %f<3>; .reg .b32 %r<3>;
      ld.param.u64 %rd1, [out]; ld.global.u64 %rd2, [pointers]; ld.const.f32 %f1, [%rd2];
      st.global.f32 [%rd1], %f1; ld.global.u64 %rd3, [pointers+8]; ld.global.u32 %r1, [%rd3];
      st.global.u32 [%rd1+4], %r1; ld.const.f32 %f2, [table+8]; st.global.f32 [%rd1+8], %f2;
      ld.global.u8 %r2, [word+1]; st.global.u32 [%rd1+12], %r2; ret; }}
    """
    got = launch(parse(text), "k", 1, 1, np.zeros(4, np.uint32)).arrays[0]
    assert got.view(np.float32)[[0, 2]].tolist() == [2.0, 3.0]
    assert got[[1, 3]].tolist() == [42, 105]


def test_launch_bounds() -> None:
    kernel = corpus_module("c").kernels["k_cub"]
    assert kernel.max_threads == (256, 1, 1)
    assert kernel.min_blocks == 2


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"{HEAD}.visible .entry k() {{\n mov.u32 %r1 1\n}}\n", 5),
        (f"{HEAD}.visible .entry k() {{ ret;", 4),
        (f"{HEAD}\n.frobnicate 3;", 5),
        (f"{HEAD}.global .align 4 .u99 x;", 4),
        (f"{HEAD}.visible .entry k() {{\n\n bra $nowhere; }}\n", 6),
        ("hello", 1),
        ("", 1),
    ],
)
def test_text_that_is_not_ptx_is_refused_with_its_line(text: str, line: int) -> None:
    with pytest.raises(PtxSyntaxError, match=rf"PTX line {line}\b"):
        parse(text)


def test_comments_and_strings() -> None:
    module = body('/* a { b */ .reg .b32 %r<2>; // bra $x;\n .pragma "no;unroll"; mov.u32 %r1, 1; /* ; */')
    assert [i.opcode for i in module.kernels["k"].instructions()] == ["mov.u32", "ret"]


def test_a_thousand_instructions_are_read_within_the_processor_time_allowed() -> None:
    lines = "\n".join(f"fma.rn.f32 %f{i % 90}, %f{(i + 1) % 90}, %f{(i + 7) % 90}, 0f3F800000;" for i in range(1000))
    text = f"{HEAD}.visible .entry k() {{ .reg .f32 %f<90>;\n{lines}\nret; }}"
    start = time.process_time()
    parse(text)
    assert time.process_time() - start < 2.0  # typically 0.05; the bound only catches quadratic behaviour


def test_modules_of_the_newer_target_parse_too() -> None:
    assert corpus_module("a", "compute_90").target == "sm_90"
    module = parse(compiled('extern "C" __global__ void k(int* y) { y[0] = 1; }', "sm_90"))
    assert list(module.kernels) == ["k"]
