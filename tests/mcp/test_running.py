"""The server as it runs, with the real workbench: many searches, kills, two servers on one home, hostile addresses."""

import contextlib
import importlib.util
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest
from test_asktell import COALESCED, SCALE, SEED, call, program

TOOLS = Path(__file__).parents[2] / "tools"
PATIENCE_S = 200
pytestmark = pytest.mark.timeout(400)  # processes start slowly where others share the machine
SLOW_PROBLEM = "layernorm"


def tool_module(name: str) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


served = tool_module("served")


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One server over HTTP for the tests that only talk to it."""
    with served.serving(tmp_path_factory.mktemp("served") / "home") as running:
        yield running


@contextlib.asynccontextmanager
async def client(running: Any) -> AsyncIterator[Any]:
    caller = served.Caller(running)
    with anyio.fail_after(PATIENCE_S):
        yield caller
    await caller.close()


async def good(caller: Any, tool: str, **arguments: Any) -> dict[str, Any]:
    result = await caller.call(tool, **arguments)
    assert not result.get("isError"), result
    answer: dict[str, Any] = result["structuredContent"]
    return answer


async def refused(caller: Any, tool: str, **arguments: Any) -> str:
    result = await caller.call(tool, **arguments)
    assert result.get("isError"), result
    text: str = result["content"][0]["text"]
    return text


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)


def alive(pids: set[int]) -> set[int]:
    """Those of the processes that still run."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                found.add(pid)
    return found


# --- R17 -------------------------------------------------------------------------------------------------------------
def test_ten_searches_run_at_once_the_eleventh_is_told_when_to_come_back_and_cheap_calls_are_answered(
    http: Any,
) -> None:
    async def play() -> None:
        async with client(http) as caller:
            options = {"action": "start", "problem": SCALE, "kernel": SEED, "budget": {"evaluations": 2}}
            ids = [(await good(caller, "run_mcts", **options, seed=seed))["run_id"] for seed in range(10)]
            text = await refused(caller, "run_mcts", **options)
            assert text.startswith("busy: ")
            assert "in a minute" in text
            listed = await good(caller, "run_mcts", action="list")
            assert {run["run_id"] for run in listed["runs"]} <= set(ids)
            for run_id in ids[1:]:
                await good(caller, "run_mcts", action="cancel", run_id=run_id)
            state = await good(caller, "run_mcts", action="status", run_id=ids[0])
            while state["status"] == "running":
                state = await good(caller, "run_mcts", action="step", run_id=ids[0])
            assert state["status"] == "finished"

    anyio.run(play)


# --- R19 -------------------------------------------------------------------------------------------------------------
def test_a_search_is_cancelled_twice_its_workers_rest_and_an_unknown_one_is_an_error(http: Any) -> None:
    async def play() -> None:
        async with client(http) as caller:
            started = await good(caller, "run_mcts", action="start", problem=SLOW_PROBLEM, budget={"evaluations": 500})
            run_id = started["run_id"]
            await good(caller, "run_mcts", action="step", run_id=run_id, max_wait_s=1)
            for _ in range(2):
                assert (await good(caller, "run_mcts", action="cancel", run_id=run_id))["status"] == "cancelled"
            assert (await good(caller, "run_mcts", action="status", run_id=run_id))["status"] == "cancelled"
            text = await refused(caller, "run_mcts", action="cancel", run_id="r-20200101-00000000")
            assert text.startswith("unknown_run: ")

    anyio.run(play)


# --- R20 -------------------------------------------------------------------------------------------------------------
def test_a_client_that_drops_its_connection_leaves_the_search_to_the_next_one(http: Any) -> None:
    async def play() -> None:
        async with client(http) as first:
            started = await good(
                first, "run_mcts", action="start", problem=SCALE, kernel=SEED, proposer="agent", seed=5
            )
            with anyio.move_on_after(0.2):
                await first.call("run_mcts", action="step", run_id=started["run_id"])
        async with client(http) as second:
            state = await good(second, "run_mcts", action="step", run_id=started["run_id"])
            while state["status"] == "running":
                state = await good(second, "run_mcts", action="step", run_id=started["run_id"])
            assert state["status"] == "needs_proposals"

    anyio.run(play)


