"""Serving HTTP: a bearer token, and lists of allowed Host and Origin headers.

A request without the token is refused before anything of MCP runs; Host and Origin are checked against known names, so
that a web page cannot reach the server through the browser (DNS rebinding). Clients of this machine are served; those
of other machines only where the user chose the token, and, where the server listens on every address, the names that
they may use for it.
"""

from __future__ import annotations

import asyncio
import gc
import hmac
import json
import logging
import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from mcp.server.transport_security import TransportSecuritySettings
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from optiml.errors import InvalidInput
from optiml_mcp.protocol import OptimlServer

LOG = logging.getLogger(__name__)
TOKEN_VARIABLE = "OPTIML_HTTP_TOKEN"
TOKEN_FILE_VARIABLE = "OPTIML_HTTP_TOKEN_FILE"
HOSTS_VARIABLE = "OPTIML_HTTP_HOSTS"  # names, with commas, under which clients of other machines know this one
HEALTH_PATH = "/healthz"  # open, and says nothing but that the server lives
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
EVERYWHERE = ("0.0.0.0", "[::]")
CLOSING_LIMIT_S = 3
LARGE_BYTES = 256 << 10  # of a request's body
SWEEP_AFTER_S = 1.0
_SHORTEST_TOKEN = 16


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where to listen."""

    host: str  # a name or a number; IPv6 in brackets
    port: int


def parse_address(text: str) -> Address:
    """HOST:PORT.

    Raises:
        InvalidInput: not of that form.
    """
    match = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9a-fA-F:.]+\]):(\d{1,5})", text)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise InvalidInput(f"--http {text[:60]!r} is not HOST:PORT: write 127.0.0.1:8765")
    return Address(host=match[1], port=int(match[2]))


def served_names(address: Address, *, token_made_up: bool, environment: Mapping[str, str] = os.environ) -> list[str]:
    """The names that clients may use for this server.

    Raises:
        InvalidInput: other machines could reach it, and the user chose no token, or did not say by which name.
    """
    if address.host in LOOPBACK:
        return list(LOOPBACK)
    if token_made_up:
        raise InvalidInput(
            f"--http {address.host[:60]} lets other machines in, and there is no token: put one into a file that only "
            f"you can read and name it in {TOKEN_FILE_VARIABLE}, or listen on 127.0.0.1 and use ssh -L"
        )
    named = [name.strip() for name in environment.get(HOSTS_VARIABLE, "").split(",") if name.strip()]
    if any(re.fullmatch(r"[A-Za-z0-9.-]+|\[[0-9a-fA-F:.]+\]", name) is None for name in named):
        raise InvalidInput(f"{HOSTS_VARIABLE} holds something that is no host name: write names with commas")
    if address.host not in EVERYWHERE:
        return [*LOOPBACK, address.host, *named]
    if not named:
        raise InvalidInput(
            f"--http {address.host} listens on every address: name this machine as clients do in {HOSTS_VARIABLE}"
        )
    return [*LOOPBACK, *named]


def read_token(environment: Mapping[str, str] = os.environ) -> tuple[str, bool]:
    """The token that clients must send, and whether it was made up here.

    It is the variable OPTIML_HTTP_TOKEN, else the first line of the file that OPTIML_HTTP_TOKEN_FILE names.

    Raises:
        InvalidInput: the one given is too short to be a secret, or its file cannot be read or may be read by others.
    """
    given = environment.get(TOKEN_VARIABLE)
    if given is None and (name := environment.get(TOKEN_FILE_VARIABLE)) is not None:
        given = _token_of_file(Path(name))
    if given is None:
        return secrets.token_urlsafe(32), True
    if len(given) < _SHORTEST_TOKEN or not given.isascii() or not given.isprintable() or " " in given:
        raise InvalidInput(f"the HTTP token must have at least {_SHORTEST_TOKEN} printable characters without spaces")
    return given, False


def _token_of_file(path: Path) -> str:
    try:
        mode, lines = path.stat().st_mode, path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the file that {TOKEN_FILE_VARIABLE} names cannot be read as ASCII text") from error
    if mode & 0o077:
        raise InvalidInput(f"others may read the file that {TOKEN_FILE_VARIABLE} names: chmod 600 it")
    return lines[0] if lines else ""


def http_app(server: OptimlServer[Any], token: str, *, names: Sequence[str] = LOOPBACK) -> ASGIApp:
    """The whole service: MCP at /mcp behind the token, for clients that know this machine by one of `names`."""
    hosts = [pattern for name in names for pattern in (name, f"{name}:*")]
    security = TransportSecuritySettings(
        enable_dns_rebinding_protection=True,
        allowed_hosts=hosts,
        allowed_origins=[f"{scheme}://{host}" for scheme in ("http", "https") for host in hosts],
    )
    return _TokenRequired(
        MemorySwept(server.streamable_http_app(stateless_http=True, transport_security=security)), token
    )  # fmt: skip


class MemorySwept:
    """Collects garbage soon after a large message.

    What the SDK makes for a request without a session refers to itself, so that two megabytes of a message would stay
    until enough else was allocated. Several messages in the meantime share one collection.
    """

    def __init__(
        self, app: ASGIApp, *, after_s: float = SWEEP_AFTER_S, sweep: Callable[[], object] = gc.collect
    ) -> None:
        self._app = app
        self._after_s = after_s
        self._sweep = sweep
        self._due = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            if taken >= LARGE_BYTES and not self._due:
                self._due = True
                asyncio.get_running_loop().call_later(self._after_s, self._swept)

    def _swept(self) -> None:
        self._due = False
        self._sweep()


class _TokenRequired:
    """Answers 401 to every HTTP request without the token; only whether the server lives is open to all."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] == HEALTH_PATH and scope["method"] == "GET":
            await _reply(send, 200, b"ok", [(b"content-type", b"text/plain")])
            return
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"")
        if hmac.compare_digest(given, self._expected):
            if scope["method"] == "POST" and not _is_json(headers.get(b"content-type", b"")):
                body = b'{"error": "invalid_params: send Content-Type: application/json"}'
                await _reply(send, 415, body, [(b"content-type", b"application/json")])
                return
            if b"last-event-id" in headers:  # the SDK, with no events kept, would not answer at all
                body = b'{"error": "invalid_params: no events are kept here: send the request again"}'
                await _reply(send, 405, body, [(b"content-type", b"application/json"), (b"allow", b"POST")])
                return
            await self._app(scope, receive, send)
            return
        body = json.dumps({"error": "unauthorized: send the header Authorization: Bearer TOKEN"}).encode()
        await _reply(send, 401, body, [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")])


def _is_json(kind: bytes) -> bool:
    return kind.split(b";")[0].strip().lower() == b"application/json"


async def _reply(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def serve_http(server: OptimlServer[Any], address: Address) -> None:
    """Serve until a signal comes; open streams get a few seconds to end.

    Raises:
        InvalidInput: a bad token, or other machines could reach it without one.
    """
    token, made_up = read_token()
    names = served_names(address, token_made_up=made_up)
    if address.host not in LOOPBACK:
        LOG.warning("other machines can reach this server, and what they send is not encrypted: see --http in README")
    sys.stderr.write(f"optiml: serving MCP at http://{address.host}:{address.port}/mcp\n")
    if made_up:
        sys.stderr.write(f"optiml: clients send the header Authorization: Bearer {token}\n")
    sys.stderr.flush()
    uvicorn.run(
        http_app(server, token, names=names),
        host=address.host.strip("[]"),
        port=address.port,
        log_level="warning",
        log_config=None,  # the log of this process is set up already
        timeout_graceful_shutdown=CLOSING_LIMIT_S,
    )
