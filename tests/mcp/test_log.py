"""The server's log: on stderr, a line for each call, with ids and without sources."""

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from calls import answer, refusal
from fakes import RELU
from mcp import Client

from optiml_mcp.log import JsonLines, Text, fields, log_to_stderr

Play = Callable[[Callable[[Client], Any]], None]


@pytest.fixture
def stderr(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """What the log has written so far, each part once."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield lambda: capsys.readouterr().err
    root.handlers[:] = handlers
    root.setLevel(level)


def test_each_call_is_one_line_of_json_with_ids_and_without_its_source(play: Play, stderr: Callable[[], str]) -> None:
    log_to_stderr(form="json", level="info")

    async def scenario(client: Client) -> None:
        verdict = await answer(client, "compile_verify", kernel=RELU, problem="relu")
        await refusal(client, "compile_verify", kernel=RELU, problem="rleu")
        run_id = (await answer(client, "run_mcts", action="start", problem="relu"))["run_id"]
        written = stderr()
        lines = [json.loads(line) for line in written.splitlines()]
        calls = [line for line in lines if line["message"] == "call"]
        assert [line["outcome"] for line in calls] == ["answered", "unknown_problem", "answered"]
        assert calls[0]["kernel_id"] == verdict["kernel_id"]
        assert calls[0]["bytes"] > 0
        assert calls[2]["run_id"] == run_id
        assert "__global__" not in written

    play(scenario)


def test_warnings_only_unless_more_is_asked_for(play: Play, stderr: Callable[[], str]) -> None:
    log_to_stderr(form="text", level="warning")

    async def scenario(client: Client) -> None:
        await answer(client, "compile_verify", kernel=RELU, problem="relu")
        assert stderr() == ""

    play(scenario)


def test_a_traceback_stays_in_its_line() -> None:
    record = logging.LogRecord("a.b", logging.ERROR, "f.py", 1, "it broke: %s", ("x",), None)
    vars(record).update(fields(run_id="r-1", absent=None))
    assert Text().format(record) == "ERROR a.b: it broke: x run_id=r-1"
    try:
        raise ValueError("inside")
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    line = JsonLines().format(record)
    assert "\n" not in line
    read = json.loads(line)
    assert (read["level"], read["logger"], read["message"], read["run_id"]) == ("error", "a.b", "it broke: x", "r-1")
    assert "absent" not in read
    assert "ValueError: inside" in read["traceback"]
