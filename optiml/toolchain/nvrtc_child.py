"""The child in which NVRTC runs. It is confined before the first source arrives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cuda.bindings import nvrtc

from optiml.process import serve

Reply = tuple[dict[str, Any], Sequence[bytes]]


def handle(header: dict[str, Any], blobs: Sequence[memoryview]) -> Reply:
    """Answer one request: `version`, or `compile` (source, headers and flags in; PTX and cubin out)."""
    if header["op"] == "version":
        status, major, minor = nvrtc.nvrtcVersion()
        _, architectures = nvrtc.nvrtcGetSupportedArchs()
        ok = status == nvrtc.nvrtcResult.NVRTC_SUCCESS
        return {"version": f"{major}.{minor}", "ok": ok, "architectures": list(architectures)}, ()
    return _compile(header)


def _compile(header: dict[str, Any]) -> Reply:
    headers = header["headers"]
    _, program = nvrtc.nvrtcCreateProgram(
        header["source"].encode("utf-8"),
        header["name"].encode("utf-8"),
        len(headers),
        [text.encode("utf-8") for text in headers.values()],
        [name.encode("utf-8") for name in headers],
    )
    try:
        for name in header["instances"]:
            nvrtc.nvrtcAddNameExpression(program, name.encode("utf-8"))
        flags = [flag.encode("utf-8") for flag in header["flags"]]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        log = _read(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode("utf-8", "replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            return {"ok": False, "error": status.name, "log": log[: 1 << 20]}, ()
        lowered = {}
        for name in header["instances"]:
            found, symbol = nvrtc.nvrtcGetLoweredName(program, name.encode("utf-8"))
            if found == nvrtc.nvrtcResult.NVRTC_SUCCESS:
                lowered[name] = symbol.decode("ascii")
        ptx = _read(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).rstrip(b"\0")
        cubin = _read(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        return {"ok": True, "log": log[: 1 << 20], "lowered": lowered}, (ptx, cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(program: Any, size_of: Any, read: Any) -> bytes:
    _, size = size_of(program)
    buffer = bytearray(size)
    read(program, buffer)
    return bytes(buffer)


def main() -> None:
    nvrtc.nvrtcVersion()  # loads the library while it can still be read
    serve(handle)


if __name__ == "__main__":
    main()
