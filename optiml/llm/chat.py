"""A model behind a chat endpoint of the settings."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import anyio
import httpx

from optiml.errors import ModelFailed
from optiml.llm.anthropic import ANTHROPIC
from optiml.llm.dialect import Dialect, Order
from optiml.llm.endpoint import KEPT_REPLY_CHARACTERS, Endpoint, Refusal
from optiml.llm.model import MAX_REPLY_CHARACTERS, MAX_TOKENS, Completion, Message
from optiml.llm.openai import OPENAI
from optiml.settings import ModelEndpoint

DIALECTS: Mapping[str, Dialect] = {"openai": OPENAI, "anthropic": ANTHROPIC}
AT_ONCE = 4  # requests in flight of one call for several samples
ADAPTATIONS = 3  # times that a body is changed to what its refusal asks for


class ChatModel:
    """One chat endpoint. The key is read from its place for each call and kept nowhere.

    Args:
        transport, sleep, jitter: as `optiml.llm.endpoint.Endpoint` has them.

    Raises:
        ModelFailed: code `model_unavailable`: the settings name no model or no address.
    """

    def __init__(
        self,
        settings: ModelEndpoint,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        if not settings.url or not settings.name:
            missing = "url" if not settings.url else "name"
            raise ModelFailed(f"the chat model has no {missing}: set {missing} below [chat] in optiml.toml")
        self._settings = settings
        self._dialect = DIALECTS[settings.api]
        base = settings.url.rstrip("/")
        self._endpoint = Endpoint(
            url=base if base.endswith(self._dialect.path) else base + self._dialect.path,
            deadline_s=settings.timeout_s,
            transport=transport,
            sleep=sleep,
            jitter=jitter,
        )

    @property
    def name(self) -> str:
        return f"chat:{self._settings.name}"

    def complete(
        self,
        messages: Sequence[Message],
        *,
        samples: int = 1,
        max_tokens: int = MAX_TOKENS,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> tuple[Completion, ...]:
        """See `optiml.llm.model.Model`; must not be called from a thread that runs an event loop."""
        key = self._settings.read_key()
        orders = [
            Order(
                model=self._settings.name,
                messages=messages,
                max_tokens=max_tokens,
                stop=stop,
                temperature=temperature,
                seed=None if seed is None else seed + number,
            )
            for number in range(samples)
        ]
        return anyio.run(self._all, orders, key)

    async def _all(self, orders: Sequence[Order], key: str | None) -> tuple[Completion, ...]:
        found: list[Completion | None] = [None] * len(orders)
        failures: list[ModelFailed] = []
        free = anyio.Semaphore(AT_ONCE)

        async def ask(number: int, order: Order) -> None:
            async with free:
                try:
                    found[number] = await self._one(order, key)
                except ModelFailed as error:
                    failures.append(error)
                    group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for number, order in enumerate(orders):
                group.start_soon(ask, number, order)
        if failures:
            raise failures[0]
        return tuple(item for item in found if item is not None)

    async def _one(self, order: Order, key: str | None) -> Completion:
        body = self._dialect.body(order)
        for attempt in range(1 + ADAPTATIONS):
            answer = await self._endpoint.post(body, self._dialect.headers(key), secret=key)
            if not isinstance(answer, Refusal):
                return self._completion(answer, order.stop)
            other = self._dialect.adapted(body, answer.text)
            if other is None or attempt == ADAPTATIONS:
                raise ModelFailed(f"the model refused the request (status {answer.status}): {answer.text}")
            body = other
        raise AssertionError("the last attempt returns or raises")

    def _completion(self, answer: Mapping[str, Any], stop: Sequence[str]) -> Completion:
        read = self._dialect.read(answer)
        if read is None:
            raise ModelFailed(
                f"the model's reply has no text where the {self._settings.api} API puts it: check api and url",
                code="model_reply_unusable",
                reply=repr(answer)[:KEPT_REPLY_CHARACTERS],
            )
        ends = [place for place in (read.text.find(mark) for mark in stop if mark) if place >= 0]
        text = read.text[: min(ends)] if ends else read.text
        return Completion(
            text=text[:MAX_REPLY_CHARACTERS],
            finish_reason="length" if len(text) > MAX_REPLY_CHARACTERS else read.finish_reason,
            tokens_in=read.tokens_in,
            tokens_out=read.tokens_out,
        )

    def close(self) -> None:
        """Nothing is held between calls."""
