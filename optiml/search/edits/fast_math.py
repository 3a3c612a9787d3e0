"""Use the hardware's approximate functions where the tolerance allows it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from optiml.search.edit import INSTRUCTIONS, Edit, EditContext, Proposal, down, with_source
from optiml.search.source import Change, Function, called, calls, mentions, text_of, walk

FLAG = "--use_fast_math"
INTRINSICS = {
    "expf": "__expf", "logf": "__logf", "log2f": "__log2f", "log10f": "__log10f", "powf": "__powf", "sinf": "__sinf",
    "cosf": "__cosf", "exp10f": "__exp10f",
}  # fmt: skip
_SLOW = frozenset(
    {*INTRINSICS, "tanhf", "exp", "log", "pow", "sin", "cos", "tanh", "sqrtf", "sqrt", "rsqrtf", "rsqrt", "erff", "erf"}
)
_FLOATING = frozenset({"float", "A", "T", "__half", "half", "__nv_bfloat16"})
_DIVISIONS = frozenset({"binary_expression", "assignment_expression"})
_FLOAT_LITERAL = re.compile(r"\d\.\d*|\.\d+|\d[eE]-?\d")
_PRECISION = "fast-math intrinsics lose precision: the tolerance decides"


def propose(context: EditContext) -> Iterator[Proposal]:
    """Intrinsics in place of single-precision functions, then the compiler flag for everything (division included)."""
    if context.dtype == "float64" or not context.sites:
        return
    source = context.sites[0].source
    bodies = [item.body for item in source.functions]
    names = {called(item) for body in bodies for item in calls(body)}
    changes: list[Change] = []
    for body in bodies:
        for call in calls(body):
            function = call.child_by_field_name("function")
            if function is not None and called(call) in INTRINSICS:
                changes.append((function.start_byte, function.end_byte, INTRINSICS[called(call)]))
    unique = sorted(set(changes))
    if unique:
        replaced = ", ".join(sorted(names & set(INTRINSICS)))
        yield Proposal(
            kernel=with_source(context.kernel, source.rewrite(unique)),
            rationale=f"Intrinsics replace {replaced}: a few instructions on the special function unit instead of a "
            "long polynomial",
            expected=(down(INSTRUCTIONS, 0.75),),
            risks=(_PRECISION,),
        )
    divides = any(_divides_floats(item) for item in source.functions)
    if FLAG not in context.kernel.flags and (names & _SLOW or divides):
        yield Proposal(
            kernel=dataclasses.replace(context.kernel, flags=(*context.kernel.flags, FLAG)),
            rationale="--use_fast_math turns division, roots and transcendental functions into single instructions",
            expected=(down(INSTRUCTIONS, 0.7 if names & _SLOW else 0.9),),
            risks=(_PRECISION,),
        )


def _divides_floats(function: Function) -> bool:
    """Whether the function divides floating numbers, as far as names and literals tell."""
    floating = {item.name for item in function.parameters if item.type_text in _FLOATING}
    floating |= {item.name for item in function.locals if item.type_text in _FLOATING}
    for node in walk(function.body):
        sign = node.child_by_field_name("operator") if node.type in _DIVISIONS else None
        if sign is None or text_of(sign) not in ("/", "/="):
            continue
        for side in (node.child_by_field_name("left"), node.child_by_field_name("right")):
            if side is not None and (mentions(side, floating) or _FLOAT_LITERAL.search(text_of(side))):
                return True
    return False


EDIT = Edit(
    name="fast_math",
    metric=INSTRUCTIONS,
    why="Accurate functions and IEEE division take tens of instructions where the hardware has approximate ones.",
    source="CUDA C++ Programming Guide, Intrinsic Functions and -use_fast_math",
    propose=propose,
)
