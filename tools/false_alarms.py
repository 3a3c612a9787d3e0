"""Verify every correct kernel at hand with several seeds; each rejection is a false alarm.

    python tools/false_alarms.py [--level L2] [--seeds 3] [--out FILE.json] [--only NAME ...]

The kernels: the seed and every strategy of each built-in problem in each dtype it is written for, and the kernels of
`tests/cases` whose label says accepted. Exit status 1 if one of them is not accepted.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optiml.errors import OptimlError
from optiml.generate.catalogue import strategies, strategy_kernel
from optiml.problems.problem import builtin_names, kernel_from_text, load_builtin
from optiml.records import Level
from optiml.settings import read_settings
from optiml.workbench import Workbench

CASES = Path(__file__).parent.parent / "tests" / "cases"


@dataclass(frozen=True, kw_only=True)
class Correct:
    """A kernel that must be accepted; `problem` and `dtype` as `Workbench.verify` takes them."""

    name: str
    kernel: Any
    problem: Any
    dtype: str | None


def correct_kernels() -> Iterator[Correct]:
    """The seeds, the catalogue and the honest labelled cases that need no launcher."""
    for problem in builtin_names():
        builtin = load_builtin(problem)
        for dtype in builtin.dtypes:
            seed = kernel_from_text(builtin.seed_text, dtype=dtype)
            yield Correct(name=f"{problem}/seed/{dtype}", kernel=seed, problem=problem, dtype=dtype)
            for strategy in strategies(problem):
                if dtype in strategy.dtypes and not strategy.requires:
                    kernel = strategy_kernel(strategy, dtype)
                    yield Correct(
                        name=f"{problem}/{strategy.name}/{dtype}", kernel=kernel, problem=problem, dtype=dtype
                    )
    labels = json.loads((CASES / "labels.json").read_text(encoding="utf-8"))["cases"]
    for name, label in sorted(labels.items()):
        if label["status"] == "accepted" and not label.get("needs"):
            case = json.loads((CASES / "kernels" / f"{name}.json").read_text(encoding="utf-8"))
            found = json.loads((CASES / "kernels" / case["problem"]).read_text(encoding="utf-8"))
            yield Correct(name=f"cases/{name}", kernel=case["kernel"], problem=found, dtype=None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", default="L2", choices=("L0", "L1", "L2"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=None, help="parts of names")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    level: Level = options.level
    alarms: list[dict[str, Any]] = []
    warned: list[dict[str, Any]] = []
    kernels = runs = 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as home, Workbench(read_settings(home=home, roots=(Path("/"),))) as bench:
        for item in correct_kernels():
            if options.only and not any(part in item.name for part in options.only):
                continue
            kernels += 1
            for seed in range(options.seeds):
                runs += 1
                try:
                    found = bench.verify(item.kernel, item.problem, dtype=item.dtype, level=level, seed=101 + seed)
                    status, said, warnings = found.status, found.summary, found.warnings
                except OptimlError as error:
                    status, said, warnings = "error", str(error), ()
                if status != "accepted":
                    alarms.append({"kernel": item.name, "seed": 101 + seed, "status": status, "summary": said})
                    print(f"{item.name} seed {101 + seed}: {status}: {said}"[:400], flush=True)
                if warnings:
                    warned.append({"kernel": item.name, "seed": 101 + seed, "warnings": list(warnings)})
    seconds = round(time.monotonic() - started, 1)
    summary = {"level": level, "kernels": kernels, "runs": runs, "alarms": len(alarms), "seconds": seconds}
    print(json.dumps(summary))
    if options.out is not None:
        options.out.write_text(
            json.dumps({**summary, "alarms_found": alarms, "warnings": warned}, indent=2) + "\n", encoding="utf-8"
        )
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
