"""What a PTX text says of its kernels: parameters and launch bounds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A kernel parameter as the PTX declares it."""

    type: str  # "u64", "f32", "b8" for structs
    bytes: int


_TYPE_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}


@lru_cache(maxsize=64)
def entry_parameters(ptx: str) -> Mapping[str, tuple[Parameter, ...]]:
    """Parameters of every kernel entry in a PTX text."""
    entries: dict[str, tuple[Parameter, ...]] = {}
    for match in re.finditer(r"\.entry\s+([\w$.]+)\s*(?:\(([^)]*)\))?", ptx):
        parameters = []
        for item in re.finditer(r"\.param\s+([^,]*)", match.group(2) or ""):
            words = item.group(1)
            kind = re.search(r"\.([usfb])(8|16|32|64)\b", words)
            count = re.search(r"\[(\d+)\]", words)
            if kind is not None:
                size = _TYPE_BYTES[kind.group(2)] * (int(count.group(1)) if count else 1)
                parameters.append(Parameter(type=kind.group(1) + kind.group(2), bytes=size))
        entries[match.group(1)] = tuple(parameters)
    return entries


def _bounds(ptx: str, symbol: str, word: str) -> tuple[int, int, int] | None:
    """The sizes that a directive of a kernel's head gives, 1 for those it leaves out."""
    match = re.search(rf"\.entry\s+{re.escape(symbol)}\s*(?:\([^)]*\))?([^{{]*)\{{", ptx)
    found = re.search(rf"\.{word}\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?", match.group(1)) if match else None
    if found is None:
        return None
    x, y, z = (int(size or 1) for size in found.groups())
    return x, y, z


def required_block(ptx: str, symbol: str) -> tuple[int, int, int] | None:
    """The only block that the kernel may be launched with (`.reqntid`); None if it leaves the choice."""
    return _bounds(ptx, symbol, "reqntid")


def most_threads(ptx: str, symbol: str) -> int:
    """Threads a block may have by the kernel's own launch bounds; 1024 without any."""
    x, y, z = _bounds(ptx, symbol, "maxntid") or (1024, 1, 1)
    return min(x * y * z, 1024)
