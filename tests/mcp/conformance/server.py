"""The server that the conformance suites talk to: ours over HTTP, with their fixtures, or with --bare without.

    python server.py PORT [--bare]

The suites cannot send a token, so one layer in front of ours adds it; everything behind that layer is the product.
"""

from __future__ import annotations

import sys
from pathlib import Path

import uvicorn
from fixtures import mount
from starlette.types import ASGIApp, Receive, Scope, Send

from optiml.settings import read_settings
from optiml.workbench import Workbench
from optiml_mcp.http import http_app
from optiml_mcp.server import build_server

TOKEN = "conformance-suites-only"


def with_token(app: ASGIApp) -> ASGIApp:
    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = [*scope["headers"], (b"authorization", f"Bearer {TOKEN}".encode())]
            scope = {**scope, "headers": headers}
        await app(scope, receive, send)

    return wrapped


def main(port: int, *, bare: bool) -> None:
    server = build_server(lambda: Workbench(read_settings(environment={}, home="home", roots=(Path.cwd(),))))
    if not bare:
        mount(server)
    uvicorn.run(with_token(http_app(server, TOKEN)), host="127.0.0.1", port=port, log_level="error")


if __name__ == "__main__":
    main(int(sys.argv[1]), bare="--bare" in sys.argv)
