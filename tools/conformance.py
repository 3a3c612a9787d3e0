"""The npm conformance suites of MCP against our server over HTTP.

    python tools/conformance.py [--folder build/node] [--verbose]

Four runs: the 0.1.16 suite, and both requirement sets of the 0.2.0 suite, against the server with the fixtures that the
suites ask for; then the server as it ships, with the scenarios that need no fixtures. What may fail stands in the
baselines beside the fixtures, each with its reason; anything else that fails, and a baseline line that no longer
fails, is an error. Exit status 0 also where npm is missing: the reason is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
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

from node import NotHere, environment, install, node

ROOT = Path(__file__).resolve().parent.parent
SUITES = ROOT / "tests" / "mcp" / "conformance"
PACKAGE = "@modelcontextprotocol/conformance"
OLD, NEW = "0.1.16", "0.2.0-alpha.12"
UP_WITHIN_S = 60
RUN_WITHIN_S = 180
# What a server without fixtures has: suite version, scenario.
BARE = (
    *((OLD, name) for name in ("server-initialize", "ping", "tools-list", "resources-list", "prompts-list")),
    *((OLD, name) for name in ("completion-complete", "server-sse-multiple-streams", "dns-rebinding-protection")),
    *((NEW, name) for name in ("sep-2164-resource-not-found", "caching", "http-header-validation")),
    *((NEW, name) for name in ("input-required-result-unsupported-methods",)),
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a suite."""

    name: str
    version: str
    arguments: tuple[str, ...]


FULL = (
    Run(
        name="0.1.16", version=OLD,
        arguments=("--expected-failures", str(SUITES / "baseline-0.1.16.yml")),
    ),
    *(
        Run(
            name=f"0.2.0 {revision}", version=NEW,
            arguments=("--requirements", revision, "--expected-failures", str(SUITES / f"baseline-{revision}.yml")),
        )
        for revision in ("2025-11-25", "2026-07-28")
    ),
)  # fmt: skip


@contextlib.contextmanager
def serving(*options: str) -> Iterator[str]:
    """Our server on a free port; its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as home:
        process = subprocess.Popen(
            [sys.executable, str(SUITES / "server.py"), str(port), *options],
            cwd=home, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            _wait_until_up(process, f"http://127.0.0.1:{port}/mcp")
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_up(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + UP_WITHIN_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=2)
        except urllib.error.HTTPError:
            return  # it answers
        except OSError:
            time.sleep(0.2)
    raise RuntimeError("the server did not come up")


def play(suite: Path, program: Path, url: str, arguments: tuple[str, ...], *, folder: Path, verbose: bool) -> bool:
    """Run a suite; whether everything went as the baseline says."""
    command = [str(program), str(suite / "dist" / "index.js"), "server", "--url", url, *arguments]
    with tempfile.TemporaryDirectory() as out:
        done = subprocess.run(
            [*command, "-o", out], env=environment(program, folder / "home"), capture_output=True, text=True,
            timeout=RUN_WITHIN_S, check=False,
        )  # fmt: skip
    said = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    if verbose or done.returncode != 0:
        print(said[said.find("=== SUMMARY") :] if "=== SUMMARY" in said else said[-4000:])
    total = re.search(r"^(Total: .*|Passed: .*)$", said, re.MULTILINE)
    print(f"  {total[0] if total else 'no total'}; exit status {done.returncode}")
    return done.returncode == 0


def main() -> int:
    """Install, serve, play, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where npm packages are kept; default: a temporary folder")
    parser.add_argument("--verbose", action="store_true", help="print the summary of every run")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = (options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))).resolve()
        try:
            program = node(folder)
            suites = {version: install(folder, f"{PACKAGE}@{version}", PACKAGE) for version in (OLD, NEW)}
        except NotHere as reason:
            print(f"skipped: {reason}")
            return 0
        failed = []
        with serving() as url:
            for run in FULL:
                print(f"conformance {run.name}, with fixtures")
                if not play(suites[run.version], program, url, run.arguments, folder=folder, verbose=options.verbose):
                    failed.append(run.name)
        with serving("--bare") as url:
            for version, scenario in BARE:
                print(f"conformance {version} {scenario}, as shipped")
                arguments = ("--scenario", scenario)
                if not play(suites[version], program, url, arguments, folder=folder, verbose=options.verbose):
                    failed.append(f"as shipped: {scenario}")
    print(f"failed: {', '.join(failed)}" if failed else "all runs went as their baselines say")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
