"""The disposable child of the embedded device: runs launch plans in the PTX engine and answers raw results."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from optiml.codec import encode
from optiml.device.sampling import sampled_blocks
from optiml.errors import Busy, InvalidInput, KernelFault
from optiml.problems.data import raw
from optiml.process import serve
from optiml.ptx import Machine, Module, parse
from optiml.ptx.counters import Counters
from optiml.ptx.machine import LaunchResult, Limits, LoadedModule

Header = dict[str, Any]


@lru_cache(maxsize=4)
def _parsed(ptx: str) -> Module:
    return parse(ptx)


STARVED = 0.6  # of its cores: an engine that got less of their time may have been kept from running by other work
CROWDED = 1.5  # tasks that want to run for each core, from which on that is believed of several cores


def handle(header: Header, blobs: Sequence[memoryview]) -> tuple[Header, Sequence[memoryview]]:
    """Carry out one plan, once for each set of contents; see `Device.run`.

    Raises:
        Busy: the kernel did not end in its time, but the processor was elsewhere; unless the header says that it had
            its second chance.
    """
    used = time.process_time()
    try:
        return _carried_out(header, blobs)
    except KernelFault as error:
        share = (time.process_time() - used) / header["timeout_s"]
        if error.fault.kind == "timed_out" and not header["again"] and _starved(share, header["threads"]):
            raise Busy("the kernel did not end in its time, which other work on this machine took") from error
        raise


def _starved(share: float, threads: int) -> bool:
    """Whether `share` of a core is too little: of the one that any kernel keeps busy, or of all where it is crowded."""
    crowded = os.getloadavg()[0] > CROWDED * (os.cpu_count() or 1)
    return share < STARVED * (threads if crowded else 1)


def _carried_out(header: Header, blobs: Sequence[memoryview]) -> tuple[Header, Sequence[memoryview]]:
    deadline = time.monotonic() + header["timeout_s"]
    machine = Machine(threads=header["threads"])
    arrays = header["arrays"]
    shift = header["shift_bytes"]
    starts = {item["name"]: machine.allocate(item["nbytes"] + shift, name=item["name"]) for item in arrays}
    loaded = machine.load(_parsed(header["ptx"]))
    places = _Places(machine, starts, loaded, shift=shift)
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
        for step in header["steps"]:
            if step["kind"] != "launch":
                _transfer(step, places)
                continue
            grid, block = tuple(step["grid"]), tuple(step["block"])
            total = grid[0] * grid[1] * grid[2]
            chosen = _chosen_blocks(total, header)
            result = machine.launch(
                loaded,
                step["symbol"],
                grid=grid,
                block=block,
                shared_bytes=step["shared_bytes"],
                args=[places.data(arg) for arg in step["args"]],
                count=header["count"] and last,
                blocks=chosen,
                limits=Limits(deadline=deadline, l1_bytes=header["l1_share_bytes"], resident_blocks=1),
                checks=checks,
                unwritten=header["unwritten"],
            )
            reports.append(_report(step, result))
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


class _Places:
    """Addresses of arrays and module-scope variables, as the steps of a plan name them."""

    def __init__(self, machine: Machine, arrays: dict[str, int], loaded: LoadedModule, *, shift: int) -> None:
        self._machine = machine
        self._arrays = arrays
        self._loaded = loaded
        self._shift = shift  # of arrays within their memory

    def _start(self, place: Header) -> int:
        if "array" in place:
            return self._arrays[place["array"]]
        if place["symbol"] not in self._loaded.module.globals:
            raise InvalidInput(f"the kernel has no variable {place['symbol']!r}")
        return self._loaded.address(place["symbol"])

    def data(self, arg: Header) -> bytes:
        """The bytes of an argument or an upload."""
        if "value" not in arg:
            return self._address(arg)
        content = bytearray.fromhex(str(arg["value"]))
        for position, place in arg["pointers"]:
            content[position : position + 8] = self._address(place)
        return bytes(content)

    def _address(self, place: Header) -> bytes:
        address = self._start(place) + (self._shift if "array" in place else 0) + int(place["offset"])
        return (address % (1 << 64)).to_bytes(8, "little")

    def memory(self, place: Header, nbytes: int, *, written: bool) -> np.ndarray[Any, Any]:
        """A live view of `nbytes` bytes; `written` says that they are about to be.

        Raises:
            InvalidInput: they leave the named memory.
        """
        start, shift = self._start(place), self._shift if "array" in place else 0
        whole = self._machine.memory(start)[shift:]
        if not 0 <= place["offset"] <= len(whole) - nbytes:
            name = place.get("array") or place.get("symbol")
            raise InvalidInput(f"{nbytes} bytes from byte {place['offset']} of {name} on leave its {len(whole)} bytes")
        if written:
            self._machine.mark_written(start, shift + place["offset"], nbytes)
        return whole[place["offset"] : place["offset"] + nbytes]


def _transfer(step: Header, places: _Places) -> None:
    """Carry out a memset, copy or upload."""
    if step["kind"] == "memset":
        places.memory(step["target"], step["nbytes"], written=True)[:] = step["value"]
    elif step["kind"] == "copy":
        source = places.memory(step["source"], step["nbytes"], written=False)
        places.memory(step["target"], step["nbytes"], written=True)[:] = source
    else:
        content = places.data(step["content"])
        places.memory(step["target"], len(content), written=True)[:] = np.frombuffer(content, dtype=np.uint8)


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
        "threads": result.threads,
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
