"""Who may use a GPU now: one timing at a time on each, across processes, by locks that the kernel releases.

Timings and profiles hold a GPU alone; runs of a verification share it. Who wants to be alone closes a turnstile, so
that no new sharers come while he waits for those that are inside. Whoever works for a person announces that in a third
file, and searches stand back while anyone does. A process that dies leaves nothing locked, since a flock ends with the
descriptors it was taken through. Builds and the embedded device ask for no lease.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from optiml.errors import Busy, SetupError

Priority = Literal["interactive", "search"]
POLL_S = 0.002
LATER_POLL_S = 0.02  # after the first tenth of a second
FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # not TMPDIR: processes with one of their own must meet as well
MODE = 0o666  # shared by all users of the machine


class Lease:
    """The lease of one GPU. Safe to use from several threads and processes.

    Args:
        name: of the GPU, the same in every process (its PCI address).
        folder: where the lock files lie; by default the first of the machine's own temporary folders that is there.
    """

    def __init__(
        self,
        name: str,
        *,
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        base = common_folder() if folder is None else folder
        safe = re.sub(r"[^\w.-]", "_", name)
        self._name = name
        self._lock = base / f"optiml-gpu-{safe}.lock"
        self._turnstile = base / f"optiml-gpu-{safe}.turnstile"
        self._announced = base / f"optiml-gpu-{safe}.interactive"
        self._clock = clock
        self._sleep = sleep

    @contextlib.contextmanager
    def held(self, *, alone: bool, priority: Priority = "interactive", patience_s: float) -> Iterator[float]:
        """Hold the GPU inside the block; gives the seconds waited.

        Args:
            alone: for timings and profiles; otherwise shared with others that do not ask to be alone.
            patience_s: how long to wait at most.

        Raises:
            Busy: others held it all that time.
        """
        started = self._clock()
        with contextlib.ExitStack() as opened:
            lock, turnstile, announced = (
                _opened(path, opened) for path in (self._lock, self._turnstile, self._announced)
            )
            mode = fcntl.LOCK_EX if alone else fcntl.LOCK_SH

            def wait(descriptor: int, mode: int, may: Callable[[], bool] = lambda: True) -> None:
                self._wait(descriptor, mode, started, patience_s, may)

            if priority == "interactive":
                wait(announced, fcntl.LOCK_SH)
                wait(turnstile, mode)
            else:
                wait(turnstile, mode, lambda: _nobody_holds(announced))
            wait(lock, mode)
            for descriptor in (turnstile, announced):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            yield self._clock() - started

    def _wait(self, descriptor: int, mode: int, started: float, patience_s: float, may: Callable[[], bool]) -> None:
        while True:
            if may():
                try:
                    fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
                    return
                except BlockingIOError:
                    pass
            waited = self._clock() - started
            if waited >= patience_s:
                raise Busy(
                    f"GPU {self._name} was in use by other work for {patience_s:g} s: try again in about "
                    f"{max(5, round(patience_s))} s, or use another device (cuda:N, emulator)"
                )
            self._sleep(POLL_S if waited < 0.1 else LATER_POLL_S)


def common_folder() -> Path:
    """The folder in which every process of this machine looks for the locks.

    Raises:
        SetupError: there is none that may be written.
    """
    for name in FOLDERS:
        if os.access(name, os.W_OK | os.X_OK):
            return Path(name)
    raise SetupError(f"none of {', '.join(FOLDERS)} can be written, where a GPU's locks lie", code="no_device")


def _opened(path: Path, opened: contextlib.ExitStack) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)  # another user's file cannot be created
    except FileNotFoundError:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, MODE)
        with contextlib.suppress(PermissionError):
            os.fchmod(descriptor, MODE)
    opened.callback(os.close, descriptor)
    return descriptor


def _nobody_holds(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True
