"""HTTP: what is refused before any tool runs, and a client that gets through."""

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx2
import pytest
from calls import answer
from fakes import RELU, FakeWorkbench
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from optiml.errors import InvalidInput
from optiml_mcp.http import LOOPBACK, MemorySwept, http_app, parse_address, read_token, served_names
from optiml_mcp.server import build_server

TOKEN = "a-token-of-some-length"
URL = "http://127.0.0.1:8765/mcp"
GOOD = {"Authorization": f"Bearer {TOKEN}"}
ACCEPTED = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
PING = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[httpx2.AsyncClient]:
    """A client whose requests go straight into the app, with its lifespan running."""
    async with (
        serving_app() as app,
        client_of(app) as client,
    ):
        yield client


def client_of(app: ASGIApp) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), headers=GOOD)


@contextlib.asynccontextmanager
async def serving_app(names: Sequence[str] = LOOPBACK) -> AsyncIterator[ASGIApp]:
    """The app with its lifespan running."""
    app: ASGIApp = http_app(build_server(FakeWorkbench), TOKEN, names=names)  # type: ignore[arg-type]
    to_app, from_test = anyio.create_memory_object_stream[dict[str, Any]](8)
    started, stopped = anyio.Event(), anyio.Event()

    async def receive() -> dict[str, Any]:
        return await from_test.receive()

    async def send(message: Any) -> None:
        (started if message["type"] == "lifespan.startup.complete" else stopped).set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(app, {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)
        await to_app.send({"type": "lifespan.startup"})
        with anyio.fail_after(60):
            await started.wait()
        yield app
        await to_app.send({"type": "lifespan.shutdown"})
        with anyio.fail_after(60):
            await stopped.wait()
        tasks.cancel_scope.cancel()
    to_app.close()
    from_test.close()


async def status_of(**changes: Any) -> int:
    headers = ACCEPTED
    async with serving() as client:
        body = changes.pop("content", json.dumps(PING))
        response = await client.post(URL, content=body, headers=headers | changes)
        return int(response.status_code)


@pytest.mark.parametrize(
    ("header", "value", "status"),
    [
        ("Authorization", "", 401),
        ("Authorization", "Bearer wrong", 401),
        ("Authorization", f"Basic {TOKEN}", 401),
        ("Host", "evil.example", 421),
        ("Origin", "https://evil.example", 403),
        ("Origin", "null", 403),
        ("Content-Type", "text/plain", 415),
        ("MCP-Protocol-Version", "1999-01-01", 400),
    ],
)
def test_a_foreign_request_is_refused_before_any_tool_runs(header: str, value: str, status: int) -> None:
    async def play() -> None:
        assert await status_of(**{header: value}) == status

    anyio.run(play)


def test_a_body_over_the_limit_is_refused() -> None:
    async def play() -> None:
        assert await status_of(content=b" " * (5 << 20)) == 413

    anyio.run(play)


@pytest.mark.parametrize("era", ["auto", "legacy"])
def test_a_client_with_the_token_uses_the_tools(era: str) -> None:
    async def play() -> None:
        async with (
            serving() as http,
            Client(streamable_http_client(URL, http_client=http), mode=era) as client,  # type: ignore[arg-type]
        ):
            verdict = await answer(client, "compile_verify", kernel=RELU, problem="relu")
            assert verdict["status"] == "accepted"

    anyio.run(play)


@pytest.mark.parametrize("text", ["8765", "127.0.0.1:0", "127.0.0.1:99999", ":80", "a b:80", "[::1:80"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="HOST:PORT"):
        parse_address(text)


@pytest.mark.parametrize("text", ["0.0.0.0:8765", "example.com:80", "[::]:80", "192.0.2.1:8765"])
def test_other_machines_are_let_in_only_with_a_token_that_the_user_chose(text: str) -> None:
    address = parse_address(text)
    environment = {"OPTIML_HTTP_HOSTS": "gpu.example, 192.0.2.1"}
    with pytest.raises(InvalidInput, match="OPTIML_HTTP_TOKEN_FILE"):
        served_names(address, token_made_up=True, environment=environment)
    assert "gpu.example" in served_names(address, token_made_up=False, environment=environment)


def test_listening_on_every_address_needs_the_names_that_clients_use() -> None:
    with pytest.raises(InvalidInput, match="OPTIML_HTTP_HOSTS"):
        served_names(parse_address("0.0.0.0:8765"), token_made_up=False, environment={})
    with pytest.raises(InvalidInput, match="no host name"):
        served_names(parse_address("a.b:1"), token_made_up=False, environment={"OPTIML_HTTP_HOSTS": "*"})
    assert served_names(parse_address("localhost:1"), token_made_up=True, environment={}) == list(LOOPBACK)


def test_a_client_of_another_machine_needs_the_token_and_the_right_name() -> None:
    async def play() -> None:
        async with serving_app(names=("gpu.example",)) as app, client_of(app) as client:
            statuses = [
                (await client.post(url, json=PING, headers={**ACCEPTED, **headers})).status_code
                for url, headers in (
                    ("http://gpu.example:8765/mcp", {"Authorization": ""}),
                    ("http://gpu.example:8765/mcp", {}),
                    ("http://gpu.example:8765/mcp", {"Origin": "http://gpu.example:8765"}),
                    ("http://other.example:8765/mcp", {}),
                    ("http://gpu.example:8765/mcp", {"Origin": "http://other.example"}),
                )
            ]
            assert statuses == [401, 200, 200, 421, 403]

    anyio.run(play)


def test_a_token_is_made_up_unless_one_is_given() -> None:
    assert read_token({"OPTIML_HTTP_TOKEN": TOKEN}) == (TOKEN, False)
    made, made_up = read_token({})
    assert made_up
    assert made != read_token({})[0]
    with pytest.raises(InvalidInput, match="at least 16"):
        read_token({"OPTIML_HTTP_TOKEN": "short"})


def test_a_token_in_the_address_opens_nothing() -> None:
    async def play() -> None:
        async with serving() as client:
            for url in (f"{URL}?token={TOKEN}", f"{URL}?access_token={TOKEN}&authorization=Bearer%20{TOKEN}"):
                response = await client.post(url, content=json.dumps(PING), headers={"Authorization": ""})
                assert response.status_code == 401
                assert TOKEN not in response.text

    anyio.run(play)


def test_a_batch_is_refused_whole() -> None:
    async def play() -> None:
        assert await status_of(content=json.dumps([PING] * 10_000)) == 400

    anyio.run(play)


@pytest.mark.parametrize("session", ["no-such-session", "x" * 5000])
def test_an_invented_session_opens_nothing(session: str) -> None:
    """Sessions are not kept: the header is neither looked up nor answered, and the token still decides."""

    async def play() -> None:
        assert await status_of(**{"Mcp-Session-Id": session}) == 200
        assert await status_of(**{"Mcp-Session-Id": session, "Authorization": "Bearer wrong"}) == 401

    anyio.run(play)


def test_a_client_that_comes_back_for_lost_events_is_told_that_none_are_kept() -> None:
    async def play() -> None:
        async with serving() as client:
            response = await client.get(URL, headers={"Accept": "text/event-stream", "Last-Event-ID": "7"})
            assert response.status_code == 405
            assert "send the request again" in response.text

    anyio.run(play)


def test_a_body_that_never_ends_is_cut_off_at_the_limit() -> None:
    """Fed by hand: the application must answer, and stop reading, while more is still to come."""

    async def play() -> None:
        chunk, fed, statuses = b" " * (1 << 20), 0, []

        async def receive() -> dict[str, Any]:
            nonlocal fed
            fed += len(chunk)
            assert fed < 64 << 20
            return {"type": "http.request", "body": chunk, "more_body": True}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        headers = [
            (b"authorization", f"Bearer {TOKEN}".encode()), (b"host", b"127.0.0.1:8765"),
            (b"content-type", b"application/json"), (b"accept", b"application/json, text/event-stream"),
            (b"transfer-encoding", b"chunked"),
        ]  # fmt: skip
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": "/mcp", "raw_path": b"/mcp", "query_string": b"", "root_path": "", "headers": headers,
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8765),
        }  # fmt: skip
        async with serving_app() as app:
            with anyio.fail_after(60):
                await app(scope, receive, send)
        assert statuses == [413]

    anyio.run(play)


