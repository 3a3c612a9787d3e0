"""Address spaces: allocations, windows for shared, local and parameter memory, checked gathers and scatters.

A global address is `id << 36 | offset`: every allocation owns a range of 2**36 bytes, so that a wild pointer is
always caught and names the allocation it missed. Three low ids are windows through which generic addresses reach
shared, local and parameter memory.

The fast path of an access assumes that all threads stay within the allocation of the first one. It subtracts the
base, shifts to an element index as an unsigned number and lets numpy's own index check do the bounds check; a thread
outside makes the index huge. Only after that check has failed do the slow functions here find out why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from optiml.errors import Fault, KernelFault
from optiml.ptx.numerics import F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64

if TYPE_CHECKING:
    from optiml.ptx.simt import Group

WINDOW_BITS = 36
SHARED_WINDOW, LOCAL_WINDOW, PARAM_WINDOW = 1, 2, 3
FIRST_ALLOCATION = 16
WINDOW_MASK = (1 << WINDOW_BITS) - 1

WIDE = np.dtype(np.complex128)  # 16 bytes moved as one element
VIEW_DTYPES: tuple[np.dtype[Any], ...] = (U8, I8, U16, I16, F16, U32, I32, F32, U64, I64, F64, WIDE)
CODE = {dtype: code for code, dtype in enumerate(VIEW_DTYPES)}
UNIFORM_ZERO = np.zeros(1, I64)

Array = Any


def typed_views(data: Array) -> list[Array]:
    """`data` (uint8) seen as every element type, each cut to whole elements; indexed by `CODE`."""
    return [data[: len(data) // dtype.itemsize * dtype.itemsize].view(dtype) for dtype in VIEW_DTYPES]


class Allocation:
    """One global memory allocation.

    Attributes:
        base: device address of its first byte.
        data: `[nbytes]` uint8, the contents.
        views: `data` by element type, see `typed_views`.
        bases: by constant offset of an instruction, `base - offset` as a 0-d uint64 array.
        valid: `[nbytes]` uint8, which bytes have been written; None if that is not tracked.
    """

    __slots__ = ("base", "bases", "data", "name", "nbytes", "number", "valid", "views")

    def __init__(self, number: int, nbytes: int, name: str) -> None:
        self.number = number
        self.base = number << WINDOW_BITS
        self.nbytes = nbytes
        self.name = name
        self.data = np.zeros(nbytes, np.uint8)
        self.views = typed_views(self.data)
        self.bases: dict[int, Array] = {0: np.array(self.base, U64)}
        self.valid: Array = None

    def shifted(self, offset: int) -> Array:
        """`base - offset`, so that `register - shifted(offset)` is an offset into the allocation."""
        found = np.array((self.base - offset) & 0xFFFFFFFFFFFFFFFF, U64)
        self.bases[offset] = found
        return found


# -- faults -------------------------------------------------------------------------------------------------------

_VERB = {"read": "read", "write": "write", "atomic": "atomic access"}


def raise_fault(
    group: Group, position: int, kind: str, detail: str, *, line: int | None, access: str | None = None,
    nbytes: int | None = None, address: int | None = None,
) -> None:  # fmt: skip
    """Raise KernelFault for the thread at `position` in `group`."""
    block, thread = group.batch.coordinates(int(group.lanes[position]))
    raise KernelFault(
        Fault(
            kind=kind,
            access=access,
            bytes=nbytes,
            address=address,
            block=block,
            thread=thread,
            line=line,
            detail=detail,
        )
    )


def _global_problem(group: Group, address: int, nbytes: int, access: str) -> tuple[str, str] | None:
    """What is wrong with an access to global memory: (kind, detail), or None."""
    verb = _VERB[access]
    allocation = group.memory.get(address >> WINDOW_BITS)
    if allocation is None:
        window = address >> WINDOW_BITS
        if window == 0:
            return "out_of_bounds", f"out of bounds: {verb} of {nbytes} bytes through the null pointer (0x{address:x})"
        if window < FIRST_ALLOCATION:
            return "illegal", f"illegal address: global {verb} of {nbytes} bytes at 0x{address:x}, not global memory"
        return "out_of_bounds", f"out of bounds: {verb} of {nbytes} bytes at 0x{address:x}, in no allocation"
    offset = address & WINDOW_MASK
    where = f'an allocation of {allocation.nbytes} bytes ("{allocation.name}")'
    if offset + nbytes > allocation.nbytes:
        if offset >= 1 << (WINDOW_BITS - 1):  # just below the next range: a negative offset from that allocation
            after = group.memory.get((address >> WINDOW_BITS) + 1)
            if after is not None:
                where = f'an allocation of {after.nbytes} bytes ("{after.name}")'
                offset = address - after.base
        return "out_of_bounds", f"out of bounds: {verb} of {nbytes} bytes at offset {offset} in {where}"
    if offset % nbytes:
        return "misaligned", f"misaligned: {verb} of {nbytes} bytes at offset {offset} in {where}"
    return None


def _before_first(group: Group, address: int, nbytes: int, access: str) -> tuple[str, str] | None:
    """A negative offset from the allocation whose range follows the address."""
    after = group.memory.get((address >> WINDOW_BITS) + 1)
    if after is None or (address & WINDOW_MASK) < 1 << (WINDOW_BITS - 1):
        return None
    verb = _VERB[access]
    return (
        "out_of_bounds",
        f"out of bounds: {verb} of {nbytes} bytes at offset {address - after.base} in an allocation of "
        f'{after.nbytes} bytes ("{after.name}")',
    )


def _window_problem(name: str, size: int, offset: int, nbytes: int, access: str) -> tuple[str, str] | None:
    verb = _VERB[access]
    if offset < 0 or offset + nbytes > size:
        return "out_of_bounds", f"out of bounds: {verb} of {nbytes} bytes at offset {offset} in {size} bytes of {name}"
    if offset % nbytes:
        return "misaligned", f"misaligned: {verb} of {nbytes} bytes at offset {offset} in {name}"
    return None


def _raise_if(
    problem: tuple[str, str] | None, group: Group, position: int, line: int | None, access: str, nbytes: int,
    address: int,
) -> None:  # fmt: skip
    if problem is not None:
        raise_fault(group, position, problem[0], problem[1], line=line, access=access, nbytes=nbytes, address=address)


# -- slow paths: any mixture of allocations and windows --------------------------------------------------------------

Part = tuple[list[Array], Array, Array]  # typed views, byte offsets (int64), positions in the group


def full(group: Group, values: Array) -> Array:
    """`values` with one entry per thread of the group."""
    return values if len(values) == group.n else np.broadcast_to(values, group.n)


def locate(group: Group, addresses: Array, nbytes: int, space: str, access: str, line: int | None) -> list[Part]:
    """Split an access by allocation or window, with every check done.

    Args:
        addresses: `[n]` or `[1]` uint64, addresses in `space` with the instruction's offset already added.
        space: "global", "const", "shared", "local", "param" or "generic".

    Raises:
        KernelFault: for the first thread whose access is out of bounds, misaligned or illegal.
    """
    wide = full(group, addresses).astype(U64)
    batch = group.batch
    if space in ("shared", "local", "param"):
        window = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW}[space]
        return [_window_part(group, window, wide.astype(I64), nbytes, np.arange(group.n), access, line)]
    windows = (wide >> np.uint64(WINDOW_BITS)).astype(I64)
    numbers = np.unique(windows)
    if len(numbers) == 1 and int(numbers[0]) in group.memory:
        return [_global_part(group, int(numbers[0]), wide, nbytes, np.arange(group.n), access, line)]
    if space != "generic" or any(int(n) not in group.memory and int(n) > PARAM_WINDOW for n in numbers) or 0 in numbers:
        for position in range(group.n):
            address = int(wide[position])
            if space == "generic" and SHARED_WINDOW <= address >> WINDOW_BITS <= PARAM_WINDOW:
                continue
            problem = _global_problem(group, address, nbytes, access)
            if problem is not None and address >> WINDOW_BITS not in group.memory:
                problem = _before_first(group, address, nbytes, access) or problem
            _raise_if(problem, group, position, line, access, nbytes, address)
    parts = []
    for number in numbers:
        positions = np.flatnonzero(windows == number)
        if int(number) <= PARAM_WINDOW and batch is not None:
            offsets = (wide[positions] & np.uint64(WINDOW_MASK)).astype(I64)
            parts.append(_window_part(group, int(number), offsets, nbytes, positions, access, line))
        else:
            parts.append(_global_part(group, int(number), wide, nbytes, positions, access, line))
    return parts


def _global_part(
    group: Group, number: int, addresses: Array, nbytes: int, positions: Array, access: str, line: int | None
) -> Part:
    allocation = group.memory[number]
    offsets = (addresses[positions] - np.uint64(allocation.base)).astype(I64)
    bad = (offsets < 0) | (offsets + nbytes > allocation.nbytes) | (offsets % nbytes != 0)
    if np.count_nonzero(bad):
        first = int(positions[np.argmax(bad)])
        address = int(addresses[first])
        _raise_if(_global_problem(group, address, nbytes, access), group, first, line, access, nbytes, address)
    return allocation.views, offsets, positions


def _window_part(
    group: Group, window: int, offsets: Array, nbytes: int, positions: Array, access: str, line: int | None
) -> Part:
    batch = group.batch
    if window == SHARED_WINDOW:
        name, size, views = "shared memory", batch.shared_bytes, batch.shared_views
        start = batch.shared_start(group.lanes[positions])
    elif window == LOCAL_WINDOW:
        name, size, views = "local memory", batch.local_bytes, batch.local_views
        start = batch.local_start(group.lanes[positions])
    else:
        name, size, views = "kernel parameters", len(batch.parameters), batch.parameter_views
        start = np.zeros(len(positions), I64)
    bad = (offsets < 0) | (offsets + nbytes > size) | (offsets % nbytes != 0)
    if np.count_nonzero(bad):
        where = int(np.argmax(bad))
        first, offset = int(positions[where]), int(offsets[where])
        _raise_if(_window_problem(name, size, offset, nbytes, access), group, first, line, access, nbytes, offset)
    return views, start + offsets, positions


def gather(group: Group, addresses: Array, code: int, space: str, line: int | None, nbytes: int = 0) -> Array:
    """Load one element of type `VIEW_DTYPES[code]` per thread through the slow path."""
    dtype = VIEW_DTYPES[code]
    parts = locate(group, addresses, nbytes or dtype.itemsize, space, "read", line)
    result = np.empty(group.n, dtype)
    for views, offsets, positions in parts:
        result[positions] = views[code][offsets // dtype.itemsize]
    return result


def scatter(group: Group, addresses: Array, values: Array, code: int, space: str, line: int | None) -> None:
    """Store one element per thread through the slow path."""
    dtype = VIEW_DTYPES[code]
    parts = locate(group, addresses, dtype.itemsize, space, "write", line)
    values = full(group, values)
    for views, offsets, positions in parts:
        views[code][offsets // dtype.itemsize] = values[positions]


# -- fast paths: closures bound once per instruction -----------------------------------------------------------------

Step = Callable[[list[Array], "Group"], None]
_or = np.bitwise_or.reduce
_subtract, _shift, _add, _and = np.subtract, np.right_shift, np.add, np.bitwise_and
_POSITIVE = np.array((1 << 63) - 1, U64)
_SHIFTS = {size: np.array(size.bit_length() - 1, U64) for size in (1, 2, 4, 8, 16)}
_SHIFTS_I64 = {size: np.array(size.bit_length() - 1, I64) for size in (1, 2, 4, 8, 16)}


def offset_address(addresses: Array, offset: int) -> Array:
    """Register value plus the constant of the operand, wrapping in the register's width."""
    if not offset:
        return addresses
    bits = 8 * addresses.dtype.itemsize
    return addresses + np.array(offset & ((1 << bits) - 1), addresses.dtype)


