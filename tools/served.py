"""Our server over HTTP as a child, and a client that costs next to nothing: for the tools that measure."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
UP_WITHIN_S = 60.0
DOWN_WITHIN_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Served:
    """A running server."""

    url: str
    token: str
    process: subprocess.Popen[bytes]
    log: Path

    def rss_bytes(self) -> int:
        """Resident memory of the server without its children."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def descendants(self) -> set[int]:
        """Process ids below the server, at any depth."""
        parents: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        found: set[int] = set()
        fresh = {self.process.pid}
        while fresh:
            fresh = {pid for pid, parent in parents.items() if parent in fresh} - found
            found |= fresh
        return found


@contextlib.contextmanager
def serving(home: Path) -> Iterator[Served]:
    """Start the server on a free port of this machine, and end it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    token, log = secrets.token_urlsafe(24), home / "server.log"
    home.mkdir(parents=True, exist_ok=True)
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "OPTIML_HOME": str(home), "OPTIML_HTTP_TOKEN": token}
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "optiml_mcp", "--http", f"127.0.0.1:{port}", "--root", str(home)],
            env=surroundings, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}/mcp"
    try:
        deadline = time.monotonic() + UP_WITHIN_S
        while True:
            try:
                httpx.get(url, timeout=2)
                break
            except httpx.TransportError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise
                time.sleep(0.1)
        yield Served(url=url, token=token, process=process, log=log)
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to end, and make sure."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=DOWN_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


MODERN = "2026-07-28"
META = {"io.modelcontextprotocol/protocolVersion": MODERN, "io.modelcontextprotocol/clientCapabilities": {}}


class Caller:
    """One client: a kept connection, one message at a time, no session.

    Args:
        modern: speak the sessionless era; else the handshake era, whose handshake a server without sessions waives.
    """

    def __init__(self, served: Served, *, timeout_s: float = 60.0, modern: bool = True) -> None:
        self._modern = modern
        headers = {
            "Authorization": f"Bearer {served.token}",
            "Accept": "application/json, text/event-stream",
            "Content-Type": "application/json",
        }
        self._url = served.url
        # Nothing is encrypted here, and to load the certificates of the system for each client takes 40 ms, in which
        # the answers to the other clients of this process would lie unread: time that is not the server's.
        self._client = httpx.AsyncClient(headers=headers, timeout=timeout_s, verify=False)
        self._next = 0

    async def post(self, body: bytes, **headers: str) -> tuple[int, dict[str, Any] | None]:
        """The status and the last message of whatever is posted."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        response = await self._client.post(self._url, content=body, headers=named)
        text = response.text
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")] or [text]
        try:
            message: dict[str, Any] | None = json.loads(lines[-1])
        except ValueError:
            message = None
        return response.status_code, message

    async def health(self) -> str:
        """What the server says of its life."""
        return (await self._client.get(self._url.removesuffix("/mcp") + "/healthz")).text

    async def request(self, method: str, **params: Any) -> dict[str, Any]:
        """The message that answers a request: `result` or `error`."""
        self._next += 1
        headers: dict[str, str] = {}
        if self._modern:
            params = {**params, "_meta": META}
            headers = {"MCP_Protocol_Version": MODERN, "Mcp_Method": method}
            if name := params.get("name", params.get("uri")):
                headers["Mcp_Name"] = str(name)
        body = json.dumps({"jsonrpc": "2.0", "id": self._next, "method": method, "params": params}).encode()
        status, message = await self.post(body, **headers)
        if message is None:
            raise RuntimeError(f"{method}: HTTP {status} without a message")
        return message

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The result of a tool, be it an answer or a refusal."""
        message = await self.request("tools/call", name=tool, arguments=arguments)
        result: dict[str, Any] = message.get("result", message)
        return result

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()


def conditions() -> dict[str, Any]:
    """What a figure depends on."""
    return {
        "python": platform.python_version(),
        "mcp": version("mcp"),
        "optiml": version("optiml"),
        "cores": len(os.sched_getaffinity(0)),
        "load_1_min": round(os.getloadavg()[0], 1),
        "system": platform.system(),
    }


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))]
