"""Plain English to a built-in problem with sizes and dtype, or a refusal that says why.

A short pipeline: the text is normalised, quoted code and formulas are taken out, words are matched against the
tables of `vocabulary`, the operator is chosen, then sizes and dtype are read. A wrong problem is worse than a
refusal, so anything that may change what is computed and is not understood refuses: another operator, a qualifier
("causal"), arithmetic that does not belong to the operator, an unknown word beside its name.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from optiml.errors import InvalidInput
from optiml.expressions import evaluate
from optiml.generate import vocabulary as words
from optiml.generate.formulas import find_formulas, unexplained_arithmetic
from optiml.generate.sizes import read_sizes
from optiml.generate.vocabulary import COMMON, GRAMMARS, UNIQUE, USUAL, Grammar
from optiml.generate.words import Token, fold, plain, tokens
from optiml.problems.problem import Builtin, builtin_names, check_workload, in_domain, load_builtin, with_dtype
from optiml.records import DTYPES, Problem, Scalar

MAX_CHARACTERS = 8_000
MAX_PHRASE_WORDS = 9
MAX_GAP = 6  # tokens that "..." of a pattern may pass over
MAX_ASSUMED_ELEMENTS = 1 << 24  # an array of assumed size should fit a laptop
MAX_UNKNOWN_SHARE = 0.34
NETWORK_LAYER = "a layer of a network"  # a label of the vocabulary: often where a kernel is used, not what it is
LABELLED = ("cross_entropy", "histogram")  # operators with an integer array beside the elements


@dataclass(frozen=True, kw_only=True)
class Intention:
    """What a text asks for. `refused` is None exactly when `problem_name` is set."""

    problem_name: str | None
    axes: Mapping[str, int] = field(default_factory=dict)  # those given, and assumed ones that differ from the bench's
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    dtype: str | None = None
    assumed: tuple[str, ...] = ()
    refused: str | None = None


class Refused(Exception):
    """The text cannot be read as a built-in problem; the message is one sentence for the caller."""


@dataclass(frozen=True, kw_only=True)
class Mention:
    """A phrase of the vocabulary at tokens `first` .. `last`."""

    kind: Literal["operator", "foreign", "modifier", "arithmetic", "dtype", "plain"]
    label: str
    text: str
    first: int
    last: int
    strength: int = UNIQUE
    negated: bool = False


def read_intent(
    text: str,
    *,
    problem: str | None = None,
    axes: Mapping[str, int] | None = None,
    dtype: str | None = None,
    lexicon: Mapping[str, Builtin] | None = None,
) -> Intention:
    """Read a request for a kernel.

    Args:
        text: plain English, with or without sizes, dtype, a formula or a `__global__` signature.
        problem: the operator, if the caller knows it; the text then gives sizes and dtype only.
        axes: sizes that the caller gives apart from the text; they win over it.
        dtype: as `axes`.
        lexicon: the operators to choose from by name; all built-in problems by default.

    Raises:
        InvalidInput: the text holds a NUL character, or an argument (not the text) is out of range.
    """
    if "\0" in text:
        raise InvalidInput("the intent holds a NUL character; remove it")
    operators = lexicon if lexicon is not None else {name: load_builtin(name) for name in builtin_names()}
    if problem is not None and problem not in operators:
        load_builtin(problem)
    if dtype is not None and dtype not in DTYPES:
        raise InvalidInput(f"unknown dtype {dtype[:40]!r}; choose from {', '.join(DTYPES)}")
    try:
        return _read(text, problem, dict(axes or {}), dtype, operators)
    except Refused as refusal:
        return Intention(problem_name=None, refused=str(refusal))


def intended_problem(intention: Intention, *, lexicon: Mapping[str, Builtin] | None = None) -> Problem:
    """The Problem of an intention that was not refused; its sizes and scalars become the bench entry.

    Raises:
        InvalidInput: the sizes do not fit the problem.
    """
    name = intention.problem_name
    if name is None:
        raise InvalidInput(f"no problem: {intention.refused}")
    builtin = lexicon[name] if lexicon is not None else load_builtin(name)
    problem = with_dtype(builtin, intention.dtype) if intention.dtype is not None else builtin.problem
    if not intention.axes and not intention.scalars:
        return problem
    model = problem.bench[0] if problem.bench else problem.workloads[0]
    bench = dataclasses.replace(
        model,
        axes={**model.axes, **intention.axes},
        scalars={**model.scalars, **intention.scalars},
        weight=1.0,
    )
    check_workload(problem, bench, where="sizes")
    return dataclasses.replace(problem, bench=(bench,))


def _read(
    text: str, problem: str | None, axes: dict[str, int], dtype: str | None, operators: Mapping[str, Builtin]
) -> Intention:
    text = _normalised(text)
    text, signature_dtype = _without_code(text)
    formulas, text = find_formulas(text)
    text, value_count = _value_range(text)
    found = tokens(text)
    table = _phrases(tuple(sorted((name, builtin.intent.names) for name, builtin in operators.items())))
    found, corrections = _corrected(found, table)
    mentions = _with_patterns(found, _mentions(found, table), frozenset(operators))
    if problem is None:
        _check_language(found, mentions)
        named = [item for item in formulas if not item.foreign]
        foreign = [item.label for item in formulas if item.foreign]
        problem = _operator(found, mentions, [item.label for item in named], foreign, operators)
        _check_unknown_words(found, mentions, problem, _axis_words(operators[problem]))
    else:
        _check_changes(found, mentions, problem)
        _check_formulas([item.label for item in formulas], problem)
    grammar = GRAMMARS.get(problem, Grammar())
    left_over = unexplained_arithmetic(text, symbols=grammar.symbols)
    if left_over is not None:
        raise Refused(f"the formula {left_over!r} asks for more than {_name(problem)}")
    builtin = operators[problem]
    covered = {index for item in mentions if item.kind == "dtype" for index in range(item.first, item.last + 1)}
    try:
        sizes = read_sizes(found, builtin, grammar, ignored=covered, text=text, value_count=value_count)
    except InvalidInput as error:
        raise Refused(str(error)) from error
    read_dtype, dtype_notes = _dtype(found, mentions, builtin, signature_dtype)
    stated = {**sizes.axes, **axes}
    reduced = _reduced_sizes(builtin.problem, stated, sizes.scalars)
    return _checked(
        Intention(
            problem_name=problem,
            axes={**stated, **reduced},
            scalars=sizes.scalars,
            dtype=dtype or read_dtype,
            assumed=(
                *corrections,
                *grammar.assumes,
                *_assumed_sizes(builtin, reduced, stated, sizes.scalars),
                *sizes.notes,
                *(dtype_notes if dtype is None else ()),
            ),
        ),
        operators,
    )


# --- normalising -----------------------------------------------------------------------------------------------------
def _normalised(text: str) -> str:
    if len(text) > MAX_CHARACTERS:
        raise Refused(
            f"the text has {len(text)} characters and at most {MAX_CHARACTERS} are read; say in a sentence or two what "
            "the kernel has to compute"
        )
    letters = [char for char in unicodedata.normalize("NFKC", text) if unicodedata.category(char).startswith("L")]
    if not letters:
        raise Refused("the text names no operator; say in English what the kernel has to compute")
    if any(not unicodedata.name(char, "").startswith(("LATIN", "GREEK")) for char in letters):
        raise Refused("only English is read; say in English what the kernel has to compute")
    text = plain(text)
    text = re.sub(r"(?i)\b([1-5])[\s-]?d(?:imensional)?\b(?!\s*=)", r"\1d", text)
    text = re.sub(r"(?i)\b(\d+) cubed\b", r"\1x\1x\1", text)
    text = re.sub(r"(?i)\b(\d+)[\s-]*bits?\b", r"\1bit", text)
    text = re.sub(r"(?i)\b(\d+)-(?:dimensional|dim)\b", r"\1 dim", text)
    text = re.sub(r"(?i)\b(\w+)\s*=\s*['\"]?(?:false|none)\b['\"]?", r"no \1", text)
    text = re.sub(r"(?i)\b(\w+)\s*=\s*true\b", r"with \1", text)
    return re.sub(r"`{1,3}", " ", text)


_SIGNATURE = re.compile(
    r"(?:template\s*<[^<>]*>\s*)?(?:extern\s*\"C\"\s*)?(?:__global__\s+|__device__\s+)?(?:(?:void|float|double|int)\s+)?"
    r"(?:__launch_bounds__\([^)]*\)\s*)?(?P<name>[A-Za-z_]\w*)\s*\((?P<parameters>[^()]*\b(?:float|double|half2?|int|char|bool|long|__half|__nv_bfloat16|nv_bfloat16|u?int\d+_t)\s*(?:const\s*)?\*[^()]*)\)\s*(?P<body>;|\{[^{}]*(?:\}|\Z))?"
)
_POINTER = re.compile(r"(?:const\s+)?(?P<type>[\w:]+(?:\s+(?:char|int|long|short|const))*)\s*(?:const\s*)?\*")
_CODE_DTYPES = {
    "float": "float32", "float4": "float32", "double": "float64", "half": "float16", "__half": "float16",
    "half2": "float16", "__nv_bfloat16": "bfloat16", "nv_bfloat16": "bfloat16", "bool": "bool", "char": "int8",
    "signed char": "int8", "int8_t": "int8", "unsigned char": "uint8", "uint8_t": "uint8", "short": "int16",
    "int": "int32", "int32_t": "int32", "unsigned": "uint32", "unsigned int": "uint32", "uint32_t": "uint32",
    "long": "int64", "long long": "int64", "int64_t": "int64",
}  # fmt: skip
_EXAMPLE = re.compile(r"(?is)\b(?:for\s+)?examples?\s*(?:[12]\s*)?[:\n].*?(?=\*/|__global__|\bextern\b|\Z)")


def _without_code(text: str) -> tuple[str, str | None]:
    """The text with worked examples removed and signatures replaced by their function's name; the element dtype."""
    text = re.sub(r"(?m)^\s*#\s*include.*$", " ", text)
    if re.search(r"/\*.*\bexamples?\b", text, re.DOTALL | re.IGNORECASE) or re.search(
        r"(?i)\bexample:\s*\n?\s*(input|x|A)\b", text
    ):
        text = _EXAMPLE.sub(" ", text)
    text = re.sub(r"/\*|\*/|(?<!:)//", "\n", text)
    dtypes: list[str] = []

    def name_only(match: re.Match[str]) -> str:
        body = (match["body"] or "").strip("{}; \n\t.")
        if body:
            raise Refused(
                "the text holds the body of a function; give existing code as a kernel, or say in words what it does"
            )
        pointers = [pointer["type"].split("::")[-1].strip() for pointer in _POINTER.finditer(match["parameters"])]
        dtypes.extend(_CODE_DTYPES[name] for name in pointers if name in _CODE_DTYPES)
        return f" {match['name']} ; "

    text = _SIGNATURE.sub(name_only, text)
    if len(re.findall(r"(?m);\s*$", text)) >= 3 or re.search(r"(?m)^\s*(?:def|class|import|return|for\s*\()\b", text):
        raise Refused("the text holds source code; give it as a kernel, or say in words what it computes")
    text = re.sub(r"__global__|\bvoid\b|extern\s*\"C\"", " ", text)
    return text, _element_dtype(dtypes)


