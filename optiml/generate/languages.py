"""Short requests in other languages, put into the English that the other stages read.

Word by word, from a small table: what the table lacks stays and is refused as an unknown word, so nothing is guessed.
The reader of the answer is told what was read.
"""

from __future__ import annotations

import re
import tomllib
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SIGNS_NEEDED = 2  # words of the language, in a text whose letters could be English


@dataclass(frozen=True, kw_only=True)
class Language:
    """One language: how it is recognised, and its phrases with their English."""

    name: str
    signs: tuple[str, ...]
    scripts: tuple[str, ...]  # first words of the Unicode names of its letters
    english: Mapping[str, str]

    @property
    def spaced(self) -> bool:
        return not self.scripts


@cache
def languages() -> tuple[Language, ...]:
    """The languages of `languages.toml`."""
    tables = tomllib.loads((Path(__file__).parent / "languages.toml").read_text(encoding="utf-8"))
    return tuple(
        Language(
            name=name,
            signs=_listed(table.get("signs", "")),
            scripts=_listed(table.get("script", "")),
            english={phrase: english for english, phrases in table["words"].items() for phrase in _listed(phrases)},
        )
        for name, table in tables.items()
    )


def in_english(text: str) -> tuple[str, str | None]:
    """The text with the words of its language translated, and the language; the text itself where it is English."""
    text = unicodedata.normalize("NFC", text)
    found = _language(text.lower())
    if found is None:
        return text, None
    for phrase in sorted(found.english, key=len, reverse=True):
        text = _pattern(phrase, found.spaced).sub(f" {found.english[phrase]} ", text)
    text = text.replace("，", ", ").replace("。", ". ").replace("、", ", ")
    return " ".join(text.split()), found.name


def _language(text: str) -> Language | None:
    names = [unicodedata.name(char, "") for char in text if char.isalpha() and ord(char) > 127]
    for language in reversed(languages()):  # Japanese before Chinese: it has a script of its own beside the shared one
        if language.scripts and any(name.startswith(language.scripts) for name in names):
            return language
    known = {language.name: sum(_holds(text, sign) for sign in language.signs) for language in languages()}
    best = max(languages(), key=lambda language: known[language.name])
    accented = any(name.startswith("LATIN") for name in names)
    return best if known[best.name] >= SIGNS_NEEDED - accented and known[best.name] > 0 else _compound(text)


def _compound(text: str) -> Language | None:
    """The language of one long word that says it all ("Matrixmultiplikation")."""
    for language in languages():
        if any(len(sign) >= 10 and _holds(text, sign) for sign in language.signs):
            return language
    return None


def _holds(text: str, phrase: str) -> bool:
    return _pattern(phrase, True).search(text) is not None


@cache
def _pattern(phrase: str, spaced: bool) -> re.Pattern[str]:
    return re.compile(rf"(?i)(?<!\w){re.escape(phrase)}(?!\w)" if spaced else re.escape(phrase))


def _listed(text: str) -> tuple[str, ...]:
    return tuple(" ".join(part.split()) for part in text.split(",") if part.strip())
