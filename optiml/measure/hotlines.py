"""The source lines that do most of the work of whatever binds the kernel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from optiml.ptx.counters import Counters
from optiml.records import HotLine

Resource = Literal["sectors", "wavefronts", "instructions"]
MOST_LINES = 5
LEAST_SHARE_PCT = 1.0
LONGEST_SOURCE = 120


@dataclass(frozen=True, kw_only=True)
class _LineWork:
    sectors: float = 0.0
    requests: float = 0.0
    wavefronts: float = 0.0
    instructions: float = 0.0

    def plus(self, other: _LineWork) -> _LineWork:
        return _LineWork(
            sectors=self.sectors + other.sectors,
            requests=self.requests + other.requests,
            wavefronts=self.wavefronts + other.wavefronts,
            instructions=self.instructions + other.instructions,
        )


def hot_lines(source: str, runs: Iterable[tuple[float, Counters]], resource: Resource) -> tuple[HotLine, ...]:
    """At most five lines by their share of one resource, largest first.

    Args:
        source: the kernel's text; line 1 is its first line.
        runs: counters of each launch with the factor that scales them to the whole grid and its weight.
        resource: global sectors, shared wavefronts, or warp instructions; where the kernel has none of it,
            instructions.
    """
    work = _by_line(runs)
    if not sum(getattr(item, resource) for item in work.values()):
        resource = "instructions"
    total = sum(getattr(item, resource) for item in work.values())
    if not total:
        return ()
    text = source.splitlines()
    ranked = sorted(work, key=lambda line: (-getattr(work[line], resource), line))
    lines = []
    for line in ranked[:MOST_LINES]:
        share = 100.0 * getattr(work[line], resource) / total
        if share < LEAST_SHARE_PCT:
            break
        requests = work[line].requests
        lines.append(
            HotLine(
                line=line,
                source=text[line - 1].strip()[:LONGEST_SOURCE] if 1 <= line <= len(text) else "",
                sectors_per_request=work[line].sectors / requests if requests else None,
                share_pct=share,
            )
        )
    return tuple(lines)


def _by_line(runs: Iterable[tuple[float, Counters]]) -> Mapping[int, _LineWork]:
    work: dict[int, _LineWork] = {}
    for factor, counters in runs:
        for line, seen in counters.lines.items():
            more = _LineWork(
                sectors=factor * (seen.load_sectors + seen.store_sectors),
                requests=factor * (seen.load_requests + seen.store_requests),
                wavefronts=factor * seen.shared_wavefronts,
                instructions=factor * seen.warp_instructions,
            )
            work[line] = work.get(line, _LineWork()).plus(more)
    return work
