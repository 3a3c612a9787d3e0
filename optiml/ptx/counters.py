"""What a launch did, counted exactly: instructions, branches, memory requests, sectors, bank conflicts.

Counts are per warp and exact for the program as PTX: sectors are distinct 32-byte pieces that the active threads of
one warp instruction touch; shared wavefronts are the most distinct 4-byte words in one of 32 banks, taken over half
warps for 8-byte and quarter warps for 16-byte accesses.

Whole-warp address patterns repeat endlessly in real kernels, so a request is described by its addresses relative to
the first thread; the counts of a pattern are worked out once and remembered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from optiml.ptx import memory
from optiml.ptx.memory import LOCAL_WINDOW, SHARED_WINDOW, WINDOW_BITS, Step
from optiml.ptx.numerics import I64, U64
from optiml.ptx.opcodes import CLASSES
from optiml.ptx.simt import WARP, Batch, Group

if TYPE_CHECKING:
    from optiml.ptx.program import Program, Segment

Array = Any
SECTOR_BYTES = 32
_LOG_LIMIT = 4_000_000  # load sectors kept before the L1 model digests them
_PATTERN_LIMIT = 4096  # remembered address patterns


@dataclass(frozen=True, kw_only=True)
class SpaceCounters:
    """Requests of warps to global or local memory.

    Attributes:
        requests: warp instructions with at least one active thread.
        sectors: distinct 32-byte sectors, summed over requests.
        bytes: bytes asked for by active threads.
        ideal_sectors: sectors if the distinct bytes of each request lay together.
        lines: distinct 128-byte lines, summed over requests: what L1 looks up.
    """

    requests: int = 0
    sectors: int = 0
    bytes: int = 0
    ideal_sectors: int = 0
    lines: int = 0


@dataclass(frozen=True, kw_only=True)
class SharedCounters:
    """Requests of warps to shared memory; conflicts = wavefronts - ideal_wavefronts."""

    requests: int = 0
    wavefronts: int = 0
    ideal_wavefronts: int = 0


@dataclass(frozen=True, kw_only=True)
class AllocationCounters:
    """Traffic of one named allocation.

    Attributes:
        bytes: its size.
        load_sectors, store_sectors, atomic_sectors: sectors of all requests.
        load_misses: load sectors that the L1 model sends to L2.
        distinct_load_sectors, distinct_store_sectors, distinct_atomic_sectors: union over the blocks run.
    """

    bytes: int = 0
    load_sectors: int = 0
    load_misses: int = 0
    store_sectors: int = 0
    atomic_sectors: int = 0
    distinct_load_sectors: int = 0
    distinct_store_sectors: int = 0
    distinct_atomic_sectors: int = 0


@dataclass(frozen=True, kw_only=True)
class LineCounters:
    """What one source line did."""

    warp_instructions: int = 0
    thread_instructions: int = 0
    load_requests: int = 0
    load_sectors: int = 0
    store_requests: int = 0
    store_sectors: int = 0
    shared_wavefronts: int = 0
    shared_conflicts: int = 0
    divergent_branches: int = 0


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Totals over the blocks run (not scaled to the grid).

    Attributes:
        branches: conditional branches executed by warps; `divergent_branches` of them split their warp.
        barriers: barrier instructions executed by warps.
        thread_ops, warp_ops: instructions by class (see `opcodes.CLASSES`), per thread and per warp.
        allocations: global memory traffic by allocation name.
        block_executions: (function, basic block index) -> executions by warps.
        lines: by source line.
    """

    blocks: int
    warps: int
    warp_instructions: int
    thread_instructions: int
    branches: int
    divergent_branches: int
    barriers: int
    thread_ops: Mapping[str, int]
    warp_ops: Mapping[str, int]
    global_load: SpaceCounters
    global_store: SpaceCounters
    global_atomic: SpaceCounters
    local_load: SpaceCounters
    local_store: SpaceCounters
    shared_load: SharedCounters
    shared_store: SharedCounters
    shared_atomic: SharedCounters
    allocations: Mapping[str, AllocationCounters]
    block_executions: Mapping[tuple[str, int], int]
    lines: Mapping[int, LineCounters]


