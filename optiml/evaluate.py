"""Kernel to Evaluation: build, verify, profile. The one evaluator of every front end.

Builds, verdicts and profiles are kept in the store; equal code (one fingerprint) is evaluated once.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import random
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from optiml.codec import digest, encode, kernel_id, problem_digest, restore
from optiml.device.cuda_job import JobItem
from optiml.device.device import Device, TimedDevice
from optiml.errors import InvalidInput, KernelFault, NotAccepted, Unsupported, WorkerDied
from optiml.measure.compare import compare
from optiml.measure.hardware import hardware
from optiml.measure.measured import FULL, QUICK, Rival, compared, stand_in
from optiml.measure.roofline import impossible_us
from optiml.measure.timing import BenchInputs, Budget, contender, time_of, time_together
from optiml.records import Build, Evaluation, Kernel, Level, Problem, Profile, Reason, Verdict, Workload
from optiml.store import Store, cache_key
from optiml.toolchain.nvrtc import CompileFailure
from optiml.toolchain.scan import host_call_warnings, register_warnings
from optiml.verify.explain import next_action, summary
from optiml.verify.physics import why_implausible
from optiml.verify.reference import References
from optiml.verify.sanitizer import Sanitized, sanitizer_items
from optiml.verify.verify import Verifier

Depth = Literal["reduced", "full", "confirm"]
BUILDS_IN_MEMORY = 256
PROFILE_TIMEOUT_S = 60.0
VERDICT_RULES = 2  # of the verifier: a stored verdict is worth what was looked at then
TIMED_BUDGET = Budget(seconds=0.2, most_rounds=20)  # of the timed runs whose outputs are checked
FOUND_BY_CHECKS: tuple[Reason, ...] = ("race", "fault")
OF_MANY_CAUSES: tuple[Reason, ...] = ("wrong_values", "hard_coded", "state_across_runs", "nonfinite", "imprecise")
NOT_EMBEDDED = "races between blocks were not looked for, since the embedded device cannot run this kernel"
LEAST_BELIEVED = 0.95  # a time below this share of what is possible is not believed
_BINARY_FIELDS = ("cubin", "launcher_library", "recorder")  # of a build, kept as base64


class Compiler(Protocol):
    """What compiles: NVRTC, or a script in a test."""

    @property
    def version(self) -> str: ...

    def compile(self, kernel: Kernel, arch: str) -> Build | CompileFailure: ...

    def close(self) -> None: ...


class Profiler(Protocol):
    """What profiles an accepted kernel."""

    @property
    def version(self) -> str: ...

    def profile(
        self,
        kernel: Kernel,
        build: Build,
        problem: Problem,
        device: Device,
        *,
        bench: tuple[Workload, ...],
        metrics: Sequence[str] | None,
        timeout_s: float,
    ) -> Profile: ...


@runtime_checkable
class PairedProfiler(Profiler, Protocol):
    """What times a kernel in turns with another, on a device whose time is real."""

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
    ) -> Profile: ...

    def inputs(self, problem: Problem, bench: Sequence[Workload]) -> BenchInputs: ...


class CachedCompiler:
    """A compiler whose successful builds are kept, in memory and in the store."""

    def __init__(self, compiler: Compiler, store: Store) -> None:
        self._compiler = compiler
        self._store = store
        self._recent: OrderedDict[tuple[str, str], Build | CompileFailure] = OrderedDict()

    @property
    def version(self) -> str:
        return self._compiler.version

    def compile(self, kernel: Kernel, arch: str) -> Build | CompileFailure:
        place = (kernel_id(kernel), arch)
        if place not in self._recent:
            build = self._stored_or_new(kernel, arch)
            if isinstance(build, CompileFailure) and build.reason is None:  # this machine's fault may be mended
                return build
            self._recent[place] = build
            while len(self._recent) > BUILDS_IN_MEMORY:
                self._recent.popitem(last=False)
        return self._recent[place]

    def _stored_or_new(self, kernel: Kernel, arch: str) -> Build | CompileFailure:
        key = cache_key("build", kernel=kernel_id(kernel), arch=arch, compiler=self._compiler.version)
        found = self._store.get(key)
        if found is not None:
            return restore(Build, {**found, **{name: base64.b64decode(found.get(name, "")) for name in _BINARY_FIELDS}})
        build = self._compiler.compile(kernel, arch)
        if isinstance(build, Build):
            binary = {name: base64.b64encode(getattr(build, name)).decode("ascii") for name in _BINARY_FIELDS}
            self._store.put(key, {**encode(build), **binary})
        return build

    def close(self) -> None:
        self._compiler.close()


class Evaluator:
    """Builds, verifies and profiles kernels of any problem on one device."""

    def __init__(
        self,
        *,
        compiler: Compiler,
        device: Device,
        fresh_device: Callable[[], Device],
        references: References,
        profiler: Profiler,
        store: Store,
        kernel_timeout_s: float,
        sanitizer: Callable[[Sequence[JobItem]], Sanitized] | None = None,
        embedded: Device | None = None,
    ) -> None:
        """Args:
        sanitizer: runs NVIDIA's tools, for level 2 on a GPU.
        embedded: beside a GPU, what also looks at races between blocks, which those tools do not.
        """
        self.device = device
        self._embedded = None if embedded is None else Verifier(
            compiler, embedded, references, kernel_timeout_s=kernel_timeout_s
        )  # fmt: skip
        self._sanitizer = sanitizer
        self._fresh_device = fresh_device
        self._references = references
        self._timeout_s = kernel_timeout_s
        self._compiler = compiler
        self._profiler = profiler
        self._store = store
        self._verifier = Verifier(compiler, device, references, kernel_timeout_s=kernel_timeout_s)

    def build(self, kernel: Kernel, *, arch: str | None = None) -> Build | CompileFailure:
        return self._compiler.compile(kernel, arch or self.device.info.arch)

    def verify(
        self,
        kernel: Kernel,
        problem: Problem,
        *,
        level: Level = "L1",
        seed: int | None = None,
        arch: str | None = None,
        warnings: tuple[str, ...] = (),
    ) -> Verdict:
        """A verdict, from the store where the same question was answered before with fresh seeds."""
        found = self.known_verdict(kernel, problem, level=level, seed=seed, arch=arch)
        if found is not None:
            return found
        build = self.build(kernel, arch=arch)
        real = level == "L2" and isinstance(self.device, TimedDevice)
        verdict = self._verifier.verify(
            kernel,
            problem,
            level="L1" if real else level,
            seed=seed,
            build=build,
            warnings=(*warnings, *_static_warnings(kernel, build)),
        )
        if real and verdict.status == "accepted" and isinstance(build, Build):
            verdict = self._at_level_two(kernel, problem, build, verdict, seed)
        if level != "L0" and verdict.reason in OF_MANY_CAUSES and isinstance(build, Build):
            verdict = self._traced_back(kernel, problem, build, verdict, seed)
        if level != "L0" and verdict.status == "accepted" and arch in (None, self.device.info.arch):
            verdict = self._plausible(kernel, problem, verdict)
        return self._kept(kernel, problem, verdict, level=level, seed=seed, arch=arch)

    def verify_together(self, asked: Sequence[tuple[Kernel, Problem]], *, seed: int | None = None) -> list[Verdict]:
        """Verdicts at L2 of several kernels, the same that `verify` gives for each, in their order.

        On a GPU each sanitizer runs once over all of them, since most of its time is its start; where one of them is
        not clean, each kernel is looked at by itself.
        """
        if not isinstance(self.device, TimedDevice):
            return [self.verify(kernel, problem, level="L2", seed=seed) for kernel, problem in asked]
        verdicts = [
            self.known_verdict(kernel, problem, level="L2", seed=seed) or self.verify(kernel, problem, seed=seed)
            for kernel, problem in asked
        ]
        builds: dict[int, Build] = {}
        for index, verdict in enumerate(verdicts):
            build = self.build(asked[index][0])
            if verdict.status == "accepted" and "L2" not in verdict.levels and isinstance(build, Build):
                builds[index] = build
        found = None
        if self._sanitizer is not None and len(builds) > 1:
            found = self._sanitizer([item for i, build in builds.items() for item in self._job(*asked[i], build, seed)])
        clean = found if found is not None and found.fault is None and found.missing is None else None
        for index, build in builds.items():
            kernel, problem = asked[index]
            verdict = self._at_level_two(kernel, problem, build, verdicts[index], seed, found=clean)
            verdicts[index] = self._kept(kernel, problem, verdict, level="L2", seed=seed, arch=None)
        return verdicts

    def _kept(
        self, kernel: Kernel, problem: Problem, verdict: Verdict, *, level: Level, seed: int | None, arch: str | None
    ) -> Verdict:
        """The verdict, in the store where it would be the same again."""
        if _repeatable(verdict):
            self._store.put(self._verdict_key(kernel, problem, level=level, seed=seed, arch=arch), encode(verdict))
        return verdict

    def _plausible(self, kernel: Kernel, problem: Problem, verdict: Verdict, profile: Profile | None = None) -> Verdict:
        """The verdict, or a rejection where the counts and the modelled time at the sizes of `bench` say otherwise."""
        if self.device.info.kind != "emulator":
            return verdict
        bench = problem.bench or problem.workloads[-1:]
        try:
            found = profile or self.profile(kernel, problem, verdict=verdict)
        except (Unsupported, InvalidInput, WorkerDied) as error:
            if isinstance(error, WorkerDied) and error.cancelled:
                raise
            unknown = "whether it does its whole work at the sizes of `bench` was not looked at: it cannot be profiled"
            return dataclasses.replace(verdict, warnings=(*verdict.warnings, unknown))
        doubt = why_implausible(kernel, problem, bench, found)
        if doubt is None:
            return verdict
        return self._verifier.settle_doubt(kernel, problem, self.build(kernel), verdict, doubt, bench)

    def why_unsound(self, problem: Problem) -> str | None:
        """See `Verifier.why_unsound`."""
        return self._verifier.why_unsound(problem)

    def known_verdict(
        self, kernel: Kernel, problem: Problem, *, level: Level = "L1", seed: int | None = None, arch: str | None = None
    ) -> Verdict | None:
        """The verdict that the store holds, if it does; nothing is run."""
        found = self._store.get(self._verdict_key(kernel, problem, level=level, seed=seed, arch=arch))
        return None if found is None else dataclasses.replace(restore(Verdict, found), cached=True)

    def _verdict_key(
        self, kernel: Kernel, problem: Problem, *, level: Level, seed: int | None, arch: str | None
    ) -> str:
        return cache_key(
            "verdict",
            rules=VERDICT_RULES,
            kernel=kernel_id(kernel),
            problem=problem_digest(problem),
            level=level,
            seed=seed,
            arch=arch or self.device.info.arch,
            device=encode(self.device.info),
            compiler=self._compiler.version,
        )

    def profile(
        self,
        kernel: Kernel,
        problem: Problem,
        *,
        metrics: Sequence[str] | None = None,
        verdict: Verdict | None = None,
    ) -> Profile:
        """Profile a kernel at the problem's bench sizes; `cached` says that the store had the answer.

        Raises:
            NotAccepted: the kernel is not accepted at L0.
        """
        found = self.known_profile(kernel, problem, metrics=metrics)
        if found is not None:
            return found
        if verdict is None:
            verdict = self.verify(kernel, problem, level="L0")
        build = self.build(kernel)
        if verdict.status != "accepted" or isinstance(build, CompileFailure):
            raise NotAccepted(f"{verdict.reason or verdict.status}: {verdict.detail}")
        try:
            profile = self._profiler.profile(
                kernel, build, problem, self.device, bench=_bench(problem), metrics=metrics,
                timeout_s=PROFILE_TIMEOUT_S,
            )  # fmt: skip
        except KernelFault as error:
            raise NotAccepted(f"{error.fault.kind} at the bench sizes: {error}") from error
        self._store.put(self._profile_key(kernel, problem, metrics), encode(profile))
        return profile

    def known_profile(
        self, kernel: Kernel, problem: Problem, *, metrics: Sequence[str] | None = None
    ) -> Profile | None:
        """The profile that the store holds, if it does; nothing is run."""
        return self._stored_profile(self._profile_key(kernel, problem, metrics))

    def _stored_profile(self, key: str) -> Profile | None:
        found = self._store.get(key)
        return None if found is None else dataclasses.replace(restore(Profile, found), cached=True)

    def _profile_key(
        self, kernel: Kernel, problem: Problem, metrics: Sequence[str] | None, *, baseline: Kernel | None = None
    ) -> str:
        return cache_key(
            "profile",
            kernel=kernel_id(kernel),
            problem=problem_digest(problem),
            metrics=None if metrics is None else list(metrics),
            device=encode(self.device.info),
            compiler=self._compiler.version,
            profiler=self._profiler.version,
            **({} if baseline is None else {"baseline": kernel_id(baseline)}),
        )

    def compare(
        self, kernel: Kernel, baseline: Kernel, problem: Problem, *, metrics: Sequence[str] | None = None
    ) -> Profile:
        """The profile of `kernel` with its comparison against `baseline`: timed in turns where time is real.

        Raises:
            NotAccepted: the kernel or the baseline is not accepted at L0.
        """
        found = self.known_comparison(kernel, baseline, problem, metrics=metrics)
        if found is not None:
            return found
        profile = self.profile(kernel, problem, metrics=metrics)
        try:
            other = self.profile(baseline, problem, metrics=metrics)
        except NotAccepted as error:
            raise NotAccepted(f"the baseline: {error}") from error
        if not isinstance(self._profiler, PairedProfiler):
            return dataclasses.replace(profile, comparison=compare(profile, other))
        builds = [self.build(item) for item in (kernel, baseline)]
        assert isinstance(builds[0], Build)
        assert isinstance(builds[1], Build)
        paired = self._profiler.profile_against(
            kernel, builds[0], problem, self.device, Rival(kernel=baseline, build=builds[1]), bench=_bench(problem),
            budget=FULL, metrics=metrics, timeout_s=PROFILE_TIMEOUT_S,
        )  # fmt: skip
        made = compared(paired, other)
        self._store.put(self._profile_key(kernel, problem, metrics, baseline=baseline), encode(made))
        return made

    def known_comparison(
        self, kernel: Kernel, baseline: Kernel, problem: Problem, *, metrics: Sequence[str] | None = None
    ) -> Profile | None:
        """What `compare` would answer from the store; nothing is run."""
        if isinstance(self._profiler, PairedProfiler):
            return self._stored_profile(self._profile_key(kernel, problem, metrics, baseline=baseline))
        profile = self.known_profile(kernel, problem, metrics=metrics)
        other = None if profile is None else self.known_profile(baseline, problem, metrics=metrics)
        if profile is None or other is None:
            return None
        return dataclasses.replace(profile, comparison=compare(profile, other))

    def session(self, problem: Problem, *, seed: int) -> Callable[..., Evaluation]:
        """`evaluate(kernel, depth=...)` for one search: nodes reduced, finalists full, the winner with fresh seeds.

        Where time is real, nodes are timed in turns with the fastest kernel so far and given on its scale, so that a
        drift of the clocks between two evaluations counts for nothing; finalists and the winner are timed against the
        input kernel.
        """
        known: dict[tuple[str, Depth], Evaluation] = {}
        rivals: dict[str, Rival] = {}  # "input": the kernel that the search starts from; "best": the fastest so far

        def profiled(kernel: Kernel, build: Build, device: Device, depth: Depth, verdict: Verdict) -> Profile:
            if not isinstance(self._profiler, PairedProfiler):
                return self.profile(kernel, problem, verdict=verdict)
            if not rivals:
                profile = self._profiler.profile(
                    kernel, build, problem, device, bench=_bench(problem), metrics=None, timeout_s=PROFILE_TIMEOUT_S
                )
                rivals["input"] = rivals["best"] = Rival(kernel=kernel, build=build, time_us=profile.time.median_us)
                return profile
            profile = self._profiler.profile_against(
                kernel, build, problem, device, rivals["best" if depth == "reduced" else "input"],
                bench=_bench(problem), budget=QUICK if depth == "reduced" else FULL, timeout_s=PROFILE_TIMEOUT_S,
            )  # fmt: skip
            best = rivals["best"].time_us
            if best is None or profile.time.median_us < best:
                rivals["best"] = Rival(kernel=kernel, build=build, time_us=profile.time.median_us)
            return profile

        def evaluate(kernel: Kernel, *, depth: Depth) -> Evaluation:
            started = time.monotonic()
            identity = kernel_id(kernel)
            build = self.build(kernel)
            fingerprint = self.fingerprint(kernel)
            if fingerprint is not None and depth != "confirm" and (fingerprint, depth) in known:
                return _renamed(known[fingerprint, depth], identity)
            with contextlib.ExitStack() as opened:
                device = self.device
                if depth == "confirm":
                    device = self._fresh_device()
                    opened.callback(device.close)
                verdict = self._judged(kernel, problem, build, device, seed=seed, depth=depth)
                profile = None
                if verdict.status == "accepted" and isinstance(build, Build):
                    try:
                        profile = profiled(kernel, build, device, depth, verdict)
                    except KernelFault as error:
                        verdict = _rejected_for(verdict, problem, error)
            if profile is not None:
                why = self._why_too_fast(problem, profile)
                if why is not None:
                    verdict, profile = _rejected(verdict, problem, "too_fast", why), None
                else:
                    verdict = self._plausible(kernel, problem, verdict, profile)
                    profile = profile if verdict.status == "accepted" else None
            evaluation = Evaluation(
                kernel_id=identity,
                verdict=verdict,
                profile=profile,
                fingerprint=fingerprint,
                seconds=round(time.monotonic() - started, 3),
            )
            if fingerprint is not None:
                known[fingerprint, depth] = evaluation
            return evaluation

        return evaluate

    def _judged(
        self,
        kernel: Kernel,
        problem: Problem,
        build: Build | CompileFailure,
        device: Device,
        *,
        seed: int,
        depth: Depth,
    ) -> Verdict:
        if depth != "confirm":
            salt = 1 if depth == "reduced" else 2
            return self._verifier.verify(kernel, problem, seed=seed * 4 + salt, reduced=depth == "reduced", build=build)
        verifier = Verifier(self._compiler, device, self._references, kernel_timeout_s=self._timeout_s)
        if not isinstance(device, TimedDevice):
            return verifier.verify(kernel, problem, level="L2", highest=True, seed=seed * 4 + 3, build=build)
        verdict = verifier.verify(kernel, problem, seed=seed * 4 + 3, build=build)
        if self._sanitizer is None or verdict.status != "accepted" or not isinstance(build, Build):
            return verdict
        highest = self._at_level_two(kernel, problem, build, verdict, seed * 4 + 3)
        if highest.status != "unverified":
            return highest
        return dataclasses.replace(verdict, warnings=(*verdict.warnings, str(highest.detail)))

    # --- level 2 on a GPU -----------------------------------------------------------------------------------
    def _job(self, kernel: Kernel, problem: Problem, build: Build, seed: int | None) -> list[JobItem]:
        """What the sanitizers run of a kernel."""
        rng = random.Random(secrets.randbits(63) if seed is None else seed)
        return sanitizer_items(kernel, problem, build, self.device.info, rng=rng)

    def _at_level_two(
        self,
        kernel: Kernel,
        problem: Problem,
        build: Build,
        verdict: Verdict,
        seed: int | None,
        *,
        found: Sanitized | None = None,
    ) -> Verdict:
        """What level 2 adds to an accepted verdict: the sanitizers, the embedded device, and a look at timed runs.

        Args:
            found: what the sanitizers say, where they have run already.
        """
        if self._sanitizer is None:
            return _unverified(verdict, problem, "L2 needs compute-sanitizer, which was not found (optiml doctor)")
        if found is None:
            found = self._sanitizer(self._job(kernel, problem, build, seed))
        if found.missing is not None:
            return _unverified(verdict, problem, f"L0 and L1 passed; L2 could not be reached: {found.missing}")
        verdict = dataclasses.replace(verdict, sanitizer=found.report)
        if found.fault is not None:
            reason: Reason = "race" if found.fault.kind == "race" else "fault"
            return dataclasses.replace(_rejected(verdict, problem, reason, str(found.fault.detail)), fault=found.fault)
        verdict = self._on_embedded(kernel, problem, build, verdict, seed)
        if verdict.status == "accepted":
            verdict = self._timed(kernel, problem, build, verdict)
        if verdict.status != "accepted":
            return verdict
        return _with_words(dataclasses.replace(verdict, levels=(*verdict.levels, "L2")), problem)

    def _on_embedded(
        self, kernel: Kernel, problem: Problem, build: Build, verdict: Verdict, seed: int | None
    ) -> Verdict:
        """A race between blocks, or what else the embedded device's checks find, rejects; what it cannot run, does not.

        A GPU mostly starts blocks in their order, so that a kernel which needs that order passes there.
        """
        found = self._asked_embedded(kernel, problem, build, seed)
        if found is None or (isinstance(found, Verdict) and found.status == "accepted"):
            return verdict
        if isinstance(found, str):
            return dataclasses.replace(verdict, warnings=(*verdict.warnings, f"{NOT_EMBEDDED}: {found}"))
        if found.status == "rejected" and found.reason in FOUND_BY_CHECKS:
            told = f"on the embedded device, which checks what a GPU does not: {found.detail}"
            return dataclasses.replace(_rejected(verdict, problem, found.reason, told), fault=found.fault)
        why = NOT_EMBEDDED if found.status == "unverified" else f"the embedded device disagrees ({found.reason})"
        return dataclasses.replace(verdict, warnings=(*verdict.warnings, f"{why}: {found.detail}"))

    def _traced_back(
        self, kernel: Kernel, problem: Problem, build: Build, verdict: Verdict, seed: int | None
    ) -> Verdict:
        """A rejection for its results on a GPU, with the race or fault behind it if the embedded device finds one."""
        found = self._asked_embedded(kernel, problem, build, seed)
        if not isinstance(found, Verdict) or found.status != "rejected" or found.reason not in FOUND_BY_CHECKS:
            return verdict
        told = f"{found.detail} (found on the embedded device; on the GPU: {verdict.reason}, {verdict.detail})"
        return dataclasses.replace(_rejected(verdict, problem, found.reason, told), fault=found.fault)

    def _asked_embedded(self, kernel: Kernel, problem: Problem, build: Build, seed: int | None) -> Verdict | str | None:
        """The embedded device's verdict at its L2, why it has none, or None where there is no such device."""
        if self._embedded is None:
            return None
        try:
            return self._embedded.verify(kernel, problem, level="L2", seed=seed, explain=False, build=build)
        except (Unsupported, WorkerDied) as error:
            if isinstance(error, WorkerDied) and error.cancelled:
                raise
            return str(error)

    def _timed(self, kernel: Kernel, problem: Problem, build: Build, verdict: Verdict) -> Verdict:
        """Whether outputs of timed runs are right, and their time is possible."""
        device = self.device
        if not isinstance(self._profiler, PairedProfiler) or not isinstance(device, TimedDevice):
            return verdict
        bench = _bench(problem)
        inputs = self._profiler.inputs(problem, bench)
        try:
            subject = contender(kernel, build, problem, bench, device)
            timing = time_together(device, [subject], inputs, budget=TIMED_BUDGET, outputs=True)
            for index, entry in enumerate(timing.entries):
                outputs = entry.outputs
                assert outputs is not None
                sets = inputs.sets[index]
                failure = self._verifier.check_again(
                    problem, entry.workload, build, subject.plans[index], sets[outputs.contents], outputs.arrays,
                    others=[item for number, item in enumerate(sets) if number != outputs.contents],
                )  # fmt: skip
                if failure is not None:
                    return _rejected(verdict, problem, *failure)
        except KernelFault as error:
            return _rejected_for(verdict, problem, error)
        why = self._below_the_possible(problem, time_of(timing, 0).median_us)
        return verdict if why is None else _rejected(verdict, problem, "too_fast", why)

    def _why_too_fast(self, problem: Problem, profile: Profile) -> str | None:
        return None if profile.time.source != "measured" else self._below_the_possible(problem, profile.time.median_us)

    def _below_the_possible(self, problem: Problem, time_us: float) -> str | None:
        table = hardware(stand_in(self.device.info.model, self.device.info.arch))
        least = 0.0
        for workload in _bench(problem):
            bound = impossible_us(problem, workload, table)
            if bound is None:
                return None
            least += workload.weight * bound
        if time_us >= LEAST_BELIEVED * least:
            return None
        return f"{time_us:.4g} µs is less than the {least:.4g} µs that its bytes or operations need on this GPU"

    def fingerprint(self, kernel: Kernel) -> str | None:
        """Of the code that a kernel compiles to; None where it does not compile."""
        build = self.build(kernel)
        return None if isinstance(build, CompileFailure) else code_fingerprint(kernel, build)

    def close(self) -> None:
        self.device.close()


