"""Build, run, compare: the verdict on one kernel.

The verdict is made here, in a process that never runs a stranger's code; devices and references answer raw numbers
from their children. This is the only place that turns a `KernelFault` into a verdict.
"""

from __future__ import annotations

import dataclasses
import math
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from optiml.codec import kernel_id, problem_digest
from optiml.device.device import Device, RunResult, Scrutiny
from optiml.device.plan import BadLaunch, Plan, resolve_plan
from optiml.errors import Fault, InvalidInput, KernelFault, OptimlError, Unsupported, WorkerDied
from optiml.expressions import evaluate
from optiml.problems.data import draw, from_float64, is_float, to_float64
from optiml.problems.problem import names_of, satisfies
from optiml.records import (
    Build,
    CaseResult,
    Kernel,
    KernelOracle,
    Level,
    Mismatch,
    Problem,
    Reason,
    Status,
    Tolerance,
    Verdict,
    Workload,
)
from optiml.toolchain.nvrtc import CompileFailure
from optiml.verify.compare import (
    CAP,
    DATA_SCALE,
    IMPRECISE_FACTOR,
    Comparison,
    compare,
    first_mismatch,
    floor_for,
    hardness,
    rms,
    tolerance_for,
)
from optiml.verify.constants import LARGEST, LARGEST_STEP, Constants, constants_of, has_variables
from optiml.verify.contents import filled, same_bits
from optiml.verify.controls import passing_control
from optiml.verify.diagnose import likely_cause
from optiml.verify.explain import at_sizes, next_action, summary, tolerance_policy
from optiml.verify.inputs import (
    Case,
    bench_case,
    block_cases,
    cost,
    describe_domain,
    fixed_scalars,
    hidden_cases,
    saturating_case,
    smaller_sizes,
    visible_cases,
    with_many_calls,
    with_other_distributions,
)
from optiml.verify.probes import Probe, probes, unmoved
from optiml.verify.reference import References
from optiml.verify.scrutiny import (
    ALONE,
    CHECK_TIME,
    CHECKED_COST,
    CHECKED_THREADS,
    CHECKS,
    OTHER_BYTE,
    PERTURBED,
    PERTURBED_TIMEOUT_S,
    Change,
    array_of,
    can_check,
    sanitizer_report,
    threads_of,
)

Array = NDArray[Any]
STRAIN = 0.5  # error of the reference in the declared dtype, in floors, that one operation does not make
STRAINED = (
    "this problem gives no `accumulation`, and its reference in the declared dtype errs by more than the tolerance "
    "allows for one operation: if outputs sum many terms, say how many in `accumulation`, or right kernels may be "
    "called imprecise"
)
REASON_ORDER: tuple[Reason, ...] = Reason.__args__  # type: ignore[attr-defined]
MAX_WORKSPACE_BYTES = 1 << 29  # at the sizes of a verification
CHECKED_AGAIN_COST = 4e6  # operations up to which outputs at bench sizes are compared with the reference
FEW_ELEMENTS = 64  # outputs smaller than this get their magnitude from several seeds
MAGNITUDE_SEEDS = 8
VANISHED = 2.0**-48  # an output that much smaller than the inputs is what is left of a difference of equals
LEAST_TIMED_COST = 1e3  # operations or elements of a reference whose time says something
SLOW_REFERENCE_S = 2.5  # optional cases whose reference would take longer are left out
OPTIONAL_TIMEOUT_S = 3.0
MOST_NOT_FINITE = 0.75  # share of the required hidden cases that may be left out as not finite
SHRINK_S = 1.5
SHRUNK: frozenset[Reason] = frozenset(
    ("fault", "unwritten_output", "nonfinite", "hard_coded", "imprecise", "wrong_values")
)
DOUBT_COST = 1e8  # operations or elements of a run that settles a doubt


class CompilerLike(Protocol):
    def compile(self, kernel: Kernel, arch: str) -> Build | CompileFailure: ...


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """Why one case failed."""

    reason: Reason
    detail: str
    mismatch: Mismatch | None = None
    fault: Fault | None = None
    cause: str | None = None  # a guess


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    """What running one case showed; figures are None where nothing was compared."""

    failure: _Failure | None
    worst: float | None = None  # largest absolute error
    relative: float | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _CaseOutcome:
    case: Case
    result: CaseResult
    failure: _Failure | None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Smallest:
    """The smallest sizes found at which a kernel fails, in figures and in words, and how it fails there."""

    axes: Mapping[str, int]
    failure: _Failure
    text: str


@dataclass(frozen=True, kw_only=True)
class _Sanitized:
    """What the checks of level 2 found, or what keeps them from running."""

    failure: _Failure | None = None
    missing: str | None = None
    sanitizer: Mapping[str, str] | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """Inputs, expectations and tolerances of every run of one case."""

    contents: tuple[Mapping[str, Array], ...]  # per run
    expected: tuple[Mapping[str, Array], ...]
    tolerances: tuple[Mapping[str, Tolerance | None], ...]
    floors: tuple[Mapping[str, Tolerance | None], ...]  # what the policy grants, whatever the caller asked for
    strained: bool = False  # sums are longer than the problem says, by the error of a trusted computation

    def first(self) -> _Prepared:
        """The first run alone."""
        return dataclasses.replace(
            self,
            contents=self.contents[:1],
            expected=self.expected[:1],
            tolerances=self.tolerances[:1],
            floors=self.floors[:1],
        )


@dataclass(frozen=True, kw_only=True)
class _Allowed:
    """Tolerances of the outputs of one run; None where values compare exactly."""

    tolerances: Mapping[str, Tolerance | None]
    floors: Mapping[str, Tolerance | None]
    hardness: float  # the largest error of the reference in the declared dtype, in floors


