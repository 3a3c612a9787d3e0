"""What a text scan can and cannot tell of a source. It forbids or warns; it never accepts."""

from __future__ import annotations

import re
from collections.abc import Iterator

# One alternative per lexical element, so that a comment mark inside a string (and the reverse) is inert.
_TOKEN = re.compile(
    r'(?P<raw>R"(?P<tag>[^()\\\s]{0,16})\(.*?\)(?P=tag)")'
    r"|(?P<block>/\*.*?(?:\*/|\Z))"
    r"|(?P<line>//[^\n]*)"
    r'|(?P<string>"(?:\\.|[^"\\\n])*")'
    r"|(?P<char>'(?:\\.|[^'\\\n])*')",
    re.DOTALL,
)
_INCLUDE = re.compile(r"^[ \t]*(?:#|%:)[ \t]*(include(?:_next)?|import|embed)\b[ \t]*(.*?)[ \t]*$", re.MULTILINE)
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_+./-]*")


def without_comments(source: str) -> str:
    """The source with every comment replaced by a space; line numbers stay."""
    return _TOKEN.sub(lambda match: _blank(match, strings=False), source)


def without_comments_and_strings(source: str) -> str:
    """The same, and string and character literals emptied."""
    return _TOKEN.sub(lambda match: _blank(match, strings=True), source)


def _blank(match: re.Match[str], *, strings: bool) -> str:
    text = match.group(0)
    if match.lastgroup in ("block", "line"):
        return " " + "\n" * text.count("\n")
    if not strings:
        return text
    return (
        text[0] + text[-1] + "\n" * text.count("\n") if match.group("raw") is None else '""' + "\n" * text.count("\n")
    )


def spliced(source: str) -> str:
    """The source after the compiler's line splicing, which hides directives from a line scan."""
    return re.sub(r"\\[ \t]*\n", "", source)


def forbidden_construct(source: str, *, confined: bool) -> str | None:
    """Why a source may not be compiled, or None.

    Args:
        confined: the compiler runs where it can read the CUDA headers and nothing else. Without that, an include
            whose name only the preprocessor knows is refused, since no scan can tell what it would read.
    """
    code = without_comments(spliced(source))
    for match in _INCLUDE.finditer(_RAW_STRING.sub('""', code)):
        directive, operand = match.group(1), match.group(2)
        if directive == "embed":
            return "#embed is not allowed"
        name = operand.strip()
        if name[:1] in ('"', "<"):
            inner = name[1:].rstrip(">").rstrip('"').strip()
            if not _SAFE_NAME.fullmatch(inner) or ".." in inner.split("/"):
                return "only the CUDA headers may be included, by their own names"
        elif not confined:
            return "#include of a macro is not allowed where the compiler cannot be confined to the CUDA headers"
    if any(re.search(r"\.\s*incbin\b", text) for text in _assembler_texts(code)):
        return "the assembler directive .incbin is not allowed"
    return None


_RAW_STRING = re.compile(r'R"([^()\\\s]{0,16})\((.*?)\)\1"', re.DOTALL)
_WORD = re.compile(
    r'R"(?P<tag>[^()\\\s]{0,16})\((?P<raw>.*?)\)(?P=tag)"|"(?P<plain>(?:\\.|[^"\\\n])*)"'
    r"|'(?:\\.|[^'\\\n])*'|(?P<name>[A-Za-z_]\w*)|(?P<bracket>[()])",
    re.DOTALL,
)
_BETWEEN = frozenset({"volatile", "__volatile__", "inline", "goto"})  # what may stand between asm and its bracket


def _assembler_texts(code: str) -> Iterator[str]:
    """The string literals of every asm statement, those of one statement joined as the compiler joins them."""
    depth, pending, parts = 0, False, [""]
    for match in _WORD.finditer(code):
        text = match.group("raw") if match.group("raw") is not None else match.group("plain")
        bracket = match.group("bracket")
        if depth == 0:
            name = match.group("name")
            if bracket == "(" and pending:
                depth, parts = 1, []
            pending = name in ("asm", "__asm", "__asm__") or (pending and name in _BETWEEN)
            continue
        if text is not None:
            parts.append(text)
        depth += {"(": 1, ")": -1, None: 0}[bracket]
        if depth == 0:
            yield "".join(parts)
            pending = False


_HOST_LIBRARY = re.compile(r"(thrust|cublas\w*|cudnn\w*|cufft\w*|curand|cusparse\w*|cusolver\w*|nccl)(?:/[\w/.]+|\.h)")


def host_only_library(source: str) -> str | None:
    """The header by which a source asks for a library that runs on the host, or None."""
    for match in _INCLUDE.finditer(without_comments(spliced(source))):
        name = match.group(2).strip('<>" ')
        if _HOST_LIBRARY.fullmatch(name):
            return f"<{name}>"
    return None


_HOST_CALL = re.compile(
    r"\b(system|popen|fork|vfork|execl|execlp|execv|execve|execvp|posix_spawn|socket|connect|ptrace|dlopen|"
    r"pthread_create|getenv|secure_getenv|fopen|remove|unlink)\s*\(|\bstd\s*::\s*(thread|async|ifstream|ofstream|fstream)\b"
)
# PTX ISA, chapter "special registers": those that say where in the launch a thread stands, the same on every run.
_LAUNCH_REGISTERS = re.compile(
    r"%(?:tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)(?:\.[xyz])?|%laneid|%lanemask_\w+|"
    r"%cluster_ctarank|%cluster_nctarank|%is_explicit_cluster|%WARP_SZ|%total_smem_size|%dynamic_smem_size|%envreg\d+"
)
_CLOCK_REGISTERS = re.compile(r"%clock(?:64|_hi)?|%globaltimer(?:_lo|_hi)?")
_PLACE_REGISTERS = re.compile(
    r"%(?:smid|nsmid|warpid|nwarpid|gridid|pm\d+(?:_64)?|aggr_smem_size|reserved_smem_\w+|current_graph_exec)"
)


def host_call_warnings(source: str) -> tuple[str, ...]:
    """What a launcher's source names and a launcher may not do; the recorder decides whether it does it."""
    code = without_comments_and_strings(source)
    found = dict.fromkeys(first or f"std::{second}" for first, second in _HOST_CALL.findall(code))
    return tuple(f"the source names {name}, which a launcher may not use" for name in found)


def register_warnings(ptx: str) -> tuple[str, ...]:
    """Special registers that a verdict cannot speak for: clocks, places on the chip, and names unknown here."""
    code = re.sub(r'//[^\n]*|/\*.*?\*/|"[^"\n]*"', " ", ptx, flags=re.DOTALL)
    ranges, names = set(), set()
    for declared in re.findall(r"\.reg\s+[^;%]*([^;]*);", code):
        ranges.update(re.findall(r"(%[\w$]+)<\d+>", declared))
        names.update(re.findall(r"%[\w$]+(?!<)\b", declared))
    warnings = []
    for name in dict.fromkeys(re.findall(r"%[A-Za-z_][\w$]*(?:\.[xyzw])?", code)):
        plain = name.split(".")[0]
        if plain in names or plain.rstrip("0123456789") in ranges or _LAUNCH_REGISTERS.fullmatch(name):
            continue
        if _CLOCK_REGISTERS.fullmatch(name):
            warnings.append(f"the kernel reads {name}: if what it does depends on a clock, no verdict holds for it")
        elif _PLACE_REGISTERS.fullmatch(name):
            warnings.append(f"the kernel reads {name}: if its results depend on where it runs, no verdict holds for it")
        else:
            warnings.append(f"the kernel reads {name}, a special register that is not known here")
    return tuple(warnings)
