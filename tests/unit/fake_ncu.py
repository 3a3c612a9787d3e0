"""A program `ncu` that replays what Nsight Compute 2025.3.1 said on an H200, in every way it may end."""

from __future__ import annotations

import sys
from pathlib import Path

DATA = Path(__file__).parent / "data" / "ncu"
VERSION = """\
NVIDIA (R) Nsight Compute Command Line Profiler
Copyright (c) 2018-2025 NVIDIA Corporation
Version 2025.3.1.0 (build 36398880) (public-release)
"""
CONNECTED = "==PROF== Connected to process 735 (/opt/app/rec)\n==PROF== Disconnected from process 735\n"
FORBIDDEN = CONNECTED + (
    "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the "
    "target device 0. For instructions on enabling permissions and to get more information see "
    "https://developer.nvidia.com/ERR_NVGPUCTRPERM\n"
)
NO_KERNELS = CONNECTED + (
    "==WARNING== No kernels were profiled.\nAvailable Kernels:\n1. relu\n2. total\n3. transpose_naive\n"
)
UNKNOWN_OPTION = "==ERROR== unrecognised option '--print-kernel-base'. Use --help for further details.\n"
NOT_LOADED = "==ERROR== Failed to initialize the profiler: LibraryNotLoaded\n"
FAILED = "==ERROR== The application returned an error code (1).\n"

SCRIPT = """\
#!{python} -S
import os, sys, time
args = sys.argv[1:]
if args == ["--version"]:
    sys.stdout.write({version!r})
    sys.exit(0)
with open({calls!r}, "a") as calls:
    calls.write("\\x00".join(args) + "\\n")
with open({where!r}, "w") as where:
    where.write(os.getcwd())
if {hang!r}:
    time.sleep(600)
sys.stdout.write({stdout!r})
with open(args[args.index("--log-file") + 1], "w") as log:
    log.write(open({table!r}).read() if {table!r} else {log!r})
sys.exit({status!r})
"""


def fake_ncu(
    folder: Path,
    *,
    table: Path | None = None,
    log: str = "",
    stdout: str = "",
    status: int = 0,
    hang: bool = False,
    version: str = VERSION,
) -> Path:
    """Write the program into `folder`; it appends its arguments to `folder/calls`, parted by NUL, and
    leaves its working folder in `folder/where`."""
    path = folder / "ncu"
    path.write_text(
        SCRIPT.format(
            python=sys.executable,
            version=version,
            calls=str(folder / "calls"),
            where=str(folder / "where"),
            hang=hang,
            stdout=stdout,
            table=None if table is None else str(table),
            log=log,
            status=status,
        )
    )
    path.chmod(0o755)
    return path


def calls_of(folder: Path) -> list[list[str]]:
    """Arguments of every call but those for the version."""
    return [line.split("\0") for line in (folder / "calls").read_text().splitlines()]