def _static_warnings(kernel: Kernel, build: Build | CompileFailure) -> tuple[str, ...]:
    """What the text alone gives to think about; it never decides."""
    of_host = () if kernel.launcher is None else host_call_warnings(kernel.source)
    return of_host if isinstance(build, CompileFailure) else (*of_host, *register_warnings(build.ptx))


def _bench(problem: Problem) -> tuple[Workload, ...]:
    return problem.bench or problem.workloads[-1:]


def _rejected(verdict: Verdict, problem: Problem, reason: Reason, detail: str) -> Verdict:
    """An accepted verdict turned down for what its timed runs showed."""
    return _with_words(dataclasses.replace(verdict, status="rejected", reason=reason, detail=detail), problem)


def _unverified(verdict: Verdict, problem: Problem, detail: str) -> Verdict:
    return _with_words(dataclasses.replace(verdict, status="unverified", detail=detail), problem)


def _with_words(draft: Verdict, problem: Problem) -> Verdict:
    return dataclasses.replace(draft, summary=summary(draft, problem), next_action=next_action(draft))


def _rejected_for(verdict: Verdict, problem: Problem, error: KernelFault) -> Verdict:
    reason: Reason = "timed_out" if error.fault.kind == "timed_out" else "fault"
    rejected = _rejected(verdict, problem, reason, f"at the bench sizes: {error}")
    return rejected if reason == "timed_out" else dataclasses.replace(rejected, fault=error.fault)


