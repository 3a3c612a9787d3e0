"""Searches in the background of the server. The run folder on disk is the truth; this is only who drives it now."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from optiml.errors import Busy, OptimlError, WorkerDied
from optiml_mcp.background import Background, Cancellation
from optiml_mcp.jobs import PROGRESS_EVERY_S, Report

if TYPE_CHECKING:  # the workbench is imported when the first tool needs it: start-up stays fast
    from optiml.records import SearchResult
    from optiml.workbench import SearchProgress, Workbench

LOG = logging.getLogger(__name__)
TURN_S = 5.0  # that a search may work while others wait for a thread
ENDED_KEPT = 32  # searches that this server drove to their end
MOST_THREADS = 4  # each may have a host with children of its own
STOPPING_S = 0.5  # that a cancelled search gets to end its step, before its host is killed
MOST_DEATHS = 1  # of hosts, after which a search is resumed by itself
MOST_RUNS = 10  # searches that may run or queue in one server


@dataclass(kw_only=True)
class Run:
    """A search that this server drives, or drove."""

    run_id: str
    stop: bool = False
    begun: bool = False  # its turn has come
    yielded: bool = False  # its turn is over, and it goes on when the others had theirs
    ended: bool = False
    deaths: int = 0  # hosts that were lost in the middle of it
    cancellation: Cancellation = field(default_factory=Cancellation)
    progress: SearchProgress | None = None
    news: int = 0  # better kernels found, and the end: what a waiting caller wants to hear of
    told: int = 0  # how many of them an answer has told
    changed: anyio.Event = field(default_factory=anyio.Event)
    future: Future[SearchResult] = field(default_factory=Future)

    def announce(self) -> None:
        """Wake everyone who waits for news."""
        self.news += 1
        self.changed.set()
        self.changed = anyio.Event()

    def end(self) -> None:
        """The driver has returned, for whatever reason."""
        self.ended = True
        error = None if self.future.cancelled() or self.stop else self.future.exception()
        if error is not None and not (isinstance(error, OptimlError) and not isinstance(error, WorkerDied)):
            LOG.error("search %s ended by a defect", self.run_id, exc_info=error)
        self.announce()

    def returned(self) -> SearchResult | None:
        """What the driver returned, if it has."""
        if not self.ended or self.future.cancelled() or self.future.exception() is not None:
            return None
        return self.future.result()

    def error(self) -> str | None:
        """`code: sentence` of a search that could not go on."""
        error = self.future.exception() if self.ended and not self.future.cancelled() else None
        if error is None or self.stop:
            return None
        if isinstance(error, OptimlError) and not isinstance(error, WorkerDied):
            return f"{error.code}: {error}"
        return "internal: the search met a defect of ours: see the server's log, and report it"


class Runs:
    """The searches of one server, at most one driver per run. Where threads are short they take turns."""

    def __init__(self, bench: Callable[[], Workbench]) -> None:
        self._bench = bench
        self._runs: dict[str, Run] = {}
        self._threads = Background(threads=min(MOST_THREADS, max(1, (os.cpu_count() or 2) // 2)), name="search")

    def check_room(self) -> None:
        """Raise Busy when no further search may start."""
        active = sum(not run.ended for run in self._runs.values())
        if active >= MOST_RUNS:
            raise Busy(f"{active} searches are running: cancel one, or try again in a minute")

    def find(self, run_id: str) -> Run | None:
        """The run, if this server drives or drove it."""
        return self._runs.get(run_id)

    def drive(self, run_id: str) -> Run:
        """Run or resume a search in the background; one that is being driven is left alone.

        Raises:
            Busy: too many searches are running.
        """
        run = self._runs.get(run_id)
        if run is not None and not run.ended:
            return run
        self.check_room()
        for old in [known.run_id for known in self._runs.values() if known.ended][:-ENDED_KEPT]:
            del self._runs[old]  # its folder knows all but where the best kernel was written
        run = Run(run_id=run_id)
        self._runs[run_id] = run
        self._submit(run)
        return run

    def _submit(self, run: Run) -> None:
        """Queue a search for its turn; its journal keeps what it has done in between."""
        run.begun = run.yielded = False
        moved = False  # a turn takes at least one step, however long it took to load the search

        def on_progress(progress: SearchProgress) -> None:
            nonlocal moved
            moved = True
            better = run.progress is None or progress.best_kernel_id != run.progress.best_kernel_id
            run.progress = progress
            if better:
                self._threads.tell(run.announce)

        def work() -> SearchResult:
            run.begun, begun = True, time.monotonic()

            def should_stop() -> bool:
                run.yielded = moved and time.monotonic() - begun >= TURN_S and self._others_wait()
                return run.stop or run.yielded

            return self._bench().run_search(run.run_id, on_progress=on_progress, should_stop=should_stop)

        run.future = self._threads.submit(work, on_done=lambda: self._turn_over(run), cancellation=run.cancellation)

    def _others_wait(self) -> bool:
        return any(not run.begun and not run.ended for run in tuple(self._runs.values()))

    def _turn_over(self, run: Run) -> None:
        """Queue a search that gave way to another or lost its host; any other one has ended."""
        error = None if run.future.cancelled() else run.future.exception()
        went_well = not run.future.cancelled() and error is None
        if run.yielded and not run.stop and went_well and run.future.result().status == "running":
            self._submit(run)
        elif isinstance(error, WorkerDied) and not run.stop and run.deaths < MOST_DEATHS:
            run.deaths += 1
            LOG.warning("search %s lost its host and goes on from its journal", run.run_id)
            self._submit(run)
        else:
            run.end()

    async def stop(self, run: Run, *, seconds: float) -> None:
        """Ask a search to stop at its next step, kill what carries it out if that takes long, and wait for the end."""
        run.stop = True
        run.future.cancel()  # one that has not begun never will
        await self.wait_for_end(run, seconds=STOPPING_S)
        if not run.ended:
            run.cancellation.cancel()
        await self.wait_for_end(run, seconds=seconds)

    async def wait_for_end(self, run: Run, *, seconds: float) -> None:
        """Wait until the driver of a search has returned."""
        with anyio.move_on_after(seconds):
            while not run.ended:
                await run.changed.wait()

    async def wait_for_news(self, run: Run, *, seconds: float, report: Report) -> None:
        """Wait for a better kernel or the end, with progress notes that strictly increase."""
        shown = -1.0
        with anyio.move_on_after(seconds):
            while run.news == run.told and not run.ended:
                with anyio.move_on_after(PROGRESS_EVERY_S):
                    await run.changed.wait()
                if run.news == run.told:
                    now = run.progress
                    shown = max(shown + 0.01, 0.0 if now is None else float(now.evaluations))
                    text = "waiting for its turn" if now is None else f"best {now.best_speedup:.2f}x; {now.last}"
                    await report(shown, None if now is None else float(now.budget), text)
        run.told = run.news

    def close(self) -> None:
        """Ask every search to stop; on disk they stay resumable."""
        for run in self._runs.values():
            run.stop = True
        self._threads.close()
