"""Times that can be believed: contenders timed in turns on a device held alone, medians, intervals, verdicts.

A round runs every contender twice, A B B A, with its inputs restored from one of several sets and L2 overwritten
before each run. Rounds are added until the interval of what is asked for is narrow, or the budget is spent. Noise is
what two runs of the same kernel in the same rounds differ by (A/A).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from optiml.device.device import Array, TimedDevice, TimedOutputs, TimedSubject, Timer
from optiml.device.nvml import Clocks
from optiml.device.plan import Plan, resolve_plan
from optiml.errors import InvalidInput
from optiml.problems.data import draw, storage_dtype
from optiml.records import Build, Kernel, Launch, Problem, Time, Workload

SMALL = 0.01  # a gain below this is none, however sure it is
SAME = 0.02  # an interval inside 1 ± SAME says that two kernels are equally fast
RESAMPLES = 1000
WARM_UP_ROUNDS = 2
FIRST_ROUNDS, MOST_ROUNDS = 6, 120
HOPELESS = 1.3  # slower than the reference by this in the first rounds: more rounds are a waste
TARGET_HALF_WIDTH = 0.003  # of the interval of a ratio
DRAWN_ELEMENTS = 1 << 20  # of each input, then repeated
SETS = 3
MOST_SET_BYTES = 4 << 30  # of all sets together; then fewer
CALL_TIMEOUT_S = 60.0
Verdict = Literal["faster", "same", "slower", "inconclusive"]

EMPTY_KERNEL = Kernel(
    source='extern "C" __global__ void empty() {}',
    launches=(Launch(kernel="empty", grid=(1,), block=(32,), args=()),),
)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A kernel ready to be timed: its build, and its plan at every bench entry."""

    build: Build
    plans: tuple[Plan, ...]


@dataclass(frozen=True, kw_only=True)
class BenchInputs:
    """What contenders are given: for each bench entry several sets of inputs, drawn once and repeated to size."""

    bench: tuple[Workload, ...]
    sets: tuple[tuple[Mapping[str, Array], ...], ...]  # entry, set -> input -> contents


@dataclass(frozen=True, kw_only=True)
class EntryTiming:
    """Raw times of one bench entry: microseconds of float64 `(rounds, contenders, 2)`, and outputs of the first."""

    workload: Workload
    times_us: Array
    outputs: TimedOutputs | None  # where they were asked for


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What was measured in one session."""

    entries: tuple[EntryTiming, ...]
    clocks: tuple[Clocks, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Old time over new time with its 95 % interval; above 1 the new kernel is faster. `noise_pct` is A/A."""

    ratio: float
    ci95: tuple[float, float]
    noise_pct: float
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much may be spent on one bench entry; `half_width` is that of the ratio of the first two contenders."""

    seconds: float = 1.5
    most_rounds: int = MOST_ROUNDS
    half_width: float = TARGET_HALF_WIDTH
    hopeless: float | None = None  # stop early where the first contender is so many times slower than the second


def contender(
    kernel: Kernel, build: Build, problem: Problem, bench: Sequence[Workload], device: TimedDevice
) -> Contender:
    """A kernel with its plan at every bench entry.

    Raises:
        BadLaunch: the plan cannot be carried out at one of the sizes.
        InvalidInput: nothing is launched at one of them.
    """
    plans = tuple(resolve_plan(kernel, build, problem, workload, device.info) for workload in bench)
    for plan, workload in zip(plans, bench, strict=True):
        if not plan.launches:
            raise InvalidInput(f"nothing is launched at {dict(workload.axes)}: there is nothing to time")
    return Contender(build=build, plans=plans)


def bench_inputs(problem: Problem, bench: Sequence[Workload], *, seed: int) -> BenchInputs:
    """Draw the inputs of every bench entry."""
    sets = []
    for index, workload in enumerate(bench):
        first = draw(problem, workload, seed=seed + 1000 * index, tile=DRAWN_ELEMENTS)
        others = [
            draw(problem, workload, seed=seed + 1000 * index + number, tile=DRAWN_ELEMENTS) for number in range(1, SETS)
        ]
        sets.append((first, *others))
    return BenchInputs(bench=tuple(bench), sets=tuple(sets))


def contents_of(plan: Plan, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Every array of a plan: inputs as drawn, the others a NaN or the largest integer, zeroed workspaces zero."""
    contents = {}
    for name, planned in plan.arrays.items():
        if name in inputs:
            contents[name] = inputs[name]
        else:
            filler = np.zeros(16, dtype=np.uint8) if planned.zero else np.full(16, 0xFF, dtype=np.uint8)
            contents[name] = filler.view(storage_dtype(planned.dtype))
    return contents


