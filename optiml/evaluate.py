"""Kernel to Evaluation: build, verify, profile. The one evaluator of every front end.

Builds, verdicts and profiles are kept in the store; equal code (one fingerprint) is evaluated once.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from optiml.codec import digest, encode, kernel_id, problem_digest, restore
from optiml.device.device import Device
from optiml.errors import InvalidInput, NotAccepted, Unsupported, WorkerDied
from optiml.records import Build, Evaluation, Kernel, Level, Problem, Profile, Verdict, Workload
from optiml.store import Store, cache_key
from optiml.toolchain.nvrtc import CompileFailure
from optiml.verify.physics import why_implausible
from optiml.verify.reference import References
from optiml.verify.verify import Verifier

Depth = Literal["reduced", "full", "confirm"]
BUILDS_IN_MEMORY = 256
PROFILE_TIMEOUT_S = 60.0
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
    ) -> None:
        self.device = device
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
        verdict = self._verifier.verify(
            kernel, problem, level=level, seed=seed, build=self.build(kernel, arch=arch), warnings=warnings
        )
        if level != "L0" and verdict.status == "accepted" and arch in (None, self.device.info.arch):
            verdict = self._plausible(kernel, problem, verdict)
        if _repeatable(verdict):
            key = self._verdict_key(kernel, problem, level=level, seed=seed, arch=arch)
            self._store.put(key, encode(verdict))
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
        bench = problem.bench or problem.workloads[-1:]
        profile = self._profiler.profile(
            kernel, build, problem, self.device, bench=bench, metrics=metrics, timeout_s=PROFILE_TIMEOUT_S
        )
        self._store.put(self._profile_key(kernel, problem, metrics), encode(profile))
        return profile

    def known_profile(
        self, kernel: Kernel, problem: Problem, *, metrics: Sequence[str] | None = None
    ) -> Profile | None:
        """The profile that the store holds, if it does; nothing is run."""
        found = self._store.get(self._profile_key(kernel, problem, metrics))
        return None if found is None else dataclasses.replace(restore(Profile, found), cached=True)

    def _profile_key(self, kernel: Kernel, problem: Problem, metrics: Sequence[str] | None) -> str:
        return cache_key(
            "profile",
            kernel=kernel_id(kernel),
            problem=problem_digest(problem),
            metrics=None if metrics is None else list(metrics),
            device=encode(self.device.info),
            compiler=self._compiler.version,
            profiler=self._profiler.version,
        )

    def session(self, problem: Problem, *, seed: int) -> Callable[..., Evaluation]:
        """`evaluate(kernel, depth=...)` for one search: nodes reduced, finalists full, the winner with fresh seeds."""
        known: dict[tuple[str, Depth], Evaluation] = {}

        def evaluate(kernel: Kernel, *, depth: Depth) -> Evaluation:
            started = time.monotonic()
            identity = kernel_id(kernel)
            build = self.build(kernel)
            fingerprint = self.fingerprint(kernel)
            if fingerprint is not None and depth != "confirm" and (fingerprint, depth) in known:
                return _renamed(known[fingerprint, depth], identity)
            verdict = self._judged(kernel, problem, build, seed=seed, depth=depth)
            profile = self.profile(kernel, problem, verdict=verdict) if verdict.status == "accepted" else None
            if profile is not None:
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
        self, kernel: Kernel, problem: Problem, build: Build | CompileFailure, *, seed: int, depth: Depth
    ) -> Verdict:
        if depth != "confirm":
            salt = 1 if depth == "reduced" else 2
            return self._verifier.verify(kernel, problem, seed=seed * 4 + salt, reduced=depth == "reduced", build=build)
        device = self._fresh_device()
        try:
            verifier = Verifier(self._compiler, device, self._references, kernel_timeout_s=self._timeout_s)
            return verifier.verify(kernel, problem, level="L2", highest=True, seed=seed * 4 + 3, build=build)
        finally:
            device.close()

    def fingerprint(self, kernel: Kernel) -> str | None:
        """Of the code that a kernel compiles to; None where it does not compile."""
        build = self.build(kernel)
        return None if isinstance(build, CompileFailure) else code_fingerprint(kernel, build)

    def close(self) -> None:
        self.device.close()


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
