"""Which sizes, scalars and distributions a kernel is tried on: the caller's, and hidden ones drawn from the domain."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from optiml.errors import InvalidInput
from optiml.expressions import evaluate, evaluate_float, names_in
from optiml.problems.data import is_float
from optiml.problems.problem import INT32_MAX, in_domain, named_distributions, names_of, satisfies
from optiml.records import Axis, Distribution, Problem, Scalar, Size, Workload

# Ones, primes, powers of two and their neighbours, and what lies beside common block sizes.
INTERESTING = (
    1, 2, 3, 5, 7, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 97, 100, 127, 128, 129, 191, 192, 193, 251, 255, 256, 257,
    300, 383, 384, 385, 509, 511, 512, 513, 641, 767, 769, 1000, 1009, 1023, 1024, 1025, 1031, 1500, 2047, 2049, 3001,
    4095, 4097, 5003, 8191, 8193, 10007, 16381, 16385, 32771, 65537,
)  # fmt: skip
SINGLE_AXIS_REACH = 65537  # hidden sizes of one-axis problems go this far; of others twice the largest workload
COST_REACH = 4.0  # times the cost of the dearest workload ...
LEAST_COST_REACH = 3e5  # ... or this many operations or elements, whichever is more
LONG_REACH = 4099  # sizes of one long axis beside short ones go at least this far
LONG_CASES = 3  # at most so many of the hidden cases have one long axis and short ones
HIDDEN_CASES = 9
REDUCED_HIDDEN_CASES = 3
REDUCED_VISIBLE_CASES = 4
RUNS = 2  # of one load, each with fresh data
MANY_RUNS = 6  # of the smallest hidden size: what counts its calls goes wrong late
LEAST_CALLS = 64  # further ones of a kernel that has variables to count them in ...
MOST_CALLS = 1024  # ... or as many as the largest number that it compares with, but no more than this
BIG_ELEMENTS = 1 << 20  # of the one hidden case that comes near the sizes of `bench`
BIG_FLOPS = 5e7
UNROLLED_TWICE = 2  # doublings of a size at which a loop runs once: it is unrolled by four at most, as a rule
SATURATING_ELEMENTS = 1 << 23  # of the case that fills the grid of a kernel whose grid has an upper end
PROBED_COST = 2e5  # of the cases whose single elements are changed
PROBED_CASES = 2
SHORT = (1, 2, 3, 4, 5, 6, 7, 8, 10, 13, 16, 31, 32, 33)
BLOCK_CASES = 8  # hidden cases beside multiples of the kernel's own numbers ...
LEAST_TURNS = 12  # ... and three more for every two of its numbers on each axis, or so many ...
MOST_BLOCK_CASES = 88  # ... but no more than this
DEAR_BLOCK_CASES = 14  # of a kernel with a launcher
BLOCK_COST = 2e5  # operations or elements of one of them, where that is possible at all
LARGEST_MULTIPLIED = 1024  # larger numbers of the kernel are tried as they are
VECTOR_WIDTHS = (4, 8, 16)  # elements
USUAL_UNITS = (32, 128)  # tried whatever the kernel's numbers are
LEAST_UNIT = 8  # sizes beside smaller ones come anyway
RESTS = 8  # remainders of sizes by this all come
MOST_EXACT = 12  # numbers that the kernel compares with which are tried as sizes
FEW_AXES = 3  # of more, only some are multiples of a vector's width: small sizes have to stay small
MOST_SMALLER = 28  # sizes of one axis that are tried on the way to the smallest that fails


_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One set of sizes and distributions; `seed` is private. `runs` are made of one load of the kernel, each with data
    of its own; `calls` more that use the same data again follow.

    An optional case is left out where the reference is not finite or hopelessly inexact in the declared dtype, and
    where the kernel takes too long. A probed one is run again with single elements of its inputs changed, a perturbed
    one, where the device can, with what no kernel may rely on changed.
    """

    workload: Workload
    hidden: bool
    seed: int
    runs: int = RUNS
    calls: int = 0
    optional: bool = False
    probed: bool = False
    perturbed: bool = True
    sanitized: bool = True  # level 2 repeats it under all checks

    def distribution(self) -> dict[str, str]:
        """Names of the distributions, as a verdict shows them."""
        return {name: _label(spec) for name, spec in self.workload.inputs.items()}