def record_memory(
    kind: str, space: str, address: int, offset: int, nbytes: int, line: int | None, cached: bool
) -> Step:
    """A closure that counts one memory instruction before it runs."""
    if space in ("const", "param"):
        return _count_nothing

    def run(frame: list[Array], group: Group) -> None:
        recorder = group.batch.recorder
        if recorder is not None:
            addresses = memory.offset_address(frame[address], offset)
            recorder.access(kind, space, addresses, group, nbytes, line, cached)

    return run


def _count_nothing(frame: list[Array], group: Group) -> None:
    """Constant and parameter memory have no counters."""


class _Line:
    """Mutable counts of one source line."""

    __slots__ = ("divergent", "load_requests", "load_sectors", "shared_conflicts", "shared_wavefronts",
                 "store_requests", "store_sectors", "threads", "warps")  # fmt: skip

    def __init__(self) -> None:
        self.warps = self.threads = self.load_requests = self.load_sectors = 0
        self.store_requests = self.store_sectors = self.shared_wavefronts = self.shared_conflicts = 0
        self.divergent = 0


class _Traffic:
    """Mutable counts of one allocation, whose sectors are numbered from `first` in the recorder's own numbering."""

    __slots__ = ("atomic", "first", "load", "misses", "name", "nbytes", "shift", "size", "store")

    def __init__(self, number: int, name: str, nbytes: int, first: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self.first = first
        self.size = -(-nbytes // SECTOR_BYTES)
        self.shift = first - (number << (WINDOW_BITS - 5))  # from sector of the address space to our number
        self.load = self.store = self.atomic = self.misses = 0


class Recorder:
    """Collects the counts of one launch."""

    def __init__(self, program: Program, l1_sectors: int) -> None:
        self.program = program
        self.l1_sectors = l1_sectors
        count = len(program.segments)
        self.segment_warps = [0] * count
        self.segment_threads = [0] * count
        self.left: dict[int, Array] = {}
        self.branches = self.divergent = self.barriers = 0
        self.spaces: dict[str, list[int]] = {}
        self.lines: dict[int, _Line] = {}
        self.traffic: dict[int, _Traffic] = {}
        self.loaded: Array = np.zeros(0, bool)  # by our sector number: touched by a load
        self.stored: Array = np.zeros(0, bool)
        self.updated: Array = np.zeros(0, bool)  # by an atomic
        self.blocks = self.warps = 0
        self.log: list[Array] = []  # load events as block, sector, time packed in one integer each
        self.log_size = 0
        self.seen: Array = np.zeros(0, np.int64)  # the last touch of each sector by each block, packed likewise
        self.block_time: Array = np.zeros(0, np.int64)  # load sectors so far, by block of the batch
        self.sector_bits = self.time_bits = 0
        self.placed: tuple[Group | None, Array, Array, Array] = (None, None, None, None)
        self.sector_patterns: dict[tuple[bytes, int], tuple[Array, int]] = {}
        self.bank_patterns: dict[tuple[bytes, int], int] = {}
        self.batch: Batch

    # -- events from the scheduler ------------------------------------------------------------------------------

    def begin(self, batch: Batch) -> None:
        """A batch of blocks starts."""
        self.batch = batch
        self.blocks += len(batch.blocks)
        self.warps += len(batch.blocks) * batch.pitch // WARP
        self.left = {}
        if not self.traffic:
            total = 0
            for number, allocation in batch.memory.items():
                self.traffic[number] = _Traffic(number, allocation.name, allocation.nbytes, total)
                total += self.traffic[number].size
            self.loaded, self.stored, self.updated = (np.zeros(total, bool) for _ in range(3))
            self.sector_bits = max(1, total.bit_length())
        self.time_bits = 63 - self.sector_bits - len(batch.blocks).bit_length()
        self.block_time = np.zeros(len(batch.blocks), np.int64)
        self.seen = np.zeros(0, np.int64)

    def end(self) -> None:
        """The batch is done: its early exits and its L1 log are digested."""
        for number, mask in self.left.items():
            self.segment_warps[number] += int(np.count_nonzero(mask))
        self.digest()
        self.placed = (None, None, None, None)

    def segment(self, segment: Segment, group: Group) -> None:
        """A group runs a segment."""
        self.segment_warps[segment.number] += group.warps or group.count_warps()
        self.segment_threads[segment.number] += group.n

    def leave(self, segment: Segment, group: Group) -> None:
        """A group ends at a plain exit; threads of one warp that get there apart count as one warp."""
        mask = self.left.get(segment.number)
        if mask is None:
            mask = self.left[segment.number] = np.zeros(len(self.batch.alive) // WARP, bool)
        mask[group.matrix_rows()] = True
        self.segment_threads[segment.number] += group.n

    def branch(self, segment: Segment, group: Group, taken: Array) -> None:
        """A conditional branch; `taken` is None if all threads of the group agree."""
        if not segment.counted_branch:
            return
        self.branches += group.count_warps()
        if taken is None:
            return
        votes = group.matrix(taken, False).sum(axis=1)
        sizes = group.present().sum(axis=1)
        divergent = int(np.count_nonzero((votes > 0) & (votes < sizes)))
        self.divergent += divergent
        line = segment.mix[-1][0]
        if line is not None:
            self.line(line).divergent += divergent

    def barrier(self, segment: Segment, group: Group) -> None:
        """A group executes a barrier."""
        self.barriers += group.count_warps()

    def line(self, number: int) -> _Line:
        found = self.lines.get(number)
        if found is None:
            found = self.lines[number] = _Line()
        return found

    # -- memory -----------------------------------------------------------------------------------------------

    def access(
        self, kind: str, space: str, addresses: Array, group: Group, nbytes: int, line: int | None, cached: bool
    ) -> None:
        """Count one memory instruction of a group.

        Args:
            addresses: `[n]` or `[1]`, in `space`.
            cached: a load that may hit in L1.
        """
        if space == "generic":
            windows = addresses >> np.uint64(WINDOW_BITS)
            if len(addresses) > 1 and np.count_nonzero(windows != windows[0]):
                for window in np.unique(windows):
                    chosen = np.flatnonzero(windows == window)
                    part = Group(group.batch, group.lanes[chosen], [], group.place)
                    self.access(kind, "generic", addresses[chosen], part, nbytes, line, cached)
                return
            window = int(windows[0])
            space = {SHARED_WINDOW: "shared", LOCAL_WINDOW: "local"}.get(window, "global")
            if space != "global":
                addresses = addresses & np.uint64(memory.WINDOW_MASK)
        if space == "global":
            self.global_access(kind, addresses, group, nbytes, line, cached)
        elif space == "shared":
            self.shared_access(kind, addresses, group, nbytes, line)
        elif space == "local":
            self.local_access(kind, addresses, group, nbytes, line)

    def space(self, name: str) -> list[int]:
        found = self.spaces.get(name)
        if found is None:
            found = self.spaces[name] = [0, 0, 0, 0, 0]
        return found

    def rows_of(self, addresses: Array, group: Group) -> Array:
        """Addresses as `[warps, 32]` int64; a thread that is not active repeats the first active one of its warp."""
        if len(addresses) != group.n:
            addresses = np.broadcast_to(addresses, group.n)
        values = addresses.view(I64) if addresses.dtype == U64 else addresses.astype(I64)
        group.count_warps()
        if group.full_rows:
            return values.reshape(-1, WARP)
        rows = group.position >> 5
        first = np.empty(group.n, bool)
        first[0] = True
        np.not_equal(rows[1:], rows[:-1], out=first[1:])
        out = np.repeat(values[first], WARP)
        out[group.position] = values
        return out.reshape(-1, WARP)

    def global_access(
        self, kind: str, addresses: Array, group: Group, nbytes: int, line: int | None, cached: bool
    ) -> None:
        warps = group.count_warps()
        each: Array | int  # sectors of every warp
        if len(addresses) == 1:
            sectors, each = np.full(warps, int(addresses[0]) >> 5, np.int64), 1
            ideal = lines = warps
        else:
            rows = self.rows_of(addresses, group)
            base = rows[:, 0] & ~np.int64(31)
            relative = rows - base[:, None]
            if warps == 1 or not np.count_nonzero(relative[1:] != relative[0]):
                offsets, per_warp = self.sector_pattern(relative[0], nbytes)
                places = (base >> 5)[:, None] + offsets
                upper = places >> 2
                lines = warps + int(np.count_nonzero(upper[:, 1:] != upper[:, :-1]))
                sectors, each = places.reshape(-1), len(offsets)
                ideal = warps * per_warp
            else:
                ordered = np.sort(rows, axis=1)
                fresh = np.ones(ordered.shape, bool)
                np.not_equal(ordered[:, 1:], ordered[:, :-1], out=fresh[:, 1:])
                ideal = int((-(-fresh.sum(axis=1) * nbytes // SECTOR_BYTES)).sum())
                pieces = ordered >> 5
                np.not_equal(pieces[:, 1:], pieces[:, :-1], out=fresh[:, 1:])
                upper = pieces >> 2
                lines = warps + int(np.count_nonzero(upper[:, 1:] != upper[:, :-1]))
                sectors, each = pieces[fresh], fresh.sum(axis=1)
        count = len(sectors)
        totals = self.space("global_" + kind)
        totals[0] += warps
        totals[1] += count
        totals[2] += group.n * nbytes
        totals[3] += ideal
        totals[4] += lines
        if line is not None:
            at = self.line(line)
            if kind == "load":
                at.load_requests += warps
                at.load_sectors += count
            else:
                at.store_requests += warps
                at.store_sectors += count
        ours = self.numbered(sectors, kind, kind == "load" and not cached)
        if ours is None:
            return
        if kind == "store":
            self.stored[ours] = True
        elif kind == "load":
            self.loaded[ours] = True
            if cached:
                self.note_loads(ours, each, group)
        else:
            self.updated[ours] = True

    def sector_pattern(self, relative: Array, nbytes: int) -> tuple[Array, int]:
        """(sector numbers relative to the first thread's, ideal sectors) of one warp's addresses."""
        key = (relative.tobytes(), nbytes)
        found = self.sector_patterns.get(key)
        if found is None:
            distinct = np.unique(relative)
            found = (np.unique(distinct >> 5), -(-len(distinct) * nbytes // SECTOR_BYTES))
            if len(self.sector_patterns) < _PATTERN_LIMIT:
                self.sector_patterns[key] = found
        return found

    def numbered(self, sectors: Array, kind: str, missed: bool) -> Array | None:
        """Our numbers of sectors, counted for their allocations; None if some lie outside (the access will fault)."""
        low, high = int(sectors.min()), int(sectors.max())
        numbers = [low >> (WINDOW_BITS - 5)]
        if high >> (WINDOW_BITS - 5) != numbers[0]:
            owner = sectors >> (WINDOW_BITS - 5)
            numbers = np.unique(owner).tolist()
        ours = np.empty(len(sectors), np.int64)
        for number in numbers:
            traffic = self.traffic.get(number)
            if traffic is None:
                return None
            mine = sectors if len(numbers) == 1 else sectors[owner == number]
            here = mine + traffic.shift
            if len(numbers) > 1:
                low, high = int(mine.min()), int(mine.max())
            if high + traffic.shift >= traffic.first + traffic.size:
                return None
            setattr(traffic, kind, getattr(traffic, kind) + len(mine))
            if missed:
                traffic.misses += len(mine)
            if len(numbers) == 1:
                return here
            ours[owner == number] = here
        return ours

    def note_loads(self, ours: Array, each: Array | int, group: Group) -> None:
        """Log the sectors of a load for the L1 model, with the time of each in its block's own count of sectors."""
        if self.placed[0] is not group:
            blocks = group.rows * WARP // self.batch.pitch
            starts = np.flatnonzero(np.append(True, blocks[1:] != blocks[:-1]))
            first = np.repeat(starts, np.diff(np.append(starts, len(blocks))))
            self.placed = (group, blocks, starts, first)
        _, blocks, starts, first = self.placed
        warps = len(blocks)
        if isinstance(each, int):
            before = (np.arange(warps) - first) * each
            time = self.block_time[blocks] + before
            head = (blocks << (self.sector_bits + self.time_bits)) + time
            events = (head[:, None] + np.arange(each)).reshape(-1) if each > 1 else head
            self.block_time[blocks[starts]] += np.diff(np.append(starts, warps)) * each
        else:
            ends = np.cumsum(each)
            before = ends - each
            time = self.block_time[blocks] + before - before[first]
            head = (blocks << (self.sector_bits + self.time_bits)) + time - before
            events = np.repeat(head, each) + np.arange(len(ours))
            self.block_time[blocks[starts]] += np.add.reduceat(each, starts)
        self.log.append(events + (ours << self.time_bits))
        self.log_size += len(ours)
        if self.log_size >= _LOG_LIMIT:
            self.digest()

    def digest(self) -> None:
        """Run the L1 model over the log: a sector hits if its block touched it fewer than `l1_sectors` accesses ago."""
        if not self.log:
            return
        fresh = np.concatenate(self.log)
        self.log, self.log_size = [], 0
        events = np.concatenate([self.seen, fresh])
        events.sort()
        place = events >> self.time_bits  # block and sector
        near = np.zeros(len(events), bool)
        # events of one place are neighbours, so their difference is the distance in time
        gap = events[1:] - events[:-1]
        same = place[1:] == place[:-1]
        near[1:] = same & (gap <= self.l1_sectors)
        missed = ~near
        sectors = place & ((1 << self.sector_bits) - 1)
        self.count_misses(sectors[missed], 1)
        if len(self.seen):  # what was there before is the first of its place and no new event
            self.count_misses(self.seen >> self.time_bits & ((1 << self.sector_bits) - 1), -1)
        last = np.append(~same, True)
        kept = events[last]
        mask = (1 << self.time_bits) - 1
        times = kept & mask
        blocks = kept >> (self.sector_bits + self.time_bits)
        # forget what is too old to hit, and count time from there, so that it always fits
        start = np.maximum(self.block_time - self.l1_sectors - 1, 0)
        young = times >= start[blocks]
        self.seen = kept[young] - start[blocks[young]]
        self.block_time -= start

    def count_misses(self, sectors: Array, sign: int) -> None:
        """Add the sectors (our numbers) that miss to their allocations."""
        if not len(sectors):
            return
        owners = list(self.traffic.values())
        bounds = np.array([traffic.first + traffic.size for traffic in owners])
        counts = np.bincount(np.searchsorted(bounds, sectors, side="right"), minlength=len(owners))
        for traffic, count in zip(owners, counts.tolist(), strict=True):
            traffic.misses += sign * count

    def shared_access(self, kind: str, addresses: Array, group: Group, nbytes: int, line: int | None) -> None:
        warps = group.count_warps()
        together = WARP if nbytes <= 4 else WARP * 4 // nbytes  # threads served at once
        if len(addresses) == 1 and group.full_rows:
            ideal = wavefronts = warps * (WARP // together)
        else:
            values = np.broadcast_to(addresses, group.n) if len(addresses) != group.n else addresses
            rows = (group.matrix(values, 0).astype(I64) >> 2).reshape(-1, together)
            if not group.full_rows:
                active = group.present().reshape(-1, together)
                first = np.argmax(active, axis=1)
                rows = np.where(active, rows, rows[np.arange(len(rows)), first][:, None])[active.any(axis=1)]
            ideal = len(rows)
            wavefronts = self.wavefronts(rows - rows[:, :1], max(1, nbytes // 4))
        totals = self.space("shared_" + kind)
        totals[0] += warps
        totals[1] += wavefronts
        totals[2] += ideal
        if line is not None:
            at = self.line(line)
            at.shared_wavefronts += wavefronts
            at.shared_conflicts += wavefronts - ideal

    def wavefronts(self, relative: Array, words: int) -> int:
        """Sum over rows of the most distinct words in one bank; banks only rotate with the first word."""
        if len(relative) == 1 or not np.count_nonzero(relative[1:] != relative[0]):
            return len(relative) * self.bank_pattern(relative[0], words)
        weights = _WEIGHTS[: relative.shape[1]]
        hashes = (relative * weights).sum(axis=1)
        distinct, first, inverse, counts = np.unique(hashes, return_index=True, return_inverse=True, return_counts=True)
        if len(distinct) <= 256 and not np.count_nonzero(relative != relative[first][inverse]):
            return sum(
                count * self.bank_pattern(relative[index], words)
                for index, count in zip(first.tolist(), counts.tolist(), strict=True)
            )
        return int(_most_words_in_a_bank(relative, words).sum())

    def bank_pattern(self, relative: Array, words: int) -> int:
        key = (relative.tobytes(), words)
        found = self.bank_patterns.get(key)
        if found is None:
            found = int(_most_words_in_a_bank(relative[None, :], words)[0])
            if len(self.bank_patterns) < _PATTERN_LIMIT:
                self.bank_patterns[key] = found
        return found

    def local_access(self, kind: str, addresses: Array, group: Group, nbytes: int, line: int | None) -> None:
        """Local memory interleaves threads by 4-byte words: a sector is one word of eight neighbouring threads."""
        warps = group.count_warps()
        values = np.broadcast_to(addresses, group.n) if len(addresses) != group.n else addresses
        words = group.matrix(values.astype(I64) >> 2, -1)
        keys = words[:, :, None] + np.arange(max(1, nbytes // 4))
        keys = np.where(words[:, :, None] < 0, np.int64(-1), keys * 4 + (np.arange(WARP) >> 3)[:, None])
        ordered = np.sort(keys.reshape(warps, -1), axis=1)
        fresh = ordered >= 0
        fresh[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
        sectors = int(np.count_nonzero(fresh))
        apart = np.ones(ordered.shape, bool)
        apart[:, 1:] = np.diff(ordered >> 2, axis=1) != 0
        totals = self.space("local_" + ("load" if kind == "load" else "store"))
        totals[0] += warps
        totals[1] += sectors
        totals[2] += group.n * nbytes
        totals[3] += int((-(-group.present().sum(axis=1) * nbytes // SECTOR_BYTES)).sum())
        totals[4] += int(np.count_nonzero(fresh & apart))
        if line is not None:
            at = self.line(line)
            if kind == "load":
                at.load_requests += warps
                at.load_sectors += sectors
            else:
                at.store_requests += warps
                at.store_sectors += sectors

    # -- the result -------------------------------------------------------------------------------------------

    def counters(self) -> Counters:
        """The frozen totals."""
        thread_ops = dict.fromkeys(CLASSES, 0)
        warp_ops = dict.fromkeys(CLASSES, 0)
        executions: dict[tuple[str, int], int] = {}
        for segment in self.program.segments:
            warps, threads = self.segment_warps[segment.number], self.segment_threads[segment.number]
            if segment.origin is not None:
                executions[segment.origin] = executions.get(segment.origin, 0) + warps
            if not warps:
                continue
            for line, kind in segment.mix:
                thread_ops[kind] += threads
                warp_ops[kind] += warps
                if line is not None:
                    at = self.line(line)
                    at.warps += warps
                    at.threads += threads
        allocations: dict[str, AllocationCounters] = {}
        for number, traffic in sorted(self.traffic.items()):
            if not traffic.load + traffic.store + traffic.atomic:
                continue
            name = traffic.name or f"#{number}"
            name = name if name not in allocations else f"{name}#{number}"
            own = slice(traffic.first, traffic.first + traffic.size)
            allocations[name] = AllocationCounters(
                bytes=traffic.nbytes,
                load_sectors=traffic.load,
                load_misses=traffic.misses,
                store_sectors=traffic.store,
                atomic_sectors=traffic.atomic,
                distinct_load_sectors=int(np.count_nonzero(self.loaded[own])),
                distinct_store_sectors=int(np.count_nonzero(self.stored[own])),
                distinct_atomic_sectors=int(np.count_nonzero(self.updated[own])),
            )

        def space(name: str) -> SpaceCounters:
            requests, sectors, nbytes, ideal, lines = self.spaces.get(name, (0, 0, 0, 0, 0))
            return SpaceCounters(requests=requests, sectors=sectors, bytes=nbytes, ideal_sectors=ideal, lines=lines)

        def shared(name: str) -> SharedCounters:
            requests, wavefronts, ideal, _, _ = self.spaces.get(name, (0, 0, 0, 0, 0))
            return SharedCounters(requests=requests, wavefronts=wavefronts, ideal_wavefronts=ideal)

        return Counters(
            blocks=self.blocks,
            warps=self.warps,
            warp_instructions=sum(warp_ops.values()),
            thread_instructions=sum(thread_ops.values()),
            branches=self.branches,
            divergent_branches=self.divergent,
            barriers=self.barriers,
            thread_ops=thread_ops,
            warp_ops=warp_ops,
            global_load=space("global_load"),
            global_store=space("global_store"),
            global_atomic=space("global_atomic"),
            local_load=space("local_load"),
            local_store=space("local_store"),
            shared_load=shared("shared_load"),
            shared_store=shared("shared_store"),
            shared_atomic=shared("shared_atomic"),
            allocations=allocations,
            block_executions=executions,
            lines={
                number: LineCounters(
                    warp_instructions=at.warps,
                    thread_instructions=at.threads,
                    load_requests=at.load_requests,
                    load_sectors=at.load_sectors,
                    store_requests=at.store_requests,
                    store_sectors=at.store_sectors,
                    shared_wavefronts=at.shared_wavefronts,
                    shared_conflicts=at.shared_conflicts,
                    divergent_branches=at.divergent,
                )
                for number, at in sorted(self.lines.items())
            },
        )


_WEIGHTS = np.random.default_rng(0).integers(1 << 20, 1 << 40, WARP) | 1  # for hashing rows; collisions are checked


def _most_words_in_a_bank(relative: Array, words: int) -> Array:
    """`[rows]` the most distinct 4-byte words that fall in one of 32 banks."""
    every = (relative[:, :, None] + np.arange(words)).reshape(len(relative), -1)
    ordered = np.sort(every, axis=1)
    fresh = np.ones(ordered.shape, bool)
    np.not_equal(ordered[:, 1:], ordered[:, :-1], out=fresh[:, 1:])
    keys = np.arange(len(relative))[:, None] * WARP + (ordered & 31)
    per_bank = np.bincount(keys[fresh], minlength=len(relative) * WARP)
    return per_bank.reshape(-1, WARP).max(axis=1)
