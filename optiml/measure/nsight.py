"""Nsight Compute: the command line made from the metric table, its CSV read by column name, its failures by cause.

No time is ever taken from it: it serialises launches, replays each once per pass and flushes caches in between.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from optiml import sandbox
from optiml.device.cuda_job import JobItem, write_job
from optiml.errors import InvalidInput, OptimlError, SetupError, ToolFailed, WorkerTimeout
from optiml.measure.metrics import METRICS
from optiml.process import Finished, run
from optiml.sandbox import Policy
from optiml.scratch import ScratchFolders, remove_folder

OLDEST = (2021, 1)  # the first with every option that is used here
PLACES = ("/opt/nvidia/nsight-compute/*", "/usr/local/cuda*/bin", "/usr/local/NVIDIA-Nsight-Compute*")
VERSION_TIMEOUT_S = 30.0
START_S = 30.0  # of a profiled process, the CUDA context and the profiler's own start among it
EACH_S = 20.0  # for each launch with all its passes
OUTPUT_BYTES = 1 << 20
LOG_BYTES = 64 << 20
PASSED_ON = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
REMEDY = (
    "ask the administrator for `options nvidia NVreg_RestrictProfilingToAdminUsers=0` in /etc/modprobe.d/ and a reload "
    "of the driver, or run with CAP_SYS_ADMIN (in a container: --cap-add=SYS_ADMIN)"
)
INSTALL = (
    "install Nsight Compute (it comes with the CUDA toolkit), or put the folder of its program `ncu` on PATH or in "
    "CUDA_HOME"
)
METRIC_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.]{2,150}")
_folders = ScratchFolders()


@dataclass(frozen=True, kw_only=True)
class Ncu:
    """The profiler's program and its version, such as `2025.3.1`."""

    path: str
    version: str


@dataclass(frozen=True, kw_only=True)
class ProfiledLaunch:
    """One launch as Nsight Compute saw it. What it could not give is None; base units."""

    kernel: str
    metrics: Mapping[str, float | None]


# --- finding it ------------------------------------------------------------------------------------------------------
def find_ncu(environment: Mapping[str, str] | None = None, *, root: Path = Path("/")) -> str | None:
    """Path of `ncu`: on PATH, in CUDA_HOME or CUDA_PATH, or where its installers put it; the newest of several."""
    environment = os.environ if environment is None else environment
    found = shutil.which("ncu", path=environment.get("PATH", ""))
    if found is not None:
        return found
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if environment.get(name):
            found = shutil.which("ncu", path=os.path.join(environment[name], "bin"))
            if found is not None:
                return found
    for pattern in PLACES:
        for folder in sorted(root.glob(pattern.lstrip("/")), key=_version_in, reverse=True):
            found = shutil.which("ncu", path=str(folder))
            if found is not None:
                return found
    return None


