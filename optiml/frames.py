"""Messages between a parent and its worker child: one JSON header and any number of binary blobs.

On the wire, all integers big-endian:

    magic "OML1" · header bytes u32 · blob count u32 · bytes of each blob u64 × count · header · blobs

The header is a JSON object of finite numbers; blobs go out from their own memory and come in to fresh
writable memory. Whoever is at the other end may be hostile: every size is checked before anything is
allocated, and nothing is ever unpickled.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import socket
import struct
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from optiml import errors
from optiml.errors import OptimlError, ToolFailed

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = b"OML1"
HEADER_LIMIT_BYTES = 64 << 20
BLOB_LIMIT = 65_536  # blobs in one message
FRAME_LIMIT_BYTES = 2 << 30  # one whole message, unless a channel sets less

_PREFIX = struct.Struct("!4sII")
_MAPPED_BYTES = 1 << 20  # from here on a blob gets its own pages, which cost nothing until data arrives
_SOCKET_BUFFER_BYTES = 1 << 20


class FrameError(ToolFailed):
    """What came in is not a message, or is over a limit; the channel is unusable."""


class Unsendable(ToolFailed):
    """A message is not JSON or is over a limit; nothing of it was sent, and the channel is as it was."""


class Channel:
    """One end of a stream socket that carries messages in both directions. Not thread-safe."""

    def __init__(self, connection: socket.socket, *, limit_bytes: int = FRAME_LIMIT_BYTES) -> None:
        self._connection = connection
        self._limit_bytes = limit_bytes
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)

    def fileno(self) -> int:
        """The descriptor of the socket, -1 once closed."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close this end; the other end reads an end of file."""
        self._connection.close()

    def send(self, header: dict[str, Any], blobs: Iterable[Buffer] = (), *, deadline: float | None = None) -> None:
        """Send one message; nothing is written if it cannot be sent whole.

        Args:
            header: a JSON object; NaN and infinities are refused.
            blobs: bytes, memoryviews or arrays; C-contiguous ones are sent without a copy.
            deadline: on the clock of `time.monotonic`, in seconds; None waits for ever.

        Raises:
            Unsendable: the header is not JSON, or the message is over a limit.
            TimeoutError: the deadline passed; the channel is unusable.
            OSError: the other end is gone.
        """
        try:
            text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise Unsendable(f"a message header is not JSON: {error}") from error
        views = [_flat(blob) for blob in blobs]
        sizes = [view.nbytes for view in views]
        if problem := self._size_problem(len(text), sizes):
            raise Unsendable(problem)
        head = _PREFIX.pack(MAGIC, len(text), len(views)) + struct.pack(f"!{len(sizes)}Q", *sizes) + text
        for part in (memoryview(head), *views):
            self._connection.settimeout(_remaining(deadline))
            self._connection.sendall(part)

    def receive(self, *, deadline: float | None = None) -> tuple[dict[str, Any], list[memoryview]]:
        """Wait for one message.

        Returns:
            The header, and each blob as a writable one-dimensional memoryview of bytes.

        Raises:
            EOFError: the other end closed, between two messages or within one.
            FrameError: what came is not a message, or is over a limit.
            TimeoutError: the deadline passed; the channel is unusable.
        """
        magic, header_bytes, count = _PREFIX.unpack(self._read(_PREFIX.size, deadline))
        if magic != MAGIC:
            raise FrameError("a message does not start with its magic number")
        if count > BLOB_LIMIT:
            raise FrameError(f"a message has {count} blobs, the limit is {BLOB_LIMIT}")
        sizes = struct.unpack(f"!{count}Q", self._read(8 * count, deadline))
        if problem := self._size_problem(header_bytes, sizes):
            raise FrameError(problem)
        try:
            header = json.loads(bytes(self._read(header_bytes, deadline)), parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise FrameError("a message header is not JSON") from error
        if not isinstance(header, dict):
            raise FrameError("a message header is not a JSON object")
        return header, [self._read(size, deadline) for size in sizes]

    def _read(self, size: int, deadline: float | None) -> memoryview:
        whole = _fresh_memory(size)
        rest = whole
        while rest.nbytes:
            self._connection.settimeout(_remaining(deadline))
            try:
                received = self._connection.recv_into(rest)
            except ConnectionError as error:
                raise EOFError("the other end is gone") from error
            if received == 0:
                raise EOFError("the other end closed the channel")
            rest = rest[received:]
        return whole

    def _size_problem(self, header_bytes: int, sizes: Sequence[int]) -> str:
        """What forbids a message of these sizes, or an empty text."""
        total = header_bytes + sum(sizes)
        if len(sizes) > BLOB_LIMIT:
            return f"a message has {len(sizes)} blobs, the limit is {BLOB_LIMIT}"
        if header_bytes > HEADER_LIMIT_BYTES:
            return f"a message header has {header_bytes} bytes, the limit is {HEADER_LIMIT_BYTES}"
        if total > self._limit_bytes:
            return f"a message has {total} bytes, the limit is {self._limit_bytes}"
        return ""


def _flat(blob: Buffer) -> memoryview:
    view = memoryview(blob)
    if view.c_contiguous and view.nbytes:
        try:
            return view.cast("B")
        except (TypeError, ValueError):  # element formats that memoryview cannot cast, such as complex numbers
            return memoryview(view.tobytes())
    return memoryview(view.tobytes())


def _fresh_memory(size: int) -> memoryview:
    if size >= _MAPPED_BYTES and sys.platform != "win32":
        return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    return memoryview(bytearray(size))


def _remaining(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline passed")
    return left


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a finite number")


# --- errors that cross a channel ---------------------------------------------------------------------------------


_PLAIN_ERRORS = {
    kind.__name__: kind
    for kind in (
        errors.NotAccepted,
        errors.ToolFailed,
        errors.Busy,
        errors.PtxSyntaxError,
        errors.WorkerDied,
        errors.WorkerTimeout,
        errors.OptimlError,
    )
}
_CODED_ERRORS = {kind.__name__: kind for kind in (errors.InvalidInput, errors.SetupError, errors.ModelFailed)}


def encode_error(error: OptimlError) -> dict[str, Any]:
    """The nearest class of `errors` with what it carries; a subclass from elsewhere crosses as its base."""
    if isinstance(error, errors.KernelFault):
        return {"kind": "KernelFault", "fault": dataclasses.asdict(error.fault)}
    if isinstance(error, errors.Unsupported):
        return {"kind": "Unsupported", "feature": error.feature, "line": error.line}
    names = (kind.__name__ for kind in type(error).__mro__)
    kind = next(name for name in names if name in _PLAIN_ERRORS or name in _CODED_ERRORS)
    return {"kind": kind, "message": str(error), "code": error.code}


def decode_error(record: Any) -> OptimlError:
    """The inverse of `encode_error`.

    Raises:
        FrameError: a record that no honest child sends.
    """
    try:
        kind = record["kind"]
        if kind == "KernelFault":
            return errors.KernelFault(_decode_fault(record["fault"]))
        if kind == "Unsupported":
            line = record["line"]
            return errors.Unsupported(str(record["feature"]), line=None if line is None else int(line))
        if kind in _CODED_ERRORS:
            return _CODED_ERRORS[kind](str(record["message"]), code=str(record["code"]))
        return _PLAIN_ERRORS[kind](str(record["message"]))
    except (KeyError, TypeError, ValueError) as error:
        raise FrameError("an error record is malformed") from error


def _decode_fault(record: dict[str, Any]) -> errors.Fault:
    other = record["other"]
    if other is not None:
        other = errors.OtherParty(block=_triple(other["block"]), thread=_triple(other["thread"]), line=other["line"])
    where = {name: None if record[name] is None else _triple(record[name]) for name in ("block", "thread")}
    return errors.Fault(**{**record, **where, "other": other})


def _triple(values: Sequence[Any]) -> tuple[int, int, int]:
    x, y, z = values
    return int(x), int(y), int(z)
