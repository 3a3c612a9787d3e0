"""Mutation testing of the verifier: plant faults in correct kernels and see whether each is found.

    python tools/mutate.py [--per-class 1] [--only NAME ...] [--processes 2] [--out benchmarks/mutation.json]

Faults of nine classes are planted in the PTX of the seed and of every strategy of each built-in problem. A mutant that
the verifier rejects at level 1 is killed. One that it accepts is compared with the original, bit for bit, over every
small size in the domain, sizes around multiples of the block and beside the kernel's own numbers, and several kinds of
data, with the engine's checks on: where no bit differs and no check fires it is called equivalent and left out, if
those inputs make the original execute the changed line at all (a trap planted there goes off). That is exhaustive over
those inputs and no proof for all others; where one bit differs the mutant counts as a survivor, even if it is right
within tolerance, and so does one whose line is reached only at larger sizes: those of `bench`, and four times as long.
A line that none of all these inputs reaches is dead code of the compiler and left out as `dead`. `--out` is written
after each kernel, and a later run with the same file and options goes on from there. Exit status 1 if a bar of
`--least-overall` or `--least-class` is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optiml.device.device import Scrutiny
from optiml.device.emulated import EmulatedDevice, emulated_info
from optiml.device.plan import resolve_plan
from optiml.errors import InvalidInput, KernelFault, OptimlError
from optiml.generate.catalogue import strategies, strategy_kernel
from optiml.problems.data import draw
from optiml.problems.kernel_check import check_kernel
from optiml.problems.problem import (
    builtin_names,
    in_domain,
    kernel_from_text,
    load_builtin,
    named_distributions,
    satisfies,
    with_dtype,
)
from optiml.records import Build, Kernel, Problem, Workload
from optiml.toolchain.nvrtc import Compiler
from optiml.verify.constants import LARGEST_STEP, constants_of
from optiml.verify.contents import filled
from optiml.verify.inputs import block_cases, cost, saturating_case
from optiml.verify.reference import References
from optiml.verify.scrutiny import CHECKS
from optiml.verify.verify import Verifier

SMALL = (0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 32, 33)  # of each axis, in every combination
FEW_SMALL = (0, 1, 2, 3, 5, 8)  # where there are many axes
MOST_SIZES = 160
MOST_COST = 3e6
MOST_COST_OF_USE = 2e8  # of the sizes at which a line may be reached that no proving size reaches
Edit = Callable[[str, str], Iterator[str]]  # a line of PTX and the whole text -> what may stand in the line's place


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault planted in one line of a kernel's PTX."""

    kind: str
    line: int  # of the PTX, from 0
    before: str
    after: str
    ptx: str


# --- the faults ------------------------------------------------------------------------------------------------------
def _boundary(line: str, _: str) -> Iterator[str]:
    """A comparison that guards an access or ends a loop is off by one."""
    swap = {"ge": "gt", "gt": "ge", "lt": "le", "le": "lt"}
    match = re.match(r"(\s*setp\.)(ge|gt|lt|le)(\.[su](?:32|64)\s.*)", line)
    if match:
        yield match[1] + swap[match[2]] + match[3]


def _index(line: str, _: str) -> Iterator[str]:
    """An address is one element off, or a product of an index has the wrong factor."""
    match = re.match(r"(.*\b(?:ld|st)\.global\S*\.([fub])(16|32|64)\s[^\[]*\[%rd\d+)(?:\+(-?\d+))?(\].*)", line)
    if match:
        offset = int(match[4] or 0) + int(match[3]) // 8
        yield f"{match[1]}+{offset}{match[5]}"
    match = re.match(r"(\s*mad\.lo\.s32\s+%r\d+, )(%r\d+), (%r\d+), (%r\d+);", line)
    if match:
        yield f"{match[1]}{match[2]}, {match[4]}, {match[3]};"


def _sync(line: str, _: str) -> Iterator[str]:
    """A barrier is missing."""
    if re.match(r"\s*(bar\.sync|barrier\.sync)\b", line):
        yield ""


