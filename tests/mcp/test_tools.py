"""The five tools over a fake workbench, in both protocol eras."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import jsonschema
import pytest
from calls import answer, refusal
from fakes import FASTER_RELU, RELU, WRONG_RELU, FakeWorkbench
from mcp import Client
from mcp.types import CallToolResult

from optiml.errors import SetupError
from optiml_mcp.arguments import read
from optiml_mcp.replies import MAX_REPLY_BYTES, size_of
from optiml_mcp.server import build_server

Play = Callable[[Callable[[Client], Any]], None]
FIVE = ["compile_verify", "profile_ncu", "judge_patch", "generate_kernel", "run_mcts"]
SNAPSHOT = Path(__file__).parent / "tools.json"


# --- what is published -----------------------------------------------------------------------------------------------
def test_the_published_tools_are_those_of_the_snapshot(play: Play) -> None:
    """After a wanted change: delete tools.json and run this test twice."""

    async def scenario(client: Client) -> None:
        tools = (await client.list_tools()).model_dump(mode="json", by_alias=True, exclude_none=True)["tools"]
        assert [tool["name"] for tool in tools] == FIVE
        if not SNAPSHOT.exists():
            SNAPSHOT.write_text(json.dumps(tools, indent=1) + "\n", encoding="utf-8")
            pytest.fail("the snapshot was missing and has been written")
        assert tools == json.loads(SNAPSHOT.read_text(encoding="utf-8"))

    play(scenario)


def test_the_list_of_tools_is_small_enough_for_a_context_window(play: Play) -> None:
    async def scenario(client: Client) -> None:
        listed = (await client.list_tools()).model_dump_json(by_alias=True, exclude_none=True)
        assert len(listed) <= 20_000

    play(scenario)


def test_every_tool_has_a_title_all_four_hints_and_ranges_in_words(play: Play) -> None:
    async def scenario(client: Client) -> None:
        for tool in (await client.list_tools()).tools:
            assert tool.title
            hints = tool.annotations
            assert hints is not None
            assert None not in (
                hints.read_only_hint,
                hints.destructive_hint,
                hints.idempotent_hint,
                hints.open_world_hint,
            )
            wait = tool.input_schema["properties"]["max_wait_s"]
            assert "0 to 25" in wait["description"]
            assert tool.input_schema["additionalProperties"] is False

    play(scenario)


def test_the_instructions_name_the_order_of_work(play: Play) -> None:
    async def scenario(client: Client) -> None:
        assert "compile_verify" in (client.instructions or "")

    play(scenario)


# --- answers ---------------------------------------------------------------------------------------------------------
def test_an_accepted_kernel_gets_a_verdict_that_stands_alone(play: Play) -> None:
    async def scenario(client: Client) -> None:
        result = await client.call_tool("compile_verify", {"kernel": RELU, "problem": "relu"})
        assert isinstance(result, CallToolResult)
        verdict = result.structured_content
        assert verdict is not None
        assert verdict["status"] == "accepted"
        assert verdict["summary"]
        assert verdict["next_action"]
        assert verdict["warnings"] == []
        assert json.loads(result.content[0].text) == verdict  # type: ignore[union-attr]
        tool = next(tool for tool in (await client.list_tools()).tools if tool.name == "compile_verify")
        jsonschema.validate(verdict, tool.output_schema)

    play(scenario)


def test_a_wrong_kernel_is_an_answer_and_not_an_error(play: Play) -> None:
    async def scenario(client: Client) -> None:
        verdict = await answer(client, "compile_verify", kernel=WRONG_RELU, problem="relu")
        assert (verdict["status"], verdict["reason"]) == ("rejected", "wrong_values")
        assert verdict["first_mismatch"]["output"] == "y"

    play(scenario)


def test_what_takes_long_to_read_is_read_apart_from_the_answers_to_others(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[str] = []

    def noted(kind: Any, raw: Any, *, tool: str) -> Any:
        readers.append(threading.current_thread().name)
        return read(kind, raw, tool=tool)

    monkeypatch.setattr("optiml_mcp.server.read", noted)

    async def scenario(client: Client) -> None:
        launch = {"kernel": "relu", "grid": [1], "block": [1], "args": ["x"] * 20}
        for count in (1, 1000):
            kernel = {"source": RELU, "launches": [launch] * count}
            await client.call_tool("compile_verify", {"kernel": kernel, "problem": "relu"})
        assert readers[0] == threading.current_thread().name
        assert readers[1] != readers[0]

    play(scenario)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"source": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested deeper"),
        ('{"source": "a\\u0000b"}', "NUL"),
        ('{"source": "a\\ud800b"}', "lone surrogate"),
    ],
)
def test_what_json_text_stands_for_is_looked_at_like_any_other_argument(play: Play, text: str, fault: str) -> None:
    async def scenario(client: Client) -> None:
        told = await refusal(client, "compile_verify", kernel=text, problem="relu")
        assert told.startswith("invalid_params: kernel")
        assert fault in told

    play(scenario)


def test_a_kernel_sent_as_an_object_as_json_text_by_id_or_by_uri_is_the_same_kernel(play: Play) -> None:
    kernel = {
        "source": "__global__ void relu() {}",
        "launches": [{"kernel": "relu", "grid": [1], "block": [1], "args": []}],
    }

    async def scenario(client: Client) -> None:
        first = await answer(client, "compile_verify", kernel=kernel, problem="relu")
        text = await answer(client, "compile_verify", kernel=json.dumps(kernel), problem="relu")
        named = await answer(client, "compile_verify", kernel=first["kernel_id"], problem="relu")
        linked = await answer(client, "compile_verify", kernel=first["uri"], problem="optiml://problems/relu")
        assert first["kernel_id"] == text["kernel_id"] == named["kernel_id"] == linked["kernel_id"]

    play(scenario)


def test_a_second_profile_says_that_it_was_cached_and_how_long_the_server_took(play: Play) -> None:
    async def scenario(client: Client) -> None:
        first = await answer(client, "profile_ncu", kernel=RELU, problem="relu")
        second = await client.call_tool("profile_ncu", {"kernel": RELU, "problem": "relu"})
        assert isinstance(second, CallToolResult)
        assert first["cached"] is False
        assert second.structured_content is not None
        assert second.structured_content["cached"] is True
        assert second.meta is not None
        assert second.meta["optiml/seconds"] >= 0

    play(scenario)


def test_a_metric_that_is_not_known_is_null(play: Play) -> None:
    async def scenario(client: Client) -> None:
        profile = await answer(client, "profile_ncu", kernel=RELU, problem="relu")
        assert profile["metrics"]["sm__warps_active.avg"] is None
        assert "comparison" not in profile

    play(scenario)


def test_a_profile_against_a_baseline_carries_the_comparison(play: Play) -> None:
    async def scenario(client: Client) -> None:
        profile = await answer(client, "profile_ncu", kernel=FASTER_RELU, problem="relu", baseline=RELU)
        assert profile["comparison"]["verdict"] == "faster"

    play(scenario)


def test_a_report_is_read_instead_of_a_kernel_and_a_command_only_where_allowed(play: Play) -> None:
    async def scenario(client: Client) -> None:
        report = await answer(client, "profile_ncu", report="run.ncu-rep", kernel_regex="gemm")
        assert (report["kernels"][0]["name"], report["total"]) == ("gemm", 30)
        assert len(json.dumps(report)) <= 8000
        assert "--allow-commands" in await refusal(client, "profile_ncu", command=["./train"], launch_count=2)

    play(scenario)


def test_a_kernel_that_is_not_accepted_is_not_profiled(play: Play) -> None:
    async def scenario(client: Client) -> None:
        text = await refusal(client, "profile_ncu", kernel=WRONG_RELU, problem="relu")
        assert text.startswith("not_accepted: wrong_values: ")

    play(scenario)


def test_an_edit_is_judged(play: Play) -> None:
    async def scenario(client: Client) -> None:
        judgement = await answer(client, "judge_patch", problem="relu", before=RELU, after=FASTER_RELU)
        assert judgement["verdict"] == "try"
        assert judgement["diagnosis"]["kind"] == "memory"

    play(scenario)


def test_kernels_are_generated_from_plain_english(play: Play) -> None:
    async def scenario(client: Client) -> None:
        generated = await answer(client, "generate_kernel", intent="a relu", count=2)
        assert generated["status"] == "done"
        assert [item["verdict"]["status"] for item in generated["candidates"]] == ["accepted", "accepted"]

    play(scenario)


def test_an_intent_outside_the_catalogue_gets_a_template(play: Play) -> None:
    async def scenario(client: Client) -> None:
        generated = await answer(client, "generate_kernel", intent="fold proteins")
        assert generated["status"] == "needs_kernel"
        assert "__global__" in generated["template"]

    play(scenario)


def test_no_answer_is_larger_than_8_kb(play: Play) -> None:
    long = RELU + "\n".join(f"// {line}" for line in range(3000))

    async def scenario(client: Client) -> None:
        first = await answer(client, "compile_verify", kernel=long, problem="relu")
        started = await answer(client, "run_mcts", action="start", problem="relu", kernel=long)
        result = await answer(client, "run_mcts", action="result", run_id=started["run_id"])
        for reply in (first, result):
            assert size_of(reply) <= MAX_REPLY_BYTES
        assert result["baseline"]["kernel"]["source"] is None
        uri = next(note["uri"] for note in result["cut"] if note["path"] == "baseline.kernel.source")
        contents = (await client.read_resource(uri)).contents[0]
        assert "// 2999" in json.loads(contents.text)["kernel"]["source"]  # type: ignore[union-attr]

    play(scenario)


# --- bad input -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("era", ["auto"], indirect=True)  # the reading of arguments knows no era
@pytest.mark.parametrize(
    ("tool", "arguments", "code", "named"),
    [
        ("compile_verify", {"kernel": RELU}, "invalid_params", "problem"),
        ("compile_verify", {"problem": "relu"}, "invalid_params", "kernel"),
        ("compile_verify", {"kernal": RELU, "problem": "relu"}, "invalid_params", "'kernel'"),
        ("compile_verify", {"kernel": None, "problem": "relu"}, "invalid_params", "kernel"),
        ("compile_verify", {"kernel": 5, "problem": "relu"}, "invalid_params", "kernel"),
        ("compile_verify", {"kernel": {"source": None}, "problem": "relu"}, "invalid_params", "source"),
        ("compile_verify", {"kernel": {"sauce": RELU}, "problem": "relu"}, "invalid_params", "'source'"),
        ("compile_verify", {"kernel": RELU, "problem": "rellu"}, "unknown_problem", "'relu'"),
        ("compile_verify", {"kernel": "0123456789abcdef", "problem": "relu"}, "unknown_kernel", "0123456789abcdef"),
        ("compile_verify", {"kernel": RELU, "problem": "relu", "level": "L9"}, "invalid_params", "level"),
        ("compile_verify", {"kernel": RELU, "problem": "relu", "max_wait_s": "1"}, "invalid_params", "max_wait_s"),
        ("compile_verify", {"kernel": RELU, "problem": "relu", "max_wait_s": 26}, "invalid_params", "max_wait_s"),
        ("compile_verify", {"kernel": RELU, "problem": "relu", "seed": 2**63}, "invalid_params", "seed"),
        ("compile_verify", {"kernel": RELU, "problem": "relu", "axes": {"n": "7"}}, "invalid_params", "axes.n"),
        ("compile_verify", {"kernel": RELU, "problem": "relu", "axes": {"n": -1}}, "invalid_params", "n"),
        ("compile_verify", {"kernel": RELU, "problem": "relu", "axes": {"n": 2**63}}, "invalid_params", "n"),
        ("compile_verify", {"kernel": RELU, "problem": "relu", "axes": {"m": 1}}, "invalid_params", "'m'"),
        ("compile_verify", {"kernel": RELU, "problem": "relu", "dtype": "f32"}, "invalid_params", "dtype"),
        ("compile_verify", {"kernel": RELU, "problem": "relu", "arch": "sm_80 -o /x"}, "invalid_params", "arch"),
        ("compile_verify", {"kernel": RELU + "\0", "problem": "relu"}, "invalid_params", "NUL"),
        ("compile_verify", {"kernel": RELU + "\ufffd", "problem": "relu"}, "invalid_params", "UTF-8"),
        ("compile_verify", {"kernel": {"source": "x" * (1 << 21)}, "problem": "relu"}, "too_large", "source"),
        ("compile_verify", {"job_id": "j-0"}, "invalid_params", "j-0"),
        ("profile_ncu", {"kernel": RELU, "problem": "relu", "kernel_regex": "x"}, "invalid_params", "kernel_regex"),
        ("profile_ncu", {"report": "x.ncu-rep", "kernel": RELU}, "invalid_params", "kernel"),
        ("profile_ncu", {"report": "x.ncu-rep", "command": ["ls"]}, "invalid_params", "report"),
        ("judge_patch", {"problem": "relu", "before": RELU}, "invalid_params", "after"),
        ("judge_patch", {"problem": "relu", "before": RELU, "after": RELU, "judge": "x"}, "model_unavailable", "rules"),
        ("generate_kernel", {}, "invalid_params", "intent"),
        ("generate_kernel", {"intent": "relu", "count": 0}, "invalid_params", "count"),
        ("run_mcts", {}, "invalid_params", "action"),
        ("run_mcts", {"action": "go"}, "invalid_params", "'start'"),
        ("run_mcts", {"action": "start"}, "invalid_params", "problem"),
        ("run_mcts", {"action": "start", "problem": "relu", "budget": {"evals": 3}}, "invalid_params", "'evaluations'"),
        ("run_mcts", {"action": "start", "problem": "relu", "budget": {"evaluations": 0}}, "invalid_params", "budget"),
        ("run_mcts", {"action": "start", "problem": "relu", "proposer": "chat"}, "model_unavailable", "builtin"),
        ("run_mcts", {"action": "tell", "run_id": "r-1"}, "invalid_params", "proposals"),
        ("run_mcts", {"action": "step", "run_id": "r-1", "proposals": []}, "invalid_params", "tell"),
        ("run_mcts", {"action": "tell", "run_id": "r-1", "proposals": []}, "unknown_run", "r-1"),
        ("run_mcts", {"action": "status"}, "invalid_params", "run_id"),
        ("run_mcts", {"action": "status", "run_id": "../../etc/passwd"}, "unknown_run", "list"),
        ("run_mcts", {"action": "status", "run_id": "r-99"}, "unknown_run", "r-99"),
        ("compile_all", {}, "invalid_params", "compile_verify"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_and_the_next_call_works(
    play: Play, tool: str, arguments: dict[str, Any], code: str, named: str
) -> None:
    async def scenario(client: Client) -> None:
        text = await refusal(client, tool, **arguments)
        assert text.startswith(f"{code}: ")
        assert named in text
        assert "Traceback" not in text
        assert "pydantic" not in text
        assert (await answer(client, "compile_verify", kernel=RELU, problem="relu"))["status"] == "accepted"

    play(scenario)


def test_a_source_of_50_mb_is_refused_before_the_workbench_sees_it(play: Play, bench: FakeWorkbench) -> None:
    async def scenario(client: Client) -> None:
        text = await refusal(client, "compile_verify", kernel="x" * 50_000_000, problem="relu")
        assert text.startswith("too_large: kernel has 50000000 characters")
        assert bench.calls == []

    play(scenario)


def test_arguments_nested_too_deeply_are_refused(play: Play) -> None:
    nested: dict[str, Any] = {}
    for _ in range(200):
        nested = {"x": nested}

    async def scenario(client: Client) -> None:
        assert "nested deeper" in await refusal(client, "compile_verify", kernel=nested, problem="relu")

    play(scenario)


def test_a_defect_of_ours_says_nothing_of_its_inside(
    play: Play, bench: FakeWorkbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(bench, "verify", broken)

    async def scenario(client: Client) -> None:
        text = await refusal(client, "compile_verify", kernel=RELU, problem="relu")
        assert text.startswith("internal: compile_verify")
        assert "secret" not in text

    play(scenario)


# --- what the tools say of themselves --------------------------------------------------------------------------------
def test_the_hints_follow_what_the_user_has_set_up(bench: FakeWorkbench) -> None:
    async def hints(**set_up: bool) -> dict[str, tuple[bool | None, ...]]:
        async with Client(build_server(lambda: bench, **set_up)) as client:  # type: ignore[arg-type, return-value]
            listed = {tool.name: tool.annotations for tool in (await client.list_tools()).tools}
        return {
            name: (said.read_only_hint, said.destructive_hint, said.idempotent_hint, said.open_world_hint)
            for name, said in listed.items()
            if said is not None
        }

    plain = anyio.run(lambda: hints())
    assert [said[3] for said in plain.values()] == [False] * 5
    commands = anyio.run(lambda: hints(allow_commands=True))
    assert commands["profile_ncu"] == (False, True, False, True)
    assert {name for name in plain if plain[name] != commands[name]} == {"profile_ncu"}
    models = anyio.run(lambda: hints(asks_models=True))
    assert {name for name, said in models.items() if said[3]} == {"generate_kernel", "judge_patch", "run_mcts"}


def test_starting_the_server_loads_no_library_that_only_a_tool_needs() -> None:
    heavy = ("torch", "transformers", "pycuda", "ncu_report", "numpy", "cuda", "httpx", "diskcache", "tree_sitter")
    program = (
        "import sys, optiml_mcp.__main__; from optiml_mcp.server import build_server; build_server(lambda: None)\n"
        f"print([name for name in {(*heavy, 'optiml.workbench')} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


# --- long calls ------------------------------------------------------------------------------------------------------
SLOW = RELU + "// slow\n"


def test_a_call_that_outlasts_its_wait_is_pending_and_goes_on_by_its_job(play: Play, bench: FakeWorkbench) -> None:
    async def scenario(client: Client) -> None:
        pending = await answer(client, "compile_verify", kernel=SLOW, problem="relu", max_wait_s=0)
        assert pending["status"] == "pending"
        assert pending["job_id"] in pending["next_action"]
        again = await answer(client, "compile_verify", job_id=pending["job_id"], max_wait_s=0)
        assert again["status"] == "pending"
        bench.gate.set()
        verdict = await answer(client, "compile_verify", job_id=pending["job_id"])
        assert verdict["status"] == "accepted"
        assert await answer(client, "compile_verify", job_id=pending["job_id"]) == verdict

    play(scenario)


def test_the_same_call_again_joins_the_running_job(play: Play, bench: FakeWorkbench) -> None:
    async def scenario(client: Client) -> None:
        first = await answer(client, "compile_verify", kernel=SLOW, problem="relu", max_wait_s=0)
        second = await answer(client, "compile_verify", kernel=SLOW, problem="relu", max_wait_s=0.01)
        assert first["job_id"] == second["job_id"]
        bench.gate.set()
        await answer(client, "compile_verify", job_id=first["job_id"])
        assert bench.calls == ["verify"]

    play(scenario)


def test_a_job_belongs_to_the_tool_that_started_it(play: Play) -> None:
    async def scenario(client: Client) -> None:
        pending = await answer(client, "compile_verify", kernel=SLOW, problem="relu", max_wait_s=0)
        assert "belongs to compile_verify" in await refusal(client, "profile_ncu", job_id=pending["job_id"])

    play(scenario)


def test_a_cancelled_call_leaves_its_job_running(play: Play, bench: FakeWorkbench) -> None:
    async def scenario(client: Client) -> None:
        pending = await answer(client, "compile_verify", kernel=SLOW, problem="relu", max_wait_s=0)
        with anyio.move_on_after(0.1):
            await client.call_tool("compile_verify", {"job_id": pending["job_id"]})
        bench.gate.set()
        assert (await answer(client, "compile_verify", job_id=pending["job_id"]))["status"] == "accepted"

    play(scenario)


def test_a_job_that_fails_reports_its_error_to_whoever_asks(play: Play, bench: FakeWorkbench) -> None:
    async def scenario(client: Client) -> None:
        pending = await answer(client, "profile_ncu", kernel=WRONG_RELU + "// slow", problem="relu", max_wait_s=0)
        bench.gate.set()
        assert (await refusal(client, "profile_ncu", job_id=pending["job_id"])).startswith("not_accepted: ")

    play(scenario)


def test_progress_strictly_increases_while_a_call_waits(
    play: Play, bench: FakeWorkbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optiml_mcp.jobs.PROGRESS_EVERY_S", 0.02)
    seen: list[float] = []
    enough = threading.Event()

    async def note(progress: float, total: float | None, message: str | None) -> None:
        seen.append(progress)
        if len(seen) >= 3:
            bench.gate.set()
            enough.set()

    async def scenario(client: Client) -> None:
        await client.call_tool("compile_verify", {"kernel": SLOW, "problem": "relu"}, progress_callback=note)
        assert enough.is_set()
        assert seen == sorted(set(seen))

    play(scenario)


# --- searches --------------------------------------------------------------------------------------------------------
def stepwise(bench: FakeWorkbench) -> threading.Semaphore:
    """Let the search of this bench try a kernel only when the test releases one."""
    bench.evaluate = threading.Semaphore(0)
    return bench.evaluate


def test_a_search_starts_steps_and_ends_with_a_result(play: Play, bench: FakeWorkbench) -> None:
    release = stepwise(bench)

    async def scenario(client: Client) -> None:
        started = await answer(client, "run_mcts", action="start", problem="relu", budget={"evaluations": 2}, seed=1)
        run_id = started["run_id"]
        assert started["status"] == "running"
        assert run_id in started["next_action"]
        waiting = await answer(client, "run_mcts", action="step", run_id=run_id, max_wait_s=0)
        assert (waiting["status"], waiting["evaluations"]) == ("running", 0)
        release.release(2)
        state = waiting
        while state["status"] == "running":
            state = await answer(client, "run_mcts", action="step", run_id=run_id)
        assert state["status"] == "finished"
        result = await answer(client, "run_mcts", action="result", run_id=run_id)
        assert result["speedup"] == {"median": 2.0, "ci95": None, "source": "modelled"}
        assert result["path"][0]["edit"] == "retune"
        listed = await answer(client, "run_mcts", action="list")
        assert [run["run_id"] for run in listed["runs"]] == [run_id]

    play(scenario)


def test_the_result_of_a_running_search_is_the_best_so_far(play: Play, bench: FakeWorkbench) -> None:
    release = stepwise(bench)

    async def scenario(client: Client) -> None:
        run_id = (await answer(client, "run_mcts", action="start", problem="relu"))["run_id"]
        before = await answer(client, "run_mcts", action="result", run_id=run_id)
        assert before["speedup"]["median"] == 1.0
        release.release(3)
        while (await answer(client, "run_mcts", action="step", run_id=run_id, max_wait_s=0.1))["evaluations"] < 3:
            pass
        assert (await answer(client, "run_mcts", action="result", run_id=run_id))["speedup"]["median"] == 2.0

    play(scenario)


def test_a_cancelled_waiting_call_does_not_cancel_the_search(play: Play, bench: FakeWorkbench) -> None:
    release = stepwise(bench)

    async def scenario(client: Client) -> None:
        run_id = (await answer(client, "run_mcts", action="start", problem="relu", budget={"evaluations": 1}))["run_id"]
        with anyio.move_on_after(0.1):
            await client.call_tool("run_mcts", {"action": "step", "run_id": run_id})
        release.release(1)
        state = await answer(client, "run_mcts", action="step", run_id=run_id)
        while state["status"] == "running":
            state = await answer(client, "run_mcts", action="step", run_id=run_id)
        assert state["status"] == "finished"

    play(scenario)


def test_cancel_stops_a_search_for_good(play: Play, bench: FakeWorkbench) -> None:
    release = stepwise(bench)

    async def scenario(client: Client) -> None:
        run_id = (await answer(client, "run_mcts", action="start", problem="relu"))["run_id"]
        release.release(1)
        await answer(client, "run_mcts", action="step", run_id=run_id)
        release.release(100)  # whatever is left: the search looks at `should_stop` first
        cancelled = await answer(client, "run_mcts", action="cancel", run_id=run_id)
        assert cancelled["status"] in ("cancelled", "finished")
        again = await answer(client, "run_mcts", action="status", run_id=run_id)
        assert again["status"] == cancelled["status"]

    play(scenario)


def test_a_search_left_by_an_earlier_server_goes_on_at_the_first_step(play: Play, bench: FakeWorkbench) -> None:
    run_id = bench.start_search("relu", evaluations=2)

    async def scenario(client: Client) -> None:
        state = await answer(client, "run_mcts", action="status", run_id=run_id)
        while state["status"] == "running":
            state = await answer(client, "run_mcts", action="step", run_id=run_id)
        assert (state["status"], state["evaluations"]) == ("finished", 2)

    play(scenario)


def test_a_search_whose_kernel_is_wrong_fails_with_not_accepted(play: Play) -> None:
    async def scenario(client: Client) -> None:
        run_id = (await answer(client, "run_mcts", action="start", problem="relu", kernel=WRONG_RELU))["run_id"]
        state = await answer(client, "run_mcts", action="step", run_id=run_id)
        assert state["status"] == "failed"
        assert state["summary"].startswith("not_accepted: wrong_values")

    play(scenario)


def test_a_search_whose_folder_cannot_be_written_says_so_and_goes_on_when_it_is_stepped_again(
    play: Play, bench: FakeWorkbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried_out, full = bench.run_search, threading.Event()
    full.set()

    def run_search(run_id: str, **options: Any) -> Any:
        if full.is_set():
            raise SetupError("the run cannot be written (No space left on device)", code="busy")
        return carried_out(run_id, **options)

    monkeypatch.setattr(bench, "run_search", run_search)

    async def scenario(client: Client) -> None:
        started = await answer(client, "run_mcts", action="start", problem="relu", budget={"evaluations": 2})
        run_id = started["run_id"]
        state = await answer(client, "run_mcts", action="step", run_id=run_id)
        assert state["status"] == "failed"
        assert state["summary"].startswith("busy: the run cannot be written")
        assert f"action=step and run_id={run_id}" in state["next_action"]
        assert (await answer(client, "run_mcts", action="status", run_id=run_id))["status"] == "failed"
        full.clear()
        while (state := await answer(client, "run_mcts", action="step", run_id=run_id))["status"] == "running":
            pass
        assert (state["status"], state["evaluations"]) == ("finished", 2)

    play(scenario)


def test_cancelling_a_search_of_another_server_says_who_ends_it(
    play: Play, bench: FakeWorkbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = bench.start_search("relu", evaluations=2)
    monkeypatch.setattr(bench, "cancel_search", lambda _: None)  # it is noted, and the other server has not looked yet

    async def scenario(client: Client) -> None:
        state = await answer(client, "run_mcts", action="cancel", run_id=run_id)
        assert state["summary"].startswith("Another server")
        assert "action=result" in state["next_action"]

    play(scenario)


def test_a_failed_search_can_still_be_cancelled(
    play: Play, bench: FakeWorkbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_search(run_id: str, **_: Any) -> Any:
        raise SetupError("the run cannot be written (No space left on device)", code="busy")

    monkeypatch.setattr(bench, "run_search", run_search)

    async def scenario(client: Client) -> None:
        run_id = (await answer(client, "run_mcts", action="start", problem="relu"))["run_id"]
        assert (await answer(client, "run_mcts", action="step", run_id=run_id))["status"] == "failed"
        assert (await answer(client, "run_mcts", action="cancel", run_id=run_id))["status"] == "cancelled"
        assert (await answer(client, "run_mcts", action="step", run_id=run_id))["status"] == "cancelled"

    play(scenario)


def test_the_result_says_where_the_best_kernel_was_written(play: Play) -> None:
    async def scenario(client: Client) -> None:
        started = await answer(
            client, "run_mcts", action="start", problem="relu", budget={"evaluations": 2}, write_to="best.cu"
        )
        state = started
        while state["status"] == "running":
            state = await answer(client, "run_mcts", action="step", run_id=started["run_id"])
        result = await answer(client, "run_mcts", action="result", run_id=started["run_id"])
        assert result["written_to"] == "best.cu"

    play(scenario)


def test_the_eleventh_search_is_told_to_wait(play: Play, bench: FakeWorkbench) -> None:
    stepwise(bench)

    async def scenario(client: Client) -> None:
        for _ in range(10):
            await answer(client, "run_mcts", action="start", problem="relu")
        assert (await refusal(client, "run_mcts", action="start", problem="relu")).startswith("busy: ")

    play(scenario)


def test_searches_that_share_a_thread_take_turns(
    play: Play, bench: FakeWorkbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optiml_mcp.runs.TURN_S", 0.0)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    release = stepwise(bench)

    async def scenario(client: Client) -> None:
        started = [await answer(client, "run_mcts", action="start", problem="relu") for _ in range(3)]
        ids = [reply["run_id"] for reply in started]
        counts = [0, 0, 0]
        while sum(counts) < 6:
            release.release()
            states = [await answer(client, "run_mcts", action="status", run_id=run_id) for run_id in ids]
            counts = [state["evaluations"] for state in states]
        assert min(counts) >= 1

    play(scenario)


def test_the_workbench_is_made_late_and_closed_with_the_server(play: Play, bench: FakeWorkbench) -> None:
    async def scenario(client: Client) -> None:
        await client.list_tools()
        assert bench.calls == []
        await answer(client, "compile_verify", kernel=RELU, problem="relu")

    play(scenario)
    assert bench.closed
