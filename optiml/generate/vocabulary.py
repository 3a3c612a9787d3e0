"""The words that the intent parser knows, read from `vocabulary.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

UNIQUE, USUAL, COMMON = 3, 2, 1  # how surely a phrase names an operator; COMMON ones are everyday words


@dataclass(frozen=True, kw_only=True)
class ShapeReading:
    """Which axes a written shape gives, and the words beside it that say so."""

    axes: tuple[str, ...]
    words: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """How people speak of one built-in operator; the fields are described in `vocabulary.toml`."""

    unique: tuple[str, ...] = ()
    usual: tuple[str, ...] = ()
    common: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    explains: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    fold: Literal["none", "all", "leading"] = "none"
    leading: tuple[str, ...] = ()
    fixed: Mapping[str, float] = field(default_factory=dict)
    letters: Mapping[str, str] = field(default_factory=dict)
    window: str = ""
    positional: tuple[str, ...] = ()
    assumes: tuple[str, ...] = ()
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    shapes: tuple[ShapeReading, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankHint:
    """A name that is an operator only with a certain number of dimensions."""

    operator: str
    settled_by: tuple[str, ...]
    excluded_by: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Modifier:
    """Phrases that change every operator but the ones listed."""

    phrases: tuple[str, ...]
    harmless_for: tuple[str, ...] = ()


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(" ".join(phrase.split()) for phrase in text.split(",") if phrase.strip())


def _groups(table: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {label: _phrases(text) for label, text in table.items()}


def _grammar(fields: dict[str, Any]) -> Grammar:
    listed = {
        name: _phrases(fields.get(name, "")) for name in ("unique", "usual", "common", "explains", "needs", "leading")
    }
    return Grammar(
        **listed,
        patterns=tuple(fields.get("patterns", ())),
        fold=fields.get("fold", "none"),
        fixed=fields.get("fixed", {}),
        letters=fields.get("letters", {}),
        window=fields.get("window", ""),
        positional=tuple(fields.get("positional", ())),
        assumes=tuple(fields.get("assumes", ())),
        axes=_groups(fields.get("axes", {})),
        shapes=tuple(
            ShapeReading(axes=tuple(item["axes"]), words=_phrases(item.get("words", "")))
            for item in fields.get("shapes", ())
        ),
    )


_TABLES = tomllib.loads((Path(__file__).parent / "vocabulary.toml").read_text(encoding="utf-8"))

GRAMMARS: Mapping[str, Grammar] = {name: _grammar(fields) for name, fields in _TABLES["operators"].items()}
RANK_HINTS: Mapping[str, RankHint] = {
    label: RankHint(
        operator=hint["operator"], settled_by=_phrases(hint["settled_by"]), excluded_by=_phrases(hint["excluded_by"])
    )
    for label, hint in _TABLES["rank_hints"].items()
}
MODIFIERS: Mapping[str, Modifier] = {
    label: Modifier(phrases=_phrases(item["phrases"]), harmless_for=_phrases(item.get("harmless_for", "")))
    for label, item in _TABLES["modifiers"].items()
}
FOREIGN = _groups(_TABLES["foreign"])
FOREIGN_PATTERNS: Mapping[str, list[str]] = _TABLES["foreign_patterns"]
ARITHMETIC = _groups(_TABLES["arithmetic"])
DTYPES = _groups(_TABLES["dtypes"])
IMPLIED_DTYPES: Mapping[str, str] = _TABLES["implied_dtypes"]
QUANTITIES = _groups(_TABLES["quantities"])
_WORDS = _groups(_TABLES["words"])
THEN = _WORDS["then"]
AFTERWARDS = _WORDS["afterwards"]
NEGATIONS = _WORDS["negations"]
COMPARISONS = _WORDS["comparisons"]
COMPARED_AFTER = _WORDS["compared_after"]
KERNEL_NOUNS = _WORDS["kernel_nouns"]
NEUTRAL = _WORDS["neutral"]
OTHER_TASKS = _WORDS["other_tasks"]
SURROUNDINGS = _WORDS["surroundings"]
ACCUMULATOR_WORDS = frozenset(_WORDS["accumulator"])
LABEL_WORDS = frozenset(_WORDS["label"])
MACHINE_WORDS_AFTER = _WORDS["machine_after"]
MACHINE_WORDS_BEFORE = _WORDS["machine_before"]
NOT_ENGLISH = frozenset(_WORDS["not_english"])
TECHNICAL = _WORDS["technical"]
PLAIN = (*_WORDS["plain"], *TECHNICAL)
