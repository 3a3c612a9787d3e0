"""A scripted MCP client: generate -> verify -> profile -> judge -> search over stdio, with a transcript.

    python tools/mcp_demo.py                       # against `python -m optiml_mcp`
    python tools/mcp_demo.py --evaluations 30 --problem layernorm
    python tools/mcp_demo.py -- ssh box optiml-mcp # against any other server command

Exit status 0 only if every step gave what it should.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import anyio
from mcp import Client, StdioServerParameters
from mcp.types import CallToolResult

FIVE = {"compile_verify", "profile_ncu", "judge_patch", "generate_kernel", "run_mcts"}
CACHED_LIMIT_S = 0.050
CACHED_CALLS = 3  # the fastest counts: what a busy machine adds is not the server's
Print = Callable[[str], None]


class Unexpected(Exception):
    """A step gave something else than it should."""


class Caller:
    """Calls tools, follows pending answers, and keeps the server's own time of the last call."""

    def __init__(self, client: Client, show: Print) -> None:
        self._client = client
        self._show = show
        self.server_s = 0.0

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The structured answer of a tool, waited for until it is complete."""
        begun = time.perf_counter()
        while True:
            result = await self._client.call_tool(tool, arguments)
            if not isinstance(result, CallToolResult) or result.is_error or result.structured_content is None:
                raise Unexpected(f"{tool} failed: {result}")
            answer = result.structured_content
            size = len(json.dumps(answer))
            if size > 8192:
                raise Unexpected(f"{tool} answered {size} bytes, more than 8 KB")
            if answer.get("status") != "pending":
                break
            arguments = {"job_id": answer["job_id"]}
        self.server_s = float((result.meta or {}).get("optiml/seconds", 0.0))
        self._show(f"{tool:16} {time.perf_counter() - begun:7.3f} s  {size:5} bytes  {answer['summary']}")
        return answer


def expect(holds: bool, what: str) -> None:
    """Raise Unexpected unless `holds`."""
    if not holds:
        raise Unexpected(what)


async def demo(client: Client, *, problem: str, evaluations: int, show: Print = print) -> None:
    """Play the whole script.

    Raises:
        Unexpected: a step gave something else than it should.
    """
    names = {tool.name for tool in (await client.list_tools()).tools}
    expect(names == FIVE, f"the tools are {sorted(names)}")
    show(f"tools            {', '.join(sorted(names))}")
    caller = Caller(client, show)

    generated = await caller.call("generate_kernel", problem=problem, count=2)
    expect(generated["status"] == "done" and generated["candidates"], "no kernel was generated")
    first = generated["candidates"][0]["kernel_id"]
    other = generated["candidates"][-1]["kernel_id"]

    verdict = await caller.call("compile_verify", kernel=first, problem=problem)
    expect(verdict["status"] == "accepted", f"the kernel is {verdict['status']}: {verdict['detail']}")

    profile = await caller.call("profile_ncu", kernel=first, problem=problem)
    expect(profile["time"]["median_us"] > 0, "the profile has no time")
    times = []
    for _ in range(CACHED_CALLS):
        again = await caller.call("profile_ncu", kernel=first, problem=problem)
        expect(again["cached"] is True, "the second profile was not cached")
        times.append(caller.server_s)
    show(f"                 cached: true, {min(times) * 1000:.1f} ms in the server at best")
    expect(min(times) <= CACHED_LIMIT_S, f"the cached profile took {min(times):.3f} s")

    judgement = await caller.call("judge_patch", problem=problem, before=first, after=other)
    expect(judgement["verdict"] in ("try", "reject", "measure_again"), "no verdict on the edit")

    search = await caller.call("run_mcts", action="start", problem=problem, budget={"evaluations": evaluations}, seed=1)
    run_id = search["run_id"]
    while search["status"] == "running":
        search = await caller.call("run_mcts", action="step", run_id=run_id)
    expect(search["status"] == "finished", f"the search is {search['status']}: {search['summary']}")
    result = await caller.call("run_mcts", action="result", run_id=run_id)
    expect(result["best"]["verdict"]["status"] == "accepted", "the best kernel is not accepted")
    expect(result["speedup"]["median"] >= 1.0, "the best kernel is slower than the first")
    gain = result["speedup"]
    show(f"                 {gain['median']:.2f}x {gain['source']} by {len(result['path'])} edits")

    report = (await client.read_resource(f"optiml://runs/{run_id}/report")).contents[0]
    expect(bool(getattr(report, "text", "")), "the run has no report")
    show(f"report           {len(report.text)} characters at optiml://runs/{run_id}/report")  # type: ignore[union-attr]


async def play(command: list[str], *, problem: str, evaluations: int) -> None:
    """Start the server and play the script against it."""
    async with Client(StdioServerParameters(command=command[0], args=command[1:])) as client:
        await demo(client, problem=problem, evaluations=evaluations)


def main() -> int:
    """Read the options, play, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problem", default="softmax")
    parser.add_argument("--evaluations", type=int, default=6)
    parser.add_argument("server", nargs="*", help="server command; default: this interpreter with -m optiml_mcp")
    options = parser.parse_args()
    command = options.server or [sys.executable, "-m", "optiml_mcp"]
    unexpected: list[str] = []
    try:
        anyio.run(lambda: play(command, problem=options.problem, evaluations=options.evaluations))
    except* Unexpected as group:  # the client's task groups wrap whatever is raised inside them
        unexpected = [str(error) for error in _leaves(group)]
    for text in unexpected:
        print(f"unexpected: {text}", file=sys.stderr)
    if not unexpected:
        print("every step gave what it should")
    return 1 if unexpected else 0


def _leaves(group: BaseExceptionGroup[Unexpected]) -> list[Unexpected]:
    found: list[Unexpected] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


if __name__ == "__main__":
    sys.exit(main())
