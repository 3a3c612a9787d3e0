"""Kernels that are PTX already: what Triton, Numba or another compiler wrote."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from optiml.codec import kernel_id
from optiml.errors import PtxSyntaxError
from optiml.ptx import parse
from optiml.records import Build, BuildReport, Kernel
from optiml.toolchain.nvrtc import CompileFailure

_TARGET = re.compile(r"sm_(\d+)([af]?)$")


def build_of_ptx(kernel: Kernel, arch: str) -> Build | CompileFailure:
    """A build whose text is the kernel's own; its binary is the text too, which a driver compiles when it loads it.

    Nothing is known of registers and shared memory per block beyond what the text declares.

    Args:
        arch: the device's architecture, for example `sm_80`; the text's `.target` must run on it.
    """
    started = time.monotonic()
    text = kernel.source.replace("\r\n", "\n").lstrip("\ufeff")
    try:
        module = parse(text)
    except PtxSyntaxError as error:
        return CompileFailure(reason="compile_failed", detail=str(error)[:500])
    why = _unfit(module.target, arch)
    if why is not None:
        return CompileFailure(reason="compile_failed", detail=why)
    entries: dict[str, str] = {}
    for wanted in dict.fromkeys(launch.kernel for launch in kernel.launches):
        if wanted not in module.kernels:
            return CompileFailure(reason="bad_launch", detail=_missing(wanted, module.kernels))
        entries[wanted] = wanted
    shared = max((module.kernels[name].static_shared_bytes for name in entries), default=None)
    report = BuildReport(
        arch=arch,
        compiler=_written_by(text),
        registers_per_thread=None,
        shared_bytes_per_block=shared,
        stack_bytes=None,
        spill_bytes=None,
        log="",
        seconds=round(time.monotonic() - started, 4),
    )
    return Build(
        kernel_id=kernel_id(kernel),
        report=report,
        ptx=text,
        cubin=text.encode("utf-8") + b"\0",
        entries=entries,
        resources={},
    )


def _unfit(target: str, arch: str) -> str | None:
    """Why code for `target` does not run on `arch`."""
    wanted, here = _TARGET.search(target), _TARGET.search(arch)
    if wanted is None or here is None:
        return f"the text names no .target that is known: {target[:40]!r}"
    if int(wanted[1]) > int(here[1]) or (wanted[2] == "a" and int(wanted[1]) != int(here[1])):
        return f"the text is for {target}, which does not run on {arch}"
    return None


def _missing(wanted: str, known: Mapping[str, object]) -> str:
    return f"the text has no kernel {wanted[:60]!r}; its kernels are {', '.join(known) or 'none'}"


def _written_by(text: str) -> str:
    """The compiler that the text names in its first lines, else `ptx` and the version of the language."""
    head = "\n".join(text.splitlines()[:16])
    named = re.search(r"^//.*?\b(NVIDIA NVVM Compiler|LLVM NVPTX Back-End)\b", head, re.MULTILINE)
    version = re.search(r"^\s*\.version\s+([\d.]+)", text, re.MULTILINE)
    return f"{named[1] if named else 'ptx'} (PTX {version[1] if version else '?'})"
