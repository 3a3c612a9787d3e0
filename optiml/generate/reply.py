"""What a model wrote, read strictly: one kernel file or one JSON object, or a sentence that says what is wrong.

The text is data. Its comments are dropped before anyone else sees the code, and its prose is read by nobody.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optiml.codec import MAX_SOURCE_BYTES
from optiml.errors import InvalidInput
from optiml.kernel_file import read_kernel_text
from optiml.llm.model import Completion
from optiml.problems.kernel_check import check_kernel
from optiml.records import Kernel, Problem
from optiml.toolchain.scan import without_comments, without_comments_and_strings
from optiml.toolchain.signatures import with_launches

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^\n]*$", re.MULTILINE)
_PLAN = re.compile(r"\A\s*/\*\s*optiml[ \t]*\n")
_BEGINS_LIKE_CODE = re.compile(r"\A\s*(?:/\*\s*optiml\b|#\s*include\b|extern\b|template\b|__global__\b|__device__\b)")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced part of a text; `closed` is false where the text ended first."""

    language: str
    text: str
    closed: bool


def blocks_in(text: str) -> tuple[Block, ...]:
    """The fenced parts of a text, in order; a fence is closed by one of its kind that is at least as long."""
    found: list[Block] = []
    place = 0
    while (opening := _FENCE.search(text, place)) is not None:
        mark = opening[1]
        closing = re.compile(rf"^[ \t]*{re.escape(mark[0])}{{{len(mark)},}}[ \t]*$", re.MULTILINE)
        end = closing.search(text, opening.end())
        body = text[opening.end() + 1 : len(text) if end is None else end.start()]
        found.append(Block(language=opening[2].lower(), text=body, closed=end is not None))
        place = len(text) if end is None else end.end()
    return tuple(found)


def kernel_in(completion: Completion, problem: Problem) -> Kernel:
    """The kernel of a completion, complete with launch plan and checked against its problem.

    Raises:
        InvalidInput: what is wrong with it, as a sentence for whoever wrote it.
    """
    text = _code_in(completion)
    if len(text.encode("utf-8", errors="replace")) > MAX_SOURCE_BYTES:
        raise InvalidInput("the code is larger than 1 MiB: send a shorter one", code="too_large")
    kernel = read_kernel_text(text)
    if kernel.launcher is not None:
        raise InvalidInput("a launcher is host code: give launches in the optiml comment instead")
    code = without_comments_and_strings(kernel.source)
    if "<<<" in code or re.search(r"\bmain\s*\(", code):
        raise InvalidInput("the file holds host code: give device code only, and launches in the optiml comment")
    plain = dataclasses.replace(kernel, source=_tidy(without_comments(kernel.source)))
    planned, _ = with_launches(plain, problem)
    return check_kernel(planned, problem)


def _tidy(source: str) -> str:
    """Lines without trailing space; line numbers stay."""
    return "\n".join(line.rstrip() for line in source.split("\n"))


def _code_in(completion: Completion) -> str:
    text = completion.text.replace("\r\n", "\n")
    holding = [block for block in blocks_in(text) if "__global__" in block.text]
    if not holding:
        if "__global__" in text and _BEGINS_LIKE_CODE.match(text) and completion.finish_reason == "stop":
            return text
        if completion.finish_reason == "length":
            raise InvalidInput("the reply ended before the code did: write a shorter file")
        if not text.strip():
            raise InvalidInput("the reply is empty: send one code block with a __global__ function")
        raise InvalidInput("the reply holds no code block with a __global__ function: send exactly one")
    if len(holding) > 1:
        planned = [block for block in holding if _PLAN.match(block.text)]
        if len(planned) != 1 and len({block.text for block in holding}) > 1:
            raise InvalidInput(f"the reply holds {len(holding)} code blocks with kernels: send one file in one block")
        holding = planned[:1] or holding[:1]
    if not holding[0].closed:
        raise InvalidInput("the reply ended before the code did: write a shorter file")
    return holding[0].text


def object_in(completion: Completion) -> dict[str, Any]:
    """The one JSON object of a completion: fenced, or the whole text.

    Raises:
        InvalidInput: there is none, or more than one.
    """
    text = completion.text.strip()
    fenced = [block.text for block in blocks_in(text) if block.language in ("json", "") and "{" in block.text]
    sources: Sequence[str] = fenced or [text]
    if len(sources) > 1:
        raise InvalidInput(f"the reply holds {len(sources)} code blocks: send one JSON object")
    try:
        found = json.loads(sources[0], parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        ended = " (it was cut off: write a shorter one)" if completion.finish_reason == "length" else ""
        raise InvalidInput(f"the reply is not one JSON object{ended}: {str(error)[:120]}") from error
    if not isinstance(found, dict):
        raise InvalidInput("the reply is JSON but no object: send one object")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