def global_index(size: int, offset: int, aligned: bool) -> Callable[[Array, Group], tuple[Allocation, Array] | None]:
    """A function from addresses (uint64) to the allocation of the first thread and element indices (int64).

    It answers None if that thread is in no allocation or if some address is not a multiple of `size` (unless
    `aligned` says that this is known). An index may still be out of range; unsigned, so never negative.
    """
    shift = _SHIFTS[size]
    mask = size - 1

    def index(addresses: Array, group: Group) -> tuple[Allocation, Array] | None:
        allocation = group.memory.get(addresses.item(0) + offset >> 36)
        if allocation is None:
            return None
        base = allocation.bases.get(offset)
        if base is None:
            base = allocation.shifted(offset)
        relative = _subtract(addresses, base)
        if not aligned and int(_or(relative)) & mask:
            return None
        # bytes need no shift, but a negative offset must not come out as a negative index
        relative = _shift(relative, shift) if mask else _and(relative, _POSITIVE)
        return allocation, relative.view(I64)

    return index


def load_global(target: int, source: int, offset: int, code: int, space: str, line: int | None, aligned: bool) -> Step:
    """frame[target] = global[frame[source] + offset], elements of type `VIEW_DTYPES[code]`."""
    index = global_index(VIEW_DTYPES[code].itemsize, offset, aligned)

    def run(frame: list[Array], group: Group) -> None:
        addresses = frame[source]
        found = index(addresses, group)
        if found is not None:
            try:
                frame[target] = found[0].views[code].take(found[1])
                return
            except IndexError:
                pass
        frame[target] = gather(group, offset_address(addresses, offset), code, space, line)

    return run


