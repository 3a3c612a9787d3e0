"""A CUDA driver made of one numpy array: what `optiml.device.cuda_context` uses of pycuda and cuda.bindings.

A "cubin" is any bytes; a kernel is a Python function registered under its symbol, called with the memory and its three
arguments: two addresses and an integer.
"""

from __future__ import annotations

import ctypes
import importlib
import struct
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

MEMORY_BYTES = 8 << 20
BASE = 1 << 20  # addresses below are not memory


class FakeDriverError(Exception):
    """As pycuda's: only a text."""


@dataclass
class FakeCuda:
    """The memory, the kernels, and a record of what was asked."""

    kernels: dict[str, Callable[..., None]] = field(default_factory=dict)
    memory: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(MEMORY_BYTES, dtype=np.uint8))
    next_address: int = BASE
    live: int = 0
    events: int = 0
    attributes: list[tuple[str, int]] = field(default_factory=list)
    captured: list[Any] | None = None  # launches, while a stream is captured
    cooperative: list[tuple[int, ...]] = field(default_factory=list)  # grid, block and shared memory of each
    node_attributes: list[tuple[str, Any]] = field(default_factory=list)

    def view(self, address: int, nbytes: int) -> np.ndarray[Any, Any]:
        return self.memory[address - BASE : address - BASE + nbytes]


class _Memory:
    def __init__(self, cuda: FakeCuda, address: int) -> None:
        self._cuda, self._address = cuda, address
        cuda.live += 1

    def __int__(self) -> int:
        return self._address

    def free(self) -> None:
        self._cuda.live -= 1


class _Function:
    def __init__(self, cuda: FakeCuda, symbol: str) -> None:
        self._cuda, self._symbol = cuda, symbol

    def set_attribute(self, name: str, value: int) -> None:
        self._cuda.attributes.append((name, value))

    def prepare(self, formats: list[str]) -> None:
        assert formats[0][-1] == "s"

    def prepared_async_call(self, grid: Any, block: Any, stream: Any, packed: bytes, *, shared_size: int) -> None:
        node = _Node(self._cuda, self._symbol, packed)
        if self._cuda.captured is None:
            node.run(packed)
        else:
            self._cuda.captured.append(node)


@dataclass
class _Node:
    """A launch in a graph."""

    cuda: FakeCuda
    symbol: str
    packed: bytes

    def run(self, packed: bytes) -> None:
        self.cuda.kernels[self.symbol](self.cuda, *struct.unpack("<QQI", packed))


class _Event:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self._at = cuda, 0

    def record(self, stream: Any) -> None:
        self._cuda.events += 1
        self._at = self._cuda.events

    def synchronize(self) -> None:
        return

    def time_till(self, other: _Event) -> float:
        return 0.5 * (other._at - self._at)


