"""Profiles of a GPU: measured time, what ptxas reports, and metrics from wherever they can be had, each labelled.

Metrics come from the embedded device, which executes a sample of the blocks and counts (`counted`, `modelled`). A
`CounterReader` puts hardware counters over them (`ncu`); without one, or without the permission to read counters, the
rest still stands.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from optiml.codec import kernel_id, problem_digest
from optiml.device.device import Device, TimedDevice
from optiml.device.emulated import MODELS, EmulatedDevice
from optiml.device.plan import BadLaunch
from optiml.errors import InvalidInput, OptimlError, PtxSyntaxError, Unsupported, WorkerDied
from optiml.measure.baselines import Baselines
from optiml.measure.compare import metric_changes
from optiml.measure.counted import INPUT_SEED, CountedProfiler
from optiml.measure.energy import energy_per_run_mj
from optiml.measure.hardware import Hardware, hardware
from optiml.measure.roofline import floor
from optiml.measure.timing import (
    BenchInputs,
    Budget,
    Contender,
    Ratio,
    Timing,
    bench_inputs,
    contender,
    entry_time,
    ratio_of,
    time_of,
    time_together,
)
from optiml.records import (
    BenchProfile,
    Bottleneck,
    Build,
    Comparison,
    HotLine,
    Kernel,
    MetricSource,
    Problem,
    Profile,
    SpeedOfLight,
    Time,
    Workload,
)
from optiml.reward import SPILL_CONDITION

LOG = logging.getLogger(__name__)
COUNTED_IN_MEMORY = 128
INPUTS_IN_MEMORY = 4
COUNT_TIMEOUT_S = 20.0
FULL = Budget(seconds=3.0)
QUICK = Budget(seconds=0.25, most_rounds=40, half_width=0.005, hopeless=1.3)


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What a `CounterReader` read: metrics of Nsight Compute in base units, weighted over the bench entries."""

    values: Mapping[str, float | None]
    hot_lines: tuple[HotLine, ...] = ()
    bottleneck: Bottleneck | None = None
    conditions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    warnings: tuple[str, ...] = ()


class CounterReader(Protocol):
    """Reads hardware counters of a kernel on a GPU."""

    @property
    def version(self) -> str:
        """Of the reader and its tool; part of the key under which profiles are kept."""

    def read(
        self,
        kernel: Kernel,
        subject: Contender,
        inputs: BenchInputs,
        device: TimedDevice,
        *,
        metrics: Sequence[str] | None,
        timeout_s: float,
    ) -> Counters:
        """Counters of one run of each plan of `subject`.

        Raises:
            SetupError: `no_profiler`, `profiler_forbidden`: the profile is then made without counters, with a warning.
            ToolFailed: the profiler broke its contract; likewise.
        """


class BaselineTimer(Protocol):
    """Times what others offer for a problem."""

    def measure(self, problem: Problem, inputs: BenchInputs) -> Baselines: ...


@dataclass(frozen=True, kw_only=True)
class Rival:
    """What a kernel is timed against, in the same rounds."""

    kernel: Kernel
    build: Build
    time_us: float | None = None  # its time as known so far: the new one is given on the same scale, whatever drifted


