"""Counted loops and the reductions they carry: what may be shared out over threads, and what may not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tree_sitter import Node

from optiml.search import polynomial as poly
from optiml.search.source import (
    BARRIERS,
    Access,
    Function,
    Local,
    Site,
    Write,
    ancestors,
    call_arguments,
    called,
    calls,
    contains,
    identifiers,
    integer,
    mentions,
    same_node,
    text_of,
    unwrap,
    walk,
)

Operator = Literal["sum", "max", "min", "product"]
_LARGEST, _SMALLEST = frozenset({"max", "fmax", "fmaxf"}), frozenset({"min", "fmin", "fminf"})
PURE_CALLS = _LARGEST | _SMALLEST | {"static_cast", "int", "size_t", "__ldg"}
_FUSED = frozenset({"fma", "fmaf", "__fmaf_rn", "__fma_rn"})
SCALAR_TYPES = frozenset(
    {"float", "double", "int", "unsigned", "unsigned int", "long long", "unsigned long long", "A", "T", "__half"}
)


@dataclass(frozen=True, kw_only=True, eq=False)
class ForLoop:
    """`for (v = start; v < bound; v += step)`; `comparison` is <, <= or, for steps of 1, !=.

    A step of None is no known number.
    """

    node: Node
    variable: str
    declared: bool  # the loop declares its variable
    start: Node
    bound: Node
    comparison: str
    condition: Node
    update: Node
    step: int | None
    step_node: Node | None  # None for ++
    body: Node


@dataclass(frozen=True, kw_only=True, eq=False)
class Reduction:
    """A variable from outside the loop that every iteration folds a value into, and that nothing else reads there."""

    local: Local
    operator: Operator
    function: str  # "fmaxf", "max" … where the source calls one, else ""

    @property
    def name(self) -> str:
        return self.local.name

    def combine(self, left: str, right: str) -> str:
        """C++ text of the folded pair."""
        if self.operator in ("sum", "product"):
            return f"{left} {'+' if self.operator == 'sum' else '*'} {right}"
        if self.function:
            return f"{self.function}({left}, {right})"
        sign = ">" if self.operator == "max" else "<"
        return f"({left} {sign} {right} ? {left} : {right})"

    @property
    def neutral(self) -> str | None:
        """A literal that changes nothing; None for max and min, which are idempotent and need none."""
        return {"sum": "0", "product": "1"}.get(self.operator)


def for_loop(node: Node) -> ForLoop | None:
    """Read an upward counted loop; None for any other for statement."""
    initializer, condition = node.child_by_field_name("initializer"), node.child_by_field_name("condition")
    update, body = node.child_by_field_name("update"), node.child_by_field_name("body")
    if initializer is None or condition is None or update is None or body is None:
        return None
    variable, start, declared = _initial(initializer)
    if variable is None or start is None or condition.type != "binary_expression":
        return None
    left, right = condition.child_by_field_name("left"), condition.child_by_field_name("right")
    operator = condition.child_by_field_name("operator")
    if left is None or right is None or operator is None or text_of(left) != variable:
        return None
    known, step, step_node = _step(update, variable)
    if not known or not (text_of(operator) in ("<", "<=") or (text_of(operator) == "!=" and step == 1)):
        return None
    return ForLoop(
        node=node, variable=variable, declared=declared, start=start, bound=right, comparison=text_of(operator),
        condition=condition, update=update, step=step, step_node=step_node, body=body,
    )  # fmt: skip


def _initial(initializer: Node) -> tuple[str | None, Node | None, bool]:
    if initializer.type == "declaration":
        declarators = initializer.children_by_field_name("declarator")
        if len(declarators) == 1 and declarators[0].type == "init_declarator":
            name, value = declarators[0].child_by_field_name("declarator"), declarators[0].child_by_field_name("value")
            if name is not None and name.type == "identifier" and value is not None:
                return text_of(name), value, True
    if initializer.type == "assignment_expression":
        name, value = initializer.child_by_field_name("left"), initializer.child_by_field_name("right")
        if name is not None and name.type == "identifier" and value is not None:
            return text_of(name), value, False
    return None, None, False


def _step(update: Node, variable: str) -> tuple[bool, int | None, Node | None]:
    """Whether it counts upward, the step if it is a number, and the node of the step."""
    if update.type == "update_expression":
        argument = update.child_by_field_name("argument")
        upward = any(child.type == "++" for child in update.children)
        return upward and argument is not None and text_of(argument) == variable, 1, None
    if update.type != "assignment_expression":
        return False, None, None
    target, operator = update.child_by_field_name("left"), update.child_by_field_name("operator")
    value = update.child_by_field_name("right")
    if target is None or operator is None or value is None or text_of(target) != variable:
        return False, None, None
    if text_of(operator) == "+=":
        return True, integer(text_of(unwrap(value))), value
    if text_of(operator) == "=" and value.type == "binary_expression":
        left, right = value.child_by_field_name("left"), value.child_by_field_name("right")
        sign = value.child_by_field_name("operator")
        if left is not None and right is not None and sign is not None and text_of(sign) == "+":
            for name, step in ((left, right), (right, left)):
                if text_of(unwrap(name)) == variable:
                    return True, integer(text_of(unwrap(step))), step
    return False, None, None


def outermost_loops(body: Node) -> list[ForLoop]:
    """Counted loops below `body` that lie in no other loop."""
    found: list[ForLoop] = []
    stack = [body]
    while stack:
        node = stack.pop()
        if node.type == "for_statement" and not same_node(node, body):
            loop = for_loop(node)
            if loop is not None:
                found.append(loop)
            continue
        if node.type in ("while_statement", "do_statement"):
            continue
        stack.extend(reversed(node.children))
    return found


def leaves_early(body: Node) -> bool:
    """Whether the body of a loop may leave it: break, return, goto."""
    for node in walk(body):
        if node.type in ("return_statement", "goto_statement"):
            return True
        if node.type == "break_statement" and not any(
            item.type in ("for_statement", "while_statement", "do_statement", "switch_statement")
            for item in ancestors(node, below=body)
        ):
            return True
    return False


def has_barrier(node: Node) -> bool:
    return any(called(item) in BARRIERS or "_sync" in called(item) for item in calls(node))


def outside_writes(function: Function, loop: ForLoop) -> list[Write]:
    """Writes in the loop's body to variables that outlive one iteration; its own counter left out."""
    found = []
    for write in function.writes:
        if not contains(loop.body, write.node):
            continue
        local = function.local_at(write.name, write.node)
        if local is None or not contains(loop.body, local.declaration):
            found.append(write)
    return found


