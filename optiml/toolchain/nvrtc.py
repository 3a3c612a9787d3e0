"""Compile CUDA C++ with NVRTC: no host compiler, no toolkit, no GPU.

NVRTC runs in a warm, sandboxed child (`nvrtc_child`) that sees the CUDA headers and nothing else. A compile that
outlives its time or memory costs that child, not us.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from optiml.codec import kernel_id, normalised_source
from optiml.errors import InvalidInput, SetupError, WorkerDied, WorkerTimeout
from optiml.process import Worker
from optiml.records import Build, BuildReport, Kernel, Resources, Scalar
from optiml.sandbox import Policy
from optiml.toolchain.headers import PRELUDE_NAME, VIRTUAL
from optiml.toolchain.scan import forbidden_construct

LOG = logging.getLogger(__name__)
SOURCE_NAME = "kernel.cu"
MAX_LOG_BYTES = 2048
ARCH = re.compile(r"sm_(\d{2,3})a?")
_INSTALL = "pip install nvidia-cuda-nvrtc cuda-bindings nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl"

FailureReason = Literal["forbidden_source", "compile_failed", "resource_limit", "bad_launch"]


@dataclass(frozen=True, kw_only=True)
class CompileFailure:
    """A kernel that did not build, with the reason its verdict will give; None blames this machine, not the kernel."""

    reason: FailureReason | None
    detail: str
    log: str = ""


def header_folders() -> tuple[Path, ...]:
    """Include folders of the CUDA headers: those that pip installed, and a toolkit's where pip's lack a part.

    Raises:
        SetupError: code `no_compiler`, with the command that installs them.
    """
    spec = find_spec("nvidia")
    roots = [Path(item) / "cu13" / "include" for item in (spec.submodule_search_locations or ())] if spec else []
    toolkit = Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_ROOT") or "/usr/local/cuda") / "include"
    for candidates in (roots, [*roots, toolkit]):
        found = tuple(folder for root in candidates for folder in (root, root / "cccl") if folder.is_dir())
        if all(any((folder / name).is_file() for folder in found) for name in ("cuda_fp16.h", "nv/target")):
            return found
    raise SetupError(f"the CUDA headers were not found: {_INSTALL}", code="no_compiler")


class Compiler:
    """NVRTC behind a warm child. One compile at a time; safe to call from several threads."""

    def __init__(self, *, timeout_s: float = 30.0, memory_bytes: int = 4 << 30) -> None:
        if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
            raise SetupError(f"NVRTC was not found: {_INSTALL}", code="no_compiler")
        self._timeout_s = timeout_s
        folders = header_folders()
        self._include_flags = tuple(f"-I{folder}" for folder in folders)
        self._folders = tuple(str(folder) for folder in folders)
        self._worker = Worker(
            "optiml.toolchain.nvrtc_child",
            policy=Policy(readable=self._folders, address_space_bytes=memory_bytes),
        )
        self._version: str | None = None
        self._architectures: tuple[int, ...] = ()

    @property
    def version(self) -> str:
        """For example `nvrtc 13.5`; starts the child on first use."""
        if self._version is None:
            reply, _ = self._worker.call({"op": "version"}, timeout_s=self._timeout_s)
            self._architectures = tuple(reply["architectures"])
            self._version = f"nvrtc {reply['version']}"
        return self._version

    def compile(self, kernel: Kernel, arch: str) -> Build | CompileFailure:
        """Build `kernel` for one architecture, for example `sm_80`.

        Raises:
            SetupError: the compiler itself cannot run here.
        """
        started = time.monotonic()
        source = normalised_source(kernel.source)
        version = self.version
        match = ARCH.fullmatch(arch)
        if match is None or int(match.group(1)) not in self._architectures:
            known = ", ".join(f"sm_{number}" for number in self._architectures)
            raise InvalidInput(f"{arch[:40]!r} is no architecture that this compiler knows; choose from {known}")
        confined = self._worker.layers.files
        why = forbidden_construct(source, confined=confined)
        if why is not None:
            return CompileFailure(reason="forbidden_source", detail=why)
        if not confined:
            LOG.warning("the compiler runs without file confinement on this machine (optiml doctor says more)")
        wanted = tuple(dict.fromkeys(launch.kernel for launch in kernel.launches))
        header = {
            "op": "compile",
            "source": source,
            "name": SOURCE_NAME,
            "headers": dict(VIRTUAL),
            "flags": [
                f"--gpu-architecture={arch}",
                "-lineinfo",
                "--ptxas-options=-v",
                f"--pre-include={PRELUDE_NAME}",
                "--diag-suppress=47,222",  # repeated limits macros; INFINITY overflows on purpose
                *(() if any(flag.startswith("-std") for flag in kernel.flags) else ("-std=c++17",)),
                *kernel.flags,
                *defines(kernel.params),
                *self._include_flags,
            ],
            "instances": [name for name in wanted if "<" in name],
        }
        try:
            reply, blobs = self._worker.call(header, timeout_s=self._timeout_s)
        except WorkerTimeout:
            return CompileFailure(
                reason="resource_limit", detail=f"the compiler was stopped after {self._timeout_s:g} s"
            )
        except WorkerDied as error:
            if error.cancelled:  # we are closing: the source is not to blame
                raise
            return CompileFailure(
                reason="resource_limit", detail="the compiler ended without an answer: out of memory, or it crashed"
            )
        log = _readable_log(reply["log"])
        if not reply["ok"]:
            return _failure(reply, log)
        ptx = without_folders(bytes(blobs[0]).decode("utf-8"))
        resources = resources_of(reply["log"])
        entries = _entries(wanted, ptx, reply["lowered"])
        if isinstance(entries, CompileFailure):
            return entries
        used = [resources[symbol] for symbol in entries.values() if symbol in resources]
        report = BuildReport(
            arch=arch,
            compiler=version,
            registers_per_thread=max((item.registers_per_thread for item in used), default=None),
            shared_bytes_per_block=max((item.shared_bytes_per_block for item in used), default=None),
            stack_bytes=max((item.stack_bytes for item in used), default=None),
            spill_bytes=max((item.spill_bytes for item in used), default=None),
            log=log,
            seconds=round(time.monotonic() - started, 4),
        )
        return Build(
            kernel_id=kernel_id(kernel),
            report=report,
            ptx=ptx,
            cubin=bytes(blobs[1]),
            entries=entries,
            resources=resources,
        )

    def close(self) -> None:
        self._worker.close()


def defines(params: Mapping[str, Scalar]) -> list[str]:
    """Compiler options that make each param a macro."""
    return [f"-D{name}={int(value) if isinstance(value, bool) else value!r}" for name, value in params.items()]


def _failure(reply: Mapping[str, object], log: str) -> CompileFailure:
    if reply["error"] == "NVRTC_ERROR_OUT_OF_MEMORY":
        return CompileFailure(reason="resource_limit", detail="the compiler ran out of memory", log=log)
    raw = str(reply["log"])
    opened = re.search(r'(?:could not|cannot) open source file "([^"]*)"', raw)
    if opened is not None and (opened.group(1).startswith(("/", "~")) or ".." in opened.group(1).split("/")):
        return CompileFailure(
            reason="forbidden_source", detail="only the CUDA headers may be included, by their own names"
        )
    first = re.search(rf"{re.escape(SOURCE_NAME)}\((\d+)\): (?:catastrophic )?error: ?([^\n]*)", log)
    detail = (
        f"line {first.group(1)}: {first.group(2)}" if first else (log.strip().splitlines() or [str(reply["error"])])[0]
    )
    return CompileFailure(reason="compile_failed", detail=detail[:500], log=log)


def _readable_log(raw: str) -> str:
    """Diagnostics about the caller's own text; lines about any other file are dropped, and so are ptxas figures."""
    kept, keep = [], False
    for line in raw.replace("\0", "").splitlines():
        head = re.match(r"([^\s(]+)\((\d+)\): ", line)
        if head is not None:
            keep = head.group(1) == SOURCE_NAME
        elif line.startswith(("ptxas", "Remark:", "At end of source", "In file included")) or "command-line" in line:
            keep = line.startswith(("ptxas error", "ptxas fatal"))
        elif re.match(r"\s+(instantiation of|detected during|[\"'].*file|included from)", line) and "/" in line:
            continue
        if keep and line.strip() and not re.search(r'(?<![\w<"/])/[\w.-]+/[\w.-]+', line):
            kept.append(line.rstrip())
    return "\n".join(kept).encode("utf-8")[:MAX_LOG_BYTES].decode("utf-8", "ignore")


