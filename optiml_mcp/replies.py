"""What a tool answers: JSON that fits in 8 KB, complete in itself, with links to what was left out.

A reply is cut in this order until it fits: long logs are shortened, lists inside nested records keep their first
entries, sources of kernels become null with the URI that serves them, lists and then maps at the top keep their first
entries, whole fields go. Every cut is listed under the key `cut` with the full count and the URI, so that a reader
knows what is missing and where it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from optiml.codec import encode

MAX_REPLY_BYTES = 8000  # the contract allows 8 KB; the rest is room for a client that re-formats the JSON
# What a reader acts on: shortened only when nothing else is left to cut.
PROTECTED = ("summary", "next_action", "warnings", "kernel_id", "run_id", "job_id", "status", "reason", "uri")
MOST_CUTS_LISTED = 12
_ROOM_FOR_CUTS = 1500  # bytes: twelve entries with their URIs

Path = tuple[str | int, ...]
Edit = tuple[Path, Any]  # where, and what stands there instead


def size_of(value: Any) -> int:
    """Bytes of a JSON value in the widest usual notation (spaces, escaped non-ASCII)."""
    return len(json.dumps(value))


def fit(reply: Mapping[str, Any], *, uri: str | None, limit: int = MAX_REPLY_BYTES) -> dict[str, Any]:
    """The reply itself where it fits, else a copy cut to `limit` bytes.

    Args:
        reply: records and plain JSON values.
        uri: the resource that shows the whole of it; None where there is none.
        limit: bytes of the answer, as `size_of` counts them; at least 2000.
    """
    cut: dict[str, Any] = encode(reply)
    if size_of(cut) <= limit:
        return cut
    totals: dict[Path, tuple[int, str | None]] = {}
    for find in _STAGES:
        while size_of(cut) > limit - _ROOM_FOR_CUTS and (edits := find(cut)):
            for path, new in edits:
                old = _at(cut, path)
                total = len(old) if isinstance(old, str | list | dict) else 1
                totals.setdefault(path, (total, _kernel_uri(cut, path) or uri))
                cut = _replaced(cut, path, new)
    notes = [
        {"path": ".".join(map(str, path)), "total": total, "uri": whole}
        for path, (total, whole) in totals.items()
        if _exists(cut, path)  # a list above it may have been cut since
    ]
    return {**cut, "cut": notes[:MOST_CUTS_LISTED]}


# --- stages: each returns the edits of one pass, or nothing when it can do no more -----------------------------------
def _last_source_over(length: int) -> Callable[[dict[str, Any]], list[Edit]]:
    """The last kernel source: kernels come best first, so the last is the least wanted."""

    def find(reply: dict[str, Any]) -> list[Edit]:
        sources = [path for path, node in _walk(reply) if _is_source(path) and node is not None and len(node) > length]
        return [(sources[-1], None)] if sources else []

    return find


def _strings_over(length: int, *, protected: bool) -> Callable[[dict[str, Any]], list[Edit]]:
    def find(reply: dict[str, Any]) -> list[Edit]:
        return [
            (path, node[: length - 1] + "…")
            for path, node in (_walk(reply) if protected else _unprotected(reply))
            if isinstance(node, str) and len(node) > length and not _is_source(path)
        ]

    return find


def _largest_list(*, nested: bool) -> Callable[[dict[str, Any]], list[Edit]]:
    """The largest list; `nested` looks only below the top, and leaves kernels and problems whole."""

    def find(reply: dict[str, Any]) -> list[Edit]:
        lists = [
            (path, node)
            for path, node in _unprotected(reply)
            if isinstance(node, list) and len(node) > 1
            if not nested or (len(path) > 1 and not {"kernel", "problem"} & set(path))
        ]
        path, node = max(lists, key=lambda item: size_of(item[1]), default=((), []))
        return [(path, node[: len(node) // 2])] if lists else []

    return find


def _largest_map(reply: dict[str, Any]) -> list[Edit]:
    maps = [(path, node) for path, node in _unprotected(reply) if isinstance(node, dict) and len(node) > 8]
    path, node = max(maps, key=lambda item: size_of(item[1]), default=((), {}))
    return [(path, dict(list(node.items())[: max(8, len(node) // 2)]))] if maps else []


def _largest_field(reply: dict[str, Any]) -> list[Edit]:
    fields = [(key, node) for key, node in reply.items() if key not in PROTECTED and size_of(node) > 8]
    key, _ = max(fields, key=lambda item: size_of(item[1]), default=("", None))
    return [((key,), None)] if fields else []


def _half_the_warnings(reply: dict[str, Any]) -> list[Edit]:
    lists = [(path, node) for path, node in _walk(reply) if isinstance(node, list) and len(node) > 1]
    return [(path, node[: len(node) // 2]) for path, node in lists[:1]]


_STAGES: tuple[Callable[[dict[str, Any]], list[Edit]], ...] = (
    _last_source_over(MAX_REPLY_BYTES // 2),  # would crowd out everything else
    _strings_over(600, protected=False),
    _largest_list(nested=True),
    _last_source_over(0),
    _largest_list(nested=False),
    _largest_map,
    _strings_over(120, protected=False),
    _largest_field,
    _strings_over(600, protected=True),
    _half_the_warnings,
    _strings_over(60, protected=True),
)


# --- walking JSON ----------------------------------------------------------------------------------------------------
def _walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    yield path, value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _walk(item, (*path, index))


def _unprotected(reply: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    return ((path, node) for path, node in _walk(reply) if path and path[0] not in PROTECTED)


def _is_source(path: Path) -> bool:
    return path[-2:] == ("kernel", "source")


def _at(value: Any, path: Path) -> Any:
    for part in path:
        value = value[part]
    return value


def _exists(value: Any, path: Path) -> bool:
    for part in path:
        if isinstance(value, dict):
            if part not in value:
                return False
        elif not (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            return False
        value = value[part]
    return True


def _replaced(value: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    head, rest = path[0], path[1:]
    if isinstance(value, dict):
        return {key: _replaced(item, rest, new) if key == head else item for key, item in value.items()}
    return [_replaced(item, rest, new) if index == head else item for index, item in enumerate(value)]


def _kernel_uri(reply: Any, path: Path) -> str | None:
    """URI of the kernel that the value at `path` belongs to, from the nearest `kernel_id` above it."""
    for depth in range(len(path) - 1, 0, -1):
        node = _at(reply, path[:depth])
        if isinstance(node, dict) and isinstance(node.get("kernel_id"), str):
            return f"optiml://kernels/{node['kernel_id']}"
    return None
