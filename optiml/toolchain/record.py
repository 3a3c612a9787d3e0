"""Call a launcher under the recording runtime, in a sandbox, and read what it asked of the device.

The child may be hostile, so what it sends is a proposal that is parsed strictly and never more than a launch plan: the
code that will run is that of the build, and the reader bounds every number. The nonce only tells a record from text
that the library printed.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from optiml.errors import ToolFailed, WorkerTimeout
from optiml.process import Finished, run
from optiml.sandbox import Policy
from optiml.scratch import ScratchFolders, remove_folder

CPU_S, WALL_S = 5, 15.0
MEMORY_BYTES = 2 << 30
OUTPUT_BYTES = 21 << 20  # a little more than the longest record
MAX_SLOTS = 512
_folders = ScratchFolders()
_BY_SIGNAL = {int(signal.SIGXCPU): "timed_out", int(signal.SIGKILL): "timed_out", int(signal.SIGSYS): "trapped"}

Extent = tuple[int, int, int]
Refusal = Literal["escape", "refused", "limit", "unsupported", "missing"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A kernel that may be launched, as the build describes it."""

    symbol: str
    shared_bytes: int  # static, per block
    registers: int
    local_bytes: int
    max_threads: int
    parameters: tuple[int, ...]  # bytes of each


@dataclass(frozen=True, kw_only=True)
class Orders:
    """Everything that decides what a launcher asks for: the device it sees and its arguments.

    Attributes:
        mode: `launcher` for a function with arguments, `program` for a whole `main`.
        device: major, minor, multiprocessors, opt-in shared bytes, bytes of L2, bytes of memory.
        arguments: lines of the recorder's orders, such as `array 400`, `integer 100`, `float 3f800000`, `stream`.
    """

    name: str
    mode: Literal["launcher", "program"]
    device: tuple[int, int, int, int, int, int]
    entries: tuple[Entry, ...]
    arguments: tuple[str, ...] = ()

    def text(self, nonce: str) -> str:
        """As the recorder reads them."""
        lines = [f"nonce {nonce}", f"mode {self.mode}", f"name {self.name}", f"device {_words(self.device)}"]
        for entry in self.entries:
            facts = (entry.shared_bytes, entry.registers, entry.local_bytes, entry.max_threads, len(entry.parameters))
            lines.append(f"entry {entry.symbol} {_words((*facts, *entry.parameters))}")
        return "\n".join([*lines, *self.arguments, "go", ""])


@dataclass(frozen=True, kw_only=True)
class Place:
    """A device address: a piece of memory by number (arguments first), and bytes from its start."""

    slot: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class Launched:
    symbol: str
    grid: Extent
    block: Extent
    shared_bytes: int
    cooperative: bool
    cluster: Extent | None
    args: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True)
class Cleared:
    target: Place
    value: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Copied:
    source: Place
    target: Place
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Uploaded:
    target: Place
    data: bytes  # empty where a program was recorded: only the size is of interest
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Downloaded:
    source: Place
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Allocated:
    slot: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A module-scope variable; registered by every library that has one, used or not."""

    slot: int
    name: str
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Something that was not done: what the runtime would refuse, or what a plan cannot hold."""

    kind: Refusal
    what: str


