"""How requests are read: how often as a problem that they do not ask for, and how often right.

    python tools/bench_intents.py FILE.tsv... [-o benchmarks/intents.json]

A line of a file is `kind, text, problem, sizes, element type` with tabs between; `-` is the problem of a request that
no built-in one answers, and the right answer to it is a refusal. A line of two columns is such a request. Everything
else is right where problem, sizes and element type are. Intervals: 95 %, Wilson.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optiml.generate.intent import intended_problem, read_intent
from optiml.problems.problem import main_dtype

Z_95 = 1.959964


def outcome(text: str, name: str, sizes: str, dtype: str) -> str:
    """`right`, `refused` (of a request that could be answered), `wrong problem`, `wrong sizes` or `wrong type`."""
    intention = read_intent(text)
    if intention.problem_name is None:
        return "right" if name == "-" else "refused"
    if intention.problem_name != name:
        return "wrong problem"
    problem = intended_problem(intention)
    asked = {axis: int(size) for axis, size in (item.split("=") for item in sizes.split(",") if item)}
    if not asked.items() <= problem.bench[0].axes.items():
        return "wrong sizes"
    return "right" if dtype in ("-", main_dtype(problem)) else "wrong type"


def wilson(count: int, total: int) -> list[float]:
    """The interval of a share."""
    share, square = count / total, Z_95**2
    middle = share + square / (2 * total)
    half = Z_95 * math.sqrt(share * (1 - share) / total + square / (4 * total**2))
    return [round(abs(middle + sign * half) / (1 + square / total), 4) for sign in (-1, 1)]


def measured(lines: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Counts over lines of the same sort, and what was not right."""
    found = [(line[0], line[1], outcome(*line[1:5])) for line in lines]
    counts = Counter(result for _, _, result in found)
    wrong = sum(count for result, count in counts.items() if result.startswith("wrong"))
    return {
        "requests": len(found),
        "right": round(counts["right"] / len(found), 4),
        "right_ci95": wilson(counts["right"], len(found)),
        "wrong": round(wrong / len(found), 4),
        "wrong_ci95": wilson(wrong, len(found)),
        "outcomes": dict(sorted(counts.items())),
        "not_right": [
            {"kind": kind, "text": text, "outcome": result} for kind, text, result in found if result != "right"
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    result = {}
    for path in options.files:
        text = path.read_text(encoding="utf-8").splitlines()
        lines = [[*line.split("\t"), "-", "", "-"][:5] for line in text if line and not line.startswith("#")]
        lines = [[kind, asked, name, sizes, dtype or "-"] for kind, asked, name, sizes, dtype in lines]
        sorts = {"no_built_in_problem": [line for line in lines if line[2] == "-"]}
        sorts["built_in_problem"] = [line for line in lines if line[2] != "-"]
        result[path.name] = {name: measured(some) for name, some in sorts.items() if some}
        for name, figures in result[path.name].items():
            told = {key: value for key, value in figures.items() if key != "not_right"}
            print(f"{path.name} {name}: {told}")
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
