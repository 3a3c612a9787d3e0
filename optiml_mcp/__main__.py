"""`optiml-mcp`, `python -m optiml_mcp` and `optiml serve`: the server as a program."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optiml.errors import InvalidInput, OptimlError
from optiml.settings import read_settings
from optiml_mcp.log import FORMATS, LEVELS, log_to_stderr
from optiml_mcp.serve import serve_stdio
from optiml_mcp.server import build_server

if TYPE_CHECKING:
    from optiml.workbench import Workbench

LOG = logging.getLogger(__name__)
SWITCH_S = 0.0005  # questions are answered in threads beside the event loop: each waits a tenth as long for its turn
MALLOC_OPTIONS = ((-3, 1 << 18), (-8, 2))  # M_MMAP_THRESHOLD, M_ARENA_MAX: see `_keep_memory_steady`
CLIENTS = ("claude-code", "codex", "cursor", "vscode")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the options and serve."""
    parser = argparse.ArgumentParser(
        prog="optiml-mcp", description="Serve OptiML over MCP, on stdin and stdout by default."
    )
    parser.add_argument("--root", action="append", type=Path, help="folder whose files callers may name")
    parser.add_argument("--http", metavar="HOST:PORT", help="serve HTTP instead of stdio; see the README on tokens")
    parser.add_argument("--allow-commands", action="store_true", help="let profile_ncu run commands")
    parser.add_argument("--trust-reference", action="store_true", help="run references where no sandbox can hold them")
    parser.add_argument("--log", choices=FORMATS, default="text", help="form of the log on stderr")
    parser.add_argument("--log-level", choices=LEVELS, default="warning", help="info has a line for each call")
    options = parser.parse_args(arguments)
    try:
        serve_with(
            http=options.http,
            roots=options.root,
            allow_commands=options.allow_commands,
            trust_reference=options.trust_reference,
            log=options.log,
            log_level=options.log_level,
        )
    except OptimlError as error:
        sys.stderr.write(f"optiml: {error.code}: {error}\n")
        sys.exit(2)


def serve_with(
    *,
    http: str | None,
    roots: Sequence[Path] | None,
    allow_commands: bool,
    trust_reference: bool,
    log: str = "text",
    log_level: str = "warning",
) -> None:
    """Serve until the client leaves.

    Args:
        http: HOST:PORT, or None for stdio.
        roots: folders whose files callers may name; None for the working folder.
        allow_commands: whether profile_ncu may run commands.
        trust_reference: whether references run where no sandbox can hold them.
        log: form of the log on stderr, one of `log.FORMATS`.
        log_level: one of `log.LEVELS`.

    Raises:
        InvalidInput: a root is no folder, an address cannot be, or it is not of this machine and there is no token.
        SetupError: a way of serving that is not available.
    """
    sys.setswitchinterval(SWITCH_S)
    _keep_memory_steady()
    folders = tuple(folder.resolve() for folder in roots or (Path.cwd(),))
    for folder in folders:
        if not folder.is_dir():
            raise InvalidInput(f"--root {folder} is no folder: name an existing one")
    for value, known in ((log, FORMATS), (log_level, LEVELS)):
        if value not in known:
            raise InvalidInput(f"--log and --log-level: {value[:40]!r} is none of {', '.join(known)}")
    log_to_stderr(form=log, level=log_level)
    settings = read_settings(trust_reference=trust_reference, allow_commands=allow_commands, roots=folders)
    for warning in settings.warnings:
        LOG.warning(warning)

    def make_bench() -> Workbench:
        with here_for_good():
            from optiml_mcp.hosted import HostedWorkbench  # here, so that the server starts in about a second

            return HostedWorkbench(settings)

    with here_for_good():
        server = build_server(
            make_bench,
            allow_commands=settings.allow_commands,
            asks_models=settings.chat is not None or settings.text_mixture is not None,
        )
    if http is None:
        serve_stdio(server)
    from optiml_mcp.http import parse_address, serve_http  # only here: stdio needs no web server

    serve_http(server, parse_address(http))


@contextlib.contextmanager
def here_for_good() -> Iterator[None]:
    """Keep the garbage collector away from what there is once the block is done: it lives as long as the server.

    Going through the hundred thousand objects of the imported modules again and again, in search of cycles, would hold
    up every answer for about a tenth of a second each time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _keep_memory_steady() -> None:
    """Give large messages back to the system, and let threads share their heaps.

    By itself the C library of Linux keeps the memory of a message of some megabytes once it has freed one, and one
    heap for each thread that ever allocated; a server that runs for days would hold the peak of each.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # another C library
    for option, value in MALLOC_OPTIONS:
        mallopt(option, value)


def client_config(client: str) -> tuple[str, str]:
    """Where a client keeps its servers, and what to put there.

    Raises:
        InvalidInput: an unknown client.
    """
    command, arguments = sys.executable, ["-m", "optiml_mcp"]
    entry = {"command": command, "args": arguments}
    match client:
        case "claude-code":
            return ".mcp.json of the project", json.dumps({"mcpServers": {"optiml": entry}}, indent=2)
        case "cursor":
            return ".cursor/mcp.json", json.dumps({"mcpServers": {"optiml": entry}}, indent=2)
        case "vscode":
            return ".vscode/mcp.json", json.dumps({"servers": {"optiml": {"type": "stdio", **entry}}}, indent=2)
        case "codex":
            return "~/.codex/config.toml", "\n".join(
                [
                    "[mcp_servers.optiml]",
                    f"command = {json.dumps(command)}",
                    f"args = {json.dumps(arguments)}",
                    "startup_timeout_sec = 30",
                    "tool_timeout_sec = 60",  # no answer takes longer than max_wait_s, 25 s at most
                ]
            )
    raise InvalidInput(f"{client[:40]!r} is no client: choose from {', '.join(CLIENTS)}")


if __name__ == "__main__":
    main()
