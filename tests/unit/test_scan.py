"""What the text of a source forbids or gives to think about; comments and strings never count."""

from __future__ import annotations

import pytest

from optiml.toolchain.scan import forbidden_construct, host_call_warnings, host_only_library, register_warnings


@pytest.mark.parametrize(
    "source",
    [
        'asm(".incbin \\"/etc/passwd\\"");',
        '__asm__ volatile ("nop;" ". incbin \\"x\\"");',
        'asm volatile(R"(.inc)" "bin x" : "=r"(a) : "r"(f(1)));',
        'asm\n/* here */ (".incbin x");',
        '#embed "x"',
        '%:include "/etc/passwd"',
        '#inc\\\nlude "/etc/passwd"',
        "#include <../x>",
        '#include_next "~/x"',
    ],
)
def test_what_would_read_a_file_is_forbidden(source: str) -> None:
    assert forbidden_construct(source, confined=True) is not None


@pytest.mark.parametrize(
    "source",
    [
        'const char* s = ".incbin \\"/etc/passwd\\"";',
        '// asm(".incbin")\nint x;',
        '/* #include "/etc/passwd" */ int x;',
        'const char* s = R"(\n#include "/etc/passwd"\nasm(".incbin"))";',
        'asm("nop;"); const char* s = ".incbin";',
        'void asm_like(const char*); void f() { asm_like(".incbin"); }',
        'asm("nop;"); g(".incbin");',
        "#include <cuda_fp16.h>",
        "char quote = '\"'; // .incbin\n",
    ],
)
def test_the_same_words_elsewhere_forbid_nothing(source: str) -> None:
    assert forbidden_construct(source, confined=True) is None


def test_clocks_places_and_unknown_special_registers_are_told_once() -> None:
    ptx = """
        .reg .b32 %r<9>; .reg .b64 %rd<3>, %SP; .reg .pred %p<2>;
        mov.u32 %r1, %clock; mov.u32 %r2, %clock; mov.u64 %rd1, %globaltimer;
        mov.u32 %r3, %smid; mov.u32 %r4, %tid.x; mov.u32 %r5, %lanemask_lt; mov.u32 %r6, %mystery;
        // mov.u32 %r7, %pm0;
    """
    told = register_warnings(ptx)
    assert [text.split()[3].strip(":,") for text in told] == ["%clock", "%globaltimer", "%smid", "%mystery"]


def test_ordinary_registers_give_nothing_to_think_about() -> None:
    assert register_warnings(".reg .b32 %r<3>; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.y;") == ()


def test_host_calls_in_code_are_named_and_those_in_text_are_not() -> None:
    source = 'void go() { system("ls"); std :: thread t; /* fork() */ puts("getenv(x)"); my_system(1); }'
    named = [text.split()[3].strip(",") for text in host_call_warnings(source)]
    assert named == ["system", "std::thread"]


def test_libraries_that_run_on_the_host_are_told_from_those_for_kernels() -> None:
    assert host_only_library("#include <thrust/sort.h>") == "<thrust/sort.h>"
    assert host_only_library('#include "cublas_v2.h"') == "<cublas_v2.h>"
    assert host_only_library("#include <cub/block/block_reduce.cuh>\n// #include <thrust/sort.h>") is None
