"""Compile kernels that bring a launcher: host code, so nvcc and a host compiler, both inside a sandbox.

The build holds the PTX and cubin that nvcc made for the very launches the host code names, the host code as a shared
library without a CUDA runtime, and the recorder program that will call it (`record`).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from optiml.codec import digest, kernel_id, normalised_source
from optiml.errors import InvalidInput, SetupError, ToolFailed, WorkerTimeout
from optiml.process import Finished, run
from optiml.records import Build, BuildReport, Kernel
from optiml.sandbox import Policy
from optiml.scratch import ScratchFolders, remove_folder
from optiml.toolchain.nvrtc import (
    ARCH,
    MAX_LOG_BYTES,
    SOURCE_NAME,
    CompileFailure,
    defines,
    ptx_entries,
    resources_of,
    without_folders,
)
from optiml.toolchain.scan import forbidden_construct, host_only_library

INSTALL = "pip install 'optiml[toolchain]' and a host compiler (apt-get install g++)"
RECORDER_SOURCE = Path(__file__).parent / "recorder" / "recorder.c"
LIBRARY_NAME, RECORDER_NAME = "launcher.so", "recorder"
MAX_OUTPUT_BYTES = 256 << 20  # of one file that a compiler writes
RECENT_BUILDS = 8  # equal sources with several launchers are built once
_PROBE = 'extern "C" __global__ void k(float* x) { x[0] = 1.0f; }\nextern "C" void f(float* x) { k<<<1, 1>>>(x); }\n'
_folders = ScratchFolders()


@dataclass(frozen=True, kw_only=True)
class Toolkit:
    """An nvcc and the folder that holds its headers and its other programs."""

    nvcc: Path
    root: Path

    @property
    def identity(self) -> str:
        """Changes when the compiler does; costs one stat."""
        status = self.nvcc.stat()
        return f"nvcc {status.st_size:x}-{status.st_mtime_ns:x}"


def find_toolkit() -> Toolkit | None:
    """The nvcc on PATH, or that of the `toolchain` extra."""
    candidates = []
    on_path = shutil.which("nvcc")
    if on_path is not None:
        candidates.append(Path(on_path).resolve())
        candidates += _named_in_script(candidates[0])
    spec = find_spec("nvidia")
    for item in (spec.submodule_search_locations or ()) if spec else ():
        candidates.append(Path(item) / "cu13" / "bin" / "nvcc")
    for nvcc in candidates:
        if nvcc.is_file() and (nvcc.parent / "nvcc.profile").is_file():
            return Toolkit(nvcc=nvcc, root=nvcc.parent.parent)
    return None


def _named_in_script(path: Path) -> list[Path]:
    """Where a small shell script in nvcc's place leads."""
    if path.stat().st_size > 4096:
        return []
    text = path.read_bytes().decode("utf-8", "replace")
    return [Path(found).resolve() for found in re.findall(r"/[\w./+-]*/nvcc\b", text)]