_RANGE = re.compile(
    r"(?:\bin\s+)?\[\s*0\s*,\s*(?P<below>\d+)\s*\)|(?:\bin\s+)?\[\s*0\s*,\s*(?P<closed>\d+)\s*\]"
    r"|(?:\bfrom\s+|\bbetween\s+)?\b0\s*(?:-|\.\.\.?|to|and|through)\s*(?P<last>\d+)(?:\s+inclusive)?\b"
)


def _value_range(text: str) -> tuple[str, int | None]:
    """The text without the first range of values from 0 on ("0-255", "[0, 256)"), and how many integers it holds."""
    match = _RANGE.search(text)
    if match is None:
        return text, None
    count = int(match["below"]) if match["below"] else int(match["closed"] or match["last"]) + 1
    return f"{text[: match.start()]} {text[match.end() :]}", count


def _element_dtype(dtypes: Sequence[str]) -> str | None:
    """The one dtype of a signature's arrays: the floating one, where integer arrays stand beside it."""
    floating = sorted({dtype for dtype in dtypes if "float" in dtype})
    if len(floating) > 1:
        raise Refused(
            f"the signature mixes {' and '.join(floating)} arrays; the built-in kernels have one element type"
        )
    distinct = floating or sorted(set(dtypes))
    return distinct[0] if len(distinct) == 1 else None


