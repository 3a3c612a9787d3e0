"""Level 2 on a GPU: NVIDIA's compute-sanitizer over a kernel at several sizes, its findings as faults.

Each tool runs once over all cases in one process. Arrays are allocated by themselves at their exact sizes, and what a
kernel has to write itself stays uninitialised, so that initcheck sees reads of it.
"""

from __future__ import annotations

import dataclasses
import random
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from optiml.device.cuda_job import JobItem
from optiml.device.plan import resolve_plan
from optiml.device.wrapped import job_folder, run_wrapped
from optiml.errors import Fault, OtherParty, ToolFailed, WorkerTimeout
from optiml.problems.data import draw, storage_dtype
from optiml.records import Build, DeviceInfo, Kernel, Problem
from optiml.verify.inputs import cost, hidden_cases, visible_cases

Tool = Literal["memcheck", "racecheck", "initcheck", "synccheck"]
TOOLS: tuple[Tool, ...] = ("memcheck", "racecheck", "initcheck", "synccheck")
OPTIONS: Mapping[Tool, tuple[str, ...]] = {
    "memcheck": (), "racecheck": ("--racecheck-report", "analysis"), "initcheck": (), "synccheck": (),
}  # fmt: skip
PRINT_LIMIT = "50"
MOST_COST = 1e7  # operations of a case; the tools run a kernel up to a thousand times slower
AT_ONCE = 4
_ACCESS = re.compile(r"Invalid __(\w+)__ (read|write|atomic) of size (\d+)")
_UNINITIALISED = re.compile(r"Uninitialized __(\w+)__ memory read of size (\d+)")
_PLACE = re.compile(r"\bat .*?(?:kernel\.cu|\w+\.cu|\w+\.ptx):(\d+)")
_THREAD = re.compile(r"by thread \((\d+),(\d+),(\d+)\) in block \((\d+),(\d+),(\d+)\)")
_RACE = re.compile(r"Error: (?:Race reported between|Potential \w+ hazard)")
_PARTY = re.compile(r"(?:(Read|Write|Atomic)\w* access|Thread \((\d+),(\d+),(\d+)\)).*?:(\d+)")
_BARRIER = re.compile(r"Barrier error|Divergent thread|Invalid arguments|error detected", re.IGNORECASE)
_HEAD = re.compile(  # of a finding, in the tool's own lines
    rf"^========= .*?(?:{'|'.join(item.pattern for item in (_ACCESS, _UNINITIALISED, _RACE))})".encode()
)
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) error)")


@dataclass(frozen=True, kw_only=True)
class Sanitized:
    """What the tools found.

    Attributes:
        report: tool -> `clean`, or what it found in a word or two; the contract's `sanitizer`.
        fault: the first finding, of the tools in their order.
        missing: why a tool said nothing at all, None if all did.
    """

    report: Mapping[str, str] = field(default_factory=dict)
    fault: Fault | None = None
    missing: str | None = None


def sanitize(
    program: Path,
    items: Sequence[JobItem],
    *,
    gpu: int,
    timeout_s: float,
    tools: Sequence[Tool] = TOOLS,
    cancelled: threading.Event | None = None,
) -> Sanitized:
    """Run every tool over `items`, several at once.

    Args:
        program: full path of compute-sanitizer.
        timeout_s: for each tool.
    """
    with job_folder(items, gpu=gpu) as folder, ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        found = list(pool.map(lambda tool: _run_tool(program, tool, folder, timeout_s, cancelled), tools))
    report: dict[str, str] = {
        tool: "clean" if fault is None else fault.kind for tool, (fault, _) in zip(tools, found, strict=True)
    }
    faults = [fault for fault, _ in found if fault is not None]
    if faults:
        return Sanitized(report=report, fault=faults[0])
    missing = [f"{tool} {why}" for tool, (_, why) in zip(tools, found, strict=True) if why is not None]
    return Sanitized(report={} if missing else report, missing="; ".join(missing) or None)


def _run_tool(
    program: Path, tool: Tool, folder: Path, timeout_s: float, cancelled: threading.Event | None
) -> tuple[Fault | None, str | None]:
    """The first finding, or why nothing is known; neither if the kernel is clean."""
    options = ("--tool", tool, "--print-limit", PRINT_LIMIT, "--report-api-errors", "no", *OPTIONS[tool])
    try:
        done = run_wrapped(
            [str(program), *options], folder, timeout_s=timeout_s, cancelled=cancelled, enough=until_findings(2)
        )
    except WorkerTimeout:
        return None, f"did not end within {timeout_s:g} s"
    except ToolFailed as error:
        return None, f"could not be run: {error}"
    text = (done.stdout + b"\n" + done.stderr).decode("utf-8", errors="replace")
    fault = first_finding(tool, text)
    if fault is not None:
        return fault, None
    summary = _SUMMARY.search(text)
    if summary is None or int(summary.group(1) or summary.group(2)) > 0 or "failed " in text:
        return None, f"ended without a verdict (exit code {done.exit_code}): {_gist(text)}"
    return None, None


