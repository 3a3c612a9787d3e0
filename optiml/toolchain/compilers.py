"""One compiler out of two: NVRTC for device code, nvcc for kernels that bring a launcher; none for PTX."""

from __future__ import annotations

from typing import Protocol

from optiml.records import Build, Kernel
from optiml.toolchain.nvrtc import CompileFailure
from optiml.toolchain.ptx_text import build_of_ptx


class CompilerLike(Protocol):
    """What either compiler offers."""

    @property
    def version(self) -> str: ...

    def compile(self, kernel: Kernel, arch: str) -> Build | CompileFailure: ...

    def close(self) -> None: ...


class Compilers:
    """Sends each kernel to the compiler that its host code asks for."""

    def __init__(self, device_code: CompilerLike, launchers: CompilerLike) -> None:
        self._device_code = device_code
        self._launchers = launchers

    @property
    def version(self) -> str:
        """Of both: what is cached holds for this pair."""
        return ", ".join(text for text in (self._device_code.version, self._launchers.version) if text)

    def compile(self, kernel: Kernel, arch: str) -> Build | CompileFailure:
        """Build `kernel` for one architecture, for example `sm_80`."""
        if kernel.language == "ptx" and kernel.launcher is None:
            return build_of_ptx(kernel, arch)
        chosen = self._device_code if kernel.launcher is None else self._launchers
        return chosen.compile(kernel, arch)

    def close(self) -> None:
        self._device_code.close()
        self._launchers.close()
