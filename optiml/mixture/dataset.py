"""Pairs of intent and kernel, as JSON lines: built from the catalogue, or the user's own.

A line is `{"schema": 1, "intent", "kernel"}` with the kernel as the text of a `.cu` file, and optionally `problem` (the
name of a built-in one), `dtype`, `family`, `strategy` and `kernel_id`. Built pairs have all of them, and were accepted.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from optiml.codec import kernel_id
from optiml.errors import InvalidInput
from optiml.generate.generate import catalogue_candidates
from optiml.generate.writer import kernel_question
from optiml.kernel_file import write_kernel_text
from optiml.llm.model import Message
from optiml.mixture.conversation import answer_of, prompt_of
from optiml.problems.problem import builtin_names, load_builtin, with_dtype
from optiml.records import Kernel, Problem, Verdict

SCHEMA = 1
OTHER = "other"  # the family of a pair that names none
MAX_LINE_BYTES = 1 << 20
_KNOWN = ("schema", "intent", "kernel", "problem", "dtype", "family", "strategy", "kernel_id")
_DTYPE_WORDS = {
    "float32": ("float32", "fp32", "single precision", "float"),
    "float16": ("float16", "fp16", "half precision", "half"),
    "bfloat16": ("bfloat16", "bf16", "brain float"),
    "float64": ("float64", "fp64", "double precision", "double"),
    "int32": ("int32", "32-bit integer", "int"),
}
_SENTENCES = (
    "{dtype} {name}",
    "write a CUDA kernel for {name} in {dtype}",
    "{name}, {dtype}, {sizes}",
    "I need {name} on {dtype} data",
    "please give me a fast {name} kernel; the data type is {dtype}",
    "{name} ({dtype}) with {sizes}",
    "{name} in {dtype}: {title}",
    "a {dtype} kernel that does {name}, {title}",
)

Verify = Callable[[Kernel, Problem], Verdict]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line of a data set."""

    intent: str
    kernel: str
    problem: str | None = None
    dtype: str | None = None
    family: str = OTHER
    strategy: str = ""
    kernel_id: str = ""

    def to_line(self) -> str:
        """As a line of JSON."""
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, ensure_ascii=False) + "\n"

    @property
    def prompt(self) -> str:
        """What a mixture reads: the task as the writer puts it, or the bare intent where no problem is named."""
        if self.problem is None:
            return prompt_of([Message(role="user", text=self.intent)], instructed=False)
        return prompt_of(kernel_question(_problem(self.problem, self.dtype), self.intent), instructed=False)

    @property
    def answer(self) -> str:
        """What it should write."""
        return answer_of(self.kernel)


def _problem(name: str, dtype: str | None) -> Problem:
    builtin = load_builtin(name)
    return builtin.problem if dtype is None else with_dtype(builtin, dtype)


def build_records(
    verify: Verify,
    *,
    problems: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    variants: int = 2,
    intents: int = 4,
    seed: int = 0,
    on_refused: Callable[[str, Verdict], None] | None = None,
) -> Iterator[Record]:
    """Verified pairs from the built-in problems, one kernel after the other.

    Args:
        verify: only kernels that it accepts come out.
        problems: names; all by default.
        dtypes: element types; all that a problem has, by default.
        variants: how many choices of a strategy's tunables, its own included.
        intents: how many paraphrases of each.
        seed: decides which tunables and which words.
        on_refused: told of kernels that were left out.
    """
    for name in problems if problems is not None else builtin_names():
        builtin = load_builtin(name)
        for dtype in builtin.dtypes:
            if dtypes is not None and dtype not in dtypes:
                continue
            problem = with_dtype(builtin, dtype)
            for candidate in catalogue_candidates(problem):
                choice = np.random.default_rng([seed, *f"{name} {dtype} {candidate.strategy}".encode()])
                for kernel in _tuned(candidate.kernel, variants, choice):
                    verdict = verify(kernel, problem)
                    if verdict.status != "accepted":
                        if on_refused is not None:
                            on_refused(f"{name} {dtype} {candidate.strategy}", verdict)
                        continue
                    title = candidate.rationale.split(":", 1)[0]
                    bare = dataclasses.replace(kernel, tunables={})
                    for intent in _intents(name, dtype, title, intents, choice):
                        yield Record(
                            intent=intent,
                            kernel=write_kernel_text(bare),
                            problem=name,
                            dtype=dtype,
                            family=problem.op_type or OTHER,
                            strategy=candidate.strategy or "",
                            kernel_id=kernel_id(bare),
                        )


def _tuned(kernel: Kernel, variants: int, choice: np.random.Generator) -> Iterator[Kernel]:
    """The kernel, and others of its tunables."""
    yield kernel
    names = list(kernel.tunables)
    combinations = [
        dict(zip(names, values, strict=True))
        for values in itertools.product(*(kernel.tunables[name] for name in names))
    ]
    others = [params for params in combinations if any(kernel.params[name] != params[name] for name in names)]
    for index in choice.permutation(len(others))[: variants - 1]:
        yield dataclasses.replace(kernel, params={**kernel.params, **others[index]})


def _intents(name: str, dtype: str, title: str, count: int, choice: np.random.Generator) -> list[str]:
    builtin = load_builtin(name)
    bench = builtin.problem.bench[0] if builtin.problem.bench else builtin.problem.workloads[0]
    made: dict[str, None] = {}
    for sentence in choice.permutation(_SENTENCES)[:count]:
        smaller = {axis: max(size >> int(choice.integers(0, 3)), 1) for axis, size in bench.axes.items()}
        words: Mapping[str, str] = {
            "name": str(choice.choice(builtin.intent.names)),
            "dtype": str(choice.choice(_DTYPE_WORDS.get(dtype, (dtype,)))),
            "sizes": ", ".join(f"{axis} = {size}" for axis, size in smaller.items()),
            "title": title,
        }
        made[str(sentence).format(**words)] = None
    return list(made)


def read_records(path: Path) -> tuple[Record, ...]:
    """The pairs of a JSONL file.

    Raises:
        InvalidInput: the file cannot be read, or the first line that is no pair.
    """
    records = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    records.append(_read_line(line, f"{path.name}, line {number}"))
    except OSError as error:
        raise InvalidInput(f"{path.name} cannot be read: {error.strerror}") from error
    if not records:
        raise InvalidInput(f"{path.name} holds no pairs")
    return tuple(records)


def _read_line(line: bytes, where: str) -> Record:
    if len(line) > MAX_LINE_BYTES:
        raise InvalidInput(f"{where} is longer than 1 MiB", code="too_large")
    try:
        fields: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where} is not JSON") from error
    if not isinstance(fields, dict):
        raise InvalidInput(f"{where} is not a JSON object")
    unknown = sorted(set(fields) - set(_KNOWN))
    if unknown:
        raise InvalidInput(f"{where} has an unknown field {unknown[0][:60]!r}; known are {', '.join(_KNOWN)}")
    if fields.pop("schema", SCHEMA) != SCHEMA:
        raise InvalidInput(f"{where} has another schema than {SCHEMA}")
    for name in ("intent", "kernel"):
        if not isinstance(fields.get(name), str) or not fields[name].strip():
            raise InvalidInput(f"{where} has no {name}")
    if any(not isinstance(value, str | None) for value in fields.values()):
        raise InvalidInput(f"{where}: every field is text")
    record = Record(**{name: value for name, value in fields.items() if value is not None})
    if record.problem is not None:
        _problem(record.problem, record.dtype)
    return record
