"""Mark pointers that are never written as `const … __restrict__`, and written ones as `__restrict__`."""

from __future__ import annotations

from collections.abc import Iterator

from optiml.search.edit import INSTRUCTIONS, LOAD_REQUESTS, Edit, EditContext, Proposal, down, with_source
from optiml.search.source import Change, Function, Parameter, Site, called, calls, mentions, text_of, walk

_FULL = frozenset({"float", "double", "int", "unsigned", "T", "A", "float4", "float2"})


def propose(context: EditContext) -> Iterator[Proposal]:
    """One proposal: every kernel of the plan whose pointers are distinct arrays gets the qualifiers it lacks."""
    changes: list[Change] = []
    seen: set[str] = set()
    for site in context.sites:
        if site.function.name in seen or site.function.is_template or not _distinct(context, site):
            continue
        seen.add(site.function.name)
        for parameter in site.function.parameters:
            changes += _qualified(site, parameter)
    if changes:
        yield Proposal(
            kernel=with_source(context.kernel, context.sites[0].source.rewrite(changes)),
            rationale="Pointers that are never written become const __restrict__, so the compiler may keep loaded "
            "values in registers and use the read-only path",
            expected=(down(LOAD_REQUESTS, 0.9), down(INSTRUCTIONS, 0.95)),
        )


def _distinct(context: EditContext, site: Site) -> bool:
    """Whether no array is passed to two pointers of any launch of this function."""
    for other in context.sites:
        if other.function.name != site.function.name:
            continue
        pointers = [other.arguments.get(item.name) for item in other.function.parameters if item.is_pointer]
        if len(pointers) != len(set(pointers)) or None in pointers:
            return False
    return True


def _qualified(site: Site, parameter: Parameter) -> list[Change]:
    if not parameter.is_pointer or text_of(parameter.node).count("*") != 1 or "volatile" in text_of(parameter.node):
        return []
    if _writes_to(site.function, parameter):
        return []  # `p += n` on a restrict pointer is legal but hides what it points to
    changes: list[Change] = []
    star = next(node for node in walk(parameter.node) if node.type == "*")
    written = any(item.array == parameter.name and item.writes for item in site.accesses)
    if not parameter.is_const and not written and _only_read(site.function, parameter):
        changes.append((parameter.node.start_byte, parameter.node.start_byte, "const "))
    if not parameter.is_restrict:
        following = site.source.data[star.end_byte : star.end_byte + 1]
        space = " " if following.isalnum() or following == b"_" else ""
        changes.append((star.end_byte, star.end_byte, f" __restrict__{space}"))
    return changes


def _writes_to(function: Function, parameter: Parameter) -> bool:
    writes = (write for write in function.writes if write.name == parameter.name)
    return any(function.local_at(write.name, write.node) is None for write in writes)


def _only_read(function: Function, parameter: Parameter) -> bool:
    """Whether adding const compiles: no callee takes the bare pointer, no plain pointer is made from it."""
    plain = [
        item.initial
        for item in function.locals
        if item.is_pointer and item.initial is not None and not text_of(item.declaration).lstrip().startswith("const")
    ]
    if any(mentions(initial, (parameter.name,)) for initial in plain):
        return False
    for call in calls(function.body):
        arguments = call.child_by_field_name("arguments")
        if arguments is None or called(call) in ("__ldg", "__ldcg", "__ldcs", "__ldca"):
            continue
        for node in walk(arguments):
            if node.type != "identifier" or text_of(node) != parameter.name:
                continue
            parent = node.parent
            if parent is None or parent.type != "subscript_expression":
                return False
    for write in function.writes:
        if write.value is not None and text_of(write.value) == parameter.name:
            return False
    return parameter.type_text in _FULL or not parameter.is_const


EDIT = Edit(
    name="restrict_const",
    metric=LOAD_REQUESTS,
    why="Without __restrict__ every store may change every loaded value, so loads are repeated and never cached.",
    source="CUDA C++ Programming Guide, __restrict__; Best Practices Guide, read-only data cache",
    propose=propose,
)
