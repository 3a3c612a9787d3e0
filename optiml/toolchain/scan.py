"""What a text scan can and cannot tell of a source. It forbids or warns; it never accepts."""

from __future__ import annotations

import re

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
    for match in _INCLUDE.finditer(code):
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
    if re.search(r"\.\s*incbin\b", code):
        return "the assembler directive .incbin is not allowed"
    return None


_HOST_LIBRARY = re.compile(r"(thrust|cublas\w*|cudnn\w*|cufft\w*|curand|cusparse\w*|cusolver\w*|nccl)(?:/[\w/.]+|\.h)")


def host_only_library(source: str) -> str | None:
    """The header by which a source asks for a library that runs on the host, or None."""
    for match in _INCLUDE.finditer(without_comments(spliced(source))):
        name = match.group(2).strip('<>" ')
        if _HOST_LIBRARY.fullmatch(name):
            return f"<{name}>"
    return None
