"""Finish tree reductions in shared memory with warp shuffles."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tree_sitter import Node

from optiml.search import polynomial as poly
from optiml.search.edit import INSTRUCTIONS, Edit, EditContext, Proposal, down, with_source
from optiml.search.items import fresh_name
from optiml.search.source import Change, Site, called, named, statements_of, text_of, unwrap, walk

WARP = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class Tree:
    """`for (s = block / 2; s > 0; s /= 2) { if (t < s) a[t] = fold(a[t], a[t + s]); __syncthreads(); }`

    An interleaved tree counts s upward and asks for `t % (2 * s) == 0`.
    """

    loop: Node
    condition: Node
    thread: str
    step: str
    interleaved: bool
    statements: tuple[tuple[str, str], ...]  # array and the C++ fold with {a} and {b}


def propose(context: EditContext) -> Iterator[Proposal]:
    """Every such tree of a kernel: the last 32 partial results are folded by one warp without barriers."""
    for site in context.sites:
        trees = [found for node in site.function.loops if (found := _tree(site, node)) is not None]
        if not trees or site.block[0] is None or site.block[0] < 2 * WARP or site.block[0] & (site.block[0] - 1):
            continue
        changes: list[Change] = []
        for tree in trees:
            changes += _changes(site, tree)
        yield Proposal(
            kernel=with_source(context.kernel, site.source.rewrite(changes)),
            rationale="The last five steps of the shared-memory reduction become shuffles in a warp, without barriers",
            expected=(down(INSTRUCTIONS, 0.85),),
        )


def _tree(site: Site, loop: Node) -> Tree | None:
    condition, update, body = (loop.child_by_field_name(name) for name in ("condition", "update", "body"))
    if condition is None or update is None or body is None or condition.type != "binary_expression":
        return None
    left, right = condition.child_by_field_name("left"), condition.child_by_field_name("right")
    sign = condition.child_by_field_name("operator")
    if left is None or right is None or sign is None:
        return None
    step = text_of(left)
    change = _squeezed(update)
    falling = change in (f"{step}>>=1", f"{step}/=2", f"{step}={step}/2", f"{step}={step}>>1")
    rising = change in (f"{step}<<=1", f"{step}*=2", f"{step}={step}*2", f"{step}+={step}")
    if falling and not (text_of(sign) == ">" and text_of(right) == "0"):
        return None
    if rising and not (text_of(sign) == "<" and poly.as_constant(site.polynomial(right)) == site.block[0]):
        return None
    if not falling and not rising:
        return None
    statements = statements_of(body)
    if len(statements) != 2 or statements[0].type != "if_statement" or text_of(statements[1]) != "__syncthreads();":
        return None
    test, then = statements[0].child_by_field_name("condition"), statements[0].child_by_field_name("consequence")
    if test is None or then is None or statements[0].child_by_field_name("alternative") is not None:
        return None
    thread = _thread_of(site, unwrap(test), step, rising=rising)
    if thread is None:
        return None
    folds = [_fold(item, thread, step) for item in statements_of(then)]
    if not folds or any(item is None for item in folds):
        return None
    return Tree(
        loop=loop,
        condition=condition,
        thread=thread,
        step=step,
        interleaved=rising,
        statements=tuple(item for item in folds if item is not None),
    )


def _thread_of(site: Site, guard: Node, step: str, *, rising: bool) -> str | None:
    """The text of the thread index in the guard of one step of a tree."""
    if rising:
        size = site.block[0]
        tests = _squeezed(guard).split("&&")
        found = re.fullmatch(rf"\(?([\w.]+)%\(?(?:2\*{step}|{step}\*2)\)?\)?==0", tests[0])
        inside = found is not None and (
            len(tests) == 1 or (len(tests) == 2 and re.fullmatch(rf"\(?{found[1]}\+{step}<[\w.]+\)?", tests[1]))
        )
        if found is None or not inside or size is None:
            return None
        thread = found[1]
        nodes = [node for node in walk(guard) if text_of(node) == thread]
        return thread if nodes and dict(site.polynomial(nodes[0])) == {("threadIdx.x",): 1} else None
    bounds = guard.child_by_field_name("left"), guard.child_by_field_name("right")
    sign = guard.child_by_field_name("operator")
    if guard.type != "binary_expression" or bounds[0] is None or bounds[1] is None or text_of(bounds[1]) != step:
        return None
    if sign is None or text_of(sign) != "<" or dict(site.polynomial(bounds[0])) != {("threadIdx.x",): 1}:
        return None
    return text_of(bounds[0])


def _squeezed(node: Node) -> str:
    return "".join(text_of(node).split())


def _fold(statement: Node, thread: str, step: str) -> tuple[str, str] | None:
    if statement.type != "expression_statement" or len(named(statement)) != 1:
        return None
    expression = named(statement)[0]
    if expression.type != "assignment_expression":
        return None
    target, value = expression.child_by_field_name("left"), expression.child_by_field_name("right")
    sign = expression.child_by_field_name("operator")
    if target is None or value is None or sign is None or target.type != "subscript_expression":
        return None
    argument = target.child_by_field_name("argument")
    array = "" if argument is None else text_of(argument)
    own, other = f"{array}[{thread}]", f"{array}[{thread}+{step}]"
    if "".join(text_of(target).split()) != own or not array.isidentifier():
        return None
    text = "".join(text_of(value).split())
    if text_of(sign) == "+=" and text == other:
        return array, "{a} + {b}"
    if text_of(sign) != "=":
        return None
    if text in (f"{own}+{other}", f"{other}+{own}"):
        return array, "{a} + {b}"
    call = unwrap(value)
    name = called(call) if call.type == "call_expression" else ""
    if name in ("fmaxf", "fmax", "max", "fminf", "fmin", "min") and text in (
        f"{name}({own},{other})",
        f"{name}({other},{own})",
    ):
        return array, name + "({a}, {b})"
    return None


def _changes(site: Site, tree: Tree) -> list[Change]:
    indent = site.source.line_indent(tree.loop)
    right = tree.condition.child_by_field_name("right")
    sign = tree.condition.child_by_field_name("operator")
    assert right is not None
    assert sign is not None  # `_tree` saw both
    lines = [f"if ({tree.thread} < {WARP}) {{"]
    for number, (array, fold) in enumerate(tree.statements):
        value, offset = fresh_name(site, "part") + f"_{number}", fresh_name(site, "lane_offset")
        folded = fold.format(a=value, b=f"__shfl_down_sync(0xffffffffu, {value}, {offset})")
        lines += [
            f"    {_element_type(site, array, tree.loop)} {value} = {array}[{tree.thread}];",
            "    #pragma unroll",
            f"    for (int {offset} = {WARP // 2}; {offset} > 0; {offset} /= 2) {value} = {folded};",
            f"    if ({tree.thread} == 0) {array}[0] = {value};",
        ]
    lines += ["}", "__syncthreads();"]
    nested = tree.loop.parent is not None and tree.loop.parent.type != "compound_statement"
    tail = "".join(f"\n{indent}{line}" for line in lines)
    changes: list[Change] = []
    if tree.interleaved:
        folds = " ".join(
            f"{array}[{tree.thread}] = "
            + fold.format(a=f"{array}[{tree.thread}]", b=f"{array}[{tree.thread} + {tree.step}]")
            + ";"
            for array, fold in tree.statements
        )
        entry = site.launch.block[0]
        block = str(entry) if entry in site.constants else "blockDim.x"
        loop = [
            f"for (int {tree.step} = {block} / 2; {tree.step} >= {WARP}; {tree.step} /= 2) {{",
            f"    if ({tree.thread} < {tree.step}) {{ {folds} }}",
            "    __syncthreads();",
            "}",
        ]
        text = f"\n{indent}".join(loop) + tail
        changes.append((tree.loop.start_byte, tree.loop.end_byte, f"{{ {text} }}" if nested else text))
        return changes
    changes += [
        (sign.start_byte, right.end_byte, f">= {WARP}"),
        (tree.loop.end_byte, tree.loop.end_byte, tail + ("\n}" if nested else "")),
    ]
    if nested:
        changes.append((tree.loop.start_byte, tree.loop.start_byte, "{ "))
    return changes


def _element_type(site: Site, array: str, where: Node) -> str:
    local = site.function.local_at(array, where)
    if local is not None:
        return local.type_text
    parameter = site.function.parameter(array)
    return "auto" if parameter is None else parameter.type_text


EDIT = Edit(
    name="shuffle_reduction",
    metric=INSTRUCTIONS,
    why="The last steps of a tree keep one warp busy while all others wait at barriers.",
    source="Harris, Optimizing Parallel Reduction in CUDA, 2007; Luitjens, Faster Parallel Reductions on Kepler, 2014",
    propose=propose,
)
