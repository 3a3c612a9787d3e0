"""Which phrases of the vocabulary a text holds, longest first, and which of them it denies."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from optiml.generate import vocabulary as words
from optiml.generate.vocabulary import COMMON, GRAMMARS, UNIQUE, USUAL
from optiml.generate.words import Token, fold, tokens

MAX_PHRASE_WORDS = 9


@dataclass(frozen=True, kw_only=True)
class Mention:
    """A phrase of the vocabulary at tokens `first` .. `last`."""

    kind: Literal["operator", "foreign", "modifier", "arithmetic", "dtype", "plain"]
    label: str
    text: str
    first: int
    last: int
    strength: int = UNIQUE
    whole: bool = True  # no light word was passed over
    negated: bool = False


@dataclass(frozen=True, kw_only=True)
class _Entry:
    kind: Literal["operator", "foreign", "modifier", "arithmetic", "dtype", "plain"]
    label: str
    strength: int = UNIQUE
    articles: int = 0  # how many of the phrase's words are "a", "an" or "the"


# Words without weight inside a phrase: "multiply two 1024x1024 fp16 matrices" is read as "multiply two matrices".
_JOINING = frozenset(
    fold(word)
    for word in "of over by with to and in from for times at on or into along across per as plus is than".split()  # noqa: SIM905
)


_LIGHT = frozenset(
    fold(word)
    for word in """a an the given whole entire input large big huge dense squareshaped long random real contiguous
    equally sized float double floating point fp16 fp32 fp64 bf16 half precision float16 float32 float64 bfloat16 int32
    integer different separate simple these those its my our your arbitrary following 1d numeric numerical small tiny
    regular standard generic basic""".split()  # noqa: SIM905
)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Squeezed phrase -> what it means: with every word, and with the light words left out."""

    exact: Mapping[str, _Entry]
    heavy: Mapping[str, _Entry]


@cache
def phrase_table(names: tuple[tuple[str, tuple[str, ...]], ...]) -> Table:
    """The vocabulary together with the names of the operators; the first kind to claim a phrase keeps it."""
    known = {name for name, _ in names}
    exact: dict[str, _Entry] = {}
    heavy: dict[str, _Entry] = {}

    def add(phrases: Iterable[str], entry: _Entry) -> None:
        for phrase in phrases:
            all_words = [token for token in tokens(phrase) if token.kind == "word"]
            articles = sum(map(_is_article, all_words))
            for key in _squeezed(all_words):
                exact.setdefault(key, dataclasses.replace(entry, articles=articles))
            for key in _squeezed(_weighty(all_words)) if entry.kind != "dtype" else ():
                heavy.setdefault(key, entry)

    for label, phrases in words.DTYPES.items():
        add(phrases, _Entry(kind="dtype", label=label))
    for name, grammar in GRAMMARS.items():
        if name in known:
            for strength, phrases in ((UNIQUE, grammar.unique), (USUAL, grammar.usual), (COMMON, grammar.common)):
                add(phrases, _Entry(kind="operator", label=name, strength=strength))
    for label, phrases in words.FOREIGN.items():
        add(phrases, _Entry(kind="foreign", label=label))
    for name, phrases in names:
        for phrase in (name, *phrases):
            several_words = any(sign in phrase for sign in " -_")
            strength = UNIQUE if name not in GRAMMARS else USUAL if several_words else COMMON
            add((phrase,), _Entry(kind="operator", label=name, strength=strength))
    for label, modifier in words.MODIFIERS.items():
        add(modifier.phrases, _Entry(kind="modifier", label=label))
    for label, phrases in words.ARITHMETIC.items():
        add(phrases, _Entry(kind="arithmetic", label=label))
    add(words.PLAIN, _Entry(kind="plain", label=""))
    return Table(exact=exact, heavy=heavy)


def _squeezed(found: Sequence[Token]) -> set[str]:
    return {"".join(token.folded for token in found), "".join(token.text.lower() for token in found)} - {""}


