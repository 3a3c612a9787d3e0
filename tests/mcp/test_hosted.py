"""Long work in processes of its own: same answers, killed when nobody waits for it, replaced when it dies."""

import contextlib
import gc
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from calls import answer, refusal
from fakes import RELU, FakeWorkbench
from mcp import Client
from test_asktell import COALESCED, SCALE, SEED, call, program
from test_running import alive, descendants, until

from optiml.codec import adapter_of
from optiml.errors import InvalidInput, NotAccepted, WorkerDied
from optiml.records import Generated, Judgement, Profile, SearchResult, Verdict
from optiml.settings import ModelEndpoint, Settings, TextMixture, read_settings
from optiml_mcp.__main__ import here_for_good
from optiml_mcp.background import Cancellation
from optiml_mcp.hosted import HostedWorkbench, settings_from_json, settings_to_json

pytestmark = pytest.mark.timeout(400)  # processes start slowly where others share the machine
Play = Callable[[Callable[[Client], Any]], None]
KERNEL = {**SEED, "source": COALESCED}
ENDLESS = {**SEED, "source": COALESCED.replace("y[i] = a * x[i];", "for (;;) y[i] = a * x[i] + y[i];")}


@pytest.fixture(scope="module")
def hosted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostedWorkbench]:
    settings = read_settings(environment={}, home=str(tmp_path_factory.mktemp("hosted") / "home"), trust_reference=True)
    bench = HostedWorkbench(settings)
    yield bench
    bench.close()


def test_a_host_verifies_and_the_server_then_answers_from_the_store(hosted: HostedWorkbench) -> None:
    verdict = hosted.verify(KERNEL, SCALE)
    assert verdict.status == "accepted"
    assert not verdict.cached
    known = hosted.known_verdict(verdict.kernel_id, SCALE)
    assert known is not None
    assert known.cached
    assert known.cases == verdict.cases
    profile = hosted.profile(verdict.kernel_id, SCALE, baseline=SEED)
    assert profile.comparison is not None
    assert profile.comparison.verdict == "faster"
    assert hosted.known_profile(verdict.kernel_id, SCALE) is not None
    assert ".visible .entry scale" in hosted.ptx(verdict.kernel_id)
    assert hosted.judge(SCALE, SEED, verdict.kernel_id).verdict in ("try", "measure_again")


def test_whoever_asks_the_server_itself_goes_before_the_work_of_its_hosts(hosted: HostedWorkbench) -> None:
    hosted.verify(KERNEL, SCALE)
    hosts = [worker.pid for worker, _ in hosted._hosts._idle if worker.pid is not None]
    working = {pid for host in hosts for pid in (host, *descendants(host))}
    assert len(working) > len(hosts)
    assert all(os.getpriority(os.PRIO_PROCESS, pid) > os.nice(0) for pid in working)


