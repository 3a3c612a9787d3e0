"""nvcc in its sandbox: what a hostile source can make it read, take or say."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from test_launchers import needs_nvcc

from optiml.records import Build, Kernel
from optiml.scratch import ScratchFolders
from optiml.toolchain import nvcc
from optiml.toolchain.nvcc import NvccCompiler, Toolkit
from optiml.toolchain.nvrtc import CompileFailure

CODE = """
extern "C" __global__ void relu(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = fmaxf(x[i], 0.0f);
}
extern "C" void go(const float* x, float* y, int n, cudaStream_t s) { relu<<<(n + 255) / 256, 256, 0, s>>>(x, y, n); }
"""


def compiled(source: str, *, timeout_s: float = 60.0) -> Build | CompileFailure:
    return NvccCompiler(timeout_s=timeout_s).compile(Kernel(source=source, launcher="go"), "sm_80")


def failed(source: str, *, timeout_s: float = 60.0) -> CompileFailure:
    answer = compiled(source, timeout_s=timeout_s)
    assert isinstance(answer, CompileFailure)
    return answer


@needs_nvcc
@pytest.mark.parametrize(
    "line",
    [
        '#include "/etc/passwd"',
        '#define P "/etc/passwd"\n#include P',
        "#define P <../../../../../../../../etc/passwd>\n#include P",
        '#define A(x) asm(x)\nA(".incbin \\"/etc/passwd\\"");',
        '#if __has_include("/etc/passwd")\n#error there\n#else\n#error unknown\n#endif',
        '#pragma GCC dependency "/etc/passwd"\n#error unknown',
        "#include <thrust/sort.h>",
    ],
)
def test_no_text_and_no_path_of_this_machine_is_read_or_told(line: str) -> None:
    failure = failed(f"{line}\n{CODE}")
    told = failure.detail + failure.log
    assert "root:" not in told
    assert "/etc" not in told
    assert "there" not in failure.detail.split()
    assert str(nvcc.find_toolkit().root) not in told  # type: ignore[union-attr]


@needs_nvcc
def test_a_mistake_in_host_code_is_told_with_its_line_and_without_quoting() -> None:
    failure = failed(f"#include <vector>\n{CODE}\nstd::vector<int> f() {{ return missing_name; }}\n")
    assert failure.reason == "compile_failed"
    assert failure.detail.startswith("line 9: ")
    assert "missing_name" in failure.detail


@needs_nvcc
@pytest.mark.parametrize(
    "bomb",
    [
        "#include __FILE__\n#include __FILE__\n",
        "template <int D, long P> struct F { static constexpr long v = F<D-1, 2*P>::v + F<D-1, 2*P+1>::v; };\n"
        "template <long P> struct F<0, P> { static constexpr long v = P; };\nlong all = F<26, 1>::v;\n",
    ],
)
def test_a_compile_bomb_is_stopped_and_leaves_nothing_behind(bomb: str) -> None:
    failure = failed(bomb + CODE, timeout_s=2.0)
    assert failure.reason in ("resource_limit", "compile_failed")
    assert os.listdir(nvcc._folders._folder) == ["lock"]


@needs_nvcc
def test_a_temporary_folder_that_is_private_to_us_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(nvcc, "_folders", ScratchFolders())
    assert failed(f"#error reached\n{CODE}").detail == "line 1: #error reached"


@needs_nvcc
def test_flags_from_the_environment_do_not_reach_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS"):
        monkeypatch.setenv(name, "--no-such-flag")
    assert failed(f"#error reached\n{CODE}").detail == "line 1: #error reached"


@needs_nvcc
@pytest.mark.parametrize(
    "complaint",
    [
        "#error -- unsupported GNU version! gcc versions later than 9 are not supported!",
        "nvcc fatal   : Failed to preprocess host compiler properties.",
        "sh: 1: cicc: not found",
    ],
)
def test_a_compiler_that_does_not_work_here_is_not_the_kernels_fault(
    complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chmod(tmp_path, 0o755)
    program = tmp_path / "bin" / "nvcc"
    program.parent.mkdir(mode=0o755)
    program.write_text(f"#!/bin/sh\necho '{complaint}' >&2\nexit 1\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(nvcc, "find_toolkit", lambda: Toolkit(nvcc=program, root=tmp_path))
    failure = failed(CODE)
    assert failure.reason is None
    assert "do not work together here" in failure.detail
    assert str(tmp_path) not in failure.detail
