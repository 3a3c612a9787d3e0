"""Serving HTTP to clients on this machine: a bearer token, and lists of allowed Host and Origin headers.

Only loopback addresses are served. A request without the token is refused before anything of MCP runs; Host and
Origin are checked against loopback names, so that a web page cannot reach the server through the browser (DNS
rebinding).
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from mcp.server.transport_security import TransportSecuritySettings
from starlette.types import ASGIApp, Receive, Scope, Send

from optiml.errors import InvalidInput
from optiml_mcp.protocol import OptimlServer

TOKEN_VARIABLE = "OPTIML_HTTP_TOKEN"
TOKEN_FILE_VARIABLE = "OPTIML_HTTP_TOKEN_FILE"
HEALTH_PATH = "/healthz"  # open, and says nothing but that the server lives
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
CLOSING_LIMIT_S = 3
_SHORTEST_TOKEN = 16


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where to listen."""

    host: str  # one of LOOPBACK
    port: int


def parse_address(text: str) -> Address:
    """HOST:PORT.

    Raises:
        InvalidInput: not of that form, or not on this machine.
    """
    match = re.fullmatch(r"(.+):(\d{1,5})", text)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise InvalidInput(f"--http {text[:60]!r} is not HOST:PORT: write 127.0.0.1:8765")
    if match[1] not in LOOPBACK:
        raise InvalidInput(
            f"--http {match[1][:60]} is not this machine: listen on 127.0.0.1, and reach it from elsewhere by ssh -L"
        )
    return Address(host=match[1], port=int(match[2]))


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


def http_app(server: OptimlServer[Any], token: str) -> ASGIApp:
    """The whole service: MCP at /mcp behind the token."""
    hosts = [pattern for name in LOOPBACK for pattern in (name, f"{name}:*")]
    security = TransportSecuritySettings(
        enable_dns_rebinding_protection=True,
        allowed_hosts=hosts,
        allowed_origins=[f"{scheme}://{host}" for scheme in ("http", "https") for host in hosts],
    )
    return _TokenRequired(server.streamable_http_app(stateless_http=True, transport_security=security), token)


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
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
            return
        body = json.dumps({"error": "unauthorized: send the header Authorization: Bearer TOKEN"}).encode()
        await _reply(send, 401, body, [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")])


async def _reply(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def serve_http(server: OptimlServer[Any], address: Address) -> None:
    """Serve until a signal comes; open streams get a few seconds to end."""
    token, made_up = read_token()
    sys.stderr.write(f"optiml: serving MCP at http://{address.host}:{address.port}/mcp\n")
    if made_up:
        sys.stderr.write(f"optiml: clients send the header Authorization: Bearer {token}\n")
    sys.stderr.flush()
    uvicorn.run(
        http_app(server, token),
        host=address.host.strip("[]"),
        port=address.port,
        log_level="warning",
        timeout_graceful_shutdown=CLOSING_LIMIT_S,
    )
