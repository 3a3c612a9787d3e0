"""Verify every correct kernel at hand with several seeds; each rejection is a false alarm.

    python tools/false_alarms.py [--level L2] [--seeds 3] [--seconds 600] [--out FILE.json] [--only NAME ...]

The kernels: the seed and every strategy of each built-in problem in each dtype it is written for, and the kernels of
`tests/cases` whose label says accepted, in an order that mixes them. `--out` is written after each kernel, and a later
run with the same file goes on where that one stopped: kernels that it holds are not verified again. A run that met a
limit of wall-clock time, as happens on a busy machine, says nothing of the verifier: it is repeated once with generous
limits, and counted as undecided if it meets one again. Exit status 1 if a kernel is not accepted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from optiml.errors import Busy, OptimlError, WorkerTimeout
from optiml.generate.catalogue import strategies, strategy_kernel
from optiml.problems.problem import builtin_names, kernel_from_text, load_builtin
from optiml.records import Level
from optiml.settings import read_settings
from optiml.workbench import Workbench

CASES = Path(__file__).parent.parent / "tests" / "cases"
GENEROUS = {"reference_timeout_s": 300.0, "kernel_timeout_s": 300.0, "compile_timeout_s": 300.0}  # second attempts


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


@dataclass(frozen=True, kw_only=True)
class Found:
    """What one verification said; `outcome` is accepted, alarm or undecided."""

    seed: int
    outcome: str
    summary: str
    warnings: tuple[str, ...]
    repeated: bool = False  # the first attempt met a limit of time


def verify_once(bench: Workbench, item: Correct, level: Level, seed: int) -> Found:
    """One verdict; limits of time are told from what the verifier holds against the kernel."""
    try:
        found = bench.verify(item.kernel, item.problem, dtype=item.dtype, level=level, seed=seed)
    except (Busy, WorkerTimeout) as error:
        return Found(seed=seed, outcome="undecided", summary=str(error), warnings=())
    except OptimlError as error:
        return Found(seed=seed, outcome="alarm", summary=f"error: {error}", warnings=())
    late = found.reason in ("timed_out", "resource_limit") or (
        found.status == "unverified" and "in time" in (found.detail or "")
    )
    outcome = "accepted" if found.status == "accepted" else "undecided" if late else "alarm"
    return Found(seed=seed, outcome=outcome, summary=found.summary, warnings=tuple(found.warnings))


def report(level: str, seeds: int, kernels: Mapping[str, Any], seconds: float, of: int) -> dict[str, Any]:
    """The result file: figures, what was not accepted, what was warned of, and every kernel that was verified."""
    runs = [(name, run) for name, item in kernels.items() for run in item["runs"]]
    told = [{"kernel": name, **run} for name, run in runs if run["outcome"] != "accepted" or run["repeated"]]
    return {
        "level": level, "seeds": seeds, "kernels": len(kernels), "of": of, "runs": len(runs),
        "alarms": sum(run["outcome"] == "alarm" for _, run in runs),
        "undecided": sum(run["outcome"] == "undecided" for _, run in runs),
        "repeated": sum(run["repeated"] for _, run in runs), "seconds": round(seconds, 1),
        "told": told, "warnings": [{"kernel": name, "seed": run["seed"], "warnings": run["warnings"]}
                                   for name, run in runs if run["warnings"]],
        "verified": kernels,
    }  # fmt: skip


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Replace the file at once: a stop leaves the old one or the new one."""
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", default="L2", choices=("L0", "L1", "L2"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=None, help="parts of names")
    parser.add_argument("--seconds", type=float, default=None, help="start no further kernel after so long")
    parser.add_argument("--out", type=Path, default=None, help="written after each kernel; goes on from what it holds")
    options = parser.parse_args()
    level: Level = options.level
    kernels: dict[str, Any] = {}
    before = 0.0
    if options.out is not None and options.out.exists():
        earlier = json.loads(options.out.read_text(encoding="utf-8"))
        if (earlier["level"], earlier["seeds"]) != (level, options.seeds):
            parser.error(f"{options.out} is of level {earlier['level']} and {earlier['seeds']} seeds")
        kernels, before = earlier["verified"], earlier["seconds"]
    chosen = [item for item in correct_kernels()
              if not options.only or any(part in item.name for part in options.only)]  # fmt: skip
    random.Random(0).shuffle(chosen)
    started = time.monotonic()
    result = report(level, options.seeds, kernels, before, len(chosen))
    with ExitStack() as stack:

        def workbench(**limits: float) -> Workbench:
            home = stack.enter_context(tempfile.TemporaryDirectory())
            return stack.enter_context(Workbench(read_settings(home=home, roots=(Path("/"),), **limits)))

        bench, patient = workbench(), workbench(**GENEROUS)
        for item in chosen:
            if options.seconds is not None and time.monotonic() - started > options.seconds:
                break
            if item.name in kernels:
                continue
            begun = time.monotonic()
            found = []
            for seed in range(101, 101 + options.seeds):
                run = verify_once(bench, item, level, seed)
                if run.outcome == "undecided":
                    run = dataclasses.replace(verify_once(patient, item, level, seed), repeated=True)
                found.append(run)
                if run.outcome != "accepted":
                    print(f"{item.name} seed {seed}: {run.outcome}: {run.summary}"[:400], flush=True)
            kernels[item.name] = {
                "seconds": round(time.monotonic() - begun, 2), "runs": [asdict(run) for run in found],
            }  # fmt: skip
            result = report(level, options.seeds, kernels, before + time.monotonic() - started, len(chosen))
            if options.out is not None:
                write_result(options.out, result)
    print(json.dumps({key: value for key, value in result.items() if key not in ("told", "warnings", "verified")}))
    return 1 if result["alarms"] or result["undecided"] else 0


if __name__ == "__main__":
    sys.exit(main())