Event = Launched | Cleared | Copied | Uploaded | Downloaded | Allocated | Variable | Refused


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What one call asked for, in order, and how it ended.

    Attributes:
        ending: `returned`; what the recorder says: `left` (it called exit), `crashed`, `arithmetic`, `aborted`,
            `touched` (device memory), `unloaded`, `nameless`, `unfiltered`; or what is seen from here: `timed_out`,
            `flooded`, `trapped` (a forbidden system call with signals blocked, as in `system`), `gone` (no record),
            `damaged` (not a record).
    """

    events: tuple[Event, ...]
    ending: str


def first_address(slot: int) -> int:
    """Where the recorder puts a piece of memory; keep in step with `slot_address` in recorder.c."""
    return 0x200000000000 + (slot << 36) + (1 << 30)


def place_of(address: int) -> Place | None:
    """The piece of memory that an address lies in or near, or None if it is no device address."""
    slot = (address - 0x200000000000) >> 36
    return Place(slot=slot, offset=address - first_address(slot)) if 0 <= slot < MAX_SLOTS else None


@lru_cache(maxsize=256)
def record(orders: Orders, library: bytes, recorder: bytes) -> Recording:
    """Call the launcher once and read its record. The same orders are answered from memory.

    Args:
        library: shared library with the host code, built without a CUDA runtime.
        recorder: the program built from recorder.c.

    Raises:
        SetupError: no sandbox that is strong enough can be made here (code `no_sandbox`).
    """
    nonce = secrets.token_hex(16)
    folder = _folders.new()
    try:
        os.chmod(folder, 0o755)  # read, and only read, by a child that has another uid
        for name, content in (("launcher.so", library), ("recorder", recorder)):
            path = Path(folder, name)
            path.write_bytes(content)
            path.chmod(0o755)
        policy = Policy(
            readable=(folder,),
            cpu_s=CPU_S,
            address_space_bytes=MEMORY_BYTES,
            file_size_bytes=1 << 20,
            open_files=128,
            task_limit=8,
        )
        finished = run(
            [os.path.join(folder, "recorder"), os.path.join(folder, "launcher.so")],
            policy=policy,
            timeout_s=WALL_S,
            stdin=orders.text(nonce).encode("ascii"),
            output_cap_bytes=OUTPUT_BYTES,
            confined=True,
            stop_at_cap=True,
        )
    except WorkerTimeout:
        return Recording(events=(), ending="timed_out")
    except ToolFailed:
        return Recording(events=(), ending="gone")
    finally:
        remove_folder(folder)
    return _read(finished, nonce, orders)


def _read(finished: Finished, nonce: str, orders: Orders) -> Recording:
    head, tail = f"optiml-record {nonce}\n".encode(), f"optiml-end {nonce}\n".encode()
    text = finished.stdout
    if finished.truncated:
        return Recording(events=(), ending="flooded")
    if not text:
        ending = _BY_SIGNAL.get(-finished.exit_code, "gone")
        return Recording(events=(), ending=ending)
    if not (text.startswith(head) and text.endswith(tail)):
        return Recording(events=(), ending="damaged")
    try:
        rows = [json.loads(line) for line in text[len(head) : -len(tail)].splitlines()]
        *told, end = rows
        if end["do"] != "end":
            return Recording(events=(), ending="damaged")
        sizes = {entry.symbol: entry.parameters for entry in orders.entries}
        return Recording(events=tuple(_READERS[row["do"]](row, sizes) for row in told), ending=str(end["how"])[:40])
    except (ValueError, TypeError, KeyError, RecursionError):
        return Recording(events=(), ending="damaged")


def _launched(row: Mapping[str, Any], sizes: Mapping[str, tuple[int, ...]]) -> Launched:
    symbol = str(row["kernel"])
    args = tuple(bytes.fromhex(item) for item in row["args"])
    if tuple(len(arg) for arg in args) != sizes[symbol]:
        raise ValueError("arguments that are not those of the kernel")
    cluster = _extent(row["cluster"], least=0)
    return Launched(
        symbol=symbol,
        grid=_extent(row["grid"], least=1),
        block=_extent(row["block"], least=1),
        shared_bytes=_integer(row["shared"], 0, 1 << 30),
        cooperative=bool(row["cooperative"]),
        cluster=None if cluster == (0, 0, 0) else cluster,
        args=args,
    )


def _extent(values: Sequence[Any], *, least: int) -> Extent:
    x, y, z = (_integer(value, least, (1 << 32) - 1) for value in values)
    return x, y, z


def _integer(value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError("a number out of range")
    return value


def _place(values: Sequence[Any]) -> Place:
    slot, offset = values
    return Place(slot=_integer(slot, 0, MAX_SLOTS - 1), offset=_integer(offset, 0, 1 << 40))


def _nbytes(row: Mapping[str, Any]) -> int:
    return _integer(row["bytes"], 0, 1 << 40)


def _uploaded(row: Mapping[str, Any], _: object) -> Uploaded:
    data = bytes.fromhex(row["data"])
    nbytes = _nbytes(row)
    if data and len(data) != nbytes:
        raise ValueError("an upload that is not as long as it says")
    return Uploaded(target=_place(row["target"]), data=data, nbytes=nbytes)


def _refused(row: Mapping[str, Any], _: object) -> Refused:
    return Refused(kind=row["do"], what="".join(c for c in str(row["what"]) if c.isprintable())[:400])


_READERS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], Event]] = {
    "launch": _launched,
    "memset": lambda row, _: Cleared(
        target=_place(row["target"]), value=_integer(row["value"], 0, 255), nbytes=_nbytes(row)
    ),
    "copy": lambda row, _: Copied(source=_place(row["source"]), target=_place(row["target"]), nbytes=_nbytes(row)),
    "upload": _uploaded,
    "download": lambda row, _: Downloaded(source=_place(row["source"]), nbytes=_nbytes(row)),
    "allocate": lambda row, _: Allocated(slot=_integer(row["slot"], 0, MAX_SLOTS - 1), nbytes=_nbytes(row)),
    "variable": lambda row, _: Variable(
        slot=_integer(row["slot"], 0, MAX_SLOTS - 1), name=str(row["name"]), nbytes=_nbytes(row)
    ),
    "escape": _refused,
    "refused": _refused,
    "limit": _refused,
    "unsupported": _refused,
    "missing": _refused,
}


def _words(values: Sequence[int]) -> str:
    return " ".join(str(value) for value in values)
