"""The arguments of the five tools: strict records, the JSON schemas published for them, and their reading.

The SDK ignores unknown arguments and turns "1" into 1; a model that misspells an argument would never learn of it.
So the tools take the raw arguments and read them here: an unknown name is an error naming the nearest known one,
and nothing is converted. Ranges stand in the descriptions too, because some clients strip `minimum` and `maximum`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, WithJsonSchema

from optiml.codec import MAX_SOURCE_BYTES, adapter_of, decode
from optiml.errors import InvalidInput
from optiml.records import STRICT, Dtype, Level

A = TypeVar("A")

_OWN_URI = re.compile(r"\Aoptiml://(kernels|problems)/(?=\w+\Z)")  # models paste the URI where its id belongs

_MANY_VALUES = 3000  # some 10 ms of reading, checking and hashing
_MOST_NESTED = 64  # levels of objects and lists in one argument

Spec = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})]  # read by `spec`

_KERNEL = (
    'CUDA source text, or a kernel_id seen before, or an object: {"source", "launches", "params", ...} '
    '(schema: optiml://schema/kernel), {"id"}, {"path"} inside an allowed folder, or {"base", "diff"}. '
)
_PROBLEM = "Name of a built-in problem (such as softmax) or a Problem object (schema: optiml://schema/problem). "
_AXES = 'Sizes to verify and measure at, such as {"R": 4096, "C": 4096}; default: the problem\'s own.'
_DTYPE = "Element type of a built-in problem, such as float16."
_DEVICE = "auto (a GPU if there is one), emulator, emulator:a100, emulator:h100, emulator:h200, or cuda:N."
_ARCH = "Architecture to compile for, such as sm_90; default: the device's."
_WAIT = "Seconds to wait for the answer, 0 to 25. A longer job answers status=pending with a job_id."
_JOB = "From a pending answer of this tool: go on waiting for it; then no other argument but max_wait_s is needed."

Axes = Annotated[dict[str, int] | None, Field(description=_AXES)]
DtypeArgument = Annotated[Dtype | None, Field(description=_DTYPE)]
Device = Annotated[str, Field(description=_DEVICE, max_length=64)]
Arch = Annotated[str | None, Field(description=_ARCH, pattern=r"^sm_[0-9]{2,3}[af]?$")]
Wait = Annotated[float, Field(description=_WAIT, ge=0, le=25)]
JobId = Annotated[str | None, Field(description=_JOB, max_length=64)]
Seed = Annotated[int | None, Field(description="0 to 2^63-1; the same seed gives the same answer.", ge=0, le=2**63 - 1)]


@dataclass(frozen=True, kw_only=True)
class CompileVerify:
    """Arguments of compile_verify."""

    __pydantic_config__ = STRICT
    kernel: Annotated[Spec, Field(description="Required. " + _KERNEL)] = None
    problem: Annotated[Spec, Field(description="Required. " + _PROBLEM)] = None
    level: Annotated[
        Level,
        Field(
            description="L0: builds, runs, right on the given sizes. L1 (default): also hidden sizes and data, guard "
            "zones, repeated runs. L2: also the sanitizers."
        ),
    ] = "L1"
    axes: Axes = None
    dtype: DtypeArgument = None
    device: Device = "auto"
    arch: Arch = None
    seed: Seed = None
    max_wait_s: Wait = 25
    job_id: JobId = None


@dataclass(frozen=True, kw_only=True)
class ProfileNcu:
    """Arguments of profile_ncu."""

    __pydantic_config__ = STRICT
    kernel: Annotated[Spec, Field(description="Required. " + _KERNEL)] = None
    problem: Annotated[Spec, Field(description="Required. " + _PROBLEM)] = None
    baseline: Annotated[Spec, Field(description="A second kernel: the answer then also says which is faster.")] = None
    axes: Axes = None
    metrics: Annotated[
        list[str] | None, Field(description="Nsight Compute metric names to report; default: the useful ones.")
    ] = None
    device: Device = "auto"
    report: Annotated[str | None, Field(description="Path of an .ncu-rep file, instead of kernel and problem.")] = None
    command: Annotated[
        list[str] | None, Field(description="Program and arguments to profile; only on a server that allows it.")
    ] = None
    kernel_regex: Annotated[str | None, Field(description="With report or command: which kernels.")] = None
    launch_skip: Annotated[int | None, Field(description="With report or command: launches to skip.", ge=0)] = None
    launch_count: Annotated[int | None, Field(description="With report or command: launches to take.", ge=1)] = None
    max_wait_s: Wait = 25
    job_id: JobId = None


@dataclass(frozen=True, kw_only=True)
class JudgePatch:
    """Arguments of judge_patch."""

    __pydantic_config__ = STRICT
    problem: Annotated[Spec, Field(description="Required. " + _PROBLEM)] = None
    before: Annotated[Spec, Field(description="Required. The kernel as it is. " + _KERNEL)] = None
    after: Annotated[
        Spec, Field(description='Required. The edited kernel, in any form; {"base", "diff"} for a patch.')
    ] = None
    profile: Annotated[
        str | None, Field(description="kernel_id whose last profile to use; default: that of before.")
    ] = None
    judge: Annotated[str, Field(description="rules (default), or a model of the settings: chat.", max_length=64)] = (
        "rules"
    )
    max_wait_s: Wait = 25
    job_id: JobId = None


@dataclass(frozen=True, kw_only=True)
class GenerateKernel:
    """Arguments of generate_kernel."""

    __pydantic_config__ = STRICT
    intent: Annotated[
        str | None, Field(description='Plain English, such as "fp16 softmax over rows of 4096". Or give problem.')
    ] = None
    problem: Annotated[Spec, Field(description=_PROBLEM)] = None
    axes: Axes = None
    dtype: DtypeArgument = None
    count: Annotated[int, Field(description="Kernels wanted, 1 to 8.", ge=1, le=8)] = 1
    generator: Annotated[
        Literal["auto", "catalogue", "mixture", "text_mixture", "chat"],
        Field(description="auto and catalogue need no model."),
    ] = "auto"
    verify: Annotated[bool, Field(description="Check each kernel before it is returned.")] = True
    device: Device = "auto"
    arch: Arch = None
    max_wait_s: Wait = 25
    job_id: JobId = None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """When a search ends."""

    __pydantic_config__ = STRICT
    evaluations: Annotated[int, Field(description="Kernels to try, 1 to 10000.", ge=1, le=10_000)] = 40
    seconds: Annotated[float | None, Field(description="Also stop after so many, 1 to 86400.", ge=1, le=86_400)] = None


@dataclass(frozen=True, kw_only=True)
class RunMcts:
    """Arguments of run_mcts."""

    __pydantic_config__ = STRICT
    action: Annotated[
        Literal["start", "step", "status", "result", "cancel", "list", "tell"],
        Field(
            description="Required. start a search; step waits for a better kernel or the end; status does not wait; "
            "result: best so far; cancel; list all; tell: answer requests of proposer=agent."
        ),
    ]
    run_id: Annotated[str | None, Field(description="From start; needed by all but start and list.")] = None
    problem: Annotated[Spec, Field(description="start: required unless intent is given. " + _PROBLEM)] = None
    kernel: Annotated[
        Spec, Field(description="start: the kernel to improve; default: the problem's own naive kernel.")
    ] = None
    intent: Annotated[str | None, Field(description="start: plain English, in place of problem.")] = None
    axes: Axes = None
    dtype: DtypeArgument = None
    budget: Budget = field(default_factory=Budget)
    proposer: Annotated[
        Literal["builtin", "agent", "chat", "text_mixture", "mixture"],
        Field(description="builtin (default): edits of our own. agent: you propose. Others: a model."),
    ] = "builtin"
    judge: Annotated[str, Field(description="rules (default), or a model of the settings: chat.", max_length=64)] = (
        "rules"
    )
    device: Device = "auto"
    seed: Seed = None
    edits: Annotated[list[str] | None, Field(description="Only these kinds of edit; default: all.")] = None
    proposals: Annotated[
        list[dict[str, Any]] | None,
        Field(
            description="tell: list of {request_id, kernel (any form), rationale?, expected?: [{metric, direction: up "
            "or down, factor?}]}; [] says there are no more."
        ),
    ] = None
    write_to: Annotated[
        str | None, Field(description="start: also write the best kernel to this .cu file inside an allowed folder.")
    ] = None
    max_wait_s: Annotated[float, Field(description="step: seconds to wait for news, 0 to 25.", ge=0, le=25)] = 20


def read(kind: type[A], raw: Mapping[str, Any], *, tool: str) -> A:
    """Read the arguments of one call.

    Raises:
        InvalidInput: an unknown or mistyped argument, a text that is too large or no text at all.
    """
    check_texts(raw)
    return decode(kind, {name: value for name, value in raw.items() if value is not None}, what=tool)


def holds_many_values(value: Any) -> bool:
    """Whether JSON is so large that to read it takes a while; the count stops at the answer."""
    left, counted = [value], 0
    while left and counted <= _MANY_VALUES:
        item = left.pop()
        inner = item.values() if isinstance(item, Mapping) else item if isinstance(item, list | tuple) else ()
        counted += len(inner)
        left.extend(islice(inner, _MANY_VALUES))
    return counted > _MANY_VALUES


def check_texts(value: Any, *, where: str = "") -> None:
    """Refuse, before anything is copied or hashed, texts that could never be used.

    Raises:
        InvalidInput: over 1 MiB (code `too_large`), NUL, lone surrogates, the mark of invalid UTF-8.
    """
    for path, text in _texts(value, where, 0):
        if len(text) > MAX_SOURCE_BYTES:
            raise InvalidInput(
                f"{path} has {len(text)} characters: at most {MAX_SOURCE_BYTES} are taken", code="too_large"
            )
        if "\0" in text:
            raise InvalidInput(f"{path} holds a NUL character: remove it")
        if "\ufffd" in text:
            raise InvalidInput(f"{path} holds U+FFFD, so it was not valid UTF-8 on its way here: send it as UTF-8")
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise InvalidInput(f"{path} holds a lone surrogate: send it as UTF-8 text")


def _texts(value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
    if depth > _MOST_NESTED:
        raise InvalidInput(f"{path} is nested deeper than {_MOST_NESTED} levels: flatten it")
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield f"a name in {path or 'the arguments'}", str(key)
            yield from _texts(item, f"{path}.{str(key)[:40]}" if path else str(key)[:40], depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _texts(item, f"{path}.{index}", depth + 1)


def spec(value: Any, name: str) -> str | dict[str, Any]:
    """A kernel or problem argument: a string or an object. Some clients send objects as JSON text.

    Raises:
        InvalidInput: it is missing or of another type.
    """
    if value is None:
        raise InvalidInput(f"{name} is missing: give a string or an object")
    if isinstance(value, str) and value.lstrip().startswith("{"):  # no CUDA or PTX text, name or id starts so
        try:
            value = json.loads(value)
        except ValueError as error:
            raise InvalidInput(f"{name} starts like JSON but is none: {error}") from error
        except RecursionError as error:
            raise InvalidInput(f"{name} is nested deeper than {_MOST_NESTED} levels: flatten it") from error
        check_texts(value, where=name)  # the escapes in it stood for other characters
    if not isinstance(value, str | dict):
        raise InvalidInput(f"{name} must be a string or an object, not {_kind_of(value)}")
    if value in ("", {}):
        raise InvalidInput(f"{name} is empty: give a string or an object")
    return _OWN_URI.sub("", value) if isinstance(value, str) else value


def optional_spec(value: Any, name: str) -> str | dict[str, Any] | None:
    """As `spec`, but it may be left out."""
    return None if value is None else spec(value, name)


def _kind_of(value: Any) -> str:
    return "a list" if isinstance(value, list) else "true or false" if isinstance(value, bool) else "a number"


def schema_of(kind: type[Any]) -> dict[str, Any]:
    """The JSON schema of a tool's arguments, without what no client reads (titles, null alternatives)."""
    schema = adapter_of(kind).json_schema()
    definitions = schema.pop("$defs", {})
    compact: dict[str, Any] = _compact(schema, definitions)
    compact.pop("description", None)
    return compact


def _compact(node: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(node, list):
        return [_compact(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        target = definitions[node["$ref"].removeprefix("#/$defs/")]
        node = {key: item for key, item in {**target, **node}.items() if key not in ("$ref", "description")}
    if "anyOf" in node:
        kinds = [item for item in node["anyOf"] if item != {"type": "null"}]
        if len(kinds) == 1:
            node = {**kinds[0], **{key: item for key, item in node.items() if key != "anyOf"}}
    return {
        key: {name: _compact(item, definitions) for name, item in item.items()}
        if key == "properties"
        else _compact(item, definitions)
        for key, item in node.items()
        if key != "title" and not (key == "default" and item is None)
    }
