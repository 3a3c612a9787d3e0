"""Profiles without a GPU: what the engine counted on a sample of blocks, and the times modelled from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from optiml.codec import kernel_id
from optiml.device.device import Device, LaunchReport
from optiml.device.plan import Plan, resolve_plan
from optiml.errors import InvalidInput, KernelFault, Unsupported
from optiml.measure.bottleneck import binding_resource, bottleneck
from optiml.measure.hardware import Hardware, hardware
from optiml.measure.hotlines import hot_lines
from optiml.measure.metrics import METRICS, Observation, metric_values
from optiml.measure.model import (
    MODEL_VERSION,
    LaunchModel,
    LaunchShape,
    l1_share_bytes,
    model_launch,
    weighted_counts,
    weighted_terms_us,
)
from optiml.measure.occupancy import occupancy
from optiml.measure.roofline import floor, least_bytes
from optiml.problems.data import Array, draw, storage_dtype
from optiml.ptx import Module, parse
from optiml.ptx.counters import Counters
from optiml.records import (
    BenchProfile,
    Bottleneck,
    Build,
    DeviceInfo,
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

INPUT_SEED = 20260201  # fixed: a profile of the same kernel is the same profile
DRAWN_ELEMENTS = 1 << 20  # then repeated; contents hardly matter to counts
SAMPLED_THREADS = 1024  # of each launch: what a warp touches is logged, and uncoalesced warps touch much
FIRST_BLOCKS = 2
MOST_SAMPLED_BLOCKS, LEAST_SAMPLED_BLOCKS = 16, 2
LONG_WARP_INSTRUCTIONS = 10_000  # of one warp; the first blocks of such a kernel have to do
MOST_BLOCKS_IN_FULL = 64


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One bench entry, run and modelled."""

    workload: Workload
    launches: tuple[LaunchModel, ...]
    counters: tuple[Counters, ...]  # of the blocks that ran, one per launch
    observation: Observation
    least_bytes: float | None


class CountedProfiler:
    """Profiles on a device that counts what it executes. Deterministic: no clock enters any figure."""

    version = f"counted/{MODEL_VERSION}"

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
        """Profile an accepted kernel at every bench entry; figures of the whole are sums weighted by the entries.

        Big grids are sampled: pairs of neighbouring blocks spread over the grid (`device.sampling`), up to 16 blocks,
        and only the first two of a kernel whose warps execute more than 10 000 instructions; counts are scaled to the
        grid. Arrays that the kernel writes start as zeros, so that what the blocks left out would have produced
        leads no other block astray.

        Args:
            bench: at least one entry.
            metrics: names to report, in this order; an unknown one is None. All of `METRICS` if None.
            timeout_s: for each of the at most three runs of a bench entry.

        Raises:
            InvalidInput: `device` has no time model, or nothing is launched at these sizes.
            BadLaunch: the launch plan cannot be carried out at these sizes.
            Unsupported: the emulator lacks an opcode, or a sample of the blocks cannot run without the others.
        """
        table = hardware(device.info.model)
        module = _parsed(build.ptx)
        entries = [
            _profile_entry(kernel, build, problem, device, workload, table, module, timeout_s) for workload in bench
        ]
        weighted = [(entry.workload.weight, launch) for entry in entries for launch in entry.launches]
        seen = Observation(
            counts=weighted_counts(weighted),
            terms_us=weighted_terms_us(weighted),
            time_us=sum(weight * launch.total_us for weight, launch in weighted),
            longest=max(weighted, key=lambda item: item[0] * item[1].total_us)[1],
            hardware=table,
        )
        lines = hot_lines(kernel.source, _scaled_counters(entries), binding_resource(seen))
        needed = [entry.least_bytes for entry in entries]
        bound = bottleneck(
            seen,
            least_bytes=_weighted(entries, [item for item in needed if item is not None]),
            launches=len(entries[0].launches),
            hot_line=lines[0].line if lines else None,
        )
        light = _speed_of_light(problem, bench, table, seen.time_us)
        names = None if metrics is None else tuple(metrics)
        values = metric_values(seen, names)
        identity = kernel_id(kernel)
        spills = max((item.spill_bytes for item in build.resources.values()), default=0)
        return Profile(
            kernel_id=identity,
            axes=dict(bench[0].axes),
            time=_modelled_time(seen.time_us),
            metrics=values,
            metric_source=_sources(values),
            bottleneck=bound,
            hot_lines=lines,
            occupancy=seen.longest.occupancy,
            speed_of_light=light,
            summary=_summary(seen, bound, light, lines, device.info),
            next_action=_next_action(bound, lines),
            warnings=_warnings(entries, table, device.info),
            conditions={
                "device": device.info.name,
                "engine": device.info.engine,
                "compiler": build.report.compiler,
                "time_model": f"{MODEL_VERSION}, {table.calibration}",
                "sm_clock_mhz": f"{table.clock_hz / 1e6:.0f}",
                SPILL_CONDITION: str(spills),
            },
            bench=tuple(_bench_profile(entry) for entry in entries),
            report_uri=f"optiml://kernels/{identity}/profile",
        )


