"""Plain English to a built-in problem with sizes and dtype, or a refusal that says why.

A short pipeline: the text is normalised, quoted code and formulas are taken out, words are matched against the
tables of `vocabulary`, the operator is chosen, then sizes and dtype are read. A wrong problem is worse than a
refusal, so anything that may change what is computed and is not understood refuses: another operator, a qualifier
("causal"), arithmetic that does not belong to the operator, an unknown word in the sentence that names it. Only a
clause that says what the kernel is for ("for our solver we need ...") may hold any words.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from optiml.errors import InvalidInput
from optiml.expressions import evaluate
from optiml.generate.context import context_words, without_context
from optiml.generate.element_type import read_dtype
from optiml.generate.formulas import find_formulas, unexplained_arithmetic
from optiml.generate.languages import in_english
from optiml.generate.operators import check_changes, check_formulas, find_operator
from optiml.generate.phrases import corrected, find_mentions, phrase_table, with_patterns
from optiml.generate.refusal import Refused, spoken_name
from optiml.generate.request import OTHER_RANGE, check_stated_sizes, normalised, value_range, without_code
from optiml.generate.sizes import read_sizes
from optiml.generate.unknown_words import axis_words, check_language, check_unknown_words
from optiml.generate.vocabulary import GRAMMARS, Grammar
from optiml.generate.words import tokens
from optiml.problems.problem import (
    Builtin,
    builtin_names,
    check_workload,
    in_domain,
    load_builtin,
    satisfies,
    with_dtype,
)
from optiml.records import DTYPES, Problem, Scalar, Workload

MAX_ASSUMED_ELEMENTS = 1 << 24  # an array of assumed size should fit a laptop


@dataclass(frozen=True, kw_only=True)
class Intention:
    """What a text asks for. `refused` is None exactly when `problem_name` is set."""

    problem_name: str | None
    axes: Mapping[str, int] = field(default_factory=dict)  # those given, and assumed ones that differ from the bench's
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    dtype: str | None = None
    assumed: tuple[str, ...] = ()
    refused: str | None = None


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

    Scalars that no workload of the problem has (a window of 7) also become a workload, so that they are verified.

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
    return dataclasses.replace(problem, bench=(bench,), workloads=_with_scalars(problem, bench.scalars))


def _with_scalars(problem: Problem, scalars: Mapping[str, Scalar]) -> tuple[Workload, ...]:
    """The workloads, and a small one with the scalars asked for where none has them: a verdict must cover those."""
    if not scalars or any(dict(item.scalars) == dict(scalars) for item in problem.workloads):
        return problem.workloads
    fitting = [item for item in problem.workloads if satisfies(problem, item.axes, scalars)]
    return (*problem.workloads, *(dataclasses.replace(item, scalars=scalars) for item in fitting[:1]))


def _read(
    text: str, problem: str | None, axes: dict[str, int], dtype: str | None, operators: Mapping[str, Builtin]
) -> Intention:
    text, language = in_english(text)
    text = normalised(text)
    translated = () if language is None else (f"the {language} text was read as {text!r}",)
    text, signature_dtype = without_code(text)
    formulas, text = find_formulas(text)
    text, value_count = value_range(text)
    check_stated_sizes(text)
    found = tokens(text)
    table = phrase_table(tuple(sorted((name, builtin.intent.names) for name, builtin in operators.items())))
    found, corrections = corrected(found, table)
    mentions = with_patterns(found, find_mentions(found, table), frozenset(operators))
    aside = context_words(found, mentions)
    mentions = without_context(mentions, aside)
    if problem is None:
        check_language(found, mentions)
        named = [item for item in formulas if not item.foreign]
        foreign = [item.label for item in formulas if item.foreign]
        problem = find_operator(found, mentions, [item.label for item in named], foreign, operators)
        own_words = axis_words(operators[problem])
        unread = check_unknown_words(
            found, mentions, problem, own_words, ignored=aside, translated=language is not None
        )
    else:
        unread = ()
        check_changes(found, mentions, problem)
        check_formulas([item.label for item in formulas], problem)
    if "bins" in operators[problem].problem.axes and OTHER_RANGE.search(text):
        raise Refused(f"the built-in {problem} counts integers from 0 on, not values of another range")
    grammar = GRAMMARS.get(problem, Grammar())
    left_over = unexplained_arithmetic(text)
    if left_over is not None:
        raise Refused(f"the formula {left_over!r} asks for more than {spoken_name(problem)}")
    builtin = operators[problem]
    covered = {index for item in mentions if item.kind == "dtype" for index in range(item.first, item.last + 1)}
    try:
        sizes = read_sizes(found, builtin, grammar, ignored=covered, text=text, value_count=value_count)
    except InvalidInput as error:
        raise Refused(str(error)) from error
    own_dtype, dtype_notes = read_dtype(found, mentions, builtin, signature_dtype)
    stated = {**sizes.axes, **axes}
    reduced = _reduced_sizes(builtin.problem, stated, sizes.scalars)
    return _checked(
        Intention(
            problem_name=problem,
            axes={**stated, **reduced},
            scalars=sizes.scalars,
            dtype=dtype or own_dtype,
            assumed=(
                *translated,
                *corrections,
                *unread,
                *grammar.assumes,
                *_assumed_sizes(builtin, reduced, stated, sizes.scalars),
                *sizes.notes,
                *(dtype_notes if dtype is None else ()),
            ),
        ),
        operators,
    )


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
        raise Refused(f"{spoken_name(intention.problem_name or '')}: {error}") from error
    return intention