def time_together(
    device: TimedDevice,
    contenders: Sequence[Contender],
    inputs: BenchInputs,
    *,
    budget: Budget,
    outputs: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Timing:
    """Time contenders in turns at every bench entry. With two or more, the first is compared with the second.

    Raises:
        Busy: the device is in use.
        KernelFault: a contender broke a rule of the machine.
    """
    started = clock()
    entries, clocks = [], []
    for index, workload in enumerate(inputs.bench):
        subjects = []
        for item in contenders:
            plan = item.plans[index]
            size = sum(array.nbytes for array in plan.arrays.values())
            sets = inputs.sets[index][: max(1, min(SETS, MOST_SET_BYTES // max(size, 1)))]
            subjects.append(
                TimedSubject(build=item.build, plan=plan, contents=tuple(contents_of(plan, each) for each in sets))
            )
        with device.timer(subjects, timeout_s=CALL_TIMEOUT_S) as timer:
            times, seen = _sampled(timer, budget, clock)
            kept = timer.outputs(0) if outputs else None
        entries.append(EntryTiming(workload=workload, times_us=times, outputs=kept))
        clocks += seen
    return Timing(entries=tuple(entries), clocks=tuple(clocks), seconds=clock() - started)


def _sampled(timer: Timer, budget: Budget, clock: Callable[[], float]) -> tuple[Array, list[Clocks]]:
    started = clock()
    timer.sample(1)
    first_s = clock() - started
    if first_s < 0.1 * budget.seconds:
        timer.sample(WARM_UP_ROUNDS - 1)
    parts: list[Array] = []
    clocks: list[Clocks] = []
    rounds, step = 0, FIRST_ROUNDS
    began = clock()
    while True:
        samples = timer.sample(step)
        parts.append(samples.times_us.astype(np.float64))
        clocks += [samples.before, samples.after]
        rounds += step
        times = np.concatenate(parts)
        spent = clock() - began
        if rounds >= budget.most_rounds or spent >= budget.seconds or _is_enough(times, budget):
            return times, clocks
        affordable = int((budget.seconds - spent) / max(spent / rounds, 1e-6))
        step = max(2, min(rounds, budget.most_rounds - rounds, affordable))


def _is_enough(times: Array, budget: Budget) -> bool:
    if times.shape[1] == 1:
        low, high = _interval(_resampled(times[:, 0].mean(axis=1)))
        return (high - low) / 2 <= budget.half_width * float(np.median(times[:, 0]))
    quotients = _quotients(times, 0, 1)
    middle = float(np.median(quotients))
    if budget.hopeless is not None and middle < 1.0 / budget.hopeless:
        return True
    low, high = _interval(_resampled(quotients))
    return (high - low) / 2 <= budget.half_width


# --- figures ---------------------------------------------------------------------------------------------------------
def time_of(timing: Timing, contender: int) -> Time:
    """Median, 10th and 90th percentile of one run, weighted over the bench entries, with the A/A noise."""
    rounds = min(len(entry.times_us) for entry in timing.entries)
    total = sum(entry.workload.weight * entry.times_us[:rounds, contender].reshape(-1) for entry in timing.entries)
    low, middle, high = (float(value) for value in np.percentile(total, (10, 50, 90)))
    return Time(
        median_us=middle, p10_us=low, p90_us=high, runs=2 * rounds, noise_pct=_noise_pct(timing, contender),
        source="measured",
    )  # fmt: skip


def entry_time(entry: EntryTiming, contender: int) -> Time:
    """As `time_of`, of one bench entry and without its weight."""
    times = entry.times_us[:, contender].reshape(-1)
    low, middle, high = (float(value) for value in np.percentile(times, (10, 50, 90)))
    return Time(median_us=middle, p10_us=low, p90_us=high, runs=len(times), noise_pct=None, source="measured")


def ratio_of(timing: Timing, new: int, old: int) -> Ratio:
    """How many times faster `new` is than `old`, from paired rounds.

    For each bench entry the median over the rounds of old / new, where a round's time is the mean of its two runs;
    several entries are averaged by the share that each has in the new kernel's weighted time. The interval is the
    percentile bootstrap over rounds (Efron and Tibshirani 1993, chapter 13), with a fixed seed.

    Faster or slower: the interval leaves out 1 and the ratio differs from 1 by at least SMALL. Same: the interval lies
    within 1 ± SAME. Otherwise nothing can be said.
    """
    shares = np.array([e.workload.weight * float(np.median(e.times_us[:, new].mean(axis=1))) for e in timing.entries])
    shares = shares / shares.sum()
    quotients = [_quotients(entry.times_us, new, old) for entry in timing.entries]
    ratio = float(sum(share * np.median(q) for share, q in zip(shares, quotients, strict=True)))
    draws = sum(share * _resampled(q, salt) for salt, (share, q) in enumerate(zip(shares, quotients, strict=True)))
    low, high = _interval(np.asarray(draws))
    noise = max(_noise_pct(timing, new), _noise_pct(timing, old))
    return Ratio(ratio=ratio, ci95=(low, high), noise_pct=noise, verdict=verdict_of(ratio, low, high))


def verdict_of(ratio: float, low: float, high: float) -> Verdict:
    """What a ratio and its interval say; see `ratio_of`."""
    if low > 1.0 and ratio >= 1.0 + SMALL:
        return "faster"
    if high < 1.0 and ratio <= 1.0 / (1.0 + SMALL):
        return "slower"
    return "same" if low >= 1.0 / (1.0 + SAME) and high <= 1.0 + SAME else "inconclusive"


def _quotients(times: Array, new: int, old: int) -> Array:
    quotients: Array = times[:, old].mean(axis=1) / times[:, new].mean(axis=1)
    return quotients


def _resampled(values: Array, salt: int = 0) -> Array:
    """Medians of samples drawn with replacement."""
    chosen = np.random.default_rng(salt).integers(0, len(values), (RESAMPLES, len(values)))
    medians: Array = np.median(values[chosen], axis=1)
    return medians


def _interval(draws: Array) -> tuple[float, float]:
    low, high = np.percentile(draws, (2.5, 97.5))
    return float(low), float(high)


def _noise_pct(timing: Timing, contender: int) -> float:
    """Half of the 95 % interval of the ratio of a kernel's two runs in a round, and how far that ratio is from 1."""
    worst = 0.0
    for entry in timing.entries:
        quotients = entry.times_us[:, contender, 0] / entry.times_us[:, contender, 1]
        low, high = _interval(_resampled(quotients))
        worst = max(worst, (high - low) / 2, abs(float(np.median(quotients)) - 1.0))
    return 100.0 * worst if math.isfinite(worst) else 100.0
