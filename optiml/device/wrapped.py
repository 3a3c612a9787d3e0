"""Jobs of `cuda_job` inside a program that wraps a process: compute-sanitizer, ncu."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from optiml import process, sandbox
from optiml.device.cuda import gpu_environment
from optiml.device.cuda_job import JobItem, write_job
from optiml.process import Finished
from optiml.sandbox import Policy

OUTPUT_BYTES = 16 << 20


def run_wrapped(
    wrapper: Sequence[str],
    items: Sequence[JobItem],
    *,
    gpu: int,
    timeout_s: float,
    keep: Path | None = None,
    cancelled: threading.Event | None = None,
) -> Finished:
    """Run `wrapper ... python -m optiml.device.cuda_job FOLDER` and wait for it.

    No sandbox is around it: the tools instrument another process, and the only foreign code runs on the GPU.

    Args:
        wrapper: the full path of the program and its options; `{folder}` in one of them stands for the job's folder,
            which is its working folder.
        gpu: index of the GPU.
        keep: an existing folder to use instead of a temporary one, whose files stay.

    Raises:
        WorkerTimeout: it outlived `timeout_s`; no process of it remains.
        ToolFailed: it could not be started.
    """
    if keep is not None:
        return _run(wrapper, items, keep, gpu, timeout_s, cancelled)
    with tempfile.TemporaryDirectory(prefix="optiml-job-") as made:
        return _run(wrapper, items, Path(made), gpu, timeout_s, cancelled)


def _run(
    wrapper: Sequence[str],
    items: Sequence[JobItem],
    folder: Path,
    gpu: int,
    timeout_s: float,
    cancelled: threading.Event | None,
) -> Finished:
    write_job(folder, items, device=gpu)
    environment = gpu_environment()
    root = str(Path(sandbox.__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join([root, *sandbox.package_folders()])
    return process.run(
        [*(item.replace("{folder}", str(folder)) for item in wrapper), sys.executable, "-m", "optiml.device.cuda_job",
         str(folder)],
        policy=Policy(trusted=True, gpu=True, processes=True, scratch=str(folder)),
        timeout_s=timeout_s,
        output_cap_bytes=OUTPUT_BYTES,
        environment=environment,
        cancelled=cancelled,
    )  # fmt: skip