def reductions(function: Function, loop: ForLoop) -> list[Reduction] | None:
    """The reductions that the loop carries, in source order; None if anything else passes between its iterations."""
    by_name: dict[str, list[Write]] = {}
    for write in outside_writes(function, loop):
        if write.name == loop.variable:
            return None
        by_name.setdefault(write.name, []).append(write)
    found = []
    for name, writes in by_name.items():
        reduction = _reduction(function, loop, name, writes)
        if reduction is None:
            return None
        found.append(reduction)
    return found


def _reduction(function: Function, loop: ForLoop, name: str, writes: Sequence[Write]) -> Reduction | None:
    local = function.local_at(name, loop.node)
    if local is None or local.is_pointer or local.is_array or local.is_shared or local.type_text not in SCALAR_TYPES:
        return None
    accounted: set[int] = set()
    kinds: set[tuple[Operator, str]] = set()
    for write in writes:
        found = _fold(write, name)
        if found is None:
            return None
        operator, called_function, uses = found
        kinds.add((operator, called_function))
        accounted.update(uses)
    used = {node.start_byte for node in identifiers(loop.body) if text_of(node) == name}
    if used - accounted or len({operator for operator, _ in kinds}) != 1:
        return None
    operator, called_function = min(kinds, key=lambda item: item[1], default=("sum", ""))
    if len(kinds) > 1:
        called_function = ""
    return Reduction(local=local, operator=operator, function=called_function)


