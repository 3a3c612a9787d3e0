"""Formulas in a request: the ones that name an operator, and arithmetic that the operator does not explain."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Formula:
    """A formula that is known as a whole; `foreign` ones belong to no built-in operator."""

    label: str
    text: str
    foreign: bool = False


_I = r"(?:\[[^\[\]]*\]|_\{[^{}]*\}|_[a-z]\b)"  # one index: [i], _i, _{i}
_V = rf"[A-Za-z]\w{{0,11}}{_I}*"  # a name with indices
_S = r"(?:sum_?(?:\{[^{}]*\}|_?[a-z]\b)?)"
_ZERO = r"0(?:\.0*)?f?"
_T = r"(?:\^\{?T\}?|\.T\b|\.t\(\)|'|\.transpose\(\))"
_END = r"(?![\w\[(])(?!\s*[-+*/@^.|]\s*[\w(\[])"
_START = r"(?<![\w\])])(?<![-+*/@^|(])"
_LEFT = rf"(?:{_V}\s?=\s?)"

# Tried in order on the text with spaces around signs removed; what one matches, the later ones do not see.
_KNOWN: Sequence[tuple[str, str, bool]] = (
    ("multi_head_attention", rf"{_LEFT}?softmax\(\(?Q\s?[@*]?\s?K{_T}\)?(?:/sqrt\(?\w+\)?)?\)\s?[@*]?\s?V\b", False),
    ("GELU with the tanh approximation", r"0\.5\*?\w+\*?\(1\+tanh\([^=]*\)", True),
    ("gelu", rf"{_LEFT}?(?:0\.5\*?\(?{_V}\)?\*?\(1(?:\.0f?)?\+erff?\({_V}/(?:sqrtf?\(2(?:\.0f?)?\)|1\.41\d*)\)\)|{_V}\*?Phi\({_V}\))" + _END, False),
    ("relu", rf"{_START}{_LEFT}?(?:np\.|torch\.|std::)?f?max(?:f|imum)?\((?:{_V},{_ZERO}|{_ZERO},{_V})\){_END}", False),
    ("relu", rf"{_LEFT}?\(?{_V}>=?{_ZERO}\)?\?{_V}:{_ZERO}", False),
    ("matmul with a transposed operand", rf"{_V}{_T}\s?[@*]\s?{_V}|{_V}\s?[@*]\s?{_V}{_T}|\b[A-Z]\^T[A-Z]\b|\b[A-Z]{{1,2}}\^T(?=\W|$)(?<=[A-Z][A-Z]\^T)", True),
    ("transpose", rf"{_LEFT}(?:{_V}{_T}|transpose\({_V}\)){_END}", False),
    ("transpose", rf"{_START}\b[A-Za-z]\w{{0,8}}(?:\.T\b|\.t\(\)|\^T\b){_END}", False),
    ("transpose", r"\b[A-Za-z]\w*\[(\w+)\](?:\[(\w+)\])=[A-Za-z]\w*\[\2\]\[\1\]" + _END, False),
    ("transpose", r"\b[A-Za-z]\w*\[(\w+),(\w+)\]=[A-Za-z]\w*\[\2,\1\]" + _END, False),
    ("matrix_copy", r"\b[A-Za-z]\w*\[(\w+)\]\[(\w+)\]=[A-Za-z]\w*\[\1\]\[\2\]" + _END, False),
    ("matrix_copy", r"\b[A-Za-z]\w*\[(\w+),(\w+)\]=[A-Za-z]\w*\[\1,\2\]" + _END, False),
    ("matmul", rf"\b\w+\[(\w+)(?:,|\]\[)(\w+)\]\+?={_S}?\s?(?:over\s\w+\s(?:of\s)?)?\(?\w+\[\1(?:,|\]\[)(\w+)\]\s?\*?\s?\w+\[\3(?:,|\]\[)\2\]\)?" + _END, False),
    ("a product with something added", rf"{_LEFT}(?:\w+\*)?{_V}\s?[@*]\s?{_V}\+{_V}", True),
    ("matmul", r"\b[A-Z]\s?=\s?[A-Z]\s?[@*]\s?[A-Z]\b" + _END, False),
    ("matmul", r"\b[A-Z]=[A-Z]\s?x\s?[A-Z]\b" + _END, False),
    ("matmul", r"\b(?:[A-Za-z]\w{0,5}=)?[A-Z]@[A-Z]\b" + _END, False),
    ("matmul", r"\bC=AB\b" + _END, False),
    ("matmul", r"\b(?:np|torch|jnp|cp)\.(?:matmul|mm)\(\w+,\w+\)" + _END, False),
    ("matrix-vector product", r"\b[a-z]=[A-Z]\s?[@*]?\s?[a-z]\b", True),
    ("vector_add", rf"{_START}\b(?P<c>[A-Za-z]\w{{0,8}}){_I}*=(?!(?P=c)\b)(?P<a>[A-Za-z]\w{{0,8}}){_I}*\+(?!(?P=a)\b|(?P=c)\b)[A-Za-z]\w{{0,8}}{_I}*{_END}", False),
    ("exclusive scan", rf"{_V}={_S}_?\{{?j\s?<\s?i\}}?", True),
    ("prefix_sum", rf"{_LEFT}?[a-z]\w*(?:\[0\]|_0|_\{{0\}}|\[1\]|_1)\+(?:[a-z]\w*(?:\[1\]|_1)\+)?\.\.\.\+[a-z]\w*(?:\[i\]|_i|_\{{i\}})" + _END, False),
    ("prefix_sum", r"\b([a-z]\w*)\[i\]=\1\[i-1\]\+(?!\1\b)[a-z]\w*\[i\]" + _END, False),
    ("prefix_sum", rf"{_V}={_S}_?\{{?j\s?<=\s?i\}}?\s?{_V}", False),
    ("dot", rf"{_LEFT}?{_S}\s?\(?([a-z]\w{{0,5}}){_I}*\s?\*\s?(?!\1\b)([a-z]\w{{0,5}}){_I}*\)?{_END}", False),
    ("dot", rf"{_LEFT}?\b([a-z]){_T}\s?(?!\1)[a-z]\b{_END}", False),
    ("sum", rf"{_START}{_LEFT}?(?:np\.|torch\.)?sum\([a-z]\w{{0,5}}{_I}?\){_END}", False),
    ("sum", rf"{_START}{_LEFT}?{_S}\s?x(?:\[i\]|_i|_\{{i\}}){_END}", False),
)  # fmt: skip
_COMPILED = tuple((label, re.compile(pattern), foreign) for label, pattern, foreign in _KNOWN)
_RESIDUAL = re.compile(
    r"(?:[\w\])][ \t]*(?:[*@^|]|(?<![A-Za-z])/(?![A-Za-z])|\s[-+]\s|(?<=[\])])[-+](?=[\w(\[])|(?<=\w)\+(?=\w)|\*\*)[ \t]*[\w(\[|])|\+=|\|\s*\w+\s*\|"
)


def find_formulas(text: str) -> tuple[list[Formula], str]:
    """Known formulas, and the text with them taken out."""
    formulas: list[Formula] = []
    for label, pattern, foreign in _COMPILED:
        squeezed, places = _squeeze(text)
        match = pattern.search(squeezed)
        if match is None:
            continue
        formulas.append(Formula(label=label, text=match.group(), foreign=foreign))
        start, end = places[match.start()], places[match.end() - 1] + 1
        text = f"{text[:start]} ; {text[end:]}"
    return formulas, text


def _squeeze(text: str) -> tuple[str, list[int]]:
    """The text without spaces around signs, and where each of its characters stood."""
    kept: list[str] = []
    places: list[int] = []
    for index, char in enumerate(text):
        if char in " \t":
            before = kept[-1] if kept else " "
            after = text[index + 1 :].lstrip(" \t")[:1]
            if before in "=+*/@^([,<>?: " or after in "=+*/@^)]<>?":
                continue
            if before in ")]" and after and not after.isalnum():
                continue
        kept.append(char)
        places.append(index)
    return "".join(kept), places


def unexplained_arithmetic(text: str, *, symbols: str) -> str | None:
    """The first piece of arithmetic in the text that uses a sign outside `symbols`; None where there is none.

    Products and powers of plain numbers are sizes, "x" between names is a shape, and "/" between words is an "or".
    """
    numbers_out = re.sub(r"\d[\d_.,]*\s*(?:\*\*|\^|\*|<<)\s*\d+(?:\s*\*\s*\d+)*", "0", text)
    for match in _RESIDUAL.finditer(numbers_out):
        piece = match.group()
        signs = set(re.sub(r"[\w\s()\[\]]", "", piece))
        if not signs <= set(symbols):
            around = numbers_out[max(0, match.start() - 20) : match.end() + 20]
            return " ".join(around.split())
    return None
