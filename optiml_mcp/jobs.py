"""Calls that take longer than one request may wait: they belong to the server's lifespan, not to the request.

A job whose id was handed out goes on while its caller does something else: the same tool with the job's id, or simply
the same call again, picks up the answer. Cancelling the last request that waits for a job ends it, and its children
with it: at once if that request had not learned the id, else after a while in which nobody has come back for it (the
request may have been lost with a connection).
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import anyio

from optiml.errors import Busy, InvalidInput
from optiml_mcp.background import Background, Cancellation

PROGRESS_EVERY_S = 2.0
MOST_THREADS = 4  # each may have a host with children of its own
MOST_WAITING = 32  # jobs that may run or queue at once
COMING_BACK_S = 10.0  # that a job whose id is known goes on after the last request for it was cancelled
FINISHED_KEPT = 64  # answers kept for their job_id

Report = Callable[[float, float | None, str], Awaitable[None]]  # progress, total, message


@dataclass(kw_only=True)
class Job:
    """One running or finished call; the future holds what it returned or raised."""

    job_id: str
    tool: str
    call: str  # digest of the arguments, which name the tool
    waiting: int = 0  # requests
    known: bool = False  # a pending answer has told its id
    cancellation: Cancellation = field(default_factory=Cancellation)
    cancelled: bool = False
    ending: asyncio.TimerHandle | None = None  # set while nobody waits any more
    done: anyio.Event = field(default_factory=anyio.Event)
    future: Future[Any] = field(default_factory=Future)


class Jobs:
    """Blocking calls in worker threads, as many at once as there are cores."""

    def __init__(self) -> None:
        self._threads = Background(threads=min(MOST_THREADS, max(2, os.cpu_count() or 2)), name="job")
        self._jobs: dict[str, Job] = {}

    def start(self, tool: str, key: str, call: Callable[[], Any]) -> Job:
        """Start `call` in a worker thread, or join the running job with the same key: the digest of the arguments.

        Raises:
            Busy: too many jobs are waiting.
        """
        running = [job for job in self._jobs.values() if not job.done.is_set()]
        for job in running:
            if job.call == key and not job.cancelled:
                return job
        if len(running) >= MOST_WAITING:
            raise Busy(f"{len(running)} calls are running or waiting: try again in half a minute")
        for old in [job.job_id for job in self._jobs.values() if job.done.is_set()][:-FINISHED_KEPT]:
            del self._jobs[old]
        job = Job(job_id=f"j-{secrets.token_hex(8)}", tool=tool, call=key)
        self._jobs[job.job_id] = job
        job.future = self._threads.submit(call, on_done=job.done.set, cancellation=job.cancellation)
        return job

    def find(self, job_id: str, tool: str) -> Job:
        """The job with this id.

        Raises:
            InvalidInput: there is none, or another tool started it.
        """
        job = self._jobs.get(job_id)
        if job is None:
            raise InvalidInput(
                f"there is no job {job_id[:40]!r} (a restarted server forgets its jobs): call {tool} again with the "
                "full arguments, finished work is cached"
            )
        if job.tool != tool:
            raise InvalidInput(f"job {job_id} belongs to {job.tool}: call that tool with it")
        return job

    async def wait(self, job: Job, *, seconds: float, report: Report) -> bool:
        """Wait for the end, with progress notes; False, and the job's id is as good as told, if it is not there yet.

        A request that is cancelled here ends the job, unless another one waits for it; where its id is known, that
        other one may still come.
        """
        job.waiting += 1
        if job.ending is not None:
            job.ending.cancel()
            job.ending = None
        try:
            with anyio.move_on_after(seconds):
                await self._follow(job, report)
            job.known = job.known or not job.done.is_set()
        except anyio.get_cancelled_exc_class():
            if job.waiting == 1:
                self._end_soon(job)
            raise
        finally:
            job.waiting -= 1
        return job.done.is_set()

    def _end_soon(self, job: Job) -> None:
        """End a job for which the last request was cancelled, unless one comes back in time."""

        def end() -> None:
            job.ending = None
            if not job.done.is_set():
                job.cancelled = True
                job.future.cancel()
                job.cancellation.cancel()

        if job.known:
            job.ending = asyncio.get_running_loop().call_later(COMING_BACK_S, end)
        else:
            end()

    async def _follow(self, job: Job, report: Report) -> None:
        note = 0
        while not job.done.is_set():
            with anyio.move_on_after(PROGRESS_EVERY_S):
                await job.done.wait()
            if not job.done.is_set():
                note += 1
                await report(note, None, f"{job.tool} has been running for {note * PROGRESS_EVERY_S:.0f} s")

    @staticmethod
    def outcome(job: Job) -> Any:
        """What a job that is done returned, or what it raised.

        Raises:
            Busy: it was ended because nobody waited for it any more.
        """
        if job.cancelled:
            raise Busy(f"the last request for this work was cancelled: call {job.tool} again with the full arguments")
        return job.future.result()

    def close(self) -> None:
        """Let go of every job."""
        self._threads.close()
