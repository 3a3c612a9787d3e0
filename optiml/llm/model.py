"""What a language model is here: messages in, texts out.

One protocol for chat endpoints, for several endpoints that work together and for local experts. Its text is data: no
caller runs it, and none takes a verdict from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

Role = Literal["system", "user", "assistant"]
FinishReason = Literal["stop", "length", "refused"]

MAX_TOKENS = 4096  # written for one completion, unless a caller says otherwise
MAX_REPLY_CHARACTERS = 200_000  # of one completion; a longer text is cut and counts as `length`


@dataclass(frozen=True, kw_only=True)
class Message:
    """One turn of a conversation. A conversation ends with a turn of the user; system turns come first."""

    role: Role
    text: str


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One text that a model wrote.

    Attributes:
        text: without the prompt and without the stop string that ended it; may be empty.
        finish_reason: `stop` where the model ended the text itself (or met a stop string), `length` where the token
            budget ended it, `refused` where the model or a filter before it declined.
        tokens_in, tokens_out: as the model counts them, over all of its parts; None where it does not say.
    """

    text: str
    finish_reason: FinishReason
    tokens_in: int | None = None
    tokens_out: int | None = None


class Model(Protocol):
    """A source of text. Calls may come from several threads; an implementation that cannot serve them queues them."""

    @property
    def name(self) -> str:
        """What reports call it, such as `chat:gpt-5` or `mixture`; stable, short, without address or key."""

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
        """Texts that go on from `messages`.

        Args:
            samples: how many; exactly as many come back, in no particular order of merit.
            max_tokens: upper bound on the tokens of each text.
            stop: each text ends before the first of these.
            temperature: 0 takes the likeliest token each time; then one sample is as good as many.
            seed: the same seed gives the same texts where the model can promise that.

        Raises:
            ModelFailed: code `model_unavailable` where the model cannot be reached, started or paid, or took too
                long; `model_reply_unusable` where it answered with something that is no text.
        """

    def close(self) -> None:
        """Release what the model holds; a later call may start it again."""


@runtime_checkable
class Ensemble(Model, Protocol):
    """A model made of several, which can be asked one by one: what a benchmark compares it with."""

    def experts(self) -> Sequence[Model]:
        """Each expert by itself."""

    def router_only(self) -> Model:
        """The expert that the router puts first answers each request alone."""