class MeasuredProfiler:
    """Profiles on a `TimedDevice`.

    Args:
        counters: reads hardware counters, None to leave them out.
        counted: whether the embedded device adds its metrics.
        table: rates of the GPU for the speed of light; the data sheet of its kind unless given.
        baselines: times torch and vendor libraries beside the kernel.
        energy: whether profiles of one kernel measure its energy, which takes most of a second.
    """

    def __init__(
        self,
        *,
        counters: CounterReader | None = None,
        counted: bool = True,
        table: Callable[[TimedDevice], Hardware] | None = None,
        baselines: BaselineTimer | None = None,
        energy: bool = False,
    ) -> None:
        self._counters = counters
        self._table = table
        self._baselines = baselines
        self._energy = energy
        self._known_baselines: dict[str, Baselines] = {}
        self._known_counters: OrderedDict[tuple[str, str, tuple[str, ...] | None], Counters] = OrderedDict()
        self._counted = CountedProfiler() if counted else None
        self._emulators: dict[str, EmulatedDevice] = {}
        self._known: OrderedDict[tuple[str, str, tuple[str, ...] | None], Profile | str] = OrderedDict()
        self._inputs: OrderedDict[str, BenchInputs] = OrderedDict()

    @property
    def version(self) -> str:
        parts = ["measured/1"]
        if self._counted is not None:
            parts.append(self._counted.version)
        if self._counters is not None:
            parts.append(self._counters.version)
        return " ".join(parts)

    def profile(
        self,
        kernel: Kernel,
        build: Build,
        problem: Problem,
        device: Device,
        *,
        bench: tuple[Workload, ...],
        metrics: Sequence[str] | None = None,
        timeout_s: float,
    ) -> Profile:
        """Time an accepted kernel at every bench entry and gather its metrics.

        Raises:
            InvalidInput: `device` keeps no real time, or nothing is launched at these sizes.
            BadLaunch: the launch plan cannot be carried out at these sizes.
            Busy: the device is in use.
            KernelFault: the kernel broke a rule of the machine at these sizes.
        """
        return self._profile(kernel, build, problem, device, bench, metrics, timeout_s, rival=None, budget=FULL)

    def profile_against(
        self,
        kernel: Kernel,
        build: Build,
        problem: Problem,
        device: Device,
        rival: Rival,
        *,
        bench: tuple[Workload, ...],
        budget: Budget,
        metrics: Sequence[str] | None = None,
        timeout_s: float,
    ) -> Profile:
        """As `profile`, timed in turns with `rival`; `comparison` holds the ratio with its interval."""
        return self._profile(kernel, build, problem, device, bench, metrics, timeout_s, rival=rival, budget=budget)

    def inputs(self, problem: Problem, bench: Sequence[Workload]) -> BenchInputs:
        """The inputs with which the kernels of a problem are timed; drawn once."""
        key = problem_digest(dataclasses.replace(problem, bench=tuple(bench)))
        if key not in self._inputs:
            self._inputs[key] = bench_inputs(problem, bench, seed=INPUT_SEED)
            while len(self._inputs) > INPUTS_IN_MEMORY:
                self._inputs.popitem(last=False)
        return self._inputs[key]

    def _profile(
        self,
        kernel: Kernel,
        build: Build,
        problem: Problem,
        device: Device,
        bench: tuple[Workload, ...],
        metrics: Sequence[str] | None,
        timeout_s: float,
        *,
        rival: Rival | None,
        budget: Budget,
    ) -> Profile:
        if not isinstance(device, TimedDevice):
            raise InvalidInput(f"{device.info.name} keeps no real time: profile it with the counted profiler")
        inputs = self.inputs(problem, bench)
        contenders = [contender(kernel, build, problem, bench, device)]
        if rival is not None:
            contenders.append(contender(rival.kernel, rival.build, problem, bench, device))
        timing = time_together(device, contenders, inputs, budget=budget)
        counted = self._count(kernel, build, problem, device, bench, metrics, timeout_s)
        read, why_not = self._read(kernel, problem, contenders[0], inputs, device, metrics, timeout_s)
        ratio = None if rival is None else ratio_of(timing, 0, 1)
        table = _data_sheet(device) if self._table is None else self._table(device)
        made = _assembled(kernel, build, problem, device, bench, timing, counted, read, why_not, metrics, table)
        if rival is None or ratio is None:
            return self._with_extras(made, problem, contenders[0], inputs, device)
        if rival.time_us is not None:
            made = _on_scale(made, rival.time_us / ratio.ratio)
        return dataclasses.replace(made, comparison=_comparison(ratio, kernel_id(rival.kernel)))

    def _with_extras(
        self, made: Profile, problem: Problem, subject: Contender, inputs: BenchInputs, device: TimedDevice
    ) -> Profile:
        """A profile with the energy of a run and with what others offer for the problem."""
        energy = energy_per_run_mj(device, subject, inputs) if self._energy else None
        if self._baselines is None:
            return dataclasses.replace(made, energy_mj=energy)
        key = problem_digest(dataclasses.replace(problem, bench=inputs.bench))
        if key not in self._known_baselines:
            self._known_baselines[key] = self._baselines.measure(problem, inputs)
        found = self._known_baselines[key]
        return dataclasses.replace(
            made,
            energy_mj=energy,
            baselines=found.medians_us,
            conditions={**made.conditions, **found.conditions},
            warnings=(*made.warnings, *(f"no baseline {name}: {why}" for name, why in found.missing.items())),
        )

    def _count(
        self,
        kernel: Kernel,
        build: Build,
        problem: Problem,
        device: TimedDevice,
        bench: tuple[Workload, ...],
        metrics: Sequence[str] | None,
        timeout_s: float,
    ) -> Profile | str:
        """The embedded device's profile of the same build, or why there is none."""
        if self._counted is None:
            return "the embedded device was not asked"
        key = _place(kernel, problem, bench, metrics)
        if key not in self._known:
            emulator = self._emulator(stand_in(device.info.model, device.info.arch))
            try:
                self._known[key] = self._counted.profile(
                    kernel, build, problem, emulator, bench=bench, metrics=metrics,
                    timeout_s=min(timeout_s, COUNT_TIMEOUT_S),
                )  # fmt: skip
            except (Unsupported, InvalidInput, BadLaunch, PtxSyntaxError, WorkerDied) as error:
                self._known[key] = str(error)
            while len(self._known) > COUNTED_IN_MEMORY:
                self._known.popitem(last=False)
        return self._known[key]

    def _emulator(self, model: str) -> EmulatedDevice:
        if model not in self._emulators:
            self._emulators[model] = EmulatedDevice(MODELS[model])
        return self._emulators[model]

    def _read(
        self,
        kernel: Kernel,
        problem: Problem,
        subject: Contender,
        inputs: BenchInputs,
        device: TimedDevice,
        metrics: Sequence[str] | None,
        timeout_s: float,
    ) -> tuple[Counters | None, str | None]:
        if self._counters is None:
            return None, None
        key = _place(kernel, problem, inputs.bench, metrics)
        if key in self._known_counters:  # of a kernel that is compared again and again
            return self._known_counters[key], None
        try:
            found = self._counters.read(kernel, subject, inputs, device, metrics=metrics, timeout_s=timeout_s)
        except OptimlError as error:
            LOG.info("no hardware counters: %s", error)
            return None, f"{error.code}: {error}"
        self._known_counters[key] = found
        while len(self._known_counters) > COUNTED_IN_MEMORY:
            self._known_counters.popitem(last=False)
        return found, None

    def close(self) -> None:
        """End the children that count."""
        for emulator in self._emulators.values():
            emulator.close()
        self._emulators = {}


