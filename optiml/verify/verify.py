"""Build, run, compare: the verdict on one kernel.

The verdict is made here, in a process that never runs a stranger's code; devices and references answer raw numbers
from their children. This is the only place that turns a `KernelFault` into a verdict.
"""

from __future__ import annotations

import dataclasses
import random
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from optiml.codec import kernel_id, problem_digest
from optiml.device.device import Device
from optiml.device.plan import BadLaunch, Plan, resolve_plan
from optiml.errors import Fault, InvalidInput, KernelFault, Unsupported, WorkerDied
from optiml.expressions import evaluate
from optiml.problems.data import draw, from_float64, is_float, storage_dtype, to_float64
from optiml.problems.problem import names_of
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
    DATA_SCALE,
    IMPRECISE_FACTOR,
    Comparison,
    compare,
    first_mismatch,
    rms,
    tolerance_for,
)
from optiml.verify.controls import passing_control
from optiml.verify.explain import next_action, summary
from optiml.verify.inputs import Case, cost, describe_domain, hidden_cases, visible_cases, with_other_distributions
from optiml.verify.reference import References

Array = NDArray[Any]
REASON_ORDER: tuple[Reason, ...] = Reason.__args__  # type: ignore[attr-defined]
MAX_WORKSPACE_BYTES = 1 << 29  # at the sizes of a verification
CHECKED_AGAIN_COST = 2e8  # operations up to which outputs at bench sizes are compared with the reference
FEW_ELEMENTS = 64  # outputs smaller than this get their magnitude from several seeds
MAGNITUDE_SEEDS = 8


class CompilerLike(Protocol):
    def compile(self, kernel: Kernel, arch: str) -> Build | CompileFailure: ...


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """Why one case failed."""

    reason: Reason
    detail: str
    mismatch: Mismatch | None = None
    fault: Fault | None = None


