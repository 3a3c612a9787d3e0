"""What binds a kernel, the figures that say so, and what to try.

The binding term of the time model gives the kind. Findings are looked for one by one (`FINDERS`); each carries the
share of the time that it concerns, and the heaviest come first. A new finding is a new function in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from optiml.measure.hotlines import Resource
from optiml.measure.metrics import Observation
from optiml.measure.model import TERMS, global_clocks, shared_clocks
from optiml.records import Bottleneck

Kind = Literal["memory", "compute", "latency", "launch"]
MOST_FINDINGS = 5
LEAST_WEIGHT = 0.05  # a finding that concerns less of the time than this is not told
LAUNCH_BOUND_SHARE = 0.5

_KINDS: Mapping[str, Kind] = {
    "issue": "compute", "fp32": "compute", "int": "compute", "fp16": "compute", "fp64": "compute", "sfu": "compute",
    "tensor": "compute", "lsu": "memory", "atomics": "memory", "l2": "memory", "dram": "memory", "latency": "latency",
    "dispatch": "launch", "launch": "launch",
}  # fmt: skip
_TERM_NAMES: Mapping[str, str] = {
    "issue": "instruction issue", "fp32": "fp32 arithmetic", "int": "integer arithmetic",
    "fp16": "half-precision arithmetic", "fp64": "fp64 arithmetic", "sfu": "special functions and conversions",
    "tensor": "tensor cores", "lsu": "the load/store and shared-memory pipe", "atomics": "global atomics",
    "l2": "L2 bandwidth", "dram": "DRAM bandwidth", "latency": "waiting for results (latency)",
    "dispatch": "starting blocks", "launch": "launch overhead",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fact about the kernel, the share of the time it concerns (0..1), and what to do about it."""

    weight: float
    evidence: str
    advice: str


@dataclass(frozen=True, kw_only=True)
class Context:
    """What the finders look at."""

    seen: Observation
    least_bytes: float | None  # what the problem itself has to move, in all launches
    launches: int
    hot_line: int | None
    binding: str

    def share(self, *terms: str) -> float:
        """The largest of some terms as a share of the time."""
        return max(self.seen.terms_us[term] for term in terms) / self.seen.time_us

    def per(self, top: str, bottom: str) -> float:
        below = self.seen.counts.get(bottom, 0.0)
        return self.seen.counts.get(top, 0.0) / below if below else 0.0

    @property
    def where(self) -> str:
        return "" if self.hot_line is None else f" (most at line {self.hot_line})"


def binding_term(terms_us: Mapping[str, float], time_us: float) -> str:
    """The term that binds: `launch` from half of the time on, else the largest of the others."""
    if terms_us["launch"] >= LAUNCH_BOUND_SHARE * time_us:
        return "launch"
    return max((term for term in TERMS if term != "launch"), key=lambda term: terms_us[term])


def binding_resource(seen: Observation) -> Resource:
    """What to rank source lines by."""
    binding = binding_term(seen.terms_us, seen.time_us)
    if _KINDS[binding] == "compute":
        return "instructions"
    if binding == "lsu" and shared_clocks(seen.counts, seen.hardware) > global_clocks(seen.counts):
        return "wavefronts"
    return "sectors"


def bottleneck(
    seen: Observation, *, least_bytes: float | None, launches: int, hot_line: int | None
) -> Bottleneck:  # fmt: skip
    """What binds the observed kernel.

    Args:
        least_bytes: bytes the problem itself has to move, weighted like the observation; None if unknown.
        launches: launches of one run.
        hot_line: the line with the largest share of the binding resource.
    """
    binding = binding_term(seen.terms_us, seen.time_us)
    context = Context(seen=seen, least_bytes=least_bytes, launches=launches, hot_line=hot_line, binding=binding)
    findings = [finding for finder in FINDERS if (finding := finder(context)) is not None]
    told = [finding for finding in findings if finding.weight >= LEAST_WEIGHT]
    told.sort(key=lambda finding: -finding.weight)
    told = told[:MOST_FINDINGS] or [_nothing_special(context)]
    return Bottleneck(
        kind=_KINDS[binding],
        evidence=(_binding_evidence(seen, binding), *(finding.evidence for finding in told)),
        advice=tuple(dict.fromkeys(finding.advice for finding in told)),
    )