def until_findings(count: int) -> Callable[[bytes], bool]:
    """What says, of a tool's output piece by piece, whether so many findings have begun; the one before is complete.

    A kernel may have millions of them, which take minutes.
    """
    seen, rest = 0, b""

    def enough(piece: bytes) -> bool:
        nonlocal seen, rest
        *lines, rest = (rest + piece).split(b"\n")
        seen += sum(_HEAD.search(line) is not None for line in lines)
        return seen >= count

    return enough


def first_finding(tool: Tool, text: str) -> Fault | None:
    """The first thing that a tool reports, None if it reports nothing that we know."""
    for lines in _blocks(text):
        head, body = lines[0], "\n".join(lines)
        place = _PLACE.search(body)
        line = int(place.group(1)) if place else None
        if (match := _ACCESS.search(head)) is not None:
            kind = "misaligned" if "misaligned" in body else "out_of_bounds"
            what = f"invalid {match.group(2)} of {match.group(3)} bytes of {match.group(1)} memory"
            found = Fault(kind=kind, access=match.group(2), bytes=int(match.group(3)), line=line, detail=what)
        elif (match := _UNINITIALISED.search(head)) is not None:
            what = f"read of {match.group(2)} bytes that nothing had written"
            found = Fault(kind="uninitialised", access="read", bytes=int(match.group(2)), line=line, detail=what)
        elif _RACE.search(head):
            found = _race(lines)
        elif tool == "synccheck" and _BARRIER.search(head):
            found = Fault(kind="barrier_divergence", line=line, detail=head.rstrip("."))
        else:
            continue
        return _told(tool, found, _THREAD.search(body))
    return None


def _told(tool: Tool, fault: Fault, where: re.Match[str] | None) -> Fault:
    """A finding with its tool, line and thread named."""
    text = f"{tool}: {fault.detail}" + ("" if fault.line is None else f", line {fault.line}")
    if fault.other is not None and fault.other.line is not None:
        text += f" and line {fault.other.line}"
    if where is None:
        return dataclasses.replace(fault, detail=text)
    x, y, z, bx, by, bz = (int(number) for number in where.groups())
    return dataclasses.replace(fault, detail=text, thread=(x, y, z), block=(bx, by, bz))


def _race(lines: Sequence[str]) -> Fault:
    parties = [match for text in lines for match in [_PARTY.search(text)] if match is not None]
    numbers = [int(match.group(5)) for match in parties]
    return Fault(
        kind="race",
        access=next((match.group(1).lower() for match in parties if match.group(1)), None),
        line=numbers[0] if numbers else None,
        other=OtherParty(block=(0, 0, 0), thread=(0, 0, 0), line=numbers[1]) if len(numbers) > 1 else None,
        detail="two threads use the same shared memory without a barrier between",
    )


def _blocks(text: str) -> list[list[str]]:
    """The tool's own lines, one list for each finding; a finding starts where the indentation ends."""
    blocks: list[list[str]] = []
    for raw in text.splitlines():
        match = re.match(r"=========\s?(.*)", raw)
        if match is None or not match.group(1).strip():
            continue
        content = match.group(1)
        if content[:1].isspace() and blocks:
            blocks[-1].append(content.strip())
        else:
            blocks.append([content.strip()])
    return blocks


def _gist(text: str) -> str:
    """The most telling lines of an output, without host paths."""
    lines = [line.removeprefix("=========").strip() for line in text.splitlines()]
    told = [line for line in lines if re.search(r"error|fail|denied|cannot|not ", line, re.IGNORECASE)]
    return re.sub(r"(?<!\w)/[\w./-]+", "...", " / ".join((told or lines or ["no output"])[-3:]))[:300]


def sanitizer_items(
    kernel: Kernel, problem: Problem, build: Build, limits: DeviceInfo, *, rng: random.Random
) -> list[JobItem]:
    """The caller's cases and hidden ones of a problem, one run each, as a job for `sanitize`."""
    items: list[JobItem] = []
    for case in (*visible_cases(problem, rng, reduced=False), *hidden_cases(problem, rng, reduced=False)):
        if cost(problem, case.workload) > MOST_COST and items:
            continue
        plan = resolve_plan(kernel, build, problem, case.workload, limits)
        contents = draw(problem, case.workload, seed=case.seed)
        for name, planned in plan.arrays.items():
            if planned.zero:
                contents[name] = np.zeros(planned.shape, dtype=storage_dtype(planned.dtype))
        sizes = " ".join(f"{axis}={size}" for axis, size in case.workload.axes.items())
        items.append(JobItem(name=f"{problem.name} {sizes}", build=build, plan=plan, contents=contents))
    return items