def _precision(line: str, _: str) -> Iterator[str]:
    """A result passes through half precision, or is cut to 8 bits of fraction."""
    match = re.match(r"(\s*(?:@!?%p\d+ )?)(st\.global(?:\.\w+)*\.f32\s+\[[^\]]*\], )(%f\d+);", line)
    if match:
        narrow = f"{{ .reg .b16 %cut; cvt.rn.f16.f32 %cut, {match[3]}; cvt.f32.f16 {match[3]}, %cut; }}"
        yield f"{narrow}\n{line}"


def _initialisation(line: str, ptx: str) -> Iterator[str]:
    """A sum starts at 1, a count or an index one too late.

    The compiler also writes a floating zero through an integer register, which the 1 of an integer would change by no
    more than the smallest subnormal: where such a register is stored, the one planted is that of float32.
    """
    match = re.match(r"(\s*mov\.(f32|f64|u32|b32|s32)\s+(%(?:f|fd|r)\d+), )(0f00000000|0d0000000000000000|0);", line)
    if match:
        stored = re.search(rf"\bst\.\S*[bu]32\s+\[[^\]]*\], {match[3]};", ptx) is not None
        integer = "0x3F800000" if stored and ".f32" in ptx else "1"
        yield f"{match[1]}{ {'f32': '0f3F800000', 'f64': '0d3FF0000000000000'}.get(match[2], integer) };"


def _reduction(line: str, _: str) -> Iterator[str]:
    """A step of a reduction pairs the wrong partners."""
    match = re.match(r"(\s*shfl\.sync\.(?:bfly|down)\.b32\s+%\w+(?:\|%p\d+)?, %\w+, )(16|8|4|2)(, .*)", line)
    if match:
        yield f"{match[1]}{int(match[2]) // 2}{match[3]}"
    match = re.match(r"(.*\bld\.shared\S*\s[^\[]*\[%rd?\d+\+)(\d+)(\].*)", line)
    if match and int(match[2]) >= 8:
        yield f"{match[1]}{int(match[2]) // 2}{match[3]}"


def _identity(line: str, _: str) -> Iterator[str]:
    """A maximum starts at a number instead of minus infinity, or a product at zero."""
    for identity in ("0fFF800000", "0fFF7FFFFF", "0dFFF0000000000000"):
        if identity in line:
            low = "0fC61C4000" if identity.startswith("0f") else "0dC0C3880000000000"  # -1e4
            yield line.replace(identity, low)
            yield line.replace(identity, "0f00000000" if identity.startswith("0f") else "0d0000000000000000")


def _tail(line: str, _: str) -> Iterator[str]:
    """The last elements of a range, or what is left after the unrolled part, are dropped."""
    match = re.match(r"(\s*and\.b32\s+%r\d+, )%r\d+, (3|7|1);", line)
    if match:
        yield re.sub(r"and\.b32(\s+)(%r\d+), .*", r"mov.u32\1\2, 0;", line)
    match = re.match(r"(\s*setp\.(?:ge|lt)\.s32\s+%p\d+, %r\d+, )(%r\d+);", line)
    if match:
        yield f"{{ .reg .s32 %end; add.s32 %end, {match[2]}, -1;\n{match[1]}%end; }}"


def _stale(line: str, _: str) -> Iterator[str]:
    """A value is read from where an earlier one lies."""
    match = re.match(r"(.*\bld\.(?:shared|global)\S*\s[^\[]*\[%rd?\d+)\+(-?\d+)(\].*)", line)
    if match and int(match[2]) != 0:
        yield match[1] + match[3]


CLASSES: dict[str, Edit] = {
    "boundary": _boundary,
    "index": _index,
    "sync": _sync,
    "precision": _precision,
    "initialisation": _initialisation,
    "reduction": _reduction,
    "identity": _identity,
    "dropped_tail": _tail,
    "stale_read": _stale,
}