def _binding_evidence(seen: Observation, binding: str) -> str:
    others = sorted((term for term in TERMS if term != binding), key=lambda term: -seen.terms_us[term])
    return (
        f"{_TERM_NAMES[binding]}: {_us(seen.terms_us[binding])} of {_us(seen.time_us)} (modelled); "
        f"next is {_TERM_NAMES[others[0]]} with {_us(seen.terms_us[others[0]])}"
    )


# --- finders ---------------------------------------------------------------------------------------------------------
def _scattered_loads(context: Context) -> Finding | None:
    return _scattered(context, "global_load", "loads", "read")


def _scattered_stores(context: Context) -> Finding | None:
    return _scattered(context, "global_store", "stores", "write")


def _scattered(context: Context, space: str, accesses: str, verb: str) -> Finding | None:
    moved = context.per(f"{space}.sectors", f"{space}.requests")
    ideal = context.per(f"{space}.ideal_sectors", f"{space}.requests")
    if not moved or moved < 1.25 * ideal:
        return None
    counts = context.seen.counts
    part = counts[f"{space}.sectors"] / (counts["global_load.sectors"] + counts["global_store.sectors"])
    return Finding(
        weight=(1.0 - ideal / moved) * part * context.share("lsu", "l2", "dram"),
        evidence=f"global {accesses} move {moved:.1f} sectors per request ({ideal:.3g} would be ideal){context.where}",
        advice=(
            f"let neighbouring threads of a warp {verb} neighbouring addresses: swap the indices, give a row to a warp "
            "instead of a thread, or stage a tile through shared memory"
        ),
    )


def _bank_conflicts(context: Context) -> Finding | None:
    counts = context.seen.counts
    spaces = ("shared_load", "shared_store", "shared_atomic")
    wavefronts = sum(counts[f"{space}.wavefronts"] for space in spaces)
    lost = wavefronts - sum(counts[f"{space}.ideal_wavefronts"] for space in spaces)
    if not wavefronts or lost < 0.1 * wavefronts:
        return None
    requests = sum(counts[f"{space}.requests"] for space in spaces)
    clocks = shared_clocks(counts, context.seen.hardware)
    return Finding(
        weight=lost / wavefronts * context.share("lsu") * clocks / (clocks + global_clocks(counts)),
        evidence=(
            f"shared memory takes {wavefronts / requests:.1f} wavefronts per request; "
            f"{100 * lost / wavefronts:.0f} % of them are bank conflicts"
        ),
        advice="pad the inner dimension of the shared array by one element ([N][N + 1]) or swizzle its index",
    )


def _redundant_traffic(context: Context) -> Finding | None:
    moved = context.seen.counts["dram.read_bytes"] + context.seen.counts["dram.write_bytes"]
    least = context.least_bytes
    if not least or moved < 1.25 * least:
        return None
    return Finding(
        weight=(1.0 - least / moved) * context.share("dram"),
        evidence=f"{_bytes(moved)} cross the DRAM interface where the problem needs {_bytes(least)}",
        advice="move each element once: keep it in registers or shared memory between passes, or fuse the passes",
    )


def _at_the_floor(context: Context) -> Finding | None:
    moved = context.seen.counts["dram.read_bytes"] + context.seen.counts["dram.write_bytes"]
    least = context.least_bytes
    if context.binding != "dram" or not least or moved >= 1.25 * least:
        return None
    return Finding(
        weight=0.5 * context.share("dram"),
        evidence=f"{_bytes(moved)} cross the DRAM interface, and the problem itself needs {_bytes(least)}",
        advice="little is left but fewer bytes (a narrower dtype, fusion with what comes before or after) and, where "
        "accesses are 4 bytes wide, 16-byte loads and stores (float4) to keep more of them in flight",
    )


def _reloading(context: Context) -> Finding | None:
    counts = context.seen.counts
    distinct = counts["distinct_bytes"]
    if not distinct or counts["global_load.bytes"] < 3.0 * distinct:
        return None
    clocks = global_clocks(counts)
    shared = shared_clocks(counts, context.seen.hardware)
    return Finding(
        weight=(1.0 - distinct / counts["global_load.bytes"])
        * max(context.share("lsu") * clocks / (clocks + shared), context.share("l2")),
        evidence=f"each byte that is touched is loaded {counts['global_load.bytes'] / distinct:.1f} times by threads",
        advice="load each element once per block: stage a tile in shared memory, and keep several results per thread "
        "in registers so that a loaded value is used more than once",
    )


