"""Kernels as one `.cu` file: a leading comment with TOML carries the launch plan (contract §2).

    /* optiml
    [[launch]]
    kernel = "relu"
    ...
    */

On load the comment becomes fields and is blanked, so that line numbers in diagnostics stay those of the file.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

from optiml.codec import decode, encode, normalised_source
from optiml.errors import InvalidInput
from optiml.records import Kernel

MAX_BLOCK_BYTES = 16 * 1024
_BLOCK = re.compile(r"\A(\s*)/\*\s*optiml[ \t]*\n(.*?)\*/", re.DOTALL)


def split_block(text: str) -> tuple[dict[str, Any], str]:
    """The TOML fields of the leading block (empty without one) and the text with the block blanked.

    Raises:
        InvalidInput: the block is too long or not TOML.
    """
    source = normalised_source(text)
    match = _BLOCK.match(source)
    if match is None:
        return {}, source
    block = match.group(2)
    if len(block.encode("utf-8")) > MAX_BLOCK_BYTES:
        raise InvalidInput(f"the optiml block is larger than {MAX_BLOCK_BYTES} bytes")
    try:
        fields = tomllib.loads(block)
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"the optiml block is not TOML: {error}") from error
    if "launch" in fields:
        if "launches" in fields:
            raise InvalidInput("the optiml block gives both [[launch]] and launches; keep one")
        fields["launches"] = fields.pop("launch")
    blanked = "\n" * match.group(0).count("\n") + source[match.end() :]
    return fields, blanked


def kernel_of_fields(fields: dict[str, Any], source: str) -> Kernel:
    """A Kernel from the fields of a block and the source that followed it."""
    if "source" in fields or "schema" in fields:
        raise InvalidInput("the optiml block may not give source or schema")
    return decode(Kernel, {**fields, "source": source}, what="the optiml block")


def read_kernel_text(text: str) -> Kernel:
    """A Kernel from the text of a `.cu` file, with or without a block."""
    fields, source = split_block(text)
    return kernel_of_fields(fields, source)


def merge_block(kernel: Kernel) -> Kernel:
    """A Kernel whose source carries a block becomes one whose fields hold it.

    Raises:
        InvalidInput: a field is given both in the record and in the block.
    """
    fields, source = split_block(kernel.source)
    if not fields:
        return (
            kernel if source == kernel.source else decode(Kernel, {**encode(kernel), "source": source}, what="kernel")
        )
    given = encode(kernel)
    empty: tuple[Any, ...] = ([], {}, None)
    for name in fields:
        if name in given and given[name] not in empty and name != "language":
            raise InvalidInput(f"{name} is given twice: in the record and in the optiml block of the source")
    return decode(Kernel, {**given, **fields, "source": source}, what="the optiml block")


def write_kernel_text(kernel: Kernel) -> str:
    """The `.cu` file of a kernel; `read_kernel_text` gives the same fields back.

    The source comes back to the letter (and with it the kernel_id) where it begins with the blank lines that the
    block takes up, as one read from a file does; else it comes back with those lines before it.
    """
    lines = ["/* optiml"]
    for launch in kernel.launches:
        lines += ["[[launch]]", f"kernel = {_toml(launch.kernel)}", f"grid = {_toml(launch.grid)}"]
        lines += [f"block = {_toml(launch.block)}", f"args = {_toml(launch.args)}"]
        if launch.shared_bytes != 0:
            lines.append(f"shared_bytes = {_toml(launch.shared_bytes)}")
        if launch.cluster is not None:
            lines.append(f"cluster = {_toml(launch.cluster)}")
        if launch.cooperative:
            lines.append("cooperative = true")
    top = []
    if kernel.flags:
        top.append(f"flags = {_toml(kernel.flags)}")
    if kernel.launcher is not None:
        top.append(f"launcher = {_toml(kernel.launcher)}")
    if kernel.language != "cuda":
        top.append(f"language = {_toml(kernel.language)}")
    lines[1:1] = top
    for title, table in (("params", kernel.params), ("tunables", kernel.tunables)):
        if table:
            lines += [f"[{title}]", *(f"{name} = {_toml(value)}" for name, value in table.items())]
    for name, space in kernel.workspace.items():
        lines += [f"[workspace.{name}]", f"dtype = {_toml(space.dtype)}", f"shape = {_toml(space.shape)}"]
        lines.append(f"init = {_toml(space.init)}")
    block = "\n".join([*lines, "*/"])
    blank = "\n" * block.count("\n")
    source = kernel.source.removeprefix(blank) if kernel.source.startswith(blank) else "\n" + kernel.source.lstrip("\n")
    return block + source


def _toml(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
        case list() | tuple():
            return "[" + ", ".join(_toml(item) for item in value) + "]"
    return repr(value)