def test_the_garbage_collector_leaves_alone_what_is_here_for_good() -> None:
    kept_before = gc.get_freeze_count()
    try:
        with here_for_good():
            module = [[number] for number in range(1000)]
        assert gc.get_freeze_count() - kept_before > len(module)
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_what_reads_the_answers_of_hosts_is_built_before_the_first_one_comes(
    hosted: HostedWorkbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optiml.codec.TypeAdapter", None)  # whoever builds one now, fails
    for kind in (Verdict, Profile, Judgement, Generated, SearchResult):
        assert adapter_of(kind)


def test_an_error_of_a_host_is_raised_here_with_its_code(hosted: HostedWorkbench) -> None:
    with pytest.raises(InvalidInput) as caught:
        hosted.verify("0123456789abcdef", SCALE)
    assert caught.value.code == "unknown_kernel"
    with pytest.raises(NotAccepted, match="wrong_values"):
        hosted.profile({**KERNEL, "source": COALESCED.replace("a * x", "a + x")}, SCALE)


def test_a_search_in_a_host_reports_each_step_and_stops_when_told(hosted: HostedWorkbench) -> None:
    run_id = hosted.start_search(SCALE, SEED, evaluations=30, seed=1)
    seen: list[int] = []
    result = hosted.run_search(
        run_id, on_progress=lambda now: seen.append(now.evaluations), should_stop=lambda: len(seen) >= 2
    )
    assert result.status == "running"
    assert result.spent.evaluations < 30
    assert seen == sorted(seen)


def test_a_cancelled_call_ends_what_it_waits_for_and_the_next_one_gets_a_fresh_host(
    hosted: HostedWorkbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancellation = Cancellation()
    monkeypatch.setattr("optiml_mcp.hosted.current_cancellation", lambda: cancellation)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(hosted.verify, ENDLESS, SCALE)
        until(lambda: bool(cancellation._ends))
        cancellation.cancel()
        with pytest.raises(WorkerDied) as caught:
            pending.result()
        assert caught.value.cancelled
    with pytest.raises(WorkerDied, match="cancelled"):
        hosted.verify(KERNEL, SCALE)
    monkeypatch.undo()
    assert hosted.verify(KERNEL, SCALE).status == "accepted"


def test_a_cancellation_waits_for_what_is_just_about_to_begin() -> None:
    cancellation, tries = Cancellation(), iter([False, False, True])
    with cancellation.ending(lambda: next(tries)):
        cancellation.cancel()
    assert next(tries, None) is None


def test_settings_reach_a_host_whole() -> None:
    settings = Settings(
        home=Path("/somewhere"),
        roots=(Path("/a"), Path("/b")),
        device="emulator:h100",
        trust_reference=True,
        kernel_timeout_s=3.5,
        chat=ModelEndpoint(name="m", url="http://127.0.0.1/v1", key_env="KEY"),
        text_mixture=TextMixture(experts=(ModelEndpoint(name="n"),)),
    )
    assert settings_from_json(json.loads(json.dumps(settings_to_json(settings)))) == settings


def busy_seconds(pids: set[int]) -> float:
    """Processor time of the processes so far."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in alive(pids)]
    return sum(int(user) + int(system) for *_, user, system in (f[:13] for f in fields)) / os.sysconf("SC_CLK_TCK")


# --- over MCP --------------------------------------------------------------------------------------------------------
def send(server: subprocess.Popen[bytes], message: dict[str, Any]) -> None:
    assert server.stdin is not None
    server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
    server.stdin.flush()


def test_a_call_cancelled_by_its_client_takes_its_processes_along_and_the_next_call_works(tmp_path: Path) -> None:
    """R19."""
    with program(tmp_path / "home") as server:
        assert call(server, "compile_verify", kernel=KERNEL, problem=SCALE)["status"] == "accepted"
        before = descendants(server.pid)
        arguments = {"name": "compile_verify", "arguments": {"kernel": ENDLESS, "problem": SCALE}}
        send(server, {"id": 99, "method": "tools/call", "params": arguments})
        idle_s = busy_seconds(before)
        until(lambda: busy_seconds(before) > idle_s + 0.5)  # it runs
        for _ in range(2):
            send(server, {"method": "notifications/cancelled", "params": {"requestId": 99}})
        send(server, {"method": "notifications/cancelled", "params": {"requestId": 12345}})
        until(lambda: not alive(before))
        assert call(server, "compile_verify", kernel=SEED, problem=SCALE)["status"] == "accepted"


def test_a_search_that_loses_its_host_goes_on_from_its_journal_and_no_host_knows_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTIML_HTTP_TOKEN", "a-secret-of-this-test")
    with program(tmp_path / "home") as server:
        options = {"problem": SCALE, "kernel": SEED, "budget": {"evaluations": 4}, "seed": 3}
        run_id = call(server, "run_mcts", action="start", **options)["run_id"]
        while call(server, "run_mcts", action="step", run_id=run_id)["evaluations"] < 1:
            pass
        assert alive(descendants(server.pid))
        for pid in descendants(server.pid):
            with contextlib.suppress(ProcessLookupError):  # a compiler may have ended by now
                assert b"a-secret-of-this-test" not in Path(f"/proc/{pid}/environ").read_bytes()
                os.kill(pid, signal.SIGKILL)
        state = call(server, "run_mcts", action="step", run_id=run_id)
        while state["status"] == "running":
            state = call(server, "run_mcts", action="step", run_id=run_id)
        assert state["status"] == "finished", state
        assert state["evaluations"] <= 4


# --- every call is answered ------------------------------------------------------------------------------------------
def test_a_question_that_gets_no_answer_is_refused_in_time_and_others_are_answered(
    play: Play, bench: FakeWorkbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, stuck = threading.Event(), 0

    def known_verdict(*_: object, **__: object) -> None:
        nonlocal stuck
        stuck += 1
        release.wait()

    monkeypatch.setattr("optiml_mcp.server.QUESTION_LIMIT_S", 0.1)
    monkeypatch.setattr("optiml_mcp.server.QUESTIONS_AT_ONCE", 2)
    monkeypatch.setattr(bench, "known_verdict", known_verdict)

    async def scenario(client: Client) -> None:
        try:
            for _ in range(4):
                text = await refusal(client, "compile_verify", kernel=RELU, problem="relu")
                assert text.startswith("busy: ")
            assert stuck == 2, "those that found no room did not begin"
        finally:
            release.set()
        monkeypatch.setattr("optiml_mcp.server.QUESTION_LIMIT_S", 20.0)
        assert (await answer(client, "run_mcts", action="list"))["runs"] == []

    play(scenario)


def test_a_job_whose_id_was_told_is_ended_when_nobody_comes_back_after_a_cancelled_request(
    play: Play, bench: FakeWorkbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    monkeypatch.setattr("optiml_mcp.jobs.COMING_BACK_S", 0.0)
    monkeypatch.setattr(Cancellation, "cancel", lambda _: ended.set())

    async def scenario(client: Client) -> None:
        pending = await answer(client, "compile_verify", kernel=RELU + "// slow\n", problem="relu", max_wait_s=0)
        with anyio.move_on_after(0.1):
            await client.call_tool("compile_verify", {"job_id": pending["job_id"]})
        await anyio.to_thread.run_sync(ended.wait)
        bench.gate.set()
        text = await refusal(client, "compile_verify", job_id=pending["job_id"])
        assert text.startswith("busy: ")
        assert "call compile_verify again" in text

    play(scenario)


def test_whoever_comes_back_for_a_job_in_time_finds_it_running(
    play: Play, bench: FakeWorkbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(Cancellation, "cancel", lambda _: ended.set())

    async def scenario(client: Client) -> None:
        pending = await answer(client, "compile_verify", kernel=RELU + "// slow\n", problem="relu", max_wait_s=0)
        with anyio.move_on_after(0.1):
            await client.call_tool("compile_verify", {"job_id": pending["job_id"]})
        assert (await answer(client, "compile_verify", job_id=pending["job_id"], max_wait_s=0))["status"] == "pending"
        bench.gate.set()
        assert (await answer(client, "compile_verify", job_id=pending["job_id"]))["status"] == "accepted"
        assert not ended.is_set()

    play(scenario)


def test_a_job_whose_only_request_is_cancelled_is_ended_unless_its_id_was_told(
    play: Play, bench: FakeWorkbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(Cancellation, "cancel", lambda _: ended.set())
    slow = {"kernel": RELU + "// slow\n", "problem": "relu"}

    async def scenario(client: Client) -> None:
        pending = await answer(client, "compile_verify", **slow, max_wait_s=0)
        with anyio.move_on_after(0.1):
            await client.call_tool("compile_verify", {"job_id": pending["job_id"]})
        assert not ended.is_set()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.call_tool, "compile_verify", {**slow, "seed": 1})
            while bench.calls.count("verify") < 2:
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
        await anyio.to_thread.run_sync(ended.wait)
        bench.gate.set()

    play(scenario)
