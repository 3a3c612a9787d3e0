"""Builds by NVRTC in its sandboxed child."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from optiml.device.plan import entry_parameters
from optiml.errors import InvalidInput
from optiml.records import Build, Kernel, Launch
from optiml.toolchain.nvrtc import CompileFailure, Compiler
from optiml.toolchain.scan import forbidden_construct, without_comments_and_strings

RELU = """extern "C" __global__ void relu(const float* __restrict__ x, float* y, int n) {
    __shared__ float s[64];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    s[threadIdx.x % 64] = i < n ? x[i] : -INFINITY;
    if (i < n) y[i] = fmaxf(s[threadIdx.x % 64], 0.0f);
}
"""


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    made = Compiler(timeout_s=20)
    yield made
    made.close()


def kernel(source: str, *names: str) -> Kernel:
    return Kernel(source=source, launches=tuple(Launch(kernel=n, grid=(1,), block=(1,), args=()) for n in names))


def built(compiler: Compiler, source: str, *names: str) -> Build:
    build = compiler.compile(kernel(source, *names), "sm_80")
    assert isinstance(build, Build), build
    return build


def failed(compiler: Compiler, source: str, *names: str) -> CompileFailure:
    failure = compiler.compile(kernel(source, *(names or ("k",))), "sm_80")
    assert isinstance(failure, CompileFailure)
    return failure


def test_a_build_carries_ptx_cubin_and_what_ptxas_says(compiler: Compiler) -> None:
    build = built(compiler, RELU, "relu")
    assert ".entry relu" in build.ptx
    assert build.cubin[:4] == b"\x7fELF"
    assert build.report.registers_per_thread is not None
    assert 4 <= build.report.registers_per_thread <= 40
    assert (build.report.shared_bytes_per_block, build.report.spill_bytes) == (256, 0)
    assert [p.type for p in entry_parameters(build.ptx)["relu"]] == ["u64", "u64", "u32"]


def test_the_ptx_names_no_folder_of_this_machine(compiler: Compiler) -> None:
    assert "/" not in "".join(line for line in built(compiler, RELU, "relu").ptx.splitlines() if ".file" in line)


@pytest.mark.parametrize("arch", ["sm_999", "sm_80 -o /tmp/x", "compute_80", ""])
def test_an_architecture_that_there_is_not_is_the_callers_mistake(compiler: Compiler, arch: str) -> None:
    with pytest.raises(InvalidInput, match="sm_80"):
        compiler.compile(kernel(RELU, "relu"), arch)


def test_template_instances_and_plain_cpp_names_are_found(compiler: Compiler) -> None:
    source = "template <typename T> __global__ void t(T* x) { *x = 1; }\n"
    source += "namespace a { __global__ void q(int* x) { *x = 2; } }"
    entries = built(compiler, source, "t<float>", "q").entries
    assert entries == {"t<float>": "_Z1tIfEvPT_", "q": "_ZN1a1qEPi"}


def test_params_are_compiled_in(compiler: Compiler) -> None:
    source = 'extern "C" __global__ void k(float* x) { x[0] = SCALE + N + FLAG; }'
    record = dataclasses.replace(kernel(source, "k"), params={"SCALE": 0.5, "N": -3, "FLAG": True})
    build = compiler.compile(record, "sm_80")
    assert isinstance(build, Build)
    assert "-1077936128" in build.ptx  # the bits of 0.5 - 3 + 1 = -1.5


def test_headers_that_nvcc_users_include_by_habit_are_there(compiler: Compiler) -> None:
    source = """#include <cuda_runtime.h>
#include <cstdio>
#include <stdint.h>
#include <cmath>
#include <float.h>
#include <climits>
#include <cuda_fp16.h>
extern "C" __global__ void k(float* x, uint64_t n) {
    x[0] = FLT_MAX + INT_MAX + __half2float(__float2half(x[1])) + (float)n + (float)M_PI; }"""
    built(compiler, source, "k")


def test_a_compile_error_names_the_line_and_the_words_of_the_compiler(compiler: Compiler) -> None:
    failure = failed(compiler, '\n\nextern "C" __global__ void k() { int x }\n')
    assert failure.reason == "compile_failed"
    assert failure.detail.startswith("line 3:")
    assert len(failure.log) <= 2048


def test_a_missing_kernel_lists_those_there_are(compiler: Compiler) -> None:
    failure = failed(compiler, RELU, "rleu")
    assert failure.reason == "bad_launch"
    assert "relu" in failure.detail


@pytest.mark.parametrize(
    "include",
    [
        '#include "/etc/passwd"',
        "#include </etc/passwd>",
        '#include "../../etc/passwd"',
        '#define P "/etc/passwd"\n#include P',
        '#inc\\\nlude "/etc/passwd"',
        '%:include "/etc/passwd"',
        '/* */ # /* */ include "/etc/passwd"',
        'asm(".incbin \\"/etc/passwd\\"");',
        '#embed "/etc/passwd"',
    ],
)
def test_nothing_outside_the_cuda_headers_is_read_or_quoted(compiler: Compiler, include: str) -> None:
    failure = failed(compiler, f'{include}\nextern "C" __global__ void k() {{}}\n')
    assert failure.reason == "forbidden_source"
    assert "root" not in failure.detail + failure.log
    assert "/etc" not in failure.detail + failure.log


def test_words_in_comments_and_strings_forbid_nothing() -> None:
    source = '// #include "/etc/passwd" .incbin\n/* #embed */ const char* s = "#include </etc/passwd>";\n'
    assert forbidden_construct(source, confined=False) is None
    assert "passwd" not in without_comments_and_strings(source)


def test_a_compile_bomb_ends_as_a_resource_limit_and_the_next_compile_works() -> None:
    bomb = """template <int N> struct B { static constexpr long long v = B<N - 1>::v + (B<N - 1>::v ^ N); };
template <> struct B<0> { static constexpr long long v = 1; };
constexpr long long spin() { long long s = 0; for (long long i = 0; i < 10000000000LL; ++i) s += i; return s; }
template <long long D, int P> struct F { static constexpr long long v = F<D-1, 2*P>::v + F<D-1, 2*P+1>::v; };
template <int P> struct F<0, P> { static constexpr long long v = P; };
extern "C" __global__ void k(long long* x) { x[0] = F<24, 1>::v; }"""
    compiler = Compiler(timeout_s=2)
    try:
        assert failed(compiler, bomb).reason == "resource_limit"
        built(compiler, RELU, "relu")
    finally:
        compiler.close()
