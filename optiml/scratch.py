"""Private folders for children, removed with them or, after a hard kill of ours, by the next process of this user."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
import weakref

from optiml.errors import SetupError

if sys.platform != "win32":
    import fcntl

PREFIX = "optiml-scratch-"
_LOCK_NAME = "lock"
_YOUNG_S = 600.0  # a folder this fresh may be about to get its lock


class ScratchFolders:
    """One folder in the temporary folder that holds the scratch folders of all children of this process.

    A lock in it lives as long as this process; a folder whose lock is free was left by a dead one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._folder = ""

    def new(self) -> str:
        """A fresh private folder.

        Raises:
            SetupError: no temporary folder can be written.
        """
        try:
            with self._lock:
                if self._owner != os.getpid() or not os.path.isdir(self._folder):
                    self._open()
            return tempfile.mkdtemp(dir=self._folder)
        except OSError as error:
            raise SetupError(
                f"no temporary folder can be written ({error.strerror}): set TMPDIR to one", code="no_sandbox"
            ) from error

    def _open(self) -> None:
        _sweep()
        self._folder = tempfile.mkdtemp(prefix=PREFIX)
        os.chmod(self._folder, 0o711)  # children of another uid pass through to their own
        if sys.platform != "win32":
            descriptor = os.open(os.path.join(self._folder, _LOCK_NAME), os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # open, and so locked, until this process ends
        self._owner = os.getpid()
        weakref.finalize(self, _remove_own_folder, self._folder, self._owner)


def remove_folder(folder: str) -> None:
    """Remove a folder that may hold anything; what cannot be removed is left for the next sweep."""
    shutil.rmtree(folder, ignore_errors=True)
    if not os.path.isdir(folder):
        return
    with contextlib.suppress(OSError):  # a child may have taken away its own access, and so ours
        os.chmod(folder, 0o700)
        for parent, names, _ in os.walk(folder):
            for path in (os.path.join(parent, name) for name in names):
                if not os.path.islink(path):
                    os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_own_folder(folder: str, owner: int) -> None:
    if os.getpid() == owner:
        remove_folder(folder)


def _sweep() -> None:
    """Remove the folders of dead processes of this user."""
    if sys.platform == "win32":
        return
    for entry in os.scandir(tempfile.gettempdir()):
        if not entry.name.startswith(PREFIX):
            continue
        with contextlib.suppress(OSError):  # someone else sweeps too
            about = entry.stat(follow_symlinks=False)
            is_ours = entry.is_dir(follow_symlinks=False) and about.st_uid == os.geteuid()
            if is_ours and _is_abandoned(entry.path, about.st_mtime):
                remove_folder(entry.path)


def _is_abandoned(folder: str, modified_s: float) -> bool:
    try:
        descriptor = os.open(os.path.join(folder, _LOCK_NAME), os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return time.time() - modified_s > _YOUNG_S
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
