"""Worker threads that belong to the server and not to a request; what a call raised is kept as data."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Background:
    """A pool of threads next to the running event loop."""

    def __init__(self, *, threads: int, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name)

    def submit(self, call: Callable[[], T], *, on_done: Callable[[], None]) -> Future[T]:
        """Run `call` in a thread; `on_done` runs in the event loop once the future holds its outcome."""
        future = self._pool.submit(call)
        future.add_done_callback(lambda _: self.tell(on_done))
        return future

    def tell(self, function: Callable[[], None]) -> None:
        """From a worker thread: have the event loop run `function` soon."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server is going down and nobody listens
            self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Drop what has not begun; what runs is not waited for (its children die with the workbench)."""
        self._pool.shutdown(wait=False, cancel_futures=True)