def descendants(pid: int) -> set[int]:
    """Children of a process, at any depth."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found |= {child} | descendants(child)
    return found


@pytest.mark.parametrize("ending", ["end of input", "SIGTERM", "SIGKILL"])
def test_nothing_is_left_of_a_server_that_ends_during_a_search_and_the_search_goes_on_elsewhere(
    tmp_path: Path, ending: str
) -> None:
    """R20 and R21."""
    home = tmp_path / "home"
    with program(home) as server:
        options = {"problem": SCALE, "kernel": SEED, "budget": {"evaluations": 4}, "seed": 3}
        run_id = call(server, "run_mcts", action="start", **options)["run_id"]
        while call(server, "run_mcts", action="step", run_id=run_id)["evaluations"] < 1:
            pass
        children = descendants(server.pid)
        assert children
        if ending == "end of input":
            assert server.stdin is not None
            server.stdin.close()
            server.stdin = None
        else:
            server.send_signal(getattr(signal, ending))
        server.wait(timeout=PATIENCE_S)
        until(lambda: not alive(children))
    journal = home / "runs" / run_id / "journal.jsonl"
    done = journal.read_bytes()
    with program(home) as server:
        state = call(server, "run_mcts", action="status", run_id=run_id)
        while state["status"] == "running":
            state = call(server, "run_mcts", action="step", run_id=run_id)
        assert state["status"] == "finished"
        assert state["evaluations"] <= 4
    whole = done[: done.rfind(b"\n") + 1]
    assert journal.read_bytes().startswith(whole), "what was evaluated is kept as it was"


# --- R24 -------------------------------------------------------------------------------------------------------------
def test_two_servers_on_one_home_share_kernels_and_one_takes_over_when_the_other_is_killed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with program(home) as first, program(home) as second:
        verdict = call(first, "compile_verify", kernel={**SEED, "source": COALESCED}, problem=SCALE)
        again = call(second, "compile_verify", kernel=verdict["kernel_id"], problem=SCALE)
        assert again["cached"] is True
        started = call(first, "run_mcts", action="start", problem=SCALE, kernel=SEED, proposer="agent")
        run_id = started["run_id"]
        assert call(second, "run_mcts", action="status", run_id=run_id)["status"] in ("running", "needs_proposals")
        first.kill()
        first.wait()
        state = call(second, "run_mcts", action="step", run_id=run_id)
        while state["status"] == "running":
            state = call(second, "run_mcts", action="step", run_id=run_id)
        assert state["status"] == "needs_proposals"
        told = {"request_id": state["requests"][0]["request_id"], "kernel": verdict["kernel_id"]}
        reply = call(second, "run_mcts", action="tell", run_id=run_id, proposals=[told])
        assert reply["answers"][0]["outcome"] == "queued"


# --- R32 -------------------------------------------------------------------------------------------------------------
def test_every_address_that_is_not_there_gets_one_and_the_same_text(http: Any) -> None:
    runs = http.log.parent / "runs"
    runs.mkdir(exist_ok=True)
    os.symlink("/etc", runs / "r-20200101-0badf00d")
    addresses = [
        "optiml://runs/../../etc/passwd", "optiml://runs/..%2F..%2Fetc%2Fpasswd", "optiml://runs/%252e%252e%252fetc",
        "optiml://runs//etc/passwd", "optiml://runs/r-20200101-00000000", "optiml://runs/r-20200101-0badf00d",
        "optiml://runs/r-20200101-0badf00d/report", "optiml://kernels/0123456789abcdef", "optiml://kernels/..%2f..",
        "optiml://problems/no_such_problem", "optiml://problems/..%2fproblems", "optiml://runs/a%00b",
        "optiml://nothing/at/all", "optiml://runs/" + "x" * 1_000_000,
    ]  # fmt: skip

    async def play() -> None:
        async with client(http) as caller:
            caller._modern = False  # a header cannot hold an address of a megabyte
            texts = set()
            for address in addresses:
                message = await caller.request("resources/read", uri=address)
                texts.add(message["error"]["message"])
            assert len(texts) == 1
            assert next(iter(texts)).startswith("not_found: ")

    anyio.run(play)


# --- annotation hints ------------------------------------------------------------------------------------------------
def test_the_tools_that_say_they_only_read_leave_the_files_of_their_caller_alone(http: Any) -> None:
    """Their cache below OPTIML_HOME is ours; the roots and the runs are the caller's."""
    home = http.log.parent
    kept = home / "mine.cu"
    kept.write_text(COALESCED)

    def state() -> dict[str, int]:
        return {
            str(path.relative_to(home)): path.stat().st_mtime_ns
            for path in home.rglob("*")
            if path.is_file() and path.relative_to(home).parts[0] not in ("store", "server.log")
        }

    async def play() -> None:
        async with client(http) as caller:
            tools = {
                tool["name"]: tool["annotations"] for tool in (await caller.request("tools/list"))["result"]["tools"]
            }
            assert not tools["run_mcts"]["readOnlyHint"]
            before = state()
            kernel = {**SEED, "source": COALESCED}
            calls = {
                "compile_verify": {"kernel": kernel, "problem": SCALE},
                "profile_ncu": {"kernel": kernel, "problem": SCALE},
                "judge_patch": {"problem": SCALE, "before": SEED, "after": kernel},
                "generate_kernel": {"problem": "relu", "verify": False},
            }
            for name, arguments in calls.items():
                hints = tools[name]
                assert (hints["readOnlyHint"], hints["destructiveHint"]) == (True, False)
                assert (hints["idempotentHint"], hints["openWorldHint"]) == (True, False)
                first = await good(caller, name, **arguments)
                second = await good(caller, name, **arguments)
                for answer in (first, second):
                    for name_of_cost in ("cached", "seconds"):
                        answer.pop(name_of_cost, None)
                assert first == second, name
                assert state() == before, name
            target = home / "best.cu"
            target.write_text("// to be replaced\n")
            started = await good(
                caller, "run_mcts", action="start", problem=SCALE, kernel=SEED, budget={"evaluations": 1},
                write_to="best.cu",
            )  # fmt: skip
            status = "running"
            while status == "running":
                ended = await good(caller, "run_mcts", action="step", run_id=started["run_id"])
                status = ended["status"]
            assert status == "finished", ended
            assert target.read_text() != "// to be replaced\n", "so the hint says destructive"
            assert tools["run_mcts"]["destructiveHint"]

    anyio.run(play)
