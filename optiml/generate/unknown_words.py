"""Words that no table knows, and when they are reason enough to refuse."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache

from optiml.generate import vocabulary as words
from optiml.generate.phrases import Mention, is_light
from optiml.generate.refusal import Refused
from optiml.generate.vocabulary import COMMON, GRAMMARS, Grammar
from optiml.generate.words import Token, fold, sentences
from optiml.problems.problem import Builtin

MAX_ROLE_WORDS = 4
MAX_UNKNOWN_SHARE = 0.34  # of the words with weight; above it the text is about something else
_CLAUSE_ENDS = frozenset(
    """for in on from to using that which where so such as by via over when while into at and or but i we please if
    because since""".split()  # noqa: SIM905
)
_ADDING = frozenset({"with", "plus", "and", "but", "except", "minus", "including", "that"})


def check_language(found: Sequence[Token], mentions: Sequence[Mention]) -> None:
    """Refuse a text with two or more words that no English request holds."""
    covered = {index for item in mentions for index in range(item.first, item.last + 1) if item.kind != "plain"}
    other = [
        token.text.lower()
        for index, token in enumerate(found)
        if token.kind == "word" and index not in covered and token.text.lower() in words.NOT_ENGLISH
    ]
    if len(other) >= 2:
        raise Refused(f"only English is read, and {' and '.join(sorted(set(other))[:3])!r} is not; say it in English")


def check_unknown_words(
    found: Sequence[Token],
    mentions: Sequence[Mention],
    chosen: str,
    own_words: frozenset[str],
    *,
    ignored: frozenset[int] = frozenset(),
    translated: bool = False,
) -> tuple[str, ...]:
    """Refuse words that no table knows: any beside the operator's name, and elsewhere what may add to the task.

    Args:
        ignored: positions of words that say only what the kernel is for.
        translated: the text was put into English word by word; then any unknown word is one that was lost.

    Returns:
        Notes on the words of other sentences, which are left out of account.
    """
    covered = {index for item in mentions for index in range(item.first, item.last + 1)}
    covered |= _role_phrases(found, chosen) | ignored
    known = _role_words(chosen) | own_words
    unknown = [
        index
        for index, token in enumerate(found)
        if token.kind == "word"
        and index not in covered
        and not is_light(token)
        and not {token.folded, token.text.lower()} & known
    ]
    if translated and unknown:
        raise Refused(f"{found[unknown[0]].text!r} is not understood; say in English what the kernel has to compute")
    names = [item for item in mentions if item.kind == "operator" and item.label == chosen]
    total = sum(token.kind == "word" and not is_light(token) for token in found)
    if len(unknown) >= 2 and len(unknown) > MAX_UNKNOWN_SHARE * total:
        quoted = ", ".join(repr(found[index].text) for index in unknown[:4])
        raise Refused(f"too much of the text is not understood ({quoted}); say in plain words what to compute")
    sentence = sentences(found)
    named = {sentence[item.first] for item in names}
    trusted = max((item.strength for item in names), default=COMMON) > COMMON
    for index in unknown:
        if not trusted or sentence[index] in named or _adds_to_task(found, index):
            raise Refused(
                f"{found[index].text!r} is not understood and may change what is computed; leave it out or say it in "
                "other words"
            )
    for index in _after_with(found, mentions, chosen):
        raise Refused(f"'with … {found[index].text}' is not understood; say it in other words")
    left_out = dict.fromkeys(found[index].text for index in unknown)
    return tuple(f"{word!r} was not understood and is left out of account" for word in left_out)


def axis_words(builtin: Builtin) -> frozenset[str]:
    """The words of the problem's own `[intent]` table for its sizes."""
    phrases = [*builtin.intent.axes, *(phrase for group in builtin.intent.axes.values() for phrase in group)]
    return frozenset(fold(word) for phrase in phrases for word in re.findall(r"[A-Za-z0-9]+", phrase))


