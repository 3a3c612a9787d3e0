"""Runs a lowered kernel: groups of threads at one place, split by branches, merged again, parked at barriers.

A `Group` owns some threads of a batch of blocks, all about to execute the same segment, and a frame: one numpy array
per register with one entry per thread (or a single entry when all threads share the value). A branch that divides a
group makes two groups with frames of their own; groups at the same place are merged when it is their turn. The group
at the lowest place always runs, which brings divergent threads back together at the join. Two things bend that rule:
a group that spins while others wait gives way after a time slice, and an instruction that speaks for a whole warp
waits for the missing threads of its warps.

Threads are numbered by slot: `block position in the batch * threads per block rounded up to whole warps + thread`, so
`slot >> 5` is a warp. Lanes of a group are always sorted by slot.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from optiml.ptx.memory import UNIFORM_ZERO, Allocation, raise_fault, typed_views

if TYPE_CHECKING:
    from optiml.ptx.counters import Recorder
    from optiml.ptx.program import BarrierCall, Program, Segment

Array = Any
Frame = list[Array]

WARP = 32
# Ways a segment ends.
FALL, JUMP, BRANCH, EXIT, BARRIER = range(5)

# A loop that polls memory gives way after this many segments while other groups wait, any other loop much later;
# the group that gets its turn then keeps it for HOLD segments.
POLL_SLICE, POLL_SLICE_NEXT, LONG_SLICE, HOLD = 256, 16, 50_000, 256
MAX_DEPTH = 4  # of lazy groups within lazy groups
CHECK_EVERY = 1 << 14  # warp instructions between two looks at the clock
POISON = 0x7FFFDEAD  # what a shuffle from a thread that is not there returns: a NaN, and no plausible integer


class Group:
    """Threads that execute together.

    A group that a branch made is lazy: its registers stay in the frame of the group it was part of until an
    instruction reads them. When the parts of that group meet again, only what they have written must be put together.

    Attributes:
        lanes: `[n]` int64 slots, ascending.
        frame: registers; each `[n]` or `[1]`.
        place: index of the segment to run next.
        parent, chosen: the group this one is part of and the positions of its threads there; None if it stands alone.
        pending: registers still to be taken from the parent.
        written: registers set since then.
    """

    __slots__ = (
        "batch", "chosen", "depth", "frame", "full_rows", "lanes", "memory", "n", "parent", "pending", "place",
        "position", "rows", "warps", "whole", "written",
    )  # fmt: skip

    def __init__(self, batch: Batch, lanes: Array, frame: Frame, place: int) -> None:
        self.batch = batch
        self.memory = batch.memory
        self.lanes = lanes
        self.n = len(lanes)
        self.frame = frame
        self.place = place
        self.whole = False  # known to hold all living threads of each of its warps
        self.warps = 0  # distinct warps, 0 = not counted yet
        self.rows: Array = None  # warp numbers, ascending
        self.position: Array = None  # index of each thread in a [warps, 32] matrix; None if that is the identity
        self.full_rows = False
        self.parent: Group | None = None
        self.chosen: Array = None
        self.depth = 0
        self.pending: set[int] = set()
        self.written: set[int] = set()

    def count_warps(self) -> int:
        """Number of distinct warps among the threads."""
        if not self.warps:
            self.arrange()
        return self.warps

    def matrix_rows(self) -> Array:
        """`[warps]` warp numbers, ascending."""
        if not self.warps:
            self.arrange()
        return self.rows

    def arrange(self) -> None:
        """Find the place of each thread in a matrix with one row of 32 per warp."""
        lanes = self.lanes
        numbers = lanes >> 5
        starts_warps = self.n & 31 == 0 and not np.count_nonzero(lanes[::32] & 31)
        if starts_warps and not np.count_nonzero(lanes[31::32] - lanes[::32] != 31):
            self.rows = numbers[::32]
            self.position = None
            self.full_rows = True
            self.warps = self.n >> 5
            return
        starts = np.empty(self.n, bool)
        starts[0] = True
        np.not_equal(numbers[1:], numbers[:-1], out=starts[1:])
        self.rows = numbers[starts]
        self.warps = len(self.rows)
        self.position = (np.cumsum(starts) - 1) * WARP + (lanes & 31)
        self.full_rows = False

    def matrix(self, values: Array, fill: Any) -> Array:
        """`values` as `[warps, 32]`, `fill` where the group has no thread."""
        if not self.warps:
            self.arrange()
        if len(values) != self.n:
            values = np.broadcast_to(values, self.n)
        if self.full_rows:
            return values.reshape(-1, WARP)
        out = np.full(self.warps * WARP, fill, values.dtype)
        out[self.position] = values
        return out.reshape(-1, WARP)

    def flat(self, matrix: Array) -> Array:
        """The entries of a `[warps, 32]` matrix that belong to the threads."""
        flat = np.ascontiguousarray(matrix).reshape(-1)
        return flat if self.full_rows else flat[self.position]

    def present(self) -> Array:
        """`[warps, 32]` bool: which threads the group has."""
        if not self.warps:
            self.arrange()
        if self.full_rows:
            return np.ones((self.warps, WARP), bool)
        out = np.zeros(self.warps * WARP, bool)
        out[self.position] = True
        return out.reshape(-1, WARP)

    def register(self, slot: int) -> Array:
        """The value of a register, fetched from the parent if need be."""
        if slot in self.pending:
            assert self.parent is not None
            value = self.parent.register(slot)
            if len(value) != 1:
                value = value.take(self.chosen)
            self.frame[slot] = value
            self.pending.discard(slot)
            return value
        return self.frame[slot]

    def part(self, chosen: Array, live: Sequence[int], place: int, template: Frame) -> Group:
        """A lazy group of the threads at positions `chosen`, which will need the registers `live`."""
        group = Group(self.batch, self.lanes.take(chosen), template.copy(), place)
        group.parent = self
        group.chosen = chosen
        group.pending = set(live)
        group.depth = self.depth + 1
        if group.depth > MAX_DEPTH:
            for slot in live:
                group.register(slot)
            group.parent, group.chosen, group.depth = None, None, 0
        return group

    def subset(self, chosen: Array, live: Sequence[int], template: Frame) -> Group:
        """The threads at positions `chosen` with the registers `live`, for one guarded instruction."""
        frame = template.copy()
        mine = self.frame
        for slot in live:
            value = mine[slot]
            frame[slot] = value if len(value) == 1 else value.take(chosen)
        return Group(self.batch, self.lanes.take(chosen), frame, self.place)


def merge(groups: list[Group], live: Sequence[int], template: Frame) -> Group:
    """One group of the threads of several that stand at the same place."""
    while len(groups) > 1:
        family: dict[int, list[Group]] = {}
        for group in groups:
            family.setdefault(id(group.parent), []).append(group)
        whole = next(
            (parts for parts in family.values()
             if parts[0].parent is not None and sum(p.n for p in parts) == parts[0].parent.n), None
        )  # fmt: skip
        if whole is None:
            break
        groups = [group for group in groups if group not in whole]
        groups.append(_rejoined(whole, live))
    return groups[0] if len(groups) == 1 else _concatenated(groups, live, template)


def _shared_value(values: list[Array]) -> Array:
    """The value that all arrays hold if each has one entry and all are equal, else None."""
    first = values[0]
    if any(len(v) != 1 for v in values):
        return None
    if all(v is first for v in values):
        return first
    bits = first.tobytes()
    return first if all(v.tobytes() == bits for v in values) else None


def _rejoined(parts: list[Group], live: Sequence[int]) -> Group:
    """The parent of `parts`, which are all of its threads, with what they have written since they parted."""
    parent = parts[0].parent
    assert parent is not None
    frame = parent.frame.copy()
    group = Group(parent.batch, parent.lanes, frame, parts[0].place)
    group.parent, group.chosen, group.depth = parent.parent, parent.chosen, parent.depth
    group.whole = parent.whole
    group.warps, group.rows, group.position, group.full_rows = (
        parent.warps, parent.rows, parent.position, parent.full_rows
    )  # fmt: skip
    written = set().union(*[part.written for part in parts])
    for slot in written.intersection(live):
        writers = [part for part in parts if slot in part.written]
        if len(writers) == len(parts):
            shared = _shared_value([part.frame[slot] for part in parts])
            if shared is not None:
                frame[slot] = shared
                continue
            wide = np.empty(parent.n, parts[0].frame[slot].dtype)
        else:
            old = parent.register(slot)
            wide = old.copy() if len(old) == parent.n else np.full(parent.n, old[0], old.dtype)
        for part in writers:
            wide[part.chosen] = part.frame[slot]
        frame[slot] = wide
    group.pending = parent.pending - written
    if group.parent is not None:
        group.pending.intersection_update(live)
        group.written = parent.written | written
    return group


def _concatenated(groups: list[Group], live: Sequence[int], template: Frame) -> Group:
    lanes = np.concatenate([g.lanes for g in groups])
    order = np.argsort(lanes, kind="stable")
    frame = template.copy()
    total = len(lanes)
    ordered = not np.count_nonzero(order[1:] < order[:-1])
    for slot in live:
        values = [g.register(slot) for g in groups]
        shared = _shared_value(values)
        if shared is not None:
            frame[slot] = shared
            continue
        wide = np.empty(total, values[0].dtype)
        start = 0
        for g, v in zip(groups, values, strict=True):
            wide[start : start + g.n] = v
            start += g.n
        frame[slot] = wide if ordered else wide.take(order)
    return Group(groups[0].batch, lanes if ordered else lanes.take(order), frame, groups[0].place)


class Waiting:
    """A group parked at barrier `number`."""

    __slots__ = ("call", "group", "number", "segment")

    def __init__(self, group: Group, segment: Segment, call: BarrierCall, number: int) -> None:
        self.group = group
        self.segment = segment
        self.call = call
        self.number = number


_NOTHING = typed_views(np.zeros(0, np.uint8))


def _fresh(nbytes: int) -> list[Array]:
    """Views of new memory, filled with a pattern that is NaN as a float and -1 as an integer."""
    return typed_views(np.full(nbytes, 0xFF, np.uint8)) if nbytes else _NOTHING


class Batch:
    """Blocks that run together, with their shared and local memory and the scheduler's state.

    Attributes:
        blocks: `[b]` int64 linear block ids.
        threads: threads per block; `pitch` the same rounded up to whole warps.
        alive: `[b * pitch]` bool, threads that have not exited.
    """

    def __init__(
        self,
        program: Program,
        *,
        template: Frame,
        memory: dict[int, Allocation],
        parameters: bytes,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        blocks: Array,
        recorder: Recorder | None,
        budget: Budget,
        printed: list[str],
    ) -> None:
        self.program = program
        self.template = template
        self.memory = memory
        self.grid = grid
        self.block = block
        self.blocks = blocks
        self.threads = block[0] * block[1] * block[2]
        self.pitch = -(-self.threads // WARP) * WARP
        self.recorder = recorder
        self.budget = budget
        self.printed = printed
        count = len(blocks)
        self.shared_bytes = shared_bytes
        self.shared_pitch = -(-shared_bytes // 16) * 16
        # one block: views end where its memory ends, so that numpy's own check sees the limit
        self.shared_views = _fresh(shared_bytes if count == 1 else self.shared_pitch * count)
        self.local_bytes = program.local_bytes
        self.local_pitch = -(-program.local_bytes // 16) * 16
        self.local_views = _fresh(self.local_pitch * count * self.pitch)
        self.parameters = parameters
        self.alive = np.zeros(count * self.pitch, bool)
        self.alive.reshape(count, self.pitch)[:, : self.threads] = True
        self.living = count * self.threads
        self.living_of = np.full(count, self.threads, np.int64)
        self.heap: list[int] = []
        self.pending: dict[int, list[Group]] = {}
        self.held_back: dict[int, list[Group]] = {}  # groups whose warps miss threads that an instruction needs
        self.waiting: list[Waiting] = []
        self.arrived: dict[int, Array] = {}  # by barrier id: threads waiting, per block
        self.polled = False  # the running group read memory that others may change
        self.poll_slice = POLL_SLICE
        self.ticks = 0

    @property
    def parameter_views(self) -> list[Array]:
        """The parameter area by element type, for the rare kernel that indexes its parameters."""
        return typed_views(np.frombuffer(self.parameters, np.uint8))

    # -- geometry ---------------------------------------------------------------------------------------------

    def coordinates(self, slot: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Block and thread index of a slot, each x, y, z."""
        linear = int(self.blocks[slot // self.pitch])
        thread = slot % self.pitch
        x, y, _ = self.grid
        bx, by, _ = self.block
        return (linear % x, linear // x % y, linear // (x * y)), (thread % bx, thread // bx % by, thread // (bx * by))

    def shared_start(self, lanes: Array) -> Array:
        """Byte offset of each thread's block in the shared memory of the batch."""
        return lanes // self.pitch * self.shared_pitch

    def local_start(self, lanes: Array) -> Array:
        """Byte offset of each thread's local memory."""
        return lanes * self.local_pitch

    def first_group(self) -> Group:
        """All threads at the entry, with special registers and windows in place."""
        count = len(self.blocks)
        lanes = np.flatnonzero(self.alive)
        frame = self.template.copy()
        program = self.program
        thread = lanes % self.pitch
        position = lanes // self.pitch
        x, y, _ = self.grid
        bx, by, _ = self.block
        block_of = self.blocks if count > 1 else self.blocks[:1]
        coordinates = {
            "%ctaid.x": block_of % x, "%ctaid.y": block_of // x % y, "%ctaid.z": block_of // (x * y)
        }  # fmt: skip
        for name, slot in program.specials.items():
            if name in coordinates:
                value = coordinates[name].astype(np.uint32)
                frame[slot] = value if count == 1 else value.take(position)
            elif name == "%tid.x":
                frame[slot] = (thread % bx).astype(np.uint32)
            elif name == "%tid.y":
                frame[slot] = (thread // bx % by).astype(np.uint32) if by > 1 else np.zeros(1, np.uint32)
            elif name == "%tid.z":
                frame[slot] = (thread // (bx * by)).astype(np.uint32) if self.block[2] > 1 else np.zeros(1, np.uint32)
            elif name == "%laneid":
                frame[slot] = (lanes & 31).astype(np.uint32)
            elif name == "%warpid":
                frame[slot] = (thread >> 5).astype(np.uint32)
            elif name.startswith("%lanemask"):
                bit = np.left_shift(np.uint32(1), (lanes & 31).astype(np.uint32))
                below = bit - np.uint32(1)
                frame[slot] = {
                    "eq": bit, "lt": below, "le": below | bit, "gt": ~(below | bit), "ge": ~below
                }[name[-2:]]  # fmt: skip
        if program.shared_slot is not None:
            frame[program.shared_slot] = UNIFORM_ZERO if count == 1 else self.shared_start(lanes)
        if program.local_slot is not None:
            frame[program.local_slot] = self.local_start(lanes)
        group = Group(self, lanes, frame, 0)
        group.whole = True
        return group

    # -- the scheduler ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run every thread to its end.

        Raises:
            KernelFault: the kernel faulted, can make no progress, or outlived its limits.
        """
        self.put(self.first_group())
        while True:
            if self.heap:
                self.step(self.next_group())
            elif self.held_back:
                self.release_held()
            elif self.waiting:
                self.raise_stuck()
            else:
                return

    def put(self, group: Group) -> None:
        """Make a group runnable at its place."""
        place = group.place
        there = self.pending.get(place)
        if there is None:
            self.pending[place] = [group]
            heapq.heappush(self.heap, place)
        else:
            there.append(group)

    def next_group(self) -> Group:
        """Take the groups at the lowest place, merged."""
        return self.take(heapq.heappop(self.heap))

    def take(self, place: int) -> Group:
        groups = self.pending.pop(place)
        if self.held_back:
            groups += self.held_back.pop(place, [])
        if len(groups) == 1:
            return groups[0]
        return merge(groups, self.program.segments[place].live, self.template)

    def step(self, first: Group, *, hold: int = 0, forced: bool = False) -> None:
        """Run a group until it ends, parks, divides, or another group is to run first.

        Args:
            hold: run this many segments without giving way to a lower place; 0 gives way at once.
            forced: run the first segment even if it speaks for warps whose threads are not all here.
        """
        segments = self.program.segments
        heap = self.heap
        budget = self.budget
        recorder = self.recorder
        group: Group | None = first
        ran = 0
        self.polled = False
        while True:
            assert group is not None
            segment = segments[group.place]
            if group.pending:
                for slot in group.pending & segment.reads:
                    group.register(slot)
            if segment.warp_wide and not group.whole and not forced:
                group = self.gather_warps(group, segment)
                if group is None:
                    return
                for slot in group.pending & segment.reads:
                    group.register(slot)
            forced = False
            frame = group.frame
            if recorder is not None:
                recorder.segment(segment, group)
            for operation in segment.operations:
                operation(frame, group)
            if group.parent is not None:
                group.pending -= segment.writes
                group.written |= segment.writes
            budget.left -= segment.weight * ((group.n + 31) >> 5)
            if budget.left < 0:
                budget.check(group, segment)
            kind = segment.kind
            if kind == BRANCH:
                taken = frame[segment.predicate]
                votes = np.count_nonzero(taken)
                if votes and votes != len(taken):
                    if recorder is not None:
                        recorder.branch(segment, group, taken)
                    self.divide(group, segment, taken)
                    return
                if recorder is not None:
                    recorder.branch(segment, group, None)
                place = segment.target if (votes != 0) != segment.negated else group.place + 1
            elif kind == JUMP:
                place = segment.target
            elif kind == FALL:
                place = group.place + 1
            elif kind == EXIT:
                self.exit(group, segment)
                return
            elif self.barrier(group, segment):
                place = group.place + 1
            else:
                return
            if segments[place].exits:
                if recorder is not None:
                    recorder.leave(segments[place], group)
                self.exit(group, segment)
                return
            group.place = place
            if heap:
                ran += 1
                if hold:
                    if ran >= hold:
                        self.put(group)
                        return
                elif place >= heap[0]:
                    self.put(group)
                    return
                elif ran >= (self.poll_slice if self.polled else LONG_SLICE):
                    self.give_way(group)
                    return

    def divide(self, group: Group, segment: Segment, taken: Array) -> None:
        """A branch that some threads take and others do not."""
        goes = ~taken if segment.negated else taken
        segments = self.program.segments
        for chosen, place in ((goes, segment.target), (~goes, group.place + 1)):
            ending = segments[place].exits
            part = group.part(chosen.nonzero()[0], () if ending else segments[place].live, place, self.template)
            if ending:
                if self.recorder is not None:
                    self.recorder.leave(segments[place], part)
                self.exit(part, segment)
            else:
                self.put(part)

    def give_way(self, group: Group) -> None:
        """A group has used up its slice while others wait: let the farthest one run for a while."""
        if self.polled:
            self.poll_slice = POLL_SLICE_NEXT
        places = sorted(self.heap)
        self.ticks += 1
        place = places[-1 - self.ticks % len(places)]
        self.heap.remove(place)
        heapq.heapify(self.heap)
        other = self.take(place)
        self.put(group)
        self.step(other, hold=HOLD)

    # -- warp-wide instructions -------------------------------------------------------------------------------

    def gather_warps(self, group: Group, segment: Segment) -> Group | None:
        """The threads that may run a warp-wide segment now: those whose fellows named by the instruction are all here.

        The others are held back until the missing threads arrive. None if that is everyone.
        """
        if group.n == self.living:
            group.whole = True
            return group
        missing = self.alive.reshape(-1, WARP)[group.matrix_rows()] & ~group.present()
        if not missing.any():
            group.whole = True
            return group
        absent = np.where(missing, np.int64(1) << np.arange(WARP), 0).sum(axis=1)
        lacking = group.flat(np.broadcast_to(absent[:, None], missing.shape))
        if segment.mask is not None:
            lacking = lacking & group.frame[segment.mask].astype(np.int64)
        incomplete = lacking != 0
        held = np.count_nonzero(incomplete)
        if held == 0:
            return group
        place = group.place
        if held == group.n:
            self.held_back.setdefault(place, []).append(group)
            return None
        rest = group.part(np.flatnonzero(incomplete), segment.live, place, self.template)
        self.held_back.setdefault(place, []).append(rest)
        return group.part(np.flatnonzero(~incomplete), segment.live, place, self.template)

    def release_held(self) -> None:
        """Nothing else can run, so the missing threads never come: the lowest held group goes on without them."""
        place = min(self.held_back)
        groups = self.held_back.pop(place)
        live = self.program.segments[place].live
        self.step(groups[0] if len(groups) == 1 else merge(groups, live, self.template), forced=True)

    # -- barriers and exits -----------------------------------------------------------------------------------

    def barrier(self, group: Group, segment: Segment) -> bool:
        """Arrive at a barrier; True if the group may go on at once."""
        call = segment.barrier
        assert call is not None
        if self.recorder is not None:
            self.recorder.barrier(segment, group)
        if group.n == self.living and call.plain and not self.waiting:
            if call.reduces:
                self.reduce([Waiting(group, segment, call, 0)])
            return True
        numbers = np.zeros(1, np.int64) if call.number is None else group.frame[call.number].astype(np.int64)
        counts = np.zeros(1, np.int64) if call.count is None else group.frame[call.count].astype(np.int64)
        keys = numbers * (1 << 32) + counts
        distinct = np.unique(keys)
        if len(distinct) == 1:
            self.arrive(group, segment, call, int(distinct[0]))
            return False
        for key in distinct:
            chosen = np.flatnonzero(keys == key)
            self.arrive(group.part(chosen, segment.live_after, group.place, self.template), segment, call, int(key))
        return False

    def arrive(self, group: Group, segment: Segment, call: BarrierCall, key: int) -> None:
        """Count threads in at barrier `key >> 32` of their blocks; it expects `key & 0xFFFFFFFF` of them, 0 for all."""
        number, count = key >> 32, key & 0xFFFFFFFF
        arrived = self.arrived.get(number)
        if arrived is None:
            arrived = self.arrived[number] = np.zeros(len(self.blocks), np.int64)
        arrived += np.bincount(group.lanes // self.pitch, minlength=len(self.blocks))
        if call.arrive_only:
            group.place += 1
            self.put(group)
        else:
            self.waiting.append(Waiting(group, segment, call, number))
        self.complete(number, count)

    def complete(self, number: int, count: int) -> None:
        """Release the blocks in which every expected thread has arrived at barrier `number`."""
        arrived = self.arrived[number]
        done = (arrived >= (count or self.living_of)) & (arrived > 0)
        if not np.count_nonzero(done):
            return
        arrived[done] = 0
        released: list[Waiting] = []
        kept: list[Waiting] = []
        for entry in self.waiting:
            group = entry.group
            out = done[group.lanes // self.pitch]
            votes = np.count_nonzero(out)
            if entry.number != number or votes == 0:
                kept.append(entry)
            elif votes == group.n:
                released.append(entry)
            else:
                live = entry.segment.live_after
                if entry.call.reduces:
                    live = (*live, entry.call.source)
                for chosen, target in ((out, released), (~out, kept)):
                    part = group.part(np.flatnonzero(chosen), live, group.place, self.template)
                    target.append(Waiting(part, entry.segment, entry.call, number))
        self.waiting = kept
        self.check_same_barrier(released)
        self.reduce([entry for entry in released if entry.call.reduces])
        for entry in released:
            entry.group.place += 1
            self.put(entry.group)

    def check_same_barrier(self, released: list[Waiting]) -> None:
        """Threads of one warp that wait at different aligned barriers: undefined behaviour, so a fault."""
        aligned = [entry for entry in released if entry.call.aligned]
        if len({e.group.place for e in aligned}) < 2:
            return
        owner: dict[int, Waiting] = {}
        for entry in aligned:
            for position, warp in enumerate((entry.group.lanes >> 5).tolist()):
                first = owner.setdefault(warp, entry)
                if first.group.place != entry.group.place:
                    raise_fault(
                        entry.group, position, "barrier_divergence",
                        "barrier divergence: threads of one warp wait at two different barriers"
                        + (f", the other one on line {first.segment.last_line}" if first.segment.last_line else ""),
                        line=entry.segment.last_line,
                    )  # fmt: skip

    def reduce(self, entries: list[Waiting]) -> None:
        """bar.red: combine the predicates of all threads of a block and hand the result to each."""
        count = len(self.blocks)
        totals = np.zeros(count, np.int64)
        sizes = np.zeros(count, np.int64)
        for entry in entries:
            where = entry.group.lanes // self.pitch
            values = np.broadcast_to(entry.group.register(entry.call.source), entry.group.n) != entry.call.negated
            sizes += np.bincount(where, minlength=count)
            totals += np.bincount(where, weights=values, minlength=count).astype(np.int64)
        for entry in entries:
            where = entry.group.lanes // self.pitch
            operation = entry.call.operation
            if operation == "popc":
                result = totals[where].astype(entry.call.dtype)
            else:
                result = ((totals == sizes) if operation == "and" else (totals > 0))[where]
            entry.group.frame[entry.call.target] = result
            entry.group.pending.discard(entry.call.target)

    def exit(self, group: Group, segment: Segment) -> None:
        """Threads end after `segment`; barriers no longer wait for them."""
        lanes = group.lanes
        self.alive[lanes] = False
        self.living -= group.n
        if self.living == 0:
            return
        self.living_of -= np.bincount(lanes // self.pitch, minlength=len(self.blocks))
        if self.waiting:
            self.check_skipped(group, segment)
            for number in {entry.number for entry in self.waiting if entry.call.count is None}:
                self.complete(number, 0)
        if self.held_back:
            held, self.held_back = self.held_back, {}
            for groups in held.values():
                for other in groups:
                    self.put(other)

    def check_skipped(self, group: Group, segment: Segment) -> None:
        """Threads end in code that comes after a barrier at which others of their block wait: they skipped it.

        That is the one shape of divergence that is wrong beyond doubt; threads that return early, in code that the
        waiting threads can never reach, are let go.
        """
        blocks = np.unique(group.lanes // self.pitch)
        for entry in self.waiting:
            if entry.call.count is not None or not entry.call.aligned:
                continue
            if segment.number not in self.program.reachable(entry.group.place):
                continue
            stuck = np.isin(entry.group.lanes // self.pitch, blocks)
            if np.count_nonzero(stuck):
                raise_fault(
                    entry.group, int(np.argmax(stuck)), "barrier_divergence",
                    "barrier divergence: this thread waits at a barrier that other threads of its block went around",
                    line=entry.segment.last_line,
                )  # fmt: skip

    def raise_stuck(self) -> None:
        """Every remaining thread waits at a barrier that cannot complete."""
        entry = self.waiting[0]
        raise_fault(
            entry.group, 0, "deadlock",
            "deadlock: every thread left waits at a barrier that can never be complete",
            line=entry.segment.last_line,
        )  # fmt: skip


class Budget:
    """Limits of one launch: warp instructions and a moment of `time.monotonic()`."""

    __slots__ = ("deadline", "handed_out", "left", "reserve", "stride")

    def __init__(self, warp_instructions: int | None, deadline: float | None) -> None:
        self.deadline = deadline
        self.reserve = warp_instructions  # instructions not yet handed out to `left`
        self.stride = CHECK_EVERY
        self.handed_out = 0
        self.left = 0
        self.refill()

    def refill(self) -> None:
        portion = self.stride
        if self.reserve is not None:
            portion = min(portion, self.reserve)
            self.reserve -= portion
        self.left += portion
        self.handed_out += portion

    def ticks(self) -> int:
        """Warp instructions run so far."""
        return self.handed_out - self.left

    def check(self, group: Group, segment: Segment) -> None:
        """Called when `left` is used up: look at the clock and hand out the next portion."""
        while self.left < 0:
            if self.reserve is not None and self.reserve <= 0:
                raise_fault(group, 0, "timed_out", "timed out: the budget of warp instructions is used up",
                            line=segment.last_line)  # fmt: skip
            self.refill()
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise_fault(group, 0, "timed_out", "timed out: the kernel was still running at its deadline",
                        line=segment.last_line)  # fmt: skip
