"""The whole numbers in a kernel's own code: where it compares, steps and cuts.

Whatever goes wrong at one size only does so beside a number that the code holds: the last row of a tile, the k-th step
of an unrolled loop, the size that a kernel was written for. Sizes beside these numbers find it where sizes drawn
blindly hardly ever do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LARGEST_STEP = 4096  # larger steps are strides of addresses
LARGEST = 1 << 20  # numbers beyond are addresses, masks of bits or factors of a division
_OPERATION = re.compile(
    r"^\s*(?:@!?%p\d+\s+)?(setp\.\w+|add|sub|and|or|min|max|mad\.lo|mul\.lo|mul\.wide|div|rem|shl|shr)"
    r"\.[bsu](?:16|32|64)\s[^;]*,\s*(-?\d+)\s*;",
    re.MULTILINE,
)


_VARIABLE = re.compile(r"^\s*(?:\.visible\s+|\.extern\s+|\.weak\s+)?\.global\b", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What the integer instructions of a kernel hold, each in ascending order."""

    compared: tuple[int, ...]  # with something, for equality or order
    stepped: tuple[int, ...]  # added, masked off, multiplied with or divided by


def constants_of(ptx: str) -> Constants:
    """The constants of a kernel's PTX; a mask of low bits and a shift count as the power of two they stand for."""
    compared: set[int] = set()
    stepped: set[int] = set()
    for operation, text in _OPERATION.findall(ptx):
        value = abs(int(text))
        if operation == "and":
            value += 1
            if value.bit_count() != 1:
                continue
        elif operation in ("shl", "shr"):
            value = 1 << min(value, 40)
        if 2 <= value <= LARGEST:
            (compared if operation.startswith("setp") else stepped).add(value)
    return Constants(compared=tuple(sorted(compared)), stepped=tuple(sorted(stepped)))


def has_variables(ptx: str) -> bool:
    """Whether a kernel's module has variables of its own in global memory, which last from call to call."""
    return _VARIABLE.search(ptx) is not None