def _fold(write: Write, name: str) -> tuple[Operator, str, set[int]] | None:
    """Operator, the function it calls, and where it mentions `name`, for one folding assignment."""
    target = write.node.child_by_field_name("left")
    if target is None or write.value is None:
        return None
    here = {target.start_byte}
    value = unwrap(write.value)
    inside = [node for node in identifiers(value) if text_of(node) == name]
    if write.operator in ("+=", "-=", "*="):
        return None if inside else ("product" if write.operator == "*=" else "sum", "", here)
    if write.operator != "=":
        return None
    if len(inside) == 0:
        return _conditional_fold(write, name, here, value)
    where = here | {node.start_byte for node in inside}
    if value.type == "binary_expression":
        left, right = value.child_by_field_name("left"), value.child_by_field_name("right")
        sign = value.child_by_field_name("operator")
        if left is None or right is None or sign is None or len(inside) != 1:
            return None
        if text_of(sign) in ("+", "*") and name in (text_of(unwrap(left)), text_of(unwrap(right))):
            return ("sum" if text_of(sign) == "+" else "product"), "", where
        if text_of(sign) == "-" and text_of(unwrap(left)) == name:
            return "sum", "", where
        return None
    if value.type == "call_expression":
        arguments = call_arguments(value)
        plain = [item for item in arguments if text_of(unwrap(item)) == name]
        if len(inside) != 1 or len(plain) != 1:
            return None
        if called(value) in _LARGEST | _SMALLEST and len(arguments) == 2:
            return ("max" if called(value) in _LARGEST else "min"), called(value), where
        if called(value) in _FUSED and len(arguments) == 3 and same_node(plain[0], arguments[2]):
            return "sum", "", where
        return None
    if value.type == "conditional_expression":
        test = value.child_by_field_name("condition")
        kept, other = value.child_by_field_name("consequence"), value.child_by_field_name("alternative")
        if test is None or kept is None or other is None:
            return None
        operator = _selects(unwrap(test), kept, other)
        if operator is not None and name in (text_of(unwrap(kept)), text_of(unwrap(other))) and len(inside) == 2:
            return operator, "", where
    return None


def _selects(test: Node, kept: Node, other: Node) -> Operator | None:
    """max or min, if `test ? kept : other` is one."""
    if test.type != "binary_expression":
        return None
    left, right = test.child_by_field_name("left"), test.child_by_field_name("right")
    sign = test.child_by_field_name("operator")
    if left is None or right is None or sign is None or text_of(sign) not in (">", "<", ">=", "<="):
        return None
    sides = text_of(unwrap(left)), text_of(unwrap(right))
    chosen = text_of(unwrap(kept)), text_of(unwrap(other))
    greater = text_of(sign).startswith(">")
    if sides == chosen:
        return "max" if greater else "min"
    if sides == (chosen[1], chosen[0]):
        return "min" if greater else "max"
    return None


def _conditional_fold(write: Write, name: str, here: set[int], value: Node) -> tuple[Operator, str, set[int]] | None:
    """`if (e > v) v = e;`"""
    statement = write.node.parent
    branch = None if statement is None else statement.parent
    if branch is not None and branch.type == "compound_statement":
        if len(branch.named_children) != 1:
            return None
        branch = branch.parent
    if branch is None or branch.type != "if_statement" or branch.child_by_field_name("alternative") is not None:
        return None
    condition = branch.child_by_field_name("condition")
    if condition is None:
        return None
    test = unwrap(condition)
    inside = [node for node in identifiers(test) if text_of(node) == name]
    if test.type != "binary_expression" or len(inside) != 1:
        return None
    left, right = test.child_by_field_name("left"), test.child_by_field_name("right")
    sign = test.child_by_field_name("operator")
    if left is None or right is None or sign is None or text_of(sign) not in (">", "<", ">=", "<="):
        return None
    new = text_of(value)
    greater = text_of(sign).startswith(">")
    if (text_of(unwrap(left)), text_of(unwrap(right))) == (new, name):
        return ("max" if greater else "min"), "", here | {inside[0].start_byte}
    if (text_of(unwrap(left)), text_of(unwrap(right))) == (name, new):
        return ("min" if greater else "max"), "", here | {inside[0].start_byte}
    return None


@dataclass(frozen=True, kw_only=True, eq=False)
class RescaledSum:
    """`n = max(m, v); d = d * exp(m - n) + e(n); m = n;`: a running maximum and a sum that is scaled to it."""

    largest: Local
    total: Local
    maximum: str  # the function that the source calls
    exponential: str


