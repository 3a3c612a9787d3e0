"""Stand-ins that tests share: a workbench with canned answers that fit together, made without compiler or device."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from optiml.codec import MAX_SOURCE_BYTES, decode, kernel_id
from optiml.errors import InvalidInput, ModelFailed, NotAccepted
from optiml.kernel_file import read_kernel_text, write_kernel_text
from optiml.problems.problem import load_builtin, with_axes, with_dtype
from optiml.records import (
    Bottleneck,
    BuildReport,
    Candidate,
    CaseResult,
    Comparison,
    DeviceInfo,
    Diagnosis,
    Evaluated,
    ExpectedChange,
    Generated,
    HotLine,
    Judgement,
    Kernel,
    Mismatch,
    NsightReport,
    Occupancy,
    PathStep,
    Problem,
    Profile,
    ReportedKernel,
    Reward,
    SearchResult,
    Speedup,
    Spent,
    Suggestion,
    Time,
    Tolerance,
    Verdict,
)

EMULATOR = DeviceInfo(name="emulator A100", kind="emulator", arch="sm_80", model="a100", engine="numpy")
RELU = """\
/* optiml
[[launch]]
kernel = "relu"
grid = ["ceil_div(n, BLOCK)"]
block = ["BLOCK"]
args = ["x", "y", "n"]
[params]
BLOCK = 256
*/
extern "C" __global__ void relu(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = fmaxf(x[i], 0.0f);
}
"""
FASTER_RELU = RELU.replace("BLOCK = 256", "BLOCK = 512").replace("int i", "/* faster */ int i")
WRONG_RELU = RELU.replace("fmaxf(x[i], 0.0f)", "x[i] /* wrong */")
REWARD = Reward(time=0.8, proxies=0.5, guardrails=0.0, judge=0.1, total=0.7)


@dataclass(frozen=True, kw_only=True)
class FakeProgress:
    """As the workbench's SearchProgress."""

    run_id: str
    evaluations: int
    budget: int
    best_speedup: float
    best_kernel_id: str
    last: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class FakeSummary:
    """As the workbench's RunSummary."""

    run_id: str
    status: str
    problem: str
    evaluations: int
    budget: int
    best_speedup: float | None
    started: str


@dataclass(frozen=True, kw_only=True)
class FakeCheck:
    """As the workbench's Check."""

    name: str
    state: str
    detail: str
    fix: str


@dataclass(kw_only=True)
class FakeRun:
    run_id: str
    problem: Problem
    kernel: Kernel
    budget: int
    seed: int
    write_to: str | None = None
    evaluations: int = 0
    status: str = "running"


def _without_models(role: str, name: str, *known: str) -> None:
    if name not in known:
        raise ModelFailed(f"the {role} {name!r} needs a language model: use {role}={' or '.join(known)}")


