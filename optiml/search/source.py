"""CUDA source as edits see it: kernels, parameters, locals, loops and memory accesses of a tree-sitter syntax tree.

Everything here only reads. A function whose text did not parse cleanly is left out, so that no edit touches it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal

import tree_sitter_cuda
from tree_sitter import Language, Node, Parser

from optiml.errors import InvalidInput
from optiml.expressions import evaluate
from optiml.records import Kernel, Launch
from optiml.search import polynomial as poly
from optiml.search.polynomial import Polynomial

_LANGUAGE = Language(tree_sitter_cuda.language())
_INTEGER = re.compile(r"^(0[xX][0-9a-fA-F]+|\d+)[uUlL]*$")
_ATOMICS = frozenset(
    f"atomic{name}" for name in ("Add", "Sub", "Max", "Min", "And", "Or", "Xor", "Exch", "CAS", "Inc", "Dec")
)
_NAMED_CASTS = frozenset({"static_cast", "reinterpret_cast", "const_cast"})
_CAST_CALLS = _NAMED_CASTS | {"int", "size_t", "unsigned", "long", "float", "double"}
MAX_DEPTH = 100  # of nested expressions and locals, in levels
MAX_LEVELS = 200  # of the syntax tree of a kernel that is analysed; hand-written ones have a few dozen
MAX_TERMS = 256  # of a product of sums; index formulas have a few
MAX_EDITED_BYTES = 64 * 1024  # of source; longer kernels are not analysed
_CACHED_LOADS = frozenset({"__ldg", "__ldcg", "__ldcs", "__ldca"})
BARRIERS = frozenset({"__syncthreads", "__syncwarp", "__syncthreads_count", "__syncthreads_or", "__syncthreads_and"})
WARP_CALLS = ("__shfl", "__ballot", "__any", "__all", "__activemask", "__match", "__reduce")

Change = tuple[int, int, str]  # start byte, end byte, new text


class OverlappingChanges(ValueError):
    """An edit wanted to replace the same text twice: it did not understand the source."""


# --- nodes -----------------------------------------------------------------------------------------------------------
def text_of(node: Node) -> str:
    """The source text of a node."""
    return (node.text or b"").decode("utf-8")


def walk(node: Node) -> Iterator[Node]:
    """The node and everything below it, in source order."""
    stack = [node]
    while stack:
        current = stack.pop()
        yield current
        stack.extend(reversed(current.children))


def named(node: Node) -> list[Node]:
    """Named children without comments."""
    return [child for child in node.named_children if child.type != "comment"]


def ancestors(node: Node, *, below: Node) -> Iterator[Node]:
    """Parents of `node`, nearest first, up to and without `below`."""
    current = node.parent
    while current is not None and current.id != below.id:
        yield current
        current = current.parent


def contains(outer: Node, inner: Node) -> bool:
    """Whether `inner` lies inside `outer`."""
    return outer.start_byte <= inner.start_byte and inner.end_byte <= outer.end_byte


def unwrap(node: Node) -> Node:
    """The expression inside parentheses, casts and static_casts."""
    while True:
        if node.type == "parenthesized_expression" or node.type == "condition_clause":
            inside = named(node)
            if len(inside) != 1:
                return node
            node = inside[0]
        elif node.type == "cast_expression":
            value = node.child_by_field_name("value")
            if value is None:
                return node
            node = value
        elif node.type == "call_expression" and called(node) in _CAST_CALLS:
            arguments = call_arguments(node)
            if len(arguments) != 1:
                return node
            node = arguments[0]
        else:
            return node


def called(node: Node) -> str:
    """Name of the function that a call expression calls; templates without their arguments."""
    function = node.child_by_field_name("function")
    if function is None:
        return ""
    if function.type == "template_function":
        name = function.child_by_field_name("name")
        return text_of(name) if name is not None else ""
    return text_of(function)


def call_arguments(node: Node) -> list[Node]:
    arguments = node.child_by_field_name("arguments")
    return named(arguments) if arguments is not None else []


def calls(node: Node) -> Iterator[Node]:
    """Every call expression at or below `node`."""
    return (item for item in walk(node) if item.type == "call_expression")


def identifiers(node: Node) -> list[Node]:
    """Every identifier at or below `node`; the fields of `a.b` are no identifiers."""
    return [item for item in walk(node) if item.type == "identifier"]


def mentions(node: Node, names: Iterable[str]) -> bool:
    """Whether any of `names` is read or written at or below `node`."""
    wanted = set(names)
    return any(text_of(item) in wanted for item in identifiers(node))


def same_node(left: Node | None, right: Node | None) -> bool:
    return left is not None and right is not None and left.id == right.id


def statements_of(body: Node) -> list[Node]:
    """The statements of a block, or the one statement that stands in its place; comments left out."""
    return named(body) if body.type == "compound_statement" else [body]


# --- functions -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, eq=False)
class Parameter:
    """A parameter of a function; `type_text` is the element type of a pointer, qualifiers left out."""

    name: str
    type_text: str
    is_pointer: bool
    is_const: bool  # the pointed-to data
    is_restrict: bool
    node: Node


@dataclass(frozen=True, kw_only=True, eq=False)
class Local:
    """A variable declared inside a function."""

    name: str
    type_text: str
    is_pointer: bool
    dimensions: tuple[Node, ...]  # sizes of an array, outermost first; () for a scalar
    is_array: bool
    is_shared: bool
    initial: Node | None
    declarator: Node
    declaration: Node
    scope: Node


@dataclass(frozen=True, kw_only=True, eq=False)
class Write:
    """Something that changes a named variable: an assignment, ++, --, or taking its address."""

    name: str
    node: Node  # the assignment or update expression
    operator: str  # "=", "+=", "++", "&" …
    value: Node | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Function:
    """A function definition that parsed cleanly."""

    name: str
    node: Node
    body: Node
    parameters: tuple[Parameter, ...]
    is_kernel: bool
    is_template: bool

    def parameter(self, name: str) -> Parameter | None:
        return next((item for item in self.parameters if item.name == name), None)

    @cached_property
    def locals(self) -> tuple[Local, ...]:
        """Every local, in source order."""
        return tuple(local for node in walk(self.body) if node.type == "declaration" for local in _locals_of(node))

    @cached_property
    def writes(self) -> tuple[Write, ...]:
        """Every write to a named variable, initialisers left out."""
        return tuple(item for node in walk(self.body) if (item := _write_of(node)) is not None)

    @cached_property
    def loops(self) -> tuple[Node, ...]:
        """Every for statement."""
        return tuple(node for node in walk(self.body) if node.type == "for_statement")

    def local_at(self, name: str, where: Node) -> Local | None:
        """The declaration that `name` refers to at `where`: the innermost visible one."""
        visible = [
            item
            for item in self.locals
            if item.name == name and item.declaration.start_byte <= where.start_byte and contains(item.scope, where)
        ]
        return max(visible, key=lambda item: item.declarator.start_byte, default=None)

    def writes_to(self, local: Local) -> list[Write]:
        """Writes that reach this very declaration, not another one of the same name."""
        return [
            item
            for item in self.writes
            if item.name == local.name and (found := self.local_at(local.name, item.node)) is not None
            and same_node(found.declarator, local.declarator)
        ]  # fmt: skip

    def calls_any(self, names: Iterable[str]) -> bool:
        wanted = frozenset(names)
        return any(called(item) in wanted for item in calls(self.body))

    @cached_property
    def is_cooperative(self) -> bool:
        """Whether its threads talk to each other: barriers, shared memory or warp primitives."""
        return any(local.is_shared for local in self.locals) or any(
            called(item) in BARRIERS or called(item).startswith(WARP_CALLS) for item in calls(self.body)
        )


def bounds_change(function: Function, threads: int) -> list[Change]:
    """The change that keeps `__launch_bounds__` true for blocks of another size; none where there is none."""
    nodes = [node for node in walk(function.node) if node.type == "launch_bounds"]
    return [(node.start_byte, node.end_byte, f"__launch_bounds__({threads})") for node in nodes]


@dataclass(frozen=True, kw_only=True, eq=False)
class CudaSource:
    """A parsed CUDA file."""

    data: bytes
    root: Node

    @cached_property
    def functions(self) -> tuple[Function, ...]:
        found = (_function(node) for node in walk(self.root) if node.type == "function_definition")
        return tuple(item for item in found if item is not None)

    @cached_property
    def kernels(self) -> tuple[Function, ...]:
        return tuple(item for item in self.functions if item.is_kernel)

    @cached_property
    def levels(self) -> int:
        """Depth of the syntax tree."""
        deepest, stack = 0, [(self.root, 1)]
        while stack:
            node, level = stack.pop()
            deepest = max(deepest, level)
            stack.extend((child, level + 1) for child in node.children)
        return deepest

    @cached_property
    def constants(self) -> Mapping[str, int]:
        """Integer `#define`s and file-scope constants, by name."""
        found: dict[str, int] = {}
        for node in walk(self.root):
            if node.type == "preproc_def":
                name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
                if name is not None and value is not None and (number := integer(text_of(value).strip())) is not None:
                    found[text_of(name)] = number
            elif node.type == "declaration" and re.match(r"\s*(static\s+)?(constexpr|const)\b", text_of(node)):
                for local in _locals_of(node):
                    number = None if local.initial is None else integer(text_of(local.initial))
                    if number is not None and not local.is_pointer:
                        found[local.name] = number
        return found

    def rewrite(self, changes: Iterable[Change]) -> str:
        """The text with every change applied.

        Raises:
            OverlappingChanges: two changes touch the same text.
        """
        data, at = self.data, len(self.data) + 1
        for start, end, new in sorted(changes, key=lambda item: (item[0], item[1]), reverse=True):
            if end > at:
                raise OverlappingChanges(f"changes overlap at byte {start}")
            data, at = data[:start] + new.encode("utf-8") + data[end:], start
        return data.decode("utf-8")

    def line_indent(self, node: Node) -> str:
        """White space before the line on which `node` starts."""
        start = self.data.rfind(b"\n", 0, node.start_byte) + 1
        line = self.data[start : node.start_byte].decode("utf-8")
        return line[: len(line) - len(line.lstrip())]


@lru_cache(maxsize=256)
def parse(text: str) -> CudaSource:
    """Parse CUDA C++; never fails, but functions with syntax errors are not listed."""
    data = text.encode("utf-8")
    return CudaSource(data=data, root=Parser(_LANGUAGE).parse(data).root_node)


def integer(text: str) -> int | None:
    """Value of an integer literal, or None."""
    match = _INTEGER.match(text.strip())
    return int(match[1], 0) if match and not re.fullmatch(r"0\d+", match[1]) else None


def _function(node: Node) -> Function | None:
    declarator, body = node.child_by_field_name("declarator"), node.child_by_field_name("body")
    while declarator is not None and declarator.type != "function_declarator":
        declarator = declarator.child_by_field_name("declarator")
    if declarator is None or body is None or body.type != "compound_statement" or node.has_error:
        return None
    name, parameters = declarator.child_by_field_name("declarator"), declarator.child_by_field_name("parameters")
    if name is None or parameters is None:
        return None
    return Function(
        name=text_of(name),
        node=node,
        body=body,
        parameters=tuple(_parameter(item) for item in named(parameters) if item.type == "parameter_declaration"),
        is_kernel=any(child.type == "__global__" for child in node.children),
        is_template=node.parent is not None and node.parent.type == "template_declaration",
    )


def _parameter(node: Node) -> Parameter:
    declarator, kind = node.child_by_field_name("declarator"), node.child_by_field_name("type")
    pointer = False
    while declarator is not None and declarator.type in ("pointer_declarator", "array_declarator"):
        pointer = True
        inner = declarator.child_by_field_name("declarator")
        declarator = inner if inner is not None else next(iter(reversed(named(declarator))), None)
    return Parameter(
        name=text_of(declarator) if declarator is not None else "",
        type_text=text_of(kind) if kind is not None else "",
        is_pointer=pointer,
        is_const=any(child.type == "type_qualifier" and text_of(child) == "const" for child in node.children),
        is_restrict=any(text_of(item) in ("__restrict__", "__restrict", "restrict") for item in walk(node)),
        node=node,
    )


def _locals_of(declaration: Node) -> Iterator[Local]:
    kind = declaration.child_by_field_name("type")
    scope = declaration.parent
    if kind is None or scope is None:
        return
    qualifiers = {text_of(child) for child in declaration.children if child.type == "type_qualifier"}
    for declarator in declaration.children_by_field_name("declarator"):
        initial = declarator.child_by_field_name("value") if declarator.type == "init_declarator" else None
        inner: Node | None = declarator
        pointer, dimensions, is_array = False, [], False
        while inner is not None and inner.type != "identifier":
            if inner.type == "function_declarator":
                inner = None
                break
            pointer = pointer or inner.type == "pointer_declarator"
            if inner.type == "array_declarator":
                is_array = True
                size = inner.child_by_field_name("size")
                dimensions.append(size)
            following = inner.child_by_field_name("declarator")
            inner = following if following is not None else next(iter(reversed(named(inner))), None)
        if inner is None:
            continue
        yield Local(
            name=text_of(inner),
            type_text=text_of(kind),
            is_pointer=pointer,
            dimensions=tuple(size for size in reversed(dimensions) if size is not None),
            is_array=is_array,
            is_shared="__shared__" in qualifiers,
            initial=initial,
            declarator=declarator,
            declaration=declaration,
            scope=scope,
        )


def _write_of(node: Node) -> Write | None:
    if node.type == "assignment_expression":
        target, operator = node.child_by_field_name("left"), node.child_by_field_name("operator")
        value = node.child_by_field_name("right")
        written = "=" if operator is None else text_of(operator)
    elif node.type == "update_expression":
        target, value = node.child_by_field_name("argument"), None
        written = "++" if any(child.type == "++" for child in node.children) else "--"
    elif node.type == "pointer_expression" and text_of(node).startswith("&"):
        target, value, written = node.child_by_field_name("argument"), None, "&"
    else:
        return None
    if target is None:
        return None
    target = unwrap(target)
    while target.type == "field_expression":  # v.x = … changes v
        argument = target.child_by_field_name("argument")
        if argument is None:
            return None
        target = argument
    if target.type != "identifier":
        return None
    return Write(name=text_of(target), node=node, operator=written, value=value)


# --- launches --------------------------------------------------------------------------------------------------------
AccessKind = Literal["load", "store", "update", "atomic", "address"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Access:
    """One memory access in the text.

    `array` is the parameter or array it goes to, `index` its element index with locals expanded (None if unreadable).
    """

    array: str
    space: Literal["global", "shared", "local"]
    kind: AccessKind
    index: Polynomial | None
    node: Node

    @property
    def writes(self) -> bool:
        return self.kind != "load"

    @property
    def reads(self) -> bool:
        return self.kind != "store"


@dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    """A kernel function together with the one launch that runs it."""

    index: int  # of the launch in the plan
    launch: Launch
    function: Function
    source: CudaSource
    constants: Mapping[str, int]  # integer params, #defines, file-scope constants
    block: tuple[int | None, int | None, int | None]  # where it does not depend on the problem's axes
    launches: int  # how often the plan launches this function
    _memo: dict[int, Polynomial] = field(default_factory=dict, repr=False)

    @cached_property
    def arguments(self) -> Mapping[str, str]:
        """Parameter name -> the text the plan passes for it."""
        return {
            parameter.name: str(argument)
            for parameter, argument in zip(self.function.parameters, self.launch.args, strict=False)
        }

    def polynomial(self, node: Node, *, depth: int = 0) -> Polynomial:
        """The integer expression `node` with constants, block sizes and once-assigned locals filled in."""
        node = unwrap(node)
        known = self._memo.get(node.id)
        if known is None:
            known = self._polynomial(node, depth)
            self._memo[node.id] = known
        return known

    def _polynomial(self, node: Node, depth: int) -> Polynomial:
        text = text_of(node)
        if depth > MAX_DEPTH:  # nested beyond any index formula: the text itself stands for the value
            return poly.atom("".join(text.split()))
        if node.type == "number_literal":
            value = integer(text)
            return poly.atom(text) if value is None else poly.constant(value)
        if node.type == "identifier":
            return self._name(node, text, depth)
        if node.type == "field_expression":
            axis = "xyz".find(text[-1])
            if text.startswith("blockDim.") and axis >= 0 and (size := self.block[axis]) is not None:
                return poly.constant(size)
            return poly.atom(text)
        if node.type == "binary_expression":
            left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
            operator = node.child_by_field_name("operator")
            if left is not None and right is not None and operator is not None:
                a, b = self.polynomial(left, depth=depth + 1), self.polynomial(right, depth=depth + 1)
                return _combine(text_of(operator), a, b)
        if node.type == "unary_expression" and text.startswith("-"):
            argument = node.child_by_field_name("argument")
            if argument is not None:
                return poly.add(poly.ZERO, self.polynomial(argument, depth=depth + 1), sign=-1)
        if node.type == "subscript_expression":
            base, indices = node.child_by_field_name("argument"), node.child_by_field_name("indices")
            if base is not None and indices is not None and len(named(indices)) == 1:
                inside = poly.canonical(self.polynomial(named(indices)[0], depth=depth + 1))
                return poly.atom(f"{text_of(base)}[{inside}]")
        if node.type == "call_expression":
            inside = ", ".join(poly.canonical(self.polynomial(item, depth=depth + 1)) for item in call_arguments(node))
            return poly.atom(f"{called(node)}({inside})")
        return poly.atom(re.sub(r"\s+", "", text))

    def _name(self, node: Node, name: str, depth: int) -> Polynomial:
        local = self.function.local_at(name, node)
        if local is None:
            if self.function.parameter(name) is None and name in self.constants:
                return poly.constant(self.constants[name])
            return poly.atom(name)
        initial = local.initial
        expandable = (
            depth < MAX_DEPTH and initial is not None and not local.is_pointer and not local.is_array
            and local.scope.type != "for_statement" and initial.type != "initializer_list"
            and not contains(local.declarator, node) and not self.function.writes_to(local)
        )  # fmt: skip
        if not expandable or initial is None:
            return poly.atom(name)
        value = self.polynomial(initial, depth=depth + 1)
        # A value that was read from memory, or floating, is not an index formula: keep the name.
        return poly.atom(name) if _mentions_memory(initial) else value

    @cached_property
    def accesses(self) -> tuple[Access, ...]:
        """Every subscript or dereference of an array, in source order."""
        return tuple(found for node in walk(self.function.body) if (found := self._access(node)) is not None)

    def _access(self, node: Node) -> Access | None:
        if node.type == "subscript_expression":
            base, indices = node.child_by_field_name("argument"), node.child_by_field_name("indices")
            if base is None or indices is None or unwrap(base).type == "subscript_expression":
                return self._nested_access(node)
            position = named(indices)
            offset = self.polynomial(position[0]) if len(position) == 1 else None
        elif node.type == "pointer_expression" and text_of(node).startswith("*"):
            base, offset = node.child_by_field_name("argument"), poly.ZERO
        else:
            return self._passed_pointer(node)
        if base is None:
            return None
        parent = node.parent
        if node.type == "subscript_expression" and parent is not None and parent.type == "subscript_expression":
            return None  # the outer subscript of a[i][j] stands for both
        found = self.pointer(base)
        if found is None:
            return None
        array, start = found
        index = None if start is None or offset is None else poly.add(start, offset)
        return Access(array=array, space=self._space(array, node), kind=_kind(node), index=index, node=node)

    def _passed_pointer(self, node: Node) -> Access | None:
        """A pointer handed to a call: atomicAdd(out, …) touches one element, other callees may touch any."""
        if node.parent is None or node.parent.type != "argument_list" or node.parent.parent is None:
            return None
        call = node.parent.parent
        if call.type != "call_expression" or called(call) in _CAST_CALLS or node.type not in (
            "identifier", "binary_expression"
        ):  # fmt: skip
            return None
        found = self.pointer(node)
        if found is None:
            return None
        array, index = found
        kind: AccessKind = "load" if called(call) in _CACHED_LOADS else "address"
        kind = "atomic" if called(call) in _ATOMICS else kind
        return Access(array=array, space=self._space(array, node), kind=kind, index=index, node=node)

    def _nested_access(self, node: Node) -> Access | None:
        """a[i][j]: an access without a flat index."""
        if node.parent is not None and node.parent.type == "subscript_expression":
            return None
        base: Node | None = node
        while base is not None and unwrap(base).type == "subscript_expression":
            base = unwrap(base).child_by_field_name("argument")
        if base is None or unwrap(base).type != "identifier":
            return None
        array = text_of(unwrap(base))
        return Access(array=array, space=self._space(array, node), kind=_kind(node), index=None, node=node)

    def _space(self, array: str, where: Node) -> Literal["global", "shared", "local"]:
        local = self.function.local_at(array, where)
        if local is not None and local.is_array:
            return "shared" if local.is_shared else "local"
        return "global" if self.function.parameter(array) is not None or local is None else "local"

    def pointer(self, node: Node, *, depth: int = 0) -> tuple[str, Polynomial | None] | None:
        """The array that a pointer expression points into and its element offset; None if it cannot be told.

        A pointer that moves (`p += 4`) or is cast to another element type keeps its array and loses its offset.
        """
        if _recasts(node):
            found = self.pointer(unwrap(node), depth=depth + 1)
            return None if found is None else (found[0], None)
        node = unwrap(node)
        if node.type == "identifier":
            name = text_of(node)
            local = self.function.local_at(name, node)
            if local is None:
                parameter = self.function.parameter(name)
                return (name, poly.ZERO) if parameter is None or parameter.is_pointer else None
            if local.is_array:
                return name, poly.ZERO
            if not (local.is_pointer or local.type_text == "auto") or local.initial is None or depth > 8:
                return None
            found = self.pointer(local.initial, depth=depth + 1)
            return None if found is None else (found[0], None if self.function.writes_to(local) else found[1])
        if node.type == "binary_expression":
            left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
            operator = node.child_by_field_name("operator")
            if left is None or right is None or operator is None or text_of(operator) not in "+-":
                return None
            for base, offset in ((left, right), (right, left)):
                found = self.pointer(base, depth=depth + 1)
                if found is not None:
                    sign = 1 if text_of(operator) == "+" else -1
                    start = found[1]
                    return found[0], None if start is None else poly.add(start, self.polynomial(offset), sign=sign)
            return None
        if node.type == "pointer_expression" and text_of(node).startswith("&"):
            argument = node.child_by_field_name("argument")
            if argument is not None and argument.type == "subscript_expression":
                array = argument.child_by_field_name("argument")
                indices = argument.child_by_field_name("indices")
                found = None if array is None else self.pointer(array, depth=depth + 1)
                if found is not None and indices is not None and len(named(indices)) == 1:
                    first, step = found[1], self.polynomial(named(indices)[0])
                    return found[0], None if first is None else poly.add(first, step)
        return None

    def thread_index(self, axis: str = "x") -> tuple[Polynomial, ...]:
        """The polynomials that mean `blockIdx.a * blockDim.a + threadIdx.a` under this launch."""
        size = self.block["xyz".index(axis)]
        symbolic = poly.add(
            poly.multiply(poly.atom(f"blockIdx.{axis}"), poly.atom(f"blockDim.{axis}")), poly.atom(f"threadIdx.{axis}")
        )
        if size is None:
            return (symbolic,)
        return (
            poly.add(poly.multiply(poly.atom(f"blockIdx.{axis}"), poly.constant(size)), poly.atom(f"threadIdx.{axis}")),
        )

    def thread_indices(self, axis: str = "x") -> list[Local]:
        """Locals that hold the global thread index along one axis and never change."""
        wanted = self.thread_index(axis)
        return [
            local
            for local in self.function.locals
            if local.initial is not None and not local.is_pointer and not local.is_array
            and self.polynomial(local.initial) in wanted and not self.function.writes_to(local)
        ]  # fmt: skip


def sites(kernel: Kernel) -> tuple[Site, ...]:
    """Every launch of `kernel` whose function is in the text and parsed cleanly; none for very long or deep sources."""
    if kernel.language != "cuda" or len(kernel.source) > MAX_EDITED_BYTES:
        return ()
    source = parse(kernel.source)
    if source.levels > MAX_LEVELS:
        return ()
    params = {name: int(value) for name, value in kernel.params.items() if isinstance(value, int)}
    constants = {**source.constants, **params}
    counts: dict[str, int] = {}
    for launch in kernel.launches:
        counts[launch.kernel] = counts.get(launch.kernel, 0) + 1
    found = []
    for index, launch in enumerate(kernel.launches):
        name = launch.kernel.split("<")[0].split("::")[-1].strip()
        functions = [item for item in source.kernels if item.name == name]
        if len(functions) == 1:
            found.append(
                Site(
                    index=index, launch=launch, function=functions[0], source=source, constants=constants,
                    block=block_of(launch, params), launches=counts[launch.kernel],
                )
            )  # fmt: skip
    return tuple(found)


def block_of(launch: Launch, params: Mapping[str, int]) -> tuple[int | None, int | None, int | None]:
    """Block sizes of a launch where params alone decide them."""
    sizes: list[int | None] = []
    for entry in (*launch.block, 1, 1)[:3]:
        try:
            sizes.append(evaluate(entry, params))
        except InvalidInput:  # depends on an axis
            sizes.append(None)
    return sizes[0], sizes[1], sizes[2]


def _combine(operator: str, a: Polynomial, b: Polynomial) -> Polynomial:
    p, q = poly.as_constant(a), poly.as_constant(b)
    if operator == "+":
        return poly.add(a, b)
    if operator == "-":
        return poly.add(a, b, sign=-1)
    if operator == "*" and len(a) * len(b) <= MAX_TERMS:
        return poly.multiply(a, b)
    if operator == "<<" and q is not None and 0 <= q < 31:
        return poly.multiply(a, poly.constant(1 << q))
    if p is not None and q is not None and p >= 0 and q > 0 and operator in ("/", "%"):
        return poly.constant(p // q if operator == "/" else p % q)
    if operator == "/" and q == 1:
        return a
    if operator == ">>" and q is not None:
        operator, b = "/", poly.constant(1 << q)
    if operator == "&" and q is not None and q > 0 and q & (q + 1) == 0:
        operator, b = "%", poly.constant(q + 1)
    return poly.atom(f"({poly.canonical(a)} {operator} {poly.canonical(b)})")


def _recasts(node: Node) -> bool:
    """Whether the expression is a cast to a pointer type, which changes the unit of its offsets."""
    while node.type == "parenthesized_expression" and len(named(node)) == 1:
        node = named(node)[0]
    if node.type == "cast_expression":
        kind = node.child_by_field_name("type")
        return kind is not None and "*" in text_of(kind)
    if node.type == "call_expression" and called(node) in _NAMED_CASTS:
        function = node.child_by_field_name("function")
        return function is not None and "*" in text_of(function)
    return False


def _mentions_memory(node: Node) -> bool:
    return any(
        item.type in ("subscript_expression", "conditional_expression", "assignment_expression", "update_expression")
        or (item.type == "pointer_expression" and text_of(item).startswith("*"))
        or (item.type == "number_literal" and re.search(r"[.]|^\d+f$", text_of(item)) is not None)
        for item in walk(node)
    )


def _kind(node: Node) -> AccessKind:
    current, parent = node, node.parent
    while parent is not None and parent.type in ("parenthesized_expression", "field_expression"):
        current, parent = parent, parent.parent
    if parent is None:
        return "load"
    if parent.type == "assignment_expression" and same_node(parent.child_by_field_name("left"), current):
        operator = parent.child_by_field_name("operator")
        return "store" if operator is not None and text_of(operator) == "=" else "update"
    if parent.type == "update_expression":
        return "update"
    if parent.type == "pointer_expression" and text_of(parent).startswith("&"):
        user = parent.parent
        if user is not None and user.type == "argument_list" and user.parent is not None:
            name = called(user.parent)
            if name in _ATOMICS:
                return "atomic"
            if name in _CACHED_LOADS:
                return "load"
        if user is not None and user.type in ("init_declarator", "binary_expression"):
            return "load"  # a pointer is formed; its own accesses are listed where they happen
        return "address"
    return "load"