@cache
def _phrases_of_sizes_and_roles(problem: str) -> tuple[str, ...]:
    """Phrases that say a size, how it is counted, or what a number or dtype belongs to."""
    grammar = GRAMMARS.get(problem, Grammar())
    phrases = [*words.THEN, *words.NEGATIONS, *words.SURROUNDINGS, *words.MACHINE_WORDS_AFTER]
    phrases += [*words.MACHINE_WORDS_BEFORE, *words.ACCUMULATOR_WORDS, *words.LABEL_WORDS, *grammar.letters]
    phrases += [phrase for group in grammar.axes.values() for phrase in group]
    phrases += [phrase for group in words.QUANTITIES.values() for phrase in group]
    phrases += [word for reading in grammar.shapes for word in reading.words]
    return tuple(phrase.lower() for phrase in phrases)


@cache
def _role_words(problem: str) -> frozenset[str]:
    """The single words among them, folded and as written."""
    found = {phrase for phrase in _phrases_of_sizes_and_roles(problem) if re.fullmatch(r"[a-z0-9']+", phrase)}
    return frozenset({*found, *map(fold, found)})


@cache
def _longer_phrases(problem: str) -> frozenset[str]:
    phrases = _phrases_of_sizes_and_roles(problem)
    return frozenset("".join(map(fold, re.findall(r"[a-z0-9']+", phrase))) for phrase in phrases if " " in phrase)


def _role_phrases(found: Sequence[Token], chosen: str) -> set[int]:
    """Where the longer ones stand."""
    covered: set[int] = set()
    for start in range(len(found)):
        squeezed = ""
        for index in range(start, min(start + 2 * MAX_ROLE_WORDS, len(found))):
            if found[index].text == "-":
                continue
            if found[index].kind not in ("word", "number"):
                break
            squeezed += found[index].folded if found[index].kind == "word" else found[index].text
            if squeezed in _longer_phrases(chosen):
                covered.update(range(start, index + 1))
    return covered


@cache
def _size_and_role_words(problem: str) -> frozenset[str]:
    """All words in those phrases, folded and as written."""
    phrases = _phrases_of_sizes_and_roles(problem)
    found = {word for phrase in phrases for word in re.findall(r"[a-z0-9']+", phrase)}
    return frozenset({*found, *map(fold, found)})


def _after_with(found: Sequence[Token], mentions: Sequence[Mention], chosen: str) -> Iterator[int]:
    """Words after "with" that belong to other operators: "attention with logits" has to be asked about."""
    explained = {
        index for item in mentions if item.kind != "plain" or item.negated for index in range(item.first, item.last + 1)
    }
    strange = _operand_words() - _size_and_role_words(chosen) - {fold(word) for word in words.TECHNICAL}
    names = [item.last for item in mentions if item.kind == "operator" and item.label == chosen]
    for start, token in enumerate(found):
        if token.text.lower() not in ("with", "plus", "including"):
            continue
        named = max((place for place in names if place < start), default=None)
        if named is None or any(item.text in ".;!?" for item in found[named:start]):
            continue  # another sentence, or before the operator is named
        for index in range(start + 1, len(found)):
            word = found[index]
            if (word.kind == "symbol" and word.text not in "-'/") or word.text.lower() in _CLAUSE_ENDS:
                break
            if index not in explained and word.folded in strange:
                yield index


@cache
def _operand_words() -> frozenset[str]:
    """Single words for sizes and operands of any operator."""
    phrases = [phrase for grammar in GRAMMARS.values() for group in grammar.axes.values() for phrase in group]
    return frozenset(fold(phrase) for phrase in (*phrases, *words.LABEL_WORDS) if " " not in phrase)


def _adds_to_task(found: Sequence[Token], index: int) -> bool:
    """Whether the word follows "with", "and", "but" … and so may name a further requirement."""
    before = [token for token in found[max(0, index - 3) : index]]
    for token in reversed(before):
        if token.kind == "symbol" and token.text != "-":
            return token.text in "+&"
        if token.kind == "word" and not is_light(token):
            return token.text.lower() in _ADDING
    return False