@dataclass
class FakeWorkbench:
    """The methods of the workbench over canned records.

    A kernel whose source holds the word "wrong" is rejected, "unknown_opcode" is unverified, "faster" takes half the
    time, and "slow" waits for `gate` first. A search tries one kernel each time `evaluate` lets it.
    """

    gate: threading.Event = field(default_factory=threading.Event)
    evaluate: threading.Semaphore | None = None
    kernels: dict[str, Kernel] = field(default_factory=dict)
    profiles: dict[str, Profile] = field(default_factory=dict)
    searches: dict[str, FakeRun] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    closed: bool = False

    def close(self) -> None:
        self.closed = True
        self.gate.set()
        if self.evaluate is not None:
            self.evaluate.release(1000)

    def __enter__(self) -> FakeWorkbench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def problem(
        self, spec: str | dict[str, Any] | Problem, *, axes: Mapping[str, int] | None = None, dtype: str | None = None
    ) -> Problem:
        if isinstance(spec, str):
            builtin = load_builtin(spec)
            problem = builtin.problem if dtype is None else with_dtype(builtin, dtype)
        else:
            problem = spec if isinstance(spec, Problem) else decode(Problem, spec, what="problem")
        return with_axes(problem, axes or {})

    def kernel(self, spec: str | dict[str, Any] | Kernel, problem: Problem | None) -> Kernel:
        if isinstance(spec, Kernel):
            found = spec
        elif isinstance(spec, dict) and set(spec) == {"id"}:
            found = self.known_kernel(spec["id"])
        elif isinstance(spec, dict):
            found = decode(Kernel, spec, what="kernel")
        elif len(spec) == 16 and "\n" not in spec:
            found = self.known_kernel(spec)
        else:
            found = read_kernel_text(spec)
        if len(found.source) > MAX_SOURCE_BYTES:
            raise InvalidInput("the source is too long", code="too_large")
        self.kernels[kernel_id(found)] = found
        return found

    def profile_report(self, path: str, **options: Any) -> NsightReport:
        self.calls.append(f"report {path} {options['kernel_regex']}")
        kernel = ReportedKernel(
            name="gemm", grid=(8, 1, 1), block=(256, 1, 1), metrics={"dram__bytes.sum": 1.0}, bottleneck=None,
            hot_lines=(), findings=(),
        )  # fmt: skip
        return NsightReport(
            summary="one launch", next_action="look", warnings=(), device="an A100", kernels=(kernel,) * 30, total=30
        )  # fmt: skip

    def profile_command(self, command: Sequence[str], **options: Any) -> NsightReport:
        raise InvalidInput("commands are not allowed here: start the server with --allow-commands")

    def verify(
        self,
        kernel_spec: Any,
        problem_spec: Any,
        *,
        level: str = "L1",
        axes: Mapping[str, int] | None = None,
        dtype: str | None = None,
        device: str = "auto",
        arch: str | None = None,
        seed: int | None = None,
    ) -> Verdict:
        self.calls.append("verify")
        problem = self.problem(problem_spec, axes=axes, dtype=dtype)
        return self.verdict(self.kernel(kernel_spec, problem), problem)

    def verdict(self, kernel: Kernel, problem: Problem) -> Verdict:
        if "slow" in kernel.source:
            self.gate.wait(timeout=30)
        identifier = kernel_id(kernel)
        wrong, unknown = "wrong" in kernel.source, "unknown_opcode" in kernel.source
        tolerance = Tolerance(rtol=2e-7, atol=2e-7)
        cases = tuple(
            CaseResult(
                axes={name: 257 + index for name in problem.axes},
                distribution={name: "normal" for name in problem.inputs},
                ok=not wrong,
                hidden=index > 0,
                max_abs_error=1.5 if wrong else 0.0,
                max_rel_error=1.0 if wrong else 0.0,
                tolerance=tolerance,
            )
            for index in range(14)
        )
        build = BuildReport(
            arch="sm_80",
            compiler="nvrtc 13.5",
            registers_per_thread=16,
            shared_bytes_per_block=0,
            stack_bytes=0,
            spill_bytes=0,
            log="",
            seconds=0.04,
        )
        known = Verdict(
            kernel_id=identifier,
            status="accepted",
            reason=None,
            detail=None,
            levels=("L0", "L1"),
            summary="Accepted: 14 cases agree with the reference.",
            next_action="Profile it with profile_ncu.",
            build=build,
            cases=cases,
            domain=f"{next(iter(problem.axes))}: 14 sizes in 1..65537",
            device=EMULATOR,
            seconds=0.8,
            uri=f"optiml://kernels/{identifier}",
        )
        if wrong:
            output = next(iter(problem.outputs))
            return dataclasses.replace(
                known,
                status="rejected",
                reason="wrong_values",
                detail=f"{output}[0] is -1.5, expected 0",
                summary=f"Rejected: wrong values in {output}.",
                next_action="Mend the kernel and verify again.",
                first_mismatch=Mismatch(
                    output=output, index=(0,), expected=0.0, actual=-1.5, axes=dict(cases[0].axes), unwritten=False
                ),
            )
        if unknown:
            return dataclasses.replace(
                known, status="unverified", detail="the emulator lacks wgmma", summary="Unverified.", cases=()
            )
        return known

    def profile(
        self,
        kernel_spec: Any,
        problem_spec: Any,
        *,
        baseline: Any = None,
        axes: Mapping[str, int] | None = None,
        dtype: str | None = None,
        metrics: Any = None,
        device: str = "auto",
    ) -> Profile:
        self.calls.append("profile")
        problem = self.problem(problem_spec, axes=axes, dtype=dtype)
        kernel = self.kernel(kernel_spec, problem)
        verdict = self.verdict(kernel, problem)
        if verdict.status != "accepted":
            raise NotAccepted(f"{verdict.reason or 'unverified'}: {verdict.detail}")
        cached = verdict.kernel_id in self.profiles
        profile = dataclasses.replace(self.profile_of(kernel, problem), cached=cached)
        self.profiles[verdict.kernel_id] = profile
        if baseline is None:
            return profile
        before = self.profile_of(self.kernel(baseline, problem), problem)
        ratio = before.time.median_us / profile.time.median_us
        comparison = Comparison(
            ratio=ratio,
            ci95=None,
            noise_pct=None,
            verdict="faster" if ratio > 1 else "same" if ratio == 1 else "slower",
            metric_changes={"dram__bytes.sum": 1 / ratio},
            source="modelled",
            baseline_kernel_id=before.kernel_id,
            reasons=("half the DRAM bytes",) if ratio > 1 else (),
        )
        return dataclasses.replace(profile, comparison=comparison)

    def known_verdict(self, kernel_spec: Any, problem_spec: Any, **_: Any) -> Verdict | None:
        return None

    def known_profile(self, kernel_spec: Any, problem_spec: Any, **_: Any) -> Profile | None:
        return None

    def profile_of(self, kernel: Kernel, problem: Problem) -> Profile:
        microseconds = 24.5 if "faster" in kernel.source else 49.0
        workload = (problem.bench or problem.workloads)[0]
        identifier = kernel_id(kernel)
        return Profile(
            kernel_id=identifier,
            axes=workload.axes,
            time=Time(median_us=microseconds, p10_us=None, p90_us=None, runs=0, noise_pct=None, source="modelled"),
            metrics={"dram__bytes.sum": 2.7e6 * microseconds, "sm__warps_active.avg": None},
            metric_source={"dram__bytes.sum": "counted", "sm__warps_active.avg": "modelled"},
            bottleneck=Bottleneck(
                kind="memory", evidence=("dram is the largest term",), advice=("read every element once",)
            ),
            hot_lines=(
                HotLine(line=12, source="if (i < n) y[i] = fmaxf(x[i], 0.0f);", sectors_per_request=4.0, share_pct=90),
            ),
            occupancy=Occupancy(theoretical_pct=100.0, limiter="threads", blocks_per_sm=8),
            speed_of_light=None,
            summary=f"Modelled {microseconds} us, memory-bound.",
            next_action="Start run_mcts.",
            conditions={"device": EMULATOR.name},
            report_uri=f"optiml://kernels/{identifier}/profile",
        )

    def compare(self, new_spec: Any, old_spec: Any, problem_spec: Any, **options: Any) -> Profile:
        return self.profile(new_spec, problem_spec, baseline=old_spec, **options)

    def judge(
        self,
        problem_spec: Any,
        before_spec: Any,
        after_spec: Any,
        *,
        profile_id: str | None = None,
        judge: str = "rules",
        device: str = "auto",
    ) -> Judgement:
        _without_models("judge", judge, "rules")
        problem = self.problem(problem_spec)
        self.kernel(before_spec, problem)
        self.kernel(after_spec, problem)
        return Judgement(
            summary="Worth trying: larger blocks.",
            next_action="Verify the edit, then profile it.",
            score=0.7,
            verdict="try",
            diagnosis=Diagnosis(kind="memory", evidence=("dram is the largest term",)),
            addresses_diagnosis=True,
            expected=(ExpectedChange(metric="dram__bytes.sum", direction="down", factor=0.5),),
            risks=(),
            static_deltas={"registers_per_thread": (16, 16)},
            suggestions=(Suggestion(edit="vectorise_loads", why="four floats a request", patch=None),),
            judge=judge,
        )

    def generate(
        self,
        intent: str | None = None,
        problem: Any = None,
        *,
        axes: Mapping[str, int] | None = None,
        dtype: str | None = None,
        count: int = 1,
        generator: str = "auto",
        verify: bool = True,
        device: str = "auto",
        arch: str | None = None,
    ) -> Generated:
        if problem is None and "relu" not in (intent or ""):
            return Generated(
                status="needs_kernel",
                candidates=(),
                problem=None,
                assumed=(),
                summary="Not in the catalogue.",
                next_action="Write the kernel from the template.",
                template=RELU,
            )
        understood = self.problem("relu" if problem is None else problem, axes=axes, dtype=dtype)
        kernels = [self.kernel(text, understood) for text in (FASTER_RELU, RELU)][:count]
        return Generated(
            status="done",
            candidates=tuple(
                Candidate(
                    kernel_id=kernel_id(kernel),
                    kernel=kernel,
                    generator="catalogue",
                    strategy="grid_stride",
                    rationale="one thread an element",
                    verdict=self.verdict(kernel, understood) if verify else None,
                )
                for kernel in kernels
            ),
            problem=understood,
            assumed=("float32",),
            summary=f"{len(kernels)} kernel(s) for relu.",
            next_action="Profile the first.",
        )

    def start_search(
        self,
        problem_spec: Any = None,
        kernel_spec: Any = None,
        *,
        intent: str | None = None,
        axes: Mapping[str, int] | None = None,
        dtype: str | None = None,
        evaluations: int = 40,
        seconds: float | None = None,
        proposer: str = "builtin",
        judge: str = "rules",
        device: str = "auto",
        seed: int | None = None,
        edits: tuple[str, ...] | None = None,
        catalogue: bool = True,
        write_to: str | None = None,
    ) -> str:
        _without_models("proposer", proposer, "builtin", "agent")
        _without_models("judge", judge, "rules")
        problem = self.problem("relu" if problem_spec is None else problem_spec, axes=axes, dtype=dtype)
        kernel = self.kernel(RELU if kernel_spec is None else kernel_spec, problem)
        run_id = f"r-{len(self.searches):012d}"
        self.searches[run_id] = FakeRun(
            run_id=run_id,
            problem=problem,
            kernel=kernel,
            budget=evaluations,
            seed=0 if seed is None else seed,
            write_to=write_to,
        )
        return run_id

    def run_search(
        self,
        run_id: str,
        *,
        on_progress: Callable[[Any], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> SearchResult:
        run = self.known_run(run_id)
        verdict = self.verdict(run.kernel, run.problem)
        if verdict.status != "accepted":
            run.status = "failed"
            raise NotAccepted(f"{verdict.reason or 'unverified'}: {verdict.detail}")
        while run.evaluations < run.budget:
            if self.evaluate is not None:
                self.evaluate.acquire(timeout=30)
            if should_stop is not None and should_stop():
                return self.search_result(run_id)
            run.evaluations += 1
            if on_progress is not None:
                best = self.search_result(run_id)
                assert best.speedup is not None
                assert best.best is not None
                on_progress(
                    FakeProgress(
                        run_id=run_id,
                        evaluations=run.evaluations,
                        budget=run.budget,
                        best_speedup=best.speedup.median,
                        best_kernel_id=best.best.kernel_id,
                        last="retune BLOCK: accepted",
                        seconds=0.1 * run.evaluations,
                    )
                )
        run.status = "finished"
        return dataclasses.replace(self.search_result(run_id), written_to=run.write_to)

    def known_run(self, run_id: str) -> FakeRun:
        if run_id not in self.searches:
            raise InvalidInput(f"there is no run {run_id}", code="unknown_run")
        return self.searches[run_id]

    def search_result(self, run_id: str) -> SearchResult:
        run = self.known_run(run_id)
        improved = run.evaluations > 1
        baseline = self.evaluated(run.kernel, run.problem)
        best = self.evaluated(self.kernel(FASTER_RELU, run.problem), run.problem) if improved else baseline
        step = PathStep(
            edit="retune",
            rationale="larger blocks",
            diagnosis="memory",
            kernel_id=best.kernel_id,
            metric_changes={"dram__bytes.sum": 0.5},
            reward=REWARD,
            time_ratio=2.0,
            ci95=None,
        )
        return SearchResult(
            run_id=run_id,
            status=run.status,  # type: ignore[arg-type]
            seed=run.seed,
            problem=run.problem.name,
            best=best,
            baseline=baseline,
            speedup=Speedup(median=2.0 if improved else 1.0, ci95=None, source="modelled"),
            path=(step,) if improved else (),
            explanation=("DRAM bytes fell by 50 %.",) if improved else (),
            spent=Spent(
                evaluations=run.evaluations,
                seconds=0.1 * run.evaluations,
                accepted=run.evaluations,
                rejected=0,
                duplicates=0,
            ),
            stopped_because=None if run.status == "running" else "budget",
            summary=f"{run.evaluations} kernels tried.",
            next_action="Use the best kernel.",
            report_uri=f"optiml://runs/{run_id}/report",
        )

    def evaluated(self, kernel: Kernel, problem: Problem) -> Evaluated:
        verdict = self.verdict(kernel, problem)
        accepted = verdict.status == "accepted"
        return Evaluated(
            kernel_id=verdict.kernel_id,
            kernel=kernel,
            verdict=verdict,
            profile=self.profile_of(kernel, problem) if accepted else None,
        )

    def runs(self) -> tuple[FakeSummary, ...]:
        return tuple(
            FakeSummary(
                run_id=run.run_id,
                status=run.status,
                problem=run.problem.name,
                evaluations=run.evaluations,
                budget=run.budget,
                best_speedup=2.0 if run.evaluations > 1 else 1.0,
                started="2030-01-01T00:00:00Z",
            )
            for run in self.searches.values()
        )

    def run_ids(self) -> tuple[str, ...]:
        return tuple(run.run_id for run in self.runs())

    def cancel_search(self, run_id: str) -> None:
        self.known_run(run_id).status = "cancelled"

    def search_requests(self, run_id: str) -> tuple[Any, ...]:
        self.known_run(run_id)
        return ()

    def tell_search(self, run_id: str, proposals: Any) -> tuple[Any, ...]:
        self.known_run(run_id)
        raise InvalidInput("this run makes its own proposals")

    def report(self, run_id: str) -> str:
        return f"# Search {self.known_run(run_id).run_id}\n"

    def tree(self, run_id: str) -> list[dict[str, Any]]:
        return [{"node": 0, "kernel_id": kernel_id(self.known_run(run_id).kernel)}]

    def doctor(self) -> tuple[FakeCheck, ...]:
        return (
            FakeCheck(name="compiler", state="ok", detail="nvrtc 13.5", fix=""),
            FakeCheck(name="gpu", state="missing", detail="no CUDA driver", fix="pip install 'optiml[gpu]'"),
        )

    def known_kernel(self, identity: str) -> Kernel:
        if identity not in self.kernels:
            raise InvalidInput(f"there is no kernel {identity}", code="unknown_kernel")
        return self.kernels[identity]

    def ptx(self, identity: str) -> str:
        return f"// {identity}\n.version 8.0\n" + write_kernel_text(self.known_kernel(identity))

    def last_profile(self, identity: str) -> Profile | None:
        self.known_kernel(identity)
        return self.profiles.get(identity)