@lru_cache(maxsize=16)
def _parsed(ptx: str) -> Module:
    return parse(ptx)


# --- one bench entry -------------------------------------------------------------------------------------------------
def _profile_entry(
    kernel: Kernel,
    build: Build,
    problem: Problem,
    device: Device,
    workload: Workload,
    table: Hardware,
    module: Module,
    timeout_s: float,
) -> _Entry:
    seen = counted_launches(kernel, build, problem, device, workload, table, timeout_s=timeout_s)
    counted = [counters for _, counters in seen]
    launches = [model_launch(shape, counters, module=module, hardware=table) for shape, counters in seen]
    once = [(1.0, launch) for launch in launches]
    return _Entry(
        workload=workload,
        launches=tuple(launches),
        counters=tuple(counted),
        observation=Observation(
            counts=weighted_counts(once),
            terms_us=weighted_terms_us(once),
            time_us=sum(launch.total_us for launch in launches),
            longest=max(launches, key=lambda launch: launch.total_us),
            hardware=table,
        ),
        least_bytes=least_bytes(problem, workload),
    )


def counted_launches(
    kernel: Kernel,
    build: Build,
    problem: Problem,
    device: Device,
    workload: Workload,
    table: Hardware,
    *,
    timeout_s: float,
) -> tuple[tuple[LaunchShape, Counters], ...]:
    """Every launch at one workload with what a sample of its blocks counted: all that the time model needs.

    Raises:
        As `CountedProfiler.profile`.
    """
    plan = resolve_plan(kernel, build, problem, workload, device.info)
    if not plan.launches:
        raise InvalidInput(f"nothing is launched at {dict(workload.axes)}: there is nothing to profile")
    shapes = [_shape(build, plan, index) for index in range(len(plan.launches))]
    reports = _run(build, plan, device, _contents(problem, workload, plan), shapes, table, timeout_s)
    counted = []
    for shape, report in zip(shapes, reports, strict=True):
        if report.counters is None:
            raise Unsupported(f"counting on {device.info.name}")
        counted.append((shape, report.counters))
    return tuple(counted)


def _shape(build: Build, plan: Plan, index: int) -> LaunchShape:
    launch = plan.launches[index]
    resources = build.resources.get(launch.symbol)
    return LaunchShape(
        symbol=launch.symbol,
        blocks=launch.grid[0] * launch.grid[1] * launch.grid[2],
        threads_per_block=launch.block[0] * launch.block[1] * launch.block[2],
        registers_per_thread=None if resources is None else resources.registers_per_thread,
        shared_bytes_per_block=launch.shared_bytes + (0 if resources is None else resources.shared_bytes_per_block),
    )


def _contents(problem: Problem, workload: Workload, plan: Plan) -> dict[str, Array]:
    drawn = draw(problem, workload, seed=INPUT_SEED, tile=DRAWN_ELEMENTS)
    return {
        name: drawn[name] if name in drawn else np.zeros(1, dtype=storage_dtype(array.dtype))
        for name, array in plan.arrays.items()
    }


def _run(
    build: Build,
    plan: Plan,
    device: Device,
    contents: Mapping[str, Array],
    shapes: Sequence[LaunchShape],
    table: Hardware,
    timeout_s: float,
) -> tuple[LaunchReport, ...]:
    """Run a sample of the blocks: a few first, and more only where a warp's program is short enough.

    Where the blocks of a sample fault or never end, because they need what the others would have done, the whole grid
    runs, if it is small.
    """
    share = min(_l1_share(shape, table) for shape in shapes)

    def run(sample_blocks: int | None) -> tuple[LaunchReport, ...]:
        return device.run(
            build,
            plan,
            (contents,),
            timeout_s=timeout_s,
            count=True,
            sample_blocks=sample_blocks,
            l1_share_bytes=share,
            outputs=False,
        ).launches

    wanted = min(_sampled_blocks(shape) for shape in shapes)
    try:
        reports = run(FIRST_BLOCKS)
        if all(report.blocks_run == report.blocks_total for report in reports) or _is_long(reports):
            return reports
        return run(wanted)
    except KernelFault as fault:
        if any(shape.blocks > MOST_BLOCKS_IN_FULL for shape in shapes):
            raise Unsupported(
                f"profiling {shapes[0].symbol} on a sample of its blocks ({fault}); profile it at smaller sizes"
            ) from fault
    try:
        return run(None)
    except KernelFault as fault:
        raise Unsupported(f"profiling {shapes[0].symbol} at these sizes ({fault})") from fault


