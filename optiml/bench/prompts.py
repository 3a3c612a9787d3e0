"""The prompts of `optiml bench generate`, each with the problem that judges its answers."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optiml.codec import decode
from optiml.errors import InvalidInput
from optiml.problems.problem import check_problem, load_builtin, with_dtype
from optiml.records import Problem

PROMPTS = Path(__file__).parent / "prompts.toml"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A task in words. `inside` says that the catalogue has its operator."""

    id: str
    text: str
    problem: Problem
    inside: bool


def load_prompts(path: Path = PROMPTS) -> tuple[Prompt, ...]:
    """All prompts of a file.

    Raises:
        InvalidInput: a prompt without a usable problem, by its id.
    """
    tables = tomllib.loads(path.read_text(encoding="utf-8"))["prompt"]
    return tuple(_prompt(table) for table in tables)


def _prompt(table: Mapping[str, Any]) -> Prompt:
    name, own = table.get("problem"), table.get("own")
    if (name is None) == (own is None):
        raise InvalidInput(f"prompt {table['id']}: give either problem or own")
    if own is not None:
        for tensor in own["inputs"].values():
            tensor.setdefault("shape", None)  # TOML has no null
        problem = check_problem(decode(Problem, own, what=f"prompt {table['id']}"))
    else:
        builtin = load_builtin(str(name))
        problem = with_dtype(builtin, table["dtype"]) if "dtype" in table else builtin.problem
    return Prompt(id=table["id"], text=table["text"], problem=problem, inside=own is None)
