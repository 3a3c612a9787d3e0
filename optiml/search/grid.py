"""Grid formulas of a launch plan: which extent a grid entry covers, and how to cover it with other blocks."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from optiml.errors import InvalidInput
from optiml.expressions import evaluate
from optiml.records import Size


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """A grid entry of the form ceil(extent / divisor)."""

    extent: str
    divisor: int
    divisor_text: str


def ceiling(entry: Size, params: Mapping[str, int]) -> Ceiling | None:
    """Read `ceil_div(X, B)`, `(X + B - 1) // B` or `(X + 255) // 256`; B may use params, but no axis."""
    if not isinstance(entry, str):
        return None
    try:
        tree = ast.parse(entry.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None
    match tree:
        case ast.Call(func=ast.Name(id="ceil_div"), args=[extent, divisor]):
            value = _value(divisor, params)
            if value is not None and value > 0:
                return Ceiling(extent=ast.unparse(extent), divisor=value, divisor_text=ast.unparse(divisor))
        case ast.BinOp(op=ast.FloorDiv(), left=left, right=divisor):
            value = _value(divisor, params)
            if value is None or value <= 0:
                return None
            rest, added = _split_sum(left, params)
            if rest and added == value - 1:
                return Ceiling(extent=rest, divisor=value, divisor_text=ast.unparse(divisor))
    return None


def ceil_div(extent: str, divisor: Size) -> str:
    return f"ceil_div({extent}, {divisor})"


def times(entry: Size, factor: Size) -> Size:
    """`entry * factor`, in parentheses where needed."""
    if isinstance(entry, int) and isinstance(factor, int):
        return entry * factor
    return f"{_atomic(entry)} * {_atomic(factor)}"


def scaled_extent(entry: Size, factor: int, params: Mapping[str, int]) -> Size:
    """A grid that covers `factor` times as much with the same blocks."""
    found = ceiling(entry, params)
    return times(entry, factor) if found is None else ceil_div(str(times(found.extent, factor)), found.divisor_text)


def coarsened(entry: Size, factor: Size, params: Mapping[str, int]) -> Size:
    """A grid whose blocks each cover `factor` times as much."""
    found = ceiling(entry, params)
    if found is None:
        return ceil_div(str(entry), factor)
    return ceil_div(found.extent, times(found.divisor_text, factor))


def with_divisor(entry: Size, old: int, new: Size, params: Mapping[str, int]) -> Size | None:
    """The entry for blocks of `new` where it was written for blocks of `old`; None if it is no such formula."""
    found = ceiling(entry, params)
    if found is None or found.divisor % old:
        return None
    share = found.divisor // old
    return ceil_div(found.extent, new if share == 1 else times(new, share))


def reads_param(entry: Size, name: str) -> bool:
    """Whether the formula uses `name`."""
    if not isinstance(entry, str):
        return False
    try:
        tree = ast.parse(entry.strip(), mode="eval")
    except (SyntaxError, ValueError):
        return False
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree))


def _atomic(entry: Size) -> str:
    text = str(entry).strip()
    return text if text.replace("_", "a").isalnum() else f"({text})"


def _value(node: ast.expr, params: Mapping[str, int]) -> int | None:
    try:
        return evaluate(ast.unparse(node), params)
    except InvalidInput:  # it uses an axis
        return None


def _split_sum(node: ast.expr, params: Mapping[str, int]) -> tuple[str, int]:
    """A sum as the text of its terms that depend on axes and the value of the others."""
    kept: list[str] = []
    total = 0

    def visit(item: ast.expr, sign: int) -> None:
        nonlocal total
        if isinstance(item, ast.BinOp) and isinstance(item.op, ast.Add | ast.Sub):
            visit(item.left, sign)
            visit(item.right, sign if isinstance(item.op, ast.Add) else -sign)
            return
        value = _value(item, params)
        if value is None:
            text = ast.unparse(item)
            kept.append(("" if not kept else "+ ") + text if sign > 0 else f"- {text}")
        else:
            total += sign * value

    visit(node, 1)
    return " ".join(kept), total
