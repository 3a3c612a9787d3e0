"""Chat endpoints that misbehave: whatever they do, a call ends in time with texts or with one named error."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import httpx
import pytest

from optiml.errors import ModelFailed
from optiml.llm.chat import ChatModel
from optiml.llm.model import Message
from optiml.settings import ModelEndpoint

KEY = "sk-very-secret-0123456789"
ASK = (Message(role="system", text="be brief"), Message(role="user", text="hello"))
GOOD = {
    "choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 2},
}


def settings(**fields: Any) -> ModelEndpoint:
    return ModelEndpoint(**{"name": "m", "url": "https://host/v1", "key_env": "THE_KEY", **fields})


class Script:
    """A transport that gives one answer after the other, and remembers requests and pauses."""

    def __init__(self, *answers: httpx.Response | Exception | Callable[[dict[str, Any]], httpx.Response]) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []
        self.pauses: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        response = answer(json.loads(request.content)) if callable(answer) else answer
        if not response.is_closed:
            return response  # with a stream of its own
        return httpx.Response(response.status_code, headers=response.headers, stream=httpx.ByteStream(response.content))

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def model(self, **fields: Any) -> ChatModel:
        return ChatModel(settings(**fields), transport=httpx.MockTransport(self), sleep=self.sleep, jitter=lambda: 1.0)


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", KEY)


def ok(answer: object = GOOD) -> httpx.Response:
    return httpx.Response(200, json=answer)


# --- what is asked, and what comes back ------------------------------------------------------------------------------
def test_a_completion_carries_text_reason_and_tokens() -> None:
    script = Script(ok())
    (found,) = script.model().complete(ASK, stop=("END",), temperature=0.5, seed=3, max_tokens=9)
    assert (found.text, found.finish_reason, found.tokens_in, found.tokens_out) == ("hi", "stop", 7, 2)
    assert str(script.requests[0].url) == "https://host/v1/chat/completions"
    assert script.requests[0].headers["authorization"] == f"Bearer {KEY}"
    assert json.loads(script.requests[0].content) == {
        "model": "m",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
        "max_tokens": 9,
        "temperature": 0.5,
        "stop": ["END"],
        "seed": 3,
    }


def test_samples_are_separate_requests_with_seeds_of_their_own() -> None:
    script = Script(ok(), ok(), ok())
    assert len(script.model().complete(ASK, samples=3, seed=5)) == 3
    assert sorted(json.loads(item.content)["seed"] for item in script.requests) == [5, 6, 7]


def test_the_messages_api_puts_system_text_and_key_where_it_wants_them() -> None:
    answer = {
        "content": [{"type": "thinking"}, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        "stop_reason": "max_tokens",
        "usage": {"input_tokens": 1, "output_tokens": 2},
    }
    script = Script(ok(answer))
    (found,) = script.model(api="anthropic").complete(ASK)
    assert (found.text, found.finish_reason, found.tokens_in, found.tokens_out) == ("ab", "length", 1, 2)
    request = script.requests[0]
    assert (request.url.path, request.headers["x-api-key"]) == ("/v1/messages", KEY)
    body = json.loads(request.content)
    assert body["system"] == "be brief"
    assert [item["role"] for item in body["messages"]] == ["user"]


def test_a_text_ends_before_a_stop_string_that_the_endpoint_overlooked() -> None:
    late = {"choices": [{"message": {"content": "one END two"}, "finish_reason": "stop"}]}
    assert Script(ok(late)).model().complete(ASK, stop=("END",))[0].text == "one "


@pytest.mark.parametrize(("said", "reason"), [("length", "length"), ("content_filter", "refused"), ("odd", "stop")])
def test_the_reason_of_the_end_is_kept(said: str, reason: str) -> None:
    answer = {"choices": [{"message": {"content": "x"}, "finish_reason": said}]}
    assert Script(ok(answer)).model().complete(ASK)[0].finish_reason == reason


def test_a_model_that_knows_other_parameters_is_asked_again_in_its_own_words() -> None:
    def no_budget(body: dict[str, Any]) -> httpx.Response:
        assert "max_tokens" in body
        return httpx.Response(400, json={"error": {"message": "use max_completion_tokens instead"}})

    def no_temperature(body: dict[str, Any]) -> httpx.Response:
        assert "max_completion_tokens" in body
        return httpx.Response(400, json={"error": {"message": "temperature is not supported"}})

    def last(body: dict[str, Any]) -> httpx.Response:
        assert "temperature" not in body
        return ok()

    assert Script(no_budget, no_temperature, last).model().complete(ASK)[0].text == "hi"


# --- refusals and retries --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("status", [408, 429, 500, 503, 529])
def test_a_passing_failure_is_tried_again_after_growing_pauses(status: int) -> None:
    script = Script(httpx.Response(status), httpx.Response(status), ok())
    assert script.model().complete(ASK)[0].text == "hi"
    assert script.pauses == [0.5, 1.0]


def test_retries_are_bounded() -> None:
    script = Script(*[httpx.Response(500)] * 9)
    with pytest.raises(ModelFailed, match="status 500") as caught:
        script.model().complete(ASK)
    assert caught.value.code == "model_unavailable"
    assert len(script.requests) == 4


def test_a_pause_that_the_endpoint_asks_for_is_kept_if_there_is_time() -> None:
    script = Script(httpx.Response(429, headers={"retry-after": "7"}), ok())
    script.model().complete(ASK)
    assert script.pauses == [7.0]
    date = Script(httpx.Response(429, headers={"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}), ok())
    date.model().complete(ASK)
    assert date.pauses == [0.0]
    odd = Script(httpx.Response(429, headers={"retry-after": "soon"}), ok())
    odd.model().complete(ASK)
    assert odd.pauses == [0.5]


def test_a_pause_beyond_the_deadline_ends_the_call_at_once() -> None:
    script = Script(httpx.Response(429, headers={"retry-after": "3600"}))
    with pytest.raises(ModelFailed, match="3600 s"):
        script.model(timeout_s=60).complete(ASK)
    assert script.pauses == []


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_a_lasting_refusal_is_not_tried_again(status: int) -> None:
    script = Script(httpx.Response(status, json={"error": {"message": f"no use, {KEY} is wrong"}}))
    with pytest.raises(ModelFailed, match=str(status)) as caught:
        script.model().complete(ASK)
    assert len(script.requests) == 1
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("target", ["file:///etc/passwd", "https://elsewhere/v1/chat/completions", "/other"])
def test_a_redirect_is_not_followed(target: str) -> None:
    script = Script(httpx.Response(307, headers={"location": target}))
    with pytest.raises(ModelFailed, match="leads elsewhere"):
        script.model().complete(ASK)
    assert len(script.requests) == 1


def test_a_connection_that_drops_is_tried_again() -> None:
    script = Script(httpx.ReadError("reset"), httpx.RemoteProtocolError("cut"), ok())
    assert script.model().complete(ASK)[0].text == "hi"


def test_one_failed_sample_fails_the_call() -> None:
    script = Script(ok(), httpx.Response(404), ok())
    with pytest.raises(ModelFailed):
        script.model().complete(ASK, samples=3)


# --- replies that are none -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b'{"choices": [{"message": {"content": "hi',
        b"<html><body>Please log in</body></html>",
        b"[1, 2]",
        b"[" * 100_000,
        b'{"choices": []}',
        b'{"choices": [{"message": null}]}',
        b'{"choices": [{"message": {"content": null}, "finish_reason": "stop"}]}',
        b'{"choices": "x"}',
        b'{"error": {"message": "odd"}}',
        b"\xff\xfe",
    ],
)
@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_a_reply_without_text_is_named_and_kept_short(reply: bytes, api: str) -> None:
    script = Script(httpx.Response(200, content=reply))
    with pytest.raises(ModelFailed) as caught:
        script.model(api=api).complete(ASK)
    assert caught.value.code == "model_reply_unusable"
    assert len(caught.value.reply) <= 2000
    assert len(script.requests) == 1


def test_a_refusal_by_the_model_is_an_empty_text() -> None:
    answer = {"choices": [{"message": {"content": None, "refusal": "I will not"}, "finish_reason": "stop"}]}
    (found,) = Script(ok(answer)).model().complete(ASK)
    assert (found.text, found.finish_reason) == ("", "refused")


def test_an_endless_body_is_cut_off() -> None:
    class Endless(httpx.AsyncByteStream):
        sent = 0

        async def __aiter__(self) -> Any:
            while True:
                self.sent += 1 << 20
                yield b"x" * (1 << 20)

    body = Endless()
    with pytest.raises(ModelFailed, match="larger than 8 MiB") as caught:
        Script(httpx.Response(200, stream=body)).model().complete(ASK)
    assert caught.value.code == "model_reply_unusable"
    assert body.sent <= 10 << 20


def test_a_compressed_reply_is_not_unpacked() -> None:
    reply = httpx.Response(200, headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(b"bomb"))
    with pytest.raises(ModelFailed, match="compressed"):
        Script(reply).model().complete(ASK)


# --- keys and settings -----------------------------------------------------------------------------------------------
def test_the_key_reaches_no_log_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(ModelFailed) as caught:
        Script(httpx.Response(401, text=f"bad key {KEY}")).model().complete(ASK)
    echo = Script(httpx.Response(200, text=f"not json {KEY}"))
    with pytest.raises(ModelFailed) as other:
        echo.model().complete(ASK)
    assert KEY not in caplog.text + str(caught.value) + caught.value.reply + str(other.value) + other.value.reply


def test_a_key_that_cannot_be_sent_is_refused_without_showing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "two\nlines")
    with pytest.raises(ModelFailed, match="no key") as caught:
        Script().model().complete(ASK)
    assert "lines" not in str(caught.value)


@pytest.mark.parametrize("fields", [{"name": ""}, {"url": ""}])
def test_a_model_without_name_or_address_says_what_to_set(fields: dict[str, str]) -> None:
    with pytest.raises(ModelFailed, match=r"optiml\.toml"):
        ChatModel(settings(**fields))


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with served(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + json.dumps(GOOD).encode()) as url:
        assert ChatModel(settings(url=url)).complete(ASK)[0].text == "hi"


# --- real sockets ----------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def served(*parts: bytes | None) -> Iterator[str]:
    """A loopback server that sends `parts` to everyone; None waits until the client is gone."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(10)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(10)
                    connection.recv(65536)
                    for part in parts:
                        if part is None:
                            connection.recv(65536)
                        else:
                            connection.sendall(part)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(timeout=10)


