"""Replaces calls of device functions by their bodies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from optiml.errors import Unsupported
from optiml.ptx import opcodes
from optiml.ptx.parse import (
    Function,
    Instruction,
    Module,
    Symbol,
)

BUILTINS = frozenset({"vprintf", "__assertfail"})


@dataclass(frozen=True, kw_only=True)
class Context:
    """Where inlined code comes from: its function, a prefix that makes its names unique, its formal parameters."""

    function: Function
    prefix: str
    arguments: Mapping[str, str]  # formal parameter -> storage name of the caller
    depth: int


@dataclass(frozen=True, kw_only=True)
class Item:
    instruction: Instruction
    context: Context
    counted: bool = True  # False for branches that the lowering made up


@dataclass(kw_only=True)
class Block:
    label: str
    origin: tuple[str, int] | None
    items: list[Item] = field(default_factory=list)


def is_warp_wide(parts: tuple[str, ...]) -> bool:
    return parts[0] in opcodes.WARP_FAMILIES or parts[:2] == ("bar", "warp")


def is_barrier(parts: tuple[str, ...]) -> bool:
    return parts[0] in ("bar", "barrier") and parts[1] != "warp"


def unsupported(item: Item, what: str = "") -> Unsupported:
    return Unsupported(what or item.instruction.opcode, line=item.instruction.line)


def storage(context: Context, name: str) -> str:
    """The storage that a call parameter or formal parameter stands for."""
    return context.arguments.get(name) or f"{context.prefix}{name}"


class Inliner:
    """Puts a kernel and the functions it calls into one list of blocks.

    Attributes:
        blocks: in the order they are to be placed.
        local_offsets: byte offset of each local variable, by its name with the prefix of its function.
        local_bytes: local memory of one thread.
    """

    def __init__(self, module: Module, kernel: Function) -> None:
        self.module = module
        self.local_offsets: dict[str, int] = {}
        self.local_bytes = 0
        self.inlined = 0
        self.blocks = self.expand(kernel, Context(function=kernel, prefix="", arguments={}, depth=0))

    def expand(self, function: Function, context: Context, after: str = "") -> list[Block]:
        """Blocks of `function` with calls replaced by the callee's blocks; a return goes to label `after`."""
        prefix = context.prefix
        for variable in function.variables:
            if variable.space == "local":
                size = -(-self.local_bytes // variable.align) * variable.align
                self.local_offsets[prefix + variable.name] = size
                self.local_bytes = size + variable.bytes
        blocks: list[Block] = []
        fresh = 0
        for index, source in enumerate(function.blocks):
            label = prefix + source.label if source.label else f"{prefix}#{index}"
            current = Block(label=label, origin=(function.name, index))
            blocks.append(current)
            for instruction in source.instructions:
                item = Item(instruction=instruction, context=context)
                parts = instruction.parts
                family = parts[0]
                callee = self.callee(item) if family == "call" else None
                returns = family == "ret" and after != ""
                apart = callee is not None or is_warp_wide(parts) or is_barrier(parts)
                skip = ""
                if instruction.predicate is not None and (apart or returns):
                    # a guard around something that must not run for part of a group: branch around it
                    fresh += 1
                    skip = f"{prefix}#{index}.{fresh}"
                    name, negated = instruction.predicate
                    current.items.append(self.made_up(item, "bra", skip, (name, not negated), counted=False))
                    item = replace(item, instruction=replace(instruction, predicate=None))
                    fresh += 1
                    current = Block(label=f"{prefix}#{index}.{fresh}", origin=None)
                    blocks.append(current)
                if returns:
                    current.items.append(self.made_up(item, "bra", after, None, counted=True))
                elif callee is not None:
                    self.inlined += 1
                    back = f"{prefix}#back{self.inlined}"
                    current.items.append(item)
                    blocks += self.expand(callee, self.entered(item, callee), back)
                    current = Block(label=back, origin=None)
                    blocks.append(current)
                else:
                    current.items.append(item)
                if skip:
                    current = Block(label=skip, origin=None)
                    blocks.append(current)
        return blocks

    @staticmethod
    def made_up(item: Item, opcode: str, label: str, predicate: tuple[str, bool] | None, *, counted: bool) -> Item:
        """A branch in place of `item`; `label` is complete, so the context must not prefix it again."""
        instruction = replace(
            item.instruction,
            opcode=opcode,
            parts=(opcode, "made_up"),
            predicate=predicate,
            dst=(),
            src=(Symbol(name=label),),
        )
        return replace(item, instruction=instruction, counted=counted)

    def callee(self, item: Item) -> Function | None:
        """The device function that a call enters, or None for one of the built-in functions."""
        target = item.instruction.src[0]
        if not isinstance(target, Symbol):
            raise unsupported(item, "indirect call")
        if target.name in BUILTINS:
            return None
        function = self.module.functions.get(target.name)
        if function is None or not function.defined:
            raise unsupported(item, f"call of {target.name}")
        if item.context.depth >= 32:
            raise unsupported(item, f"recursive call of {target.name}")
        return function

    def entered(self, item: Item, callee: Function) -> Context:
        """The context of an inlined callee: its formal parameters are the caller's parameter variables."""
        actual = [o for o in item.instruction.src[1:] if isinstance(o, Symbol)]
        results = [o for o in item.instruction.dst if isinstance(o, Symbol)]
        if len(actual) != len(callee.params) or len(results) != len(callee.returns):
            raise unsupported(item, f"call of {callee.name} with these arguments")
        arguments = {
            formal.name: storage(item.context, symbol.name)
            for formal, symbol in zip((*callee.params, *callee.returns), (*actual, *results), strict=True)
        }
        return Context(
            function=callee,
            prefix=f"{item.context.prefix}{callee.name}#{self.inlined}:",
            arguments=arguments,
            depth=item.context.depth + 1,
        )