def test_anybody_may_ask_whether_it_lives_and_learns_nothing_else() -> None:
    async def play() -> None:
        async with serving() as client:
            response = await client.get("http://127.0.0.1:8765/healthz", headers={"Authorization": ""})
            assert (response.status_code, response.text) == (200, "ok")
            assert (
                await client.post("http://127.0.0.1:8765/healthz", headers={"Authorization": ""})
            ).status_code == 401

    anyio.run(play)


def test_the_token_may_stand_in_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text(TOKEN + "\n")
    secret.chmod(0o600)
    environment = {"OPTIML_HTTP_TOKEN_FILE": str(secret)}
    assert read_token(environment) == (TOKEN, False)
    secret.chmod(0o644)
    with pytest.raises(InvalidInput, match="chmod 600") as caught:
        read_token(environment)
    assert str(tmp_path) not in str(caught.value)
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_token({"OPTIML_HTTP_TOKEN_FILE": str(tmp_path / "none")})


def test_garbage_is_collected_once_soon_after_large_messages_and_not_after_small_ones() -> None:
    async def check() -> None:
        swept: list[int] = []
        done = anyio.Event()

        def sweep() -> None:
            swept.append(1)
            done.set()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await receive()

        async def send(message: Message) -> None: ...

        async def post(size: int) -> None:
            async def receive() -> Message:
                return {"type": "http.request", "body": bytes(size)}

            await served({"type": "http"}, receive, send)

        served = MemorySwept(app, after_s=0.0, sweep=sweep)
        await post(100)
        await anyio.lowlevel.checkpoint()
        assert not swept
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post, 1 << 20)
            tasks.start_soon(post, 1 << 20)
        with anyio.fail_after(10):
            await done.wait()
        await anyio.lowlevel.checkpoint()
        assert swept == [1]

    anyio.run(check)