def _narrow_accesses(context: Context) -> Finding | None:
    counts = context.seen.counts
    requests = counts["global_load.requests"] + counts["global_store.requests"]
    if not requests:
        return None
    width = (counts["global_load.bytes"] + counts["global_store.bytes"]) / requests
    moved = (counts["global_load.sectors"] + counts["global_store.sectors"]) / requests
    if not 60.0 < width <= 128.0 or moved > 5.0:
        return None
    return Finding(
        weight=0.3 * context.share("lsu", "issue", "latency"),
        evidence=f"a warp's global access moves {width:.0f} bytes on average; one request can move 512",
        advice="load and store 16 bytes per thread (float4, int4) where the addresses allow it",
    )


def _few_blocks(context: Context) -> Finding | None:
    launch = context.seen.longest
    busy = launch.shape.blocks / context.seen.hardware.sms
    if busy >= 1.0:
        return None
    return Finding(
        weight=(1.0 - busy) * (1.0 - context.share("launch")),
        evidence=f"{launch.shape.blocks} blocks leave {100 * (1 - busy):.0f} % of {context.seen.hardware.sms} SMs idle",
        advice="split the work into more blocks: smaller tiles, or several blocks per row or per reduction",
    )


def _tail(context: Context) -> Finding | None:
    launch = context.seen.longest
    if not 1.0 < launch.waves < 4.0:
        return None
    whole = -(-launch.waves // 1)
    idle = 1.0 - launch.waves / whole
    if idle < 0.2:
        return None
    return Finding(
        weight=idle * context.share("latency"),
        evidence=f"{launch.waves:.2f} waves of blocks: the last one leaves the GPU partly idle",
        advice="choose a block size or work per block that fills whole waves, or let a fixed grid loop over the work",
    )


def _low_occupancy(context: Context) -> Finding | None:
    occupancy = context.seen.longest.occupancy
    if occupancy.theoretical_pct >= 50.0:
        return None
    cures = {
        "registers": "lower the register use: __launch_bounds__, fewer values per thread, or a smaller block",
        "shared_memory": "use less shared memory per block: a smaller tile, or a narrower type in it",
        "blocks": "use larger blocks: the block limit is reached before the threads fill the SM",
        "threads": "choose a block size that divides the threads of an SM (128, 256, 512)",
    }
    return Finding(
        weight=(1.0 - occupancy.theoretical_pct / 100.0) * context.share("latency"),
        evidence=(
            f"occupancy is {occupancy.theoretical_pct:.0f} %, limited by {occupancy.limiter.replace('_', ' ')} "
            f"({occupancy.blocks_per_sm} blocks per SM)"
        ),
        advice=cures[occupancy.limiter],
    )


def _waiting(context: Context) -> Finding | None:
    if context.binding != "latency":
        return None
    seen = context.seen
    warps = seen.counts["warps"]
    return Finding(
        weight=0.3 * context.share("latency"),
        evidence=(
            f"a warp executes {seen.counts['warp_instructions'] / warps:.0f} instructions and "
            f"{seen.counts['global_load.requests'] / warps:.1f} global loads, mostly one after another"
        ),
        advice="give the scheduler independent work: unroll the loop so that several loads are in flight, split long "
        "dependent chains into several accumulators, and let each thread do less",
    )


def _divergence(context: Context) -> Finding | None:
    active = context.per("thread_instructions", "warp_instructions")
    if not active or active >= 26.0:
        return None
    return Finding(
        weight=(1.0 - active / 32.0) * context.share("issue", "fp32", "int", "lsu", "latency"),
        evidence=f"{active:.1f} of 32 threads are active in an average instruction"
        + (f", {context.seen.counts['divergent_branches']:,.0f} branches diverge" if _diverges(context) else ""),
        advice="let the threads of a warp take the same path: branch on warp-sized units, fill warps, and reduce with "
        "__shfl_down_sync instead of switching threads off",
    )


def _diverges(context: Context) -> bool:
    return context.seen.counts["divergent_branches"] > 0.01 * context.seen.counts["branches"]


def _integer_work(context: Context) -> Finding | None:
    slots = _slots(context)
    total = sum(slots.values())
    if not total or slots.get("int", 0.0) < 0.5 * total:
        return None
    return Finding(
        weight=0.5 * slots["int"] / total * context.share("int", "issue"),
        evidence=f"{100 * slots['int'] / total:.0f} % of the machine instructions (estimated) are integer arithmetic",
        advice="hoist address arithmetic out of the loop, use 32-bit indices, and avoid division and modulo by "
        "run-time values",
    )


def _special_functions(context: Context) -> Finding | None:
    if context.share("sfu") < 0.15:
        return None
    return Finding(
        weight=0.5 * context.share("sfu"),
        evidence=f"special functions and conversions take {_us(context.seen.terms_us['sfu'])}",
        advice="compute fewer of them: __expf or exp2f with a pre-scaled argument, one reciprocal instead of many "
        "divisions, tables for what repeats",
    )


def _double_precision(context: Context) -> Finding | None:
    operations = context.seen.counts.get("thread_ops.fp64", 0.0)
    if not operations or context.share("fp64") < 0.1:
        return None
    return Finding(
        weight=context.share("fp64"),
        evidence=f"{operations:,.0f} fp64 operations take {_us(context.seen.terms_us['fp64'])}",
        advice="keep the arithmetic in float where the problem is float: a literal without f is a double",
    )


def _dense_arithmetic(context: Context) -> Finding | None:
    if context.binding not in ("fp32", "issue"):
        return None
    slots = _slots(context)
    useful = slots.get("fp32", 0.0) + slots.get("fp16", 0.0) + slots.get("tensor", 0.0)
    return Finding(
        weight=0.3 * context.share("fp32", "issue"),
        evidence=f"{100 * useful / sum(slots.values()):.0f} % of the machine instructions (estimated) are arithmetic",
        advice="issue fewer instructions per result: unroll, use wider loads, keep more results per thread in "
        "registers, and use tensor cores where dtype and tolerance allow",
    )


def _contended_atomics(context: Context) -> Finding | None:
    if context.share("atomics") < 0.1:
        return None
    return Finding(
        weight=context.share("atomics"),
        evidence=f"{context.seen.counts['global_atomic.requests']:,.0f} atomic requests queue for few places of L2",
        advice="reduce in registers, warps and shared memory first, and issue one global atomic per block",
    )


def _local_memory(context: Context) -> Finding | None:
    counts = context.seen.counts
    local = counts["local_load.sectors"] + counts["local_store.sectors"]
    everything = local + counts["global_load.sectors"] + counts["global_store.sectors"]
    if local < 0.05 * everything or not local:
        return None
    return Finding(
        weight=local / everything * context.share("lsu", "l2"),
        evidence=f"{100 * local / everything:.0f} % of the sectors are local memory (arrays indexed at run time)",
        advice="unroll the loops over the local array so that it stays in registers, or put it in shared memory",
    )


def _block_starts(context: Context) -> Finding | None:
    if context.share("dispatch") < 0.2:
        return None
    launch = context.seen.longest
    return Finding(
        weight=context.share("dispatch"),
        evidence=(
            f"starting {launch.shape.blocks:,} blocks of {launch.shape.threads_per_block} threads takes "
            f"{_us(context.seen.terms_us['dispatch'])}"
        ),
        advice="start fewer blocks: larger ones, or several elements per thread (a grid-stride loop, 16-byte accesses)",
    )


def _launch_overhead(context: Context) -> Finding | None:
    if context.share("launch") < 0.2:
        return None
    advice = (
        f"fuse the {context.launches} launches into fewer"
        if context.launches > 1
        else "nothing in the kernel helps at this size: do more work per launch"
    )
    return Finding(
        weight=context.share("launch"),
        evidence=f"launching takes {_us(context.seen.terms_us['launch'])} of {_us(context.seen.time_us)}",
        advice=advice,
    )


def _nothing_special(context: Context) -> Finding:
    return Finding(
        weight=0.0,
        evidence="no wasteful access pattern was found",
        advice="try another block size or work per thread, or another algorithm",
    )


def _slots(context: Context) -> dict[str, float]:
    counts = context.seen.counts
    return {name.partition(".")[2]: number for name, number in counts.items() if name.startswith("slots.")}


def _us(time_us: float) -> str:
    return f"{time_us:,.0f} µs" if time_us >= 100.0 else f"{time_us:.3g} µs"


def _bytes(number: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} B"


FINDERS: tuple[Callable[[Context], Finding | None], ...] = (
    _scattered_loads,
    _scattered_stores,
    _bank_conflicts,
    _redundant_traffic,
    _at_the_floor,
    _reloading,
    _narrow_accesses,
    _few_blocks,
    _tail,
    _low_occupancy,
    _waiting,
    _divergence,
    _integer_work,
    _special_functions,
    _double_precision,
    _dense_arithmetic,
    _contended_atomics,
    _local_memory,
    _block_starts,
    _launch_overhead,
)
