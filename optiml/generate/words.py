"""Text to tokens: numbers with their units, shapes, words folded to one spelling.

Nothing here knows an operator. `tokens(text)` is a flat list in reading order; `fold` brings plurals, British
spelling and -ing forms of text and vocabulary to the same letters, so that tables can be written as plain English.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

SYMBOLS = {
    "ᵀ": "^T", "⊤": "^T", "·": "*", "∙": "*", "⋅": "*", "∗": "*", "−": "-", "–": "-", "—": ", ", "√": "sqrt",
    "Σ": "sum ", "∑": "sum ", "²": "^2", "³": "^3", "≤": "<=", "≥": ">=", "‖": "|", "½": "0.5", "’": "'", "‘": "'",
    "“": '"', "”": '"', "γ": "gamma", "β": "beta", "α": "alpha", "ε": "eps", "ϵ": "eps", "σ": "sigma", "μ": "mu",
    "Φ": "Phi", "φ": "phi", "τ": "tau", "λ": "lambda", "⊙": " hadamard ", "∘": " hadamard ", "⊗": " kronecker ",
    "•": "\n", "∂": " gradient ", "←": "=", "→": " to ", "∈": " in ", "ˆ": "^",
}  # fmt: skip
BINARY = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9}
MAGNITUDES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "hundred": 100, "kibi": 1 << 10, "mebi": 1 << 20}
COUNTING = {
    "one": 1, "a": 1, "an": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "eleven": 11, "twelve": 12, "sixteen": 16, "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50,
    "sixty": 60, "eighty": 80,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Token:
    """A word, a number, a shape such as 1024x4096, or a symbol."""

    kind: Literal["word", "number", "shape", "symbol"]
    text: str
    start: int
    folded: str = ""
    joined: bool = False  # a hyphen or underscore ties it to the next word
    value: float = 0
    dims: tuple[int, ...] = ()
    bracketed: bool = False
    note: str | None = None  # how an ambiguous number was read


def plain(text: str) -> str:
    """Compatibility characters, Greek letters and typographic signs as ASCII where one exists."""
    text = re.sub(r"(?<=\d)\s*×\s*(?=\d)", "x", text)
    text = re.sub(r"(?<=[A-Za-z])\s*×\s*(?=[A-Za-z]\b)", " x ", text).replace("×", " x ")
    text = re.sub(r"\b([a-z])\s*[·⋅∙]\s*([a-z])\b", r"dot product of \1 and \2", text)
    for sign, ascii_text in SYMBOLS.items():
        text = text.replace(sign, ascii_text)
    return unicodedata.normalize("NFKC", text)


@lru_cache(maxsize=16384)
def fold(word: str) -> str:
    """One spelling for the forms of a word: lower case, no plural or possessive, -ize, no -ing, no final e."""
    word = word.lower().removesuffix("'s").replace("'", "")
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is", "as", "ous")):
        word = _singular(word)
    if len(word) > 6 and not word.endswith("wise"):
        word = re.sub(r"is(e|ed|er|ing|ation)$", r"iz\1", word)
    if len(word) > 5 and word.endswith("ing") and re.search(r"[aeiouy]", word[:-3]):
        word = re.sub(r"([bdglmnprt])\1$", r"\1", word[:-3])
    if len(word) > 3 and word.endswith("e"):
        word = word[:-1]
    return word


def _singular(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("ches", "shes", "xes", "sses", "zes")):
        return word[:-2]
    return word[:-1]


_IRREGULAR = {
    "matrices": "matrix", "indices": "index", "vertices": "vertex", "axes": "axis", "halves": "halv",
    "maxima": "maximum", "minima": "minimum", "colour": "color", "grey": "gray", "neighbour": "neighbor",
    "neighbours": "neighbor", "summing": "sum", "running": "running", "squares": "squared", "string": "string",
    "grade": "grade", "grades": "grade", "during": "during", "nothing": "nothing", "something": "something",
    "anything": "anything", "everything": "everything",
}  # fmt: skip

_INT = r"\d{1,3}(?:,\d{3})+(?!\d|,\d)|\d+(?:_\d{3})+|\d+"
_ATOM = r"(?:\d+\s*(?:\^|\*\*)\s*\d+|1\s*<<\s*\d+|\d+(?:\.\d+)?(?:[kKMmG]i?)(?![A-Za-z0-9])|\d+(?!\d|\.\d))"
_LEXER = re.compile(
    rf"""
      (?P<brackets>[\[(]\s*{_ATOM}(?:\s*,\s*{_ATOM})+\s*,?\s*[\])])
    | (?P<chain>{_ATOM}(?:\s*[xX]\s*{_ATOM})+(?![A-Za-z0-9]) | {_ATOM}(?:(?:\s+by\s+|-by-){_ATOM})+(?![A-Za-z0-9]))
    | (?P<product>{_ATOM}(?:\s*\*\s*{_ATOM})+)
    | (?P<power>\d+\s*(?:\^|\*\*)\s*\d+ | 1\s*<<\s*\d+ | 2\s+to\s+the\s+(?:power\s+(?:of\s+)?)?\d+(?:th)?)
    | (?P<suffixed>\d+(?:\.\d+)?(?:\s?[kKMG]i(?:B(?!\w))?|[kKMmG])(?![A-Za-z0-9]))
    | (?P<scientific>\d+(?:\.\d+)?[eE][+-]?\d+)
    | (?P<decimal>\d*\.\d+)(?![\w])
    | (?P<digitword>\d+[A-Za-z]\w*)
    | (?P<number>{_INT})
    | (?P<word>[^\W\d]\w*(?:'[a-z]+)?)
    | (?P<symbol>\S)
    """,
    re.VERBOSE,
)
_PARTS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+\d*[a-z]?|[A-Z]+\d*|\d+[A-Za-z]*|[^\W_]+")


def tokens(text: str) -> list[Token]:
    """The tokens of a text that `plain` has passed over."""
    return list(_magnitudes([token for match in _LEXER.finditer(text) for token in _read(match, text)]))


def sentences(found: Sequence[Token]) -> list[int]:
    """The number of the sentence that each token stands in."""
    numbers, number = [], 0
    for token, following in zip(found, [*found[1:], None], strict=True):
        numbers.append(number)
        if token.text in (".", "!", "?", ";") and following is not None:
            number += following.start > token.start + 1  # "np.dot" is one word
    return numbers


def _read(match: re.Match[str], text: str) -> Iterator[Token]:
    kind, found, start = match.lastgroup, match.group(), match.start()
    if kind in ("brackets", "chain"):
        parts = [_number(part) for part in re.findall(_ATOM, found)]
        notes = [note for _, note in parts if note]
        dims = tuple(int(value) for value, _ in parts)
        yield Token(
            kind="shape",
            text=found,
            start=start,
            dims=dims,
            bracketed=kind == "brackets",
            note=notes[0] if notes else None,
        )
    elif kind == "product":
        value = 1
        for part in re.findall(_ATOM, found):
            value *= int(_number(part)[0])
        yield Token(kind="number", text=found, start=start, value=value)
    elif kind in ("power", "suffixed", "scientific", "decimal", "number"):
        number, note = _number(found)
        before = text[:start].rstrip(" ")
        negative = before.endswith("-") and (len(before) == 1 or before[-2] in " =(,:[")
        yield Token(kind="number", text=found, start=start, value=-number if negative else number, note=note)
    elif kind in ("word", "digitword"):
        yield from _words(found, start, text)
    else:
        yield Token(kind="symbol", text=found, start=start)


def _words(found: str, start: int, text: str) -> Iterator[Token]:
    """A name in camel or snake case is several words."""
    parts = [found] if "'" in found or found.isupper() or (found.islower() and "_" not in found) else None
    pieces = parts or [part.group() for part in _PARTS.finditer(found)] or [found]
    hyphen = text[start + len(found) : start + len(found) + 2]
    tied = len(hyphen) == 2 and hyphen[0] == "-" and hyphen[1].isalnum()
    for position, piece in enumerate(pieces):
        last = position == len(pieces) - 1
        yield Token(kind="word", text=piece, start=start, folded=fold(piece), joined=tied if last else True)


def _number(text: str) -> tuple[float, str | None]:
    """Value of a numeral, and a note where it could be read in two ways."""
    text = "".join(text.split())
    if power := re.fullmatch(r"(\d+)(?:\^|\*\*)(\d+)", text):
        base, exponent = int(power[1]), int(power[2])
        return (float(base**exponent) if exponent <= 64 and base <= 1024 else float("inf")), None
    if shift := re.fullmatch(r"1<<(\d+)", text):
        return float(1 << min(int(shift[1]), 100)), None
    if words := re.fullmatch(r"2tothe(?:power(?:of)?)?(\d+)(?:th)?", text):
        return float(1 << min(int(words[1]), 100)), None
    if suffixed := re.fullmatch(r"(\d+(?:\.\d+)?)([kKMmG])(i?)B?", text):
        mantissa, unit = float(suffixed[1]), suffixed[2].lower()
        binary = bool(suffixed[3]) or (mantissa.is_integer() and int(mantissa) & (int(mantissa) - 1) == 0)
        value = mantissa * (BINARY if binary else DECIMAL)[unit]
        return value, (None if suffixed[3] else f"{text} was read as {value:.0f}")
    digits = text.replace(",", "").replace("_", "")
    return (float(digits) if len(digits) < 40 else float("inf")), None


def _magnitudes(found: list[Token]) -> Iterator[Token]:
    """Joins "16 million", "half a million" and "a billion" into one number."""
    index = 0
    while index < len(found):
        token = found[index]
        following = found[index + 1] if index + 1 < len(found) else None
        amount = (
            COUNTING.get(token.text.lower())
            if token.kind == "word"
            else token.value
            if token.kind == "number"
            else None
        )
        taken = 2
        if token.text.lower() == "half" and following is not None and following.text.lower() == "a":
            amount, taken = 0.5, 3
            following = found[index + 2] if index + 2 < len(found) else None
        magnitude = _magnitude(following) if amount is not None else None
        beyond = _magnitude(found[index + taken]) if index + taken < len(found) else None
        if magnitude == 100 and beyond is not None:  # "a hundred million"
            magnitude, taken = 100 * beyond, taken + 1
        if magnitude is not None and amount is not None:
            text = " ".join(item.text for item in found[index : index + taken])
            yield Token(kind="number", text=text, start=token.start, value=amount * magnitude)
            index += taken
        elif (
            token.kind == "word"
            and (alone := _magnitude(token)) is not None
            and alone >= 1000
            and token.text[-1] != "s"
        ):
            yield Token(kind="number", text=token.text, start=token.start, value=alone)
            index += 1
        else:
            yield token
            index += 1


def _magnitude(token: Token | None) -> int | None:
    if token is None or token.kind != "word":
        return None
    return MAGNITUDES.get(token.text.lower().removesuffix("s"))
