"""Worker threads that belong to the server and not to a request; what a call raised is kept as data."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import TypeVar

from optiml.errors import WorkerDied

T = TypeVar("T")
CANCEL_LIMIT_S = 1.0


class Cancellation:
    """Lets one thread end what another one waits for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._ends: list[Callable[[], bool]] = []

    def cancel(self) -> None:
        """End what is being waited for, and whatever would be next."""
        with self._lock:
            self._cancelled = True
            ends = tuple(self._ends)
        deadline = time.monotonic() + CANCEL_LIMIT_S
        for end in ends:
            while not end() and self._awaits(end) and time.monotonic() < deadline:
                time.sleep(0.001)  # it is just about to begin: there is nothing to end yet

    def _awaits(self, end: Callable[[], bool]) -> bool:
        with self._lock:
            return end in self._ends

    @contextlib.contextmanager
    def ending(self, end: Callable[[], bool]) -> Iterator[None]:
        """While the block runs, `cancel` calls `end`, which says whether there was something to end.

        Raises:
            WorkerDied: it was cancelled before.
        """
        with self._lock:
            if self._cancelled:
                raise WorkerDied("the call was cancelled", cancelled=True)
            self._ends.append(end)
        try:
            yield
        finally:
            with self._lock:
                self._ends.remove(end)


_current: ContextVar[Cancellation | None] = ContextVar("cancellation", default=None)


def current_cancellation() -> Cancellation:
    """That of the call that this thread works for; one that nobody can use outside of such a call."""
    return _current.get() or Cancellation()


class Background:
    """A pool of threads next to the running event loop."""

    def __init__(self, *, threads: int, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name)

    def submit(
        self, call: Callable[[], T], *, on_done: Callable[[], None], cancellation: Cancellation | None = None
    ) -> Future[T]:
        """Run `call` in a thread; `on_done` runs in the event loop once the future holds its outcome."""

        def work() -> T:
            _current.set(cancellation)
            return call()

        future = self._pool.submit(work)
        future.add_done_callback(lambda _: self.tell(on_done))
        return future

    def tell(self, function: Callable[[], None]) -> None:
        """From a worker thread: have the event loop run `function` soon."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server is going down and nobody listens
            self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Drop what has not begun; what runs is not waited for (its children die with the workbench)."""
        self._pool.shutdown(wait=False, cancel_futures=True)
