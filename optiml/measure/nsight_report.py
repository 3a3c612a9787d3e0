"""Reports of Nsight Compute (`.ncu-rep`): metrics, what its rules found, hot lines with what warps waited for.

The file is a stranger's and its reader is a closed library, so a sandboxed child reads it. No GPU is needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from optiml.errors import InvalidInput, SetupError, WorkerDied, WorkerTimeout
from optiml.measure.metrics import METRICS
from optiml.measure.nsight_rules import bottleneck_of
from optiml.process import Worker
from optiml.records import NsightReport, ReportedKernel, ReportedLine, RuleFinding
from optiml.sandbox import Policy

MODULE = "optiml.measure.nsight_report_child"
MOST_BYTES = 1 << 30
MOST_FINDINGS = 8
TIMEOUT_S = 120.0
MEMORY_BYTES = 8 << 30
LONGEST_SOURCE = 120
LONGEST_MESSAGE = 600
INSTALL = "pip install 'optiml[gpu]' (or ncu-report alone)"


def read_report(
    path: Path,
    *,
    metrics: Sequence[str] | None = None,
    kernel_regex: str | None = None,
    launch_skip: int | None = None,
    launch_count: int | None = None,
) -> NsightReport:
    """What a report says of its kernels, the longest first.

    Args:
        metrics: names to show; those of the metric table unless given.
        kernel_regex: only kernels whose name, as the compiler or as the source writes it, matches somewhere.
        launch_skip: leave out so many of the launches that match.
        launch_count: read so many of those after them.

    Raises:
        InvalidInput: the file cannot be read, is no report, or holds no kernel that matches.
        SetupError: code `no_profiler`: the package that reads reports is missing.
    """
    if find_spec("ncu_report") is None:
        raise SetupError(f"reading reports needs the package ncu-report: {INSTALL}", code="no_profiler")
    pattern = _pattern(kernel_regex)
    try:
        size = path.stat().st_size
        is_file = path.is_file()
    except OSError as error:
        raise InvalidInput("the report cannot be read: check its path") from error
    if not is_file:
        raise InvalidInput("the report is no file")
    if size > MOST_BYTES:
        raise InvalidInput(f"the report is larger than {MOST_BYTES >> 30} GiB", code="too_large")
    header = {
        "path": str(path.resolve()),
        "metrics": list(METRICS if metrics is None else metrics),
        "regex": pattern,
        "skip": launch_skip or 0,
        "count": launch_count,
    }
    policy = Policy(
        readable=(str(path.resolve()),), address_space_bytes=MEMORY_BYTES, cpu_s=int(TIMEOUT_S), file_size_bytes=1 << 20
    )
    with Worker(MODULE, policy=policy) as worker:
        try:
            reply, _ = worker.call(header, timeout_s=TIMEOUT_S)
        except WorkerTimeout as error:
            raise InvalidInput(f"reading the report took longer than {TIMEOUT_S:g} s") from error
        except WorkerDied as error:
            raise InvalidInput("the report cannot be read: the file is damaged, or no report at all") from error
    return _report(reply)


def _pattern(text: str | None) -> str | None:
    if text is None:
        return None
    try:
        re.compile(text)
    except re.error as error:
        raise InvalidInput(f"kernel_regex is no regular expression: {error}") from error
    return text


def _report(reply: Mapping[str, Any]) -> NsightReport:
    kernels = tuple(_kernel(item) for item in reply["kernels"])
    warnings = list(reply["warnings"])
    if not kernels:
        raise InvalidInput(
            f"the filter lets none of the {reply['held']} kernels of the report by: {', '.join(reply['names'][:10])}"
            if reply["held"]
            else "there is no profiled kernel in this file: is it an .ncu-rep of Nsight Compute?"
        )
    if len(kernels) < reply["matching"]:
        warnings.append(f"{reply['matching']} launches match; the {len(kernels)} longest are shown")
    warnings.append("times in a report are the profiler's: launches one at a time, caches flushed, clocks as set there")
    first = kernels[0]
    return NsightReport(
        summary=_summary(first, reply["matching"], reply["device"]),
        next_action=_next_action(first),
        warnings=tuple(warnings),
        device=reply["device"],
        kernels=kernels,
        total=reply["matching"],
    )


def _kernel(item: Mapping[str, Any]) -> ReportedKernel:
    metrics = {name: value for name, value in item["metrics"].items()}
    return ReportedKernel(
        name=item["name"],
        grid=_triple(item["grid"]),
        block=_triple(item["block"]),
        metrics=metrics,
        bottleneck=bottleneck_of({**item["basics"], **metrics}, hot_line=_first_line(item["lines"])),
        hot_lines=tuple(_line(line) for line in item["lines"]),
        findings=tuple(
            RuleFinding(
                rule=finding["rule"],
                title=finding["title"],
                message=_plain(finding["message"])[:LONGEST_MESSAGE],
                speedup_pct=finding["speedup_pct"],
            )
            for finding in item["findings"][:MOST_FINDINGS]
        ),
    )


def _first_line(lines: Sequence[Mapping[str, Any]]) -> int | None:
    return int(lines[0]["line"]) if lines else None


def _line(item: Mapping[str, Any]) -> ReportedLine:
    return ReportedLine(
        file=Path(item["file"]).name,
        line=item["line"],
        source=item["source"].strip()[:LONGEST_SOURCE],
        share_pct=item["share_pct"],
        sectors_per_request=item["sectors_per_request"],
        stalls=item["stalls"],
    )


def _triple(value: Sequence[int] | None) -> tuple[int, int, int] | None:
    if value is None:
        return None
    x, y, z = value
    return x, y, z


def _plain(message: str) -> str:
    """A rule's words without the marks that make links of them in the profiler's own window."""
    named = re.sub(r"@url:([^:@]*):[^@]*@", r"\1", message)
    return re.sub(r"@(?:section|source):[^:@]*:([^@]*)@", r"\1", named)


def _summary(kernel: ReportedKernel, total: int, device: str) -> str:
    text = f"{total} profiled launch{'es' if total != 1 else ''} on {device or 'an unknown device'}; the longest is "
    text += f"{kernel.name}"
    duration = kernel.metrics.get("gpu__time_duration.sum")
    if duration:
        text += f" with {duration / 1e3:.4g} µs under the profiler"
    if kernel.bottleneck is not None:
        text += f", {kernel.bottleneck.kind}-bound: {kernel.bottleneck.evidence[0]}"
    if kernel.hot_lines:
        line = kernel.hot_lines[0]
        text += f". Line {line.line} of {line.file} has {line.share_pct:.0f} % of the samples"
        if line.stalls:
            text += f", waiting for {next(iter(line.stalls))}"
    return text + "."


def _next_action(kernel: ReportedKernel) -> str:
    if kernel.bottleneck is not None and kernel.bottleneck.advice:
        return f"{kernel.bottleneck.advice[0][0].upper()}{kernel.bottleneck.advice[0][1:]}."
    if kernel.findings:
        return kernel.findings[0].message
    return "Collect more: ncu --set full --import-source yes -o FILE COMMAND"