@dataclass(frozen=True, kw_only=True)
class _CaseOutcome:
    result: CaseResult
    failure: _Failure | None


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """Inputs, expectations and tolerances of every run of one case."""

    contents: tuple[Mapping[str, Array], ...]  # per run
    expected: tuple[Mapping[str, Array], ...]
    tolerances: tuple[Mapping[str, Tolerance | None], ...]


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

    def verify(
        self,
        kernel: Kernel,
        problem: Problem,
        *,
        level: Level = "L1",
        seed: int | None = None,
        reduced: bool = False,
        build: Build | CompileFailure | None = None,
        warnings: tuple[str, ...] = (),
    ) -> Verdict:
        """Judge `kernel`, whose launch plan and params were checked before.

        Args:
            level: `L0` the caller's sizes; `L1` hidden cases too; `L2` is more than the emulator gives.
            seed: of hidden sizes and all data; None draws a fresh one.
            reduced: fewer cases, and stop at the first failure: for the nodes of a search.
            build: a build already at hand.

        Raises:
            InvalidInput: the problem's reference cannot be run.
            SetupError: the machine lacks something.
        """
        started = time.monotonic()
        rng = random.Random(secrets.randbits(63) if seed is None else seed)
        if kernel.launcher is not None:
            return self._verdict(
                kernel,
                problem,
                "unverified",
                None,
                "a launcher needs the launch recorder, which this version lacks: give the kernel as launches",
                started,
                warnings=warnings,
            )
        if build is None:
            build = self._compiler.compile(kernel, self._device.info.arch)
        if isinstance(build, CompileFailure):
            return self._verdict(
                kernel, problem, "rejected", build.reason, build.detail, started, log=build.log, warnings=warnings
            )
        degenerate = self._why_degenerate(problem)
        if degenerate is not None:
            detail = f"{degenerate} passes every case of {problem.name}; use sizes and data that tell it apart"
            return self._verdict(
                kernel, problem, "unverified", "problem_degenerate", detail, started, build=build, warnings=warnings
            )
        return self._run_cases(kernel, problem, build, rng, level, reduced, started, warnings)

    # --- the cases ---------------------------------------------------------------------------------------------------
    def _run_cases(
        self,
        kernel: Kernel,
        problem: Problem,
        build: Build,
        rng: random.Random,
        level: Level,
        reduced: bool,
        started: float,
        warnings: tuple[str, ...],
    ) -> Verdict:
        visible = visible_cases(problem, rng, reduced=reduced)
        hidden = () if level == "L0" else hidden_cases(problem, rng, reduced=reduced)
        outcomes: list[_CaseOutcome] = []
        try:
            for group in (visible, hidden):
                for case in group:
                    outcome = self._run_case(kernel, problem, build, case, rng)
                    if outcome is None:
                        others = with_other_distributions(problem, case)
                        tried = (self._run_case(kernel, problem, build, other, rng) for other in others)
                        outcome = next((item for item in tried if item is not None), None)
                    if outcome is None:
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
        domain = describe_domain(problem, [outcome.result.axes for outcome in outcomes])
        failures = [(outcome.failure, outcome.result.hidden) for outcome in outcomes if outcome.failure is not None]
        levels: tuple[Level, ...] = ("L0",) if level == "L0" or reduced else ("L0", "L1")
        if failures:
            failure = _first_reason(failures)
            return self._verdict(
                kernel,
                problem,
                "rejected",
                failure.reason,
                failure.detail,
                started,
                build=build,
                warnings=warnings,
                cases=cases,
                domain=domain,
                levels=levels,
                mismatch=failure.mismatch,
                fault=failure.fault,
            )
        if hidden and not any(outcome.result.hidden for outcome in outcomes):
            detail = (
                f"the reference of {problem.name} is not finite at any hidden size; name distributions in its "
                "workloads on which it is"
            )
            return self._verdict(
                kernel, problem, "unverified", None, detail, started,
                build=build, warnings=warnings, cases=cases, domain=domain, levels=("L0",),
            )  # fmt: skip
        if level == "L2":
            detail = (
                f"{self._device.info.name} gives L0 and L1, which passed; L2 needs race and initialisation checks "
                "that this engine lacks"
            )
            return self._verdict(
                kernel, problem, "unverified", None, detail, started,
                build=build, warnings=warnings, cases=cases, domain=domain, levels=levels,
            )  # fmt: skip
        return self._verdict(
            kernel, problem, "accepted", None, None, started,
            build=build, warnings=warnings, cases=cases, domain=domain, levels=levels,
        )  # fmt: skip

    def _run_case(
        self, kernel: Kernel, problem: Problem, build: Build, case: Case, rng: random.Random
    ) -> _CaseOutcome | None:
        """One case, or None where a hidden case's reference is not finite in the declared dtype."""
        axes = dict(case.workload.axes)
        try:
            plan = resolve_plan(kernel, build, problem, case.workload, self._device.info)
        except BadLaunch as error:
            return _outcome(case, _Failure(reason=error.reason, detail=f"at {axes}: {error}"))
        scratch = sum(array.nbytes for array in plan.arrays.values() if array.role == "workspace")
        if scratch > MAX_WORKSPACE_BYTES:  # each run fills all of it with a poison of its own
            raise Unsupported(f"verification with {scratch} bytes of workspace, more than {MAX_WORKSPACE_BYTES}")
        prepared = self._prepare(problem, plan, case, rng)
        if prepared is None:
            return None
        try:
            result = self._device.run(build, plan, prepared.contents, timeout_s=self._timeout_s)
        except InvalidInput as error:  # the device refused: more threads than its launch bounds, too large a global
            return _outcome(case, _Failure(reason="bad_launch", detail=f"at {axes}: {error}"))
        except KernelFault as error:
            reason: Reason = "timed_out" if error.fault.kind == "timed_out" else "fault"
            if error.fault.kind == "race":
                reason = "race"
            return _outcome(
                case,
                _Failure(
                    reason=reason,
                    detail=f"at {axes}: {error}",
                    fault=None if reason == "timed_out" else error.fault,
                ),
            )
        failure, worst, relative = self._judge_runs(problem, plan, case, prepared, result.runs, build)
        tolerances = [item for item in prepared.tolerances[0].values() if item is not None]
        return _outcome(case, failure, worst=worst, relative=relative, tolerance=next(iter(tolerances), None))

    # --- preparing ---------------------------------------------------------------------------------------------------
    def _prepare(self, problem: Problem, plan: Plan, case: Case, rng: random.Random) -> _Prepared | None:
        """Fresh data for every run of a case, with a different poison in each."""
        contents, expectations, tolerances = [], [], []
        for run in range(case.runs):
            inputs = draw(problem, case.workload, seed=case.seed + run)
            expected, same_dtype = self._expect(problem, case.workload, inputs)
            if case.hidden and not _all_finite(problem, expected, same_dtype):
                return None
            contents.append(_filled(plan, inputs, rng, quiet_nan=run == 0))
            expectations.append(expected)
            tolerances.append(self._tolerances(problem, case, expected, same_dtype))
        return _Prepared(contents=tuple(contents), expected=tuple(expectations), tolerances=tuple(tolerances))

    def _expect(
        self, problem: Problem, workload: Workload, inputs: Mapping[str, Array]
    ) -> tuple[Mapping[str, Array], Mapping[str, Array] | None]:
        if isinstance(problem.reference, KernelOracle):
            return self._run_oracle(problem.reference.kernel, problem, workload, inputs), None
        expected = self._references.expected(problem, workload, inputs)
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
            filled = _filled(plan, inputs, random.Random(0), quiet_nan=False)
            result = self._device.run(build, plan, (filled,), timeout_s=self._timeout_s)
        except (BadLaunch, KernelFault) as error:
            raise _oracle_failed(problem, str(error)) from error
        return {name: _widened(problem, name, result.runs[0][name]) for name in problem.outputs}

    def _tolerances(
        self,
        problem: Problem,
        case: Case,
        expected: Mapping[str, Array],
        same_dtype: Mapping[str, Array] | None,
    ) -> dict[str, Tolerance | None]:
        names = names_of(problem, case.workload.axes, case.workload.scalars)
        length = 1 if problem.accumulation is None else evaluate(problem.accumulation, names)
        scale = max((DATA_SCALE.get(label, 1.0) for label in case.distribution().values()), default=1.0)
        magnitudes = self._magnitudes(problem, case, expected)
        return {
            name: tolerance_for(
                tensor.dtype,
                accumulation=length,
                magnitude=magnitudes[name],
                exact=expected[name],
                same_dtype=None if same_dtype is None else same_dtype[name],
                caller=problem.tolerance,
                data_scale=scale,
            )
            for name, tensor in problem.outputs.items()
        }

    def _magnitudes(self, problem: Problem, case: Case, expected: Mapping[str, Array]) -> dict[str, float]:
        few = [name for name, array in expected.items() if array.size < FEW_ELEMENTS]
        squares = {name: [rms(array) ** 2] for name, array in expected.items()}
        floats = any(is_float(problem.outputs[name].dtype) for name in few)
        if floats:
            for extra in range(1, MAGNITUDE_SEEDS):
                inputs = draw(problem, case.workload, seed=case.seed + 1000 + extra)
                outputs, _ = self._expect(problem, case.workload, inputs)
                for name in few:
                    squares[name].append(rms(outputs[name]) ** 2)
        return {name: float(np.sqrt(np.mean(values))) for name, values in squares.items()}

    def _why_degenerate(self, problem: Problem) -> str | None:
        """The control output that the caller's cases cannot tell from a right one, or None; remembered."""
        key = problem_digest(problem)
        if key not in self._degenerate:
            cases = []
            for index, case in enumerate(visible_cases(problem, random.Random(0), reduced=False)):
                inputs = draw(problem, case.workload, seed=index)
                expected, same = self._expect(problem, case.workload, inputs)
                cases.append((expected, self._tolerances(problem, case, expected, same)))
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
                failures.append(_Failure(reason="mutated_input", detail=f"at {axes}: input {mutated} was changed"))
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
                failures.append(_Failure(reason=reason, detail=_mismatch_text(mismatch, reason), mismatch=mismatch))
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
            fresh = _filled(plan, {}, random.Random(salt), quiet_nan=False)
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
    ) -> tuple[Reason, str] | None:
        """Why the arrays that a timed run left are wrong, or None.

        They are compared with the reference, or where that would take long with what the same build computes in its
        first run after a fresh load.

        Args:
            inputs: what the run was given; shorter arrays were repeated to size.
        """
        whole = {
            name: np.resize(array, plan.arrays[name].shape) if array.shape != plan.arrays[name].shape else array
            for name, array in inputs.items()
        }
        for name, array in whole.items():
            if plan.arrays[name].role == "input" and array.tobytes() != outputs[name].tobytes():
                return "mutated_input", f"at {dict(workload.axes)}: input {name} was changed in a timed run"
        if cost(problem, workload) <= CHECKED_AGAIN_COST:
            expected, same_dtype = self._expect(problem, workload, whole)
        else:
            contents = _filled(plan, whole, random.Random(0), quiet_nan=True)
            arrays = self._device.run(build, plan, (contents,), timeout_s=self._timeout_s).runs[0]
            expected, same_dtype = {name: _widened(problem, name, arrays[name]) for name in problem.outputs}, None
        case = Case(workload=workload, seed=0, hidden=True)
        tolerances = self._tolerances(problem, case, expected, same_dtype)
        for name, tensor in problem.outputs.items():
            if not compare(outputs[name], expected[name], tensor.dtype, tolerances[name]).ok:
                return "state_across_runs", f"at {dict(workload.axes)}: {name} is wrong after a timed run"
        return None

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
            device=self._device.info,
            seconds=round(time.monotonic() - started, 3),
            uri=f"optiml://kernels/{identity}",
        )
        return dataclasses.replace(draft, summary=summary(draft, problem, log), next_action=next_action(draft))