def _version_in(folder: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", str(folder)))


def open_ncu(environment: Mapping[str, str] | None = None) -> Ncu:
    """The profiler of this machine, asked for its version.

    Raises:
        SetupError: code `no_profiler`: there is none, it does not start, or it is too old.
    """
    path = find_ncu(environment)
    if path is None:
        raise SetupError(f"Nsight Compute (ncu) was not found: {INSTALL}", code="no_profiler")
    try:
        said = run([path, "--version"], policy=_policy(), timeout_s=VERSION_TIMEOUT_S)
    except (ToolFailed, WorkerTimeout) as error:
        raise SetupError(f"Nsight Compute does not start ({error}): {INSTALL}", code="no_profiler") from error
    match = re.search(rb"Version (\d+)\.(\d+)(?:\.(\d+))?", said.stdout)
    if match is None:
        raise SetupError(f"ncu does not tell its version: {INSTALL}", code="no_profiler")
    version = b".".join(part for part in match.groups() if part is not None).decode()
    if (int(match.group(1)), int(match.group(2))) < OLDEST:
        raise SetupError(
            f"Nsight Compute {version} is too old, {OLDEST[0]}.{OLDEST[1]} or newer is needed: {INSTALL}",
            code="no_profiler",
        )
    return Ncu(path=path, version=version)


# --- running it ------------------------------------------------------------------------------------------------------
def metric_names(wanted: Sequence[str] | None = None) -> tuple[str, ...]:
    """What to ask Nsight Compute for: the metric table, or a caller's names.

    Raises:
        InvalidInput: a name that cannot be one.
    """
    names = tuple(METRICS) if wanted is None else tuple(wanted)
    for name in names:
        if METRIC_NAME.fullmatch(name) is None:
            raise InvalidInput(f"{name[:60]!r} is no name of a metric")
    return names


def command_line(
    ncu: Ncu,
    program: Sequence[str],
    *,
    metrics: Sequence[str],
    log: Path,
    report: Path | None,
    options: Sequence[str] = (),
) -> list[str]:
    """The whole command; clocks are left as they are, values come in base units, rows into `log`.

    Args:
        report: also write a report with source counters there.
    """
    return [
        *(ncu.path, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"),
        *("--print-kernel-base", "mangled", "--log-file", str(log)),
        *(() if report is None else ("--section", "SourceCounters", "--import-source", "yes", "-f", "-o", str(report))),
        *(("--metrics", ",".join(metrics)) if metrics else ()),
        *options,
        *program,
    ]


def profile_job(
    ncu: Ncu,
    items: Sequence[JobItem],
    *,
    metrics: Sequence[str],
    device: int = 0,
    report: Path | None = None,
    timeout_s: float | None = None,
) -> tuple[tuple[ProfiledLaunch, ...], ...]:
    """Run all items in one profiled process; for each item its launches in order.

    Args:
        metrics: names to collect.
        device: index among the GPUs that CUDA shows.
        report: also leave an .ncu-rep file there (a path without its suffix).
        timeout_s: for the whole process; by default what so many launches may take.

    Raises:
        SetupError: `profiler_forbidden` or `no_profiler`, with what to do about it.
        WorkerTimeout: a kernel hangs when it is profiled; the process group is dead.
        ToolFailed: the profiler or the process broke off, or a launch is missing from what it says.
    """
    launches = [step.symbol for item in items for _ in range(item.runs) for step in item.plan.launches]
    limit_s = START_S + EACH_S * len(launches) if timeout_s is None else timeout_s
    folder = Path(_folders.new())
    try:
        write_job(folder, items, device=device)
        log = folder / "ncu.csv"
        program = [sys.executable, "-c", _JOB, str(math.ceil(limit_s) + 1), str(folder)]
        argv = command_line(ncu, program, metrics=metrics, log=log, report=report)
        ended = _run(argv, folder, timeout_s=limit_s)
        seen = _rows(ended, log)
    finally:
        remove_folder(str(folder))
    if [item.kernel for item in seen] != launches:
        raise ToolFailed(
            f"Nsight Compute profiled {len(seen)} of {len(launches)} launches"
            + (
                f"; the first that differs: {_first_difference([item.kernel for item in seen], launches)}"
                if seen
                else ""
            )
        )
    taken = iter(seen)
    return tuple(
        tuple(next(taken) for _ in range(item.runs * len(item.plan.launches))) for item in items
    )  # fmt: skip


def profile_each(
    ncu: Ncu, items: Sequence[JobItem], *, metrics: Sequence[str], device: int = 0
) -> tuple[tuple[ProfiledLaunch, ...] | OptimlError, ...]:
    """`profile_job` in as few processes as it takes: where one breaks off, its halves are tried again.

    An item that fails by itself has its error in the answer. What concerns the whole machine is raised.

    Raises:
        SetupError: as `profile_job`.
    """
    try:
        return profile_job(ncu, items, metrics=metrics, device=device)
    except (ToolFailed, WorkerTimeout) as error:
        if len(items) == 1:
            return (error,)
        half = len(items) // 2
        return (
            *profile_each(ncu, items[:half], metrics=metrics, device=device),
            *profile_each(ncu, items[half:], metrics=metrics, device=device),
        )


def profile_command(
    ncu: Ncu,
    command: Sequence[str],
    *,
    metrics: Sequence[str],
    report: Path,
    kernel_regex: str | None = None,
    launch_skip: int | None = None,
    launch_count: int | None = None,
    timeout_s: float,
) -> None:
    """Profile somebody's program and leave the report at `report`.

    It runs in the working folder of this process, with its environment and all its rights; what it prints is dropped.

    Raises:
        InvalidInput: the command is empty.
        SetupError, WorkerTimeout, ToolFailed: as `profile_job`.
    """
    if not command or not command[0]:
        raise InvalidInput("command is empty: give a program and its arguments")
    options = [
        *(() if kernel_regex is None else ("--kernel-name", f"regex:{kernel_regex}")),
        *(() if launch_skip is None else ("--launch-skip", str(launch_skip))),
        *(() if launch_count is None else ("--launch-count", str(launch_count))),
    ]
    folder = Path(_folders.new())
    try:
        log = folder / "ncu.csv"
        argv = command_line(ncu, command, metrics=metrics, log=log, report=report, options=options)
        own = {"TMPDIR": tempfile.gettempdir(), **os.environ}
        ended = _run(argv, Path.cwd(), timeout_s=timeout_s, environment=own)
        _rows(ended, log)
    finally:
        remove_folder(str(folder))


# The process to profile ends itself: a profiler that is killed may leave it in a group of its own.
_JOB = (
    "import runpy, signal, sys; signal.alarm(int(sys.argv.pop(1))); "
    "runpy.run_module('optiml.device.cuda_job', run_name='__main__')"
)


def _policy(scratch: Path | None = None) -> Policy:
    """The profiler traces what it starts and needs the counters' rights, so nothing is taken from it."""
    return Policy(
        trusted=True, gpu=True, processes=True, network=True, scratch=None if scratch is None else str(scratch),
    )  # fmt: skip


def _run(
    argv: Sequence[str], folder: Path, *, timeout_s: float, environment: Mapping[str, str] | None = None
) -> Finished:  # fmt: skip
    given = _environment() if environment is None else environment
    try:
        return run(argv, policy=_policy(folder), timeout_s=timeout_s, output_cap_bytes=OUTPUT_BYTES, environment=given)
    except WorkerTimeout as error:
        raise WorkerTimeout(
            f"profiling did not end within {timeout_s:g} s and was stopped: a kernel that waits for another one cannot "
            "be profiled, because launches run one at a time"
        ) from error


def _environment() -> dict[str, str]:
    """What our own process needs under the profiler: where modules and the driver are, and which GPUs to see."""
    root = str(Path(sandbox.__file__).resolve().parent.parent)
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    if "LD_LIBRARY_PATH" in os.environ:
        passed["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    return {**passed, "PYTHONPATH": os.pathsep.join([root, *sandbox.package_folders()])}


# --- what it says ----------------------------------------------------------------------------------------------------
_CAUSES: tuple[tuple[str, str, str], ...] = (  # text of the profiler, code, what to do
    (r"ERR_NVGPUCTRPERM", "profiler_forbidden", f"this user may not read the GPU's counters: {REMEDY}"),
    (r"unrecogni[sz]ed option", "no_profiler", f"this Nsight Compute lacks an option that is needed: {INSTALL}"),
    (
        r"not supported on (?:this )?device|[Uu]nsupported GPU|does not support (?:this|the) (?:GPU|device)",
        "no_profiler",
        f"this Nsight Compute does not know this GPU: {INSTALL}",
    ),
    (
        r"LibraryNotLoaded|[Ff]ailed to initialize the profiler|driver (?:version )?(?:is )?(?:not supported|too old|"
        r"incompatible)|[Cc]uda driver is not compatible",
        "no_profiler",
        "Nsight Compute and the driver do not fit together (some virtual machines and containers offer no counters)",
    ),
    (r"InterprocessLock", "no_profiler", "another user's profiler left its lock in the temporary folder: remove it"),
)


def _rows(ended: Finished, log: Path) -> tuple[ProfiledLaunch, ...]:
    """The profiled launches, or the error that explains why there are none."""
    written = log.read_bytes()[:LOG_BYTES].decode("utf-8", "replace") if log.exists() else ""
    told = "\n".join(
        [line for line in written.splitlines() if not line.startswith(('"', "ID"))]
        + [ended.stdout.decode("utf-8", "replace"), ended.stderr.decode("utf-8", "replace")]
    )
    for pattern, code, remedy in _CAUSES:
        if re.search(pattern, told):
            raise SetupError(remedy, code=code)
    failed = re.search(r"(?m)^failed (\d+) (.*)$", told)  # said by our own process
    if failed is not None:
        raise ToolFailed(f"the kernel did not run under the profiler: {failed.group(2)[:300]}")
    if re.search(r"No kernels were profiled", told):
        names = re.findall(r"(?m)^\s*\d+\. (.+)$", told)
        listed = f"; the program launches {', '.join(names[:10])}" if names else ""
        raise ToolFailed(f"Nsight Compute profiled no kernel{listed}: check the kernel filter and the command")
    errors = re.findall(r"(?m)^==ERROR== (.*)$", told)
    if ended.exit_code != 0 or errors:
        raise ToolFailed(f"Nsight Compute failed: {_without_paths(errors[0] if errors else f'exit {ended.exit_code}')}")
    rows = read_csv(written)
    if not rows:
        raise ToolFailed("Nsight Compute wrote no table")
    return rows


def _without_paths(text: str) -> str:
    return re.sub(r"(?<![\w<])/[^\s'\"]+", "…", text)[:300]


def _first_difference(seen: Sequence[str], wanted: Sequence[str]) -> str:
    for left, right in zip(seen, wanted, strict=False):
        if left != right:
            return f"{left[:80]} where {right[:80]} was launched"
    return f"launch {min(len(seen), len(wanted))} is missing or one too many"


def read_csv(text: str) -> tuple[ProfiledLaunch, ...]:
    """Every launch of a raw page in CSV, with all its numeric columns in base units.

    Columns are found by name and values scaled by the row of units. Numbers may be written in any locale: which sign
    parts thousands is read off the whole page. Words, `nan`, `n/a` and empty cells are None.

    Raises:
        ToolFailed: there is a table, but not one that a raw page has.
    """
    lines = [line for line in text.lstrip("\ufeff").splitlines() if not line.startswith("==")]
    start = next((index for index, line in enumerate(lines) if line.lstrip().startswith(('"ID"', "ID,", "ID;"))), None)
    if start is None:
        return ()
    delimiter = ";" if re.match(r'"?ID"?;', lines[start].lstrip()) else ","
    table = [row for row in csv.reader(io.StringIO("\n".join(lines[start:])), delimiter=delimiter) if row]
    names = table[0]
    if "Kernel Name" not in names:
        raise ToolFailed("a table of Nsight Compute has no column `Kernel Name`")
    kernel = names.index("Kernel Name")
    body = table[1:]
    units = [""] * len(names)
    if body and len(body[0]) == len(names) and not body[0][0].strip():
        units, body = body[0], body[1:]
    body = [row for row in body if len(row) == len(names)]
    numbers = _Numbers.of(cell for row in body for cell, name in zip(row, names, strict=True) if "__" in name)
    scales = [unit_scale(unit) for unit in units]
    return tuple(
        ProfiledLaunch(
            kernel=row[kernel],
            metrics={
                name: _scaled(numbers.value(cell), scale)
                for name, cell, scale in zip(names, row, scales, strict=True)
                if "__" in name
            },
        )
        for row in body
    )


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


@dataclass(frozen=True, kw_only=True)
class _Numbers:
    """How a page writes its numbers."""

    decimal: str

    @classmethod
    def of(cls, cells: Iterator[str]) -> _Numbers:
        """Read off every cell that can tell; where none can, commas part thousands."""
        for cell in cells:
            text = _unspaced(cell)
            if not re.fullmatch(r"[-+]?[\d.,]+(?:[eE][-+]?\d+)?", text):
                continue
            signs = re.findall(r"[.,]", text)
            if len(set(signs)) == 2:
                return cls(decimal=signs[-1])
            if len(signs) > 1:
                return cls(decimal="," if signs[0] == "." else ".")
            if len(signs) == 1 and not re.fullmatch(r"[-+]?[1-9]\d{0,2}[.,]\d{3}", text):
                return cls(decimal=signs[0])
        return cls(decimal=".")

    def value(self, cell: str) -> float | None:
        text = _unspaced(cell)
        thousands = "," if self.decimal == "." else "."
        try:
            number = float(text.replace(thousands, "").replace(self.decimal, "."))
        except ValueError:
            return None
        return number if math.isfinite(number) else None


def _unspaced(cell: str) -> str:
    return re.sub(r"[\s\u00a0\u202f'\u2019]", "", cell)


_PREFIXES = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"s": 1.0, "second": 1.0, "sec": 1.0}


def unit_scale(unit: str) -> float:
    """Factor from a unit of Nsight Compute to its base: bytes, nanoseconds, hertz, plain counts.

    "Kbyte" is 1e3, "ms" and "msecond" 1e6, "Gbyte/s" 1e9 bytes per second, "%" and unknown units 1.
    """
    top, _, bottom = unit.strip().partition("/")
    seconds = _seconds(top)
    if seconds is not None and not bottom:
        return seconds * 1e9
    scale = seconds * 1e9 if seconds is not None else _count(top)
    below = _seconds(bottom)
    return scale / (below if below is not None else _count(bottom))


def _seconds(unit: str) -> float | None:
    if unit in _SECONDS:
        return _SECONDS[unit]
    if unit[:1] in ("n", "u", "m") and unit[1:] in _SECONDS:
        return _PREFIXES[unit[0]] * _SECONDS[unit[1:]]
    return None


def _count(unit: str) -> float:
    if unit[:1] in ("K", "M", "G", "T") and unit[1:2].islower():
        return _PREFIXES[unit[0]]
    return 1.0


# --- several launches ------------------------------------------------------------------------------------------------
def combined(
    launches: Sequence[tuple[float, ProfiledLaunch]], names: Sequence[str]
) -> dict[str, float | None]:  # fmt: skip
    """One value per name for several launches with weights: totals are added, rates averaged by the time that each
    launch took under the profiler, and the `launch__` figures are those of the longest.

    A metric that one launch lacks is None.
    """
    times = [weight * (launch.metrics.get("gpu__time_duration.sum") or 1.0) for weight, launch in launches]
    longest = max(range(len(launches)), key=lambda index: times[index]) if launches else 0
    values: dict[str, float | None] = {}
    for name in names:
        across = METRICS[name].across if name in METRICS else ("sum" if name.endswith(".sum") else "mean")
        cells = [launch.metrics.get(name) for _, launch in launches]
        present = [cell for cell in cells if cell is not None]
        if not present or len(present) < len(cells):
            values[name] = None
        elif across == "longest":
            values[name] = cells[longest]
        elif across == "sum":
            values[name] = sum(weight * cell for (weight, _), cell in zip(launches, present, strict=True))
        else:
            values[name] = sum(time * cell for time, cell in zip(times, present, strict=True)) / sum(times)
    return values
