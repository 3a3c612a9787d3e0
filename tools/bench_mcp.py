"""How fast the server starts and answers.

    python tools/bench_mcp.py [--rounds 10] [--calls 400] [--json FILE]

Start: from the birth of the process to the reply of `initialize` on stdio, alternated with a server of the same SDK
that has one tool and nothing else; medians and their ratio. Answers: a profile and a verdict that the store holds,
asked by several clients over HTTP; time inside the server, calls per second of wall clock, and calls per second of
processor time, which says what a free core would do where other work shares the machine. Loopback only. Exit status 0
if the bars are met, calls per second by processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
from served import ROOT, Caller, Served, conditions, percentile, serving

RATIO_BAR, CACHED_BAR_MS, RATE_BAR = 1.3, 20.0, 100.0
CLIENTS = 4
ONE_TOOL = """
from mcp.server import MCPServer
server = MCPServer("bare")
@server.tool()
async def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b
server.run("stdio")
"""
GREETING = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "bench", "version": "1"},
    },
}


def start_s(command: list[str], home: Path) -> float:
    """Seconds from the start of a server on stdio to its first reply."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPTIML_HOME": str(home)},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(GREETING).encode() + b"\n")
    process.stdin.flush()
    reply = process.stdout.readline()
    took = time.perf_counter() - begun
    process.stdin.close()
    process.wait(timeout=30)
    process.stdout.close()
    if b'"serverInfo"' not in reply:
        raise RuntimeError(f"no greeting: {reply[:200]!r}")
    return took


def starts(rounds: int, home: Path) -> dict[str, Any]:
    """Both servers in turn; the first round only warms the file cache."""
    ours: list[float] = []
    bare: list[float] = []
    for number in range(rounds + 1):
        pair = start_s([sys.executable, "-c", ONE_TOOL], home), start_s([sys.executable, "-m", "optiml_mcp"], home)
        if number:
            bare.append(pair[0])
            ours.append(pair[1])
    return {
        "rounds": rounds,
        "bare_s": {"median": round(statistics.median(bare), 3), "all": [round(item, 3) for item in bare]},
        "ours_s": {"median": round(statistics.median(ours), 3), "all": [round(item, 3) for item in ours]},
        "ratio": round(statistics.median(ours) / statistics.median(bare), 3),
        "ratio_of_pairs": round(statistics.median(one / other for one, other in zip(ours, bare, strict=True)), 3),
        "bar": RATIO_BAR,
    }


async def cached(served: Served, tool: str, calls: int, modern: bool) -> dict[str, Any]:
    """Calls whose answers are in the store."""
    first = Caller(served)
    made = await first.call("generate_kernel", problem="relu", count=1)
    question = {"kernel": made["structuredContent"]["candidates"][0]["kernel_id"], "problem": "relu"}
    answer = await first.call(tool, **question)
    in_server: list[float] = []
    left = calls

    async def client() -> None:
        nonlocal left
        caller = Caller(served, modern=modern)
        while left > 0:
            left -= 1
            reply = await caller.call(tool, **question)
            if reply["structuredContent"]["cached"] is not True:
                raise RuntimeError(f"{tool} worked again")
            in_server.append(1e3 * reply["_meta"]["optiml/seconds"])
        await caller.close()

    one_at_a_time: list[float] = []
    for _ in range(50):
        answer = await first.call(tool, **question)
        one_at_a_time.append(1e3 * answer["_meta"]["optiml/seconds"])
    cpu_before = _cpu_s(served)
    begun = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for _ in range(CLIENTS):
            tasks.start_soon(client)
    took, cpu = time.perf_counter() - begun, _cpu_s(served) - cpu_before
    await first.close()
    return {
        "calls": len(in_server),
        "clients": CLIENTS,
        "calls_per_s": round(len(in_server) / took, 1),
        "server_cpu_ms_per_call": round(1e3 * cpu / len(in_server), 2),
        "calls_per_s_of_a_free_core": round(len(in_server) / cpu, 1),
        "in_server_ms": _summary(one_at_a_time),
        "in_server_ms_under_load": _summary(in_server),
        "bars": {"calls_per_s": RATE_BAR, "in_server_ms": CACHED_BAR_MS},
    }


def _cpu_s(served: Served) -> float:
    """Processor time of the server so far: what a call costs whatever else the machine does."""
    fields = Path(f"/proc/{served.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _summary(values: list[float]) -> dict[str, float]:
    return {name: round(percentile(values, share), 2) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    before = conditions()
    with tempfile.TemporaryDirectory() as folder:
        begin = starts(options.rounds, Path(folder) / "home") if options.rounds else None
        with serving(Path(folder) / "home") as served:
            answers = {
                f"{tool}, {era} era": anyio.run(cached, served, tool, options.calls, era == "sessionless")
                for era in ("sessionless", "handshake")
                for tool in ("profile_ncu", "compile_verify")
            }
    figures = {
        "what": "cold start on stdio against a one-tool server of the same SDK, and cached answers over HTTP",
        "command": f"python tools/bench_mcp.py --rounds {options.rounds} --calls {options.calls}",
        "conditions": {**before, "load_1_min_after": round(os.getloadavg()[0], 1)},
        "cold_start": begin,
        "cached": answers,
    }
    print(json.dumps(figures, indent=1))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    met = begin is None or begin["ratio"] <= RATIO_BAR
    for answer in answers.values():
        met = (
            met and answer["calls_per_s_of_a_free_core"] >= RATE_BAR and answer["in_server_ms"]["p50"] <= CACHED_BAR_MS
        )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