def _widened(problem: Problem, name: str, array: Array) -> Array:
    dtype = problem.outputs[name].dtype
    return to_float64(array, dtype) if is_float(dtype) else array


def _oracle_failed(problem: Problem, detail: str) -> InvalidInput:
    return InvalidInput(f"the kernel that defines {problem.name} does not run: {detail}")


def _outcome(
    case: Case,
    failure: _Failure | None,
    *,
    worst: float | None = None,
    relative: float | None = None,
    tolerance: Tolerance | None = None,
) -> _CaseOutcome:
    """What came of one case; without figures where it never got as far as a comparison."""
    return _CaseOutcome(
        result=CaseResult(
            axes=dict(case.workload.axes),
            scalars=dict(case.workload.scalars),
            distribution=case.distribution(),
            ok=failure is None,
            hidden=case.hidden,
            max_abs_error=worst,
            max_rel_error=relative,
            tolerance=tolerance,
        ),
        failure=failure,
    )


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


def _filled(plan: Plan, inputs: Mapping[str, Array], rng: random.Random, *, quiet_nan: bool) -> dict[str, Array]:
    """Every array of the plan: inputs as drawn, the rest poisoned, zeroed workspaces zero."""
    contents: dict[str, Array] = {}
    for name, planned in plan.arrays.items():
        if name in inputs:
            contents[name] = inputs[name]
        elif planned.zero:
            contents[name] = np.zeros(planned.shape, dtype=storage_dtype(planned.dtype))
        else:
            contents[name] = _poison(planned.dtype, planned.shape, rng.getrandbits(63), quiet_nan=quiet_nan)
    return contents