class NvccCompiler:
    """nvcc for launchers; one compile at a time.

    A missing or unfit tool is a `CompileFailure` without a reason: it says nothing of the kernel and is not cached.
    """

    def __init__(self, *, timeout_s: float = 60.0, memory_bytes: int = 4 << 30) -> None:
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._toolkit = find_toolkit()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._recorder: bytes | None = None
        self._recent: OrderedDict[str, Build] = OrderedDict()

    @property
    def version(self) -> str:
        """Of nvcc and of the recorder; empty where there is no nvcc."""
        if self._toolkit is None:
            return ""
        return f"{self._toolkit.identity} recorder {hashlib.sha256(RECORDER_SOURCE.read_bytes()).hexdigest()[:12]}"

    def compile(self, kernel: Kernel, arch: str) -> Build | CompileFailure:
        """Build a kernel with a launcher for one architecture, for example `sm_80`.

        Raises:
            InvalidInput: `arch` is not the name of an architecture.
        """
        if ARCH.fullmatch(arch) is None:
            raise InvalidInput(f"{arch[:40]!r} is no architecture; give one such as sm_80")
        source = normalised_source(kernel.source)
        why = forbidden_construct(source, confined=True)
        if why is not None:
            return CompileFailure(reason="forbidden_source", detail=why)
        library = host_only_library(source)
        if library is not None:
            return CompileFailure(
                reason=None,
                detail=f"the launcher includes {library}, whose algorithms launch kernels of their own and read "
                "results back, which the recorder cannot hold: write the kernel out",
            )
        if self._toolkit is None:
            return CompileFailure(
                reason=None,
                detail=f"a launcher needs nvcc, which was not found: {INSTALL}, or give the kernel as launches",
            )
        if shutil.which("g++") is None:
            return CompileFailure(
                reason=None, detail="a launcher needs a host compiler, and there is no g++ (apt-get install g++)"
            )
        try:
            with self._lock:
                build = self._recent_or_new(self._toolkit, kernel, source, arch)
        except SetupError as error:
            return CompileFailure(reason=None, detail=f"a launcher cannot be built here: {error}")
        return build if isinstance(build, CompileFailure) else replace(build, kernel_id=kernel_id(kernel))

    def _recent_or_new(self, toolkit: Toolkit, kernel: Kernel, source: str, arch: str) -> Build | CompileFailure:
        key = digest([source, list(kernel.flags), dict(kernel.params), arch])
        if key in self._recent:
            return self._recent[key]
        build = self._compile(toolkit, kernel, source, arch)
        if isinstance(build, Build):
            self._recent[key] = build
            while len(self._recent) > RECENT_BUILDS:
                self._recent.popitem(last=False)
        return build

    def close(self) -> None:
        """End a compile that is running; the kernel is not blamed for it (WorkerDied, cancelled)."""
        self._closed.set()

    def _compile(self, toolkit: Toolkit, kernel: Kernel, source: str, arch: str) -> Build | CompileFailure:
        started = time.monotonic()
        options = [
            f"-arch={arch}",
            *(() if any(flag.startswith("-std") for flag in kernel.flags) else ("-std=c++17",)),
            "-lineinfo",
            *("-Xptxas", "-v", "--keep", "-shared", "-cudart", "none", "-Xcompiler", "-fPIC"),
            *kernel.flags,
            *defines(kernel.params),
            *(SOURCE_NAME, "-o", LIBRARY_NAME),
        ]
        folder = _folders.new()
        try:
            _write(folder, SOURCE_NAME, source.encode("utf-8"))
            finished = self._nvcc(toolkit, folder, options)
            raw = _text(finished)
            if finished.exit_code != 0:
                return self._failure(toolkit, raw, finished.truncated)
            stem = SOURCE_NAME.removesuffix(".cu")
            ptx = without_folders(_read(folder, f"{stem}.ptx").decode("utf-8"))
            cubin = next((_read(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(".cubin")), b"")
            library = _read(folder, LIBRARY_NAME)
        except WorkerTimeout:
            return CompileFailure(
                reason="resource_limit", detail=f"the compiler was stopped after {self._timeout_s:g} s"
            )
        finally:
            remove_folder(folder)
        if self._recorder is None:
            self._recorder = self._built_recorder(toolkit)
        resources = resources_of(raw)
        entries = ptx_entries(ptx)
        report = BuildReport(
            arch=arch,
            compiler=_version(ptx),
            registers_per_thread=max((item.registers_per_thread for item in resources.values()), default=None),
            shared_bytes_per_block=max((item.shared_bytes_per_block for item in resources.values()), default=None),
            stack_bytes=max((item.stack_bytes for item in resources.values()), default=None),
            spill_bytes=max((item.spill_bytes for item in resources.values()), default=None),
            log=_readable_log(raw),
            seconds=round(time.monotonic() - started, 4),
        )
        return Build(
            kernel_id=kernel_id(kernel),
            report=report,
            ptx=ptx,
            cubin=cubin,
            entries={symbol: symbol for symbol in entries},
            resources=resources,
            launcher_library=library,
            recorder=self._recorder,
        )

    def _nvcc(self, toolkit: Toolkit, folder: str, options: list[str]) -> Finished:
        policy = Policy(
            readable=(str(toolkit.root),),
            scratch=folder,
            processes=True,
            cpu_s=int(self._timeout_s) + 1,
            address_space_bytes=self._memory_bytes,
            file_size_bytes=MAX_OUTPUT_BYTES,
            task_limit=64,
        )
        return run(
            [str(toolkit.nvcc), *options],
            policy=policy,
            timeout_s=self._timeout_s,
            cancelled=self._closed,
            confined=True,
            stop_at_cap=True,
            # By its full name the folder may lie below one that access(2), which gcc asks, denies to the child's user.
            environment={"TMPDIR": "."},
        )

    def _built_recorder(self, toolkit: Toolkit) -> bytes:
        folder = _folders.new()
        try:
            _write(folder, "recorder.c", RECORDER_SOURCE.read_bytes())
            options = ["-O1", "-cudart", "none", "-Xcompiler", "-rdynamic", "recorder.c", "-o", RECORDER_NAME, "-ldl"]
            finished = self._nvcc(toolkit, folder, options)
            if finished.exit_code != 0:
                raise SetupError(
                    f"the recorder does not build here: {_first_error(_text(finished))}", code="no_compiler"
                )
            return _read(folder, RECORDER_NAME)
        finally:
            remove_folder(folder)

    def _failure(self, toolkit: Toolkit, raw: str, truncated: bool) -> CompileFailure:
        if truncated:
            return CompileFailure(reason="resource_limit", detail="the compiler printed without end and was stopped")
        if re.search(r"died due to signal|File size limit|memory exhausted|out of memory|Killed", raw):
            return CompileFailure(
                reason="resource_limit", detail="the compiler ran out of its time, memory or file size"
            )
        log = _readable_log(raw)
        opened = re.search(r"fatal error: ([^\s:]+): ", raw)
        if opened is not None and (opened.group(1).startswith(("/", "~")) or ".." in opened.group(1).split("/")):
            return CompileFailure(
                reason="forbidden_source", detail="only the CUDA headers may be included, by their own names"
            )
        first = re.search(_HEAD.pattern + r"(?:catastrophic |fatal )?error ?(?:#[\w-]+)?: ?(.*)", log, re.MULTILINE)
        if first is None and (unfit := self._unfit(toolkit)) is not None:
            return CompileFailure(reason=None, detail=unfit)
        if first is None:
            detail = log.splitlines()[0] if log else "nvcc refused the source without a word about it"
            return CompileFailure(reason="compile_failed", detail=detail[:500], log=log)
        return CompileFailure(reason="compile_failed", detail=f"line {first[1] or first[2]}: {first[3]}"[:500], log=log)

    def _unfit(self, toolkit: Toolkit) -> str | None:
        """Why this nvcc builds nothing at all here, or None if it does."""
        folder = _folders.new()
        try:
            _write(folder, SOURCE_NAME, _PROBE.encode())
            finished = self._nvcc(toolkit, folder, ["-c", SOURCE_NAME])
        except WorkerTimeout:
            return None
        except ToolFailed as error:
            return f"nvcc cannot be run here: {error}"
        finally:
            remove_folder(folder)
        if finished.exit_code == 0:
            return None
        return f"nvcc and the host compiler do not work together here: {_first_error(_text(finished))}: {INSTALL}"


_HEAD = re.compile(rf"^{re.escape(SOURCE_NAME)}(?:\((\d+)\)|:(\d+):\d+): ")
_ABSOLUTE = re.compile(r'(?<![\w<"/])/[\w.-]+/[\w.-]+')


def _readable_log(raw: str) -> str:
    """The diagnostics about the caller's own text. Quoted lines and notes about other files are dropped."""
    kept = [line.rstrip() for line in raw.replace("\0", "").splitlines() if _HEAD.match(line)]
    kept = [line for line in kept if not _ABSOLUTE.search(line)]
    return "\n".join(kept).encode("utf-8")[:MAX_LOG_BYTES].decode("utf-8", "ignore")


def _first_error(raw: str) -> str:
    """The first complaint of a compiler about text of our own, without paths."""
    for line in raw.splitlines():
        match = re.search(r"(?:error|fatal)\b[^:]*: ?(.*)|(\S+: not found|unsupported .*)", line)
        if match is not None:
            return re.sub(r"(?:/[\w.+-]+)+", "…", (match.group(1) or match.group(2) or line))[:200]
    return "no reason was given"


def _version(ptx: str) -> str:
    match = re.search(r"release (\d+\.\d+)", ptx)
    return f"nvcc {match.group(1)}" if match else "nvcc"


def _text(finished: Finished) -> str:
    return (finished.stderr + b"\n" + finished.stdout).decode("utf-8", "replace")


def _write(folder: str, name: str, content: bytes) -> None:
    path = Path(folder) / name
    path.write_bytes(content)
    path.chmod(0o644)


def _read(folder: str, name: str) -> bytes:
    """A file that a compiler wrote: never through a link."""
    try:
        descriptor = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise ToolFailed(f"nvcc did not write {name}") from error
    with os.fdopen(descriptor, "rb") as file:
        return file.read(MAX_OUTPUT_BYTES)