# --- phrases ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class _Entry:
    kind: Literal["operator", "foreign", "modifier", "arithmetic", "dtype", "plain"]
    label: str
    strength: int = UNIQUE


# Words without weight inside a phrase: "multiply two 1024x1024 fp16 matrices" is read as "multiply two matrices".
_JOINING = frozenset(
    fold(word)
    for word in "of over by with to and in from for times at on or into along across per as plus is than".split()  # noqa: SIM905
)
_LIGHT = frozenset(
    fold(word)
    for word in """a an the given whole entire input large big huge dense square long random real contiguous equally
    sized float double floating point fp16 fp32 fp64 bf16 half precision float16 float32 float64 bfloat16 int32
    integer different separate simple these those its my our your arbitrary following 1d numeric numerical small tiny
    regular standard generic basic""".split()  # noqa: SIM905
)


@dataclass(frozen=True, kw_only=True)
class _Table:
    """Squeezed phrase -> what it means: with every word, and with the light words left out."""

    exact: Mapping[str, _Entry]
    heavy: Mapping[str, _Entry]


@cache
def _phrases(names: tuple[tuple[str, tuple[str, ...]], ...]) -> _Table:
    """The vocabulary together with the names of the operators; the first kind to claim a phrase keeps it."""
    known = {name for name, _ in names}
    exact: dict[str, _Entry] = {}
    heavy: dict[str, _Entry] = {}

    def add(phrases: Iterable[str], entry: _Entry) -> None:
        for phrase in phrases:
            all_words = [token for token in tokens(phrase) if token.kind == "word"]
            for key in _squeezed(all_words):
                exact.setdefault(key, entry)
            for key in _squeezed(_weighty(all_words)) if entry.kind != "dtype" else ():
                heavy.setdefault(key, entry)

    for label, phrases in words.DTYPES.items():
        add(phrases, _Entry(kind="dtype", label=label))
    for name, grammar in GRAMMARS.items():
        if name in known:
            for strength, phrases in ((UNIQUE, grammar.unique), (USUAL, grammar.usual), (COMMON, grammar.common)):
                add(phrases, _Entry(kind="operator", label=name, strength=strength))
    for label, phrases in words.FOREIGN.items():
        add(phrases, _Entry(kind="foreign", label=label))
    for name, phrases in names:
        strength = USUAL if name in GRAMMARS else UNIQUE
        add((name, *phrases), _Entry(kind="operator", label=name, strength=strength))
    for label, modifier in words.MODIFIERS.items():
        add(modifier.phrases, _Entry(kind="modifier", label=label))
    for label, phrases in words.ARITHMETIC.items():
        add(phrases, _Entry(kind="arithmetic", label=label))
    add(words.PLAIN, _Entry(kind="plain", label=""))
    return _Table(exact=exact, heavy=heavy)


def _squeezed(found: Sequence[Token]) -> set[str]:
    return {"".join(token.folded for token in found), "".join(token.text.lower() for token in found)} - {""}


def _weighty(phrase: Sequence[Token]) -> Sequence[Token]:
    """The words of a phrase without the light ones; none where too little would remain to recognise it."""
    rest = [token for token in phrase if not _is_light(token)]
    if len(rest) == len(phrase):
        return rest
    ends = {token.folded for token in (rest[:1] + rest[-1:])}
    return rest if len(rest) >= 2 and not ends & _JOINING else []


def _is_light(token: Token) -> bool:
    if token.kind in ("number", "shape"):
        return True
    if token.kind != "word":
        return False
    return token.folded in _LIGHT or (len(token.text) == 1 and not token.joined)


def _mentions(found: Sequence[Token], table: _Table) -> list[Mention]:
    """Phrases of the table in the text, from left to right, the longest at each place, without overlap.

    A plain phrase hides a shorter one ("maximum performance"), but never the start of one that reaches further:
    in "for each column" it is "each column" that counts.
    """
    at = [
        [*_phrases_at(found, start, table.exact, light=True), *_phrases_at(found, start, table.heavy, light=False)]
        for start in range(len(found))
    ]
    chosen: list[Mention] = []
    index = 0
    while index < len(found):
        best = max(at[index], key=lambda item: (item.last, item.kind != "plain"), default=None)
        if best is not None and best.kind == "plain":
            reaching = any(
                item.kind != "plain" and item.last > best.last
                for start in range(index + 1, best.last + 1)
                for item in at[start]
            )
            if reaching:
                best = max(
                    (item for item in at[index] if item.kind != "plain"), key=lambda item: item.last, default=None
                )
        if best is None:
            index += 1
            continue
        inside = [item for start in range(best.first, best.last + 1) for item in at[start] if item.last <= best.last]
        chosen += [best, *_dtypes_inside(best, inside)]
        index = best.last + 1
    return [
        dataclasses.replace(item, negated=_is_negated(item, found) or _is_denied_after(item, found)) for item in chosen
    ]