def store_global(
    address: int, offset: int, source: int, convert: Callable[[Array], Array] | None, code: int, line: int | None,
    aligned: bool,
) -> Step:  # fmt: skip
    """global[frame[address] + offset] = frame[source], elements of type `VIEW_DTYPES[code]`; the last thread wins."""
    index = global_index(VIEW_DTYPES[code].itemsize, offset, aligned)

    def run(frame: list[Array], group: Group) -> None:
        addresses = frame[address]
        values = frame[source]
        if convert is not None:
            values = convert(values)
        found = index(addresses, group)
        if found is not None:
            try:
                found[0].views[code][found[1]] = values if len(found[1]) > 1 else values[-1:]
                return
            except IndexError:
                pass
        scatter(group, offset_address(addresses, offset), values, code, "global", line)

    return run


def shared_index(
    size: int, offset: int, start_slot: int, space: str, aligned: bool
) -> Callable[[list[Array], Array, Group], Array | None]:
    """A function from addresses in shared or local memory to element indices (int64), or None if a check failed.

    With a single block, whose memory is exactly the array, numpy's own bounds check is enough for aligned accesses;
    addresses are unsigned, so none becomes a negative index.
    """
    shift = _SHIFTS_I64[size]
    mask = size - 1
    shared = space == "shared"

    def index(frame: list[Array], addresses: Array, group: Group) -> Array | None:
        if offset:
            addresses = offset_address(addresses, offset)
        start = frame[start_slot]
        if start is UNIFORM_ZERO and aligned:
            if addresses.dtype.itemsize == 8:
                wide = _shift(addresses, _SHIFTS[size]) if mask else _and(addresses, _POSITIVE)
                return wide.view(I64)
            return _shift(addresses.astype(I64), shift)
        batch = group.batch
        limit = (batch.shared_bytes if shared else batch.local_bytes) - size
        bits = int(_or(addresses))
        if bits & mask or (bits > limit and int(addresses.max()) > limit):
            return None
        relative = addresses.astype(I64)
        if start is not UNIFORM_ZERO:
            relative = _add(relative, start)
        return _shift(relative, shift) if mask else relative

    return index


