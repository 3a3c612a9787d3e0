"""A folder of kernels to run once, for programs that wrap a process: compute-sanitizer and ncu.

    python -m optiml.device.cuda_job FOLDER

FOLDER holds `job.json` and the files that it names:

    {"device": 0,
     "items": [{"name": "...",                    free text, printed as a line `item 0 NAME` before the item runs
                "cubin": "0.cubin",
                "arrays": [{"name": "x", "nbytes": 1024, "content": "0-0.bin"}, ...],
                "steps": [{"kind": "launch", "symbol", "grid", ...}, ...],   as `optiml.device.wire.wire_steps` writes
                "runs": 1}]}

Items run in order; each loads its cubin, allocates every array by itself at its exact size, fills it from `content`
(repeated where the file is shorter; `null` leaves the memory as the driver gave it, so that initcheck sees reads of
it), and carries its steps out `runs` times, synchronising after each. Contents are written once per item, not per
run. Kernels launch in the order items × runs × steps, and no other kernel is launched.

Exit 0: all ran. Exit 3: a launch was refused or a kernel broke the context; `failed N REASON` says where, and the
items after it did not run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optiml.device.device import Array
from optiml.device.plan import Plan
from optiml.device.wire import wire_arrays, wire_steps
from optiml.errors import OptimlError
from optiml.problems.data import raw
from optiml.records import Build

JOB_NAME = "job.json"
FAILED = 3


@dataclass(frozen=True, kw_only=True)
class JobItem:
    """One kernel at one size. An array that `contents` lacks stays uninitialised."""

    name: str
    build: Build
    plan: Plan
    contents: Mapping[str, Array]
    runs: int = 1


def write_job(folder: Path, items: Sequence[JobItem], *, device: int = 0) -> None:
    """Write `job.json` and its files into an existing folder."""
    described = []
    for index, item in enumerate(items):
        cubin = f"{index}.cubin"
        (folder / cubin).write_bytes(item.build.cubin)
        arrays = wire_arrays(item.plan)
        for position, array in enumerate(arrays):
            array["content"] = None
            if array["name"] in item.contents:
                array["content"] = f"{index}-{position}.bin"
                (folder / array["content"]).write_bytes(raw(item.contents[array["name"]]))
        described.append(
            {"name": item.name, "cubin": cubin, "arrays": arrays, "steps": wire_steps(item.plan, item.build.ptx),
             "runs": item.runs}
        )  # fmt: skip
    (folder / JOB_NAME).write_text(json.dumps({"device": device, "items": described}), encoding="utf-8")


def carry_out(folder: Path) -> int:
    """Run the job of a folder in this process; returns the exit code."""
    from optiml.device import cuda_context  # imports pycuda, which only the process of a job may

    job = json.loads((folder / JOB_NAME).read_text(encoding="utf-8"))
    context = cuda_context.CudaContext(job["device"])
    for index, item in enumerate(job["items"]):
        _say(f"item {index} {item['name']}")
        try:
            context.run_plainly(item, folder)
        except OptimlError as error:
            _say(f"failed {index} {error}")
            os._exit(FAILED)  # a broken context cannot be left in an orderly way
    context.close()
    return 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[Any] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    if len(given) != 1:
        sys.stderr.write("usage: python -m optiml.device.cuda_job FOLDER\n")
        return 2
    return carry_out(Path(given[0]))


if __name__ == "__main__":
    sys.exit(main())