def _with_patterns(found: Sequence[Token], mentions: list[Mention], names: frozenset[str]) -> list[Mention]:
    """The mentions together with the patterns that the text matches.

    What stands at the first word of a pattern gives way to it: in "multiply two vectors and sum" the product is part
    of the dot product.
    """
    patterns = [(name, pattern) for name in sorted(names & GRAMMARS.keys()) for pattern in GRAMMARS[name].patterns]
    patterns += [(label, pattern) for label, group in words.FOREIGN_PATTERNS.items() for pattern in group]
    for label, pattern in patterns:
        span = _match_pattern(found, pattern)
        if span is None:
            continue
        first, last = span
        text = " ".join(token.text for token in found[first : last + 1])
        whole = Mention(
            kind="operator" if label in GRAMMARS else "foreign",
            label=label,
            text=text,
            first=first,
            last=last,
            strength=USUAL,
        )
        named = any(item.kind == "operator" and item.first <= first <= item.last for item in mentions)
        if named and whole.kind == "operator":
            continue
        mentions = [item for item in mentions if not (item.first <= first <= item.last < last and item.kind != "dtype")]
        mentions.append(dataclasses.replace(whole, negated=_is_negated(whole, found)))
    return sorted(mentions, key=lambda item: (item.first, item.last))


def _match_pattern(found: Sequence[Token], pattern: str) -> tuple[int, int] | None:
    """First and last token of a pattern of the vocabulary in the text; None where it does not occur."""
    steps = [frozenset(step.split("|")) for step in pattern.split()]
    for start, token in enumerate(found):
        if _is_one_of(token, steps[0]):
            last = _match_steps(found, start + 1, steps[1:])
            if last is not None:
                return start, last
    return None


def _match_steps(found: Sequence[Token], index: int, steps: Sequence[frozenset[str]]) -> int | None:
    if not steps:
        return index - 1
    gap = steps[0] == _GAP
    wanted = steps[1] if gap else steps[0]
    for position in range(index, min(len(found), index + MAX_GAP + 1) if gap else min(len(found), index + 1)):
        token = found[position]
        if token.kind == "symbol" and token.text in ".;:":
            return None
        if _is_one_of(token, wanted):
            last = _match_steps(found, position + 1, steps[2:] if gap else steps[1:])
            if last is not None:
                return last
    return None


def _is_one_of(token: Token, wanted: frozenset[str]) -> bool:
    return token.text.lower() in wanted or ("#" in wanted and token.kind == "number")


_GAP = frozenset({"..."})


def _dtypes_inside(mention: Mention, inside: Sequence[Mention]) -> list[Mention]:
    """The dtypes that a phrase passes over as light words: "multiply two fp16 matrices"."""
    if mention.kind in ("dtype", "plain"):
        return []
    hiding = [item for item in inside if item.kind in ("dtype", "plain")]
    return [
        item
        for item in inside
        if item.kind == "dtype"
        and not any(other != item and other.first <= item.first and item.last <= other.last for other in hiding)
    ]


def _phrases_at(found: Sequence[Token], start: int, table: Mapping[str, _Entry], *, light: bool) -> Iterator[Mention]:
    """Every phrase of one table that begins at `start`; light words count only if `light`."""
    taken: list[Token] = []
    for index in range(start, min(len(found), start + 3 * MAX_PHRASE_WORDS)):
        token = found[index]
        if token.kind == "symbol" and token.text in "-/_" and index > start:
            continue
        if token.kind == "symbol" or (light and token.kind != "word"):
            break
        if not light and _is_light(token):
            if index == start:
                break
            continue
        taken.append(token)
        if len(taken) > MAX_PHRASE_WORDS:
            break
        entry = table.get("".join(item.folded for item in taken)) or table.get(
            "".join(item.text.lower() for item in taken)
        )
        if entry is not None and not _splits_a_name(found, start, index, entry):
            yield Mention(
                kind=entry.kind,
                label=entry.label,
                text=" ".join(item.text for item in found[start : index + 1]),
                first=start,
                last=index,
                strength=entry.strength,
            )


def _splits_a_name(found: Sequence[Token], first: int, last: int, entry: _Entry) -> bool:
    """Whether a plain phrase would end inside a name in camel case ("the ReLU" is no "there")."""
    return (
        entry.kind == "plain" and first < last and last + 1 < len(found) and found[last].start == found[last + 1].start
    )


def _is_negated(mention: Mention, found: Sequence[Token]) -> bool:
    """Whether one of the few words before the mention, in the same clause, denies it."""
    before: list[str] = []
    for token in reversed(found[max(0, mention.first - 6) : mention.first]):
        if token.kind == "symbol" and token.text not in "-'/":
            break
        if token.kind == "word":
            if token.folded in ("but", "and", "is", "ar") and not _EXCEPTING & set(_words_before(found, token)):
                break
            before.insert(0, token.text.lower())
    window = before[-4:]
    text = f" {' '.join(window)} "
    return any(f" {negation} " in text for negation in words.NEGATIONS)


_EXCEPTING = frozenset({"anything", "everything", "all", "nothing"})  # "anything but softmax"


def _words_before(found: Sequence[Token], token: Token) -> list[str]:
    index = found.index(token)
    return [item.text.lower() for item in found[max(0, index - 1) : index]]


def _is_denied_after(mention: Mention, found: Sequence[Token]) -> bool:
    """ "softmax is not what I want"."""
    after = [token.text.lower() for token in found[mention.last + 1 : mention.last + 4]]
    return after[:2] in (["is", "not"], ["are", "not"]) or after[:1] in (["isn't"], ["isnt"], ["aren't"])


