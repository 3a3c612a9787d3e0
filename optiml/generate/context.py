"""The part of a sentence that says what a kernel is for: "For our solver we need a dot product"."""

from __future__ import annotations

from collections.abc import Sequence

from optiml.generate.phrases import Mention
from optiml.generate.words import Token, sentences

MAX_WORDS = 12  # of a clause that may be set aside
_LEADING = frozenset(("for", "in", "to", "during", "inside", "as", "within"))
_OWNERS = frozenset(("our", "my", "the", "a", "an", "this", "their", "your"))
_WISHES = frozenset(("need", "want", "would", "require", "wish", "like", "'d", "have", "am", "are", "must"))
_USES = frozenset(
    "needs need uses use applies requires calls wants asks runs performs employs ends contains has takes relies".split()  # noqa: SIM905
)
_MANY = frozenset(("each", "every", "all", "per", "both", "one", "any"))
_MEANINGFUL = _MANY | {"row", "rows", "column", "columns", "channel", "channels"}


def context_words(found: Sequence[Token], mentions: Sequence[Mention]) -> frozenset[int]:
    """Positions of the words that say what for, where what is asked follows in the same sentence.

    A clause that speaks of rows, columns or "each" of anything says how, and is not set aside.
    """
    aside: set[int] = set()
    numbers = sentences(found)
    for number in range(numbers[-1] + 1 if numbers else 0):
        first = numbers.index(number)
        last = first + numbers.count(number) - 1
        end = _end_of_clause(found, mentions, first, last)
        clause = range(first, end)
        words = {found[index].text.lower() for index in clause}
        asked = any(end <= item.first <= last for item in mentions if item.kind == "operator")
        purpose = found[first].text.lower() == "to"  # "to find row offsets"
        if asked and 0 < len(clause) <= MAX_WORDS and not words & (_MANY if purpose else _MEANINGFUL):
            aside.update(clause)
    return frozenset(aside)


def _end_of_clause(found: Sequence[Token], mentions: Sequence[Mention], first: int, last: int) -> int:
    """Where the clause at the start of a sentence ends; `first` where there is none."""
    opening = found[first].text.lower()
    names = {item.first for item in mentions if item.kind == "operator"}
    for index in range(first + 1, min(last, first + MAX_WORDS + 1)):
        word, following = found[index].text.lower(), found[index + 1].text.lower()
        if opening in _LEADING:
            wished = word in ("i", "we", "i'd", "we'd") and (following in _WISHES or "'" in word)
            named = word in ("the", "a", "an") and index + 1 in names
            if word == "," or wished or named:
                return index
        elif opening in _OWNERS and word in _USES:
            return index + 1
    return first


def without_context(mentions: Sequence[Mention], aside: frozenset[int]) -> list[Mention]:
    """The mentions that are not set aside; qualifiers and element types always count."""
    return [
        item for item in mentions if item.kind in ("modifier", "dtype", "plain") or not {item.first, item.last} <= aside
    ]