def mutants(ptx: str, kind: str) -> list[Mutant]:
    """Every mutant of one class."""
    lines = ptx.split("\n")
    found = []
    for number, line in enumerate(lines):
        for after in CLASSES[kind](line, ptx):
            text = "\n".join([*lines[:number], after, *lines[number + 1 :]])
            found.append(Mutant(kind=kind, line=number, before=line.strip(), after=after.strip(), ptx=text))
    return found


# --- judging one mutant ----------------------------------------------------------------------------------------------
class Judge:
    """Kills mutants, or shows them equivalent."""

    def __init__(self) -> None:
        self.compiler = Compiler()
        self.device = EmulatedDevice(emulated_info("emulator"))
        self.verifier = Verifier(self.compiler, self.device, References(), kernel_timeout_s=5.0)

    def judge(self, kernel: Kernel, problem: Problem, build: Build, mutant: Mutant, seed: int) -> dict[str, Any]:
        """`killed` with the reason, `equivalent`, `survived`, `dead`, or `stillborn` where it cannot be run."""
        changed = dataclasses.replace(build, ptx=mutant.ptx)
        try:
            verdict = self.verifier.verify(kernel, problem, level="L1", seed=seed, build=changed, explain=False)
        except OptimlError as error:
            return {"result": "stillborn", "reason": str(error)[:160]}
        if verdict.status == "rejected":
            return {"result": "killed", "reason": verdict.reason}
        if verdict.status == "unverified":
            return {"result": "stillborn", "reason": (verdict.detail or "")[:160]}
        difference = self.difference(kernel, problem, build, changed)
        if difference is not None:
            return {"result": "survived", "reason": difference}
        if self.reaches(kernel, problem, build, mutant.line, self.proving(kernel, problem, build)):
            return {"result": "equivalent", "reason": None}
        if self.reaches(kernel, problem, build, mutant.line, sizes_of_use(problem)):
            return {"result": "survived", "reason": "reached only at sizes like those of bench"}
        return {"result": "dead", "reason": None}

    def proving(self, kernel: Kernel, problem: Problem, build: Build) -> Iterator[Workload]:
        """The inputs at which a mutant is compared with the original."""
        yield from proving_workloads(kernel, problem, build, self.device.info)
        blocks_at = self.verifier.blocks_at(kernel, problem, build)
        for case in saturating_case(problem, blocks_at, (), random.Random(0)):
            yield case.workload

    def reaches(self, kernel: Kernel, problem: Problem, build: Build, line: int, workloads: Iterator[Workload]) -> bool:
        """Whether one of the inputs makes the original execute a line of its PTX."""
        lines = build.ptx.split("\n")
        trapped = dataclasses.replace(build, ptx="\n".join([*lines[:line], "\ttrap;", *lines[line:]]))
        for number, workload in enumerate(workloads):
            try:
                plan = resolve_plan(kernel, build, problem, workload, self.device.info)
                contents = filled(plan, draw(problem, workload, seed=number), random.Random(number), quiet_nan=True)
                self.device.run(trapped, plan, (contents,), timeout_s=60.0)
            except InvalidInput:
                continue
            except KernelFault as error:
                if error.fault.kind == "trap":
                    return True
        return False

    def difference(self, kernel: Kernel, problem: Problem, build: Build, changed: Build) -> str | None:
        """Where the mutant differs from the original; None if it does nowhere that was looked."""
        for number, workload in enumerate(self.proving(kernel, problem, build)):
            plan = resolve_plan(kernel, build, problem, workload, self.device.info)
            contents = filled(plan, draw(problem, workload, seed=number), random.Random(number), quiet_nan=True)
            try:
                right = self.device.run(build, plan, (contents,), timeout_s=5.0).runs[0]
                other = self.device.run(
                    changed, plan, (contents,), timeout_s=25.0, scrutiny=Scrutiny(checks=CHECKS)
                ).runs[0]
            except OptimlError as error:
                return f"{dict(workload.axes)}: {error}"[:200]
            for name in problem.outputs:
                if right[name].tobytes() != other[name].tobytes():
                    return f"{dict(workload.axes)}, {workload.inputs}: {name} differs"[:200]
        return None


