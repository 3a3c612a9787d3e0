"""Niceness that counts, between sessions too.

Where the kernel groups processes by session (autogroup, the default of most systems), niceness only weighs the
processes of one session against each other, and every child of ours has a session of its own: each of them would get
as much of a busy machine as the whole session of whoever waits for an answer. So the group is told the same number.
"""

from __future__ import annotations

import contextlib
import os
import time

_GROUP = "/proc/self/autogroup"
_TRIES, _AGAIN_S = 4, 0.05  # an ordinary user may set the niceness of a group ten times a second, whoever else does it


def be_nice(at_least: int) -> int:
    """Make this process and its session at least so nice; for the first process of a session that is its own.

    Processes started from now on inherit the niceness, but a new session starts without any: it calls this again.

    Returns:
        The niceness that holds.
    """
    niceness = os.nice(max(0, at_least - os.nice(0)))
    if niceness > 0:
        _tell_group(niceness)
    return niceness


def _tell_group(niceness: int) -> None:
    for _ in range(_TRIES):
        with contextlib.suppress(BlockingIOError):
            with contextlib.suppress(FileNotFoundError, PermissionError), open(_GROUP, "w", encoding="ascii") as group:
                group.write(str(niceness))
            return
        time.sleep(_AGAIN_S)