def _sampled_blocks(shape: LaunchShape) -> int:
    return min(MOST_SAMPLED_BLOCKS, max(LEAST_SAMPLED_BLOCKS, SAMPLED_THREADS // shape.threads_per_block))


def _is_long(reports: Sequence[LaunchReport]) -> bool:
    return any(
        report.counters is not None
        and report.counters.warp_instructions > LONG_WARP_INSTRUCTIONS * report.counters.warps
        for report in reports
    )


def _l1_share(shape: LaunchShape, table: Hardware) -> int:
    resident = occupancy(
        table,
        threads_per_block=shape.threads_per_block,
        registers_per_thread=shape.registers_per_thread,
        shared_bytes_per_block=shape.shared_bytes_per_block,
    ).blocks_per_sm
    busy = min(resident, -(-shape.blocks // table.sms))
    return l1_share_bytes(table, shared_bytes_per_block=shape.shared_bytes_per_block, blocks_per_sm=busy)


# --- the whole -------------------------------------------------------------------------------------------------------
def _scaled_counters(entries: Sequence[_Entry]) -> list[tuple[float, Counters]]:
    return [
        (entry.workload.weight * launch.shape.blocks / launch.blocks_run, counters)
        for entry in entries
        for launch, counters in zip(entry.launches, entry.counters, strict=True)
    ]


def _weighted(entries: Sequence[_Entry], values: Sequence[float]) -> float | None:
    """Sum of one value per entry by weight; None unless every entry has one."""
    if len(values) < len(entries):
        return None
    return sum(entry.workload.weight * value for entry, value in zip(entries, values, strict=True))


def _speed_of_light(
    problem: Problem, bench: Sequence[Workload], table: Hardware, time_us: float
) -> SpeedOfLight | None:  # fmt: skip
    floors = [(workload.weight, floor(problem, workload, table)) for workload in bench]
    known = [(weight, item) for weight, item in floors if item is not None]
    if len(known) < len(floors):
        return None
    total = sum(weight * item.us for weight, item in known)
    longest = max(known, key=lambda pair: pair[0] * pair[1].us)[1]
    return SpeedOfLight(us=total, pct=100.0 * total / time_us, bound=longest.bound)


def _modelled_time(time_us: float) -> Time:
    return Time(median_us=time_us, p10_us=None, p90_us=None, runs=0, noise_pct=None, source="modelled")


def _sources(values: Mapping[str, float | None]) -> dict[str, MetricSource]:
    return {name: METRICS[name].source for name, value in values.items() if value is not None}


def _bench_profile(entry: _Entry) -> BenchProfile:
    """One entry with every metric: what was not asked for is still needed to compare profiles."""
    return BenchProfile(
        axes=dict(entry.workload.axes),
        weight=entry.workload.weight,
        time=_modelled_time(entry.observation.time_us),
        metrics=metric_values(entry.observation),
        terms_us=dict(entry.observation.terms_us),
        blocks_total=sum(launch.shape.blocks for launch in entry.launches),
        blocks_run=sum(launch.blocks_run for launch in entry.launches),
    )


def _summary(
    seen: Observation, bound: Bottleneck, light: SpeedOfLight | None, lines: Sequence[HotLine], info: DeviceInfo
) -> str:
    name = info.name if "emulated" in info.name else f"{info.name} (emulated)"
    text = f"Modelled at {seen.time_us:.4g} µs for {name}, {bound.kind}-bound: {bound.evidence[0]}."
    if len(bound.evidence) > 1:
        text += f" {bound.evidence[1][0].upper()}{bound.evidence[1][1:]}."
    if lines:
        text += f" Line {lines[0].line} does {lines[0].share_pct:.0f} % of that work."
    if light is not None:
        text += f" That is {light.pct:.0f} % of the speed of light ({light.us:.3g} µs, {light.bound})."
    return text


def _next_action(bound: Bottleneck, lines: Sequence[HotLine]) -> str:
    where = f" Start at line {lines[0].line}: {lines[0].source}" if lines and lines[0].source else ""
    return f"{bound.advice[0][0].upper()}{bound.advice[0][1:]}.{where}"


def _warnings(entries: Sequence[_Entry], table: Hardware, info: DeviceInfo) -> tuple[str, ...]:
    warnings = [
        f"times are modelled for {info.name}, not measured; the model is {table.calibration}: "
        "kernels closer than about 1.5x may be in the wrong order"
    ]
    for entry in entries:
        for launch in entry.launches:
            if launch.blocks_run < launch.shape.blocks:
                warnings.append(
                    f"{launch.shape.symbol}: {launch.blocks_run} of {launch.shape.blocks} blocks ran; "
                    "counts are scaled to the whole grid"
                )
    return tuple(dict.fromkeys(warnings))