def stand_in(model: str, arch: str) -> str:
    """The model of the hardware table that is nearest to a GPU: its own, or one of its generation."""
    if model in MODELS:
        return model
    return "h200" if int(arch.removeprefix("sm_").rstrip("a") or 0) >= 90 else "a100"


def _place(
    kernel: Kernel, problem: Problem, bench: tuple[Workload, ...], metrics: Sequence[str] | None
) -> tuple[str, str, tuple[str, ...] | None]:
    """Where what is known of a kernel at some sizes is kept in memory."""
    names = None if metrics is None else tuple(metrics)
    return kernel_id(kernel), problem_digest(dataclasses.replace(problem, bench=bench)), names


def _data_sheet(device: TimedDevice) -> Hardware:
    return hardware(stand_in(device.info.model, device.info.arch))


# --- putting it together ---------------------------------------------------------------------------------------------
def _assembled(
    kernel: Kernel,
    build: Build,
    problem: Problem,
    device: TimedDevice,
    bench: tuple[Workload, ...],
    timing: Timing,
    counted: Profile | str,
    read: Counters | None,
    why_not: str | None,
    metrics: Sequence[str] | None,
    table: Hardware,
) -> Profile:
    identity = kernel_id(kernel)
    spent = time_of(timing, 0)
    values, sources = _merged(counted, read, metrics)
    light = _speed_of_light(problem, bench, table, spent.median_us)
    lines = (
        read.hot_lines if read is not None and read.hot_lines else () if isinstance(counted, str) else counted.hot_lines
    )
    bound = _bottleneck(counted, read, light)
    spills = max((item.spill_bytes for item in build.resources.values()), default=0)
    return Profile(
        kernel_id=identity,
        axes=dict(bench[0].axes),
        time=spent,
        metrics=values,
        metric_source=sources,
        bottleneck=bound,
        hot_lines=lines,
        occupancy=None if isinstance(counted, str) else counted.occupancy,
        speed_of_light=light,
        summary=_summary(spent, bound, light, lines, device),
        next_action=_next_action(bound, lines),
        warnings=_warnings(device, timing, counted, read, why_not),
        conditions={**_conditions(build, timing, device, spills), **({} if read is None else read.conditions)},
        bench=tuple(_bench_profile(index, timing, counted) for index in range(len(bench))),
        report_uri=f"optiml://kernels/{identity}/profile",
    )


