"""The formula language of shapes, grids and constraints (contract §3).

64-bit signed integers with Python's floor semantics. Parsed by Python's own grammar and then walked node by node
against an allow-list; nothing is ever compiled or evaluated by the interpreter.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import lru_cache

from optiml.errors import InvalidInput

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_LENGTH = 500
MAX_DEPTH = 40

_Number = int | float
_FUNCTIONS: Mapping[str, tuple[int, int | None]] = {  # name -> fewest and most arguments
    "min": (1, None),
    "max": (1, None),
    "ceil_div": (2, 2),
    "round_up": (2, 2),
}


def evaluate(formula: int | str, names: Mapping[str, int | float | bool]) -> int:
    """Value of `formula` in 64-bit integers.

    Raises:
        InvalidInput: syntax outside the language, an unknown name, overflow, division by zero.
    """
    if isinstance(formula, int):
        _checked(int(formula), str(formula))
        return int(formula)
    value = _walk(_parse(formula), names, formula, floats=False)
    if not isinstance(value, int):
        raise InvalidInput(f"formula {formula!r} must give an integer, not {value!r}")
    return value


def evaluate_float(formula: int | float | str, names: Mapping[str, int | float | bool]) -> float:
    """Value of `formula` as a float: for flops and bytes, which may exceed 64 bits and divide."""
    if isinstance(formula, int | float):
        return float(formula)
    return float(_walk(_parse(formula), names, formula, floats=True))


def names_in(formula: int | float | str) -> frozenset[str]:
    """The axis, scalar and param names that `formula` reads."""
    if not isinstance(formula, str):
        return frozenset()
    return frozenset(
        node.id for node in ast.walk(_parse(formula)) if isinstance(node, ast.Name) and node.id not in _FUNCTIONS
    )


@lru_cache(maxsize=4096)
def _parse(formula: str) -> ast.expr:
    if len(formula) > MAX_LENGTH:
        raise InvalidInput(f"a formula of {len(formula)} characters is too long; at most {MAX_LENGTH} are allowed")
    try:
        tree = ast.parse(formula.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidInput(f"formula {formula!r} cannot be read; use names, numbers and + - * // %") from error
    if _depth(tree) > MAX_DEPTH:
        raise InvalidInput(f"formula {formula!r} is nested too deeply")
    return tree


def _depth(root: ast.AST) -> int:
    deepest, stack = 0, [(root, 1)]
    while stack:
        node, depth = stack.pop()
        deepest = max(deepest, depth)
        stack.extend((child, depth + 1) for child in ast.iter_child_nodes(node))
    return deepest


_BINARY: Mapping[type[ast.operator], Callable[[_Number, _Number], _Number]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}
_COMPARE: Mapping[type[ast.cmpop], Callable[[_Number, _Number], bool]] = {
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
}


def _walk(node: ast.expr, names: Mapping[str, int | float | bool], formula: str, *, floats: bool) -> _Number:
    def sub(child: ast.expr) -> _Number:
        return _walk(child, names, formula, floats=floats)

    def done(value: _Number) -> _Number:
        return value if floats else _checked(value, formula)

    match node:
        case ast.Constant(value=bool() as value):
            return int(value)
        case ast.Constant(value=int() as value):
            return done(value)
        case ast.Constant(value=float() as value) if floats:
            return value
        case ast.Name(id=name) if name in names:
            value = names[name]
            return done(int(value) if isinstance(value, bool) else value)
        case ast.Name(id=name):
            raise InvalidInput(f"formula {formula!r} uses {name!r}, which is none of {', '.join(sorted(names))}")
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return done(-sub(operand))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return int(not sub(operand))
        case ast.BinOp(op=operator, left=left, right=right) if type(operator) in _BINARY or (
            floats and isinstance(operator, ast.Div)
        ):
            a, b = sub(left), sub(right)
            if isinstance(operator, ast.FloorDiv | ast.Mod | ast.Div) and b == 0:
                raise InvalidInput(f"formula {formula!r} divides by zero")
            if isinstance(operator, ast.Div):
                return a / b
            return done(_BINARY[type(operator)](a, b))
        case ast.Compare(left=left, ops=ops, comparators=comparators) if all(type(op) in _COMPARE for op in ops):
            values = [sub(left), *(sub(item) for item in comparators)]
            return int(all(_COMPARE[type(op)](values[i], values[i + 1]) for i, op in enumerate(ops)))
        case ast.BoolOp(op=operator, values=items):
            results = [bool(sub(item)) for item in items]
            return int(all(results) if isinstance(operator, ast.And) else any(results))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return sub(body) if sub(test) else sub(orelse)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            values = [sub(item) for item in args]
            fewest, most = _FUNCTIONS[name]
            if len(values) < fewest or (most is not None and len(values) > most):
                raise InvalidInput(f"formula {formula!r} gives {name} {len(values)} arguments")
            return done(_call(name, values, formula))
    raise InvalidInput(f"formula {formula!r} uses something outside the formula language")


def _call(name: str, values: list[_Number], formula: str) -> _Number:
    if name == "min":
        return min(values)
    if name == "max":
        return max(values)
    a, b = values
    if b == 0:
        raise InvalidInput(f"formula {formula!r} divides by zero")
    quotient = -(-a // b)
    return quotient if name == "ceil_div" else quotient * b


def _checked(value: _Number, formula: str) -> _Number:
    if isinstance(value, int) and not INT64_MIN <= value <= INT64_MAX:
        raise InvalidInput(f"formula {formula!r} leaves the 64-bit range")
    return value