def _weighty(phrase: Sequence[Token]) -> Sequence[Token]:
    """The words of a phrase without the light ones; none where too little would remain to recognise it."""
    rest = [token for token in phrase if not is_light(token)]
    if len(rest) == len(phrase):
        return rest
    ends = {token.folded for token in (rest[:1] + rest[-1:])}
    return rest if len(rest) >= 2 and not ends & _JOINING else []


def _is_article(token: Token) -> bool:
    return token.text.lower() in ("a", "an", "the")


def is_light(token: Token) -> bool:
    if token.kind in ("number", "shape"):
        return True
    if token.kind != "word":
        return False
    return token.folded in _LIGHT or (len(token.text) == 1 and not token.joined)


def find_mentions(found: Sequence[Token], table: Table) -> list[Mention]:
    """Phrases of the table in the text, from left to right, the longest at each place, without overlap.

    A plain phrase hides a shorter one ("maximum performance"), but never the start of one that reaches further:
    in "for each column" it is "each column" that counts.
    """
    at = [
        [*_phrases_at(found, start, table.exact, light=True), *_phrases_at(found, start, table.heavy, light=False)]
        for start in range(len(found))
    ]
    chosen: list[Mention] = []
    index = 0
    while index < len(found):
        ordered = sorted(at[index], key=lambda item: (-item.last, item.kind == "plain"))
        best = next((item for item in ordered if item.kind != "plain" or not _hides_more(item, at)), None)
        if best is None:
            index += 1
            continue
        inside = [item for start in range(best.first, best.last + 1) for item in at[start] if item.last <= best.last]
        chosen += [best, *_passed_over(best, inside, found)]
        index = best.last + 1
    return [
        dataclasses.replace(item, negated=_is_negated(item, found) or _is_denied_after(item, found)) for item in chosen
    ]


def _hides_more(mention: Mention, at: Sequence[Sequence[Mention]]) -> bool:
    """Whether a telling phrase begins inside a plain one and reaches beyond it."""
    return any(
        item.kind != "plain" and item.last > mention.last
        for start in range(mention.first + 1, mention.last + 1)
        for item in at[start]
    )


def _passed_over(mention: Mention, inside: Sequence[Mention], found: Sequence[Token]) -> list[Mention]:
    """What a phrase passes over that still counts: a dtype, or "half of" in "copy half of a matrix"."""
    if mention.kind == "dtype" or (mention.kind == "plain" and mention.whole):
        return []
    inner = [item for item in inside if item is not mention and item.whole]
    hiding = [item for item in inner if item.kind in ("dtype", "plain")]
    dtypes = [
        item
        for item in inside
        if item.kind == "dtype"
        and not any(other != item and other.first <= item.first and item.last <= other.last for other in hiding)
    ]
    modifiers = [item for item in inner if item.kind == "modifier" and is_light(found[item.first])]
    return [item for item in dtypes if not any(m.first <= item.first <= m.last for m in modifiers)] + modifiers


def _phrases_at(found: Sequence[Token], start: int, table: Mapping[str, _Entry], *, light: bool) -> Iterator[Mention]:
    """Every phrase of one table that begins at `start`; light words count only if `light`."""
    taken: list[Token] = []
    for index in range(start, min(len(found), start + 3 * MAX_PHRASE_WORDS)):
        token = found[index]
        if token.kind == "symbol" and token.text in "-/_" and index > start:
            continue
        if token.kind == "symbol" or (light and token.kind != "word"):
            break
        if not light and is_light(token):
            if index == start:
                break
            continue
        taken.append(token)
        if len(taken) > MAX_PHRASE_WORDS:
            break
        entry = table.get("".join(item.folded for item in taken)) or table.get(
            "".join(item.text.lower() for item in taken)
        )
        if entry is None or _splits_a_name(found, start, index, entry):
            continue
        if not light or sum(map(_is_article, taken)) == entry.articles:  # "me an" is no "mean"
            yield Mention(
                kind=entry.kind,
                label=entry.label,
                text=" ".join(item.text for item in found[start : index + 1]),
                first=start,
                last=index,
                strength=entry.strength,
                whole=light,
            )