def _label(spec: str | Distribution) -> str:
    if isinstance(spec, str):
        return spec
    if spec.values is not None or spec.npy is not None:
        return "given values"
    bounds = f"[{spec.low or 0}, {spec.high})" if spec.high is not None or spec.low is not None else ""
    return f"{spec.distribution}{bounds}"


def visible_cases(problem: Problem, rng: random.Random, *, reduced: bool) -> tuple[Case, ...]:
    """The caller's workloads, every input named; inputs left open are normal (integers: integers)."""
    workloads = problem.workloads
    if reduced and len(workloads) > REDUCED_VISIBLE_CASES:
        dearest = sorted(range(len(workloads)), key=lambda i: -cost(problem, workloads[i]))
        keep = sorted({0, *dearest[: REDUCED_VISIBLE_CASES - 1]})
        workloads = tuple(workloads[i] for i in keep)
    return tuple(
        Case(workload=_named(problem, workload), hidden=False, seed=rng.getrandbits(63)) for workload in workloads
    )


def _named(problem: Problem, workload: Workload) -> Workload:
    inputs: dict[str, str | Distribution] = {}
    for name, tensor in problem.inputs.items():
        if tensor.shape is not None:
            inputs[name] = workload.inputs.get(name, "normal" if is_float(tensor.dtype) else "integers")
    return Workload(axes=dict(workload.axes), scalars=dict(workload.scalars), inputs=inputs)


def hidden_cases(problem: Problem, rng: random.Random, *, reduced: bool) -> tuple[Case, ...]:
    """Sizes the caller did not name, inside the domains and constraints; distributions that the problem names.

    The smallest size comes with each distribution: a wrong identity of a maximum shows only where few elements are
    there to hide it. A domain without other sizes gives the caller's sizes with other data.
    """
    wanted = REDUCED_HIDDEN_CASES if reduced else HIDDEN_CASES
    choices = {
        name: named_distributions(problem, name) for name, tensor in problem.inputs.items() if tensor.shape is not None
    }
    fixed = [name for name, specs in choices.items() if not specs]  # literal data only: its sizes cannot change
    sizes = [] if fixed else _hidden_sizes(problem, rng, wanted)
    if not sizes:
        sizes = [(dict(w.axes), dict(w.scalars)) for w in problem.workloads][:wanted]
    turns = [(index, index) for index in range(len(sizes))]
    smallest = min(range(len(sizes)), key=lambda i: _least_first(problem, *sizes[i]))
    if not reduced and not fixed:
        distributions = max((len(specs) for specs in choices.values()), default=1)
        turns += [(smallest, turn) for turn in range(distributions) if turn != smallest % distributions]
    cases = []
    for index, turn in turns:
        axes, scalars = sizes[index]
        inputs: dict[str, str | Distribution] = {}
        for position, (name, specs) in enumerate(choices.items()):
            inputs[name] = _in_turn(specs, turn, position) if specs else problem.workloads[index].inputs[name]
        workload = Workload(axes=dict(axes), scalars=dict(scalars), inputs=inputs)
        runs = MANY_RUNS if (index, turn) == (smallest, smallest) and not reduced else RUNS
        cases.append(Case(workload=workload, hidden=True, seed=rng.getrandbits(63), runs=runs))
    if reduced or fixed:
        return tuple(cases)
    return (
        *_with_probes(problem, cases, len(sizes)),
        *_low_cases(problem, cases, rng),
        *_big_case(problem, cases, rng),
    )


def with_many_calls(cases: Sequence[Case], compared: Sequence[int]) -> tuple[Case, ...]:
    """The cases for a kernel that keeps something from call to call: the one with many runs is called far more often.

    Args:
        compared: the numbers that its code compares with; one of them may be the call at which it goes wrong.
    """
    calls = max((number + 2 for number in compared if number + 2 <= MOST_CALLS), default=0)
    return tuple(
        dataclasses.replace(case, calls=max(calls, LEAST_CALLS)) if case.runs == MANY_RUNS else case for case in cases
    )


