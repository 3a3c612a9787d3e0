"""Serving on stdio until the client leaves or a signal comes; no child outlives the server."""

from __future__ import annotations

import os
import signal
from typing import Any, NoReturn

import anyio

from optiml_mcp.protocol import OptimlServer

CLOSING_LIMIT_S = 5.0
PARENT_CHECK_S = 2.0


def serve_stdio(server: OptimlServer[Any]) -> NoReturn:
    """Serve on stdin and stdout; never returns. Exit status 0 at end of input, 128 + n after signal n.

    The process ends with `os._exit`: the thread that reads stdin cannot be interrupted, and threads that still work
    for a caller who has gone are not waited for. Their children were killed when the lifespan closed.
    """
    status = 0
    try:
        anyio.run(_serve, server)
    except* (BrokenPipeError, ConnectionResetError):
        status = 1  # the client is gone and so is whoever would read a traceback
    os._exit(status)


async def _serve(server: OptimlServer[Any]) -> None:
    async with anyio.create_task_group() as tasks:

        async def leave(status: int) -> None:
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSING_LIMIT_S):
                await server.closed.wait()
            os._exit(status)

        async def watch_signals() -> None:
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as received:
                async for number in received:
                    await leave(128 + number)

        async def watch_parent() -> None:
            parent = os.getppid()
            while os.getppid() == parent:
                await anyio.sleep(PARENT_CHECK_S)
            await leave(128 + signal.SIGHUP)

        tasks.start_soon(watch_signals)
        tasks.start_soon(watch_parent)
        await server.run_stdio_async()
        tasks.cancel_scope.cancel()
