"""The native engine's shared library: found beside this file, checked, and loaded once."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from optiml.ptx.native import table
from optiml.ptx.native.lowering import RECORD

PRINT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32)
COMPUTE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)


class FaultRecord(ctypes.Structure):
    """`Fault` of csrc/engine.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("kind", "access", "nbytes", "space")),
        ("address", ctypes.c_uint64),
        ("block", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("thread", "line", "other_line", "other_thread")),
        ("other_block", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("other_access", "hazard")),
    ]


class AllocationRecord(ctypes.Structure):
    """`Allocation` of csrc/engine.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("last", "touched", "writer", "reader", "second_reader")),
        ("shift", ctypes.c_uint32),
        ("written", ctypes.c_uint32),
        ("read", ctypes.c_uint32),
        ("valid", ctypes.c_void_p),
        ("sectors", ctypes.c_int64 * 3),
        ("misses", ctypes.c_int64),
    ]


class LaunchRecord(ctypes.Structure):
    """`Launch` of csrc/engine.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "instructions", "segments", "barriers", "reach", "specials", "zeros", "constants",
            "extra")),
        ("allocations", ctypes.POINTER(AllocationRecord)),
        *((name, ctypes.c_void_p) for name in ("blocks", "parameters")),
        ("print", PRINT),
        ("compute", COMPUTE),
        *((name, ctypes.c_void_p) for name in ("segment_warps", "segment_threads", "spaces", "lines")),
        *((name, ctypes.c_int64) for name in (
            "branches", "divergent", "barrier_count", "warps", "block_count", "budget")),
        ("deadline", ctypes.c_double),
        ("l1_sectors", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("executed", "probe", "worthwhile", "copied_bytes")),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        *((name, ctypes.c_uint32) for name in (
            "segment_count", "barrier_total", "special_count", "zero_count", "allocation_count", "register_bytes",
            "shared_bytes", "local_bytes", "parameter_bytes", "waits", "count", "checks", "max_order",
            "together", "unwritten", "threads", "parts", "line_count")),
        ("fault", FaultRecord),
    ]  # fmt: skip


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The engine, or None if it was not built, or was built from another opcode table."""
    for suffix in (*EXTENSION_SUFFIXES, ".so"):
        path = Path(__file__).with_name(f"_engine{suffix}")
        if not path.exists():
            continue
        try:
            found = ctypes.CDLL(str(path))
        except OSError:  # built for another machine
            continue
        found.ptx_fingerprint.restype = ctypes.c_char_p
        if (
            found.ptx_fingerprint().decode() == table.fingerprint()
            and found.ptx_launch_bytes() == ctypes.sizeof(LaunchRecord)
            and found.ptx_instruction_bytes() == RECORD.itemsize
        ):
            found.ptx_run.argtypes = [ctypes.POINTER(LaunchRecord)]
            found.ptx_peek.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int]
            found.ptx_where.argtypes = [ctypes.c_int, ctypes.c_void_p]
            return found
    return None
