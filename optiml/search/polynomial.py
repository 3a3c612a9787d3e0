"""Integer polynomials over names: how index expressions are compared, and their strides read off.

A polynomial is a mapping from a monomial (a sorted tuple of atoms) to its integer coefficient. An atom is a name
("C", "threadIdx.x") or the canonical text of a subexpression that is not polynomial ("(i % C)").
"""

from __future__ import annotations

import re
from collections.abc import Mapping

Monomial = tuple[str, ...]
Polynomial = Mapping[Monomial, int]

_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[xyz])?")
ZERO: Polynomial = {}


def constant(value: int) -> Polynomial:
    """The polynomial of one number."""
    return {(): value} if value else {}


def atom(name: str) -> Polynomial:
    """The polynomial of one name or opaque subexpression."""
    return {(name,): 1}


def add(left: Polynomial, right: Polynomial, *, sign: int = 1) -> Polynomial:
    """`left + sign * right`."""
    total = dict(left)
    for monomial, coefficient in right.items():
        total[monomial] = total.get(monomial, 0) + sign * coefficient
    return {monomial: coefficient for monomial, coefficient in total.items() if coefficient}


def multiply(left: Polynomial, right: Polynomial) -> Polynomial:
    """`left * right`."""
    total: dict[Monomial, int] = {}
    for a, p in left.items():
        for b, q in right.items():
            monomial = tuple(sorted(a + b))
            total[monomial] = total.get(monomial, 0) + p * q
    return {monomial: coefficient for monomial, coefficient in total.items() if coefficient}


def as_constant(polynomial: Polynomial) -> int | None:
    """Its value if it is a number, else None."""
    if not polynomial:
        return 0
    return polynomial.get(()) if set(polynomial) == {()} else None


def canonical(polynomial: Polynomial) -> str:
    """One text for one polynomial."""
    terms = [
        "*".join([*([] if coefficient == 1 and monomial else [str(coefficient)]), *monomial])
        for monomial, coefficient in sorted(polynomial.items())
    ]
    return "(" + " + ".join(terms or ["0"]) + ")"


def names(polynomial: Polynomial) -> frozenset[str]:
    """Every name in it, those inside opaque atoms too."""
    return frozenset(name for monomial in polynomial for item in monomial for name in _NAME.findall(item))


def coefficient(polynomial: Polynomial, name: str) -> Polynomial | None:
    """The factor of `name` in a polynomial that is linear in it.

    None if `name` also stands inside an opaque atom or in a power.
    """
    factor: dict[Monomial, int] = {}
    for monomial, value in polynomial.items():
        hits = [item for item in monomial if item == name]
        if any(item != name and name in _NAME.findall(item) for item in monomial) or len(hits) > 1:
            return None
        if hits:
            factor[tuple(item for item in monomial if item != name)] = value
    return factor
