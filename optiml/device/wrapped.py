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
from optiml.toolchain.tools import library_folders

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
    """Run `wrapper ... python -m optiml.device.cuda_job FOLDER` in the sandbox and wait for it.

    Args:
        wrapper: the full path of the program and its options; `{folder}` in one of them stands for the job's folder,
            which is the one place where it may write.
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
    for path in (folder, *folder.iterdir()):  # the job may run as another user, who must read them
        path.chmod(0o755 if path.is_dir() else 0o644)
    program = Path(wrapper[0])
    root = str(Path(sandbox.__file__).resolve().parent.parent)
    packages = sandbox.package_folders()
    environment = gpu_environment()
    environment["PYTHONPATH"] = os.pathsep.join([root, *packages])
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    # Not through a link in a virtual environment: the tools ask access(2), which a private folder on the way refuses.
    return process.run(
        [*(item.replace("{folder}", str(folder)) for item in wrapper), os.path.realpath(sys.executable), "-m",
         "optiml.device.cuda_job", str(folder)],
        policy=Policy(
            gpu=True,
            processes=True,
            scratch=str(folder),
            readable=(root, *sandbox.interpreter_paths(), *packages, *library_folders(), *_tool_folders(program)),
            file_size_bytes=4 << 30,
        ),
        timeout_s=timeout_s,
        output_cap_bytes=OUTPUT_BYTES,
        environment=environment,
        cancelled=cancelled,
    )  # fmt: skip


def _tool_folders(program: Path) -> list[str]:
    """The toolkit around a program, through the symbolic links on the way to it."""
    return [str(path.parents[1]) for path in (program, program.resolve()) if len(path.parents) > 2]
