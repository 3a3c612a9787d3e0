"""Single elements of the inputs changed: the outputs that depend on them have to move as the reference's do.

A kernel that leaves out part of its work can hide among values that average out; it cannot hide from a change of one
element that it never read.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optiml.problems.data import is_float, to_float64
from optiml.records import Distribution, Problem, Tolerance, Workload

Array = NDArray[Any]
MOST_PROBES = 8
PROBES_OF_AN_INPUT = 2
NEAR_THE_END = 8  # one probe of each input lies among its last so many elements
_ORDERED = ("csr_indptr", "sorted_unique")  # one element cannot be changed alone


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Inputs of which one element differs; `index` into that array, values in float64 or integers."""

    name: str
    index: tuple[int, ...]
    before: float | int
    after: float | int
    inputs: Mapping[str, Array]


def probes(problem: Problem, workload: Workload, inputs: Mapping[str, Array], rng: random.Random) -> list[Probe]:
    """A few changes; each new value is that of another element, so that the data stay what the problem promises."""
    found: list[Probe] = []
    for turn in range(PROBES_OF_AN_INPUT):
        for name, array in inputs.items():
            if array.size < 2 or not _changeable(workload.inputs.get(name)):
                continue
            place = array.size - 1 - rng.randrange(min(array.size, NEAR_THE_END)) if turn else rng.randrange(array.size)
            dtype = problem.inputs[name].dtype
            flat = array.reshape(-1)
            values = to_float64(flat, dtype) if is_float(dtype) else flat.astype(np.float64)
            distance = np.where(np.isfinite(values), np.abs(values - values[place]), 0.0)
            other = int(np.argmax(distance)) if is_float(dtype) else _another(distance, rng)
            if not distance[other] > 0:
                continue
            changed = flat.copy()
            changed[place] = flat[other]
            found.append(
                Probe(
                    name=name,
                    index=tuple(int(i) for i in np.unravel_index(place, array.shape)),
                    before=values[place].item(),
                    after=values[other].item(),
                    inputs={**inputs, name: changed.reshape(array.shape)},
                )
            )
    return found[:MOST_PROBES]


def _changeable(spec: str | Distribution | None) -> bool:
    if isinstance(spec, Distribution):
        return spec.values is None and spec.npy is None and spec.distribution not in _ORDERED
    return spec not in _ORDERED


def _another(distance: Array, rng: random.Random) -> int:
    others = np.flatnonzero(distance)
    return int(others[rng.randrange(len(others))]) if len(others) else 0


def unmoved(before: Array, after: Array, expected: Array, changed: Array, floor: Tolerance) -> Array:
    """Mask of outputs that did not move as they had to.

    Args:
        before, after: the kernel's output in float64, without and with the change.
        expected, changed: the reference's.
        floor: what rounding alone may do to one value.
    """
    with np.errstate(all="ignore"):
        noise = floor.atol + floor.rtol * np.maximum(np.abs(expected), np.abs(changed))
        wanted, seen = changed - expected, after - before
        wrong: Array = (np.abs(wanted) > noise) & ~(np.abs(seen - wanted) <= 0.5 * np.abs(wanted) + 0.5 * noise)
        wrong &= np.isfinite(wanted)
    return wrong
