"""A text as one expert sees it: token ids, and where in the text each token ends.

Character offsets are the only thing that experts with different vocabularies have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optiml.errors import ModelFailed

REPLACEMENT = "\ufffd"  # what a tokenizer shows for bytes that are no character yet
_REMEMBERED_TOKENS, _REMEMBERED_TEXTS = 2, 1 << 18
MAX_PENDING = 8  # tokens that may wait for the rest of a character before it is taken as broken


@dataclass(frozen=True, kw_only=True)
class View:
    """A text under one tokenizer.

    Attributes:
        ids: token ids.
        ends: for each token, the character offset up to which it and all before it have spelled the text; never
            decreasing. Of several tokens that share one character only the last has reached its end.
    """

    ids: tuple[int, ...]
    ends: tuple[int, ...]


class TextTokenizer:
    """A fast tokenizer, with offsets that never run ahead of what its tokens determine.

    Args:
        tokenizer: of transformers; must be a fast one.
        name: of its expert, for messages.

    Raises:
        ModelFailed: the tokenizer gives no offsets.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ModelFailed(
                f"the tokenizer of expert {name} gives no character offsets, which align the experts: "
                "add its tokenizer.json"
            )
        self._tokenizer = tokenizer
        self.name = name
        self.vocabulary_size = len(tokenizer)
        self.end_id: int | None = tokenizer.eos_token_id
        self._short_texts: dict[tuple[int, ...], str] = {}

    def view(self, text: str, *, start: int = 0) -> View:
        """`text` as tokens; with `start` it goes on from there, so no tokens that mark a beginning are added."""
        encoded = self._tokenizer(
            text, return_offsets_mapping=True, add_special_tokens=start == 0, return_attention_mask=False, verbose=False
        )
        return View(ids=tuple(encoded["input_ids"]), ends=tuple(reached(encoded["offset_mapping"], start)))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens; special ones have none. Those of one or two tokens are remembered."""
        key = tuple(ids) if len(ids) <= _REMEMBERED_TOKENS else None
        if key is not None and key in self._short_texts:
            return self._short_texts[key]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if key is not None and len(self._short_texts) < _REMEMBERED_TEXTS:
            self._short_texts[key] = text
        return text


def reached(spans: Sequence[tuple[int, int]], start: int = 0) -> list[int]:
    """How far the text is spelled after each token.

    A token that the next one overlaps holds a part of a character only: it has reached where the next one begins.
    Special tokens have an empty span and have reached what was reached before them.

    Args:
        spans: `[n]` of (begin, end) in characters.
        start: added to all of them.
    """
    ends = []
    so_far = 0
    for index, (_, end) in enumerate(spans):
        if index + 1 < len(spans) and spans[index + 1][1] > spans[index + 1][0]:
            end = min(end, spans[index + 1][0]) if spans[index + 1][0] < end else end
        so_far = max(so_far, end)
        ends.append(start + so_far)
    return ends


class TextStream:
    """The text of tokens that come one by one."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self.ids: list[int] = []
        self.text = ""
        self._shown = 0  # tokens whose text is in `text`
        self._context = 0  # decoding starts here: some tokenizers drop a space at the beginning

    def push(self, token: int) -> str:
        """Add a token; returns the characters that it completed."""
        self.ids.append(token)
        before = self._tokenizer.decode(self.ids[self._context : self._shown])
        after = self._tokenizer.decode(self.ids[self._context :])
        if after.endswith(REPLACEMENT) and len(self.ids) - self._shown < MAX_PENDING:
            return ""
        new = after[len(before) :]
        self._context, self._shown = self._shown, len(self.ids)
        self.text += new
        return new