def _merged(
    counted: Profile | str, read: Counters | None, metrics: Sequence[str] | None
) -> tuple[dict[str, float | None], dict[str, MetricSource]]:
    """Hardware counters first, then what was counted and modelled; what nobody knows is None."""
    values: dict[str, float | None] = dict.fromkeys(metrics or ())
    sources: dict[str, MetricSource] = {}
    if not isinstance(counted, str):
        values.update(counted.metrics)
        sources.update(counted.metric_source)
    for name, value in (read.values if read is not None else {}).items():
        if value is not None:
            values[name], sources[name] = value, "ncu"
        else:
            values.setdefault(name, None)
    return values, sources


_KINDS: Mapping[str, Literal["memory", "launch"]] = {"dram": "memory", "launch": "launch"}


def _bottleneck(counted: Profile | str, read: Counters | None, light: SpeedOfLight | None) -> Bottleneck:
    if read is not None and read.bottleneck is not None:
        return read.bottleneck
    if not isinstance(counted, str):
        return counted.bottleneck
    if light is None:
        return Bottleneck(kind="latency", evidence=("no metrics could be had of this kernel",), advice=(
            "profile it with Nsight Compute, or give the problem `flops` and `bytes`",))  # fmt: skip
    return Bottleneck(
        kind=_KINDS.get(light.bound, "compute"),
        evidence=(f"it runs at {light.pct:.0f} % of what {light.bound} allows; no metrics could be had",),
        advice=("profile it with Nsight Compute to see what it waits for",),
    )


def _speed_of_light(
    problem: Problem, bench: Sequence[Workload], table: Hardware, time_us: float
) -> SpeedOfLight | None:  # fmt: skip
    known = [(workload.weight, floor(problem, workload, table)) for workload in bench]
    floors = [(weight, item) for weight, item in known if item is not None]
    if len(floors) < len(known):
        return None
    total = sum(weight * item.us for weight, item in floors)
    longest = max(floors, key=lambda pair: pair[0] * pair[1].us)[1]
    return SpeedOfLight(us=total, pct=100.0 * total / time_us, bound=longest.bound)


def _bench_profile(index: int, timing: Timing, counted: Profile | str) -> BenchProfile:
    entry = timing.entries[index]
    same = None if isinstance(counted, str) else counted.bench[index]
    return BenchProfile(
        axes=dict(entry.workload.axes),
        weight=entry.workload.weight,
        time=entry_time(entry, 0),
        metrics={} if same is None else same.metrics,
        terms_us={},
        blocks_total=0 if same is None else same.blocks_total,
        blocks_run=0 if same is None else same.blocks_run,
    )


