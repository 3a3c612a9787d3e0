"""Jobs of `cuda_job` inside a program that wraps a process, as compute-sanitizer does."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from optiml import process, sandbox
from optiml.device.cuda import gpu_environment
from optiml.device.cuda_job import JobItem, write_job
from optiml.process import Finished
from optiml.sandbox import Policy

OUTPUT_BYTES = 16 << 20


@contextmanager
def job_folder(items: Sequence[JobItem], *, gpu: int) -> Iterator[Path]:
    """A temporary folder with the job of `items` in it, for as many wrapping programs as are wanted.

    Args:
        gpu: index of the GPU.
    """
    with tempfile.TemporaryDirectory(prefix="optiml-job-") as made:
        folder = Path(made)
        write_job(folder, items, device=gpu)
        yield folder


def run_wrapped(
    wrapper: Sequence[str],
    folder: Path,
    *,
    timeout_s: float,
    cancelled: threading.Event | None = None,
    enough: Callable[[bytes], bool] | None = None,
) -> Finished:
    """Run `wrapper ... python -m optiml.device.cuda_job FOLDER` and wait for it.

    No sandbox is around it: the tools instrument another process, and the only foreign code runs on the GPU.

    Args:
        wrapper: the full path of the program and its options.
        folder: with a job in it; only read.
        enough: as `process.run` has it.

    Raises:
        WorkerTimeout: it outlived `timeout_s`; no process of it remains.
        ToolFailed: it could not be started.
    """
    environment = gpu_environment()
    root = str(Path(sandbox.__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join([root, *sandbox.package_folders()])
    return process.run(
        [*wrapper, sys.executable, "-m", "optiml.device.cuda_job", str(folder)],
        policy=Policy(trusted=True, gpu=True, processes=True, scratch=str(folder)),
        timeout_s=timeout_s,
        output_cap_bytes=OUTPUT_BYTES,
        environment=environment,
        cancelled=cancelled,
        enough=enough,
    )
