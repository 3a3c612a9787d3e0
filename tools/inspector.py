"""The inspector's command line against our server, in both protocol eras: list strictly, call each tool, read each
resource, get each prompt.

    python tools/inspector.py [--folder build/node] [--era legacy]

Exit status 0 also where npm is missing: the reason is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node import NotHere, environment, install, node

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, VERSION = "@modelcontextprotocol/inspector", "2.12.0"
UP_WITHIN_S = 60
CALL_WITHIN_S = 60
PROBLEM = "relu"


class Unexpected(Exception):
    """The inspector said something else than it should."""


@dataclass(frozen=True, kw_only=True)
class Inspector:
    """One way of asking."""

    command: tuple[str, ...]
    environment: dict[str, str]
    target: tuple[str, ...]  # where the server is
    tail: tuple[str, ...] = ()  # the server's command, for stdio

    def ask(self, method: str, *arguments: str) -> dict[str, Any]:
        """The result of a method."""
        command = [*self.command, "--cli", "--format", "json", *self.target, "--method", method, *arguments, *self.tail]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=CALL_WITHIN_S, check=False
        )
        print(f"  {method:26} {' '.join(arguments)[:80]:80} exit {done.returncode}")
        if done.returncode != 0:
            raise Unexpected(f"{method} {arguments}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
        result: dict[str, Any] = json.loads(done.stdout)
        return result.get("result", result)

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The structured answer of a tool."""
        result = self.ask("tools/call", "--tool-name", tool, "--tool-args-json", json.dumps(arguments))
        structured: dict[str, Any] = result["structuredContent"]
        return structured


def play(inspector: Inspector) -> None:
    """List, call, read."""
    names = {tool["name"] for tool in inspector.ask("tools/list", "--strict")["tools"]}
    if names != {"compile_verify", "profile_ncu", "judge_patch", "generate_kernel", "run_mcts"}:
        raise Unexpected(f"the tools are {names}")
    made = inspector.call("generate_kernel", problem=PROBLEM, count=1, verify=False)
    kernel = made["candidates"][0]["kernel_id"]
    verdict = inspector.call("compile_verify", kernel=kernel, problem=PROBLEM)
    if verdict["status"] != "accepted":
        raise Unexpected(f"the kernel is {verdict['status']}: {verdict['detail']}")
    inspector.call("profile_ncu", kernel=kernel, problem=PROBLEM)
    inspector.call("judge_patch", problem=PROBLEM, before=kernel, after=kernel)
    run_id = inspector.call("run_mcts", action="start", problem=PROBLEM, budget={"evaluations": 2}, seed=1)["run_id"]
    while inspector.call("run_mcts", action="step", run_id=run_id)["status"] == "running":
        pass
    inspector.call("run_mcts", action="result", run_id=run_id)

    listed = [item["uri"] for item in inspector.ask("resources/list")["resources"]]
    templates = [item["uriTemplate"] for item in inspector.ask("resources/templates/list")["resourceTemplates"]]
    values = {"{name}": PROBLEM, "{kernel_id}": kernel, "{run_id}": run_id, "{?offset,limit}": "?offset=0&limit=100"}
    for uri in [*listed, *templates]:
        for name, value in values.items():
            uri = uri.replace(name, value)
        contents = inspector.ask("resources/read", "--uri", uri)["contents"]
        if not contents[0]["text"]:
            raise Unexpected(f"{uri} is empty")
    prompts = [item["name"] for item in inspector.ask("prompts/list")["prompts"]]
    given = {"optimise_kernel": f"problem={PROBLEM}", "write_kernel": "intent=relu"}
    for name in prompts:
        inspector.ask("prompts/get", "--prompt-name", name, "--prompt-args", given[name])


@contextlib.contextmanager
def serving(home: Path, token: str) -> Iterator[str]:
    """Our server over HTTP; its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "optiml_mcp", "--http", f"127.0.0.1:{port}"],
        env={**_ours(home), "OPTIML_HTTP_TOKEN": token}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}/mcp"
    try:
        deadline = time.monotonic() + UP_WITHIN_S
        while time.monotonic() < deadline and process.poll() is None:
            try:
                urllib.request.urlopen(url, timeout=2)
            except urllib.error.HTTPError:
                break  # it answers, and refuses a request without the token
            except OSError:
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=20)


def _ours(home: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OPTIML_HOME": str(home)}


def main() -> int:
    """Install, serve, ask, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where npm packages are kept; default: a temporary folder")
    parser.add_argument("--era", choices=("legacy", "modern"), help="only this protocol era; default: both")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = (options.folder or scratch / "node").resolve()
        try:
            program = node(folder)
            package = install(folder, f"{PACKAGE}@{VERSION}", PACKAGE)
        except NotHere as reason:
            print(f"skipped: {reason}")
            return 0
        entry = json.loads((package / "package.json").read_text(encoding="utf-8"))["bin"]
        script = package / (entry if isinstance(entry, str) else entry["mcp-inspector"])
        command = (str(program), str(script))
        home, token = scratch / "home", secrets.token_urlsafe(24)
        try:
            with serving(home, token) as url:
                for era in (options.era,) if options.era else ("legacy", "modern"):
                    print(f"inspector over HTTP, {era}")
                    header = f"Authorization: Bearer {token}"
                    target = ("--server-url", url, "--transport", "http", "--header", header, "--protocol-era", era)
                    play(Inspector(command=command, environment=environment(program, scratch / "npm"), target=target))
            print("inspector over stdio")
            surroundings = {**_ours(home), **environment(program, scratch / "npm")}
            tail = ("--", sys.executable, "-m", "optiml_mcp")
            Inspector(command=command, environment=surroundings, target=(), tail=tail).ask("tools/list", "--strict")
        except Unexpected as error:
            print(f"unexpected: {error}", file=sys.stderr)
            return 1
    print("the inspector saw what it should")
    return 0


if __name__ == "__main__":
    sys.exit(main())
