"""Compiles the corpus with NVRTC and launches kernels on the interpreter, for the tests in this folder."""

from __future__ import annotations

import contextlib
import functools
import lzma
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import nvrtc

from optiml.errors import Fault, KernelFault
from optiml.ptx import LaunchResult, Limits, Machine, Module, engine_name, parse
from optiml.ptx.native import splitting
from optiml.toolchain.nvrtc import header_folders

DATA = Path(__file__).parent / "data"
INCLUDES = tuple(f"-I{folder}" for folder in header_folders())
NO_LIMITS = Limits()
CHECKS = frozenset({"race", "uninitialised"})

# What the corpus needs of the C library headers; NVRTC has none.
HEADERS = {
    "float.h": "#define FLT_MAX 3.402823466e+38F\n",
    "stdint.h": "#include <cuda/std/cstdint>\nusing cuda::std::uint32_t;\n",
    "stdio.h": 'extern "C" __device__ int printf(const char*, ...);\n',
    "assert.h": 'extern "C" __device__ void __assertfail(const char*, const char*, unsigned, const char*, size_t);\n'
    "#define assert(x) ((x) ? (void)0 : __assertfail(#x, __FILE__, __LINE__, __func__, 1))\n",
}


def compiled(source: str, arch: str = "compute_80", flags: Sequence[str] = ()) -> str:
    """PTX of CUDA source, with line information."""
    _, program = nvrtc.nvrtcCreateProgram(
        source.encode(), b"kernel.cu", len(HEADERS), [h.encode() for h in HEADERS.values()],
        [name.encode() for name in HEADERS],
    )  # fmt: skip
    options = [
        f"--gpu-architecture={arch}", "-lineinfo", "-default-device", *INCLUDES,
        "-DINFINITY=__int_as_float(0x7f800000)", *flags,
    ]  # fmt: skip
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if status:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise AssertionError(log.decode())
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = bytearray(size)
    nvrtc.nvrtcGetPTX(program, text)
    return text.rstrip(b"\0").decode()


@functools.cache
def built(source: str, arch: str = "compute_80") -> Module:
    """A source, compiled and parsed once."""
    return parse(compiled(source, arch))


def corpus_module(name: str, arch: str = "compute_80") -> Module:
    """A file of the corpus, compiled and parsed once in a test run.

    OPTIML_CORPUS says by what, for the tests that name no architecture: compute_90, or sm_80 or sm_90 for nvcc's text.
    """
    return _corpus_module(name, os.environ.get("OPTIML_CORPUS", arch) if arch == "compute_80" else arch)


@functools.cache
def _corpus_module(name: str, arch: str) -> Module:
    if arch.startswith("sm_"):  # what `nvcc -ptx -lineinfo -arch=...` made of it
        return parse(lzma.decompress((DATA / "nvcc" / f"{name}_{arch}.ptx.xz").read_bytes()).decode())
    return parse(compiled((DATA / f"{name}.cu").read_text(), arch))


@dataclass(frozen=True)
class Launched:
    """Arrays as the kernel left them, in the order of the array arguments, and the launch result."""

    arrays: list[np.ndarray[Any, Any]]
    result: LaunchResult

    @property
    def counters(self) -> Any:
        assert self.result.counters is not None
        return self.result.counters


SCALARS = {
    "u8": "<u1", "s8": "<i1", "u16": "<u2", "s16": "<i2", "u32": "<u4", "s32": "<i4", "f32": "<f4",
    "u64": "<u8", "s64": "<i8", "f64": "<f8", "b32": "<u4", "b64": "<u8",
}  # fmt: skip


def triple(size: int | tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*((size,) if isinstance(size, int) else size), 1, 1)[:3]
    return x, y, z


