"""Text mixture: several chat models answer together, through their texts alone.

For experts that are reachable as an API only. A router picks K of them by the words of the request, each drafts, and
the best suited one writes the answer with the drafts before it. The mixture of `optiml.mixture` shares hidden states
instead; results of the two are reported under their own names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from optiml.errors import ModelFailed
from optiml.llm.model import MAX_TOKENS, Completion, Message, Model
from optiml.llm.prompting import prompt, quoted

DRAFT_CHARACTERS = 12_000  # of each draft that the primary expert is shown


@dataclass(frozen=True, kw_only=True)
class Expert:
    """A model and the words of the requests that it is good at."""

    model: Model
    good_at: str = ""


def route(experts: Sequence[Expert], messages: Sequence[Message], active: int) -> tuple[Expert, ...]:
    """The `active` experts whose words occur most in the last request, the best first; ties keep their order."""
    asked = _words(messages[-1].text)

    def suitability(expert: Expert) -> float:
        words = _words(expert.good_at)
        return len(words & asked) / len(words) ** 0.5 if words else 0.0

    return tuple(sorted(experts, key=suitability, reverse=True)[:active])


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]{2,}", text.lower()))


class TextMixture:
    """The experts as one model; see `optiml.llm.model.Model`. An expert that fails is left out."""

    def __init__(self, experts: Sequence[Expert], *, active: int, name: str = "text_mixture") -> None:
        self._experts = tuple(experts)
        self._active = active
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    def experts(self) -> tuple[Model, ...]:
        return tuple(expert.model for expert in self._experts)

    def router_only(self) -> TextMixture:
        return TextMixture(self._experts, active=1, name=f"{self._name}, router only")

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
        """Drafts of the chosen experts, then `samples` answers of the first that can write them.

        Raises:
            ModelFailed: no expert answered.
        """
        chosen = route(self._experts, messages, self._active)

        def draft(expert: Expert) -> Completion | ModelFailed:
            try:
                return expert.model.complete(
                    messages, max_tokens=max_tokens, stop=stop, temperature=temperature, seed=seed
                )[0]
            except ModelFailed as error:
                return error

        if len(chosen) == 1:
            return chosen[0].model.complete(
                messages, samples=samples, max_tokens=max_tokens, stop=stop, temperature=temperature, seed=seed
            )
        with ThreadPoolExecutor(max_workers=len(chosen)) as threads:
            drafts = list(threads.map(draft, chosen))
        good = [item for item in drafts if isinstance(item, Completion) and item.text.strip()]
        alive = [expert for expert, item in zip(chosen, drafts, strict=True) if isinstance(item, Completion)]
        failures = [item for item in drafts if isinstance(item, ModelFailed)]
        told = [*messages, Message(role="user", text=_synthesis(good))] if len(good) > 1 else messages
        for expert in alive:
            try:
                written = expert.model.complete(
                    told, samples=samples, max_tokens=max_tokens, stop=stop, temperature=temperature, seed=seed
                )
            except ModelFailed as error:
                failures.append(error)
                continue
            return _with_cost(written, good)
        raise failures[0]

    def close(self) -> None:
        for expert in self._experts:
            expert.model.close()


def _synthesis(drafts: Sequence[Completion]) -> str:
    texts = [
        quoted(item.text, label=f"draft {number}", limit=DRAFT_CHARACTERS)
        for number, item in enumerate(drafts, start=1)
    ]
    return prompt("synthesis", drafts="\n".join(texts))


def _with_cost(written: tuple[Completion, ...], drafts: Sequence[Completion]) -> tuple[Completion, ...]:
    """The first answer carries the drafts' tokens, so that the sum over the answers is what was used."""
    first = written[0]
    spent = Completion(
        text=first.text,
        finish_reason=first.finish_reason,
        tokens_in=_total([first.tokens_in, *(item.tokens_in for item in drafts)]),
        tokens_out=_total([first.tokens_out, *(item.tokens_out for item in drafts)]),
    )
    return (spent, *written[1:])


def _total(counts: Sequence[int | None]) -> int | None:
    known = [item for item in counts if item is not None]
    return sum(known) if len(known) == len(counts) else None