def install(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeCuda, Any]:
    """Put the fake in place of both libraries; returns it with a freshly imported `cuda_context`."""
    cuda = FakeCuda()
    driver: Any = types.ModuleType("pycuda.driver")
    bindings: Any = types.ModuleType("cuda.bindings.driver")

    def mem_alloc(nbytes: int) -> _Memory:
        address = cuda.next_address
        cuda.next_address += -(-nbytes // 256) * 256
        assert cuda.next_address - BASE <= MEMORY_BYTES, "the fake is out of memory"
        return _Memory(cuda, address)

    def memcpy_htod(address: int, array: np.ndarray[Any, Any]) -> None:
        cuda.view(address, array.nbytes)[:] = array.reshape(-1).view(np.uint8)

    def memcpy_dtoh(array: np.ndarray[Any, Any], address: int) -> None:
        array.reshape(-1).view(np.uint8)[:] = cuda.view(address, array.nbytes)

    def memcpy_dtod_async(to: int, source: int, nbytes: int, stream: Any) -> None:
        cuda.view(to, nbytes)[:] = cuda.view(source, nbytes).copy()

    def memset_d8_async(address: int, value: int, nbytes: int, stream: Any) -> None:
        cuda.view(address, nbytes)[:] = value

    attributes = {
        "MULTIPROCESSOR_COUNT": 4, "L2_CACHE_SIZE": 1 << 18, "CLOCK_RATE": 1_000_000, "MAX_THREADS_PER_BLOCK": 1024,
        "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 100 << 10, "MAX_GRID_DIM_X": 2**31 - 1, "MAX_GRID_DIM_Y": 65535,
        "MAX_GRID_DIM_Z": 65535, "MAX_BLOCK_DIM_X": 1024, "MAX_BLOCK_DIM_Y": 1024, "MAX_BLOCK_DIM_Z": 64,
        "MAX_THREADS_PER_MULTIPROCESSOR": 2048, "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536,
        "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 164 << 10,
    }  # fmt: skip
    device = types.SimpleNamespace(
        compute_capability=lambda: (8, 0),
        name=lambda: "NVIDIA A100-SXM4-80GB",
        pci_bus_id=lambda: "0000:07:00.0",
        total_memory=lambda: 80 << 30,
        get_attribute=lambda name: attributes[name],
        make_context=lambda: types.SimpleNamespace(pop=lambda: None, detach=lambda: None),
    )

    def open_device(index: int) -> Any:
        return device

    open_device.count = lambda: 1  # type: ignore[attr-defined]

    driver.Error = FakeDriverError
    driver.init = lambda: None
    driver.Device = open_device
    driver.device_attribute = types.SimpleNamespace(**{name: name for name in attributes})
    driver.function_attribute = types.SimpleNamespace(MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")
    driver.get_driver_version = lambda: 13000
    driver.Stream = lambda flags: types.SimpleNamespace(synchronize=lambda: None, handle=7)
    driver.Context = types.SimpleNamespace(synchronize=lambda: None)
    driver.Event = lambda: _Event(cuda)
    driver.mem_get_info = lambda: (4 << 30, 8 << 30)
    driver.mem_alloc = mem_alloc
    driver.memcpy_htod, driver.memcpy_dtoh = memcpy_htod, memcpy_dtoh
    driver.memcpy_dtod_async, driver.memset_d8_async = memcpy_dtod_async, memset_d8_async
    driver.module_from_buffer = lambda cubin: types.SimpleNamespace(get_function=lambda name: _Function(cuda, name))
    bindings.CUlimit = types.SimpleNamespace(CU_LIMIT_PERSISTING_L2_CACHE_SIZE=6)
    bindings.CUresult = types.SimpleNamespace(CUDA_SUCCESS=0)
    bindings.cuGetErrorString = lambda status: (0, str(status).encode())
    _add_graphs(cuda, bindings)
    bindings.cuCtxSetLimit = lambda limit, value: (0,)
    bindings.cuCtxResetPersistingL2Cache = lambda: (0,)
    pycuda: Any = types.ModuleType("pycuda")
    pycuda.driver = driver
    package: Any = types.ModuleType("cuda.bindings")
    package.driver = bindings
    for name, module in (("pycuda", pycuda), ("pycuda.driver", driver), ("cuda.bindings", package),
                         ("cuda.bindings.driver", bindings)):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "optiml.device.cuda_context", raising=False)
    context = importlib.import_module("optiml.device.cuda_context")
    monkeypatch.setattr(context, "LEAST_FLUSH_BYTES", 1 << 18)
    monkeypatch.setattr(context, "GUARD_BYTES", 1 << 10)
    monkeypatch.setitem(sys.modules, "optiml.device.cuda_context", context)
    return cuda, context


def _add_graphs(cuda: FakeCuda, bindings: Any) -> None:
    """Streams that are captured: a graph is the list of its launches, and launching it does them."""

    def begin(stream: Any, mode: Any) -> tuple[int]:
        cuda.captured = []
        return (0,)

    def end(stream: Any) -> tuple[int, list[Any]]:
        taken, cuda.captured = cuda.captured, None
        return 0, taken or []

    def set_attribute(node: Any, name: str, value: Any) -> tuple[int]:
        cuda.node_attributes.append((name, value))
        return (0,)

    def launch(graph: list[Any], stream: Any) -> tuple[int]:
        for node in graph:
            node.run(node.packed)
        return (0,)

    def launch_cooperatively(node: _Node, *given: int) -> tuple[int]:
        *sizes, _, places = given
        pointers = (ctypes.c_void_p * 3).from_address(places)
        node.run(b"".join(ctypes.string_at(int(p or 0), n) for p, n in zip(pointers, (8, 8, 4), strict=True)))
        cuda.cooperative.append(tuple(sizes))
        return (0,)

    bindings.CUstream = lambda handle: handle
    bindings.CUstreamCaptureMode = types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
    bindings.CUkernelNodeAttrValue = lambda: types.SimpleNamespace(clusterDim=types.SimpleNamespace())
    bindings.CUkernelNodeAttrID = types.SimpleNamespace(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION="cluster")
    bindings.cuStreamBeginCapture, bindings.cuStreamEndCapture = begin, end
    bindings.cuGraphGetNodes = lambda graph, count: (0, graph[:count], len(graph))
    bindings.cuGraphKernelNodeSetAttribute = set_attribute
    bindings.cuGraphInstantiate = lambda graph, flags: (0, graph)
    bindings.cuGraphLaunch = launch
    bindings.cuGraphKernelNodeGetParams = lambda node: (0, types.SimpleNamespace(func=node))
    bindings.cuLaunchCooperativeKernel = launch_cooperatively