_FUNCTION = re.compile(r"Compiling entry function '([^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+) bytes smem")


def resources_of(log: str) -> dict[str, Resources]:
    """What `ptxas -v` said of each kernel, by symbol."""
    found: dict[str, Resources] = {}
    name, stack, spill = None, 0, 0
    for line in log.splitlines():
        if match := _FUNCTION.search(line):
            name, stack, spill = match.group(1), 0, 0
        elif name is not None and (match := _STACK.search(line)):
            stack, spill = int(match.group(1)), int(match.group(2)) + int(match.group(3))
        elif name is not None and (match := _USED.search(line)):
            shared = _SMEM.search(line)
            found[name] = Resources(
                registers_per_thread=int(match.group(1)),
                shared_bytes_per_block=int(shared.group(1)) if shared else 0,
                stack_bytes=stack,
                spill_bytes=spill,
            )
            name = None
    return found


def without_folders(ptx: str) -> str:
    """The PTX with the bare names of its source files: where they lay on this machine concerns nobody."""
    return re.sub(r'(\.file\s+\d+\s+)"[^"]*/([^"/]*)"', r'\1"\2"', ptx)


def ptx_entries(ptx: str) -> list[str]:
    """Symbols of the kernels in a PTX text, in order."""
    return re.findall(r"\.entry\s+([\w$.]+)\s*\(", ptx)


def _entries(wanted: Sequence[str], ptx: str, lowered: Mapping[str, str]) -> dict[str, str] | CompileFailure:
    """Symbol of every kernel in the launch plan: exact, by template instance, or the one C++ name that matches."""
    symbols = ptx_entries(ptx)
    entries: dict[str, str] = {}
    for name in wanted:
        if name in lowered:
            entries[name] = lowered[name]
            continue
        matches = [name] if name in symbols else [symbol for symbol in symbols if _plain_name(symbol) == name]
        if len(matches) != 1:
            listed = ", ".join(dict.fromkeys(_plain_name(symbol) for symbol in symbols)) or "none"
            what = "is not in the build" if not matches else "is ambiguous"
            return CompileFailure(reason="bad_launch", detail=f"kernel {name!r} {what}; kernels there: {listed}"[:500])
        entries[name] = matches[0]
    return entries


def _plain_name(symbol: str) -> str:
    """The unqualified name inside an Itanium-mangled symbol; other symbols are names already."""
    match = re.match(r"_ZN?(\d)", symbol)
    if match is None:
        return symbol
    position, name = match.start(1), symbol
    while digits := re.match(r"\d+", symbol[position:]):
        start = position + digits.end()
        name = symbol[start : start + int(digits.group(0))]
        position = start + int(digits.group(0))
    return name