def _corrected(found: list[Token], table: _Table) -> tuple[list[Token], tuple[str, ...]]:
    """Misspelt words of operator names put right; only long words, and only ones that mean nothing as written."""
    names = _long_operator_words(frozenset(GRAMMARS))
    notes: list[str] = []
    corrected: list[Token] = []
    for token in found:
        if token.kind == "word" and len(token.text) >= 6 and token.text.isalpha() and not _is_known_word(token, table):
            distance = 1 if len(token.text) < 10 else 2
            near = sorted(name for name in names if _edits(token.text.lower(), name, distance) <= distance)
            if len(near) == 1:
                notes.append(f"{token.text!r} was read as {near[0]!r}")
                token = dataclasses.replace(token, text=near[0], folded=fold(near[0]))
        corrected.append(token)
    return corrected, tuple(dict.fromkeys(notes))


def _is_known_word(token: Token, table: _Table) -> bool:
    return token.folded in table.exact or token.text.lower() in table.exact or token.folded in _vocabulary_words()


@cache
def _vocabulary_words() -> frozenset[str]:
    """Every word that any table uses, folded."""
    phrases = [
        *words.PLAIN,
        *words.THEN,
        *words.NEGATIONS,
        *words.SURROUNDINGS,
        *words.MACHINE_WORDS_AFTER,
        *words.MACHINE_WORDS_BEFORE,
        *words.ACCUMULATOR_WORDS,
        *words.LABEL_WORDS,
    ]
    for table in (words.FOREIGN, words.ARITHMETIC, words.DTYPES, words.QUANTITIES):
        phrases += [phrase for group in table.values() for phrase in group]
    phrases += [phrase for modifier in words.MODIFIERS.values() for phrase in modifier.phrases]
    for grammar in GRAMMARS.values():
        phrases += [*grammar.unique, *grammar.usual, *grammar.common]
        phrases += [phrase for group in grammar.axes.values() for phrase in group]
    return frozenset(fold(word) for phrase in phrases for word in re.findall(r"[A-Za-z0-9']+", phrase))


@cache
def _size_and_role_words(problem: str) -> frozenset[str]:
    """Words that say a size, how it is counted, or what a number or dtype belongs to; folded and as written."""
    grammar = GRAMMARS.get(problem, Grammar())
    phrases = [*words.THEN, *words.NEGATIONS, *words.SURROUNDINGS, *words.MACHINE_WORDS_AFTER]
    phrases += [*words.MACHINE_WORDS_BEFORE, *words.ACCUMULATOR_WORDS, *words.LABEL_WORDS, *grammar.letters]
    phrases += [phrase for group in grammar.axes.values() for phrase in group]
    phrases += [phrase for group in words.QUANTITIES.values() for phrase in group]
    phrases += [word for reading in grammar.shapes for word in reading.words]
    found = {word for phrase in phrases for word in re.findall(r"[A-Za-z0-9']+", phrase.lower())}
    return frozenset({*found, *map(fold, found)})


def _axis_words(builtin: Builtin) -> frozenset[str]:
    """The words of the problem's own `[intent]` table for its sizes."""
    phrases = [*builtin.intent.axes, *(phrase for group in builtin.intent.axes.values() for phrase in group)]
    return frozenset(fold(word) for phrase in phrases for word in re.findall(r"[A-Za-z0-9]+", phrase))


@cache
def _long_operator_words(names: frozenset[str]) -> frozenset[str]:
    phrases = [phrase for name in names for phrase in GRAMMARS[name].unique]
    return frozenset(word for phrase in phrases for word in phrase.split() if len(word) >= 6 and word.isalpha())


