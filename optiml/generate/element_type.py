"""The element type that a text asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from optiml.generate import vocabulary as words
from optiml.generate.phrases import Mention
from optiml.generate.refusal import Refused, spoken_name
from optiml.generate.words import Token
from optiml.problems.problem import Builtin

LABELLED = ("cross_entropy", "histogram")  # operators with an integer array beside the elements


def read_dtype(
    found: Sequence[Token], mentions: Sequence[Mention], builtin: Builtin, signature: str | None
) -> tuple[str | None, tuple[str, ...]]:
    """The element dtype that the text names, and notes on it."""
    notes: list[str] = []
    named = [words.IMPLIED_DTYPES[token.folded] for token in found if token.folded in words.IMPLIED_DTYPES]
    named += [signature] if signature is not None else []
    for item in mentions:
        if item.kind != "dtype" or item.negated:
            continue
        role = _role(found, item)
        if role == "accumulator":
            notes.append(f"{item.text} was read as the type of sums, which the kernels choose themselves")
        elif not (role == "label" and builtin.name in LABELLED):
            named.append(item.label)
    distinct = list(dict.fromkeys(named))
    if "mixed precision" in distinct:
        distinct.remove("mixed precision")
        distinct = distinct or ["float16"]
        notes.append(f"mixed precision was read as {distinct[0]} elements with float32 sums")
    integers = [dtype for dtype in distinct if "int" in dtype and dtype not in builtin.dtypes]
    if len(distinct) > 1 and integers and builtin.name in LABELLED:
        distinct = [dtype for dtype in distinct if dtype not in integers]
    if len(distinct) > 1:
        raise Refused(f"the text names several element types ({', '.join(distinct)}); give one")
    if not distinct:
        return None, (*notes, f"no dtype was given; {builtin.dtypes[0]} assumed")
    if distinct[0] not in builtin.dtypes:
        raise Refused(
            f"{spoken_name(builtin.name)} is not available in {distinct[0]}; choose from {', '.join(builtin.dtypes)}"
        )
    return distinct[0], tuple(notes)


def _role(found: Sequence[Token], item: Mention) -> Literal["element", "accumulator", "label"]:
    """What a dtype in the text is the type of, by the words around it."""
    after = [token.text.lower() for token in _clause(found, item.last + 1, 1)][:2]
    before = [token.text.lower() for token in _clause(found, item.first - 1, -1)][:3]
    before = before[:2] if before and before[0] in ("in", "as", "are", "of", "to", "with") else before[:1]
    if set(after) & words.ACCUMULATOR_WORDS or set(before) & words.ACCUMULATOR_WORDS:
        return "accumulator"
    if "int" in item.label and (set(after) | set(before)) & words.LABEL_WORDS:
        return "label"
    return "element"


def _clause(found: Sequence[Token], start: int, step: int) -> Iterator[Token]:
    """Words from `start` on in one direction, up to the next sign."""
    index = start
    while 0 <= index < len(found) and (found[index].kind == "word" or found[index].text == "-"):
        if found[index].kind == "word":
            yield found[index]
        index += step
