"""The server as a program on stdin and stdout: nothing but the protocol on stdout, and it always ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import RELU

HERE = Path(__file__).parent
LIMIT_S = 60


class Program:
    """A running server, spoken to line by line."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "fake_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(HERE.parent)},
        )

    def send(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def request(self, identifier: int, method: str, **params: Any) -> None:
        self.send(json.dumps({"jsonrpc": "2.0", "id": identifier, "method": method, "params": params}).encode())

    def reply(self) -> dict[str, Any]:
        """The next message; every line of stdout must be one."""
        assert self.process.stdout is not None
        message: dict[str, Any] = json.loads(self.process.stdout.readline())
        assert message["jsonrpc"] == "2.0"
        return message

    def greet(self) -> None:
        client = {"name": "test", "version": "1"}
        self.request(1, "initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo=client)
        assert self.reply()["result"]["serverInfo"]["name"] == "optiml"
        self.send(b'{"jsonrpc":"2.0","method":"notifications/initialized"}')

    def call(self, identifier: int, tool: str, **arguments: Any) -> None:
        self.request(identifier, "tools/call", name=tool, arguments=arguments)

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(timeout=LIMIT_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=LIMIT_S)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@pytest.fixture
def program() -> Iterator[Program]:
    running = Program()
    yield running
    running.kill()


@pytest.fixture(scope="module")
def session() -> Iterator[Program]:
    """One server for all tests of bad lines: each of them must leave it working."""
    running = Program()
    running.greet()
    yield running
    running.kill()


def test_a_session_ends_with_status_0_at_end_of_input(program: Program) -> None:
    program.greet()
    program.call(2, "compile_verify", kernel=RELU, problem="relu")
    assert program.reply()["result"]["structuredContent"]["status"] == "accepted"
    assert program.end() == 0
    assert program.process.stdout is not None
    assert program.process.stdout.read() == b""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_even_while_a_call_runs(program: Program, number: signal.Signals) -> None:
    program.greet()
    program.call(2, "compile_verify", kernel=RELU + "// slow", problem="relu", max_wait_s=0)
    assert program.reply()["result"]["structuredContent"]["status"] == "pending"
    program.process.send_signal(number)
    assert program.process.wait(timeout=LIMIT_S) == 128 + number


def test_end_of_input_during_a_call_ends_it(program: Program) -> None:
    program.greet()
    program.call(2, "compile_verify", kernel=RELU + "// slow", problem="relu")
    assert program.end() == 0


def test_it_ends_when_its_parent_is_killed_though_its_input_stays_open() -> None:
    starter = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, {str(HERE / 'fake_server.py')!r}])\n"
        "time.sleep(60)\n"
    )
    reader, writer = os.pipe()
    parent = subprocess.Popen(
        [sys.executable, "-c", starter],
        stdin=reader,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(HERE.parent)},
    )
    os.close(reader)
    assert parent.stdout is not None
    greeting = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    message = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": greeting}
    os.write(writer, json.dumps(message).encode() + b"\n")
    assert parent.stdout.readline()
    parent.kill()
    assert parent.stdout.read() == b""  # ends when the last holder of the pipe, the server, is gone
    parent.communicate(timeout=LIMIT_S)
    os.close(writer)


def test_a_line_that_is_no_json_gets_a_parse_error_and_the_next_call_works(session: Program) -> None:
    session.send(b'{"jsonrpc":"2.0","id":2,')
    assert session.reply()["error"]["code"] == -32700
    session.call(3, "compile_verify", kernel=RELU, problem="relu")
    assert session.reply()["id"] == 3


def test_a_lone_surrogate_in_a_call_is_answered_under_its_id(session: Program) -> None:
    session.send(
        b'{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"compile_verify",'
        b'"arguments":{"kernel":"x\\ud800","problem":"relu"}}}'
    )
    reply = session.reply()
    assert reply["id"] == 7
    assert reply["result"]["content"][0]["text"].startswith("invalid_params: kernel holds a lone surrogate")


def test_bytes_that_are_no_utf_8_are_refused(session: Program) -> None:
    session.send(
        b'{"jsonrpc":"2.0","id":8,"method":"tools/call","params":{"name":"compile_verify",'
        b'"arguments":{"kernel":"x \xff\xfe","problem":"relu"}}}'
    )
    assert "not valid UTF-8" in session.reply()["result"]["content"][0]["text"]


def test_a_message_of_50_mb_is_refused_by_size(session: Program) -> None:
    session.call(9, "compile_verify", kernel="x" * 50_000_000, problem="relu")
    assert session.reply()["result"]["content"][0]["text"].startswith("too_large: ")
    session.call(10, "run_mcts", action="list")
    assert session.reply()["id"] == 10
