"""Records to JSON and back, content hashes, and the strict reading of what callers send.

Unknown fields are errors that name the nearest known one. Non-finite numbers travel as "nan", "inf", "-inf".
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from optiml.errors import InvalidInput
from optiml.records import Kernel, Problem

R = TypeVar("R")
MAX_SOURCE_BYTES = 1 << 20
_AS_THEY_ARE = (str, int, type(None))


def encode(value: Any) -> Any:
    """JSON-ready form of a record, or of any nesting of records, mappings and sequences."""
    if isinstance(value, _AS_THEY_ARE):  # first, because nearly all of a record is
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: encode(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if not (field.metadata.get("omit_if_none") and getattr(value, field.name) is None)
        }
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    return value


def decode(kind: type[R], data: Any, *, what: str) -> R:
    """Read `data` (parsed JSON) as a record of `kind`, strictly.

    Raises:
        InvalidInput: naming `what`, the field and, for an unknown field, the nearest known one.
    """
    try:
        text = json.dumps(data, allow_nan=False)
        text.encode("utf-8")  # a lone surrogate would pass json.dumps with ensure_ascii and fail later
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{what} is not plain JSON: {error}") from error
    except RecursionError as error:
        raise InvalidInput(f"{what} is nested too deeply") from error
    try:
        return adapter_of(kind).validate_json(text)
    except ValidationError as error:
        raise InvalidInput(f"{what}: {_first_problem(error, kind)}") from error


def restore(kind: type[R], data: Any) -> R:
    """Read back what `encode` wrote; trusted data, so "nan" and "inf" become floats again."""
    return adapter_of(kind).validate_python(_floats(data), strict=False)


def adapter_of(kind: type[R]) -> TypeAdapter[R]:
    """What reads records of this kind; building one takes milliseconds, so each is built once."""
    adapter: TypeAdapter[R] = _adapters.get(kind) or TypeAdapter(kind)
    return _adapters.setdefault(kind, adapter)


_adapters: dict[type[Any], TypeAdapter[Any]] = {}


_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_floats(item) for item in value)
    return _SPECIAL.get(value, value) if isinstance(value, str) else value


def _first_problem(error: ValidationError, kind: type[Any]) -> str:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    unknown = [item for item in problems if item["type"] in ("unexpected_keyword_argument", "extra_forbidden")]
    first = (unknown or problems)[0]
    path = ".".join(str(part) for part in first["loc"])
    if unknown:
        name = str(first["loc"][-1])
        known = _known_fields(kind, first["loc"][:-1])
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"unknown field {path!r}{hint}"
    message = first["msg"][0].lower() + first["msg"][1:]
    return f"{path}: {message}" if path else message


def _known_fields(kind: Any, path: tuple[int | str, ...]) -> list[str]:
    """Field names of the record that `path` leads to inside `kind`."""
    for part in path:
        if dataclasses.is_dataclass(kind) and isinstance(part, str) and part in _hints(kind):
            kind = _hints(kind)[part]
        elif isinstance(part, str) and part in {cls.__name__ for cls in _records_in(kind)}:
            kind = next(cls for cls in _records_in(kind) if cls.__name__ == part)
    records = [kind] if dataclasses.is_dataclass(kind) else _records_in(kind)
    return [field.name for cls in records for field in dataclasses.fields(cls)]


def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _records_in(hint: Any) -> list[Any]:
    if dataclasses.is_dataclass(hint):
        return [hint]
    return [record for item in getattr(hint, "__args__", ()) for record in _records_in(item)]


def canonical(value: Any) -> str:
    """One text for one value: sorted keys, no spaces."""
    return json.dumps(encode(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Any) -> str:
    """sha256 over the canonical JSON of a record or JSON value."""
    return hashlib.sha256(canonical(value).encode("utf-8")).hexdigest()


def normalised_source(source: str) -> str:
    """The text that is compiled and hashed: no byte order mark, LF line ends.

    Raises:
        InvalidInput: NUL bytes, lone surrogates, or more than 1 MiB (code `too_large`).
    """
    if len(source) > MAX_SOURCE_BYTES:
        raise InvalidInput(
            f"the source has {len(source)} characters; at most {MAX_SOURCE_BYTES} bytes are taken", code="too_large"
        )
    try:
        size = len(source.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise InvalidInput("the source holds a lone surrogate; send it as UTF-8 text") from error
    if size > MAX_SOURCE_BYTES:
        raise InvalidInput(f"the source has {size} bytes; at most {MAX_SOURCE_BYTES} are taken", code="too_large")
    if "\0" in source:
        raise InvalidInput("the source holds a NUL character; remove it")
    return source.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def kernel_id(kernel: Kernel) -> str:
    """First 16 hex digits of sha256 over the fields of contract §2, defaults filled in."""
    content = {
        "source": normalised_source(kernel.source),
        "language": kernel.language,
        "launches": kernel.launches,
        "params": kernel.params,
        "workspace": kernel.workspace,
        "flags": kernel.flags,
        "launcher": kernel.launcher,
    }
    return digest(content)[:16]


def problem_digest(problem: Problem) -> str:
    """Identity of a problem for cache keys."""
    return digest(problem)
