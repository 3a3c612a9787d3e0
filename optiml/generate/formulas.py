"""Formulas in a request: the ones that name an operator, and arithmetic that the operator does not explain."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from optiml.generate.vocabulary import GRAMMARS


@dataclass(frozen=True, kw_only=True)
class Formula:
    """A formula that is known as a whole; `foreign` ones belong to no built-in operator."""

    label: str
    text: str
    foreign: bool = False


_I = r"(?:\[[^\[\]]*\]|_\{[^{}]*\}|_[a-z]\b)"  # one index: [i], _i, _{i}
_V = rf"[A-Za-z]\w{{0,11}}{_I}*"  # a name with indices
_S = r"(?:sum_?(?:\{[^{}]*\}|_?[a-z]\b)?)"  # a sum, perhaps with its range
_0 = r"0(?:\.0*)?f?"
_T = r"(?:\^\{?T\}?|\.T\b|\.t\(\)|'|\.transpose\(\))"
_LEFT = rf"(?:{_V}=)"
_START = r"(?<![\w\])])(?<![-+*/@^|(])"  # not inside a larger expression
_END = r"(?![\w\[(])(?!\s*[-+*/@^.|]\s*[\w(\[])"
_STOP = r"(?![\w\[(])(?!\s*[-+*/@^|])"  # the end of a statement, perhaps of a sentence
_ROOT_2 = r"(?:sqrtf?\(2(?:\.0f?)?\)|1\.41\d*)"
_MEAN_SQUARE = rf"mean\({_V}(?:\^2|\*\*2|\*{_V})\)"
_LESS_MAX = r"(?:\s?-\s?(?:m|max\w*(?:\(\w*\))?))?"
_ROW_COLUMN = r"\[(\w+)(?:,|\]\[)(\w+)\]"

# Tried in order on the text with spaces around signs removed; what one matches, the later ones do not see.
_KNOWN: Sequence[tuple[str, str]] = (
    (
        "multi_head_attention",
        rf"{_LEFT}?softmax\(\(?[Qq]\s?[@*]?\s?[Kk]{_T}\)?(?:/sqrt\(?\w+\)?)?\)\s?[@*]?\s?[Vv]\b",
    ),
    (
        "gelu",
        rf"{_LEFT}?(?:(?:0\.5\*?\(?{_V}\)?|{_V}\*0\.5)\*?\(1(?:\.0f?)?\+erff?\({_V}/{_ROOT_2}\)\)|{_V}\*?Phi\({_V}\)){_END}",
    ),
    (
        "cross_entropy",
        rf"{_LEFT}?log\({_S}\s?exp\((?:{_V}|\w\[\w,\w\])\)\)\s?-\s?[a-z](?:_\{{?\w,?\s?y_?\w\}}?"
        rf"|\[\w(?:,|\]\[)(?:y|labels?|targets?)(?:_?\w|\[\w\])?\]){_END}",
    ),
    (
        "cross_entropy",
        rf"{_LEFT}?-\s?log\(softmax\({_V}\)(?:\[(?:y|labels?|targets?)(?:_?\w|\[\w\])?\])\){_END}",
    ),
    (
        "softmax",
        rf"{_LEFT}?exp\({_V}{_LESS_MAX}\)/\(?{_S}\s?\(?exp\({_V}{_LESS_MAX}\)\)?{_END}",
    ),
    ("rmsnorm", rf"{_LEFT}?{_V}/rms\({_V}\)\*{_V}{_END}"),
    (
        "rmsnorm",
        rf"{_LEFT}?{_V}(?:/sqrt\(|\*rsqrt\(){_MEAN_SQUARE}(?:\+(?:eps\w*|1e-0?6|0?\.0+1))?\)(?:\*{_V})?{_END}",
    ),
    (
        "layernorm",
        rf"{_LEFT}?\({_V}-(?:mean|mu)(?:\({_V}\))?\)(?:/sqrt\(|\*rsqrt\()(?:var|variance|sigma\^2)(?:\({_V}\))?"
        rf"(?:\+(?:eps\w*|1e-0?5))?\)\*(?:gamma|weight|w|g)\+(?:beta|bias|b){_END}",
    ),
    ("relu", rf"{_START}{_LEFT}?(?:np\.|torch\.|std::)?f?max(?:f|imum)?\((?:{_V},{_0}|{_0},{_V})\){_END}"),
    ("relu", rf"{_LEFT}?\(?{_V}>=?{_0}\)?\?{_V}:{_0}"),
    ("a quadratic form", rf"\b[a-z]{_T}\s?[@*]?\s?[A-Z]\s?[@*]?\s?[a-z]\b"),
    ("matmul with a transposed operand", rf"\b[A-Z](?:{_T})?\s(?:times|by|with|and)\s[A-Z]{_T}"),
    ("matmul with a transposed operand", rf"\b[A-Z]{_T}\s(?:times|by|with|and)\s[A-Z]\b"),
    ("matmul with a transposed operand", rf"{_V}{_T}\s?[@*]\s?{_V}|{_V}\s?[@*]\s?{_V}{_T}"),
    ("matmul with a transposed operand", r"\b[A-Z]\^T\s?[A-Z]\b|\b[A-Z]\s?[A-Z]\^T(?=\W|$)"),
    ("transpose", rf"{_START}\b[A-Za-z]\w{{0,8}}(?:\.T|\.t\(\))\.(?:contiguous|copy|clone)\(\){_END}"),
    ("transpose", rf"{_LEFT}(?:{_V}{_T}|transpose\({_V}\)){_END}"),
    ("transpose", rf"{_START}\b[A-Za-z]\w{{0,8}}(?:\.T\b|\.t\(\)|\^T\b){_END}"),
    ("transpose", rf"\b[A-Za-z]\w*{_ROW_COLUMN}=[A-Za-z]\w*\[\2(?:,|\]\[)\1\]{_END}"),
    ("matrix_copy", rf"\b[A-Za-z]\w*{_ROW_COLUMN}=[A-Za-z]\w*\[\1(?:,|\]\[)\2\]{_END}"),
    (
        "matmul",
        rf"\b\w+{_ROW_COLUMN}\+?={_S}?\s?(?:over\s\w+\s(?:of\s)?)?"
        rf"\(?\w+\[\1(?:,|\]\[)(\w+)\]\s?\*?\s?\w+\[\3(?:,|\]\[)\2\]\)?{_END}",
    ),
    ("a product with something added", rf"{_LEFT}(?:\w+\*)?{_V}\s?[@*]\s?{_V}\+{_V}"),
    ("matmul", rf"\b[A-Z]=[A-Z](?:\s?[@*]\s?|\s?x\s?)[A-Z]\b{_END}"),
    ("matmul", rf"\b(?:[A-Za-z]\w{{0,5}}=)?[A-Z]@[A-Z]\b{_END}"),
    ("matmul", rf"{_START}(?<![=\[,])\b[A-Z][*@][A-Z]\b(?!=|,|\]){_END}"),
    ("matmul", rf"\bC=A\s?B\b{_END}(?!\^)"),
    ("matmul", rf"{_START}\b(?:[a-z]=)?[a-z]@[a-z]\b{_END}"),
    ("matmul", rf"\b(?:np|torch|jnp|cp)\.(?:matmul|mm)\(\w+,\w+\){_END}"),
    ("vector_add", rf"{_START}{_LEFT}?(?:np|torch|jnp|cp)\.add\(\w+,\w+\){_END}"),
    ("matrix-vector product", r"\b[a-z]=[A-Z]\s?[@*]?\s?[a-z]\b"),
    (
        "vector_add",
        rf"{_START}\b(?P<c>[A-Za-z]\w{{0,8}}){_I}*=(?!(?P=c)\b)(?P<a>[A-Za-z]\w{{0,8}}){_I}*"
        rf"\+(?!(?P=a)\b|(?P=c)\b)[A-Za-z]\w{{0,8}}{_I}*{_END}",
    ),
    ("vector_add", rf"{_START}(?<!=)\b([a-z])\+(?!\1)[a-z]\b{_END}"),
    ("exclusive scan", rf"{_V}={_S}_?\{{?j\s?<\s?i\}}?"),
    (
        "prefix_sum",
        rf"{_LEFT}?[a-z]\w*(?:\[[01]\]|_[01]|_\{{[01]\}})\+(?:[a-z]\w*(?:\[[12]\]|_[12])\+)?"
        rf"\.\.\.\+[a-z]\w*(?:\[i\]|_i|_\{{i\}}){_END}",
    ),
    ("prefix_sum", rf"\b([a-z]\w*)\[i\]=\1\[i-1\]\+(?!\1\b)[a-z]\w*\[i\]{_END}"),
    ("prefix_sum", rf"{_V}={_S}_?\{{?j\s?<=\s?i\}}?\s?{_V}"),
    ("prefix_sum", rf"{_V}={_S}\s?(?:of\s)?\(?[a-z]\w*\[[01]?\s?(?:\.\.\.?|:)\s?i(?:\+1)?\]\)?"),
    (
        "prefix_sum",
        r"\b(?:[a-z]\w*(?:\[i\]|_i)\s?(?:=|is|equals|holds|contains)\s?)?(?:the\s)?sum\sof\s(?:all\s)?(?:elements\s|values\s)?"
        r"(?:of\s)?[a-z]\w*(?:\[[01]\]|_[01])\s?(?:through|to|up to|,\.\.\.,)\s?[a-z]\w*(?:\[i\]|_i)",
    ),
    ("one sum per index", r"\b[a-z]\w*(?:\[[ijk]\]|_[ijk])\s(?:is|equals|holds|contains)\b"),
    ("one sum per index", rf"[A-Za-z]\w*(?:\[\w\]|_[ijk]\b)={_S}\b"),
    ("dot", rf"\b[a-z]\w*\+=([a-z]\w*){_I}\*(?!\1\b)[a-z]\w*{_I}{_STOP}"),
    ("sum", rf"\b(?:sum|total|acc|s|result|out)\+=[a-z]\w*{_I}?{_STOP}"),
    ("dot", rf"{_LEFT}?{_S}\s?\(?([a-z]\w{{0,5}}){_I}*\s?\*\s?(?!\1\b)([a-z]\w{{0,5}}){_I}*\)?{_END}"),
    ("dot", rf"{_LEFT}?\b([a-z]){_T}\s?(?!\1)[a-z]\b{_END}"),
    ("dot", rf"\bsum (?:over [a-z] )?of ([a-z]\w{{0,5}}){_I}*\*(?!\1\b)[a-z]\w{{0,5}}{_I}*{_END}"),
    (
        "sum",
        rf"{_LEFT}?([a-z]\w*)(?:\[[01]\]|_[01])\+(?:\1(?:\[\d\]|_\d)\+)*\.\.\.\+\1(?:\[[nN](?:-1)?\]|_\{{?[nN](?:-1)?\}}?){_END}",
    ),
    ("sum", rf"{_START}{_LEFT}?(?:np\.|torch\.)?sum\([a-z]\w{{0,5}}{_I}?\){_END}"),
    ("sum", rf"{_START}{_LEFT}?{_S}\s?x(?:\[i\]|_i|_\{{i\}}){_END}"),
)
_COMPILED = tuple((label, re.compile(pattern)) for label, pattern in _KNOWN)
_SIGN = (
    r"(?:[*@^|]|\*\*|(?<![A-Za-z])/(?![A-Za-z])|\s\+\s|(?:(?<=[\])])|(?<=\b\w))\s-\s(?=\w\b|\w+[\[(])"
    r"|(?<=[\])])[-+](?=[\w(\[])|(?<=\w)\+(?=\w))"
)
_ARITHMETIC = re.compile(rf"[\w\])][ \t]*{_SIGN}[ \t]*[\w(\[|]|\+=|\|[^|\n]{{1,40}}\|")

_SIZE = r"(?:[A-Z]|batch|seq|tokens|heads|rows)"
_SIZE_PRODUCT = re.compile(rf"(?<=\[){_SIZE}(?:\*{_SIZE})+(?=[,\]])|\b{_SIZE}(?:\*{_SIZE})+(?=\s*=\s*\d)")
_MINUS = re.compile(r"(?:^|(?<=[\s(,=]))-(?=[A-Za-z]\w*\(|[a-z]\b)")


def find_formulas(text: str) -> tuple[list[Formula], str]:
    """Known formulas, and the text with them taken out."""
    formulas: list[Formula] = []
    squeezed, places = _squeeze(text)
    for label, pattern in _COMPILED:
        match = pattern.search(squeezed)
        if match is None:
            continue
        formulas.append(Formula(label=label, text=match.group(), foreign=label not in GRAMMARS))
        start, end = places[match.start()], places[match.end() - 1] + 1
        text = f"{text[:start]} ; {text[end:]}"
        squeezed, places = _squeeze(text)
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
            if before in ")]" and after and after != "(" and not after.isalnum():
                continue
        kept.append(char)
        places.append(index)
    return "".join(kept), places


def unexplained_arithmetic(text: str) -> str | None:
    """The first piece of arithmetic that stands in the text outside a known formula; None where there is none.

    Products and powers of plain numbers and of names of sizes are sizes, "x" between names is a shape, and "/" between
    words is an "or".
    """
    numbers_out = re.sub(r"\d[\d_.,]*\s*(?:\*\*|\^|\*|<<)\s*\d+(?:\s*\*\s*\d+)*", "0", text)
    sizes_out = _SIZE_PRODUCT.sub("n", numbers_out)
    match = _ARITHMETIC.search(sizes_out) or _MINUS.search(sizes_out)
    if match is None:
        return None
    return " ".join(sizes_out[max(0, match.start() - 20) : match.end() + 20].split())
