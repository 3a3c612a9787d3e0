"""Fit the time model's constants to times measured on a GPU, and say how well whole held-out problems are predicted.

    python tools/calibrate.py [--times FILE] [--json FILE] [--no-fit]

Kernels: the seed and the strategies of every built-in problem with several values of their tunables, at the bench
sizes. Times come from the GPU, or from FILE where an earlier run left them. Problems are dealt into folds; those of one
fold are predicted with constants fitted to the others. Printed: rank correlation within a problem, median error, how
often the kernel that the model picks is really faster than the seed, and its regret. The constants fitted to all
problems are what belongs into `optiml/measure/hardware.py`.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from optiml.device.cuda import CudaDevice, find_gpus
from optiml.device.emulated import MODELS, EmulatedDevice
from optiml.errors import OptimlError
from optiml.generate.catalogue import applicable, strategies, strategy_kernel
from optiml.measure.counted import INPUT_SEED, counted_launches
from optiml.measure.hardware import Hardware, hardware
from optiml.measure.model import TERMS, LaunchShape, model_launch
from optiml.measure.timing import Budget, bench_inputs, contender, time_of, time_together
from optiml.problems.problem import builtin_names, kernel_from_text, load_builtin, main_dtype
from optiml.ptx import Module, parse
from optiml.ptx.counters import Counters
from optiml.records import Build, Kernel, Problem
from optiml.toolchain.nvrtc import Compiler
from optiml.toolchain.signatures import with_launches

MOST_VARIANTS = 10  # of a problem
FOLDS = 5
GAIN = 1.05  # a winner has to be so much faster than the seed
COUNT_TIMEOUT_S = 40.0
BUDGET = Budget(seconds=0.12, most_rounds=24)
WORKERS = max(1, min(12, (os.cpu_count() or 2) - 2))
FITTED = (
    "launch_us", "dram_efficiency", "l2_bytes_per_s", "sm_l2_bytes_per_clock", "l2_line_bytes",
    "atomic_lanes_per_clock", "atomic_request_clocks", "atomic_sector_clocks", "shared_atomic_clocks", "barrier_clocks",
    "blocks_started_per_clock", "warp_start_clocks", "block_turnover_clocks", "overlap_loss", "latency.alu",
    "latency.sfu", "latency.shuffle", "latency.shared", "latency.l1", "latency.l2", "latency.dram", "latency.barrier",
    "latency.atomic",
)  # fmt: skip
MOST = {"dram_efficiency": 0.98, "overlap_loss": 0.5}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One kernel of a problem."""

    problem: str
    label: str
    kernel: Kernel
    build: Build


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What the model needs of a variant, and its measured time."""

    problem: str
    label: str
    is_seed: bool
    measured_us: float
    launches: tuple[tuple[float, LaunchShape, Counters], ...]  # weight of the bench entry
    module: Module


# --- gathering -------------------------------------------------------------------------------------------------------
def variants(compiler: Compiler, arch: str) -> list[Variant]:
    """Seeds, strategies, and strategies with one tunable changed; at most so many of a problem, one a build."""
    found = []
    for name in builtin_names():
        builtin = load_builtin(name)
        problem, dtype = builtin.problem, main_dtype(builtin.problem)
        kernels = [("seed", kernel_from_text(builtin.seed_text, dtype=dtype))]
        chosen = [item for item in strategies(name) if applicable(item, problem, dtype)]
        kernels += [(item.name, strategy_kernel(item, dtype)) for item in chosen]
        changed = [list(_changed(label, kernel)) for label, kernel in kernels]
        for turn in range(max((len(items) for items in changed), default=0)):
            kernels += [items[turn] for items in changed if turn < len(items)]
        seen: set[bytes] = set()
        kept = 0
        for label, kernel in kernels:
            if kept == MOST_VARIANTS:
                break
            ready = with_launches(kernel, problem)[0]
            build = compiler.compile(ready, arch)
            mark = repr((getattr(build, "cubin", b""), sorted(ready.params.items()))).encode()
            if isinstance(build, Build) and mark not in seen:
                seen.add(mark)
                kept += 1
                found.append(Variant(problem=name, label=label, kernel=ready, build=build))
    return found


def _changed(label: str, kernel: Kernel) -> list[tuple[str, Kernel]]:
    made = []
    for name, values in kernel.tunables.items():
        for value in values:
            if value != kernel.params.get(name):
                params = {**kernel.params, name: value}
                made.append((f"{label} {name}={value}", dataclasses.replace(kernel, params=params)))
    return made


def measured_times(items: Sequence[Variant], device: CudaDevice, deadline: float) -> dict[str, float]:
    """Median µs of every variant that can be timed before the deadline."""
    times = {}
    inputs: dict[str, Any] = {}
    for item in items:
        if time.monotonic() > deadline:
            break
        problem = load_builtin(item.problem).problem
        if item.problem not in inputs:
            inputs = {item.problem: bench_inputs(problem, problem.bench, seed=INPUT_SEED)}
        try:
            subject = contender(item.kernel, item.build, problem, problem.bench, device)
            timing = time_together(device, [subject], inputs[item.problem], budget=BUDGET)
        except OptimlError as error:
            print(f"{item.problem}/{item.label}: {error}", file=sys.stderr)
            continue
        times[f"{item.problem}/{item.label}"] = time_of(timing, 0).median_us
    return times


def samples(items: Sequence[Variant], times: Mapping[str, float], model: str) -> list[Sample]:
    """Count every timed variant on the emulator, several at a time."""
    devices = [EmulatedDevice(MODELS[model]) for _ in range(WORKERS)]
    free = collections.deque(devices)
    table = hardware(model)

    def one(item: Variant) -> Sample | None:
        problem: Problem = load_builtin(item.problem).problem
        device = free.popleft()
        try:
            launches = tuple(
                (workload.weight, shape, counters)
                for workload in problem.bench
                for shape, counters in counted_launches(
                    item.kernel, item.build, problem, device, workload, table, timeout_s=COUNT_TIMEOUT_S
                )
            )
        except OptimlError as error:
            print(f"{item.problem}/{item.label}: {error}", file=sys.stderr)
            return None
        finally:
            free.append(device)
        return Sample(
            problem=item.problem, label=item.label, is_seed=item.label == "seed",
            measured_us=times[f"{item.problem}/{item.label}"], launches=launches, module=parse(item.build.ptx),
        )  # fmt: skip

    try:
        with ThreadPoolExecutor(WORKERS) as pool:
            wanted = [item for item in items if f"{item.problem}/{item.label}" in times]
            return [sample for sample in pool.map(one, wanted) if sample is not None]
    finally:
        for device in devices:
            device.close()


# --- predicting ------------------------------------------------------------------------------------------------------
def predicted_us(sample: Sample, table: Hardware) -> float:
    return sum(
        weight * model_launch(shape, counters, module=sample.module, hardware=table).total_us
        for weight, shape, counters in sample.launches
    )


def value_of(table: Hardware, name: str) -> float:
    holder: Any = table.latency if name.startswith("latency.") else table
    return float(getattr(holder, name.removeprefix("latency.")))


def with_value(table: Hardware, name: str, value: float) -> Hardware:
    if name.startswith("latency."):
        return dataclasses.replace(
            table, latency=dataclasses.replace(table.latency, **{name.removeprefix("latency."): value})
        )
    return dataclasses.replace(table, **{name: value})


@dataclass(frozen=True, kw_only=True)
class Surrogate:
    """The model near one table: every term of every launch as a power law in the constants.

    Attributes:
        terms: `[launches, terms]` at the table, in µs.
        powers: `[launches, terms, constants]` d log(term) / d log(constant).
        weights: `[launches]` of the bench entries.
        owner: `[launches]` index of the sample.
    """

    samples: tuple[Sample, ...]
    terms: Any
    powers: Any
    weights: Any
    owner: Any
    start: Any  # `[constants]` their values at the table

    def without(self, problems: Sequence[str]) -> Surrogate:
        """The part of it that belongs to the other problems."""
        kept = [index for index, sample in enumerate(self.samples) if sample.problem not in problems]
        rows = np.isin(self.owner, kept)
        place = {old: new for new, old in enumerate(kept)}
        return dataclasses.replace(
            self,
            samples=tuple(self.samples[index] for index in kept),
            terms=self.terms[rows], powers=self.powers[rows], weights=self.weights[rows],
            owner=np.array([place[index] for index in self.owner[rows]]),
        )  # fmt: skip

    def predicted(self, factors: Any) -> Any:
        """`[samples]` times in µs with every constant multiplied by its factor."""
        logs = np.log(factors)
        terms = self.terms * np.exp(self.powers @ logs)
        launch, working = terms[:, _LAUNCH], np.delete(terms, _LAUNCH, axis=1)
        longest = working.max(axis=1)
        loss_share = self.start[_OVERLAP] * factors[_OVERLAP]
        total = launch + longest + loss_share * (working.sum(axis=1) - longest)
        return np.bincount(self.owner, weights=self.weights * total, minlength=len(self.samples))


_LAUNCH, _OVERLAP = TERMS.index("launch"), FITTED.index("overlap_loss")
_NUDGE = 1.15
_LEAST_FACTOR, _MOST_FACTOR = 0.4, 2.5
_STAY = 0.004  # of the loss, for each constant that moves by a factor of e


def _terms_of(sample: Sample, table: Hardware) -> list[list[float]]:
    launches = [
        model_launch(shape, counters, module=sample.module, hardware=table) for _, shape, counters in sample.launches
    ]
    return [[launch.terms_us[name] for name in TERMS] for launch in launches]


def _powers_of(task: tuple[int, str]) -> tuple[list[list[float]], list[list[list[float]]]]:
    """Terms of one sample, and how each of them follows each constant."""
    index, model = task
    sample, table = _DATA[index], hardware(model)
    base = np.array(_terms_of(sample, table))
    columns = []
    for name in FITTED:
        moved = np.array(_terms_of(sample, with_value(table, name, value_of(table, name) * _NUDGE)))
        with np.errstate(divide="ignore", invalid="ignore"):
            power = np.log(moved / base) / math.log(_NUDGE)
        columns.append(np.where(base > 0, power, 0.0))
    return base.tolist(), np.stack(columns, axis=2).tolist()


def surrogate(data: Sequence[Sample], model: str) -> Surrogate:
    """Evaluate the model around its table, once for each constant, over several processes."""
    _DATA[:] = data
    with multiprocessing.get_context("fork").Pool(WORKERS) as pool:
        parts = pool.map(_powers_of, [(index, model) for index in range(len(data))], chunksize=2)
    table = hardware(model)
    return Surrogate(
        samples=tuple(data),
        terms=np.array([row for base, _ in parts for row in base]),
        powers=np.array([row for _, powers in parts for row in powers]),
        weights=np.array([weight for sample in data for weight, _, _ in sample.launches]),
        owner=np.array([index for index, sample in enumerate(data) for _ in sample.launches]),
        start=np.array([value_of(table, name) for name in FITTED]),
    )


def fit(near: Surrogate, table: Hardware) -> Hardware:
    """Coordinate descent on the surrogate over a factor for each constant.

    The loss is the mean over problems of the mean |log(predicted / measured)|, and a pull to stay at the table.
    """
    measured = np.array([sample.measured_us for sample in near.samples])
    names = [sample.problem for sample in near.samples]
    share = np.array([1.0 / names.count(name) for name in names]) / len(set(names))
    most = np.array([min(_MOST_FACTOR, MOST.get(name, math.inf) / near.start[index])
                     for index, name in enumerate(FITTED)])  # fmt: skip

    def cost(factors: Any) -> float:
        errors = np.abs(np.log(near.predicted(factors) / measured))
        return float((share * errors).sum() + _STAY * np.abs(np.log(factors)).sum())

    factors = np.ones(len(FITTED))
    best, step = cost(factors), 1.5
    while step > 1.01:
        improved = False
        for index in range(len(FITTED)):
            for factor in (factors[index] * step, factors[index] / step, 1.0):
                trial = factors.copy()
                trial[index] = min(max(factor, _LEAST_FACTOR), most[index])
                found = cost(trial)
                if found < best - 1e-6:
                    best, factors, improved = found, trial, True
        if not improved:
            step = math.sqrt(step)
    for index, name in enumerate(FITTED):
        table = with_value(table, name, float(near.start[index] * factors[index]))
    return table


# --- judging ---------------------------------------------------------------------------------------------------------
def ranks(values: Sequence[float]) -> Any:
    """Ranks with ties averaged."""
    array = np.asarray(values, dtype=np.float64)
    return np.array([((array < value).sum() + (array <= value).sum() + 1) / 2 for value in array])


def spearman(left: Sequence[float], right: Sequence[float]) -> float | None:
    a, b = ranks(left), ranks(right)
    if a.std() == 0 or b.std() == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def judged(data: Sequence[Sample], tables: Mapping[str, Hardware]) -> dict[str, Any]:
    """How well the table of each problem predicts that problem."""
    rows, errors = {}, []
    for problem in dict.fromkeys(sample.problem for sample in data):
        own = [sample for sample in data if sample.problem == problem]
        predicted = [predicted_us(sample, tables[problem]) for sample in own]
        measured = [sample.measured_us for sample in own]
        errors += [abs(math.log(p / m)) for p, m in zip(predicted, measured, strict=True)]
        pick = min(range(len(own)), key=lambda index: predicted[index])
        seed = next((sample.measured_us for sample in own if sample.is_seed), None)
        rows[problem] = {
            "variants": len(own),
            "spearman": spearman(predicted, measured),
            "median_error_pct": round(100 * (math.exp(statistics.median(
                abs(math.log(p / m)) for p, m in zip(predicted, measured, strict=True))) - 1), 1),
            "pick": own[pick].label,
            "pick_speedup_over_seed": None if seed is None else round(seed / measured[pick], 3),
            "regret": round(measured[pick] / min(measured) - 1, 4),
            "kernels": {sample.label: [round(m, 2), round(p, 2)]
                        for sample, m, p in zip(own, measured, predicted, strict=True)},
        }  # fmt: skip
    enough = {name: row for name, row in rows.items() if row["variants"] >= 5 and row["spearman"] is not None}
    improvable = {
        name: row for name, row in rows.items()
        if row["pick_speedup_over_seed"] is not None and row["pick"] != "seed"
    }  # fmt: skip
    return {
        "problems": len(rows),
        "problems_with_5_variants": len(enough),
        "mean_spearman": round(statistics.fmean(row["spearman"] for row in enough.values()), 3) if enough else None,
        "median_error_pct": round(100 * (math.exp(statistics.median(errors)) - 1), 1),
        "picks_faster_by_5_pct": sum(row["pick_speedup_over_seed"] >= GAIN for row in improvable.values()),
        "picks": len(improvable),
        "median_regret": round(statistics.median(row["regret"] for row in rows.values()), 4),
        "by_problem": rows,
    }


def folds(data: Sequence[Sample]) -> list[list[str]]:
    names = list(dict.fromkeys(sample.problem for sample in data))
    return [names[start::FOLDS] for start in range(min(FOLDS, len(names)))]


_DATA: list[Sample] = []  # for the processes that evaluate the model; inherited by fork


def calibrate(data: list[Sample], model: str, *, fitting: bool = True) -> dict[str, Any]:
    """Before, after on held-out problems, and the constants fitted to all."""
    table = hardware(model)
    names = dict.fromkeys(sample.problem for sample in data)
    record: dict[str, Any] = {"kernels": len(data), "before": judged(data, dict.fromkeys(names, table))}
    if not fitting:
        return record
    dealt = folds(data)
    near = surrogate(data, model)
    fitted = [fit(near.without(fold), table) for fold in [*dealt, []]]
    tables = {name: fitted[index] for index, fold in enumerate(dealt) for name in fold}
    record["held_out"] = judged(data, tables)
    record["all"] = {key: value for key, value in judged(data, dict.fromkeys(names, fitted[-1])).items()
                     if key != "by_problem"}  # fmt: skip
    record["constants"] = {name: float(f"{value_of(fitted[-1], name):.4g}") for name in FITTED}
    record["constants_before"] = {name: value_of(table, name) for name in FITTED}
    return record


def timed_variants(
    times_file: Path | None, *, arch: str, seconds: float
) -> tuple[list[Variant], dict[str, float]]:  # fmt: skip
    """Variants with times from a file, or measured on the first GPU and written there."""
    started = time.monotonic()
    compiler = Compiler()
    try:
        items = variants(compiler, arch)
    finally:
        compiler.close()
    print(f"{time.monotonic() - started:.0f} s: {len(items)} kernels compiled", file=sys.stderr)
    if times_file is not None and times_file.exists():
        times = json.loads(times_file.read_text(encoding="utf-8"))["times_us"]
    else:
        device = CudaDevice(find_gpus()[0])
        try:
            times = measured_times(items, device, time.monotonic() + seconds)
        finally:
            device.close()
        if times_file is not None:
            content = {"device": device.info.name, "driver": device.driver_version(), "times_us": times}
            times_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"{time.monotonic() - started:.0f} s: {len(times)} times", file=sys.stderr)
    return items, times


def gather(
    times_file: Path | None, *, arch: str = "sm_90", model: str = "h200", seconds: float = 180.0
) -> list[Sample]:  # fmt: skip
    """What the model needs of every timed variant."""
    items, times = timed_variants(times_file, arch=arch, seconds=seconds)
    return samples(items, times, model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=Path, help="measured times: read if the file exists, else written")
    parser.add_argument("--json", type=Path, help="write the record there")
    parser.add_argument("--no-fit", action="store_true", help="only judge the constants as they are")
    parser.add_argument("--times-only", action="store_true", help="measure, write --times, and stop")
    parser.add_argument("--seconds", type=float, default=180.0, help="for measuring")
    options = parser.parse_args()
    if options.times_only:
        timed_variants(options.times, arch="sm_90", seconds=options.seconds)
        return
    record = calibrate(gather(options.times, seconds=options.seconds), "h200", fitting=not options.no_fit)
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for part in ("before", "held_out", "all"):
        if part in record:
            print(part, {key: value for key, value in record[part].items() if key != "by_problem"})
    print(json.dumps(record.get("constants", {}), indent=1))


if __name__ == "__main__":
    main()
