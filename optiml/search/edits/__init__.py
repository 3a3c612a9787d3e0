"""The built-in edits, one per file; each file's `EDIT` is collected here."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from optiml.errors import InvalidInput
from optiml.search.edit import Edit


@cache
def all_edits() -> tuple[Edit, ...]:
    """Every built-in edit, by name."""
    modules = sorted(item.name for item in pkgutil.iter_modules(__path__))
    return tuple(importlib.import_module(f"{__name__}.{name}").EDIT for name in modules)


def edits_named(names: tuple[str, ...] | None) -> tuple[Edit, ...]:
    """The edits of an allow-list; None stands for all.

    Raises:
        InvalidInput: an unknown name.
    """
    if names is None:
        return all_edits()
    known = {edit.name: edit for edit in all_edits()}
    for name in names:
        if name not in known:
            raise InvalidInput(f"unknown edit {name!r}: use some of {', '.join(sorted(known))}")
    return tuple(known[name] for name in dict.fromkeys(names))