def _edits(left: str, right: str, limit: int) -> int:
    """Insertions, deletions, replacements and swaps of neighbours between two words; `limit + 1` where more."""
    if abs(len(left) - len(right)) > limit or left[0] != right[0]:
        return limit + 1
    previous, current = [0] * (len(right) + 1), list(range(len(right) + 1))
    for i, a in enumerate(left, start=1):
        before, previous, current = previous, current, [i] + [0] * len(right)
        for j, b in enumerate(right, start=1):
            current[j] = min(previous[j] + 1, current[j - 1] + 1, previous[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                current[j] = min(current[j], before[j - 2] + 1)
    return current[-1]


def _check_language(found: Sequence[Token], mentions: Sequence[Mention]) -> None:
    covered = {index for item in mentions for index in range(item.first, item.last + 1) if item.kind != "plain"}
    other = [
        token.text.lower()
        for index, token in enumerate(found)
        if token.kind == "word" and index not in covered and token.text.lower() in words.NOT_ENGLISH
    ]
    if len(other) >= 2:
        raise Refused(f"only English is read, and {' and '.join(sorted(set(other))[:3])!r} is not; say it in English")


# --- the operator ----------------------------------------------------------------------------------------------------
def _operator(
    found: Sequence[Token],
    mentions: Sequence[Mention],
    formulas: Sequence[str],
    foreign_formulas: Sequence[str],
    operators: Mapping[str, Builtin],
) -> str:
    """The one built-in operator that the text asks for."""
    if foreign_formulas:
        raise Refused(_not_built_in(foreign_formulas[0]))
    asked = [item for item in _asked(found, mentions) if item.kind == "operator"]
    hinted = [item for item in mentions if item.label in words.RANK_HINTS and not item.negated]
    names = list(dict.fromkeys([*(item.label for item in asked), *formulas]))
    for item in hinted:
        name = _with_rank(item, found, mentions)
        if name is not None and name not in names:
            names.append(name)
    names = [name for name in names if name in operators]
    if not names:
        raise Refused(_nothing_found(mentions))
    chosen = _primary(names, asked)
    _check_sequence(found, mentions, chosen)
    _check_changes(found, mentions, chosen)
    _check_composition(found, mentions, chosen)
    return chosen


def _asked(found: Sequence[Token], mentions: Sequence[Mention]) -> list[Mention]:
    """Mentions that are the task, not denied and not its surroundings ("the softmax used in attention")."""
    asked = [item for item in mentions if not item.negated]
    central = [item for item in asked if not _is_surroundings(item, found)]
    return central if any(item.kind == "operator" for item in central) else asked


def _is_surroundings(mention: Mention, found: Sequence[Token]) -> bool:
    before = " ".join(token.text.lower() for token in found[max(0, mention.first - 6) : mention.first])
    if mention.label == NETWORK_LAYER and re.search(r"\b(?:for|in|of|from|inside)(?: \w+){0,3}$", before):
        return True
    return _surroundings().search(before) is not None


@cache
def _surroundings() -> re.Pattern[str]:
    phrases = "|".join(words.SURROUNDINGS)
    return re.compile(
        rf"\b(?:{phrases})(?: (?:a|an|the|each|every|its|transformer|multi|standard|flash|decoder|encoder))*$"
    )


def _with_rank(mention: Mention, found: Sequence[Token], mentions: Sequence[Mention]) -> str | None:
    """The operator behind a name whose number of dimensions has to be read elsewhere in the text."""
    hint = words.RANK_HINTS[mention.label]
    text = " ".join(token.folded for token in found if token.kind == "word")
    if any(f" {' '.join(map(fold, phrase.split()))} " in f" {text} " for phrase in hint.excluded_by):
        return None
    ranks = {len(token.dims) for token in found if token.kind == "shape"}
    by_shape = ranks & {len(reading.axes) for reading in GRAMMARS[hint.operator].shapes}
    by_word = any(f" {' '.join(map(fold, phrase.split()))} " in f" {text} " for phrase in hint.settled_by)
    return hint.operator if by_word or by_shape else None


def _primary(names: Sequence[str], asked: Sequence[Mention]) -> str:
    """The operator that explains all the others that are mentioned."""
    if len(names) == 1:
        return names[0]
    able = [
        name
        for name in names
        if all(other == name or other in GRAMMARS[name].explains for other in names if name in GRAMMARS)
    ]
    if len(able) == 1:
        return able[0]
    raise Refused(f"the text asks for several operators ({', '.join(map(_name, names))}); ask for one at a time")


def _check_sequence(found: Sequence[Token], mentions: Sequence[Mention], chosen: str) -> None:
    """Two different operators joined by "then", "followed by" and the like are two tasks."""
    telling = [item for item in mentions if item.kind in ("operator", "foreign", "arithmetic") and not item.negated]
    for left, right in itertools.pairwise(telling):
        if left.label == right.label or chosen not in (left.label, right.label):
            continue
        between = " ".join(token.text.lower() for token in found[left.last + 1 : right.first] if token.text not in ",-")
        named = left.kind == right.kind == "operator" and min(left.strength, right.strength) == UNIQUE
        if between in words.AFTERWARDS or (named and (between in words.THEN or between in ("+", "&", "/"))):
            raise Refused(f"the text asks for {left.text!r} and {right.text!r}; ask for one at a time")


def _check_composition(found: Sequence[Token], mentions: Sequence[Mention], chosen: str) -> None:
    """Refuse "the sum of the softmax", "2 * softmax(x)" and "softmax(x) - y"."""
    telling = [item for item in mentions if item.kind not in ("plain", "dtype")]
    for other, item in itertools.pairwise([None, *telling]):
        if item is None or item.kind != "operator" or item.label != chosen:
            continue
        if other is not None and other.label != chosen and not other.negated:
            between = [token.text.lower() for token in found[other.last + 1 : item.first] if token.kind == "word"]
            if "of" in between and set(between) <= {"of", "the", "a", "all", "its", "each"}:
                raise Refused(f"the text asks for {other.text!r} of {_name(chosen)}; ask for one at a time")
        if _symbol_before(found, item.first) or _symbol_after_call(found, item.last):
            raise Refused(f"the formula around {item.text!r} asks for more than {_name(chosen)}")


def _symbol_before(found: Sequence[Token], first: int) -> bool:
    if first == 0 or found[first - 1].kind != "symbol" or found[first - 1].text not in "*+^@-/":
        return False
    operand = found[first - 2] if first >= 2 else None
    touching = operand is not None and operand.start + len(operand.text) == found[first - 1].start
    return operand is not None and (found[first - 1].text in "*+^@" or (not touching and found[first - 1].text == "-"))


def _symbol_after_call(found: Sequence[Token], last: int) -> bool:
    """Whether arithmetic follows the closing parenthesis of a call right after the name."""
    index = last + 1
    if index < len(found) and found[index].kind == "symbol" and found[index].text in "*+^@":
        return True
    if index >= len(found) or found[index].text != "(":
        return False
    depth = 0
    for position in range(index, len(found)):
        depth += (found[position].text == "(") - (found[position].text == ")")
        if depth == 0:
            following = found[position + 1 : position + 2]
            return bool(following) and following[0].kind == "symbol" and following[0].text in "*+^@-/"
    return False


def _check_changes(found: Sequence[Token], mentions: Sequence[Mention], chosen: str) -> None:
    """Refuse what would make the chosen operator another one."""
    grammar = GRAMMARS.get(chosen, Grammar())
    for item in _asked(found, mentions):
        if item.kind == "operator" and item.label != chosen and item.label not in grammar.explains:
            raise Refused(f"the text asks for {_name(item.label)} besides {_name(chosen)}; ask for one at a time")
        if item.kind == "foreign" and not _explained(item, grammar, found, mentions, chosen):
            raise Refused(_not_built_in(item.label, item.text))
        if item.kind == "modifier" and chosen not in words.MODIFIERS[item.label].harmless_for:
            raise Refused(f"the built-in {_name(chosen)} has no {item.text!r} ({item.label}); nothing else was assumed")
        if item.kind == "arithmetic" and item.label not in grammar.explains:
            raise Refused(f"the text asks for {item.text!r}, which is not part of {_name(chosen)}")
    for item in mentions:
        if item.negated and item.kind in ("arithmetic", "operator") and item.label in grammar.needs:
            raise Refused(f"{_name(chosen)} without {item.text!r} is another operator, and that is not built in")


def _explained(
    item: Mention, grammar: Grammar, found: Sequence[Token], mentions: Sequence[Mention], chosen: str
) -> bool:
    if item.label in words.RANK_HINTS:
        return words.RANK_HINTS[item.label].operator == chosen
    return item.label in grammar.explains


def _check_formulas(labels: Sequence[str], chosen: str) -> None:
    for label in labels:
        if label != chosen and label not in GRAMMARS.get(chosen, Grammar()).explains:
            raise Refused(f"the formula in the text is not {_name(chosen)}")


def _check_unknown_words(
    found: Sequence[Token], mentions: Sequence[Mention], chosen: str, axis_words: frozenset[str]
) -> None:
    """Refuse unknown words where they may change the operator: the nearer and the commoner its name, the sooner."""
    covered = {index for item in mentions for index in range(item.first, item.last + 1)}
    known = _size_and_role_words(chosen) | axis_words
    unknown = [
        index
        for index, token in enumerate(found)
        if token.kind == "word"
        and index not in covered
        and not _is_light(token)
        and not {token.folded, token.text.lower()} & known
    ]
    names = [item for item in mentions if item.kind == "operator" and item.label == chosen]
    total = sum(token.kind == "word" and not _is_light(token) for token in found)
    if len(unknown) >= 2 and len(unknown) > MAX_UNKNOWN_SHARE * total:
        quoted = ", ".join(repr(found[index].text) for index in unknown[:4])
        raise Refused(f"too much of the text is not understood ({quoted}); say in plain words what to compute")
    strongest = max((item.strength for item in names), default=USUAL)
    if strongest == COMMON and unknown:
        raise Refused(f"{found[unknown[0]].text!r} is not understood; say {_name(chosen)} in other words")
    for item in names:
        for index in unknown:
            prepositions = _PREPOSITIONS if item.strength == UNIQUE else _WEAK_PREPOSITIONS
            if _is_beside(found, item, index, prepositions):
                raise Refused(f"{found[index].text!r} beside {item.text!r} is not understood; say it in other words")
    for index in _after_with(found, mentions, chosen):
        raise Refused(f"'with … {found[index].text}' is not understood; say it in other words")
    for index in unknown:
        if _adds_to_task(found, index):
            raise Refused(f"{found[index].text!r} is not understood and may change the operator; say it in other words")


def _after_with(found: Sequence[Token], mentions: Sequence[Mention], chosen: str) -> Iterator[int]:
    """Words after "with" that are neither technical nor about sizes, operands or the operator itself."""
    explained = {
        index for item in mentions if item.kind != "plain" or item.negated for index in range(item.first, item.last + 1)
    }
    allowed = _technical_words() | _size_and_role_words(chosen)
    for start, token in enumerate(found):
        if token.text.lower() not in ("with", "plus", "including"):
            continue
        for index in range(start + 1, len(found)):
            word = found[index]
            if (word.kind == "symbol" and word.text not in "-'/") or word.text.lower() in _CLAUSE_ENDS:
                break
            if word.kind == "word" and index not in explained and not _is_light(word) and word.folded not in allowed:
                yield index


@cache
def _technical_words() -> frozenset[str]:
    return frozenset(fold(word) for phrase in words.TECHNICAL for word in phrase.split())


_CLAUSE_ENDS = frozenset(
    """for in on from to using that which where so such as by via over when while into at and or but i we please if
    because since""".split()  # noqa: SIM905
)
_PREPOSITIONS = frozenset({"of", "over", "on", "between", "in"})
_WEAK_PREPOSITIONS = _PREPOSITIONS | {"for", "to"}
_ADDING = frozenset({"with", "plus", "and", "but", "except", "minus", "including", "that"})


def _is_beside(found: Sequence[Token], item: Mention, index: int, prepositions: frozenset[str]) -> bool:
    low, high = (index + 1, item.first) if index < item.first else (item.last + 1, index)
    between = found[low:high]
    if any(token.kind == "symbol" and token.text not in "-" for token in between):
        return False
    inner = [token.text.lower() for token in between if token.kind == "word" and not _is_light(token)]
    if index > item.last:
        inner = [word for word in inner if word not in prepositions]
    if index < item.first:
        inner = [word for word in inner if fold(word) not in _QUALITY]
    return not inner


_QUALITY = frozenset(
    map(
        fold,
        ("fast", "faster", "efficient", "optimized", "tiled", "naive", "parallel", "stable", "fused", "cuda", "gpu"),
    )
)


def _adds_to_task(found: Sequence[Token], index: int) -> bool:
    """Whether the word follows "with", "and", "but" … and so may name a further requirement."""
    before = [token for token in found[max(0, index - 3) : index]]
    for token in reversed(before):
        if token.kind == "symbol" and token.text != "-":
            return token.text in "+&"
        if token.kind == "word" and not _is_light(token):
            return token.text.lower() in _ADDING
    return False


def _not_built_in(label: str, text: str | None = None) -> str:
    if label in words.RANK_HINTS:
        known = _name(words.RANK_HINTS[label].operator)
        return f"the text does not say how many dimensions {text!r} has; {known} is built in"
    return (
        f"this asks for {label}"
        + (f" ({text!r})" if text and text.lower() != label.lower() else "")
        + ", which is not built in"
    )


def _nothing_found(mentions: Sequence[Mention]) -> str:
    foreign = [item for item in mentions if item.kind == "foreign" and not item.negated]
    if foreign:
        return _not_built_in(foreign[0].label, foreign[0].text)
    return f"the text names none of the built-in operators: {', '.join(map(_name, sorted(GRAMMARS)))}"


def _name(problem: str) -> str:
    return problem.replace("_", " ")


# --- dtype and checks ------------------------------------------------------------------------------------------------
def _dtype(
    found: Sequence[Token], mentions: Sequence[Mention], builtin: Builtin, signature: str | None
) -> tuple[str | None, tuple[str, ...]]:
    """The element dtype that the text names, and notes on it."""
    notes: list[str] = []
    named = [words.IMPLIED_DTYPES[token.folded] for token in found if token.folded in words.IMPLIED_DTYPES]
    named += [signature] if signature is not None else []
    for item in mentions:
        if item.kind != "dtype" or item.negated:
            continue
        role = _role(found, item)
        if role == "accumulator":
            notes.append(f"{item.text} was read as the type of sums, which the kernels choose themselves")
        elif not (role == "label" and builtin.name in LABELLED):
            named.append(item.label)
    distinct = list(dict.fromkeys(named))
    if "mixed precision" in distinct:
        distinct.remove("mixed precision")
        distinct = distinct or ["float16"]
        notes.append(f"mixed precision was read as {distinct[0]} elements with float32 sums")
    integers = [dtype for dtype in distinct if "int" in dtype and dtype not in builtin.dtypes]
    if len(distinct) > 1 and integers and builtin.name in LABELLED:
        distinct = [dtype for dtype in distinct if dtype not in integers]
    if len(distinct) > 1:
        raise Refused(f"the text names several element types ({', '.join(distinct)}); give one")
    if not distinct:
        return None, (*notes, f"no dtype was given; {builtin.dtypes[0]} assumed")
    if distinct[0] not in builtin.dtypes:
        raise Refused(
            f"{_name(builtin.name)} is not available in {distinct[0]}; choose from {', '.join(builtin.dtypes)}"
        )
    return distinct[0], tuple(notes)


def _role(found: Sequence[Token], item: Mention) -> Literal["element", "accumulator", "label"]:
    """What a dtype in the text is the type of, by the words around it."""
    after = [token.text.lower() for token in _clause(found, item.last + 1, 1)][:2]
    before = [token.text.lower() for token in _clause(found, item.first - 1, -1)][:3]
    before = before[:2] if before and before[0] in ("in", "as", "are", "of", "to", "with") else before[:1]
    if set(after) & words.ACCUMULATOR_WORDS or set(before) & words.ACCUMULATOR_WORDS:
        return "accumulator"
    if set(after[:1]) & words.LABEL_WORDS or set(before) & words.LABEL_WORDS:
        return "label"
    return "element"


def _clause(found: Sequence[Token], start: int, step: int) -> Iterator[Token]:
    """Words from `start` on in one direction, up to the next sign."""
    index = start
    while 0 <= index < len(found) and (found[index].kind == "word" or found[index].text == "-"):
        if found[index].kind == "word":
            yield found[index]
        index += step


def _reduced_sizes(problem: Problem, stated: Mapping[str, int], scalars: Mapping[str, Scalar]) -> dict[str, int]:
    """Sizes to assume in place of the bench's own, where those would make an array too large beside the stated ones."""
    model = problem.bench[0] if problem.bench else problem.workloads[0]
    own = _largest_array(problem, model.axes, model.scalars)
    sizes = {**model.axes, **stated}
    reduced: dict[str, int] = {}
    while stated and _largest_array(problem, sizes, {**model.scalars, **scalars}) > max(MAX_ASSUMED_ELEMENTS, own):
        shrinkable = {
            name: size
            for name, size in sizes.items()
            if name not in stated and size > 1 and in_domain(problem.axes[name], size // 2)
        }
        if not shrinkable:
            break
        name = max(shrinkable, key=lambda axis: shrinkable[axis])
        sizes[name] = reduced[name] = sizes[name] // 2
    return reduced


def _largest_array(problem: Problem, axes: Mapping[str, int], scalars: Mapping[str, Scalar]) -> int:
    """Elements of the largest array; 0 where the sizes do not fit the problem at all."""
    names = {**axes, **scalars}
    shapes = [
        tensor.shape for tensor in (*problem.inputs.values(), *problem.outputs.values()) if tensor.shape is not None
    ]
    try:
        return max((math.prod(evaluate(size, names) for size in shape) for shape in shapes), default=0)
    except InvalidInput:
        return 0


def _assumed_sizes(
    builtin: Builtin, reduced: Mapping[str, int], stated: Mapping[str, int], scalars: Mapping[str, Scalar]
) -> list[str]:
    problem = builtin.problem
    model = problem.bench[0] if problem.bench else problem.workloads[0]
    notes = []
    for name, size in {**model.axes, **reduced}.items():
        if name not in stated:
            called = builtin.intent.axes.get(name, ())
            meaning = f" ({called[0]})" if called and called[0].lower() != name.lower() else ""
            notes.append(f"axis {name}{meaning} was not given; {size} assumed")
    notes += [f"{name} was not given; {value} assumed" for name, value in model.scalars.items() if name not in scalars]
    return notes


def _checked(intention: Intention, operators: Mapping[str, Builtin]) -> Intention:
    """The intention, if its sizes lie in the problem's domain and meet its constraints."""
    try:
        intended_problem(intention, lexicon=operators)
    except InvalidInput as error:
        raise Refused(f"{_name(intention.problem_name or '')}: {error}") from error
    return intention