def sizes_of_use(problem: Problem) -> Iterator[Workload]:
    """The sizes of `bench`, with one axis four times as long, and with one as short as can be."""
    axes = {name: axis for name, axis in problem.axes.items() if axis.type == "var"}
    for entry in problem.bench:
        for name, axis in axes.items():
            for size in (entry.axes[name], 4 * entry.axes[name], max(axis.min if axis.min is not None else 1, 0)):
                sizes = {**entry.axes, name: size}
                workload = dataclasses.replace(entry, axes=sizes)
                allowed = in_domain(axis, size) and satisfies(problem, sizes, entry.scalars)
                if allowed and cost(problem, workload) <= MOST_COST_OF_USE:
                    yield workload


def proving_workloads(kernel: Kernel, problem: Problem, build: Build, info: Any) -> Iterator[Workload]:
    """Every combination of small sizes, one axis after the other around multiples of the block, and sizes beside the
    kernel's own numbers as hidden cases have them.
    """
    axes = {name: axis for name, axis in problem.axes.items() if axis.type == "var"}
    small = SMALL if len(axes) <= 2 else FEW_SMALL
    base = problem.workloads[0]
    sizes = [dict(zip(axes, values, strict=True)) for values in itertools.product(small, repeat=len(axes))]
    random.Random(0).shuffle(sizes)
    sizes = sizes[:MOST_SIZES]
    plan = resolve_plan(kernel, build, problem, base, info)
    threads = max((launch.block[0] * launch.block[1] * launch.block[2] for launch in plan.launches), default=1)
    for name in axes:
        for multiple in (1, 2, 4, 9):
            sizes += [{**{other: 3 for other in axes}, name: threads * multiple + step} for step in (-1, 0, 1)]
    specs = {name: named_distributions(problem, name) for name, item in problem.inputs.items() if item.shape}
    for number, chosen in enumerate([*[dict(item.axes) for item in problem.workloads], *sizes]):
        item = problem.workloads[number % len(problem.workloads)]
        full = {**item.axes, **chosen}
        if not all(in_domain(problem.axes[name], size) for name, size in full.items()):
            continue
        inputs = {name: given[number % len(given)] if given else item.inputs[name] for name, given in specs.items()}
        workload = Workload(axes=full, scalars=dict(item.scalars), inputs=inputs)
        try:
            usable = satisfies(problem, full, item.scalars) and cost(problem, workload) <= MOST_COST
            resolve_plan(kernel, build, problem, workload, info)
            draw(problem, workload, seed=0)
        except (InvalidInput, OptimlError):
            continue
        if usable:
            yield workload
    constants = constants_of(build.ptx)
    units = [value for value in (threads, *constants.compared, *constants.stepped) if 2 <= value <= LARGEST_STEP]
    for case in block_cases(problem, units, random.Random(0), compared=constants.compared):
        yield case.workload


# --- all kernels -----------------------------------------------------------------------------------------------------
def subjects() -> list[tuple[str, str, str]]:
    """(problem, strategy or `seed`, dtype) of every built-in correct kernel, in its first dtype."""
    found = []
    for problem in builtin_names():
        found.append((problem, "seed", load_builtin(problem).dtypes[0]))
        found += [(problem, item.name, item.dtypes[0]) for item in strategies(problem) if not item.requires]
    return found


_JUDGE: list[Judge] = []


