"""Random programs of nested branches and loops, run by the interpreter and, thread by thread, in plain Python."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
from launching import launch, snippet

from optiml.ptx import parse

U32 = np.uint32
MASK = 0xFFFFFFFF
VARIABLES = 5

# A program is a list of statements:
#   ("set", target, operation, left, right)       operands: a variable number or ("literal", value)
#   ("if", variable, literal, then, otherwise)     taken if (variable & 7) < literal
#   ("loop", variable, body)                       (variable & 3) + 1 times, with the value on entry
Statement = tuple[Any, ...]


def random_program(rng: np.random.Generator, depth: int) -> list[Statement]:
    statements: list[Statement] = []
    for _ in range(rng.integers(1, 4)):
        choice = rng.random()
        if depth and choice < 0.35:
            then, otherwise = random_program(rng, depth - 1), random_program(rng, depth - 1)
            statements.append(("if", int(rng.integers(VARIABLES)), int(rng.integers(0, 9)), then, otherwise))
        elif depth and choice < 0.6:
            statements.append(("loop", int(rng.integers(VARIABLES)), random_program(rng, depth - 1)))
        else:
            right: Any = int(rng.integers(VARIABLES))
            if rng.random() < 0.5:
                right = ("literal", int(rng.integers(1 << 16)))
            operation = ["add", "mul", "xor"][rng.integers(3)]
            target, left = int(rng.integers(VARIABLES)), int(rng.integers(VARIABLES))
            statements.append(("set", target, operation, left, right))
    return statements


def written(program: list[Statement], rng: np.random.Generator) -> str:
    """PTX of a program; some branches go to code placed far away, so that places are not in order of time."""
    numbers: Iterator[int] = count()
    far: list[str] = []

    def operand(value: Any) -> str:
        return str(value[1]) if isinstance(value, tuple) else f"%v{value}"

    def block(statements: list[Statement]) -> list[str]:
        lines: list[str] = []
        for statement in statements:
            n = next(numbers)
            if statement[0] == "set":
                _, target, operation, left, right = statement
                opcode = {"add": "add.u32", "mul": "mul.lo.u32", "xor": "xor.b32"}[operation]
                lines.append(f"{opcode} %v{target}, %v{left}, {operand(right)};")
            elif statement[0] == "if":
                _, variable, literal, then, otherwise = statement
                lines.append(f"and.b32 %t, %v{variable}, 7; setp.lt.u32 %q, %t, {literal}; @%q bra $then{n};")
                lines += [*block(otherwise), f"bra $end{n};"]
                body = [f"$then{n}:", *block(then)]
                if rng.random() < 0.4:
                    far.append("\n".join([*body, f"bra $end{n};"]))
                else:
                    lines += body
                lines.append(f"$end{n}:")
            else:
                _, variable, body = statement
                lines += [f".reg .b32 %i{n}; and.b32 %i{n}, %v{variable}, 3; $loop{n}:", *block(body)]
                lines.append(f"add.u32 %i{n}, %i{n}, -1; setp.ge.s32 %q, %i{n}, 0; @%q bra $loop{n};")
        return lines

    lines = [f".reg .b32 %v<{VARIABLES}>; .reg .b32 %t; .reg .pred %q;"]
    lines += [f"mad.lo.u32 %v{i}, %x0, {7 * i + 1}, {i * i};" for i in range(VARIABLES)]
    lines += block(program)
    lines += ["xor.b32 %y, %v0, %v1;"] + [f"mad.lo.u32 %y, %y, 31, %v{i};" for i in range(2, VARIABLES)]
    return "\n".join([*lines, "bra $store;", *far, "$store:"])


def run_one(program: list[Statement], x: int) -> int:
    v = [(x * (7 * i + 1) + i * i) & MASK for i in range(VARIABLES)]

    def value(operand: Any) -> int:
        return operand[1] if isinstance(operand, tuple) else v[operand]

    def execute(statements: list[Statement]) -> None:
        for statement in statements:
            if statement[0] == "set":
                _, target, operation, left, right = statement
                a, b = value(left), value(right)
                v[target] = {"add": a + b, "mul": a * b, "xor": a ^ b}[operation] & MASK
            elif statement[0] == "if":
                execute(statement[3] if (v[statement[1]] & 7) < statement[2] else statement[4])
            else:
                for _ in range((v[statement[1]] & 3) + 1):
                    execute(statement[2])

    execute(program)
    y = v[0] ^ v[1]
    for i in range(2, VARIABLES):
        y = (y * 31 + v[i]) & MASK
    return y


@pytest.mark.parametrize("seed", range(30))
def test_random_programs_do_what_each_thread_would_do_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    program = random_program(rng, 3)
    x = rng.integers(0, 2**32, 96).astype(U32)
    module = parse(snippet(written(program, rng), [x], U32))
    want = np.array([run_one(program, value) for value in x.tolist()], U32)
    for grid, block in ((1, 96), (3, 32), (96, 1)):
        plain = launch(module, "k", grid, block, x, np.zeros(96, U32))
        assert np.array_equal(plain.arrays[1], want), (grid, block)
    counted = launch(module, "k", 3, 32, x, np.zeros(96, U32), count=True)
    assert np.array_equal(counted.arrays[1], want)
    alone = [launch(module, "k", 3, 32, x, np.zeros(96, U32), count=True, blocks=[b]).counters for b in range(3)]
    # how blocks are batched must not show in any count
    assert sum(c.warp_instructions for c in alone) == counted.counters.warp_instructions
    assert sum(c.divergent_branches for c in alone) == counted.counters.divergent_branches
