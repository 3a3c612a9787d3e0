"""Reads PTX text into immutable records: module, variables, functions, basic blocks, instructions.

The grammar covered is what NVRTC and nvcc write for sm_80 and sm_90, with `-lineinfo`, plus hand-written inline
assembly: nested scopes whose names shadow outer ones (a register, its use as a guard and a label alike), vectors,
call sequences, module-scope data with symbol references. Opcodes are not judged here; an instruction that the
engine cannot execute is refused when a kernel that contains it is launched.

Source of the syntax: NVIDIA, Parallel Thread Execution ISA, version 9, chapters 4, 5, 9 and 11.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from optiml.errors import PtxSyntaxError

TYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4, "s32": 4,
        "f32": 4, "f16x2": 4, "bf16x2": 4, "tf32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f32x2": 8, "b128": 16,
        "pred": 1, "e4m3x2": 2, "e5m2x2": 2, "e4m3": 1, "e5m2": 1,
    }
)  # fmt: skip


Contents = bytes  # the records below have fields of that name


@dataclass(frozen=True, kw_only=True)
class Register:
    """A register or special register; `negated` for a predicate source written `!%p`."""

    name: str
    negated: bool = False


@dataclass(frozen=True, kw_only=True)
class Immediate:
    """A literal: `kind` is "int" (value: int), "f32" or "f64" (value: the IEEE bit pattern as int)."""

    value: int
    kind: str = "int"


@dataclass(frozen=True, kw_only=True)
class Symbol:
    """The address of a variable, a function, a label or a parameter, plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class Address:
    """A memory operand `[base + offset]`; `base` is None for an absolute address."""

    base: Register | Symbol | None
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class Vector:
    """A brace list `{a, b, ...}`; an element written `_` is None."""

    elements: tuple[Operand | None, ...]


@dataclass(frozen=True, kw_only=True)
class Raw:
    """An operand of a form that no supported instruction has."""

    text: str


