"""Prompts: templates of this package, filled with texts that are quoted so that they cannot end their quotation."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from string import Template

MAX_QUOTED_CHARACTERS = 24_000


def prompt(name: str, **texts: str) -> str:
    """The template `prompts/<name>.md` with its fields replaced, each once: a text that holds `$x` stays as it is."""
    return _template(name).substitute(texts)


@cache
def _template(name: str) -> Template:
    return Template((files("optiml.llm") / "prompts" / f"{name}.md").read_text(encoding="utf-8"))


def quoted(text: str, *, label: str, limit: int = MAX_QUOTED_CHARACTERS) -> str:
    """A stranger's text between fences longer than any inside it, without control characters, cut at `limit`."""
    plain = "".join(char for char in text if char in "\n\t" or char.isprintable())
    if len(plain) > limit:
        plain = f"{plain[:limit]}\n({len(plain) - limit} more characters)"
    longest = max((len(run) for run in re.findall(r"`+", plain)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"Quotation ({label}):\n{fence}\n{plain.strip(chr(10))}\n{fence}\nEnd of quotation.\n"
