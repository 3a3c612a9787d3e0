"""The append-only log of a run: one line of JSON per event, on disk before the search goes on.

A run that is killed at any moment leaves at worst a torn last line, which loading drops and the next append overwrites.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from optiml.codec import encode
from optiml.errors import ToolFailed

JOURNAL_NAME = "journal.jsonl"
Event = Mapping[str, Any]


class Journal:
    """The events of one run, in memory and in a file. One writer at a time: the caller holds the run's lock."""

    def __init__(self, path: Path) -> None:
        """Open or create the journal at `path` and read what it holds.

        Raises:
            ToolFailed: a line other than the last one is damaged.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        data = path.read_bytes() if path.exists() else b""
        self._events, self._size = _read(data, path)

    def __iter__(self) -> Iterator[Event]:
        return iter(tuple(self._events))

    def __len__(self) -> int:
        return len(self._events)

    @property
    def size(self) -> int:
        """Bytes of the whole lines in the file."""
        return self._size

    def append(self, event: Event) -> None:
        """Write one event and wait until it is on disk."""
        line = (json.dumps(encode(event), separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n").encode()
        created = not self.path.exists()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(descriptor, self._size)  # drops a torn line of a run that was killed
            os.lseek(descriptor, self._size, os.SEEK_SET)
            written = 0
            while written < len(line):
                written += os.write(descriptor, line[written:])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if created:
            _sync_folder(self.path.parent)
        self._size += len(line)
        self._events.append(json.loads(line))


def read_events(path: Path) -> tuple[Event, ...]:
    """The whole events of a journal file, without opening it for writing.

    Raises:
        ToolFailed: a line other than the last one is damaged.
    """
    return tuple(_read(path.read_bytes(), path)[0]) if path.exists() else ()


def read_events_after(path: Path, size: int) -> tuple[tuple[Event, ...], int]:
    """The whole events after the first `size` bytes, which are whole lines, and how many bytes are whole lines then.

    Raises:
        ToolFailed: a line other than the last one is damaged.
    """
    with path.open("rb") as file:
        file.seek(size)
        events, more = _read(file.read(), path)
    return tuple(events), size + more


def _read(data: bytes, path: Path) -> tuple[list[Event], int]:
    """The events of whole lines, and how many bytes they take."""
    events: list[Event] = []
    size = 0
    lines = data.split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            event = json.loads(line)
        except (ValueError, UnicodeDecodeError) as error:
            if number == len(lines) - 1:
                return events, size  # the last line was torn by a crash that still wrote its newline
            raise ToolFailed(f"line {number} of the journal {path.name} is damaged; start a new run") from error
        events.append(event)
        size += len(line) + 1
    return events, size


def _sync_folder(folder: Path) -> None:
    """Make the new file's name durable too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