def launch(module: Module, kernel: str, *args: Any, same: bool = True, clean: bool = True, **options: Any) -> Launched:
    """Launch on a fresh machine, and once more on the numpy engine if the native one ran it.

    Both must leave the same bytes and counters, or report the same fault; `same` False is for kernels whose threads
    race on purpose (locks, floating-point atomics), whose results may differ from one schedule to another. `clean`
    kernels must also pass every check without an alarm. Two threads must leave exactly what one leaves, always.
    """
    try:
        launched = launch_once(module, kernel, *args, **options)
    except KernelFault as error:
        if engine_name() == "native":
            compare_fault_of_two_threads(error.fault, module, kernel, *args, **options)
            compare_fault(error.fault, lambda: launch_once(module, kernel, *args, engine="numpy", **options), same)
        raise
    if launched.result.engine == "native":
        if clean:
            launch_once(module, kernel, *args, checks=CHECKS, **options)
        compare_two_threads(launched, module, kernel, *args, **options)
        counting = {**options, "count": True}
        other = launch_once(module, kernel, *args, engine="numpy", **counting)
        if same:
            counted = launch_once(module, kernel, *args, **counting)
            compare_two_threads(counted, module, kernel, *args, **counting)
            for mine, again, theirs in zip(launched.arrays, counted.arrays, other.arrays, strict=True):
                assert same_bits(mine, theirs), "the two engines disagree"
                assert same_bits(mine, again), "counting changed the result"
            assert counted.result.counters == other.result.counters
            assert sorted(launched.result.printf.split("\n")) == sorted(other.result.printf.split("\n"))
    return launched


