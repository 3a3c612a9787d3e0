"""The chat API of OpenAI, which vLLM, llama.cpp, Ollama and most hosts speak too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optiml.llm.dialect import Dialect, Order, count
from optiml.llm.model import Completion, FinishReason

_REASONS: Mapping[object, FinishReason] = {"length": "length", "content_filter": "refused"}


def _headers(key: str | None) -> Mapping[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def _body(order: Order) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": order.model,
        "messages": [{"role": message.role, "content": message.text} for message in order.messages],
        "max_tokens": order.max_tokens,
        "temperature": order.temperature,
    }
    if order.stop:
        body["stop"] = list(order.stop)
    if order.seed is not None:
        body["seed"] = order.seed
    return body


def _read(answer: Mapping[str, Any]) -> Completion | None:
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        return None
    content, refusal = message.get("content"), message.get("refusal")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        content = "".join(text for text in texts if isinstance(text, str))
    reason = _REASONS.get(choice.get("finish_reason"), "stop")
    if content is None and (isinstance(refusal, str) or reason != "stop"):
        content, reason = "", reason if reason != "stop" else "refused"
    if not isinstance(content, str):
        return None
    usage = answer.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    return Completion(
        text=content,
        finish_reason=reason,
        tokens_in=count(usage.get("prompt_tokens")),
        tokens_out=count(usage.get("completion_tokens")),
    )


def _adapted(body: Mapping[str, Any], refusal: str) -> dict[str, Any] | None:
    """Newer models take another name for the token budget and only their own temperature."""
    changed = dict(body)
    if "max_completion_tokens" in refusal and "max_tokens" in changed:
        changed["max_completion_tokens"] = changed.pop("max_tokens")
    elif "temperature" in refusal and "temperature" in changed:
        del changed["temperature"]
    elif "seed" in refusal and "seed" in changed:
        del changed["seed"]
    elif "stop" in refusal and "stop" in changed:
        del changed["stop"]
    else:
        return None
    return changed


OPENAI = Dialect(path="/chat/completions", headers=_headers, body=_body, read=_read, adapted=_adapted)