def _repeatable(verdict: Verdict) -> bool:
    """Whether a verdict says something of the kernel rather than of this moment on this machine."""
    return verdict.status == "accepted" or verdict.reason not in (None, "timed_out", "resource_limit")


def _renamed(evaluation: Evaluation, identity: str) -> Evaluation:
    uri = f"optiml://kernels/{identity}"
    profile = evaluation.profile
    return dataclasses.replace(
        evaluation,
        kernel_id=identity,
        verdict=dataclasses.replace(evaluation.verdict, kernel_id=identity, uri=uri),
        profile=None if profile is None else dataclasses.replace(profile, kernel_id=identity),
    )


def code_fingerprint(kernel: Kernel, build: Build) -> str:
    """sha256 over the PTX without names, lines and comments, and over the launch plan with its params.

    Two sources with one fingerprint are one program; the search visits it once.
    """
    code = re.sub(r"(?m)^\s*\.loc\b.*$|//.*$", "", build.ptx)
    code = re.sub(r"(?m)^\s*\.(?:file|version)\b.*$", "", code)
    code = code.split(".section", 1)[0]
    code = "\n".join(line.strip() for line in code.splitlines() if line.strip())
    plan: Mapping[str, Any] = {
        "launcher": None if kernel.launcher is None else kernel_id(kernel),  # host code is not in the PTX
        "launches": encode(kernel.launches),
        "workspace": encode(kernel.workspace),
        "params": encode({name: kernel.params[name] for name in _params_in_plan(kernel)}),
    }
    return hashlib.sha256(f"{code}\n{digest(plan)}".encode()).hexdigest()


def _params_in_plan(kernel: Kernel) -> list[str]:
    text = repr(encode(kernel.launches)) + repr(encode(kernel.workspace))
    return sorted(name for name in kernel.params if re.search(rf"\b{re.escape(name)}\b", text))
