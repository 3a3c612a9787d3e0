"""Calls that take longer than one request may wait: they belong to the server's lifespan, not to the request.

A job whose id was handed out goes on whatever becomes of the requests that wait for it: the same tool with the job's
id, or simply the same call again, picks up the answer. A job that nobody can ask for any more, because the only
request that waited for it was cancelled before it learned the id, is ended, and its children with it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import anyio

from optiml.codec import digest
from optiml.errors import Busy, InvalidInput
from optiml_mcp.background import Background, Cancellation

PROGRESS_EVERY_S = 2.0
MOST_THREADS = 4  # each may have a host with children of its own
MOST_WAITING = 32  # jobs that may run or queue at once
FINISHED_KEPT = 64  # answers kept for their job_id

Report = Callable[[float, float | None, str], Awaitable[None]]  # progress, total, message


@dataclass(kw_only=True)
class Job:
    """One running or finished call; the future holds what it returned or raised."""

    job_id: str
    tool: str
    call: str  # digest of tool and arguments
    waiting: int = 0  # requests
    known: bool = False  # a pending answer has told its id
    cancellation: Cancellation = field(default_factory=Cancellation)
    cancelled: bool = False
    done: anyio.Event = field(default_factory=anyio.Event)
    future: Future[Any] = field(default_factory=Future)


class Jobs:
    """Blocking calls in worker threads, as many at once as there are cores."""

    def __init__(self) -> None:
        self._threads = Background(threads=min(MOST_THREADS, max(2, os.cpu_count() or 2)), name="job")
        self._jobs: dict[str, Job] = {}

    def start(self, tool: str, arguments: Any, call: Callable[[], Any]) -> Job:
        """Start `call` in a worker thread, or join the running job of the same arguments.

        Raises:
            Busy: too many jobs are waiting.
        """
        key = digest([tool, arguments])
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

        A request that is cancelled here ends the job, unless another one waits for it or somebody knows its id.
        """
        job.waiting += 1
        try:
            with anyio.move_on_after(seconds):
                await self._follow(job, report)
            job.known = job.known or not job.done.is_set()
        finally:
            job.waiting -= 1
            if not (job.waiting or job.known or job.done.is_set()):
                job.cancelled = True
                job.future.cancel()
                job.cancellation.cancel()
        return job.done.is_set()

    async def _follow(self, job: Job, report: Report) -> None:
        note = 0
        while not job.done.is_set():
            with anyio.move_on_after(PROGRESS_EVERY_S):
                await job.done.wait()
            if not job.done.is_set():
                note += 1
                await report(note, None, f"{job.tool} has been running for {note * PROGRESS_EVERY_S:.0f} s")

    def close(self) -> None:
        """Let go of every job."""
        self._threads.close()
