"""How the intent parser says no."""

from __future__ import annotations

from optiml.generate import vocabulary as words


class Refused(Exception):
    """The text cannot be read as a built-in problem; the message is one sentence for the caller."""


def spoken_name(problem: str) -> str:
    """The name of a problem as people say it."""
    return problem.replace("_", " ")


def not_built_in(label: str, text: str | None = None) -> str:
    """The refusal of an operator of the `foreign` table, or of one whose number of dimensions is missing."""
    if label in words.RANK_HINTS:
        known = spoken_name(words.RANK_HINTS[label].operator)
        return f"the text does not say how many dimensions {text!r} has; {known} is built in"
    quoted = f" ({text!r})" if text and text.lower() != label.lower() else ""
    return f"this asks for {label}{quoted}, which is not built in"
