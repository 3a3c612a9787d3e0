"""Where the operator's name is not the task: a comparison, a question, something else for it, a contrast."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache

from optiml.generate import vocabulary as words
from optiml.generate.phrases import Mention, is_light
from optiml.generate.refusal import Refused
from optiml.generate.words import Token, fold, sentences


def check_framing(found: Sequence[Token], mentions: Sequence[Mention], chosen: str) -> None:
    """Refuse a text that does not ask for the operator itself.

    Raises:
        Refused: it compares with it, asks about it, asks for something else, or takes something away from it.
    """
    _check_comparison(found, mentions, chosen)
    _check_question(found, mentions)
    _check_contrast(found, mentions, chosen)
    _check_object(found, mentions, chosen)


def _check_comparison(found: Sequence[Token], mentions: Sequence[Mention], chosen: str) -> None:
    """Refuse where the operator is only what the task is compared with: "like relu", "the inverse of softmax"."""
    named = [item for item in mentions if item.kind == "operator" and item.label == chosen and not item.negated]
    compared = [item for item in named if _is_compared(item, found)]
    if named and len(compared) == len(named):
        raise Refused(f"the text compares with {compared[0].text!r}; say what the kernel itself has to compute")


def _check_object(found: Sequence[Token], mentions: Sequence[Mention], chosen: str) -> None:
    """Refuse "a tile size for matmul": the request is for something else, and the operator says only what for."""
    named = [item for item in mentions if item.kind == "operator" and item.label == chosen and not item.negated]
    others = [_noun_before(item, found) for item in named]
    if named and all(noun is not None and noun not in _kernel_nouns() for noun in others):
        raise Refused(f"the text asks for {others[0]!r} for {named[0].text!r}; say what the kernel has to compute")


def _noun_before(mention: Mention, found: Sequence[Token]) -> str | None:
    """The word before "for the" or "of a" and the name; None where the name stands otherwise."""
    place = mention.first - 1
    while place >= 0 and found[place].text.lower() in ("a", "an", "the", "my", "our", "your"):
        place -= 1
    if place < 1 or found[place].text.lower() not in ("for", "of") or found[place - 1].kind != "word":
        return None
    return found[place - 1].text.lower()


@cache
def _kernel_nouns() -> frozenset[str]:
    return frozenset(words.KERNEL_NOUNS)


_ASKING = frozenset("is are does did was were which who whose where when why what".split())  # noqa: SIM905
_ASKING_FOR_IT = (
    "is it possible",
    "is there",
    "what i need",
    "what i am",
    "what i'm",
    "what we need",
    "what i want",
    "what we want",
)


def _check_question(found: Sequence[Token], mentions: Sequence[Mention]) -> None:
    """Refuse what asks about a kernel instead of for one: "is my softmax correct?"."""
    opening = " ".join(token.text.lower() for token in found[:3])
    phrase = next((item for item in mentions if item.first == 0 and item.kind == "plain" and item.last > 1), None)
    if opening.split(" ")[0] in words.OTHER_TASKS:
        raise Refused(f"the text asks to {opening.split(' ')[0]} something; say what a kernel has to compute")
    if opening.split(" ")[0] in _ASKING and phrase is None and not opening.startswith(_ASKING_FOR_IT):
        raise Refused("the text asks a question; say what a kernel has to compute")


def _check_contrast(found: Sequence[Token], mentions: Sequence[Mention], chosen: str) -> None:
    """Refuse what follows "but", "that" or "instead of" and is not only about how the kernel is written."""
    telling = {index: item for item in mentions for index in range(item.first, item.last + 1)}
    numbers = sentences(found)
    for index, token in enumerate(found):
        text = token.text.lower()
        taking_away = _taking_away(found, index)
        if not taking_away and text not in ("but", *_RELATIVE):
            continue
        start = index + max(1, len(taking_away))
        same_sentence = [at for at in range(start, len(found)) if numbers[at] == numbers[index]]
        weighty = [at for at in same_sentence if found[at].kind == "word" and not is_light(found[at])]
        if taking_away:
            strange = [at for at in weighty[:1] if _restricts(at, found, telling)]
        elif text == "but" or _describes(index, found, telling, chosen):
            strange = [at for at in weighty if not _changes_nothing(at, found, telling)]
        else:
            strange = []
        if strange:
            said = " ".join((*(taking_away or (text, "…")), found[strange[0]].text))
            raise Refused(f"{said!r} may change what is computed; say it in other words")


_RELATIVE = ("that", "which", "whose")


def _describes(index: int, found: Sequence[Token], telling: Mapping[int, Mention], chosen: str) -> bool:
    """Whether the word at `index` opens a clause about the operator right before it: "a relu that lets ... through"."""
    named = telling.get(index - 1) is not None and telling[index - 1].label == chosen
    verb = found[index + 1].text.lower() if index + 1 < len(found) else ""
    return named and verb not in _ABOUT_THE_CODE


def _restricts(index: int, found: Sequence[Token], telling: Mapping[int, Mention]) -> bool:
    """Whether leaving out the word at `index` may change the operator; what is named as a qualifier is judged there."""
    item = telling.get(index)
    judged_here = item is None or item.kind in ("plain", "arithmetic") or item.label == "a condition"
    return judged_here and found[index].folded not in _neutral()


_ABOUT_THE_CODE = frozenset("uses use works runs avoids needs is are has computes calculates sums".split())  # noqa: SIM905


def _taking_away(found: Sequence[Token], index: int) -> tuple[str, ...]:
    """ "instead of", "without" and the like, where they stand at `index`."""
    text = found[index].text.lower()
    pair = (text, found[index + 1].text.lower()) if index + 1 < len(found) else (text,)
    if pair in (("instead", "of"), ("rather", "than")):
        return pair
    return (text,) if text in ("without", "excluding", "ignoring", "skipping", "omitting") else ()


def _changes_nothing(index: int, found: Sequence[Token], telling: Mapping[int, Mention]) -> bool:
    item = telling.get(index)
    if item is not None and item.kind != "plain":
        return item.kind == "dtype" or item.negated
    return found[index].folded in _neutral() or found[index].text.lower() in _CONNECTING


_CONNECTING = frozenset(
    "the a an of in on for to and or with without no not is are be should must has have i my it".split()  # noqa: SIM905
)


@cache
def _neutral() -> frozenset[str]:
    return frozenset(map(fold, words.NEUTRAL))


def _is_compared(mention: Mention, found: Sequence[Token]) -> bool:
    clause: list[str] = []
    for token in reversed(found[max(0, mention.first - 6) : mention.first]):
        if token.kind == "symbol" and token.text not in "-'":
            break
        clause.insert(0, token.text.lower())
    after = [token.text.lower() for token in found[mention.last + 1 : mention.last + 3] if token.text != "-"]
    return _comparing().search(" ".join(clause)) is not None or bool(set(after[:1]) & set(words.COMPARED_AFTER))


@cache
def _comparing() -> re.Pattern[str]:
    wished = r"(?<!would )(?<!should )(?<!'d )(?<!- )"  # "I would like", "cuBLAS-like"
    passed = r"(?: (?:a|an|the|usual|standard|plain|normal|ordinary))*"
    return re.compile(rf"{wished}\b(?:{'|'.join(words.COMPARISONS)}){passed}$")
