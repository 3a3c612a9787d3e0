"""The kernels of a CUDA source with their parameters, read from its syntax tree."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from optiml.codec import decode, encode
from optiml.errors import InvalidInput
from optiml.kernel_file import write_kernel_text
from optiml.records import Kernel, Launch, Problem, Size
from optiml.toolchain.headers import VIRTUAL

DERIVED_BLOCK = 256


@dataclass(frozen=True, kw_only=True)
class Signature:
    """One `__global__` function as written."""

    name: str
    parameters: tuple[tuple[str, str], ...]  # (type text, name)
    line: int  # of its name
    template: bool


@cache
def _parser() -> Any:
    # Imported late: only sources without a launch plan need a syntax tree before they are built.
    import tree_sitter_cuda
    from tree_sitter import Language, Parser

    return Parser(Language(tree_sitter_cuda.language()))


def kernel_signatures(source: str) -> tuple[Signature, ...]:
    """Every `__global__` function definition in order; syntax errors elsewhere do not hide them."""
    data = source.encode("utf-8")
    tree = _parser().parse(data)
    return tuple(_signatures(tree.root_node, data, template=False))


def _signatures(node: Any, data: bytes, *, template: bool) -> Iterator[Signature]:
    stack = [(node, template)]
    found = []
    while stack:
        current, inside = stack.pop()
        if current.type == "function_definition" and b"__global__" in data[current.start_byte : _body_start(current)]:
            signature = _signature(current, data, inside)
            if signature is not None:
                found.append((current.start_byte, signature))
            continue
        inside = inside or current.type == "template_declaration"
        stack.extend((child, inside) for child in current.children)
    yield from (signature for _, signature in sorted(found, key=lambda item: item[0]))


def _body_start(node: Any) -> int:
    body = node.child_by_field_name("body")
    return int(body.start_byte if body is not None else node.end_byte)


def _signature(node: Any, data: bytes, template: bool) -> Signature | None:
    declarator = node.child_by_field_name("declarator")
    while declarator is not None and declarator.type != "function_declarator":
        declarator = declarator.child_by_field_name("declarator")
    if declarator is None:
        return None
    name = declarator.child_by_field_name("declarator")
    parameters = declarator.child_by_field_name("parameters")
    if name is None or parameters is None:
        return None
    pairs = [
        _parameter(child, data)
        for child in parameters.named_children
        if child.type in ("parameter_declaration", "optional_parameter_declaration")
    ]
    return Signature(
        name=data[name.start_byte : name.end_byte].decode("utf-8"),
        parameters=tuple(pairs),
        line=name.start_point[0] + 1,
        template=template,
    )


def _parameter(node: Any, data: bytes) -> tuple[str, str]:
    declarator = node.child_by_field_name("declarator")
    while declarator is not None and declarator.type not in ("identifier", "field_identifier"):
        inner = declarator.child_by_field_name("declarator")
        if inner is None:
            inner = next((c for c in declarator.named_children if c.type in ("identifier", "pointer_declarator")), None)
        declarator = inner
    text = data[node.start_byte : node.end_byte].decode("utf-8")
    if declarator is None:
        return text, ""
    name = data[declarator.start_byte : declarator.end_byte].decode("utf-8")
    return text[: text.rfind(name)].strip(), name


def with_launches(kernel: Kernel, problem: Problem) -> tuple[Kernel, tuple[str, ...]]:
    """The kernel with a launch plan: its own, or one derived from parameter names; and what was assumed.

    A plan is derived when the source holds exactly one kernel and every parameter is named like an array, axis or
    scalar of the problem: one thread per element of the first output, in blocks of 256.

    Raises:
        InvalidInput: no plan can be derived; the message lists the kernels and shows the block to fill in.
    """
    if kernel.launches or kernel.launcher is not None:
        return kernel, ()
    signatures = kernel_signatures(kernel.source) if kernel.language == "cuda" else ()
    known = {*problem.inputs, *problem.outputs, *problem.axes, *kernel.params, *kernel.workspace}
    if len(signatures) == 1 and not signatures[0].template and signatures[0].parameters:
        names = tuple(name for _, name in signatures[0].parameters)
        if all(name in known for name in names):
            launch = _derived_launch(kernel, problem, signatures[0].name, names)
            sizes = " * ".join(f"({size})" for size in next(iter(problem.outputs.values())).shape or (1,))
            assumed = (
                f"no launch plan was given: {signatures[0].name} is launched with {names} over a grid of "
                f"ceil_div({sizes}, {launch.block[0]}) blocks of {launch.block[0]} threads",
            )
            return decode(Kernel, {**encode(kernel), "launches": [encode(launch)]}, what="kernel"), assumed
    raise InvalidInput(_missing_plan(kernel, problem, signatures))


def _derived_launch(kernel: Kernel, problem: Problem, name: str, args: tuple[str, ...]) -> Launch:
    shape = next(iter(problem.outputs.values())).shape or (1,)
    elements = " * ".join(f"({size})" for size in shape)
    block: Size = "BLOCK" if isinstance(kernel.params.get("BLOCK"), int) else DERIVED_BLOCK
    return Launch(kernel=name, grid=(f"ceil_div({elements}, {block})",), block=(block,), args=args)


def _missing_plan(kernel: Kernel, problem: Problem, signatures: tuple[Signature, ...]) -> str:
    if kernel.language == "ptx":
        return "a kernel in PTX needs its launches: name the .entry, grid, block and the arguments in order"
    if not signatures:
        return "no launches were given and the source holds no __global__ function; give it one and a launch plan"
    listed = "; ".join(f"{s.name}({', '.join(name or '?' for _, name in s.parameters)})" for s in signatures[:8])
    first = signatures[0]
    names = tuple(name for _, name in first.parameters if name)
    example = write_kernel_text(
        Kernel(source="", launches=(_derived_launch(Kernel(source=""), problem, first.name, names),))
    ).rstrip()
    return (
        f"no launches were given and they cannot be derived from parameter names; kernels found: {listed}; "
        f"put a block like this before the source, with args named after the problem's arrays, axes and scalars "
        f"({', '.join(_names(problem))}):\n{example}"
    )


def _names(problem: Problem) -> Mapping[str, None]:
    return dict.fromkeys([*problem.inputs, *problem.outputs, *problem.axes])


def host_parameters(source: str, name: str) -> tuple[str, ...] | None:
    """Types, as written, of the parameters of a host function; None where the syntax tree has no such definition."""
    data = source.encode("utf-8")
    stack = [_parser().parse(data).root_node]
    while stack:
        node = stack.pop()
        if node.type == "function_definition":
            found = _signature(node, data, False)
            if found is not None and found.name == name:
                return tuple(text for text, _ in found.parameters if text.strip() != "void")
            continue
        stack.extend(node.children)
    return None


_DEVICE_HEADER = re.compile(r"cuda_\w+\.h|cuda/.*|cooperative_groups.*|cub/.*|mma\.h|nv/.*|math_constants\.h")
_HOST_LINE = re.compile(r'(?m)^[ \t]*(?:#[ \t]*include[ \t]*[<"]([^>"]*)[>"].*|using namespace std;.*)$')


def device_source(source: str) -> tuple[str, tuple[str, ...]]:
    """The source without its host functions, and their names. Lines keep their numbers; host headers go too."""
    data = source.encode("utf-8")
    stack = [_parser().parse(data).root_node]
    spans, names = [], []
    while stack:
        node = stack.pop()
        if node.type != "function_definition":
            stack.extend(reversed(node.children) if node.type != "compound_statement" else ())
            continue
        head = data[node.start_byte : _body_start(node)]
        if any(word in head for word in (b"__global__", b"__device__", b"constexpr")):
            continue
        found = _signature(node, data, False)
        whole = node.parent if node.parent is not None and node.parent.type == "template_declaration" else node
        spans.append((whole.start_byte, whole.end_byte))
        names.append("a function" if found is None else found.name)
    kept = bytearray(data)
    for start, end in spans:
        kept[start:end] = b"\n" * kept[start:end].count(b"\n") + b" " * (end - start - kept[start:end].count(b"\n"))
    text = re.sub(r"(?m)[ \t]+$", "", kept.decode("utf-8"))
    return _HOST_LINE.sub(_without_host_line, text), tuple(names)


def _without_host_line(match: re.Match[str]) -> str:
    header = match.group(1)
    is_kept = header is not None and (header in VIRTUAL or _DEVICE_HEADER.fullmatch(header) is not None)
    return match.group(0) if is_kept else ""