@contextlib.contextmanager
def always_divided() -> Iterator[None]:
    """Divide launches however little there is to do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splitting, "PROBE_INSTRUCTIONS", 0)
        patch.setattr(splitting, "WORTHWHILE_INSTRUCTIONS", 0)
        patch.setattr(splitting, "COPIED_BYTES", 1 << 40)
        yield


def launch_divided(module: Module, kernel: str, *args: Any, threads: int = 2, **options: Any) -> Launched:
    """Launch on several threads, although it is not worth while."""
    with always_divided():
        return launch_once(module, kernel, *args, threads=threads, **options)


def compare_two_threads(one: Launched, module: Module, kernel: str, *args: Any, **options: Any) -> None:
    """Two threads must leave every byte, count and printed text as one thread does."""
    two = launch_divided(module, kernel, *args, **options)
    for mine, theirs in zip(one.arrays, two.arrays, strict=True):
        assert mine.tobytes() == theirs.tobytes(), "two threads left other bytes than one"
    assert replace(two.result, threads=1) == one.result


def compare_fault_of_two_threads(fault: Fault, module: Module, kernel: str, *args: Any, **options: Any) -> None:
    """Two threads must report the very fault that one thread does."""
    with pytest.raises(KernelFault) as caught:
        launch_divided(module, kernel, *args, **options)
    assert caught.value.fault == fault


def compare_fault(mine: Fault, run: Callable[[], Any], same: bool) -> None:
    """The numpy engine must raise a fault of the same kind, at the same place if `same`."""
    try:
        run()
    except KernelFault as error:
        theirs = error.fault
    else:
        raise AssertionError(f"only the native engine reports {mine}")
    assert mine.kind == theirs.kind
    if same and mine.kind != "timed_out":
        assert replace(mine, other=None) == theirs  # only the native engine names the other party


def same_bits(mine: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> bool:
    """Bit-equal; any NaN equals any other."""
    if mine.dtype.kind != "f":
        return np.array_equal(mine, theirs)
    bits = np.dtype(f"u{mine.dtype.itemsize}")
    return bool(np.all((mine.view(bits) == theirs.view(bits)) | (np.isnan(mine) & np.isnan(theirs))))


def launch_once(
    module: Module,
    kernel: str,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    *args: Any,
    shared_bytes: int = 0,
    count: bool = False,
    blocks: Sequence[int] | None = None,
    limits: Limits = NO_LIMITS,
    checks: frozenset[str] = frozenset(),
    engine: str = "auto",
    threads: int = 1,
) -> Launched:
    """Launch once on a fresh machine.

    Arrays become allocations, numbers scalars, bytes by-value structs; a callable is given the machine and the list
    of placed arrays and returns the bytes of its parameter.
    """
    machine = Machine(engine=engine, threads=threads)
    loaded = machine.load(module)
    function = module.kernels[kernel]
    encoded: list[bytes] = []
    placed: list[tuple[int, np.ndarray[Any, Any]]] = []
    for index, (value, param) in enumerate(zip(args, function.params, strict=True)):
        if isinstance(value, np.ndarray):
            address = machine.allocate(value.nbytes, name=f"arg{index}")
            machine.memory(address)[:] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            placed.append((address, value))
            encoded.append(address.to_bytes(8, "little"))
        elif isinstance(value, bytes):
            encoded.append(value)
        elif callable(value):
            encoded.append(value(machine, placed))
        else:
            dtype = np.dtype(SCALARS[param.type])
            if dtype.kind in "ui":
                encoded.append((int(value) & ((1 << 8 * dtype.itemsize) - 1)).to_bytes(dtype.itemsize, "little"))
            else:
                encoded.append(np.array(value, dtype).tobytes())
    result = machine.launch(
        loaded, kernel, grid=triple(grid), block=triple(block), shared_bytes=shared_bytes, args=encoded, count=count,
        blocks=blocks, limits=limits, checks=checks,
    )  # fmt: skip
    arrays = [machine.memory(a).view(v.dtype).reshape(v.shape).copy() for a, v in placed]
    return Launched(arrays, result)


_PTX_TYPE = {"f4": ("f32", "f32"), "f8": ("f64", "f64"), "u4": ("b32", "u32"), "i4": ("b32", "u32"),
             "u8": ("b64", "u64"), "i8": ("b64", "u64"), "u2": ("b16", "u16"), "i2": ("b16", "u16"),
             "f2": ("b16", "u16"), "u1": ("b16", "u8"), "i1": ("b16", "s8")}  # fmt: skip


def snippet(body: str, inputs: Sequence[np.ndarray[Any, Any]], output: Any, *, target: str = "sm_90") -> str:
    """PTX of a kernel `k` that runs `body` once per element: reads %x0, %x1, ... and leaves the answer in %y.

    `body` may also use the scratch registers %p<8>, %r<8>, %rd<8>, %f<8>, %fd<8> and %h<8>.
    """
    lines = [
        ".version 8.5", f".target {target}", ".address_size 64", ".visible .entry k(",
        ",\n".join(f".param .u64 p{i}" for i in range(len(inputs) + 1)), ")", "{",
        ".reg .pred %p<8>; .reg .b32 %r<8>; .reg .b64 %rd<8>; .reg .f32 %f<8>; .reg .f64 %fd<8>; .reg .b16 %h<8>;",
        ".reg .b64 %base<9>; .reg .b32 %tid; .reg .b32 %cta;", "mov.u32 %tid, %tid.x; mov.u32 %cta, %ctaid.x;",
        ".reg .b32 %n; mov.u32 %n, %ntid.x; mad.lo.s32 %tid, %cta, %n, %tid;",
    ]  # fmt: skip
    for i, array in enumerate(inputs):
        register, load = _PTX_TYPE[array.dtype.str[1:]]
        lines += [
            f".reg .{register} %x{i}; ld.param.u64 %base{i}, [p{i}];",
            f"mad.wide.u32 %base{i}, %tid, {array.dtype.itemsize}, %base{i}; ld.global.{load} %x{i}, [%base{i}];",
        ]
    register, store = _PTX_TYPE[np.dtype(output).str[1:]]
    last = len(inputs)
    lines += [
        f".reg .{register} %y;", body, f"ld.param.u64 %base{last}, [p{last}];",
        f"mad.wide.u32 %base{last}, %tid, {np.dtype(output).itemsize}, %base{last};",
        f"st.global.{store} [%base{last}], %y;", "ret;", "}",
    ]  # fmt: skip
    return "\n".join(lines)


def evaluate(body: str, *inputs: np.ndarray[Any, Any], output: Any, block: int = 0) -> np.ndarray[Any, Any]:
    """Run `body` over the elements of the inputs (see `snippet`); one block, or blocks of `block` threads."""
    count = len(inputs[0])
    text = snippet(body, inputs, output)
    threads = block or count
    launched = launch(parse(text), "k", -(-count // threads), threads, *inputs, np.zeros(count, output))
    return launched.arrays[-1]
