"""The cores of this machine, shared by every process that runs kernels in the PTX engine.

A server verifies in several processes at once, and a search keeps one core busy by itself, so a launch takes the cores
that are free at the moment: all of them when it is alone, one when there is company. Results do not depend on it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from optiml.ptx import available_cores

NAME = "\0optiml-core-{}"  # a Unix socket without a file: its holder's end frees it, however that comes about


@contextlib.contextmanager
def cores_taken(most: int, *, name: str = NAME) -> Iterator[int]:
    """Take up to `most` cores that nobody has taken, and give their number; it is never less than one."""
    with contextlib.ExitStack() as held:
        taken = 0
        for core in range(available_cores()):
            if taken == most:
                break
            claim = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            with contextlib.suppress(OSError):
                claim.bind(name.format(core))
                taken += 1
        yield max(1, taken)
