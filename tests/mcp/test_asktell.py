"""Asking an agent over MCP, with the real workbench: rounds by id and diff, several clients, a killed server."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from calls import answer, refusal
from fakes import RELU
from mcp import Client

from optiml.diffs import make_diff
from optiml.settings import read_settings
from optiml.workbench import Workbench
from optiml_mcp.replies import MAX_REPLY_BYTES, size_of
from optiml_mcp.server import build_server

pytestmark = pytest.mark.timeout(400)  # processes start slowly where others share the machine
SCALE = {
    "name": "scale",
    "axes": {"n": {"type": "var", "min": 1}},
    "inputs": {"x": {"dtype": "float32", "shape": ["n"]}, "a": {"dtype": "float32", "shape": None}},
    "outputs": {"y": {"dtype": "float32", "shape": ["n"]}},
    "reference": "def run(x, a):\n    return a * x",
    "workloads": [{"axes": {"n": 1000}, "scalars": {"a": 2.0}}],
    "bench": [{"axes": {"n": 1 << 18}, "scalars": {"a": 2.0}}],
}
STRIDED = """\
extern "C" __global__ void scale(const float* x, float* y, float a, int n) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    int rows = (n + 255) / 256;
    int i = (t & 255) * rows + (t >> 8);
    if (i < n) y[i] = a * x[i];
}
"""
COALESCED = STRIDED.replace("    int rows = (n + 255) / 256;\n", "").replace("(t & 255) * rows + (t >> 8)", "t")
SEED = {
    "source": STRIDED,
    "launches": [{"kernel": "scale", "grid": ["ceil_div(n, 256)"], "block": [256], "args": ["x", "y", "a", "n"]}],
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@contextlib.asynccontextmanager
async def connected(home: Path, era: str = "auto") -> Any:
    settings = read_settings(environment={}, home=str(home), roots=(home.parent,), trust_reference=True)
    with anyio.fail_after(200):
        async with Client(build_server(lambda: Workbench(settings)), mode=era) as client:  # type: ignore[arg-type]
            yield client


async def started(client: Client, **options: Any) -> str:
    reply = await answer(
        client, "run_mcts", action="start", problem=SCALE, kernel=SEED, proposer="agent", seed=1, **options
    )
    run_id: str = reply["run_id"]
    return run_id


async def stepped(client: Client, run_id: str) -> dict[str, Any]:
    """The state once the search evaluates no more."""
    while True:
        state = await answer(client, "run_mcts", action="step", run_id=run_id)
        if state["status"] != "running":
            return state


async def told(client: Client, run_id: str, *proposals: dict[str, Any]) -> dict[str, Any]:
    return await answer(client, "run_mcts", action="tell", run_id=run_id, proposals=list(proposals))


def test_an_agent_makes_a_kernel_faster_by_a_diff(home: Path, era: str) -> None:
    async def play() -> None:
        async with connected(home, era) as client:
            run_id = await started(client, write_to="best.cu")
            state = await stepped(client, run_id)
            assert state["status"] == "needs_proposals"
            assert "tell" in state["next_action"]
            assert size_of(state) <= MAX_REPLY_BYTES
            request = state["requests"][0]
            assert request["kernel"]["source"] == STRIDED
            assert request["profile_brief"]["hot_lines"]
            reply = await told(
                client, run_id,
                {
                    "request_id": request["request_id"],
                    "kernel": {"base": request["parent_kernel_id"], "diff": make_diff(STRIDED, COALESCED)},
                    "rationale": "neighbouring threads read neighbouring elements",
                    "expected": [{"metric": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum", "direction": "down"}],
                },
                {"request_id": request["request_id"], "kernel": request["parent_kernel_id"]},
                {"request_id": "q77", "kernel": RELU},
                {"request_id": request["request_id"], "kernel": {"base": request["parent_kernel_id"], "diff": "x"}},
            )  # fmt: skip
            assert [item["outcome"] for item in reply["answers"]] == ["queued", "duplicate", "invalid", "invalid"]
            state = await stepped(client, run_id)
            assert state["best_speedup"] > 1.5
            late = await told(client, run_id, {"request_id": request["request_id"], "kernel": RELU})
            assert late["answers"][0]["outcome"] == "stale"
            await told(client, run_id)
            state = await stepped(client, run_id)
            assert state["status"] == "finished"
            result = await answer(client, "run_mcts", action="result", run_id=run_id)
            assert result["best"]["kernel"]["source"] == COALESCED
            assert result["path"][0]["rationale"] == "neighbouring threads read neighbouring elements"
            assert result["baseline"]["kernel"]["source"] == STRIDED
            assert "rows" not in (home.parent / "best.cu").read_text()

    anyio.run(play)


def test_a_search_that_asks_nobody_takes_no_proposals(home: Path) -> None:
    async def play() -> None:
        async with connected(home) as client:
            reply = await answer(client, "run_mcts", action="start", problem=SCALE, kernel=SEED)
            text = await refusal(
                client,
                "run_mcts",
                action="tell",
                run_id=reply["run_id"],
                proposals=[{"request_id": "q1", "kernel": ""}],
            )
            assert text.startswith("invalid_params: ")
            assert "proposer=agent" in text
            await answer(client, "run_mcts", action="cancel", run_id=reply["run_id"])

    anyio.run(play)


def test_a_waiting_search_can_be_cancelled_and_its_best_is_kept(home: Path) -> None:
    async def play() -> None:
        async with connected(home) as client:
            run_id = await started(client)
            await stepped(client, run_id)
            assert (await answer(client, "run_mcts", action="cancel", run_id=run_id))["status"] == "cancelled"
            assert (await answer(client, "run_mcts", action="cancel", run_id=run_id))["status"] == "cancelled"
            state = await told(client, run_id, {"request_id": "q1", "kernel": COALESCED})
            assert state["answers"][0]["outcome"] == "stale"

    anyio.run(play)


@contextlib.contextmanager
def program(home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The real server on stdio."""
    process = subprocess.Popen(
        [sys.executable, "-m", "optiml_mcp", "--trust-reference"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, "OPTIML_HOME": str(home)},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def call(process: subprocess.Popen[bytes], tool: str, **arguments: Any) -> dict[str, Any]:
    """One call in the handshake era; a new server is greeted first."""
    assert process.stdin is not None
    assert process.stdout is not None
    greeting = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    for identifier, method, params in (
        (1, "initialize", greeting),
        (2, "tools/call", {"name": tool, "arguments": arguments}),
    ):
        message = {"jsonrpc": "2.0", "id": identifier, "method": method, "params": params}
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()
        while (reply := json.loads(process.stdout.readline())).get("id") != identifier:
            pass
    assert not reply["result"]["isError"], reply
    structured: dict[str, Any] = reply["result"]["structuredContent"]
    return structured


def test_what_was_told_survives_a_kill_of_the_server(home: Path) -> None:
    with program(home) as first:
        run_id = call(first, "run_mcts", action="start", problem=SCALE, kernel=SEED, proposer="agent")["run_id"]
        state: dict[str, Any] = {"status": "running"}
        while state["status"] == "running":
            state = call(first, "run_mcts", action="step", run_id=run_id)
        request = state["requests"][0]["request_id"]
        proposal = {"request_id": request, "kernel": {**SEED, "source": COALESCED}, "rationale": "coalesced"}
        reply = call(first, "run_mcts", action="tell", run_id=run_id, proposals=[proposal])
        assert reply["answers"][0]["outcome"] == "queued"
        first.send_signal(signal.SIGKILL)
        first.wait()
    with program(home) as second:
        state = call(second, "run_mcts", action="status", run_id=run_id)
        while state["status"] == "running":
            state = call(second, "run_mcts", action="step", run_id=run_id)
        assert state["status"] == "needs_proposals"
        assert state["evaluations"] == 2
        assert state["best_kernel_id"] == reply["answers"][0]["kernel_id"]