def rescaled_sum(function: Function, loop: ForLoop) -> RescaledSum | None:
    """The running maximum and scaled sum that a loop carries, if that is all it carries; the sum starts at 0.

    Source: Milakov and Gimelshein, Online Normalizer Calculation for Softmax, 2018.
    """
    writes = outside_writes(function, loop)
    if len(writes) != 2 or any(write.operator != "=" or write.value is None for write in writes):
        return None
    total_write, top_write = writes
    if top_write.value is None or total_write.value is None or unwrap(top_write.value).type != "identifier":
        return None
    top, total = function.local_at(top_write.name, loop.node), function.local_at(total_write.name, loop.node)
    newest = function.local_at(text_of(unwrap(top_write.value)), top_write.node)
    if top is None or total is None or newest is None or newest.initial is None or top.name == total.name:
        return None
    if not contains(loop.body, newest.declaration) or top.type_text != total.type_text:
        return None
    maximum = unwrap(newest.initial)
    arguments = [text_of(unwrap(item)) for item in call_arguments(maximum)] if maximum.type == "call_expression" else []
    if called(maximum) not in _LARGEST or len(arguments) != 2 or top.name not in arguments:
        return None
    exponential = _scaled(total_write.value, total.name, top.name, newest.name)
    known_places = (newest.declarator, total_write.node, top_write.node)
    others = [
        node
        for node in identifiers(loop.body)
        if text_of(node) in (top.name, total.name) and not any(contains(place, node) for place in known_places)
    ]
    zero = total.initial is not None and text_of(total.initial).rstrip("fF").rstrip("0").rstrip(".") in ("", "0")
    before = [write for write in function.writes_to(total) if write.node.start_byte < loop.node.start_byte]
    if exponential is None or others or not zero or before:
        return None
    return RescaledSum(largest=top, total=total, maximum=called(maximum), exponential=exponential)


def _scaled(value: Node, total: str, top: str, newest: str) -> str | None:
    """The exponential in `total * exp(top - newest) + …`; the first term may be guarded against an empty start."""
    value = unwrap(value)
    left, right = value.child_by_field_name("left"), value.child_by_field_name("right")
    sign = value.child_by_field_name("operator")
    if value.type != "binary_expression" or left is None or right is None or sign is None or text_of(sign) != "+":
        return None
    for term, rest in ((left, right), (right, left)):
        if mentions(rest, (total, top)):
            continue
        scaled = unwrap(term)
        if scaled.type == "conditional_expression":
            alternative = scaled.child_by_field_name("alternative")
            scaled = unwrap(alternative) if alternative is not None else scaled
        a, b = scaled.child_by_field_name("left"), scaled.child_by_field_name("right")
        times = scaled.child_by_field_name("operator")
        if a is None or b is None or times is None or text_of(times) != "*":
            continue
        for factor, power in ((unwrap(a), unwrap(b)), (unwrap(b), unwrap(a))):
            name = called(power) if power.type == "call_expression" else ""
            inside = call_arguments(power) if name.lstrip("_").startswith("exp") else []
            if text_of(factor) == total and [_plain(item) for item in inside] == [f"{top}-{newest}"]:
                return name
    return None


def _plain(node: Node) -> str:
    return "".join(text_of(node).split())


def is_invariant(site: Site, node: Node, loop: ForLoop) -> bool:
    """Whether an expression keeps its value over the loop.

    It reads nothing the loop changes, calls nothing, and memory only of arrays that the function never writes.
    """
    changed = {write.name for write in site.function.writes if contains(loop.node, write.node)} | {loop.variable}
    changed |= {local.name for local in site.function.locals if contains(loop.node, local.declaration)}
    written = {item.array for item in site.accesses if item.writes}
    for item in walk(node):
        if item.type == "identifier" and text_of(item) in changed:
            return False
        if item.type in ("update_expression", "assignment_expression", "lambda_expression"):
            return False
        if item.type == "call_expression" and called(item) not in PURE_CALLS:
            return False
    reads = [item for item in site.accesses if contains(node, item.node)]
    memory = [item for item in walk(node) if item.type in ("subscript_expression", "pointer_expression")]
    return all(item.space == "global" and item.array not in written for item in reads) and (not memory or bool(reads))


def independent_stores(site: Site, loop: ForLoop) -> bool:
    """Whether no iteration writes what another one reads or writes.

    Every store goes to an index that is linear in the counter with a factor other than 0, and an array that is stored
    to is only read at that same index.
    """
    inside = [item for item in site.accesses if contains(loop.body, item.node)]
    stored = {item.array for item in inside if item.writes}
    for array in stored:
        touching = [item for item in inside if item.array == array]
        indices = {None if item.index is None else poly.canonical(item.index) for item in touching}
        first = touching[0]
        if first.space != "global" or len(indices) != 1 or first.index is None:
            return False
        if any(item.kind in ("atomic", "address") for item in touching):
            return False
        if not poly.coefficient(first.index, loop.variable):
            return False
        inner = {local.name for local in site.function.locals if contains(loop.body, local.declaration)}
        if inner & poly.names(first.index):
            return False
    return True


def unit_stride(access: Access, variable: str) -> bool:
    """Whether neighbouring values of `variable` touch neighbouring elements."""
    if access.index is None:
        return False
    factor = poly.coefficient(access.index, variable)
    return factor is not None and poly.as_constant(factor) == 1
