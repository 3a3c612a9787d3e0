"""Kernels in which each thread handles one item of a flat index range, and the parts that rewrites of them need."""

from __future__ import annotations

from dataclasses import dataclass

from tree_sitter import Node

from optiml.search import polynomial as poly
from optiml.search.loops import ForLoop, has_barrier, outermost_loops
from optiml.search.source import (
    Access,
    Local,
    Site,
    ancestors,
    contains,
    identifiers,
    mentions,
    named,
    text_of,
    unwrap,
    walk,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class ItemKernel:
    """`i = thread index; if (i < bound) { body }`, with an early return, or with a grid-stride loop.

    Attributes:
        index: name of the item variable.
        index_type: its C++ type.
        index_text: C++ text of the first item of a thread.
        bound: the exclusive end of the range.
        body: C++ text that handles item `index`; a `return` in it became `continue`.
        replaced: bytes of the source that the body and its frame take, the declaration of the index included.
        stride: C++ text of the step of a grid-stride loop, or None.
        span: bytes of the source in which the body stands.
    """

    site: Site
    index: str
    index_type: str
    index_text: str
    bound: str
    body: str
    replaced: tuple[tuple[int, int], ...]
    stride: str | None
    span: tuple[int, int]

    @property
    def accesses(self) -> tuple[Access, ...]:
        """Memory accesses of the body."""
        start, end = self.span
        return tuple(item for item in self.site.accesses if start <= item.node.start_byte and item.node.end_byte <= end)

    def body_with(self, replacements: dict[tuple[int, int], str]) -> str:
        """The body with some of its nodes replaced, each given by its bytes in the source."""
        start, end = self.span
        data = self.site.source.data[start:end]
        for (first, last), text in sorted(replacements.items(), reverse=True):
            data = data[: first - start] + text.encode("utf-8") + data[last - start :]
        return data.decode("utf-8")

    @property
    def walks_memory(self) -> bool:
        """Whether a loop of the body reads or writes global memory: one item is then much work already."""
        start, end = self.span
        return any(
            contains(loop, access.node) and access.space == "global"
            for loop in self.site.function.loops
            if start <= loop.start_byte and loop.end_byte <= end
            for access in self.accesses
        )

    @property
    def returns(self) -> dict[tuple[int, int], str]:
        """The `return` statements of the body, as `continue`."""
        start, end = self.span
        return {
            (node.start_byte, node.end_byte): "continue;"
            for node in walk(self.site.function.body)
            if node.type == "return_statement" and start <= node.start_byte and node.end_byte <= end
        }


def item_kernel(site: Site) -> ItemKernel | None:
    """Read a kernel as one item per thread; None where it is anything else.

    Its threads do not cooperate and keep no state between items, so any thread may handle any items in any order.
    """
    function = site.function
    if function.is_cooperative or site.launches != 1 or has_barrier(function.body):
        return None
    if any(size != 1 for size in site.block[1:]) or any(entry != 1 for entry in site.launch.grid[1:]):
        return None
    found = _guarded(site) or _grid_stride(site)
    if found is None or _keeps_state(site, found) or _leaves_inner_loop(site, found):
        return None
    return found


def _guarded(site: Site) -> ItemKernel | None:
    candidates = [item for item in site.thread_indices("x") if item.scope.id == site.function.body.id]
    if len(candidates) != 1 or candidates[0].initial is None or len(_declarators(candidates[0])) != 1:
        return None
    index = candidates[0]
    initial = candidates[0].initial
    if not _alone_in_geometry(site, index):
        return None
    statements = named(site.function.body)
    guards = [item for item in statements if item.type == "if_statement" and _compares(item, index.name)]
    if not guards or guards[0].child_by_field_name("alternative") is not None:
        return None
    guard = guards[0]
    between = [item for item in statements if index.declaration.end_byte <= item.start_byte < guard.start_byte]
    condition, consequence = guard.child_by_field_name("condition"), guard.child_by_field_name("consequence")
    if condition is None or consequence is None or any(mentions(item, (index.name,)) for item in between):
        return None
    bound, inside = _bound(unwrap(condition), index.name)
    if bound is None or _mentions_written(site, bound):
        return None
    after = [item for item in statements if item.start_byte >= guard.end_byte]
    if inside and not after:
        span = consequence.start_byte, consequence.end_byte
        frame = (guard.start_byte, guard.end_byte)
    elif not inside and after and _is_return(consequence):
        last = site.function.body.children[-1]  # the closing brace
        span = guard.end_byte, last.start_byte
        frame = (guard.start_byte, last.start_byte)
    else:
        return None
    return _item(site, index, text_of(initial), text_of(bound), span, (_whole(index), frame), None)


def _grid_stride(site: Site) -> ItemKernel | None:
    size = site.block[0]
    stride = poly.multiply(
        poly.atom("gridDim.x"), poly.atom("blockDim.x") if size is None else poly.constant(size)
    )  # fmt: skip
    loops = outermost_loops(site.function.body)
    fitting = [
        loop
        for loop in loops
        if loop.declared and loop.comparison == "<" and loop.step_node is not None
        and site.polynomial(loop.step_node) == stride and site.polynomial(loop.start) in site.thread_index("x")
    ]  # fmt: skip
    if len(fitting) != 1 or len(loops) != 1:
        return None
    loop: ForLoop = fitting[0]
    statements = named(site.function.body)
    if not statements or statements[-1].id != loop.node.id or loop.step_node is None:
        return None
    if _mentions_written(site, loop.bound):
        return None
    declaration = loop.node.child_by_field_name("initializer")
    kind = None if declaration is None else declaration.child_by_field_name("type")
    if kind is None:
        return None
    return ItemKernel(
        site=site, index=loop.variable, index_type=text_of(kind), index_text=text_of(loop.start),
        bound=text_of(loop.bound), body=text_of(loop.body), replaced=((loop.node.start_byte, loop.node.end_byte),),
        stride=text_of(loop.step_node), span=(loop.body.start_byte, loop.body.end_byte),
    )  # fmt: skip


def _item(
    site: Site, index: Local, initial: str, bound: str, span: tuple[int, int],
    replaced: tuple[tuple[int, int], ...], stride: str | None,
) -> ItemKernel:  # fmt: skip
    kind = index.type_text if index.type_text != "auto" else "long long"
    return ItemKernel(
        site=site, index=index.name, index_type=kind, index_text=initial, bound=bound,
        body=site.source.data[span[0] : span[1]].decode("utf-8"), replaced=replaced, stride=stride, span=span,
    )  # fmt: skip


def _whole(index: Local) -> tuple[int, int]:
    return index.declaration.start_byte, index.declaration.end_byte


def _declarators(index: Local) -> list[Node]:
    return index.declaration.children_by_field_name("declarator")


def _alone_in_geometry(site: Site, index: Local) -> bool:
    """Whether thread and block indices are used for nothing but the item index."""
    return all(
        contains(index.declaration, node)
        for node in identifiers(site.function.body)
        if text_of(node) in ("threadIdx", "blockIdx", "gridDim")
    )


def _compares(statement: Node, name: str) -> bool:
    condition = statement.child_by_field_name("condition")
    return condition is not None and mentions(condition, (name,))


def _bound(test: Node, name: str) -> tuple[Node | None, bool]:
    """The exclusive bound that a guard compares `name` with, and whether the guard holds inside the range."""
    if test.type != "binary_expression":
        return None, False
    left, right = test.child_by_field_name("left"), test.child_by_field_name("right")
    sign = test.child_by_field_name("operator")
    if left is None or right is None or sign is None:
        return None, False
    operator = text_of(sign)
    if text_of(unwrap(left)) == name and not mentions(right, (name,)):
        return (right, operator == "<") if operator in ("<", ">=") else (None, False)
    if text_of(unwrap(right)) == name and not mentions(left, (name,)):
        return (left, operator == ">") if operator in (">", "<=") else (None, False)
    return None, False


def _is_return(statement: Node) -> bool:
    inner = named(statement)[0] if statement.type == "compound_statement" and len(named(statement)) == 1 else statement
    return inner.type == "return_statement"


def _mentions_written(site: Site, expression: Node) -> bool:
    return mentions(expression, {write.name for write in site.function.writes}) or any(
        item.type in ("subscript_expression", "call_expression") for item in walk(expression)
    )


def _keeps_state(site: Site, item: ItemKernel) -> bool:
    """Whether the body writes a variable from outside it."""
    start, end = item.span
    for write in site.function.writes:
        if not (start <= write.node.start_byte and write.node.end_byte <= end):
            continue
        local = site.function.local_at(write.name, write.node)
        if write.name == item.index or local is None or not start <= local.declaration.start_byte < end:
            return True
    return False


def _leaves_inner_loop(site: Site, item: ItemKernel) -> bool:
    """Whether a return inside a loop of the body could not become `continue`."""
    start, end = item.span
    for node in walk(site.function.body):
        if node.type == "return_statement" and start <= node.start_byte and node.end_byte <= end:
            for outer in ancestors(node, below=site.function.body):
                if outer.start_byte >= start and outer.end_byte <= end and outer.type in (
                    "for_statement", "while_statement", "do_statement", "switch_statement"
                ):  # fmt: skip
                    return True
    return False


def fresh_name(site: Site, base: str) -> str:
    """A name that the function and the launch plan do not use."""
    used = {text_of(node) for node in identifiers(site.function.node)} | set(site.constants)
    name = base
    while name in used:
        name += "_"
    return name


def insertion_point(site: Site) -> int:
    """The byte before which file-scope declarations for the kernel go."""
    node = site.function.node
    while node.parent is not None and node.parent.type in ("linkage_specification", "template_declaration"):
        node = node.parent
    return node.start_byte
