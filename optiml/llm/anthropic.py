"""The Messages API of Anthropic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optiml.llm.dialect import Dialect, Order, count
from optiml.llm.model import Completion, FinishReason

_VERSION = "2023-06-01"
_REASONS: Mapping[object, FinishReason] = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "refused",
}


def _headers(key: str | None) -> Mapping[str, str]:
    return {"anthropic-version": _VERSION, **({} if key is None else {"x-api-key": key})}


def _body(order: Order) -> dict[str, Any]:
    system = "\n\n".join(message.text for message in order.messages if message.role == "system")
    body: dict[str, Any] = {
        "model": order.model,
        "messages": [
            {"role": message.role, "content": message.text} for message in order.messages if message.role != "system"
        ],
        "max_tokens": order.max_tokens,
        "temperature": min(1.0, order.temperature),
    }
    if system:
        body["system"] = system
    if order.stop:
        body["stop_sequences"] = list(order.stop)
    return body


def _read(answer: Mapping[str, Any]) -> Completion | None:
    content = answer.get("content")
    reason = _REASONS.get(answer.get("stop_reason"), "stop")
    if not isinstance(content, list) or (not content and reason == "stop"):
        return None
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    usage = answer.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    return Completion(
        text="".join(text for text in texts if isinstance(text, str)),
        finish_reason=reason,
        tokens_in=count(usage.get("input_tokens")),
        tokens_out=count(usage.get("output_tokens")),
    )


def _adapted(body: Mapping[str, Any], refusal: str) -> dict[str, Any] | None:
    """Some models take no temperature."""
    if "temperature" not in refusal or "temperature" not in body:
        return None
    return {name: value for name, value in body.items() if name != "temperature"}


ANTHROPIC = Dialect(path="/messages", headers=_headers, body=_body, read=_read, adapted=_adapted)
