"""Where the values of a lowered kernel come from: what it may read and write, and which loads are tried again.

Both follow registers through the records of a program without regard to the order of execution, so that what they say
holds whatever path a thread takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from optiml.ptx.native import table

RETRIED = 64  # flag of csrc/core.inc: a load of a value that an atomic looks at again
_CAS = 9
_LOADS = frozenset(number for name, number in table.EFFECT_NUMBERS.items() if name.startswith("load_"))
_WIDE_LOADS = frozenset(
    number for name, number in table.EFFECT_NUMBERS.items() if name.startswith("load_u8_") or name == "atomic_8"
)
_ATOMICS = frozenset(number for name, number in table.EFFECT_NUMBERS.items() if name.startswith("atomic_"))
_STORES = frozenset(number for name, number in table.EFFECT_NUMBERS.items() if name.startswith("store_"))
_COPY = table.EFFECT_NUMBERS["copy_async"]
_PACK = table.NUMBERS[table.ROWS["@pack8"]]
_SHIFT = table.NUMBERS[table.ROWS["shl.b64"]]
_SPACE_MASK, _SHARED, _LOCAL = 7, 2, 3
# what a register may hold besides addresses of parameters and variables
_ANY_ADDRESS, _HALF_ADDRESS = 1, 2


@dataclass(frozen=True, kw_only=True)
class Roots:
    """Parameters (by offset) and variables (by name) through whose value a kernel may access memory; None for any."""

    read: frozenset[int | str] | None
    written: frozenset[int | str] | None


def roots_of(program: Any) -> Roots:
    """What the addresses come from that a kernel reads and writes."""
    roots: list[int | str] = []
    origin: dict[int, int] = {}
    for slot, offset, dtype in program.parameters:
        if dtype.itemsize == 8:
            origin[slot] = 4 << len(roots)
            roots.append(offset)
    for slot, name, _ in program.symbols:
        origin[slot] = 4 << len(roots)
        roots.append(name)
    amounts = {slot: int(value.reshape(-1)[0]) for slot, value in program.constants if value.dtype.kind in "ui"}
    records = [record for segment in program.segments for record in segment.operations]
    changed = True
    while changed:
        changed = False
        for record in records:
            if record.op in _LOADS or record.op in _ATOMICS:
                found = _ANY_ADDRESS if record.op in _WIDE_LOADS else _HALF_ADDRESS
            else:
                found = 0
                for slot in (*record.s, *_matrix_slots(record)):
                    found |= origin.get(slot, 0)
                far = record.op == _SHIFT and amounts.get(record.s[1], 64) > 16
                if found & _HALF_ADDRESS and (record.op == _PACK or far):
                    found |= _ANY_ADDRESS  # an address put together of halves
            for slot in (*record.d, *_matrix_slots(record)):
                if slot >= 0 and origin.get(slot, 0) | found != origin.get(slot, 0):
                    origin[slot] = origin.get(slot, 0) | found
                    changed = True
    read = written = 0
    for record in records:
        if record.op != _COPY and record.aux & _SPACE_MASK in (_SHARED, _LOCAL):
            continue
        if record.op == _COPY or record.op in _LOADS or record.op in _ATOMICS:
            read |= origin.get(record.s[0], 0) or _ANY_ADDRESS
        if record.op in _STORES or record.op in _ATOMICS:
            written |= origin.get(record.s[0], 0) or _ANY_ADDRESS

    def named(bits: int) -> frozenset[int | str] | None:
        if bits & _ANY_ADDRESS:
            return None
        return frozenset(root for index, root in enumerate(roots) if bits >> index & 4)

    return Roots(read=named(read), written=named(written))


def _matrix_slots(record: Any) -> tuple[int, ...]:
    return () if record.extra is None else record.extra.slots


def mark_retried_loads(program: Any) -> None:
    """Flag the loads of a value that an atomic of the same thread looks at again: it does not matter if they race.

    That is the first guess of a compare-and-swap loop, and a look at the very word before an atomic to see if it is
    worth while.
    """
    records = [record for segment in program.segments for record in segment.operations]
    atomic = [(at, r) for at, r in enumerate(records) if r.op in _ATOMICS]
    if not atomic:
        return
    wanted = {r.s[1] for _, r in atomic if r.imm & 0xFF == _CAS}
    before = 0
    while len(wanted) != before:
        before = len(wanted)
        for record in records:
            if record.op not in _LOADS and record.op not in _ATOMICS and not wanted.isdisjoint(record.d):
                wanted.update(slot for slot in record.s if slot >= 0)
    last = {(r.s[0], r.raw[4], r.aux & _SPACE_MASK): at for at, r in atomic}
    for at, record in enumerate(records):
        if record.op not in _LOADS:
            continue
        place = (record.s[0], record.imm & 0xFFFFFFFF, record.aux & _SPACE_MASK)
        if at < last.get(place, 0) or not wanted.isdisjoint(record.d):
            record.aux |= RETRIED