@pytest.mark.parametrize(
    "parts",
    [
        (None,),
        (b"HTTP/1.1 200 OK\r\n", None),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{", None),
    ],
    ids=["silent", "in the headers", "in the body"],
)
def test_a_stall_ends_at_the_deadline(parts: tuple[bytes | None, ...]) -> None:
    with served(*parts) as url, pytest.raises(ModelFailed, match=r"within 0\.2 s"):
        ChatModel(settings(url=url, timeout_s=0.2)).complete(ASK)


def test_a_drip_of_bytes_ends_at_the_deadline() -> None:
    class Drip(httpx.AsyncByteStream):
        async def __aiter__(self) -> Any:
            while True:
                await anyio.sleep(0.02)
                yield b" "

    with pytest.raises(ModelFailed, match=r"within 0\.2 s"):
        Script(httpx.Response(200, stream=Drip())).model(timeout_s=0.2).complete(ASK)


def test_a_refused_connection_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    script = Script()
    model = ChatModel(settings(url=f"http://127.0.0.1:{port}/v1"), sleep=script.sleep)
    with pytest.raises(ModelFailed, match="cannot be reached"):
        model.complete(ASK)
    assert len(script.pauses) == 3


def test_a_server_without_tls_is_named_and_not_tried_again() -> None:
    script = Script()
    with served(b"HTTP/1.1 400 Bad Request\r\n\r\n") as url:
        model = ChatModel(settings(url=url.replace("http:", "https:")), sleep=script.sleep)
        with pytest.raises(ModelFailed, match="certificate"):
            model.complete(ASK)
    assert script.pauses == []
