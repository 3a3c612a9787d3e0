"""The disposable child of the embedded device: runs launch plans in the PTX engine and answers raw results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from optiml.codec import encode
from optiml.device.sampling import sampled_blocks
from optiml.problems.data import raw
from optiml.process import serve
from optiml.ptx import Machine, Module, parse
from optiml.ptx.counters import Counters
from optiml.ptx.machine import LaunchResult, Limits

Header = dict[str, Any]


@lru_cache(maxsize=4)
def _parsed(ptx: str) -> Module:
    return parse(ptx)


def handle(header: Header, blobs: Sequence[memoryview]) -> tuple[Header, Sequence[memoryview]]:
    """Carry out one plan, once for each set of contents; see `Device.run`."""
    deadline = time.monotonic() + header["timeout_s"]
    machine = Machine()
    arrays = header["arrays"]
    shift = header["shift_bytes"]
    starts = {item["name"]: machine.allocate(item["nbytes"] + shift, name=item["name"]) for item in arrays}
    addresses = {name: start + shift for name, start in starts.items()}
    loaded = machine.load(_parsed(header["ptx"]))
    answers: list[memoryview] = []
    reports: list[Header] = []
    for run in range(header["runs"]):
        for position, item in enumerate(arrays):
            blob = blobs[run * len(arrays) + position]
            start = starts[item["name"]]
            _fill(machine.memory(start)[shift:], np.frombuffer(blob, dtype=np.uint8), fresh=run == 0)
            if item["undefined"] and "uninitialised" in header["checks"]:
                machine.track_writes(start)
        last = run == header["runs"] - 1
        checks = frozenset(header["checks"] if run < header["checked_runs"] else ())
        reports = []
        for launch in header["launches"]:
            grid, block = tuple(launch["grid"]), tuple(launch["block"])
            total = grid[0] * grid[1] * grid[2]
            chosen = _chosen_blocks(total, header)
            result = machine.launch(
                loaded,
                launch["symbol"],
                grid=grid,
                block=block,
                shared_bytes=launch["shared_bytes"],
                args=[_argument(arg, addresses) for arg in launch["args"]],
                count=header["count"] and last,
                blocks=chosen,
                limits=Limits(deadline=deadline, l1_bytes=header["l1_share_bytes"], resident_blocks=1),
                checks=checks,
                unwritten=header["unwritten"],
            )
            reports.append(_report(launch, result))
        if header["outputs"]:
            answers += [raw(machine.memory(starts[item["name"]])[shift:].copy()) for item in arrays]
    return {"launches": reports}, answers


def _chosen_blocks(total: int, header: Header) -> Sequence[int] | None:
    if header["sample_blocks"] is not None:
        return sampled_blocks(total, header["sample_blocks"])
    return range(total - 1, -1, -1) if header["reverse"] else None


def _fill(memory: np.ndarray[Any, Any], content: np.ndarray[Any, Any], *, fresh: bool) -> None:
    """Copy `content`, again and again where it is shorter than the memory; fresh memory holds its zeros already."""
    if content.size >= memory.size:
        memory[:] = content[: memory.size]
    elif content.any() or not fresh:
        whole = memory.size // content.size * content.size
        memory[:whole].reshape(-1, content.size)[:] = content
        memory[whole:] = content[: memory.size - whole]


def _argument(arg: Header, addresses: dict[str, int]) -> bytes:
    return addresses[arg["array"]].to_bytes(8, "little") if "array" in arg else bytes.fromhex(arg["value"])


def _report(launch: Header, result: LaunchResult) -> Header:
    return {
        "symbol": launch["symbol"],
        "grid": launch["grid"],
        "block": launch["block"],
        "shared_bytes": launch["shared_bytes"],
        "blocks_total": result.blocks_total,
        "blocks_run": result.blocks_run,
        "counters": None if result.counters is None else _wire_counters(result.counters),
        "printed": result.printf,
        "engine": result.engine,
    }


def _wire_counters(counters: Counters) -> Header:
    wire: Header = encode(counters)
    wire["block_executions"] = {
        f"{function}#{index}": count for (function, index), count in counters.block_executions.items()
    }
    return wire


def main() -> None:
    serve(handle)


if __name__ == "__main__":
    main()