Operand = Register | Immediate | Symbol | Address | Vector | Raw


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One PTX instruction.

    Attributes:
        opcode: the full spelling, "ld.global.nc.f32".
        parts: `opcode` split on ".".
        predicate: guard as (register, negated), or None.
        dst: destinations in order; `d|p` gives two, the sink `_` gives none.
        src: sources in order. A call has the callee first, then its argument parameters.
        line: line of the `.cu` file, outermost call site if inlined; None where the PTX has none.
        text: the instruction as written, for messages.
    """

    opcode: str
    parts: tuple[str, ...]
    predicate: tuple[str, bool] | None
    dst: tuple[Operand, ...]
    src: tuple[Operand, ...]
    line: int | None
    text: str


@dataclass(frozen=True, kw_only=True)
class BasicBlock:
    """Instructions entered only at the top and left only at the bottom; may be empty."""

    label: str
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, kw_only=True)
class Param:
    """A parameter. By-value structs have type "b8" and their size in `bytes`; `offset` is within the parameter area."""

    name: str
    type: str
    bytes: int
    align: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A variable in a state space ("global", "const", "shared", "local", "param").

    Attributes:
        bytes: size; 0 for an `extern` array, whose size is chosen at launch.
        initial: contents, shorter than `bytes` where the rest is zero; None if there is no initialiser.
        references: (byte offset, symbol, addend) of the 8-byte addresses that `initial` must contain.
    """

    name: str
    space: str
    type: str
    bytes: int
    align: int
    extern: bool = False
    initial: Contents | None = None
    references: tuple[tuple[int, str, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Function:
    """A kernel or a device function.

    Attributes:
        registers: type by register name; names declared in a nested scope carry a suffix `@n`.
        variables: `.shared`, `.local` and `.param` variables declared in the body.
        returns: return parameters of a device function.
        max_threads: `.maxntid` as x, y, z, or None; `required_threads` likewise for `.reqntid`.
        shared_layout: byte offset of each static shared variable that the function or one it calls uses.
        dynamic_shared_align: alignment of the dynamic part, which starts after the static part.
    """

    name: str
    kernel: bool
    params: tuple[Param, ...]
    returns: tuple[Param, ...] = ()
    blocks: tuple[BasicBlock, ...] = ()
    defined: bool = True
    registers: Mapping[str, str] = field(default_factory=dict)
    variables: tuple[Variable, ...] = ()
    max_threads: tuple[int, int, int] | None = None
    required_threads: tuple[int, int, int] | None = None
    min_blocks: int | None = None
    static_shared_bytes: int = 0
    local_bytes: int = 0
    shared_layout: Mapping[str, int] = field(default_factory=dict)
    dynamic_shared_align: int = 16

    def instructions(self) -> Iterator[Instruction]:
        """All instructions in program order."""
        for block in self.blocks:
            yield from block.instructions


@dataclass(frozen=True, kw_only=True, eq=False)  # a module is its own key in the cache of programs
class Module:
    """A PTX module; `functions` holds kernels too, `globals` the module-scope .global and .const variables."""

    version: str
    target: str
    files: Mapping[int, str]
    functions: Mapping[str, Function]
    globals: Mapping[str, Variable]
    shared: Mapping[str, Variable]

    @property
    def kernels(self) -> Mapping[str, Function]:
        """The entry functions by name."""
        return {name: function for name, function in self.functions.items() if function.kernel}


def parse(text: str) -> Module:
    """Parse one PTX module.

    Raises:
        PtxSyntaxError: naming the line of `text` that cannot be read.
    """
    parser = _Parser(text)
    try:
        return parser.module()
    except (ValueError, IndexError, KeyError, OverflowError, RecursionError) as error:
        raise parser.fail("a number, a name or a list of operands is out of place") from error


_COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_BLANK = re.compile(r"\s+")
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)([^\n]*)")
_INLINED = re.compile(r"inlined_at\s+(\d+)\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"[^\n]*')
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
_STATEMENT = re.compile(r'((?:[^;{}"]|"[^"]*"|\{[^{}]*\})*);')
_INITIALISED = re.compile(r'((?:[^;"]|"[^"]*")*);')
_GUARDED = re.compile(r"(?:@\s*(!?)\s*([\w$%.]+)\s+)?([A-Za-z_][\w.:]*)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\[[^\]]*\]|\{[^}]*\}|\([^)]*\)|[^,\s|]+|\|")
_ADDRESS = re.compile(r"\[\s*([\w$%.]+)?\s*(?:([+-])\s*([+-]?\s*\w+))?\s*\]$")
_NAME = re.compile(r"[A-Za-z_$%][\w$.%]*$")
_RANGE = re.compile(r"([A-Za-z_$%][\w$]*)\s*<\s*(\d+)\s*>$")
_TRAILING_DIGITS = re.compile(r"(.*?)(\d+)$")
_VARIABLE = re.compile(
    r"(?P<name>[A-Za-z_$%][\w$.]*)\s*(?P<dims>(?:\[\s*\w*\s*\]\s*)*)(?:=\s*(?P<init>.*))?$", re.DOTALL
)
_HEADER_WORD = re.compile(r"\.(maxntid|reqntid|minnctapersm|maxnreg|noreturn|pragma|maxclusterrank|explicitcluster|"
                          r"reqnctapercluster|blocksareclusters|abi_preserve_control|abi_preserve|unified)\b"
                          r"([^.{;]*)")  # fmt: skip
_SPACES = frozenset({"global", "const", "shared", "local", "param", "reg", "tex", "sreg"})
_LINKAGE = frozenset({"visible", "extern", "weak", "common"})

_NO_DESTINATION = frozenset(
    {
        "st", "stu", "stmatrix", "red", "bra", "brx", "bar", "barrier", "membar", "fence", "ret", "exit", "trap",
        "brkpt", "nanosleep", "prefetch", "prefetchu", "cp", "pmevent", "discard", "applypriority", "call", "wgmma",
        "griddepcontrol", "setmaxnreg", "mbarrier", "multimem", "tcgen05", "sust", "clusterlaunchcontrol", "tensormap",
    }
)  # fmt: skip


def _has_destination(parts: tuple[str, ...]) -> bool:
    family = parts[0]
    if family in ("bar", "barrier"):
        return "red" in parts
    if family == "wmma":
        return parts[1] != "store"
    if family == "mbarrier":
        return parts[1] not in ("init", "inval", "expect_tx", "complete_tx")
    if family == "multimem":
        return parts[1] == "ld_reduce"
    return family not in _NO_DESTINATION


def parse_integer(text: str) -> int:
    """Read a PTX integer literal: decimal, 0x, 0b or octal, optional sign and U suffix."""
    body = text.strip().replace(" ", "")
    sign = 1
    while body[:1] in ("+", "-"):
        sign = -sign if body[0] == "-" else sign
        body = body[1:]
    body = body.rstrip("uU")
    if body[:2] in ("0x", "0X"):
        return sign * int(body[2:], 16)
    if body[:2] in ("0b", "0B"):
        return sign * int(body[2:], 2)
    if len(body) > 1 and body[0] == "0":
        return sign * int(body, 8)
    return sign * int(body, 10)


def _literal(text: str) -> Immediate | None:
    """Read a number, or return None if `text` is not one."""
    body = text.lstrip("+-")
    if not body or not (body[0].isdigit() or (body[0] == "." and body[1:2].isdigit())):
        return None
    negative = text.count("-") % 2 == 1
    head = body[:2].lower()
    try:
        if head == "0f" and len(body) == 10:
            return Immediate(value=int(body[2:], 16) ^ (0x80000000 if negative else 0), kind="f32")
        if head == "0d" and len(body) == 18:
            return Immediate(value=int(body[2:], 16) ^ (1 << 63 if negative else 0), kind="f64")
        if head != "0x" and ("." in body or "e" in body.lower()):
            return Immediate(value=int.from_bytes(struct.pack("<d", float(text)), "little"), kind="f64")
        return Immediate(value=parse_integer(text))
    except ValueError:
        return None


@dataclass
class _Scope:
    """One `{ }` level of a body: what it declares. The outermost level keeps names as they are."""

    number: int
    parent: _Scope | None
    names: dict[str, str] = field(default_factory=dict)
    ranges: dict[str, int] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)

    def declares(self, name: str) -> bool:
        if name in self.names:
            return True
        if self.ranges:
            match = _TRAILING_DIGITS.match(name)
            if match and match[1] in self.ranges and int(match[2]) < self.ranges[match[1]]:
                return True
        return False

    def renamed(self, name: str) -> str:
        return name if self.parent is None else f"{name}@{self.number}"

    def resolve(self, name: str) -> str | None:
        scope: _Scope | None = self
        while scope is not None:
            if scope.declares(name):
                return scope.renamed(name)
            scope = scope.parent
        return None

    def label(self, name: str) -> str | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        return None


@dataclass
class _Body:
    """What is collected while one function body is read."""

    registers: dict[str, str] = field(default_factory=dict)
    ranges: list[tuple[str, int, str]] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)
    items: list[tuple[str, Instruction | None, _Scope]] = field(default_factory=list)  # (label, -) or ("", instruction)


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = _COMMENT.sub(lambda m: m[0] if m[0][0] == '"' else "\n" * m[0].count("\n") + " ", text)
        self.position = 0
        self.version = ""
        self.target = ""
        self.files: dict[int, str] = {}
        self.functions: dict[str, Function] = {}
        self.globals: dict[str, Variable] = {}
        self.shared: dict[str, Variable] = {}
        self.line: int | None = None
        self.call_sites: dict[tuple[str, str, str], int | None] = {}

    # -- positions and errors -------------------------------------------------------------------------------

    def fail(self, message: str, position: int | None = None) -> PtxSyntaxError:
        at = self.position if position is None else position
        line = self.text.count("\n", 0, at) + 1
        return PtxSyntaxError(f"PTX line {line}: {message}")

    def skip_blank(self) -> bool:
        match = _BLANK.match(self.text, self.position)
        if match:
            self.position = match.end()
        return self.position < len(self.text)

    def take(self, pattern: re.Pattern[str], expected: str) -> re.Match[str]:
        match = pattern.match(self.text, self.position)
        if match is None:
            shown = self.text[self.position : self.position + 40].split("\n")[0]
            raise self.fail(f"expected {expected}, found {shown!r}")
        self.position = match.end()
        return match

    # -- module scope ---------------------------------------------------------------------------------------

    def module(self) -> Module:
        word = re.compile(r"\.(\w+)")
        while self.skip_blank():
            match = word.match(self.text, self.position)
            if match is None:
                raise self.fail(f"expected a directive, found {self.text[self.position : self.position + 30]!r}")
            name = match[1]
            if name in ("version", "address_size"):
                value = self.take(re.compile(r"\.\w+\s+(\S+)"), "a value")[1]
                if name == "version":
                    self.version = value
                elif value != "64":
                    raise self.fail("only 64-bit PTX is read", match.start())
            elif name == "target":
                self.target = self.take(re.compile(r"\.target\s+([\w]+)(?:[ \t]*,[ \t]*\w+)*"), "a target")[1]
            elif name == "file":
                found = self.take(_FILE, "a .file directive")
                self.files[int(found[1])] = found[2]
            elif name == "loc":
                self.take(_LOC, "a .loc directive")
            elif name == "section":
                self.take(re.compile(r"\.section\s+[\w.]+\s*\{[^}]*\}"), "a section")
            elif name in ("pragma", "alias"):
                self.take(_STATEMENT, "a statement ending in ';'")
            else:
                self.declaration()
        if not self.version or not self.target:
            raise PtxSyntaxError("PTX line 1: the .version and .target directives are missing")
        return self.linked()

    def declaration(self) -> None:
        start = self.position
        words = re.compile(r"(?:\s*\.(?:visible|extern|weak|common)\b)*\s*\.(entry|func|\w+)")
        kind = self.take(words, "a declaration")[1]
        if kind in ("entry", "func"):
            self.function(kernel=kind == "entry")
            return
        self.position = start
        statement = self.take(_INITIALISED, "a declaration ending in ';'")[1]
        for variable in self.variables_of(statement, start):
            if variable.space in ("global", "const"):
                known = self.globals.get(variable.name)
                if known is None or known.extern:
                    self.globals[variable.name] = variable
            elif variable.space == "shared":
                self.shared[variable.name] = variable
            else:
                raise self.fail(f"a .{variable.space} variable at module scope", start)

    def variables_of(self, statement: str, start: int) -> list[Variable]:
        """Read `.global .align 4 .b8 name[8] = {...}, other;` without its semicolon."""
        rest = statement.strip()
        space, type_name, align, lanes, extern = "", "", 0, 1, False
        while rest.startswith("."):
            match = re.match(r"\.(\w+)\s*", rest)
            if match is None:
                raise self.fail(f"cannot read declaration {rest[:40]!r}", start)
            word, rest = match[1], rest[match.end() :]
            if word == "align":
                match = re.match(r"(\d+)\s*", rest)
                if match is None:
                    raise self.fail("expected a number after .align", start)
                align, rest = int(match[1]), rest[match.end() :]
            elif word == "attribute":
                rest = re.sub(r"^\([^)]*\)\s*", "", rest)
            elif word == "ptr":
                continue
            elif word in ("v2", "v4", "v8"):
                lanes = int(word[1:])
            elif word in _LINKAGE:
                extern = extern or word == "extern"
            elif word in _SPACES:
                space = space or word
            elif word in TYPE_BYTES:
                type_name = word
            elif word in ("texref", "samplerref", "surfref"):
                space, type_name = space or "global", "b64"
            else:
                raise self.fail(f"unknown word .{word} in a declaration", start)
        if not type_name or not space:
            raise self.fail(f"cannot read declaration {statement.strip()[:60]!r}", start)
        size = TYPE_BYTES[type_name] * lanes
        found = []
        for part in _split_top(rest):
            match = _VARIABLE.match(part.strip())
            if match is None:
                raise self.fail(f"cannot read variable {part.strip()[:40]!r}", start)
            count = 1
            for dim in re.findall(r"\[\s*(\w*)\s*\]", match["dims"]):
                count *= parse_integer(dim) if dim else 0
            initial: Contents | None = None
            references: tuple[tuple[int, str, int], ...] = ()
            if match["init"] is not None:
                initial, references = self.initialiser(match["init"], type_name, start)
                if count == 0:
                    count = -(-len(initial) // size)
                if len(initial) > size * count:
                    raise self.fail(f"too many initial values for {match['name']}", start)
            found.append(
                Variable(
                    name=match["name"],
                    space=space,
                    type=type_name,
                    bytes=size * count,
                    align=align or size,
                    extern=extern,
                    initial=initial,
                    references=references,
                )
            )
        return found

    def initialiser(self, text: str, type_name: str, start: int) -> tuple[bytes, tuple[tuple[int, str, int], ...]]:
        width = TYPE_BYTES[type_name]
        out = bytearray()
        references: list[tuple[int, str, int]] = []
        for item in re.sub(r"[{}]", " ", text).split(","):
            word = item.strip()
            if not word:
                continue
            number = _literal(word)
            if number is not None:
                out += self.encoded(number, type_name, width)
                continue
            match = re.match(r"(?:generic\s*\(\s*)?([A-Za-z_$%][\w$.]*)\s*\)?\s*(?:([+-])\s*(\w+))?\s*\)?$", word)
            if match is None or width != 8:
                raise self.fail(f"cannot read initial value {word[:40]!r}", start)
            addend = parse_integer((match[2] or "+") + match[3]) if match[3] else 0
            references.append((len(out), match[1], addend))
            out += bytes(8)
        return bytes(out), tuple(references)

    @staticmethod
    def encoded(number: Immediate, type_name: str, width: int) -> bytes:
        value = number.value
        if number.kind == "f64" and type_name == "f32":
            return struct.pack("<f", struct.unpack("<d", value.to_bytes(8, "little"))[0])
        if number.kind == "int" and type_name in ("f32", "f64"):
            return struct.pack("<f" if type_name == "f32" else "<d", float(value))
        return (value & ((1 << (8 * width)) - 1)).to_bytes(width, "little")

    # -- functions ------------------------------------------------------------------------------------------

    def parameters(self) -> tuple[Param, ...]:
        """Read a parenthesised parameter list at the current position, or nothing."""
        self.skip_blank()
        if self.text[self.position : self.position + 1] != "(":
            return ()
        start = self.position
        inner = self.take(re.compile(r"\(([^)]*)\)"), "a parameter list")[1]
        params: list[Param] = []
        offset = 0
        for piece in inner.split(","):
            if not piece.strip():
                continue
            # `.ptr .global .align 4` describes the pointee; the parameter itself keeps its own alignment
            plain = re.sub(r"\.ptr\b(\s*\.(?:global|const|shared|local|param))?(\s*\.align\s+\d+)?", " ", piece)
            variable = self.variables_of(plain, start)[0]
            offset = -(-offset // variable.align) * variable.align
            params.append(
                Param(
                    name=variable.name,
                    type=variable.type,
                    bytes=variable.bytes,
                    align=variable.align,
                    offset=offset,
                )
            )
            offset += variable.bytes
        return tuple(params)

    def function(self, *, kernel: bool) -> None:
        returns = () if kernel else self.parameters()
        self.skip_blank()
        name = self.take(re.compile(r"[A-Za-z_$%][\w$]*"), "a function name")[0]
        params = self.parameters()
        limits: dict[str, tuple[int, ...]] = {}
        while self.skip_blank():
            match = _HEADER_WORD.match(self.text, self.position)
            if match is None:
                break
            limits[match[1]] = tuple(int(n) for n in re.findall(r"\d+", match[2]))
            self.position = match.end()
        if self.text[self.position : self.position + 1] == ";":
            self.position += 1
            if name not in self.functions:
                self.functions[name] = Function(name=name, kernel=kernel, params=params, returns=returns, defined=False)
            return
        self.take(re.compile(r"\{"), "'{' of a function body")
        body = self.body(params, returns)
        self.functions[name] = Function(
            name=name,
            kernel=kernel,
            params=params,
            returns=returns,
            blocks=self.blocks_of(body),
            registers=self.registers_of(body),
            variables=tuple(body.variables),
            max_threads=_triple(limits.get("maxntid")),
            required_threads=_triple(limits.get("reqntid")),
            min_blocks=limits["minnctapersm"][0] if limits.get("minnctapersm") else None,
        )

    def body(self, params: Sequence[Param], returns: Sequence[Param]) -> _Body:
        body = _Body()
        scope = _Scope(number=0, parent=None)
        for param in (*params, *returns):
            scope.names[param.name] = "param"
        scopes = 0
        self.line = None
        self.call_sites = {}
        cache: dict[str, Operand] = {}
        text = self.text
        while self.skip_blank():
            character = text[self.position]
            if character == "{":
                scopes += 1
                scope = _Scope(number=scopes, parent=scope)
                self.position += 1
                continue
            if character == "}":
                self.position += 1
                if scope.parent is None:
                    return body
                scope = scope.parent
                continue
            if character == ";":
                self.position += 1
                continue
            if character == "." and self.directive(body, scope):
                continue
            label = _LABEL.match(text, self.position)
            if label is not None:
                scope.labels[label[1]] = scope.renamed(label[1])
                body.items.append((label[1], None, scope))
                self.position = label.end()
                continue
            start = self.position
            statement = self.take(_STATEMENT, "an instruction ending in ';'")[1]
            body.items.append(("", self.instruction(statement.strip(), scope, cache, start), scope))
        raise self.fail("a function body is not closed")

    def directive(self, body: _Body, scope: _Scope) -> bool:
        """Read a directive inside a body at the current position; False if it is none."""
        start = self.position
        text = self.text
        if text.startswith(".loc", start) and text[start + 4 : start + 5].isspace():
            self.location(self.take(_LOC, "a .loc directive"))
            return True
        if text.startswith(".reg", start):
            self.declare_registers(self.take(_STATEMENT, "a declaration ending in ';'")[1], body, scope, start)
            return True
        if text.startswith(".file", start):
            found = self.take(_FILE, "a .file directive")
            self.files[int(found[1])] = found[2]
            return True
        if text.startswith((".pragma", ".callprototype", ".branchtargets", ".calltargets"), start):
            self.take(_STATEMENT, "a directive ending in ';'")
            return True
        statement = self.take(_INITIALISED, "a declaration ending in ';'")[1]
        for variable in self.variables_of(statement, start):
            scope.names[variable.name] = variable.space
            if variable.space in ("global", "const"):
                self.globals[variable.name] = variable
                del scope.names[variable.name]
            else:
                body.variables.append(replace(variable, name=scope.renamed(variable.name)))
        return True

    def location(self, match: re.Match[str]) -> None:
        """Follow a .loc: `line` becomes the outermost source line, through the chain of inlined_at."""
        site = (match[1], match[2], match[3])
        inlined = _INLINED.search(match[4])
        line: int | None
        if inlined is not None:
            outer = (inlined[1], inlined[2], inlined[3])
            line = self.call_sites.get(outer, int(outer[1]) if outer[0] == "1" else self.line)
        elif match[1] != "1":
            line = None
        elif match[2] == "0":  # code of no line: it belongs to what surrounds it
            return
        else:
            line = int(match[2])
        self.call_sites[site] = line
        self.line = line

    def declare_registers(self, statement: str, body: _Body, scope: _Scope, start: int) -> None:
        match = re.match(r"\.reg\s*(?:\.v[248]\s*)?\.(\w+)\s*(.*)$", statement.strip(), re.DOTALL)
        if match is None or match[1] not in TYPE_BYTES:
            raise self.fail(f"cannot read {statement.strip()[:60]!r}", start)
        for piece in match[2].split(","):
            name = piece.strip()
            many = _RANGE.match(name)
            if many is not None:
                scope.ranges[many[1]] = max(int(many[2]), scope.ranges.get(many[1], 0))
                body.ranges.append((scope.renamed(many[1]), int(many[2]), match[1]))
            else:
                scope.names[name] = "reg"
                body.registers[scope.renamed(name)] = match[1]

    @staticmethod
    def registers_of(body: _Body) -> Mapping[str, str]:
        """Types of the registers that instructions mention."""
        prefixes = {prefix: type_name for prefix, _, type_name in body.ranges}
        registers = dict(body.registers)

        def note(name: str) -> None:
            if name in registers:
                return
            stem, _, suffix = name.partition("@")
            match = _TRAILING_DIGITS.match(stem)
            if match is not None:
                found = prefixes.get(match[1] + (f"@{suffix}" if suffix else ""))
                if found is not None:
                    registers[name] = found

        for _, instruction, _ in body.items:
            if instruction is None:
                continue
            if instruction.predicate is not None:
                note(instruction.predicate[0])
            for operand in (*instruction.dst, *instruction.src):
                for name in registers_in(operand):
                    note(name)
        return registers

    # -- instructions ---------------------------------------------------------------------------------------

    def instruction(self, text: str, scope: _Scope, cache: dict[str, Operand], start: int) -> Instruction:
        match = _GUARDED.match(text)
        if match is None:
            raise self.fail(f"cannot read instruction {text[:60]!r}", start)
        negated, guard, opcode, rest = match.groups()
        parts = tuple(opcode.split("."))
        outermost = scope.parent is None
        operands: list[Operand | None] = []
        joined = False  # the previous operand continues with `|`
        second: list[Operand | None] = []
        if parts[0] == "call":
            dst, src = self.call_operands(rest, scope, start)
        else:
            for word in _OPERAND.findall(rest):
                if word == "|":
                    joined = True
                    continue
                operand: Operand | None
                if outermost and word in cache:
                    operand = cache[word]
                else:
                    operand = self.operand(word, scope, start)
                    if outermost and operand is not None:
                        cache[word] = operand
                if joined:
                    second.append(operand)
                    joined = False
                else:
                    operands.append(operand)
            if _has_destination(parts) and operands:
                targets = [operands[0], *second]
                dst = tuple(o for o in targets if o is not None)
                if operands[0] is None and second:  # `_|%p`: keep positions
                    dst = (Raw(text="_"), *dst)
                src = tuple(o for o in operands[1:] if o is not None)
            else:
                dst = ()
                src = tuple(o for o in operands if o is not None)
        return Instruction(
            opcode=opcode,
            parts=parts,
            predicate=None if guard is None else (scope.resolve(guard) or guard, negated == "!"),
            dst=dst,
            src=src,
            line=self.line,
            text=_BLANK.sub(" ", text),
        )

    def call_operands(self, rest: str, scope: _Scope, start: int) -> tuple[tuple[Operand, ...], tuple[Operand, ...]]:
        words = _OPERAND.findall(rest)
        dst: tuple[Operand, ...] = ()
        if words and words[0].startswith("("):
            dst = self.listed(words.pop(0), scope, start)
        if not words:
            raise self.fail("a call names no function", start)
        callee = self.operand(words.pop(0), scope, start)
        arguments = self.listed(words[0], scope, start) if words and words[0].startswith("(") else ()
        return dst, (callee or Raw(text="_"), *arguments)

    def listed(self, text: str, scope: _Scope, start: int) -> tuple[Operand, ...]:
        items = [self.operand(word.strip(), scope, start) for word in text[1:-1].split(",") if word.strip()]
        return tuple(item for item in items if item is not None)

    def operand(self, word: str, scope: _Scope, start: int) -> Operand | None:
        first = word[0]
        if word == "_":
            return None
        if first == "{":
            elements = tuple(self.operand(item.strip(), scope, start) for item in word[1:-1].split(",") if item.strip())
            return Vector(elements=elements)
        if first == "[":
            return self.address(word, scope)
        number = _literal(word)
        if number is not None:
            return number
        if first == "!":
            name = word[1:].strip()
            return Register(name=scope.resolve(name) or name, negated=True)
        stem, _, offset = word.partition("+")
        if not _NAME.match(stem):
            return Raw(text=word)
        resolved = scope.resolve(stem)
        if resolved is not None and self.is_register(stem, scope):
            return Register(name=resolved)
        if first == "%" and resolved is None:
            return Register(name=stem)  # a special register
        if stem == "WARP_SZ":
            return Immediate(value=32)
        return Symbol(name=resolved or stem, offset=parse_integer(offset) if offset else 0)

    @staticmethod
    def is_register(name: str, scope: _Scope) -> bool:
        at: _Scope | None = scope
        while at is not None:
            if at.declares(name):
                return at.names.get(name, "reg") == "reg"
            at = at.parent
        return False

    def address(self, word: str, scope: _Scope) -> Operand:
        match = _ADDRESS.match(word)
        if match is None:
            return Raw(text=word)
        base, sign, amount = match.groups()
        offset = parse_integer(sign + amount) if amount else 0
        if base is None:
            return Raw(text=word)
        number = _literal(base)
        if number is not None:
            return Address(base=None, offset=number.value + offset)
        if self.is_register(base, scope) or base.startswith("%"):
            return Address(base=Register(name=scope.resolve(base) or base), offset=offset)
        return Address(base=Symbol(name=scope.resolve(base) or base), offset=offset)

    # -- blocks and layout ----------------------------------------------------------------------------------

    def blocks_of(self, body: _Body) -> tuple[BasicBlock, ...]:
        blocks: list[BasicBlock] = []
        label = ""
        pending: list[Instruction] = []
        open_block = True  # a block has begun, even if it is still empty

        def close() -> None:
            nonlocal pending
            blocks.append(BasicBlock(label=label, instructions=tuple(pending)))
            pending = []

        for name, instruction, scope in body.items:
            if instruction is None:
                if open_block and (pending or label or not blocks):
                    close()
                label, open_block = scope.labels[name], True
                continue
            if instruction.parts[0] == "bra":
                instruction = self.branch(instruction, scope)
            if not open_block:
                label, open_block = "", True
            pending.append(instruction)
            if instruction.parts[0] in ("bra", "brx", "ret", "exit"):
                close()
                open_block = False
        if open_block:
            close()
        return tuple(blocks)

    def branch(self, instruction: Instruction, scope: _Scope) -> Instruction:
        target = instruction.src[-1] if instruction.src else None
        name = target.name if isinstance(target, Symbol) else ""
        resolved = scope.label(name)
        if resolved is None:
            raise self.fail(f"branch to unknown label in {instruction.text!r}")
        return replace(instruction, src=(Symbol(name=resolved),)) if resolved != name else instruction

    def linked(self) -> Module:
        """Give every function its shared and local layout and build the module."""
        functions: dict[str, Function] = {}
        for name, function in self.functions.items():
            layout, size, dynamic = self.shared_layout(function)
            local = 0
            for variable in function.variables:
                if variable.space == "local":
                    local = -(-local // variable.align) * variable.align + variable.bytes
            functions[name] = replace(
                function,
                shared_layout=MappingProxyType(layout),
                static_shared_bytes=size,
                dynamic_shared_align=dynamic,
                local_bytes=local,
                registers=MappingProxyType(dict(function.registers)),
            )
        return Module(
            version=self.version,
            target=self.target,
            files=MappingProxyType(dict(self.files)),
            functions=MappingProxyType(functions),
            globals=MappingProxyType(dict(self.globals)),
            shared=MappingProxyType(dict(self.shared)),
        )

    def shared_layout(self, function: Function) -> tuple[dict[str, int], int, int]:
        """Offsets of static shared variables used by `function` and what it calls, their total, dynamic alignment."""
        seen: set[str] = set()
        queue = [function.name]
        used: dict[str, Variable] = {}
        dynamic_align = 16
        while queue:
            current = self.functions.get(queue.pop(0))
            if current is None or current.name in seen:
                continue
            seen.add(current.name)
            for variable in current.variables:
                if variable.space == "shared":
                    used.setdefault(variable.name, variable)
            for instruction in current.instructions():
                for operand in instruction.src:
                    symbol = operand.base if isinstance(operand, Address) else operand
                    if isinstance(symbol, Symbol):
                        if symbol.name in self.shared:
                            used.setdefault(symbol.name, self.shared[symbol.name])
                        elif instruction.parts[0] == "call" and symbol.name in self.functions:
                            queue.append(symbol.name)
        layout: dict[str, int] = {}
        size = 0
        for variable in used.values():
            if variable.bytes == 0:
                dynamic_align = max(dynamic_align, variable.align)
                continue
            size = -(-size // variable.align) * variable.align
            layout[variable.name] = size
            size += variable.bytes
        dynamic_start = -(-size // dynamic_align) * dynamic_align
        for variable in used.values():
            if variable.bytes == 0:
                layout[variable.name] = dynamic_start
        return layout, size, dynamic_align


def registers_in(operand: Operand | None) -> Iterator[str]:
    """Names of the registers that an operand mentions, special registers included."""
    if isinstance(operand, Register):
        yield operand.name
    elif isinstance(operand, Address):
        if isinstance(operand.base, Register):
            yield operand.base.name
    elif isinstance(operand, Vector):
        for element in operand.elements:
            yield from registers_in(element)


def _triple(numbers: tuple[int, ...] | None) -> tuple[int, int, int] | None:
    if not numbers:
        return None
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z


def _split_top(text: str) -> list[str]:
    """Split on commas outside braces, brackets and parentheses."""
    cuts = [-1]
    depth = 0
    for index, character in enumerate(text):
        if character in "{[(":
            depth += 1
        elif character in "}])":
            depth -= 1
        elif character == "," and depth == 0:
            cuts.append(index)
    cuts.append(len(text))
    return [text[a + 1 : b] for a, b in itertools.pairwise(cuts) if text[a + 1 : b].strip()]