def _splits_a_name(found: Sequence[Token], first: int, last: int, entry: _Entry) -> bool:
    """Whether a plain phrase would end inside a name in camel case ("the ReLU" is no "there")."""
    return (
        entry.kind == "plain" and first < last and last + 1 < len(found) and found[last].start == found[last + 1].start
    )


def with_patterns(found: Sequence[Token], mentions: list[Mention], names: frozenset[str]) -> list[Mention]:
    """The mentions together with the patterns that the text matches.

    What stands at the first word of a pattern gives way to it: in "multiply two vectors and sum" the product is part
    of the dot product.
    """
    patterns = [(name, pattern) for name in sorted(names & GRAMMARS.keys()) for pattern in GRAMMARS[name].patterns]
    patterns += [(label, pattern) for label, group in words.FOREIGN_PATTERNS.items() for pattern in group]
    named_operators = [item for item in mentions if item.kind == "operator"]
    for label, pattern in patterns:
        span = _match_pattern(found, pattern)
        if span is None:
            continue
        first, last = span
        text = " ".join(token.text for token in found[first : last + 1])
        whole = Mention(
            kind="operator" if label in GRAMMARS else "foreign",
            label=label,
            text=text,
            first=first,
            last=last,
            strength=USUAL,
        )
        named = any(
            item.first <= first <= item.last
            and (item.first < first or item.last >= last or (item.label != label and item.strength > COMMON))
            for item in named_operators
        )
        if named and whole.kind == "operator":
            continue
        kept = ("dtype", "foreign") if label == "sum" else ("dtype",)  # "sum of logarithms of all elements"
        mentions = [
            item for item in mentions if not (item.first == first and item.last < last and item.kind not in kept)
        ]
        mentions.append(dataclasses.replace(whole, negated=_is_negated(whole, found)))
    return sorted(mentions, key=lambda item: (item.first, item.last))


def _match_pattern(found: Sequence[Token], pattern: str) -> tuple[int, int] | None:
    """First and last token of a pattern of the vocabulary in the text; None where it does not occur."""
    steps = [frozenset(step.split("|")) for step in pattern.split()]
    for start, token in enumerate(found):
        if _is_one_of(token, steps[0]):
            last = _match_steps(found, start + 1, steps[1:])
            if last is not None:
                return start, last
    return None


def _match_steps(found: Sequence[Token], index: int, steps: Sequence[frozenset[str]]) -> int | None:
    if not steps:
        return index - 1
    room = _GAPS.get(steps[0])
    wanted, rest = (steps[0], steps[1:]) if room is None else (steps[1], steps[2:])
    passed = 0
    for position in range(index, len(found)):
        token = found[position]
        if (token.kind == "symbol" and token.text in ".;:") or token.text.lower() in _MORE_THAN_TWO:
            return None
        if _is_one_of(token, wanted):
            last = _match_steps(found, position + 1, rest)
            if last is not None:
                return last
        passed += not is_light(token)
        if passed > (room or 0) or (room is None and position > index):
            return None
    return None


def _is_one_of(token: Token, wanted: frozenset[str]) -> bool:
    return token.text.lower() in wanted or ("#" in wanted and token.kind == "number")


_MORE_THAN_TWO = frozenset("three four five six several".split())  # noqa: SIM905
_GAPS = {frozenset({".."}): 1, frozenset({"..."}): 6}  # words of weight that a gap may pass over


def _is_negated(mention: Mention, found: Sequence[Token]) -> bool:
    """Whether one of the few words before the mention, in the same clause, denies it."""
    before: list[str] = []
    for token in reversed(found[max(0, mention.first - 6) : mention.first]):
        if token.kind == "symbol" and token.text not in "-'/":
            break
        if token.kind == "word":
            if token.folded in ("but", "and", "is", "ar") and not _EXCEPTING & set(_words_before(found, token)):
                break
            before.insert(0, token.text.lower())
    text = f" {' '.join(before[-4:])} "
    if before[-1:] != ["non"]:  # it denies the next word only: "non-causal attention"
        text = text.replace(" non ", " ")
    return any(f" {negation} " in text for negation in words.NEGATIONS)


