"""What differs between chat APIs: path, headers, body and where the text stands in the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optiml.llm.model import Completion, Message


@dataclass(frozen=True, kw_only=True)
class Order:
    """One completion to ask for."""

    model: str
    messages: Sequence[Message]
    max_tokens: int
    stop: Sequence[str]
    temperature: float
    seed: int | None


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One chat API.

    Attributes:
        path: below the endpoint's url.
        headers: for a key, or for none.
        body: of an order.
        read: the completion in an answer; None where the answer does not have the API's shape.
        adapted: the body changed to what a refusal of it asks for; None where that helps nothing.
    """

    path: str
    headers: Callable[[str | None], Mapping[str, str]]
    body: Callable[[Order], dict[str, Any]]
    read: Callable[[Mapping[str, Any]], Completion | None]
    adapted: Callable[[Mapping[str, Any], str], dict[str, Any] | None] = lambda body, refusal: None


def count(value: object) -> int | None:
    """A number of tokens, where the endpoint gives one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