def load_window(
    target: int, source: int, offset: int, code: int, start_slot: int, space: str, line: int | None, aligned: bool
) -> Step:
    """frame[target] = shared or local memory at frame[source] + offset."""
    index = shared_index(VIEW_DTYPES[code].itemsize, offset, start_slot, space, aligned)
    shared = space == "shared"

    def run(frame: list[Array], group: Group) -> None:
        addresses = frame[source]
        found = index(frame, addresses, group)
        if found is not None:
            batch = group.batch
            try:
                frame[target] = (batch.shared_views if shared else batch.local_views)[code].take(found)
                return
            except IndexError:
                pass
        frame[target] = gather(group, offset_address(addresses, offset), code, space, line)

    return run


def store_window(
    address: int, offset: int, source: int, convert: Callable[[Array], Array] | None, code: int, start_slot: int,
    space: str, line: int | None, aligned: bool,
) -> Step:  # fmt: skip
    """Shared or local memory at frame[address] + offset = frame[source]; the last thread wins."""
    index = shared_index(VIEW_DTYPES[code].itemsize, offset, start_slot, space, aligned)
    shared = space == "shared"

    def run(frame: list[Array], group: Group) -> None:
        addresses = frame[address]
        values = frame[source]
        if convert is not None:
            values = convert(values)
        found = index(frame, addresses, group)
        if found is not None:
            batch = group.batch
            views = batch.shared_views if shared else batch.local_views
            try:
                views[code][found] = values if len(found) > 1 else values[-1:]
                return
            except IndexError:
                pass
        scatter(group, offset_address(addresses, offset), values, code, space, line)

    return run


def load_any(target: int, source: int, offset: int, code: int, space: str, line: int | None) -> Step:
    """A generic or parameter load: every thread may be in another window."""

    def run(frame: list[Array], group: Group) -> None:
        frame[target] = gather(group, offset_address(frame[source], offset), code, space, line)

    return run


def store_any(
    address: int, offset: int, source: int, convert: Callable[[Array], Array] | None, code: int, space: str,
    line: int | None,
) -> Step:  # fmt: skip
    """A generic store."""

    def run(frame: list[Array], group: Group) -> None:
        values = frame[source]
        scatter(group, offset_address(frame[address], offset), values if convert is None else convert(values),
                code, space, line)  # fmt: skip

    return run


ONE_RESULT = np.ones(1, U32)  # what vprintf returns: success


def peek(group: Group, position: int, address: int, nbytes: int, line: int | None) -> bytes:
    """Up to `nbytes` bytes at a generic address as the thread at `position` sees it, fewer at the end of its memory."""
    one = type(group)(group.batch, group.lanes[position : position + 1], [], 0)
    views, offsets, _ = locate(one, np.array([address], U64), 1, "generic", "read", line)[0]
    start = int(offsets[0])
    end = start + nbytes
    if address >> WINDOW_BITS == LOCAL_WINDOW:
        end = min(end, int(group.batch.local_start(one.lanes)[0]) + group.batch.local_bytes)
    found: bytes = views[CODE[U8]][start:end].tobytes()
    return found
