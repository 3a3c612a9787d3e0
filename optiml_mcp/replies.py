"""What a tool answers: JSON that fits in 8 KB, complete in itself, with links to what was left out.

A reply is cut in this order until it fits: long logs are shortened, lists inside nested records keep their first
entries, sources of kernels become null with the URI that serves them, lists at the top keep their first entries, what
must be whole (a kernel with its launches, a problem, a patch) becomes null, maps keep their first entries, whole fields
go. Every cut is listed under the key `cut` with the full count and the URI, so that a reader knows what is missing and
where it is.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from optiml.codec import encode
from optiml.records import Evaluated, Profile, SearchResult

MAX_REPLY_BYTES = 8000  # the contract allows 8 KB; the rest is room for a client that re-formats the JSON
# What a reader acts on: shortened only when nothing else is left to cut.
PROTECTED = ("summary", "next_action", "warnings", "kernel_id", "run_id", "job_id", "status", "reason", "uri")
WHOLE = frozenset({"kernel", "problem", "patch", "diff", "template"})  # cut, they would be other ones, or none
MOST_CUTS_LISTED = 12
CUT_TEXT = " ... (cut here: the whole is too long for a reply)"
SMALL_LIST_BYTES = 400  # lists inside nested records that are no larger stay whole
# Shown unless metrics are asked for by name: time, bytes, pressure on each unit, access patterns, occupancy.
KEY_METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1tex__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__t_sector_hit_rate.pct",
    "l1tex__t_sector_hit_rate.pct",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
    "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio",
    "l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "smsp__inst_executed.sum",
    "smsp__thread_inst_executed_per_inst_executed.ratio",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
    "launch__waves_per_multiprocessor",
)

# Of each side of a search's result: the metrics that explain most speed-ups.
RESULT_METRICS = (
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "smsp__inst_executed.sum",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
)
RESULT_VERDICT = ("kernel_id", "status", "reason", "detail", "levels", "domain", "summary", "uri")
RESULT_PROFILE = ("kernel_id", "axes", "time", "metrics", "bottleneck", "speed_of_light", "report_uri")

Path = tuple[str | int, ...]
Edit = tuple[Path, Any]  # where, and what stands there instead


def size_of(value: Any) -> int:
    """Bytes of a JSON value in the widest usual notation (spaces, escaped non-ASCII)."""
    return len(json.dumps(value))


def fit(reply: Mapping[str, Any], *, uri: str | None, limit: int = MAX_REPLY_BYTES) -> dict[str, Any]:
    """The reply itself where it fits, else a copy cut to `limit` bytes.

    Args:
        reply: records and plain JSON values; it may already carry notes under `cut`.
        uri: the resource that shows the whole of it; None where there is none.
        limit: bytes of the answer, as `size_of` counts them; at least 2000.
    """
    left: dict[str, Any] = encode(reply)
    earlier = left.pop("cut", [])
    totals: dict[Path, tuple[int, str | None]] = {}
    for find in _STAGES:
        while size_of(answer := _with_notes(left, earlier, totals)) > limit and (edits := find(left)):
            for path, new in edits:
                old = _at(left, path)
                total = len(old) if isinstance(old, str | list | dict) else 1
                totals.setdefault(path, (total, _kernel_uri(left, path) or uri))
                left = _replaced(left, path, new)
    return answer


def fit_text(text: str, *, limit: int = MAX_REPLY_BYTES) -> str:
    """The text itself where it fits, else its beginning and the word that it was cut."""
    if size_of(text) <= limit:
        return text
    kept = limit - size_of(CUT_TEXT)
    while size_of(text[:kept]) > limit - size_of(CUT_TEXT):
        kept = kept * 9 // 10  # characters that a client may escape
    return text[:kept] + CUT_TEXT


def _with_notes(
    left: dict[str, Any], earlier: list[Any], totals: Mapping[Path, tuple[int, str | None]]
) -> dict[str, Any]:
    """The reply with a note of each cut that is still to be seen (a list above it may have been cut since)."""
    notes = [
        {"path": ".".join(map(str, path)), "total": total, "uri": whole}
        for path, (total, whole) in totals.items()
        if _exists(left, path)
    ]
    cut = [*earlier, *notes][:MOST_CUTS_LISTED]
    return {**left, "cut": cut} if cut else left


def brief_profile(profile: Profile) -> dict[str, Any]:
    """A profile with the metrics a reader acts on; all of them, and each bench entry, are behind its URI.

    A profile that holds few metrics holds those the caller asked for: they stay.
    """
    brief: dict[str, Any] = encode(dataclasses.replace(profile, bench=()))
    del brief["bench"]
    if len(profile.metrics) <= len(KEY_METRICS):
        return brief
    for name in ("metrics", "metric_source"):
        brief[name] = {metric: brief[name][metric] for metric in KEY_METRICS if metric in brief[name]}
    return {**brief, "cut": [{"path": "metrics", "total": len(profile.metrics), "uri": profile.report_uri}]}


def brief_result(result: SearchResult) -> dict[str, Any]:
    """A search's result with what a reader acts on: kernels whole, verdicts and profiles brief.

    Two full profiles alone are three times what a reply may hold, and then the kernels would be cut first.
    """
    brief: dict[str, Any] = encode(result)
    uri = f"optiml://runs/{result.run_id}"
    cuts: list[dict[str, Any]] = []
    for side, item in (("best", result.best), ("baseline", result.baseline)):
        if item is not None:
            cuts += _shorten(brief[side], item, side, uri)
    for number, step in enumerate(brief["path"]):
        changes = step["metric_changes"]
        step["metric_changes"] = {name: changes[name] for name in RESULT_METRICS if name in changes}
        if len(step["metric_changes"]) < len(changes):
            cuts.append({"path": f"path.{number}.metric_changes", "total": len(changes), "uri": uri})
    return {**brief, "cut": cuts} if cuts else brief


def _shorten(brief: dict[str, Any], item: Evaluated, side: str, uri: str) -> list[dict[str, Any]]:
    brief["verdict"] = {name: brief["verdict"][name] for name in RESULT_VERDICT}
    cuts = [{"path": f"{side}.verdict.cases", "total": len(item.verdict.cases), "uri": uri}]
    if item.profile is not None:
        profile = {name: brief["profile"][name] for name in RESULT_PROFILE}
        profile["metrics"] = {name: profile["metrics"][name] for name in RESULT_METRICS if name in profile["metrics"]}
        profile["bottleneck"] = {"kind": item.profile.bottleneck.kind, "evidence": item.profile.bottleneck.evidence[:1]}
        brief["profile"] = profile
        whole = item.profile.report_uri or uri
        cuts.append({"path": f"{side}.profile.metrics", "total": len(item.profile.metrics), "uri": whole})
    return cuts


# --- stages: each returns the edits of one pass, or nothing when it can do no more -----------------------------------
def _last_source_over(length: int) -> Callable[[dict[str, Any]], list[Edit]]:
    """The last kernel source: kernels come best first, so the last is the least wanted."""

    def find(reply: dict[str, Any]) -> list[Edit]:
        sources = [path for path, node in _walk(reply) if _is_source(path) and node is not None and len(node) > length]
        return [(sources[-1], None)] if sources else []

    return find


def _strings_over(length: int, *, protected: bool) -> Callable[[dict[str, Any]], list[Edit]]:
    def find(reply: dict[str, Any]) -> list[Edit]:
        return [
            (path, node[: length - 1] + "…")
            for path, node in (_walk(reply) if protected else _unprotected(reply))
            if isinstance(node, str) and len(node) > length and not _is_whole(path)
        ]

    return find


def _largest_list(*, nested: bool) -> Callable[[dict[str, Any]], list[Edit]]:
    """The largest list; `nested` looks only below the top, and leaves kernels and problems whole."""

    def find(reply: dict[str, Any]) -> list[Edit]:
        lists = [
            (path, node)
            for path, node in _unprotected(reply)
            if isinstance(node, list) and len(node) > 1 and not _is_whole(path)
            if not nested or (len(path) > 1 and size_of(node) > SMALL_LIST_BYTES)
        ]
        path, node = max(lists, key=lambda item: size_of(item[1]), default=((), []))
        return [(path, node[: len(node) // 2])] if lists else []

    return find


def _largest_map(reply: dict[str, Any]) -> list[Edit]:
    maps = [
        (path, node)
        for path, node in _unprotected(reply)
        if isinstance(node, dict) and len(node) > 8 and not _is_whole(path)
    ]
    path, node = max(maps, key=lambda item: size_of(item[1]), default=((), {}))
    return [(path, dict(list(node.items())[: max(8, len(node) // 2)]))] if maps else []


def _last_whole(reply: dict[str, Any]) -> list[Edit]:
    """The last kernel, problem, patch or template: half of one would be taken for one."""
    found = [
        path
        for path, node in _unprotected(reply)
        if path[-1] in WHOLE and (isinstance(node, dict | list) or (isinstance(node, str) and len(node) > 120))
    ]
    return [(found[-1], None)] if found else []


def _largest_field(reply: dict[str, Any]) -> list[Edit]:
    fields = [(key, node) for key, node in reply.items() if key not in PROTECTED and size_of(node) > 8]
    key, _ = max(fields, key=lambda item: size_of(item[1]), default=("", None))
    return [((key,), None)] if fields else []


def _half_the_warnings(reply: dict[str, Any]) -> list[Edit]:
    lists = [(path, node) for path, node in _walk(reply) if isinstance(node, list) and len(node) > 1]
    return [(path, node[: len(node) // 2]) for path, node in lists[:1]]


_STAGES: tuple[Callable[[dict[str, Any]], list[Edit]], ...] = (
    _last_source_over(MAX_REPLY_BYTES // 2),  # would crowd out everything else
    _strings_over(600, protected=False),
    _largest_list(nested=True),
    _last_source_over(0),
    _largest_list(nested=False),
    _last_whole,
    _largest_map,
    _strings_over(120, protected=False),
    _largest_field,
    _strings_over(600, protected=True),
    _half_the_warnings,
    _strings_over(60, protected=True),
)


# --- walking JSON ----------------------------------------------------------------------------------------------------
def _walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    yield path, value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _walk(item, (*path, index))


def _unprotected(reply: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    return ((path, node) for path, node in _walk(reply) if path and path[0] not in PROTECTED)


def _is_whole(path: Path) -> bool:
    """Whether a value is part of something that is either whole or null."""
    return not WHOLE.isdisjoint(path)


def _is_source(path: Path) -> bool:
    return path[-2:] == ("kernel", "source")


def _at(value: Any, path: Path) -> Any:
    for part in path:
        value = value[part]
    return value


def _exists(value: Any, path: Path) -> bool:
    for part in path:
        if isinstance(value, dict):
            if part not in value:
                return False
        elif not (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            return False
        value = value[part]
    return True


def _replaced(value: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    head, rest = path[0], path[1:]
    if isinstance(value, dict):
        return {key: _replaced(item, rest, new) if key == head else item for key, item in value.items()}
    return [_replaced(item, rest, new) if index == head else item for index, item in enumerate(value)]


def _kernel_uri(reply: Any, path: Path) -> str | None:
    """URI of the kernel that the value at `path` belongs to, from the nearest `kernel_id` above it."""
    for depth in range(len(path) - 1, 0, -1):
        node = _at(reply, path[:depth])
        if isinstance(node, dict) and isinstance(node.get("kernel_id"), str):
            return f"optiml://kernels/{node['kernel_id']}"
    return None
