"""Unified diffs of kernel sources: made by the standard library, applied strictly."""

from __future__ import annotations

import difflib
import re

from optiml.errors import InvalidInput

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


def make_diff(before: str, after: str, *, name: str = "kernel.cu") -> str:
    """The unified diff between two sources; empty if they are equal."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
    )
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def apply_diff(text: str, diff: str) -> str:
    """Apply a unified diff to one text.

    A hunk goes where its old lines stand: at the stated line, else at the only other place that has them.

    Raises:
        InvalidInput: no hunks, a malformed hunk, or old lines that are missing or ambiguous.
    """
    source = text.splitlines(keepends=True)
    hunks = _hunks(diff)
    if not hunks:
        raise InvalidInput("the diff holds no hunk (@@ -a,b +c,d @@); send a unified diff")
    result: list[str] = []
    position = 0
    for start, old, new in hunks:
        at = _place(source, old, start - 1 if old else start, position)
        result += source[position:at]
        result += [line + "\n" for line in new]
        position = at + len(old)
    return "".join(result + source[position:])


def _hunks(diff: str) -> list[tuple[int, list[str], list[str]]]:
    hunks: list[tuple[int, list[str], list[str]]] = []
    old: list[str] = []
    new: list[str] = []
    left_old = left_new = 0
    for line in diff.splitlines():
        header = _HUNK.match(line)
        if header is not None and left_old <= 0 and left_new <= 0:
            old, new = [], []
            left_old = int(header.group(2) or 1)
            left_new = int(header.group(4) or 1)
            hunks.append((int(header.group(1)), old, new))
        elif hunks and (left_old > 0 or left_new > 0):
            mark, body = line[:1], line[1:]
            if mark not in (" ", "-", "+", "", "\\"):
                raise InvalidInput(f"the diff has a line that is neither context nor change: {line[:60]!r}")
            if mark in (" ", "-", ""):
                old.append(body)
                left_old -= 1
            if mark in (" ", "+", ""):
                new.append(body)
                left_new -= 1
    if left_old > 0 or left_new > 0:
        raise InvalidInput("the diff ends in the middle of a hunk")
    return hunks


def _place(source: list[str], old: list[str], wanted: int, earliest: int) -> int:
    def stands_at(index: int) -> bool:
        return [line.rstrip("\r\n") for line in source[index : index + len(old)]] == old

    if not old:
        return min(max(wanted, earliest), len(source))
    if wanted >= earliest and stands_at(wanted):
        return wanted
    places = [index for index in range(earliest, len(source) - len(old) + 1) if stands_at(index)]
    if len(places) == 1:
        return places[0]
    what = "are not in the base" if not places else f"stand in {len(places)} places of the base"
    raise InvalidInput(f"the diff's old lines near line {wanted + 1} {what}; make the diff against the base's own text")