class Verifier:
    """Verifies kernels on one device with one compiler. Keeps which problems were found sound."""

    def __init__(
        self, compiler: CompilerLike, device: Device, references: References, *, kernel_timeout_s: float = 20.0
    ) -> None:
        self._compiler = compiler
        self._device = device
        self._references = references
        self._timeout_s = kernel_timeout_s
        self._degenerate: dict[str, str | None] = {}
        self._oracles: dict[str, Build | CompileFailure] = {}
        self._reference_rate: dict[str, float] = {}  # by problem: the least seconds per unit of cost seen

    def verify(
        self,
        kernel: Kernel,
        problem: Problem,
        *,
        level: Level = "L1",
        seed: int | None = None,
        reduced: bool = False,
        highest: bool = False,
        explain: bool = True,
        build: Build | CompileFailure | None = None,
        warnings: tuple[str, ...] = (),
    ) -> Verdict:
        """Judge `kernel`, whose launch plan and params were checked before.

        Args:
            level: `L0` the caller's sizes; `L1` hidden cases too; `L2` all checks of the device on every case.
            seed: of hidden sizes and all data; None draws a fresh one.
            reduced: fewer cases, and stop at the first failure: for the nodes of a search.
            explain: look for the smallest size that fails, which takes up to a second.
            highest: where the device cannot give L2, accept at L1 and say so in a warning.
            build: a build already at hand.

        Raises:
            InvalidInput: the problem's reference cannot be run.
            SetupError: the machine lacks something.
        """
        started = time.monotonic()
        rng = random.Random(secrets.randbits(63) if seed is None else seed)
        if build is None:
            build = self._compiler.compile(kernel, self._device.info.arch)
        if isinstance(build, CompileFailure):
            status: Status = "unverified" if build.reason is None else "rejected"
            return self._verdict(
                kernel, problem, status, build.reason, build.detail, started, log=build.log, warnings=warnings
            )
        degenerate = self._why_degenerate(problem)
        if degenerate is not None:
            detail = f"{degenerate} passes every case of {problem.name}; use sizes and data that tell it apart"
            return self._verdict(
                kernel, problem, "unverified", "problem_degenerate", detail, started, build=build, warnings=warnings
            )
        return self._run_cases(kernel, problem, build, rng, level, reduced, highest, explain, started, warnings)

    def why_unsound(self, problem: Problem) -> str | None:
        """Why a problem cannot judge a kernel: a control output passes its cases; None where it can.

        Raises:
            InvalidInput: its reference cannot be run, or does not give what the problem declares.
        """
        degenerate = self._why_degenerate(problem)
        return None if degenerate is None else f"{degenerate} passes every case: use sizes and data that tell it apart"

    def settle_doubt(
        self,
        kernel: Kernel,
        problem: Problem,
        build: Build | CompileFailure,
        verdict: Verdict,
        doubt: str,
        bench: Sequence[Workload],
    ) -> Verdict:
        """Run an accepted kernel whose profile is implausible at the sizes of `bench`, where that can be afforded.

        What is wrong there rejects it; what cannot be run there is `too_fast`.
        """
        started = time.monotonic()
        assert isinstance(build, Build)
        failure = _Failure(reason="too_fast", detail=doubt)
        for workload in bench:
            if cost(problem, workload) > DOUBT_COST:
                break
            case = bench_case(problem, workload, random.Random(secrets.randbits(63)))
            outcome = self._run_case(kernel, problem, build, case, random.Random(0), level="L0", reduced=True)
            if outcome is None:  # not finite, or too slow
                break
            if outcome.failure is not None:
                failure = outcome.failure
                break
        else:
            return verdict
        return self._verdict(
            kernel, problem, "rejected", failure.reason, failure.detail, started,
            build=build, warnings=verdict.warnings, cases=verdict.cases, domain=verdict.domain,
            levels=verdict.levels, mismatch=failure.mismatch, fault=failure.fault,
        )  # fmt: skip

    # --- the cases ---------------------------------------------------------------------------------------------------
    def _run_cases(
        self,
        kernel: Kernel,
        problem: Problem,
        build: Build,
        rng: random.Random,
        level: Level,
        reduced: bool,
        highest: bool,
        explain: bool,
        started: float,
        warnings: tuple[str, ...],
    ) -> Verdict:
        visible = visible_cases(problem, rng, reduced=reduced)
        hidden = () if level == "L0" else hidden_cases(problem, rng, reduced=reduced)
        if hidden and not reduced:
            constants = constants_of(build.ptx)
            if has_variables(build.ptx):
                hidden = with_many_calls(hidden, constants.compared)
            units, dear = self._extents(kernel, problem, build, constants), kernel.launcher is not None
            hidden += block_cases(problem, units, rng, compared=constants.compared, dear=dear)
            if not dear:
                hidden += (*saturating_case(problem, self.blocks_at(kernel, problem, build), hidden, rng),)
        outcomes: list[_CaseOutcome] = []
        not_finite = 0

        def run(case: Case) -> _CaseOutcome | None:
            return self._run_case(kernel, problem, build, case, rng, level=level, reduced=reduced)

        try:
            for group in (visible, hidden):
                for case in group:
                    outcome = run(case)
                    if outcome is None and not case.optional:
                        tried = map(run, with_other_distributions(problem, case))
                        outcome = next((item for item in tried if item is not None), None)
                    if outcome is None:
                        not_finite += not case.optional
                        continue
                    outcomes.append(outcome)
                    if outcome.failure is not None and (reduced or _ends_the_process(outcome.failure)):
                        break
                if any(outcome.failure for outcome in outcomes):
                    break
        except Unsupported as error:
            return self._verdict(
                kernel, problem, "unverified", None, str(error), started, build=build, warnings=warnings
            )
        except WorkerDied as error:
            if error.cancelled:  # we are closing: nothing was found out about the kernel
                raise
            detail = "the device's process ended without an answer; nothing is known of the kernel"
            return self._verdict(kernel, problem, "unverified", None, detail, started, build=build, warnings=warnings)
        cases = tuple(outcome.result for outcome in outcomes)
        warnings += tuple(dict.fromkeys(note for outcome in outcomes for note in outcome.warnings))[:2]
        domain = describe_domain(problem, [outcome.result.axes for outcome in outcomes])
        failures = [(outcome.failure, outcome.result.hidden) for outcome in outcomes if outcome.failure is not None]
        levels: tuple[Level, ...] = ("L0",) if level == "L0" or reduced else ("L0", "L1")
        if failures:
            failure = _first_reason(failures)
            smallest = None
            if explain and not reduced and failure.reason in SHRUNK:
                failed = min(
                    (outcome.case for outcome in outcomes if outcome.failure is not None),
                    key=lambda case: cost(problem, case.workload),
                )
                smallest = self._shrunk(kernel, problem, build, failed, rng)
            detail = failure.detail
            if smallest is not None:
                detail = f"{detail}; the smallest failing size found is {smallest.text}"
            cause = (smallest.failure.cause if smallest is not None else None) or failure.cause
            if cause is not None:
                detail = f"{detail}; likely cause: {cause}"
            return self._verdict(
                kernel, problem, "rejected", failure.reason, detail, started,
                build=build, warnings=warnings, cases=cases, domain=domain, levels=levels,
                mismatch=failure.mismatch, fault=failure.fault, cause=cause,
                smallest=None if smallest is None else smallest.axes,
            )  # fmt: skip
        required = sum(not case.optional for case in hidden)
        if not_finite > required * MOST_NOT_FINITE:
            detail = (
                f"the reference of {problem.name} is not finite at {not_finite} of {required} hidden sizes, whatever "
                "the data; name distributions in its workloads on which it is"
            )
            return self._verdict(
                kernel, problem, "unverified", None, detail, started,
                build=build, warnings=warnings, cases=cases, domain=domain, levels=("L0",),
            )  # fmt: skip
        warnings += () if reduced or level == "L0" else _about_scalars(problem)
        sanitizer = None
        if level == "L2":
            again = [outcome.case for outcome in outcomes if outcome.case.sanitized]
            checked = self._sanitize(kernel, problem, build, again, rng)
            warnings += checked.warnings
            sanitizer = checked.sanitizer
            if checked.failure is not None:
                return self._verdict(
                    kernel, problem, "rejected", checked.failure.reason, checked.failure.detail, started,
                    build=build, warnings=warnings, cases=cases, domain=domain, levels=levels,
                    fault=checked.failure.fault, sanitizer=sanitizer,
                )  # fmt: skip
            if checked.missing is not None and not highest:
                return self._verdict(
                    kernel, problem, "unverified", None, checked.missing, started,
                    build=build, warnings=warnings, cases=cases, domain=domain, levels=levels,
                )  # fmt: skip
            if checked.missing is None:
                levels = (*levels, "L2")
            else:
                warnings += (checked.missing,)
        return self._verdict(
            kernel, problem, "accepted", None, None, started,
            build=build, warnings=warnings, cases=cases, domain=domain, levels=levels, sanitizer=sanitizer,
        )  # fmt: skip

    def _shrunk(
        self, kernel: Kernel, problem: Problem, build: Build, case: Case, rng: random.Random
    ) -> _Smallest | None:
        """The smallest sizes at which a failing case still fails, found axis by axis in little time."""
        axes = dict(case.workload.axes)
        failure: _Failure | None = None
        passing: dict[str, int] = {}
        deadline = time.monotonic() + SHRINK_S
        for name in axes:
            for size in smaller_sizes(problem, name, axes[name]):
                if time.monotonic() > deadline:
                    break
                workload = dataclasses.replace(case.workload, axes={**axes, name: size})
                if not satisfies(problem, workload.axes, workload.scalars):
                    continue
                tried = dataclasses.replace(case, workload=workload, hidden=True, optional=True, probed=False)
                try:
                    outcome = self._run_case(kernel, problem, build, tried, rng, level="L0", reduced=True)
                except OptimlError as error:  # sizes that the data or the reference do not allow
                    if isinstance(error, WorkerDied) and error.cancelled:
                        raise
                    continue
                if outcome is not None and outcome.failure is not None:
                    axes, failure = {**axes, name: size}, outcome.failure
                    break
                if outcome is not None:
                    passing[name] = size
        if failure is None:
            return None
        sizes = ", ".join(f"{name}={size}" for name, size in axes.items())
        passes = ", ".join(f"{name}={size}" for name, size in passing.items() if size < axes[name])
        return _Smallest(axes=axes, failure=failure, text=f"{sizes} ({passes} passes)" if passes else sizes)

    def _sanitize(
        self, kernel: Kernel, problem: Problem, build: Build, cases: Sequence[Case], rng: random.Random
    ) -> _Sanitized:
        """Every case once more with all of the device's own checks."""
        info = self._device.info
        passed = f"{info.name} gives L0 and L1, which passed"
        if not can_check(info):
            missing = f"{passed}; L2 needs race and initialisation checks, which only the native engine has"
            return _Sanitized(missing=f"{missing}: it is not built here, see optiml doctor")
        notes: dict[str, None] = {}
        for case in cases:
            where = at_sizes(case.workload.axes)
            plan = resolve_plan(kernel, build, problem, case.workload, info)
            inputs = draw(problem, case.workload, seed=case.seed)
            contents = (filled(plan, inputs, rng, quiet_nan=True),)
            result = None
            checks = CHECKS
            while result is None:
                try:
                    result = self._device.run(
                        build, plan, contents, timeout_s=CHECK_TIME * self._timeout_s, outputs=False,
                        scrutiny=Scrutiny(checks=checks),
                    )  # fmt: skip
                except KernelFault as error:
                    failure = _of_fault(error, where)
                    if failure.reason == "timed_out":
                        return _Sanitized(missing=f"{passed}; the checks of L2 did not end in time {where}")
                    if error.fault.kind != "uninitialised" or array_of(error.fault, plan) is not None:
                        return _Sanitized(failure=failure, sanitizer=sanitizer_report(error.fault))
                    # shared memory: level 1 found out whether it reaches the outputs, and it need not
                    notes[f"{where}: {error.fault.detail}; the outputs do not depend on it"] = None
                    checks = checks - {"uninitialised"}
            if _engines(result) - {"native"}:
                missing = f"{passed}; L2 needs race and initialisation checks, which only the native engine has"
                return _Sanitized(missing=f"{missing}: it does not cover this kernel")
        return _Sanitized(sanitizer=sanitizer_report(None), warnings=tuple(notes)[:2])

    def blocks_at(self, kernel: Kernel, problem: Problem, build: Build) -> Callable[[Workload], int | None]:
        """How many blocks a kernel launches for a workload."""

        def blocks(workload: Workload) -> int | None:
            try:
                plan = resolve_plan(kernel, build, problem, workload, self._device.info)
            except BadLaunch:
                return None
            return sum(math.prod(launch.grid) for launch in plan.launches)

        return blocks

    def _extents(self, kernel: Kernel, problem: Problem, build: Build, constants: Constants) -> list[int]:
        """The sizes that a kernel works in: block extents, whole-number params and the constants of its code."""
        stepped = [value for value in constants.stepped if value <= LARGEST_STEP]
        found = [value for value in kernel.params.values() if isinstance(value, int) and not isinstance(value, bool)]
        found = [value for value in (*found, *constants.compared, *stepped) if 2 <= value <= LARGEST]
        try:
            plan = resolve_plan(kernel, build, problem, problem.workloads[0], self._device.info)
        except BadLaunch:
            return found
        for launch in plan.launches:
            found += [*launch.block, launch.block[0] * launch.block[1] * launch.block[2]]
        return found

    def _run_case(
        self,
        kernel: Kernel,
        problem: Problem,
        build: Build,
        case: Case,
        rng: random.Random,
        *,
        level: Level,
        reduced: bool,
    ) -> _CaseOutcome | None:
        """One case, or None where a hidden case's reference is not finite in the declared dtype."""
        axes = dict(case.workload.axes)
        try:
            plan = resolve_plan(kernel, build, problem, case.workload, self._device.info)
        except BadLaunch as error:
            return _outcome(case, _Failure(reason=error.reason, detail=f"{at_sizes(axes)}: {error}"))
        scratch = sum(array.nbytes for array in plan.arrays.values() if array.role == "workspace")
        if case.optional and scratch > MAX_WORKSPACE_BYTES:
            return None
        if scratch > MAX_WORKSPACE_BYTES:  # each run fills all of it with a poison of its own
            raise Unsupported(f"verification with {scratch} bytes of workspace, more than {MAX_WORKSPACE_BYTES}")
        slow = self._reference_rate.get(problem.name, 0.0) * cost(problem, case.workload) > SLOW_REFERENCE_S
        prepared = None if case.optional and slow else self._prepare(problem, plan, case, rng)
        if prepared is None:
            return None
        attempt = self._attempt(
            problem, plan, case, prepared, build, self._scrutiny(problem, plan, case, level, reduced)
        )
        if case.optional and attempt.failure is not None and attempt.failure.reason == "timed_out":
            return None
        tolerances = [item for item in prepared.tolerances[0].values() if item is not None]
        if prepared.strained:
            attempt = dataclasses.replace(attempt, warnings=(*attempt.warnings, STRAINED))
        return _outcome(case, attempt.failure, attempt=attempt, tolerance=next(iter(tolerances), None))

    def _scrutiny(self, problem: Problem, plan: Plan, case: Case, level: Level, reduced: bool) -> Scrutiny | None:
        """How closely to watch a case of the first two levels."""
        if reduced or level == "L0" or not can_check(self._device.info):
            return None
        affordable = cost(problem, case.workload) <= CHECKED_COST and threads_of(plan) <= CHECKED_THREADS
        return Scrutiny(checks=CHECKS, runs=1) if affordable else None

    def _attempt(
        self, problem: Problem, plan: Plan, case: Case, prepared: _Prepared, build: Build, scrutiny: Scrutiny | None
    ) -> _Attempt:
        """Run a case and judge it, with the checks and the second look that `scrutiny` asks for."""
        timeout_s = min(self._timeout_s, OPTIONAL_TIMEOUT_S) if case.optional else None
        attempt = self._run_and_judge(problem, plan, case, prepared, build, scrutiny, timeout_s)
        fault = attempt.failure.fault if attempt.failure is not None else None
        if fault is not None and fault.kind == "uninitialised":
            attempt = self._without_initialisation(problem, plan, case, prepared, build, fault)
        if attempt.failure is None and scrutiny is not None and case.perturbed:
            failure = self._perturbed(problem, plan, case, prepared, build)
            attempt = dataclasses.replace(attempt, failure=failure)
        if attempt.failure is None and case.probed:
            attempt = dataclasses.replace(attempt, failure=self._probed(problem, plan, case, prepared, build))
        return attempt

    def _probed(self, problem: Problem, plan: Plan, case: Case, prepared: _Prepared, build: Build) -> _Failure | None:
        """Why the outputs do not follow a change of one element of an input."""
        base = prepared.contents[0]
        inputs = {name: base[name] for name, array in plan.arrays.items() if array.role in ("input", "inout")}
        tried: list[tuple[Probe, Mapping[str, Array]]] = []
        for probe in probes(problem, case.workload, inputs, random.Random(case.seed)):
            expected, same = self._expect(problem, case.workload, probe.inputs)
            if _all_finite(problem, expected, same):
                tried.append((probe, expected))
        contents = (base, *({**base, **probe.inputs} for probe, _ in tried))
        try:
            runs = self._device.run(build, plan, contents, timeout_s=self._timeout_s).runs
        except KernelFault as error:
            return _of_fault(error, at_sizes(case.workload.axes))
        for (probe, expected), arrays in zip(tried, runs[1:], strict=True):
            failure = self._follows(problem, case, prepared, probe, expected, runs[0], arrays)
            if failure is not None:
                return failure
        return None

    def _follows(
        self, problem: Problem, case: Case, prepared: _Prepared, probe: Probe, expected: Mapping[str, Array],
        before: Mapping[str, Array], after: Mapping[str, Array],
    ) -> _Failure | None:  # fmt: skip
        for name, tensor in problem.outputs.items():
            floor = prepared.floors[0][name]
            found = compare(after[name], expected[name], tensor.dtype, prepared.tolerances[0][name])
            wrong = found.wrong
            if floor is not None and not wrong.any():
                wrong = unmoved(
                    to_float64(before[name], tensor.dtype), to_float64(after[name], tensor.dtype),
                    prepared.expected[0][name], expected[name], floor,
                )  # fmt: skip
            if not wrong.any():
                continue
            mismatch = first_mismatch(
                name, after[name], expected[name], tensor.dtype, wrong, prepared.contents[0][name], case.workload.axes
            )
            reason: Reason = "imprecise" if 0 < found.worst <= IMPRECISE_FACTOR else "wrong_values"
            place = f"{probe.name}[{', '.join(map(str, probe.index))}]"
            change = f"with only {place} changed from {probe.before:.6g} to {probe.after:.6g}, "
            return _Failure(reason=reason, detail=change + _mismatch_text(mismatch, reason), mismatch=mismatch)
        return None

    def _run_and_judge(
        self,
        problem: Problem,
        plan: Plan,
        case: Case,
        prepared: _Prepared,
        build: Build,
        scrutiny: Scrutiny | None,
        timeout_s: float | None = None,
    ) -> _Attempt:
        where = at_sizes(case.workload.axes)
        try:
            result = self._device.run(
                build, plan, prepared.contents, timeout_s=timeout_s or self._timeout_s, scrutiny=scrutiny
            )
        except InvalidInput as error:  # the device refused: more threads than its launch bounds, too large a global
            return _Attempt(failure=_Failure(reason="bad_launch", detail=f"{where}: {error}"))
        except KernelFault as error:
            return _Attempt(failure=_of_fault(error, where))
        failure, worst, relative = self._judge_runs(problem, plan, case, prepared, result.runs, build)
        return _Attempt(failure=failure, worst=worst, relative=relative)

    def _without_initialisation(
        self, problem: Problem, plan: Plan, case: Case, prepared: _Prepared, build: Build, fault: Fault
    ) -> _Attempt:
        """A kernel read memory that nothing had written. It is wrong if that reaches its outputs, else it may."""
        races = Scrutiny(checks=frozenset(("race",)), runs=1)
        others = (Scrutiny(unwritten=byte) for byte in (0, OTHER_BYTE))
        attempt = _Attempt(failure=None)
        for scrutiny in (races, *others):
            attempt = self._run_and_judge(problem, plan, case, prepared, build, scrutiny)
            if attempt.failure is not None:
                break
        failure = attempt.failure
        where = at_sizes(case.workload.axes)
        if failure is None:
            warning = f"{where}: {fault.detail}; the outputs do not depend on it"
            return dataclasses.replace(attempt, warnings=(warning,))
        if REASON_ORDER.index(failure.reason) <= REASON_ORDER.index("mutated_input"):
            return attempt
        name = array_of(fault, plan)
        if name in problem.outputs:
            detail = f"{failure.detail}; {name} is read before the kernel has written it"
            unwritten = dataclasses.replace(failure, reason="unwritten_output", detail=detail)
            return dataclasses.replace(attempt, failure=unwritten)
        detail = f"{where}: {fault.detail}, and the outputs depend on it"
        used = _Failure(reason="fault", detail=detail, mismatch=failure.mismatch, fault=fault)
        return dataclasses.replace(attempt, failure=used)

    def _perturbed(
        self, problem: Problem, plan: Plan, case: Case, prepared: _Prepared, build: Build
    ) -> _Failure | None:
        """Why the results change with what no kernel may rely on: order of blocks, addresses, unwritten memory."""
        first = prepared.first()
        timeout_s = min(self._timeout_s, PERTURBED_TIMEOUT_S)

        def failure_under(scrutiny: Scrutiny) -> _Failure | None:
            failure = self._run_and_judge(problem, plan, case, first, build, scrutiny, timeout_s).failure
            waits = failure is not None and (
                failure.reason == "timed_out" or (failure.fault is not None and failure.fault.kind == "deadlock")
            )
            return None if waits else failure

        together = failure_under(PERTURBED)
        if together is None:
            return None
        where = at_sizes(case.workload.axes)
        for change, scrutiny in ALONE.items():
            failure = failure_under(scrutiny)
            if failure is not None:
                return _of_change(change, failure, where)
        return _of_change("order", together, where)

    # --- preparing ---------------------------------------------------------------------------------------------------
    def _prepare(self, problem: Problem, plan: Plan, case: Case, rng: random.Random) -> _Prepared | None:
        """Fresh data for every run of a case, with a different poison in each."""
        contents, expectations, allowances = [], [], []
        further: Mapping[str, Sequence[float]] = {}
        for run in range(case.runs):
            inputs = draw(problem, case.workload, seed=case.seed + run)
            expected, same_dtype = self._expect(problem, case.workload, inputs)
            if case.hidden and not _all_finite(problem, expected, same_dtype):
                return None
            if run == 0:
                further = self._further_squares(problem, case, expected)
            magnitudes = self._magnitudes(problem, inputs, expected, further)
            allowed = self._allowed(problem, case, expected, same_dtype, magnitudes)
            if case.optional and allowed.hardness > CAP:
                return None
            contents.append(filled(plan, inputs, rng, quiet_nan=run == 0))
            expectations.append(expected)
            allowances.append(allowed)
        again = [index % case.runs for index in range(case.runs + case.calls)]
        return _Prepared(
            contents=tuple(contents[index] for index in again),
            expected=tuple(expectations[index] for index in again),
            tolerances=tuple(allowances[index].tolerances for index in again),
            floors=tuple(allowances[index].floors for index in again),
            strained=problem.accumulation is None and any(allowed.hardness > STRAIN for allowed in allowances),
        )

    def _expect(
        self, problem: Problem, workload: Workload, inputs: Mapping[str, Array]
    ) -> tuple[Mapping[str, Array], Mapping[str, Array] | None]:
        if isinstance(problem.reference, KernelOracle):
            return self._run_oracle(problem.reference.kernel, problem, workload, inputs), None
        started = time.monotonic()
        expected = self._references.expected(problem, workload, inputs)
        work = cost(problem, workload)
        if work >= LEAST_TIMED_COST:  # the least, for the start of a child and other work of the machine only add to it
            rate = (time.monotonic() - started) / work
            self._reference_rate[problem.name] = min(rate, self._reference_rate.get(problem.name, rate))
        return expected.exact, expected.same_dtype

    def _run_oracle(
        self, oracle: Kernel, problem: Problem, workload: Workload, inputs: Mapping[str, Array]
    ) -> Mapping[str, Array]:
        key = kernel_id(oracle)
        if key not in self._oracles:
            self._oracles[key] = self._compiler.compile(oracle, self._device.info.arch)
        build = self._oracles[key]
        if isinstance(build, CompileFailure):
            raise _oracle_failed(problem, build.detail)
        try:
            plan = resolve_plan(oracle, build, problem, workload, self._device.info)
            contents = filled(plan, inputs, random.Random(0), quiet_nan=False)
            result = self._device.run(build, plan, (contents,), timeout_s=self._timeout_s)
        except (BadLaunch, KernelFault) as error:
            raise _oracle_failed(problem, str(error)) from error
        return {name: _widened(problem, name, result.runs[0][name]) for name in problem.outputs}

    def _allowed(
        self,
        problem: Problem,
        case: Case,
        expected: Mapping[str, Array],
        same_dtype: Mapping[str, Array] | None,
        magnitudes: Mapping[str, float],
    ) -> _Allowed:
        names = names_of(problem, case.workload.axes, case.workload.scalars)
        length = 1 if problem.accumulation is None else evaluate(problem.accumulation, names)
        scale = max((DATA_SCALE.get(label, 1.0) for label in case.distribution().values()), default=1.0)
        tolerances: dict[str, Tolerance | None] = {}
        floors: dict[str, Tolerance | None] = {}
        hardest = 0.0
        for name, tensor in problem.outputs.items():
            same = None if same_dtype is None else same_dtype[name]
            for target, caller in ((tolerances, problem.tolerance), (floors, None)):
                target[name] = tolerance_for(
                    tensor.dtype,
                    accumulation=length,
                    magnitude=magnitudes[name],
                    exact=expected[name],
                    same_dtype=same,
                    caller=caller,
                    data_scale=scale,
                )
            if is_float(tensor.dtype):
                floor = floor_for(tensor.dtype, accumulation=length, magnitude=magnitudes[name])
                hardest = max(hardest, hardness(floor, expected[name], same))
        return _Allowed(tolerances=tolerances, floors=floors, hardness=hardest)

    def _magnitudes(
        self,
        problem: Problem,
        inputs: Mapping[str, Array],
        expected: Mapping[str, Array],
        further: Mapping[str, Sequence[float]],
    ) -> dict[str, float]:
        """Rms of each output; that of the inputs where an output is zero but for rounding: nothing else has a scale."""
        given = [rms(to_float64(array, problem.inputs[name].dtype)) for name, array in inputs.items()
                 if is_float(problem.inputs[name].dtype)]  # fmt: skip
        scale = max(given, default=0.0)
        squares = {name: [rms(array) ** 2, *further.get(name, ())] for name, array in expected.items()}
        found = {name: float(np.sqrt(np.mean(values))) for name, values in squares.items()}
        return {name: scale if value <= VANISHED * scale else value for name, value in found.items()}

    def _further_squares(
        self, problem: Problem, case: Case, expected: Mapping[str, Array]
    ) -> Mapping[str, Sequence[float]]:
        """Mean squares of the outputs with few elements, on other data: one sum may lie near zero by chance."""
        few = _of_few_elements(problem, expected)
        squares: dict[str, list[float]] = {name: [] for name in few}
        for extra in range(1, MAGNITUDE_SEEDS) if few else ():
            inputs = draw(problem, case.workload, seed=case.seed + 1000 + extra)
            outputs, _ = self._expect(problem, case.workload, inputs)
            for name in few:
                squares[name].append(rms(outputs[name]) ** 2)
        return squares

    def _why_degenerate(self, problem: Problem) -> str | None:
        """The control output that the caller's cases cannot tell from a right one, or None; remembered."""
        key = problem_digest(problem)
        if key not in self._degenerate:
            cases = []
            for index, case in enumerate(visible_cases(problem, random.Random(0), reduced=False)):
                inputs = draw(problem, case.workload, seed=index)
                expected, same = self._expect(problem, case.workload, inputs)
                further = self._further_squares(problem, case, expected)
                magnitudes = self._magnitudes(problem, inputs, expected, further)
                cases.append((expected, self._allowed(problem, case, expected, same, magnitudes).tolerances))
            self._degenerate[key] = passing_control(problem, cases)
        return self._degenerate[key]

    # --- judging -----------------------------------------------------------------------------------------------------
    def _judge_runs(
        self,
        problem: Problem,
        plan: Plan,
        case: Case,
        prepared: _Prepared,
        runs: tuple[Mapping[str, Array], ...],
        build: Build,
    ) -> tuple[_Failure | None, float | None, float | None]:
        axes = dict(case.workload.axes)
        worst_error: float | None = None
        worst_relative: float | None = None
        failures: list[_Failure] = []
        for index, arrays in enumerate(runs):
            mutated = _mutated_input(plan, prepared.contents[index], arrays)
            if mutated is not None:
                failures.append(
                    _Failure(reason="mutated_input", detail=f"{at_sizes(axes)}: input {mutated} was changed")
                )
            for name, tensor in problem.outputs.items():
                expected, tolerance = prepared.expected[index][name], prepared.tolerances[index][name]
                poison = prepared.contents[index][name]
                found = compare(arrays[name], expected, tensor.dtype, tolerance)
                if found.max_abs_error is not None:
                    worst_error = max(worst_error or 0.0, found.max_abs_error)
                if found.max_rel_error is not None:
                    worst_relative = max(worst_relative or 0.0, found.max_rel_error)
                if found.ok:
                    continue
                mismatch = first_mismatch(name, arrays[name], expected, tensor.dtype, found.wrong, poison, axes)
                in_place = plan.arrays[name].role == "inout"
                reason = _reason_of(found.wrong, arrays[name], poison, found, index, in_place=in_place)
                if reason == "nonfinite" and index == 0 and self._depends_on_poison(problem, plan, prepared, build):
                    reason = "unwritten_output"
                if index > 0 and not failures and self._right_alone(problem, plan, prepared, index, build):
                    reason = "state_across_runs"
                before = [earlier[name] for earlier in prepared.expected[:index]]
                cause = likely_cause(
                    to_float64(arrays[name], tensor.dtype) if is_float(tensor.dtype) else arrays[name],
                    expected, found.wrong, unwritten=same_bits(arrays[name], poison), before=before,
                )  # fmt: skip
                text = _mismatch_text(mismatch, reason)
                failures.append(_Failure(reason=reason, detail=text, mismatch=mismatch, cause=cause))
        return (_first_reason([(item, False) for item in failures]) if failures else None, worst_error, worst_relative)

    def _right_alone(self, problem: Problem, plan: Plan, prepared: _Prepared, index: int, build: Build) -> bool:
        """Whether a run that failed after others is right as the first of a fresh load."""
        try:
            arrays = self._device.run(build, plan, (prepared.contents[index],), timeout_s=self._timeout_s).runs[0]
        except (KernelFault, WorkerDied):
            return False
        return all(
            compare(arrays[name], prepared.expected[index][name], tensor.dtype, prepared.tolerances[index][name]).ok
            for name, tensor in problem.outputs.items()
        )

    def _depends_on_poison(self, problem: Problem, plan: Plan, prepared: _Prepared, build: Build) -> bool:
        """Whether the outputs change when only what they held before changes: the kernel reads them."""
        answers = []
        for salt in (1, 2):
            contents = dict(prepared.contents[0])
            fresh = filled(plan, {}, random.Random(salt), quiet_nan=False)
            contents.update({name: fresh[name] for name, array in plan.arrays.items() if array.role == "output"})
            try:
                answers.append(self._device.run(build, plan, (contents,), timeout_s=self._timeout_s).runs[0])
            except KernelFault:
                return False
            except WorkerDied as error:
                if error.cancelled:
                    raise
                return False
        return any(answers[0][name].tobytes() != answers[1][name].tobytes() for name in problem.outputs)

    def check_again(
        self,
        problem: Problem,
        workload: Workload,
        build: Build,
        plan: Plan,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
        *,
        others: Sequence[Mapping[str, Array]] = (),
    ) -> tuple[Reason, str] | None:
        """Why the arrays that a timed run left are wrong, or None.

        They are compared with the reference, or where that would take long with what the same build computes in its
        first run after a fresh load.

        Args:
            inputs: what the run was given; shorter arrays were repeated to size.
            others: more inputs of the kind, for the magnitude of an output of few elements.
        """
        whole = _resized(plan, inputs)
        for name, array in whole.items():
            if plan.arrays[name].role == "input" and array.tobytes() != outputs[name].tobytes():
                return "mutated_input", f"{at_sizes(workload.axes)}: input {name} was changed in a timed run"
        case = Case(workload=workload, seed=0, hidden=True)
        if cost(problem, workload) <= CHECKED_AGAIN_COST:
            expected, same_dtype = self._expect(problem, workload, whole)
            further = self._further_squares(problem, case, expected)
        else:
            expected, same_dtype = self._fresh(problem, build, plan, whole), None
            few = _of_few_elements(problem, expected)
            more = [self._fresh(problem, build, plan, _resized(plan, given)) for given in others] if few else []
            further = {name: [rms(item[name]) ** 2 for item in more] for name in few}
        magnitudes = self._magnitudes(problem, whole, expected, further)
        tolerances = self._allowed(problem, case, expected, same_dtype, magnitudes).tolerances
        for name, tensor in problem.outputs.items():
            if not compare(outputs[name], expected[name], tensor.dtype, tolerances[name]).ok:
                return "state_across_runs", f"{at_sizes(workload.axes)}: {name} is wrong after a timed run"
        return None

    def _fresh(
        self, problem: Problem, build: Build, plan: Plan, inputs: Mapping[str, Array]
    ) -> dict[str, Array]:  # fmt: skip
        """Outputs of the first run after a fresh load, in float64 or integers."""
        contents = filled(plan, inputs, random.Random(0), quiet_nan=True)
        arrays = self._device.run(build, plan, (contents,), timeout_s=self._timeout_s).runs[0]
        return {name: _widened(problem, name, arrays[name]) for name in problem.outputs}

    # --- verdicts ----------------------------------------------------------------------------------------------------
    def _verdict(
        self,
        kernel: Kernel,
        problem: Problem,
        status: Status,
        reason: Reason | None,
        detail: str | None,
        started: float,
        *,
        build: Build | None = None,
        log: str = "",
        warnings: tuple[str, ...] = (),
        cases: tuple[CaseResult, ...] = (),
        domain: str = "",
        levels: tuple[Level, ...] = (),
        mismatch: Mismatch | None = None,
        fault: Fault | None = None,
        sanitizer: Mapping[str, str] | None = None,
        cause: str | None = None,
        smallest: Mapping[str, int] | None = None,
    ) -> Verdict:
        identity = kernel_id(kernel)
        draft = Verdict(
            kernel_id=identity,
            status=status,
            reason=reason,
            detail=detail,
            levels=levels,
            summary="",
            next_action="",
            warnings=warnings,
            build=build.report if build is not None else None,
            cases=cases,
            domain=domain,
            oracle="kernel"
            if isinstance(problem.reference, KernelOracle)
            else "drafted"
            if problem.drafted
            else "reference",
            first_mismatch=mismatch,
            fault=fault,
            sanitizer=sanitizer,
            likely_cause=cause,
            smallest_failing=smallest,
            tolerance_policy=tolerance_policy(problem) if cases else None,
            device=self._device.info,
            seconds=round(time.monotonic() - started, 3),
            uri=f"optiml://kernels/{identity}",
        )
        return dataclasses.replace(draft, summary=summary(draft, problem, log), next_action=next_action(draft))