_NAN_BITS: Mapping[str, tuple[str, int, int]] = {  # storage, pattern of a quiet NaN, free payload bits
    "float64": ("<u8", 0x7FF8000000000000, 40),
    "float32": ("<u4", 0x7FC00000, 20),
    "float16": ("<u2", 0x7E00, 8),
    "bfloat16": ("<u2", 0x7FC0, 5),
}


def _poison(dtype: str, shape: tuple[int, ...], seed: int, *, quiet_nan: bool) -> Array:
    """What an output holds before a run: one NaN with a random payload, or noise that looks like an answer."""
    rng = np.random.default_rng(seed)
    if quiet_nan and dtype in _NAN_BITS:
        storage, pattern, bits = _NAN_BITS[dtype]
        word = pattern | int(rng.integers(1, 1 << bits))
        return np.full(shape, word, dtype=storage).view(storage_dtype(dtype))
    if not is_float(dtype) or dtype.startswith("float8"):
        kind = storage_dtype(dtype)
        if quiet_nan and kind.itemsize >= 4:
            info = np.iinfo(kind)
            return np.full(shape, int(rng.integers(info.max // 3, info.max // 2)), dtype=kind)
        return rng.integers(1, 100, shape).astype(kind)
    noise = rng.standard_normal(int(np.prod(shape, dtype=np.int64)))
    return from_float64(noise, dtype).reshape(shape)


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
    if not in_place and run == 0 and actual.dtype.itemsize > 1:
        kind = f"u{actual.dtype.itemsize}"
        untouched = np.ascontiguousarray(actual).view(kind) == np.ascontiguousarray(poison).view(kind)
        if bool((untouched & wrong).any()):
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
