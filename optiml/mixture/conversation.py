"""How a conversation becomes the one text that the experts continue, and how an answer ends it."""

from __future__ import annotations

from collections.abc import Sequence

from optiml.llm.model import Message

_TITLES = {"system": "Instructions", "user": "Task", "assistant": "Answer"}
ANSWER = "### Answer\n"


def prompt_of(messages: Sequence[Message], *, instructed: bool) -> str:
    """The text that the experts continue.

    Args:
        messages: a conversation that ends with the user.
        instructed: keep the system turns. A mixture that was trained on tasks has learnt what they say.
    """
    kept = [message for message in messages if instructed or message.role != "system"]
    return "".join(f"### {_TITLES[message.role]}\n{message.text.strip()}\n\n" for message in kept) + ANSWER


def answer_of(kernel_text: str) -> str:
    """A kernel file as the answer that a mixture is trained to write."""
    return f"```cuda\n{kernel_text.strip()}\n```\n"
