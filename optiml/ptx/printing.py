"""Device printf and assert: formats arguments that a kernel left in memory. There is no %n."""

from __future__ import annotations

import re
import struct
from typing import Any

from optiml.ptx import memory
from optiml.ptx.memory import Step
from optiml.ptx.simt import Group

PRINTF_LIMIT = 64 * 1024  # characters kept per launch
STRING_LIMIT = 4096
_DIRECTIVE = re.compile(r"%([-+ #0]*)(\*|\d+)?(?:\.(\*|\d+))?(hh|h|ll|l|j|z|t|L)?([%a-zA-Z])")


def formatted(template: str, read: Any, text_at: Any) -> str:
    """Expand a C format string.

    Args:
        template: the format, with flags, width, precision, length and the conversions d i u o x X c s p e f g a.
        read: function of a size in bytes giving the next argument as bytes (aligned to its size).
        text_at: function of an address giving the string there.
    """

    def expand(match: re.Match[str]) -> str:
        flags, width, precision, length, conversion = match.groups()
        if conversion == "%":
            return "%"
        if width == "*":
            width = str(int.from_bytes(read(4), "little", signed=True))
        if precision == "*":
            precision = str(int.from_bytes(read(4), "little", signed=True))
        head = "%" + flags + (width or "") + ("." + precision if precision is not None else "")
        size = 8 if length in ("l", "ll", "j", "z", "t") else 4
        if conversion in "di":
            return (head + "d") % int.from_bytes(read(size), "little", signed=True)
        if conversion in "uoxX":
            return (head + conversion.replace("u", "d")) % int.from_bytes(read(size), "little")
        if conversion == "c":
            return (head + "c") % chr(read(4)[0])
        if conversion in "eEfFgG":
            return str((head + conversion) % struct.unpack("<d", read(8))[0])
        if conversion in "aA":
            return str(float.hex(struct.unpack("<d", read(8))[0]))
        if conversion == "p":
            return f"0x{int.from_bytes(read(8), 'little'):x}"
        if conversion == "s":
            return str((head + "s") % text_at(int.from_bytes(read(8), "little")))
        return match[0]

    return _DIRECTIVE.sub(expand, template)


def print_formatted(name: str, arguments: list[int], result: int, line: int | None) -> Step:
    """The closure of a call to vprintf(format, arguments) or __assertfail(message, ...)."""

    def run(frame: list[Any], group: Group) -> None:
        formats = memory.full(group, frame[arguments[0]])
        buffers = memory.full(group, frame[arguments[1]])
        for position in range(group.n):

            def text_at(address: int, position: int = position) -> str:
                return memory.peek(group, position, address, STRING_LIMIT, line).split(b"\0")[0].decode("latin-1")

            template = text_at(int(formats[position]))
            if name == "__assertfail":
                memory.raise_fault(group, position, "trap", f"trap: assertion `{template}` failed", line=line)
            offset = 0

            def read(size: int, position: int = position) -> bytes:
                nonlocal offset
                offset = -(-offset // size) * size
                found = memory.peek(group, position, int(buffers[position]) + offset, size, line)
                offset += size
                return found

            _keep(group.batch.printed, formatted(template, read, text_at))
        frame[result] = memory.ONE_RESULT

    return run


def _keep(printed: list[str], text: str) -> None:
    room = PRINTF_LIMIT - sum(map(len, printed))
    if room > 0 and text:
        printed[:] = ["".join(printed) + text[:room]]
