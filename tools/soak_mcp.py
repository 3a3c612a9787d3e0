"""Random valid and invalid calls from several clients over HTTP while searches run: does the server hold?

    python tools/soak_mcp.py [--calls 1000] [--clients 8] [--seconds 300] [--seed 1] [--json FILE]

Bounded in calls and in time, on the loopback interface of this machine only. Exit status 0 only if every call was
answered in good order, the server's memory (median of the last quarter of the calls against the second quarter; the
first one fills the bounded caches) grew by less than 5 %, nothing of it was left behind,
and the cheap calls stayed within their bar (with --strict-latency: on a machine that is busy otherwise the latency says
more of the machine).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx
from served import Caller, Served, conditions, end, percentile, serving

MOST_CALLS, MOST_CLIENTS, MOST_SECONDS = 100_000, 64, 3600
SAMPLES = 20  # of the memory, evenly over the calls
GROWTH_BAR = 0.05
CHEAP_P99_BAR_S = 0.2
LARGEST_REPLY = 8192
PROBLEMS = ("relu", "vector_add", "gelu")
RELU = """\
extern "C" __global__ void relu(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = fmaxf(x[i], 0.0f);
}
"""
LAUNCH = {"kernel": "relu", "grid": ["ceil_div(n, 256)"], "block": [256], "args": ["x", "y", "n"]}


@dataclass(kw_only=True)
class Record:
    """What came of the calls."""

    outcomes: Counter[str] = field(default_factory=Counter)
    cheap_s: list[float] = field(default_factory=list)
    cheap_server_s: list[float] = field(default_factory=list)
    nothing_s: list[float] = field(default_factory=list)  # calls that ask for nothing: the machine's share
    kinds_s: dict[str, list[float]] = field(default_factory=dict)  # of the cheap calls
    wrong: list[str] = field(default_factory=list)
    searches: int = 0
    done: int = 0


@dataclass(frozen=True, kw_only=True)
class Call:
    """One random call."""

    kind: str
    cheap: bool
    tool: str | None = None
    arguments: Any = None
    body: bytes | None = None
    method: str | None = None


def random_call(dice: random.Random, known: dict[str, str]) -> Call:
    """Half of the calls are right; the others are wrong in every way that is cheap to make up."""
    kernel = {"source": RELU, "launches": [LAUNCH]}
    variant = {"source": RELU + f"// {dice.randrange(8)}\n", "launches": [LAUNCH]}
    wrong = {"source": RELU.replace("0.0f", f"{dice.randrange(1, 5)}.0f"), "launches": [LAUNCH]}
    broken = {"source": RELU.replace("fmaxf", "fmaxff"), "launches": [LAUNCH]}
    name, run_id = known["kernel"], known["run"]
    known_relu = {"kernel": name, "problem": "relu"}
    junk = dice.choice([None, 5, -1, 2**70, "", "x" * 3000, [], {}, [[[]]], {"a": {"b": 1}}, True, 1e308])
    return dice.choice(
        [
            Call(kind="health", cheap=False),
            Call(kind="list tools", cheap=True, method="tools/list"),
            Call(kind="list resources", cheap=True, method="resources/list"),
            Call(kind="cached verdict", cheap=True, tool="compile_verify", arguments=known_relu),
            Call(kind="cached profile", cheap=True, tool="profile_ncu", arguments=known_relu),
            Call(kind="runs", cheap=True, tool="run_mcts", arguments={"action": "list"}),
            Call(kind="status", cheap=True, tool="run_mcts", arguments={"action": "status", "run_id": run_id}),
            Call(kind="step", cheap=False, tool="run_mcts",
                 arguments={"action": "step", "run_id": run_id, "max_wait_s": dice.random()}),
            Call(kind="result", cheap=False, tool="run_mcts", arguments={"action": "result", "run_id": run_id}),
            Call(kind="verify", cheap=False, tool="compile_verify", arguments={"kernel": variant, "problem": "relu"}),
            Call(kind="verify wrong", cheap=False, tool="compile_verify",
                 arguments={"kernel": wrong, "problem": "relu", "max_wait_s": 5}),
            Call(kind="no compile", cheap=False, tool="compile_verify",
                 arguments={"kernel": broken, "problem": "relu"}),
            Call(kind="generate", cheap=False, tool="generate_kernel",
                 arguments={"problem": dice.choice(PROBLEMS), "verify": False, "count": dice.randrange(1, 4)}),
            Call(kind="judge", cheap=False, tool="judge_patch",
                 arguments={"problem": "relu", "before": name, "after": variant}),
            Call(kind="junk argument", cheap=True, tool="compile_verify",
                 arguments={"kernel": kernel, "problem": junk}),
            Call(kind="junk kernel", cheap=True, tool="profile_ncu", arguments={"kernel": junk, "problem": "relu"}),
            Call(kind="unknown argument", cheap=True, tool="judge_patch", arguments={"problm": "relu"}),
            Call(kind="unknown tool", cheap=True, tool="compile_all", arguments={}),
            Call(kind="unknown run", cheap=True, tool="run_mcts", arguments={"action": "step", "run_id": "../../etc"}),
            Call(kind="no proposals", cheap=True, tool="run_mcts",
                 arguments={"action": "tell", "run_id": run_id, "proposals": junk}),
            Call(kind="unknown kernel", cheap=True, tool="compile_verify",
                 arguments={"kernel": f"{dice.randrange(16**15):016x}", "problem": "relu"}),
            Call(kind="huge source", cheap=False, tool="compile_verify",
                 arguments={"kernel": "x" * (1 << 21), "problem": "relu"}),
            Call(kind="no JSON", cheap=True, body=b'{"jsonrpc": "2.0", "id": 1, '),
            Call(kind="no request", cheap=True, body=json.dumps(junk).encode()),
            Call(kind="no UTF-8", cheap=True, body=b'{"jsonrpc":"2.0","id":1,"method":"\xff\xfe"}'),
            Call(kind="unknown resource", cheap=True, method="resources/read"),
        ]
    )  # fmt: skip


async def play(caller: Caller, call: Call, record: Record) -> None:
    begun = time.perf_counter()
    if call.kind == "health":
        outcome = await caller.health()
        record.nothing_s.append(time.perf_counter() - begun)
    elif call.body is not None:
        status, _ = await caller.post(call.body)
        outcome = f"HTTP {status}"
        if not 400 <= status < 500:
            record.wrong.append(f"{call.kind}: HTTP {status}")
    elif call.method is not None:
        params = {"uri": "optiml://runs/..%2f..%2fetc"} if call.method == "resources/read" else {}
        message = await caller.request(call.method, **params)
        outcome = "error" if "error" in message else "answered"
    else:
        result = await caller.call(str(call.tool), **call.arguments)
        outcome = "refused" if result.get("isError") else "answered"
        text = json.dumps(result.get("structuredContent", result))
        if len(text) > LARGEST_REPLY:
            record.wrong.append(f"{call.kind}: a reply of {len(text)} bytes")
        if "internal:" in text or "Traceback" in text:
            record.wrong.append(f"{call.kind}: {text[:200]}")
        in_server = result.get("_meta", {}).get("optiml/seconds")
        if call.cheap and in_server is not None:
            record.cheap_server_s.append(in_server)
    if call.cheap:
        record.cheap_s.append(time.perf_counter() - begun)
        record.kinds_s.setdefault(call.kind, []).append(record.cheap_s[-1])
    record.outcomes[f"{call.kind}: {outcome}"] += 1
    record.done += 1


async def soak(served: Served, *, calls: int, clients: int, seconds: float, seed: int, record: Record) -> list[int]:
    """Play the calls; resident bytes over the calls."""
    first = Caller(served)
    kernel = {"source": RELU, "launches": [LAUNCH]}
    verdict = await first.call("compile_verify", kernel=kernel, problem="relu")
    known = {"kernel": verdict["structuredContent"]["kernel_id"], "run": ""}
    await first.call("profile_ncu", kernel=known["kernel"], problem="relu")
    memory: list[int] = []
    deadline = time.monotonic() + seconds

    async def search() -> None:
        """Always one search under way."""
        caller = Caller(served)
        while True:
            options = {"problem": PROBLEMS[record.searches % len(PROBLEMS)], "budget": {"evaluations": 12}}
            started = await caller.call("run_mcts", action="start", seed=record.searches, **options)
            known["run"] = started["structuredContent"]["run_id"]
            record.searches += 1
            status = "running"
            while status == "running":
                state = await caller.call("run_mcts", action="step", run_id=known["run"], max_wait_s=5)
                status = state["structuredContent"]["status"]

    async def client(number: int) -> None:
        caller, dice = Caller(served, modern=number % 2 == 0), random.Random(f"{seed}:{number}")
        while record.done < calls and time.monotonic() < deadline:
            call = random_call(dice, known)
            try:
                await play(caller, call, record)
            except httpx.TransportError as error:
                record.wrong.append(f"{call.kind}: {type(error).__name__} after call {record.done}")
            if record.done >= len(memory) * calls / SAMPLES:
                memory.append(served.rss_bytes())
        await caller.close()

    async with anyio.create_task_group() as searching:
        searching.start_soon(search)
        while not known["run"]:
            await anyio.sleep(0.05)
        async with anyio.create_task_group() as tasks:
            for number in range(clients):
                tasks.start_soon(client, number)
        searching.cancel_scope.cancel()
    memory.append(served.rss_bytes())
    health = await first.call("compile_verify", kernel=known["kernel"], problem="relu")
    if health.get("isError"):
        record.wrong.append("the call after the last one failed")
    await first.close()
    return memory


def main() -> int:
    """Read the options, soak, judge, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=300.0, help="stop after so many, done or not")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--strict-latency", action="store_true", help="fail where the cheap calls miss their bar")
    options = parser.parse_args()
    if not (1 <= options.calls <= MOST_CALLS and 1 <= options.clients <= MOST_CLIENTS):
        parser.error(f"at most {MOST_CALLS} calls from {MOST_CLIENTS} clients")
    record, begun = Record(), time.monotonic()
    before = conditions()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "home") as served:
        memory = anyio.run(
            lambda: soak(
                served, calls=options.calls, clients=options.clients, seconds=min(options.seconds, MOST_SECONDS),
                seed=options.seed, record=record,
            )
        )  # fmt: skip
        took, alive = time.monotonic() - begun, served.process.poll() is None
        children = served.descendants()
        end(served.process)
        time.sleep(0.5)
        left = [pid for pid in children if Path(f"/proc/{pid}").exists() and not _zombie(pid)]
        log = served.log.read_text(errors="replace")
    quarter = max(1, len(memory) // 4)
    growth = statistics.median(memory[-quarter:]) / statistics.median(memory[quarter : 2 * quarter] or memory) - 1.0
    p99 = percentile(record.cheap_s, 0.99)
    figures: dict[str, Any] = {
        "what": f"{record.done} random calls from {options.clients} clients over HTTP while searches run",
        "command": f"python tools/soak_mcp.py --calls {options.calls} --clients {options.clients}",
        "seed": options.seed,
        "conditions": {**before, "load_1_min_after": round(os.getloadavg()[0], 1)},
        "calls": record.done,
        "seconds": round(took, 1),
        "searches_started": record.searches,
        "server_alive": alive,
        "rss_mib": [round(value / 2**20, 1) for value in memory],
        "rss_growth": round(growth, 4),
        "children_at_end": len(children),
        "orphans": len(left),
        "tracebacks_in_log": log.count("Traceback"),
        "cheap_calls": len(record.cheap_s),
        "cheap_ms": _milliseconds(record.cheap_s),
        "cheap_ms_by_kind": {kind: _milliseconds(times) for kind, times in sorted(record.kinds_s.items())},
        "health_ms": _milliseconds(record.nothing_s),
        "cheap_in_server_ms": _milliseconds(record.cheap_server_s),
        "outcomes": dict(sorted(record.outcomes.items())),
        "wrong": record.wrong[:20],
    }  # fmt: skip
    print(json.dumps(figures, indent=1))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    sound = alive and not left and not record.wrong and record.done >= options.calls and growth < GROWTH_BAR
    if p99 > CHEAP_P99_BAR_S:
        print(
            f"p99 of the cheap calls is {1e3 * p99:.0f} ms; the bar is {1e3 * CHEAP_P99_BAR_S:.0f} ms", file=sys.stderr
        )
        sound = sound and not options.strict_latency
    if log.count("Traceback"):
        print(log[-3000:], file=sys.stderr)
    return 0 if sound else 1


def _milliseconds(seconds: list[float]) -> dict[str, float]:
    return {f"p{share}": round(1e3 * percentile(seconds, share / 100), 1) for share in (50, 90, 99)}


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


if __name__ == "__main__":
    sys.exit(main())