def block_cases(
    problem: Problem, units: Sequence[int], rng: random.Random, *, compared: Sequence[int] = (), dear: bool = False
) -> tuple[Case, ...]:
    """Small sizes beside multiples of what the kernel itself works in: its blocks, tiles, vectors and constants.

    Each number has its turn before any comes again, on one axis after the other. Every third case has sizes that are
    all multiples of a vector's width, since kernels choose wide loads where every row allows them. Two thirds of these
    and half of the others have rows far below zero among the rest.

    Args:
        units: block extents, whole-number params and constants of the kernel.
        compared: what its code compares with, each of which is tried as a size too.
        dear: each new size costs a run of host code, so there are few.
    """
    variable = [name for name, axis in problem.axes.items() if axis.type == "var"]
    choices = {
        name: named_distributions(problem, name) for name, tensor in problem.inputs.items() if tensor.shape is not None
    }
    if not variable or not all(choices.values()):
        return ()
    numbers = sorted({*(unit for unit in units if unit >= LEAST_UNIT), *USUAL_UNITS})
    spans = [*itertools.pairwise(numbers), (numbers[-1], 2 * numbers[-1])]
    decks = {(name, wide): _in_turns(spans, rng) for name in variable for wide in (False, True)}
    rests = {name: _in_turns(range(RESTS), rng) for name in variable}
    at = [(name, size) for size in compared for name in variable]
    at = rng.sample(at, min(len(at), MOST_EXACT))
    exact = [(*chosen, turn) for chosen in at for turn in (1, 0)]  # on some data a wrong value is right by chance
    wanted = len(exact) + min(BLOCK_CASES + max(3 * len(numbers) // 2, LEAST_TURNS) * len(variable), MOST_BLOCK_CASES)
    dearest = max(cost(problem, w) for w in problem.workloads)
    scalars = [dict(w.scalars) for w in (*problem.workloads, *problem.bench)]
    short = SHORT if len(variable) <= FEW_AXES else SHORT[:6]
    wanted = min(wanted, DEAR_BLOCK_CASES) if dear else wanted
    low = dict.fromkeys(_low_inputs(problem), "mixed_rows")
    found: list[Case] = []
    for attempt in range(40 * wanted):
        index = len(found)
        if index == wanted:
            break
        limit = BLOCK_COST if attempt < 20 * wanted else max(COST_REACH * dearest, LEAST_COST_REACH)
        wide = index % 3 == 2
        width = rng.choice(VECTOR_WIDTHS) if wide else 1
        given = scalars[attempt % len(scalars)]
        long = variable[attempt % len(variable)]
        named, its_size, turn = exact.pop() if exact and not wide else (None, 0, attempt)
        axes = {}
        for name in variable:
            drawn = name == long or rng.random() < (0.5 if len(variable) <= FEW_AXES else 0.3)
            size = _beside(next(decks[name, wide]), rests[name], width, rng) if drawn else rng.choice(short)
            if named is not None:
                size = its_size if name == named else rng.choice(short)
            widened = width if len(variable) <= FEW_AXES or rng.random() < 0.5 else 1
            step = math.lcm(problem.axes[name].multiple_of or 1, widened)
            options = problem.axes[name].choices
            axes[name] = rng.choice(options) if options else max(size // step, 1) * step
        axes = _with_equalities(problem, axes, given)
        if not all(in_domain(problem.axes[name], size) for name, size in axes.items()):
            continue
        if _usable(problem, axes, given, limit):
            inputs = {name: specs[turn % len(specs)] for name, specs in choices.items()}
            deep = bool(low) and named is None and (index % 9 != 8 if wide else index % 3 == 1)
            workload = Workload(axes=axes, scalars=given, inputs={**inputs, **low} if deep else inputs)
            seed = rng.getrandbits(63)
            case = Case(workload=workload, hidden=True, seed=seed, runs=1, optional=deep, perturbed=index % 3 == 0)
            found.append(case)
    return tuple(found)


def _in_turns(values: Sequence[_T], rng: random.Random) -> Iterator[_T]:
    """The values in random order, again and again."""
    while True:
        yield from rng.sample(values, len(values))


def _beside(span: tuple[int, int], rests: Iterator[int], width: int, rng: random.Random) -> int:
    """A size right beside a multiple of a number of the kernel, or anywhere between it and the next one.

    Args:
        rests: remainders of sizes in between, each in its turn: tails of unrolled loops go wrong at one of them.
    """
    unit, following = span
    most = rng.choice((2, 3)) if unit <= LARGEST_MULTIPLIED and rng.random() < 0.15 else 1
    if rng.random() < 0.3:
        size = unit * most + rng.choice((-1, 0, 1))
    else:
        size = unit * most + rng.randint(1, following - unit)
        size = size - size % RESTS + next(rests)
    return size * (width if width > 1 and rng.random() < 0.5 else 1)


def _with_probes(problem: Problem, cases: Sequence[Case], sizes: int) -> list[Case]:
    """The cases, the two dearest affordable ones among the first `sizes` probed."""
    costs = {index: cost(problem, case.workload) for index, case in enumerate(cases[:sizes])}
    affordable = sorted((index for index in costs if costs[index] <= PROBED_COST), key=lambda index: -costs[index])
    return [
        dataclasses.replace(case, probed=True) if index in affordable[:PROBED_CASES] else case
        for index, case in enumerate(cases)
    ]


def _low_inputs(problem: Problem) -> dict[str, str | Distribution]:
    """Floating inputs that may be far below zero, and how they are drawn then.

    Those that some workload leaves open may be as low as can be; where workloads name `large`, a draw of it whose
    values all came out negative is one that they allow.
    """
    low: dict[str, str | Distribution] = {}
    for name, tensor in problem.inputs.items():
        if tensor.shape is None or not is_float(tensor.dtype) or tensor.dtype.startswith("float8"):
            continue
        if any(name not in workload.inputs for workload in problem.workloads):
            low[name] = "low"
        elif "large" in named_distributions(problem, name):
            low[name] = "large_negative"
    return low


def _low_cases(problem: Problem, cases: Sequence[Case], rng: random.Random) -> Iterator[Case]:
    """Data far below zero in every input where that is allowed, at the smallest and another size."""
    low = _low_inputs(problem)
    for case in cases[:2] if low else ():
        workload = dataclasses.replace(case.workload, inputs={**case.workload.inputs, **low})
        yield Case(workload=workload, hidden=True, seed=rng.getrandbits(63), runs=1, optional=True)


def _big_case(problem: Problem, cases: Sequence[Case], rng: random.Random) -> Iterator[Case]:
    """The sizes of `bench`, brought down to what can be run: what gives up beyond some size shows there.

    Without `bench` the dearest workload is doubled instead, unless that would lengthen sums that the problem does not
    tell the length of.
    """
    entry = problem.bench[0] if problem.bench else max(problem.workloads, key=lambda item: cost(problem, item))
    axes = dict(entry.axes)
    if not problem.bench:
        if problem.accumulation is None and _gathers(problem, entry):
            return
        for _ in range(24):
            name = min((item for item in axes if problem.axes[item].type == "var"), key=axes.__getitem__, default=None)
            if name is None or not in_domain(problem.axes[name], 2 * axes[name]):
                break
            larger = {**axes, name: 2 * axes[name]}
            if not satisfies(problem, larger, entry.scalars) or not _affordable(problem, larger, entry.scalars):
                break
            axes = larger
    for _ in range(64):
        if _affordable(problem, axes, entry.scalars):
            break
        shrinking = [name for name in axes if _halved(problem.axes[name], axes[name]) < axes[name]]
        if not shrinking:
            return
        name = max(shrinking, key=lambda item: axes[item])
        axes[name] = _halved(problem.axes[name], axes[name])
    for step in (1, 3, 0):  # odd sizes where the problem allows them
        odd = {
            name: size - step if in_domain(problem.axes[name], size - step) and size > 64 else size
            for name, size in axes.items()
        }
        odd = _with_equalities(problem, odd, entry.scalars)
        usable = satisfies(problem, odd, entry.scalars) and _no_negative(problem, odd, entry.scalars)
        if not usable or not _affordable(problem, odd, entry.scalars):
            continue
        workload = Workload(axes=odd, scalars=dict(entry.scalars), inputs=dict(cases[0].workload.inputs))
        if cost(problem, workload) > max(cost(problem, case.workload) for case in cases):
            yield Case(workload=workload, hidden=True, seed=rng.getrandbits(63), runs=1, optional=True)
        return


def saturating_case(
    problem: Problem, blocks_at: Callable[[Workload], int | None], cases: Sequence[Case], rng: random.Random
) -> Iterator[Case]:
    """Sizes beyond those at which a kernel whose grid stops growing has all its blocks: only there its loops go round.

    Args:
        blocks_at: how many blocks the kernel launches for a workload; None where it cannot be launched.
        cases: hidden cases so far; nothing comes of sizes that cost less than one of them.
    """
    if not problem.bench:
        return
    entry = _named(problem, problem.bench[0])
    axes = dict(entry.axes)

    def blocks(sizes: Mapping[str, int]) -> int | None:
        return blocks_at(dataclasses.replace(entry, axes=dict(sizes)))

    most = blocks(axes)
    saturating: list[dict[str, int]] = []
    for _ in range(64):
        name = max(axes, key=axes.__getitem__)
        axes = {**axes, name: _halved(problem.axes[name], axes[name])}
        if axes in saturating or not satisfies(problem, axes, entry.scalars) or blocks(axes) != most:
            break
        saturating.append(axes)
    usual = saturating[-1 - UNROLLED_TWICE :]  # from where unrolled loops go round to where all blocks are busy
    affordable = [sizes for sizes in usual if _affordable(problem, sizes, entry.scalars, SATURATING_ELEMENTS)]
    if most is None or not affordable:
        return
    axes = affordable[0]
    odd = {name: size - 1 if in_domain(problem.axes[name], size - 1) else size for name, size in axes.items()}
    if satisfies(problem, odd, entry.scalars) and blocks(odd) == most:
        axes = odd
    workload = dataclasses.replace(entry, axes=axes)
    if all(cost(problem, workload) > cost(problem, case.workload) for case in cases):
        seed = rng.getrandbits(63)
        yield Case(workload=workload, hidden=True, seed=seed, runs=1, optional=True, perturbed=False,
                   sanitized=False)  # fmt: skip


def smaller_sizes(problem: Problem, name: str, size: int) -> list[int]:
    """Sizes of one axis below `size`, smallest first: those at which kernels begin to fail."""
    axis = problem.axes[name]
    if axis.type == "const":
        return []
    below = [value for value in _candidates(axis, size) if value < size]
    near_powers = [value for value in below if any((value + step).bit_count() <= 1 for step in (-1, 0, 1))]
    return below if len(below) <= MOST_SMALLER else near_powers[:MOST_SMALLER]


def bench_case(problem: Problem, workload: Workload, rng: random.Random) -> Case:
    """One run at the very sizes of a bench entry, left out where it takes too long."""
    named = _named(problem, workload)
    return Case(workload=named, hidden=True, seed=rng.getrandbits(63), runs=1, optional=True)


def _gathers(problem: Problem, workload: Workload) -> bool:
    """Whether outputs have far fewer elements than inputs: each is made from many."""
    names = names_of(problem, workload.axes, workload.scalars)

    def elements(shapes: Iterable[Sequence[Size] | None]) -> int:
        return sum(math.prod(evaluate(size, names) for size in shape or ()) for shape in shapes)

    given = elements(tensor.shape for tensor in problem.inputs.values())
    return 4 * elements(tensor.shape for tensor in problem.outputs.values()) < given


def _affordable(
    problem: Problem, axes: Mapping[str, int], scalars: Mapping[str, Scalar], elements: int = BIG_ELEMENTS
) -> bool:
    names = names_of(problem, axes, scalars)
    flops = evaluate_float(problem.flops, names) if problem.flops is not None else 0.0
    return _elements(problem, names) <= elements and flops <= BIG_FLOPS


def _halved(axis: Axis, size: int) -> int:
    """The next size to try below `size`; `size` itself where there is none."""
    if axis.type == "const" or size <= 64:
        return size
    if axis.choices is not None:
        return max((choice for choice in axis.choices if choice < size), default=size)
    step = axis.multiple_of or 1
    smaller = size // 2 // step * step
    return smaller if in_domain(axis, smaller) else size


def _in_turn(specs: Sequence[str | Distribution], turn: int, position: int) -> str | Distribution:
    return specs[(turn + position) % len(specs)] if turn else specs[0]


def with_other_distributions(problem: Problem, case: Case) -> Iterator[Case]:
    """The same sizes with each other choice of distributions: for references that are not finite on some data."""
    choices = {name: named_distributions(problem, name) for name in case.workload.inputs}
    for turn in range(max((len(specs) for specs in choices.values()), default=1)):
        inputs = {
            name: _in_turn(specs, turn, position) if specs else case.workload.inputs[name]
            for position, (name, specs) in enumerate(choices.items())
        }
        if inputs != case.workload.inputs:
            yield dataclasses.replace(case, workload=dataclasses.replace(case.workload, inputs=inputs))


def _least_first(problem: Problem, axes: Mapping[str, int], scalars: Mapping[str, Scalar]) -> tuple[bool, float]:
    """Sorts by cost, sizes at which some array is empty last."""
    names = names_of(problem, axes, scalars)
    tensors = (*problem.inputs.values(), *problem.outputs.values())
    empty = any(evaluate(size, names) == 0 for tensor in tensors for size in tensor.shape or ())
    return empty, cost(problem, Workload(axes=axes, scalars=scalars))


def cost(problem: Problem, workload: Workload) -> float:
    """Rough work of one workload: its operations where the problem says them, else its elements."""
    names = names_of(problem, workload.axes, workload.scalars)
    flops = evaluate_float(problem.flops, names) if problem.flops is not None else 0.0
    return max(_elements(problem, names), flops)


def _elements(problem: Problem, names: Mapping[str, Scalar]) -> float:
    elements = 0.0
    for tensor in (*problem.inputs.values(), *problem.outputs.values()):
        count = 1.0
        for size in tensor.shape or ():
            count *= evaluate(size, names)
        elements += count
    return elements


def _hidden_sizes(problem: Problem, rng: random.Random, wanted: int) -> list[tuple[dict[str, int], dict[str, Scalar]]]:
    variable = [name for name, axis in problem.axes.items() if axis.type == "var"]
    reach = {name: _reach(problem, name, single=len(variable) == 1) for name in variable}
    candidates = {name: _candidates(problem.axes[name], reach[name]) for name in variable}
    limit = max(COST_REACH * max(cost(problem, w) for w in problem.workloads), LEAST_COST_REACH)
    seen = {tuple(sorted(w.axes.items())) for w in problem.workloads}
    found: list[tuple[dict[str, int], dict[str, Scalar]]] = []
    scalars = [dict(w.scalars) for w in (*problem.workloads, *problem.bench)]
    if not variable:
        return [(dict(problem.workloads[0].axes), scalars[i % len(scalars)]) for i in range(wanted)]
    for attempt in range(60 * wanted):
        if len(found) == wanted:
            break
        given = scalars[attempt % len(scalars)]
        axes = _with_equalities(problem, _proposal(problem, candidates, len(found), rng, attempt), given)
        key = tuple(sorted(axes.items()))
        if key in seen or not _usable(problem, axes, given, limit):
            continue
        seen.add(key)
        found.append((axes, given))
    return found


def _proposal(
    problem: Problem, candidates: Mapping[str, Sequence[int]], index: int, rng: random.Random, attempt: int
) -> dict[str, int]:
    """Case 0 is the smallest and case 1 a small one; then one axis after the other is long beside short ones; then each
    axis is drawn from its low, middle or high part in turn.
    """
    axes: dict[str, int] = {}
    shift = rng.randrange(len(candidates)) if len(candidates) > LONG_CASES else 0
    longs = [*candidates, *candidates][shift : shift + min(len(candidates), LONG_CASES)]
    long = longs[index - 2] if 2 <= index < 2 + len(longs) and attempt < 40 else None
    workload = problem.workloads[attempt % len(problem.workloads)]
    for position, (name, values) in enumerate(candidates.items()):
        if index == 0 and attempt < 8:
            axes[name] = values[0]
        elif name == long:
            axes[name] = values[max(len(values) - 1 - rng.randrange(1 + attempt // 4), 0)]
        elif index < 2 or long is not None:
            axes[name] = values[rng.randrange(min(4, len(values)))] or values[min(1, len(values) - 1)]
        elif rng.random() < 0.25 and len(candidates) > 1:
            axes[name] = workload.axes[name]
        else:
            part = (index + position * 2 + attempt // 20) % 3
            low, high = len(values) * part // 3, max(len(values) * (part + 1) // 3, len(values) * part // 3 + 1)
            axes[name] = values[min(rng.randrange(low, high), len(values) - 1)]
    return axes


_EQUALITY = re.compile(r"\s*([^=<>!]+?)\s*==\s*([^=<>!]+?)\s*")


def _with_equalities(problem: Problem, axes: dict[str, int], scalars: Mapping[str, Scalar]) -> dict[str, int]:
    """The sizes with every axis that a constraint `axis == formula` ties to the others set to that formula.

    Sizes drawn for each axis alone would almost never satisfy such a constraint.
    """
    for constraint in problem.constraints:
        match = _EQUALITY.fullmatch(constraint) if isinstance(constraint, str) else None
        if match is None or re.search(r"\b(and|or|not|if)\b", constraint):
            continue
        for name, formula in (match.groups(), match.groups()[::-1]):
            if name in axes and name not in names_in(formula):
                try:
                    axes[name] = evaluate(formula, names_of(problem, axes, scalars))
                except InvalidInput:  # a division by zero at these sizes: another draw may do
                    continue
                break
    return axes


def _usable(problem: Problem, axes: Mapping[str, int], scalars: Mapping[str, Scalar], limit: float) -> bool:
    if not satisfies(problem, axes, scalars):
        return False
    try:
        return (
            cost(problem, Workload(axes=axes, scalars=scalars)) <= limit
            and _sum_length(problem, axes, scalars) <= _longest_sum(problem)
            and _no_negative(problem, axes, scalars)
        )
    except InvalidInput:
        return False


def _sum_length(problem: Problem, axes: Mapping[str, int], scalars: Mapping[str, Scalar]) -> int:
    return evaluate(problem.accumulation or 1, names_of(problem, axes, scalars))


def _longest_sum(problem: Problem) -> int:
    """How many terms one output of a hidden case may add up: they follow each other, however few outputs there are."""
    single = sum(axis.type == "var" for axis in problem.axes.values()) == 1
    workloads = max(_sum_length(problem, workload.axes, workload.scalars) for workload in problem.workloads)
    return max(2 * workloads, SINGLE_AXIS_REACH if single else LONG_REACH)


def _no_negative(problem: Problem, axes: Mapping[str, int], scalars: Mapping[str, Scalar]) -> bool:
    names = names_of(problem, axes, scalars)
    tensors = (*problem.inputs.values(), *problem.outputs.values())
    return all(evaluate(size, names) >= 0 for tensor in tensors for size in tensor.shape or ())


def _reach(problem: Problem, name: str, *, single: bool) -> int:
    largest = max(workload.axes[name] for workload in problem.workloads)
    reach = max(2 * largest, SINGLE_AXIS_REACH if single else LONG_REACH)
    domain = problem.axes[name].max
    return min(reach, INT32_MAX if domain is None else domain)


def _candidates(axis: Axis, reach: int) -> list[int]:
    if axis.choices is not None:
        return sorted(value for value in axis.choices if in_domain(axis, value)) or [axis.choices[0]]
    step = axis.multiple_of or 1
    low = max(axis.min if axis.min is not None else 1, 0 if axis.min == 0 else 1)
    values = {value for value in INTERESTING if value <= reach}
    values |= {value * step for value in INTERESTING if value * step <= reach}
    values |= {low, low + 1, low + 2, reach, reach - 1}
    usable = sorted(value for value in values if value >= low and in_domain(axis, value))
    return usable or [max(low, step)]


def fixed_scalars(problem: Problem) -> dict[str, Scalar]:
    """Scalar inputs that have one value wherever the problem names them: a kernel may have it built in."""
    values: dict[str, set[Scalar]] = {}
    for workload in (*problem.workloads, *problem.bench):
        for name, value in workload.scalars.items():
            values.setdefault(name, set()).add(value)
    return {name: next(iter(found)) for name, found in values.items() if len(found) == 1}


def describe_domain(problem: Problem, tried: Sequence[Mapping[str, int]]) -> str:
    """For example `n: 14 sizes in 1..65537`."""
    parts = []
    for name, axis in problem.axes.items():
        if axis.type == "const":
            parts.append(f"{name}: always {axis.value}")
            continue
        sizes = sorted({axes[name] for axes in tried if name in axes})
        if sizes:
            span = f"{sizes[0]}..{sizes[-1]}" if len(sizes) > 1 else str(sizes[0])
            parts.append(f"{name}: {len(sizes)} size{'s' if len(sizes) > 1 else ''} in {span}")
    return "; ".join(parts)