def _conditions(build: Build, timing: Timing, device: TimedDevice, spills: int) -> dict[str, str]:
    clocks = [item.sm_mhz for item in timing.clocks if item.sm_mhz is not None]
    memory = [item.memory_mhz for item in timing.clocks if item.memory_mhz is not None]
    conditions = {
        "device": device.info.name,
        "engine": device.info.engine,
        "compiler": build.report.compiler,
        "timing": "CUDA events, L2 overwritten before each run, inputs rotated",
        SPILL_CONDITION: str(spills),
    }
    if clocks:
        conditions["sm_clock_mhz"] = _span(clocks)
    if memory:
        conditions["memory_clock_mhz"] = _span(memory)
    version = device.driver_version()
    if version is not None:
        conditions["driver"] = version
    return conditions


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


def _warnings(
    device: TimedDevice, timing: Timing, counted: Profile | str, read: Counters | None, why_not: str | None
) -> tuple[str, ...]:
    warnings = []
    reasons = sorted({reason for item in timing.clocks for reason in item.throttled})
    if reasons:
        warnings.append(f"the clocks were held down while it was timed ({', '.join(reasons)})")
    if isinstance(counted, str):
        warnings.append(f"no counted metrics: {counted}")
    else:
        model = stand_in(device.info.model, device.info.arch)
        warnings.append(
            f"metrics marked counted or modelled come from the embedded device standing for an {model.upper()}; "
            "the time is measured"
        )
    if why_not is not None:
        warnings.append(f"no hardware counters: {why_not}")
    return (*warnings, *(read.warnings if read is not None else ()))


def _summary(
    spent: Time, bound: Bottleneck, light: SpeedOfLight | None, lines: Sequence[HotLine], device: TimedDevice
) -> str:
    text = (
        f"Measured at {spent.median_us:.4g} µs on {device.info.name} (A/A noise {spent.noise_pct:.2g} %, "
        f"{spent.runs} runs), {bound.kind}-bound: {bound.evidence[0]}."
    )
    if lines:
        text += f" Line {lines[0].line} does {lines[0].share_pct:.0f} % of that work."
    if light is not None:
        text += f" That is {light.pct:.0f} % of the speed of light ({light.us:.3g} µs, {light.bound})."
    return text


def _next_action(bound: Bottleneck, lines: Sequence[HotLine]) -> str:
    where = f" Start at line {lines[0].line}: {lines[0].source}" if lines and lines[0].source else ""
    return f"{bound.advice[0][0].upper()}{bound.advice[0][1:]}.{where}"


# --- comparisons -----------------------------------------------------------------------------------------------------
def compared(new: Profile, old: Profile) -> Profile:
    """`new`, whose comparison with `old` was timed, with what changed in the metrics."""
    if new.comparison is None:
        raise InvalidInput("the profile was not timed against another kernel")
    comparison = dataclasses.replace(new.comparison, metric_changes=metric_changes(new, old))
    return dataclasses.replace(new, comparison=comparison)


def _comparison(ratio: Ratio, baseline: str) -> Comparison:
    low, high = ratio.ci95
    return Comparison(
        ratio=ratio.ratio,
        ci95=ratio.ci95,
        noise_pct=ratio.noise_pct,
        verdict=ratio.verdict,
        metric_changes={},
        source="measured",
        baseline_kernel_id=baseline,
        reasons=(
            f"timed in turns: {ratio.ratio:.4g}x with a 95 % interval of {low:.4g} to {high:.4g}, "
            f"A/A noise {ratio.noise_pct:.2g} %",
        ),
    )


def _on_scale(profile: Profile, time_us: float) -> Profile:
    """The same profile with its time moved to the scale on which the rival's time was taken."""
    factor = time_us / profile.time.median_us
    low, high = profile.time.p10_us, profile.time.p90_us
    moved = dataclasses.replace(
        profile.time,
        median_us=time_us,
        p10_us=None if low is None else low * factor,
        p90_us=None if high is None else high * factor,
    )
    light = profile.speed_of_light
    if light is not None:
        light = dataclasses.replace(light, pct=light.pct / factor)
    return dataclasses.replace(profile, time=moved, speed_of_light=light)
