"""The inside of the child that reads an .ncu-rep file; answers plain figures."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import ncu_report

from optiml.errors import InvalidInput
from optiml.measure.nsight_rules import BASICS
from optiml.process import serve

Header = dict[str, Any]
MOST_KERNELS = 20  # shown; the longest
MOST_LINES = 5
MOST_STALLS = 3
MOST_NAMES = 20
LEAST_SHARE_PCT = 1.0
SAMPLES = "smsp__pcsamp_sample_count"
STALLS = "smsp__pcsamp_warps_issue_stalled_"
SECTORS = "memory_l2_theoretical_sectors_global"
EXECUTED = "inst_executed"
DURATION = "gpu__time_duration.sum"
OPTIMISATION, WARNING = 2, 3  # kinds of a rule's message worth telling; 1 is information


def handle(header: Header, blobs: Sequence[memoryview]) -> tuple[Header, Sequence[memoryview]]:
    """Everything about the longest launches that match."""
    try:
        report = ncu_report.load_report(header["path"])
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        raise InvalidInput(
            "the report cannot be read: it is damaged, no report at all, or of a newer Nsight Compute than this "
            "ncu-report (pip install --upgrade ncu-report)"
        ) from error
    actions = [] if report is None else list(_actions(report))
    wanted = None if header["regex"] is None else re.compile(header["regex"])
    matching = [action for action in actions if wanted is None or any(wanted.search(name) for name in _names(action))]
    end = None if header["count"] is None else header["skip"] + header["count"]
    matching = matching[header["skip"] : end]
    longest = sorted(matching, key=lambda action: -(_number(action, DURATION) or 0.0))[:MOST_KERNELS]
    device = next((_text(action, "device__attribute_display_name") for action in actions), "")
    warnings = [] if any(_number(action, SAMPLES) for action in longest) or not longest else [
        "the report holds no source counters, so no hot lines: add --set full or --section SourceCounters"
    ]  # fmt: skip
    return {
        "device": device,
        "held": len(actions),
        "matching": len(matching),
        "names": list(dict.fromkeys(_names(action)[0] for action in actions))[:MOST_NAMES],
        "kernels": [_kernel(action, header["metrics"]) for action in longest],
        "warnings": warnings,
    }, ()


def _actions(report: Any) -> Iterator[Any]:
    for index in range(report.num_ranges()):
        part = report.range_by_idx(index)
        for position in range(part.num_actions()):
            yield part.action_by_idx(position)


def _names(action: Any) -> tuple[str, ...]:
    bases = (action.NameBase_DEMANGLED, action.NameBase_FUNCTION, action.NameBase_MANGLED)
    return tuple(action.name(base) for base in bases)


def _kernel(action: Any, metrics: Sequence[str]) -> Header:
    held = set(action.metric_names())
    return {
        "name": _names(action)[0],
        "grid": _extent(action, "grid"),
        "block": _extent(action, "block"),
        "metrics": {name: _number(action, name) if name in held else None for name in metrics},
        "basics": {name: _number(action, name) if name in held else None for name in BASICS},
        "lines": _lines(action),
        "findings": _findings(action),
    }


def _extent(action: Any, what: str) -> list[int] | None:
    values = [_number(action, f"launch__{what}_dim_{axis}") for axis in "xyz"]
    return None if None in values else [int(value or 0) for value in values]


def _number(action: Any, name: str) -> float | None:
    metric = action.metric_by_name(name)
    if metric is None or not metric.has_value() or metric.kind() in (metric.ValueKind_STRING, metric.ValueKind_UNKNOWN):
        return None
    value = float(metric.as_double())
    return value if math.isfinite(value) else None


def _text(action: Any, name: str) -> str:
    metric = action.metric_by_name(name)
    return "" if metric is None else str(metric.as_string())


def _findings(action: Any) -> list[Header]:
    found = []
    for result in action.rule_results_as_dicts():
        message = result.get("rule_message") or {}
        if not message.get("message") or message.get("type") not in (OPTIMISATION, WARNING):
            continue
        estimate = result.get("speedup_estimation") or {}
        found.append(
            {
                "rule": result["rule_identifier"],
                "title": message.get("title") or result["name"],
                "message": message["message"],
                "speedup_pct": estimate.get("speedup"),
            }
        )
    return sorted(found, key=lambda item: -(item["speedup_pct"] or 0.0))


def _by_address(action: Any, name: str) -> dict[int, float]:
    """Values of a metric at the addresses of instructions."""
    metric = action.metric_by_name(name)
    if metric is None or not metric.has_correlation_ids():
        return {}
    addresses = metric.correlation_ids()
    return {addresses.as_uint64(index): metric.as_double(index) for index in range(metric.num_instances())}


def _lines(action: Any) -> list[Header]:
    """Source lines by their share of the samples; where nothing was sampled, of the instructions executed."""
    samples = _by_address(action, SAMPLES)
    executed = _by_address(action, EXECUTED)
    weights = samples if sum(samples.values()) else executed
    total = sum(weights.values())
    if not total:
        return []
    places = {address: _place(action, address) for address in {*weights, *executed}}
    by_line: dict[tuple[str, int], float] = {}
    for address, weight in weights.items():
        place = places[address]
        if place is not None:
            by_line[place] = by_line.get(place, 0.0) + weight
    stalls = {
        name.removeprefix(STALLS): _by_address(action, name)
        for name in action.metric_names()
        if name.startswith(STALLS) and not name.endswith("_not_issued")
    }
    sectors = _by_address(action, SECTORS)
    texts = {name: text.splitlines() for name, text in action.source_files().items()}
    lines = []
    for place in sorted(by_line, key=lambda item: (-by_line[item], item))[:MOST_LINES]:
        share = 100.0 * by_line[place] / total
        if share < LEAST_SHARE_PCT:
            break
        here = [address for address, at in places.items() if at == place]
        asked = sum(executed.get(address, 0.0) for address in here if address in sectors)
        moved = sum(sectors.get(address, 0.0) for address in here)
        text = texts.get(place[0], [])
        lines.append(
            {
                "file": place[0],
                "line": place[1],
                "source": text[place[1] - 1] if 0 < place[1] <= len(text) else "",
                "share_pct": share,
                "sectors_per_request": moved / asked if asked else None,
                "stalls": _stalls(stalls, here),
            }
        )
    return lines


def _place(action: Any, address: int) -> tuple[str, int] | None:
    info = action.source_info(address)
    return None if info is None or not info.line() else (info.file_name(), info.line())


def _stalls(stalls: dict[str, dict[int, float]], addresses: Sequence[int]) -> dict[str, float]:
    """The commonest reasons to wait at some instructions, in per cent of the samples there."""
    counts = {name: sum(values.get(address, 0.0) for address in addresses) for name, values in stalls.items()}
    total = sum(counts.values())
    waits = {name: count for name, count in counts.items() if name != "selected" and count}
    largest = sorted(waits, key=lambda name: -waits[name])[:MOST_STALLS]
    return {name: 100.0 * waits[name] / total for name in largest}


def main() -> None:
    serve(handle)


if __name__ == "__main__":
    main()