def _resized(plan: Plan, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Contents at the shapes of a plan; shorter ones repeated."""
    return {
        name: np.resize(array, plan.arrays[name].shape) if array.shape != plan.arrays[name].shape else array
        for name, array in inputs.items()
    }


def _of_few_elements(problem: Problem, outputs: Mapping[str, Array]) -> list[str]:
    """The outputs whose magnitude one set of data does not tell."""
    return [name for name, array in outputs.items()
            if array.size < FEW_ELEMENTS and is_float(problem.outputs[name].dtype)]  # fmt: skip


def _widened(problem: Problem, name: str, array: Array) -> Array:
    dtype = problem.outputs[name].dtype
    return to_float64(array, dtype) if is_float(dtype) else array


def _oracle_failed(problem: Problem, detail: str) -> InvalidInput:
    return InvalidInput(f"the kernel that defines {problem.name} does not run: {detail}")


def _outcome(
    case: Case,
    failure: _Failure | None,
    *,
    attempt: _Attempt | None = None,
    tolerance: Tolerance | None = None,
) -> _CaseOutcome:
    """What came of one case; without figures where it never got as far as a comparison."""
    return _CaseOutcome(
        case=case,
        warnings=attempt.warnings if attempt is not None else (),
        result=CaseResult(
            axes=dict(case.workload.axes),
            scalars=dict(case.workload.scalars),
            distribution=case.distribution(),
            ok=failure is None,
            hidden=case.hidden,
            max_abs_error=attempt.worst if attempt is not None else None,
            max_rel_error=attempt.relative if attempt is not None else None,
            tolerance=tolerance,
        ),
        failure=failure,
    )


def _about_scalars(problem: Problem) -> tuple[str, ...]:
    fixed = fixed_scalars(problem)
    if not fixed:
        return ()
    shown = ", ".join(f"{name} is {value!r}" for name, value in fixed.items())
    return (f"{shown} in every workload: a kernel with that value built in would pass; list several values",)


def _engines(result: RunResult) -> frozenset[str]:
    return frozenset(report.engine for report in result.launches)


def _of_fault(error: KernelFault, where: str) -> _Failure:
    kind = error.fault.kind
    reason: Reason = "timed_out" if kind == "timed_out" else "race" if kind == "race" else "fault"
    fault = None if reason == "timed_out" else error.fault
    return _Failure(reason=reason, detail=f"{where}: {error}", fault=fault)


def _of_change(change: Change, failure: _Failure, where: str) -> _Failure:
    """The reason against a kernel whose results change with `change`."""
    reason: Reason
    if change == "order":
        reason, what = "race", "the order in which blocks run"
    elif change == "unwritten":
        reason, what = "fault", "what shared memory held before the kernel wrote it"
    else:
        reason, what = "hard_coded", "the addresses of the arrays"
    detail = f"{where}: the result depends on {what}: {failure.detail}"
    return dataclasses.replace(failure, reason=reason, detail=detail)


def _ends_the_process(failure: _Failure) -> bool:
    return failure.reason in ("timed_out", "fault", "race", "bad_launch")


def _first_reason(failures: list[tuple[_Failure, bool]]) -> _Failure:
    """The failure whose reason comes first in the contract's list.

    Wrong values on hidden cases only mean that the kernel was written for the cases it was shown.
    """
    if all(hidden for _, hidden in failures):
        failures = [
            (dataclasses.replace(failure, reason="hard_coded"), hidden)
            if failure.reason == "wrong_values"
            else (failure, hidden)
            for failure, hidden in failures
        ]
    return min((failure for failure, _ in failures), key=lambda item: REASON_ORDER.index(item.reason))


def _all_finite(problem: Problem, expected: Mapping[str, Array], same_dtype: Mapping[str, Array] | None) -> bool:
    for name, tensor in problem.outputs.items():
        if is_float(tensor.dtype):
            stored = to_float64(from_float64(expected[name], tensor.dtype), tensor.dtype)
            if not np.isfinite(stored).all():
                return False
            if same_dtype is not None and not np.isfinite(same_dtype[name]).all():
                return False
    return True


def _mutated_input(plan: Plan, before: Mapping[str, Array], after: Mapping[str, Array]) -> str | None:
    for name, planned in plan.arrays.items():
        if planned.role == "input" and before[name].tobytes() != after[name].tobytes():
            return name
    return None


def _reason_of(wrong: Array, actual: Array, poison: Array, found: Comparison, run: int, *, in_place: bool) -> Reason:
    if not in_place and run == 0 and actual.dtype.itemsize > 1 and bool((same_bits(actual, poison) & wrong).any()):
        return "unwritten_output"
    if found.nonfinite:
        return "nonfinite"
    return "imprecise" if found.worst <= IMPRECISE_FACTOR else "wrong_values"


def _mismatch_text(mismatch: Mismatch, reason: Reason) -> str:
    place = f"{mismatch.output}[{', '.join(map(str, mismatch.index))}]" if mismatch.index else mismatch.output
    sizes = ", ".join(f"{name}={value}" for name, value in mismatch.axes.items())
    if mismatch.unwritten:
        return f"{place} was never written at {sizes}; expected {mismatch.expected!r}"
    tail = {
        "unwritten_output": "; the result depends on what the output held before",
        "state_across_runs": "; the first run was right, a later one with fresh inputs is not",
    }.get(reason, "")
    return f"{place} is {mismatch.actual!r} and should be {mismatch.expected!r} at {sizes}{tail}"