_EXCEPTING = frozenset({"anything", "everything", "all", "nothing"})  # "anything but softmax"


def _words_before(found: Sequence[Token], token: Token) -> list[str]:
    index = found.index(token)
    return [item.text.lower() for item in found[max(0, index - 1) : index]]


def _is_denied_after(mention: Mention, found: Sequence[Token]) -> bool:
    """ "softmax is not what I want"."""
    after = [token.text.lower() for token in found[mention.last + 1 : mention.last + 4]]
    unwanted = after[:1] == ["not"] and after[1:2] in (["needed"], ["required"], ["wanted"], ["necessary"])
    return unwanted or after[:2] in (["is", "not"], ["are", "not"]) or after[:1] in (["isn't"], ["isnt"], ["aren't"])


def corrected(found: list[Token], table: Table) -> tuple[list[Token], tuple[str, ...]]:
    """Misspelt words of operator names put right; only long words, and only ones that mean nothing as written."""
    names = _long_operator_words(frozenset(GRAMMARS))
    notes: list[str] = []
    corrected: list[Token] = []
    for token in found:
        if token.kind == "word" and len(token.text) >= 5 and token.text.isalpha() and not _is_known_word(token, table):
            distance = 1 if len(token.text) < 10 else 2
            edits = {name: _edits(token.text.lower(), name, distance) for name in names}
            near = sorted(name for name, count in edits.items() if count == min(distance, *edits.values()))
            if len(near) == 1:
                notes.append(f"{token.text!r} was read as {near[0]!r}")
                token = dataclasses.replace(token, text=near[0], folded=fold(near[0]))
        corrected.append(token)
    return corrected, tuple(dict.fromkeys(notes))


def _is_known_word(token: Token, table: Table) -> bool:
    return token.folded in table.exact or token.text.lower() in table.exact or token.folded in _vocabulary_words()


@cache
def _vocabulary_words() -> frozenset[str]:
    """Every word that any table uses, folded."""
    phrases = [
        *words.PLAIN,
        *words.THEN,
        *words.NEGATIONS,
        *words.SURROUNDINGS,
        *words.MACHINE_WORDS_AFTER,
        *words.MACHINE_WORDS_BEFORE,
        *words.ACCUMULATOR_WORDS,
        *words.LABEL_WORDS,
    ]
    for table in (words.FOREIGN, words.ARITHMETIC, words.DTYPES, words.QUANTITIES):
        phrases += [phrase for group in table.values() for phrase in group]
    phrases += [phrase for modifier in words.MODIFIERS.values() for phrase in modifier.phrases]
    for grammar in GRAMMARS.values():
        phrases += [*grammar.unique, *grammar.usual, *grammar.common]
        phrases += [phrase for group in grammar.axes.values() for phrase in group]
    return frozenset(fold(word) for phrase in phrases for word in re.findall(r"[A-Za-z0-9']+", phrase))


@cache
def _long_operator_words(names: frozenset[str]) -> frozenset[str]:
    phrases = [phrase for name in names for phrase in GRAMMARS[name].unique]
    return frozenset(word for phrase in phrases for word in phrase.split() if len(word) >= 6 and word.isalpha())


def _edits(left: str, right: str, limit: int) -> int:
    """Insertions, deletions, replacements and swaps of neighbours between two words; `limit + 1` where more."""
    if abs(len(left) - len(right)) > limit or left[0] != right[0]:
        return limit + 1
    previous, current = [0] * (len(right) + 1), list(range(len(right) + 1))
    for i, a in enumerate(left, start=1):
        before, previous, current = previous, current, [i] + [0] * len(right)
        for j, b in enumerate(right, start=1):
            current[j] = min(previous[j] + 1, current[j - 1] + 1, previous[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                current[j] = min(current[j], before[j - 2] + 1)
    return current[-1]