def mutate_one(task: tuple[str, str, str, int, int]) -> list[dict[str, Any]]:
    """Judge the mutants of one kernel."""
    problem_name, strategy, dtype, per_class, seed = task
    if not _JUDGE:
        _JUDGE.append(Judge())
    judge = _JUDGE[0]
    builtin = load_builtin(problem_name)
    problem = with_dtype(builtin, dtype)
    if strategy == "seed":
        kernel = kernel_from_text(builtin.seed_text, dtype=dtype)
    else:
        kernel = strategy_kernel(next(s for s in strategies(problem_name) if s.name == strategy), dtype)
    kernel = check_kernel(kernel, problem)
    build = judge.compiler.compile(kernel, judge.device.info.arch)
    assert isinstance(build, Build)
    rows = []
    for kind in CLASSES:
        rng = random.Random(f"{seed}/{problem_name}/{strategy}/{kind}")
        candidates = mutants(build.ptx, kind)
        rng.shuffle(candidates)
        counted = 0
        for mutant in candidates[: 3 * per_class]:
            if counted == per_class:
                break
            started = time.monotonic()
            found = judge.judge(kernel, problem, build, mutant, seed)
            counted += found["result"] in ("killed", "survived")
            rows.append({
                "kernel": f"{problem_name}/{strategy}", "class": kind, "line": mutant.line, "before": mutant.before,
                "after": mutant.after, **found, "seconds": round(time.monotonic() - started, 2),
            })  # fmt: skip
    return rows


def report(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Kill rates by class and over all."""
    table = {}
    for kind in [*CLASSES, "all"]:
        those = [row for row in rows if kind in ("all", row["class"])]
        count = {name: sum(row["result"] == name for row in those)
                 for name in ("killed", "survived", "equivalent", "dead", "stillborn")}  # fmt: skip
        judged = count["killed"] + count["survived"]
        table[kind] = {**count, "kill_rate": round(count["killed"] / judged, 4) if judged else None}
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-class", type=int, default=1, help="mutants of each class of a kernel that are judged")
    parser.add_argument("--only", nargs="*", default=None, help="parts of names")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=None, help="start no further kernel after so long")
    parser.add_argument("--least-overall", type=float, default=0.97)
    parser.add_argument("--least-class", type=float, default=0.90)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    chosen = [item for item in subjects()
              if not options.only or any(part in "/".join(item) for part in options.only)]  # fmt: skip
    random.Random(options.seed).shuffle(chosen)
    started = time.monotonic()
    asked = {"per_class": options.per_class, "seed": options.seed}
    rows: list[dict[str, Any]] = []
    done: list[str] = []
    before = 0.0
    if options.out is not None and options.out.exists():
        earlier = json.loads(options.out.read_text(encoding="utf-8"))
        if {name: earlier[name] for name in asked} != asked:
            parser.error(f"{options.out} was written with other options")
        rows, done, before = earlier["rows"], earlier["done"], earlier["seconds"]
    result: dict[str, Any] = {"classes": report(rows)}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=options.processes, mp_context=context) as pool:
        tasks = [(*item, options.per_class, options.seed) for item in chosen if "/".join(item) not in done]
        for start in range(0, len(tasks), options.processes):
            if options.seconds is not None and time.monotonic() - started > options.seconds:
                break
            batch = tasks[start : start + options.processes]
            for task, found in zip(batch, pool.map(mutate_one, batch), strict=True):
                done.append("/".join(task[:3]))
                rows += found
                for row in found:
                    if row["result"] == "survived":
                        print(json.dumps(row), flush=True)
            seconds = round(before + time.monotonic() - started, 1)
            result = {"kernels": len(done), "of": len(chosen), **asked, "seconds": seconds, "classes": report(rows)}
            if options.out is not None:
                draft = options.out.with_name(options.out.name + ".part")
                draft.write_text(json.dumps({**result, "done": done, "rows": rows}, indent=1) + "\n", encoding="utf-8")
                draft.replace(options.out)
    print(json.dumps(result, indent=2))
    rates = {kind: item["kill_rate"] for kind, item in result["classes"].items() if item["kill_rate"] is not None}
    below = [kind for kind, rate in rates.items()
             if rate < (options.least_overall if kind == "all" else options.least_class)]  # fmt: skip
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main())
