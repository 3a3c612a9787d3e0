"""Models that say what a script tells them: in process, and behind a loopback HTTP server."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from optiml.errors import ModelFailed
from optiml.llm.model import Completion, Message

Line = str | Completion | ModelFailed


@dataclass
class ScriptedModel:
    """Gives the next line of its script for each sample; past its end it fails as an endpoint that is gone."""

    lines: list[Line]
    name: str = "chat:fake"
    asked: list[tuple[Message, ...]] = field(default_factory=list)
    closed: bool = False

    def complete(
        self,
        messages: Sequence[Message],
        *,
        samples: int = 1,
        max_tokens: int = 0,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> tuple[Completion, ...]:
        self.asked.append(tuple(messages))
        return tuple(self._next() for _ in range(samples))

    def _next(self) -> Completion:
        line = self.lines.pop(0) if self.lines else ModelFailed("the script is at its end")
        if isinstance(line, ModelFailed):
            raise line
        if isinstance(line, Completion):
            return line
        return Completion(text=line, finish_reason="stop", tokens_in=10, tokens_out=len(line.split()))

    def close(self) -> None:
        self.closed = True


def fenced(code: str, language: str = "cuda") -> str:
    return f"```{language}\n{code.rstrip()}\n```\n"


@contextlib.contextmanager
def chat_server(reply: Callable[[dict[str, Any]], str]) -> Iterator[str]:
    """The url of an OpenAI-compatible server on loopback whose text is `reply(body of the request)`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answer = {"choices": [{"message": {"content": reply(body)}, "finish_reason": "stop"}]}
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
