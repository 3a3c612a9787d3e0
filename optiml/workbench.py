"""The one place that chooses: settings in, concrete backends out, and the methods both front ends call.

Everything is started on first use. A workbench is safe to call from several threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import re
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from optiml.codec import decode, encode, kernel_id, normalised_source, restore
from optiml.device.cuda import CudaDevice, Gpu, find_gpus, has_gpu_nodes
from optiml.device.cuda_job import JobItem
from optiml.device.device import TimedDevice
from optiml.device.emulated import EmulatedDevice, emulated_info
from optiml.device.imported import Imported, import_program
from optiml.device.lease import Priority
from optiml.diffs import apply_diff
from optiml.doctor import Check, examine
from optiml.errors import InvalidInput, NotAccepted, OptimlError, SetupError
from optiml.evaluate import CachedCompiler, Evaluator
from optiml.generate.generate import Writing, generate
from optiml.kernel_file import merge_block, read_kernel_text
from optiml.llm.model import Model
from optiml.measure.baselines import TorchBaselines
from optiml.measure.ceilings import VERSION as CEILINGS_VERSION
from optiml.measure.ceilings import Ceilings, Facts, measure_ceilings, with_ceilings
from optiml.measure.counted import CountedProfiler
from optiml.measure.hardware import Hardware, hardware
from optiml.measure.measured import MeasuredProfiler, stand_in
from optiml.measure.nsight import Ncu, metric_names, open_ncu, profile_command
from optiml.measure.nsight_reader import NsightReader
from optiml.measure.nsight_report import read_report
from optiml.mixture.local import LocalModels, MixtureModel
from optiml.mixture.run import BuiltPairs, Trained, build_pairs, train_on_file
from optiml.problems.kernel_check import check_kernel
from optiml.problems.problem import (
    builtin_names,
    check_problem,
    kernel_from_text,
    load_builtin,
    main_dtype,
    with_axes,
    with_dtype,
)
from optiml.records import (
    Build,
    Distribution,
    Generated,
    Judgement,
    Kernel,
    KernelOracle,
    Level,
    NsightReport,
    Problem,
    Profile,
    SearchResult,
    Verdict,
    Workload,
)
from optiml.search.edit import EditContext
from optiml.search.edits import edits_named
from optiml.search.judge import judge_by_rules
from optiml.search.judge_model import judge_by_model
from optiml.search.propose import problem_dtype, suggest
from optiml.searches import RULES, Answer, Request, RunSummary, Searches, SearchProgress, model_named
from optiml.settings import MixtureSettings, Settings
from optiml.store import Store, cache_key, open_store
from optiml.toolchain.compilers import Compilers
from optiml.toolchain.nvcc import NvccCompiler
from optiml.toolchain.nvrtc import Compiler
from optiml.toolchain.signatures import with_launches
from optiml.toolchain.tools import find_tool
from optiml.verify.inputs import cost
from optiml.verify.reference import References
from optiml.verify.sanitizer import Sanitized, sanitize

LOG = logging.getLogger(__name__)
MAX_VERIFIED_COST = 1e8  # operations or elements of one workload that a caller's axes may ask for
SANITIZER_START_S = 30.0  # for each tool, to start on a busy machine
SANITIZER_CASE_S = 5.0  # for each case of a kernel, which has run already without the tool
SEARCH_PATIENCE_S = 600.0  # how long a search waits for a GPU that others use
COMMAND_TIMEOUT_S = 1800.0  # of somebody's program under the profiler
MOST_REMEMBERED = 4096  # kernels that need not be written to the store again
KERNEL_ID = re.compile(r"[0-9a-f]{16}")
KernelSpec = str | Mapping[str, Any] | Kernel
ProblemSpec = str | Mapping[str, Any] | Problem

__all__ = ["Answer", "Check", "Request", "RunSummary", "SearchProgress", "Workbench"]


@dataclass(frozen=True, kw_only=True)
class _Read:
    """A kernel as read from a caller, with what had to be assumed."""

    kernel: Kernel
    assumed: tuple[str, ...]


class Workbench:
    """What OptiML can do, over the backends that the settings and this machine give.

    Args:
        settings: read once by the front end. Paths that callers name must lie inside `settings.roots`; the command
            line sets the root to `/`, because a person there may name any.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._lock = threading.RLock()
        self._closing = contextlib.ExitStack()
        self._store: Store | None = None
        self._compiler: CachedCompiler | None = None
        self._references: References | None = None
        self._evaluators: dict[tuple[str, Priority], Evaluator] = {}
        self._gpus: tuple[Gpu, ...] | SetupError | None = None  # None: nobody has looked yet
        self._turn = 0  # of the GPUs, for searches that name none
        self._tables: dict[str, Hardware] = {}  # GPU -> its rates
        self._remembered: set[str] = set()  # kernels that this process wrote to the store
        self._searches: Searches | None = None
        self._models: dict[str, Model] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every child; a later call starts them again."""
        with self._lock:
            self._closing.close()
            self._closing = contextlib.ExitStack()
            self._store = self._compiler = self._references = self._searches = self._models = None
            self._evaluators = {}

    # --- backends ----------------------------------------------------------------------------------------------------
    @property
    def store(self) -> Store:
        """Builds, verdicts, profiles and kernels by content."""
        with self._lock:
            if self._store is None:
                self._store = open_store(self.settings.home / "store", size_limit_bytes=self.settings.store_limit_bytes)
                self._closing.callback(self._store.close)
            return self._store

    def _compiler_of(self) -> CachedCompiler:
        with self._lock:
            if self._compiler is None:
                nvrtc = Compiler(
                    timeout_s=self.settings.compile_timeout_s, memory_bytes=self.settings.compile_memory_bytes
                )
                nvcc = NvccCompiler(memory_bytes=self.settings.compile_memory_bytes)
                self._compiler = CachedCompiler(Compilers(nvrtc, nvcc), self.store)
                self._closing.callback(self._compiler.close)
            return self._compiler

    def compiler_version(self) -> str:
        """Version of the compiler, under which results are kept.

        Raises:
            SetupError: code `no_compiler`.
        """
        return self._compiler_of().version

    def _references_of(self) -> References:
        with self._lock:
            if self._references is None:
                self._references = References(
                    timeout_s=self.settings.reference_timeout_s, trust=self.settings.trust_reference
                )
                self._closing.callback(self._references.close)
            return self._references

    def evaluator(self, device: str = "auto", *, priority: Priority = "interactive") -> Evaluator:
        """The evaluator of one device.

        Args:
            priority: of its use of a GPU: work that a person waits for goes before searches.

        Raises:
            SetupError: code `no_device`: there is no such GPU, or GPUs are not usable here.
        """
        name = self._device_name(device)
        if not name.startswith("cuda"):
            priority = "interactive"
        with self._lock:
            key = (name, priority)
            if key not in self._evaluators:
                evaluator = self._gpu_evaluator(name, priority) if name.startswith("cuda") else self._emulated(name)
                self._closing.callback(evaluator.close)
                self._evaluators[key] = evaluator
            return self._evaluators[key]

    def _emulated(self, name: str) -> Evaluator:
        return Evaluator(
            compiler=self._compiler_of(),
            device=EmulatedDevice(emulated_info(name)),
            fresh_device=lambda: EmulatedDevice(emulated_info(name)),
            references=self._references_of(),
            profiler=CountedProfiler(),
            store=self.store,
            kernel_timeout_s=self.settings.kernel_timeout_s,
        )

    def _gpu_evaluator(self, name: str, priority: Priority) -> Evaluator:
        gpu = self.gpus()[int(name.removeprefix("cuda:"))]

        def opened() -> CudaDevice:
            if priority == "search":
                return CudaDevice(gpu, priority=priority, patience_s=SEARCH_PATIENCE_S)
            return CudaDevice(gpu)

        profiler = MeasuredProfiler() if priority == "search" else self._thorough_profiler(gpu, opened)
        self._closing.callback(profiler.close)

        program = find_tool("compute-sanitizer")
        embedded = EmulatedDevice(emulated_info(f"emulator:{stand_in(gpu.info.model, gpu.arch)}"))
        self._closing.callback(embedded.close)

        def sanitized(items: Sequence[JobItem]) -> Sanitized:
            assert program is not None
            timeout_s = SANITIZER_START_S + SANITIZER_CASE_S * len(items)
            with opened().used(alone=False):
                return sanitize(program, items, gpu=gpu.index, timeout_s=timeout_s)

        return Evaluator(
            compiler=self._compiler_of(),
            device=opened(),
            fresh_device=opened,
            references=self._references_of(),
            profiler=profiler,
            store=self.store,
            kernel_timeout_s=self.settings.kernel_timeout_s,
            sanitizer=None if program is None else sanitized,
            embedded=embedded,
        )

    def _thorough_profiler(self, gpu: Gpu, opened: Callable[[], CudaDevice]) -> MeasuredProfiler:
        """For a person who waits for one profile: hardware counters, measured ceilings, baselines, energy."""

        def held() -> AbstractContextManager[None]:
            return opened().used(alone=True)

        try:
            ncu: Ncu | SetupError = open_ncu()
        except SetupError as error:
            ncu = error
        baselines = TorchBaselines(gpu=gpu.index, hold=held, trust=self.settings.trust_reference)
        self._closing.callback(baselines.close)
        return MeasuredProfiler(
            counters=NsightReader(ncu, gpu=gpu.index, hold=held),
            table=lambda device: self._measured_table(gpu, device),
            baselines=baselines,
            energy=True,
        )

    def _measured_table(self, gpu: Gpu, device: TimedDevice) -> Hardware:
        """The table of a GPU with its measured ceilings, from the store where they are known."""
        if gpu.pci_bus_id not in self._tables:
            facts = Facts(sms=gpu.sms, l2_bytes=gpu.l2_bytes, clock_hz=1e3 * gpu.clock_khz, arch=gpu.arch)
            driver = device.driver_version() or gpu.driver_cuda
            key = cache_key(
                "ceilings", device=gpu.name, facts=encode(facts), driver=driver, compiler=self._compiler_of().version,
                version=CEILINGS_VERSION,
            )  # fmt: skip
            found = self.store.get(key)
            if found is None:
                ceilings = measure_ceilings(device, facts, self._compiler_of().compile, driver=driver)
                self.store.put(key, encode(ceilings))
            else:
                ceilings = restore(Ceilings, found)
            table = hardware(stand_in(device.info.model, device.info.arch))
            self._tables[gpu.pci_bus_id] = with_ceilings(table, ceilings, facts)
        return self._tables[gpu.pci_bus_id]

    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that CUDA shows to this process; looked up once.

        Raises:
            SetupError: code `no_device`: why none can be used.
        """
        with self._lock:
            if self._gpus is None:
                try:
                    self._gpus = find_gpus() if has_gpu_nodes() else ()
                except SetupError as error:
                    self._gpus = error
            if isinstance(self._gpus, SetupError):
                raise SetupError(str(self._gpus), code=self._gpus.code)
            return self._gpus

    @property
    def models(self) -> Mapping[str, Model]:
        """The language models that are set up, by the name of their generator.

        Raises:
            ModelFailed: the settings name one without what it needs.
        """
        with self._lock:
            if self._models is None:
                from optiml.llm.configured import chat_models  # the HTTP client takes a third of a second

                models = chat_models(self.settings) if self.settings.chat or self.settings.text_mixture else {}
                if self.settings.mixture is not None:
                    models["mixture"] = MixtureModel(LocalModels(self.settings.mixture))
                self._models = models
                for model in self._models.values():
                    self._closing.callback(model.close)
            return self._models

    def _device_name(self, device: str) -> str:
        wanted = self.settings.device if device == "auto" else device
        if wanted == "auto":
            return "cuda:0" if self._usable_gpus() else "emulator:a100"
        if wanted.startswith("cuda"):
            return self._gpu_name(wanted)
        info = emulated_info(wanted)
        return f"emulator:{info.model}"

    def _gpu_name(self, wanted: str) -> str:
        gpus = self.gpus()
        match = re.fullmatch(r"cuda(?::([0-9]{1,4}))?", wanted)
        index = int(match.group(1) or 0) if match else -1
        if not 0 <= index < len(gpus):
            there = ", ".join(f"cuda:{gpu.index} ({gpu.name})" for gpu in gpus) or "no GPU that CUDA shows"
            raise SetupError(
                f"there is no device {wanted[:40]!r}; this machine has {there}, and the embedded device "
                "(emulator:a100, emulator:h100, emulator:h200)",
                code="no_device",
            )
        return f"cuda:{index}"

    def _usable_gpus(self) -> tuple[Gpu, ...]:
        try:
            return self.gpus()
        except SetupError as error:
            LOG.info("no GPU is used: %s", error)
            return ()

    def _search_device(self, device: str) -> str:
        """Where a search runs; those that name no device take the GPUs in turns."""
        gpus = self._usable_gpus() if device == "auto" and self.settings.device == "auto" else ()
        if not gpus:
            return self._device_name(device)
        with self._lock:
            self._turn += 1
            return f"cuda:{gpus[(self._turn - 1) % len(gpus)].index}"

    # --- what callers name -------------------------------------------------------------------------------------------
    def problem(self, spec: ProblemSpec, *, axes: Mapping[str, int] | None = None, dtype: str | None = None) -> Problem:
        """A problem from its name or record, at a dtype and at bench sizes.

        Raises:
            InvalidInput: `unknown_problem`, or what is wrong with the record, the axes or the dtype.
        """
        if isinstance(spec, str):
            builtin = load_builtin(spec)
            problem = builtin.problem if dtype is None else with_dtype(builtin, dtype)
        else:
            problem = spec if isinstance(spec, Problem) else self._custom_problem(spec)
            if dtype is not None:
                problem = _retyped(problem, dtype)
        return with_axes(problem, axes or {})

    def _custom_problem(self, spec: Mapping[str, Any]) -> Problem:
        problem = check_problem(decode(Problem, dict(spec), what="problem"))
        _refuse_unaffordable(problem)
        if isinstance(problem.reference, KernelOracle):
            oracle = check_kernel(with_launches(merge_block(problem.reference.kernel), problem)[0], problem)
            problem = dataclasses.replace(problem, reference=KernelOracle(kernel=oracle))
        for workload in (*problem.workloads, *problem.bench):
            self._check_files(workload)
        return problem

    def _check_files(self, workload: Workload) -> None:
        for spec in workload.inputs.values():
            if isinstance(spec, Distribution) and spec.npy is not None:
                self.allowed_path(spec.npy)

    def allowed_path(self, text: str) -> Path:
        """A path that a caller may name: inside a root, after symbolic links; a relative one starts at the first root.

        Raises:
            InvalidInput: it lies outside every root; the message does not say whether it exists.
        """
        if "\0" in text:
            raise InvalidInput("a path may not hold a NUL character")
        path = Path(*self.settings.roots[:1], text).resolve()
        if not any(path.is_relative_to(root.resolve()) for root in self.settings.roots):
            raise InvalidInput("the path lies outside the allowed roots (see --root)")
        return path

    def kernel(self, spec: KernelSpec, problem: Problem | None) -> Kernel:
        """A kernel in any form of contract §2, checked against its problem and remembered by its id.

        Raises:
            InvalidInput: what is wrong with it, or `unknown_kernel`.
        """
        return self._read_kernel(spec, problem).kernel

    def _read_kernel(self, spec: KernelSpec, problem: Problem | None) -> _Read:
        kernel = self._kernel_of(spec, problem)
        assumed: tuple[str, ...] = ()
        if problem is not None:
            kernel, assumed = with_launches(kernel, problem)
            check_kernel(kernel, problem)
        self._remember(kernel)
        return _Read(kernel=kernel, assumed=assumed)

    def _remember(self, kernel: Kernel) -> None:
        identity = kernel_id(kernel)
        if identity not in self._remembered:
            self.store.put(_kernel_key(identity), encode(kernel))
            if len(self._remembered) >= MOST_REMEMBERED:
                self._remembered.clear()  # writing some of them again costs little
            self._remembered.add(identity)

    def _kernel_of(self, spec: KernelSpec, problem: Problem | None) -> Kernel:
        if isinstance(spec, Kernel):
            return merge_block(dataclasses.replace(spec, source=normalised_source(spec.source)))
        if isinstance(spec, str):
            return self.known_kernel(spec) if KERNEL_ID.fullmatch(spec) else read_kernel_text(spec)
        keys = set(spec)
        if keys == {"id"}:
            return self.known_kernel(str(spec["id"]))
        if keys == {"path"}:
            return self._kernel_file(str(spec["path"]))
        if keys == {"base", "diff"}:
            return self._patched(spec["base"], str(spec["diff"]), problem)
        source = spec.get("source")
        if isinstance(source, str):
            normalised_source(source)  # refused by size before anything is copied
        kernel = decode(Kernel, dict(spec), what="kernel")
        return merge_block(dataclasses.replace(kernel, source=normalised_source(kernel.source)))

    def _patched(self, base_spec: KernelSpec, diff: str, problem: Problem | None) -> Kernel:
        """A base with a diff applied, made against its file or its source (launch comment blank)."""
        if isinstance(base_spec, str) and not KERNEL_ID.fullmatch(base_spec):
            try:
                patched = apply_diff(base_spec, diff)
            except InvalidInput:
                pass  # made against the source
            else:
                return read_kernel_text(patched)
        base = self._kernel_of(base_spec, problem)
        return dataclasses.replace(base, source=apply_diff(base.source, diff))

    def _kernel_file(self, text: str) -> Kernel:
        path = self.allowed_path(text)
        try:
            if path.stat().st_size > 4 << 20:
                raise InvalidInput("the kernel file is larger than 4 MiB", code="too_large")
            content = path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput("the kernel file cannot be read as UTF-8 text") from error
        return kernel_of_file(path.name, content)

    def known_kernel(self, identity: str) -> Kernel:
        """A kernel seen before.

        Raises:
            InvalidInput: code `unknown_kernel`.
        """
        found = self.store.get(_kernel_key(identity)) if KERNEL_ID.fullmatch(identity) else None
        if found is None:
            raise InvalidInput(f"no kernel {identity[:32]!r} is known here; send its source", code="unknown_kernel")
        return restore(Kernel, found)

    # --- the stages --------------------------------------------------------------------------------------------------
    def verify(
        self,
        kernel_spec: KernelSpec,
        problem_spec: ProblemSpec,
        *,
        level: Level = "L1",
        axes: Mapping[str, int] | None = None,
        dtype: str | None = None,
        device: str = "auto",
        arch: str | None = None,
        seed: int | None = None,
    ) -> Verdict:
        """Whether a kernel is right; see `Verdict`."""
        problem = self._verified_problem(problem_spec, axes, dtype)
        read = self._read_kernel(kernel_spec, problem)
        return self.evaluator(device).verify(
            read.kernel, problem, level=level, seed=seed, arch=arch, warnings=read.assumed
        )

    def known_verdict(
        self,
        kernel_spec: KernelSpec,
        problem_spec: ProblemSpec,
        *,
        level: Level = "L1",
        axes: Mapping[str, int] | None = None,
        dtype: str | None = None,
        device: str = "auto",
        arch: str | None = None,
        seed: int | None = None,
    ) -> Verdict | None:
        """What `verify` would answer from the store; None where it would have to work. Milliseconds either way."""
        problem = self._verified_problem(problem_spec, axes, dtype)
        kernel = self._read_kernel(kernel_spec, problem).kernel
        return self.evaluator(device).known_verdict(kernel, problem, level=level, seed=seed, arch=arch)

    def _verified_problem(self, spec: ProblemSpec, axes: Mapping[str, int] | None, dtype: str | None) -> Problem:
        problem = self.problem(spec, axes=axes, dtype=dtype)
        if not axes:
            return problem
        problem = dataclasses.replace(problem, workloads=(*problem.bench, *problem.workloads))
        _refuse_unaffordable(problem)
        return problem

    def profile(
        self,
        kernel_spec: KernelSpec,
        problem_spec: ProblemSpec,
        *,
        baseline: KernelSpec | None = None,
        axes: Mapping[str, int] | None = None,
        dtype: str | None = None,
        metrics: Sequence[str] | None = None,
        device: str = "auto",
    ) -> Profile:
        """What an accepted kernel costs, and against a baseline if one is given.

        Raises:
            NotAccepted: the kernel or the baseline is not right.
        """
        problem = self.problem(problem_spec, axes=axes, dtype=dtype)
        evaluator = self.evaluator(device)
        kernel = self.kernel(kernel_spec, problem)
        if baseline is not None:
            profile = evaluator.compare(kernel, self.kernel(baseline, problem), problem, metrics=metrics)
        else:
            profile = evaluator.profile(kernel, problem, metrics=metrics)
        self._keep_last(kernel, profile)
        return profile

    def _keep_last(self, kernel: Kernel, profile: Profile) -> None:
        """For `last_profile`; a profile from the store may be one that a verification made, so nobody has seen it."""
        key = f"last-profile/{kernel_id(kernel)}"
        if not profile.cached or self.store.get(key) is None:
            self.store.put(key, encode(dataclasses.replace(profile, comparison=None)))

    def known_profile(
        self,
        kernel_spec: KernelSpec,
        problem_spec: ProblemSpec,
        *,
        baseline: KernelSpec | None = None,
        axes: Mapping[str, int] | None = None,
        dtype: str | None = None,
        metrics: Sequence[str] | None = None,
        device: str = "auto",
    ) -> Profile | None:
        """What `profile` would answer from the store; None where it would have to work. Milliseconds either way."""
        problem = self.problem(problem_spec, axes=axes, dtype=dtype)
        evaluator = self.evaluator(device)
        kernel = self.kernel(kernel_spec, problem)
        if baseline is None:
            known = evaluator.known_profile(kernel, problem, metrics=metrics)
        else:
            known = evaluator.known_comparison(kernel, self.kernel(baseline, problem), problem, metrics=metrics)
        if known is not None:
            self._keep_last(kernel, known)
        return known

    def profile_report(
        self,
        path: str,
        *,
        metrics: Sequence[str] | None = None,
        kernel_regex: str | None = None,
        launch_skip: int | None = None,
        launch_count: int | None = None,
    ) -> NsightReport:
        """What an existing `.ncu-rep` file says; needs no GPU. See `read_report`."""
        return read_report(
            self.allowed_path(path),
            metrics=metrics,
            kernel_regex=kernel_regex,
            launch_skip=launch_skip,
            launch_count=launch_count,
        )

    def profile_command(
        self,
        command: Sequence[str],
        *,
        metrics: Sequence[str] | None = None,
        kernel_regex: str | None = None,
        launch_skip: int | None = None,
        launch_count: int | None = None,
    ) -> NsightReport:
        """Profile the kernels of somebody's program, which runs with all rights of this process.

        Raises:
            InvalidInput: the settings do not allow commands.
            SetupError: `no_profiler` or `profiler_forbidden`.
        """
        if not self.settings.allow_commands:
            raise InvalidInput(
                "commands are not allowed here: start the server with --allow-commands, or profile the program "
                "yourself with `ncu --set full -o FILE COMMAND` and give report"
            )
        with tempfile.TemporaryDirectory(prefix="optiml-ncu-") as folder:
            report = Path(folder) / "command.ncu-rep"
            profile_command(
                open_ncu(),
                command,
                metrics=metric_names(metrics),
                report=report,
                kernel_regex=kernel_regex,
                launch_skip=launch_skip,
                launch_count=launch_count,
                timeout_s=COMMAND_TIMEOUT_S,
            )
            return read_report(report, metrics=metrics)

    def compare(
        self,
        new_spec: KernelSpec,
        old_spec: KernelSpec,
        problem_spec: ProblemSpec,
        *,
        axes: Mapping[str, int] | None = None,
        dtype: str | None = None,
        device: str = "auto",
    ) -> Profile:
        """The profile of the new kernel with its comparison against the old one."""
        return self.profile(new_spec, problem_spec, baseline=old_spec, axes=axes, dtype=dtype, device=device)

    def judge(
        self,
        problem_spec: ProblemSpec,
        before_spec: KernelSpec,
        after_spec: KernelSpec,
        *,
        profile_id: str | None = None,
        judge: str = "rules",
        device: str = "auto",
    ) -> Judgement:
        """An opinion on an edit, from static facts, the profile of what is edited, and rules or a model over them."""
        model = None if judge == RULES else model_named(self.models, judge, "judge", otherwise=RULES)
        problem = self.problem(problem_spec)
        before = self.kernel(before_spec, problem)
        after = self.kernel(after_spec, problem)
        evaluator = self.evaluator(device)
        builds = [evaluator.build(kernel) for kernel in (before, after)]
        profile = self.last_profile(profile_id or kernel_id(before))
        if profile is None:
            with contextlib.suppress(NotAccepted):
                profile = evaluator.profile(before, problem)
        context = EditContext(kernel=before, problem=problem, profile=profile, dtype=problem_dtype(problem))
        rules = judge_by_rules(
            problem,
            before,
            after,
            before_build=builds[0] if isinstance(builds[0], Build) else None,
            after_build=builds[1] if isinstance(builds[1], Build) else None,
            profile=profile,
            suggestions=suggest(context, edits_named(None)),
        )
        return rules if model is None else judge_by_model(model, rules, before, after, profile=profile)

    def generate(
        self,
        intent: str | None = None,
        problem: ProblemSpec | None = None,
        *,
        axes: Mapping[str, int] | None = None,
        dtype: str | None = None,
        count: int = 1,
        generator: str = "auto",
        verify: bool = True,
        device: str = "auto",
        arch: str | None = None,
    ) -> Generated:
        """First kernels for an intent or a problem."""
        chosen = None if problem is None else self.problem(problem, axes=axes, dtype=dtype)

        def judged(kernel: Kernel, wanted: Problem) -> Verdict:
            return self.verify(kernel, wanted, device=device, arch=arch)

        made = generate(
            intent,
            problem=chosen,
            axes=axes,
            dtype=dtype,
            count=count,
            generator=generator,
            verify=judged if verify else None,
            writing=self._writing(device, measured=verify),
        )
        for candidate in made.candidates:
            self._remember(candidate.kernel)
        return made

    def _writing(self, device: str, *, measured: bool) -> Writing:
        """The models, and what the writer asks this workbench."""

        def admit(fields: Mapping[str, Any]) -> Problem:
            problem = self._custom_problem(fields)
            why = self.evaluator(device).why_unsound(problem)
            if why is not None:
                raise InvalidInput(why)
            return problem

        def fingerprint(kernel: Kernel) -> str | None:
            return self.evaluator(device).fingerprint(kernel)

        def measure(kernel: Kernel, problem: Problem) -> float | None:
            try:
                return self.evaluator(device).profile(kernel, problem).time.median_us
            except OptimlError as error:  # a time is asked for to rank by: without one a kernel stands last
                LOG.warning("a kernel could not be profiled: %s", error)
                return None

        if not self.models:
            return Writing()
        return Writing(models=self.models, admit=admit, fingerprint=fingerprint, measure=measure if measured else None)

    def import_program(self, kernel: Kernel, *, device: str = "auto") -> Imported:
        """What a whole program, with `main` and launches of its own, was seen to do: a draft of problem and kernel.

        Raises:
            InvalidInput: it does not build, or launches nothing.
            SetupError: no nvcc, host compiler or strong sandbox here.
        """
        evaluator = self.evaluator(device)
        program = dataclasses.replace(kernel, launches=(), launcher="main")
        build = evaluator.build(program)
        if not isinstance(build, Build):
            if build.reason is None:
                raise SetupError(build.detail, code="no_compiler")
            raise InvalidInput(f"the program does not build: {build.detail}")
        imported = import_program(program, build, evaluator.device.info)
        if imported.kernel is None:
            return imported
        self._remember(imported.kernel)
        made = evaluator.build(imported.kernel)
        if isinstance(made, Build):
            return imported
        note = f"the device code does not build by itself yet: {made.detail}"
        return dataclasses.replace(imported, notes=(*imported.notes, note))

    # --- searches ----------------------------------------------------------------------------------------------------
    @property
    def searches(self) -> Searches:
        """The runs on disk."""
        with self._lock:
            if self._searches is None:
                self._searches = Searches(
                    self.settings.home / "runs",
                    lambda name: self.evaluator(name, priority="search"),
                    lambda: self.models,
                )
            return self._searches

    def start_search(
        self,
        problem_spec: ProblemSpec | None = None,
        kernel_spec: KernelSpec | None = None,
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
        """Write a new run to disk and return its id; `run_search` carries it out."""
        problem, kernel = self._search_input(problem_spec, kernel_spec, intent, axes, dtype, device)
        return self.searches.start(
            problem=problem,
            kernel=kernel,
            evaluations=evaluations,
            seconds=seconds,
            proposer=proposer,
            judge=judge,
            device=self._search_device(device),
            seed=seed,
            edits=edits,
            catalogue=catalogue,
            write_to=None if write_to is None else str(self.allowed_path(write_to)),
        )

    def _search_input(
        self,
        problem_spec: ProblemSpec | None,
        kernel_spec: KernelSpec | None,
        intent: str | None,
        axes: Mapping[str, int] | None,
        dtype: str | None,
        device: str,
    ) -> tuple[Problem, Kernel]:
        if problem_spec is not None:
            problem = self.problem(problem_spec, axes=axes, dtype=dtype)
        elif intent is not None:
            made = generate(intent, problem=None, axes=axes, dtype=dtype, count=1, generator="catalogue", verify=None)
            if made.problem is None and self.models:
                made = self.generate(intent, axes=axes, dtype=dtype, device=device)
                kernel_spec = kernel_spec or (made.candidates[0].kernel if made.candidates else None)
            if made.problem is None:
                raise InvalidInput(made.summary)
            problem = made.problem
        else:
            raise InvalidInput("give a problem or an intent to search for")
        if kernel_spec is not None:
            return problem, self.kernel(kernel_spec, problem)
        if problem.name not in builtin_names() or not isinstance(problem_spec, str | None):
            raise InvalidInput("give a kernel: a problem that is not built in has no seed")
        return problem, self.kernel(seed_kernel(problem), problem)

    def run_search(
        self,
        run_id: str,
        *,
        on_progress: Callable[[SearchProgress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> SearchResult:
        """Carry a run out, or resume it, to its end, in the calling thread."""
        result = self.searches.run(run_id, on_progress=on_progress, should_stop=should_stop)
        for item in (result.best, result.baseline):
            if item is not None:
                self._remember(item.kernel)
        return result

    def search_result(self, run_id: str) -> SearchResult:
        """The result of a run, or its best so far."""
        return self.searches.result(run_id)

    def search_requests(self, run_id: str) -> tuple[Request, ...]:
        """What a run with proposer=agent asks for; nothing while it evaluates and after its end."""
        requests = self.searches.requests(run_id)
        for request in requests:
            self._remember(request.kernel)
        return requests

    def tell_search(self, run_id: str, proposals: Sequence[Any]) -> tuple[Answer, ...]:
        """Answer the requests of a run with proposer=agent; `run_search` then evaluates what was queued.

        Args:
            proposals: `{"request_id", "kernel", "rationale", "expected"}` each, the kernel in any form of contract §2.
                None at all ends the search: the best kernel gets its final checks.

        Raises:
            InvalidInput: `unknown_run`, or the run asks no agent.
        """
        return self.searches.tell(run_id, proposals, self._told_kernel)

    def _told_kernel(self, spec: Any, problem: Problem) -> Kernel:
        if not isinstance(spec, str | Mapping):
            raise InvalidInput("kernel must be text or an object")
        return self.kernel(spec, problem)

    def runs(self) -> tuple[RunSummary, ...]:
        """All runs, newest first."""
        return self.searches.list()

    def run_ids(self) -> tuple[str, ...]:
        """The ids of all runs, newest first."""
        return self.searches.ids()

    def cancel_search(self, run_id: str) -> None:
        """Mark a run cancelled; whoever carries it out stops at the next evaluation."""
        self.searches.cancel(run_id)

    def tree(self, run_id: str) -> tuple[Mapping[str, Any], ...]:
        """Every node of a run."""
        return self.searches.tree(run_id)

    def report(self, run_id: str) -> str:
        """The run as Markdown."""
        return self.searches.report(run_id)

    # --- the mixture -------------------------------------------------------------------------------------------------
    def build_pairs(self, path: Path, *, device: str = "auto", **options: Any) -> BuiltPairs:
        """Write pairs of intent and kernel from the catalogue, each verified here; see `optiml.mixture.run`."""

        def verified(kernel: Kernel, problem: Problem) -> Verdict:
            return self.verify(kernel, problem, device=device)

        return build_pairs(path, verified, **options)

    def train_mixture(self, data: Path, folder: Path, **options: Any) -> Trained:
        """Train the experts of the settings to write together, in this process; see `optiml.mixture.run`."""
        return train_on_file(self.settings.mixture or MixtureSettings(), data, folder, **options)

    # --- looking things up -------------------------------------------------------------------------------------------
    def ptx(self, identity: str) -> str:
        """The PTX of a known kernel."""
        build = self.evaluator().build(self.known_kernel(identity))
        if not isinstance(build, Build):
            raise NotAccepted(f"{build.reason}: {build.detail}")
        return build.ptx

    def last_profile(self, identity: str) -> Profile | None:
        """The newest profile of a known kernel."""
        found = self.store.get(f"last-profile/{identity}") if KERNEL_ID.fullmatch(identity) else None
        return None if found is None else restore(Profile, found)

    def doctor(self) -> tuple[Check, ...]:
        """What this machine can do, and the command that fixes each gap."""
        return examine(self.settings, self.store)


def kernel_of_file(name: str, content: str) -> Kernel:
    """A kernel from the text of a `.cu`, `.ptx` or `.json` file."""
    if name.endswith(".json"):
        try:
            fields = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{name} is not JSON: {error}") from error
        return merge_block(decode(Kernel, fields, what=name))
    kernel = read_kernel_text(content)
    return dataclasses.replace(kernel, language="ptx") if name.endswith(".ptx") else kernel


def seed_kernel(problem: Problem) -> Kernel:
    """The naive seed of a built-in problem, in the problem's dtype."""
    return kernel_from_text(load_builtin(problem.name).seed_text, dtype=main_dtype(problem))


def _refuse_unaffordable(problem: Problem) -> None:
    """The embedded device would need minutes for what a caller's sizes ask it to verify."""
    dearest = max(cost(problem, workload) for workload in problem.workloads)
    if dearest > MAX_VERIFIED_COST:
        raise InvalidInput(
            f"these sizes need about {dearest:.1e} operations, and the embedded device verifies up to "
            f"{MAX_VERIFIED_COST:.0e}: verify at smaller ones (profiles sample big grids, so bench sizes may stay)",
            code="too_large",
        )


def _kernel_key(identity: str) -> str:
    return f"kernel/{identity}"


def _retyped(problem: Problem, dtype: str) -> Problem:
    """A caller's problem with its one floating dtype replaced."""
    tensors = [*problem.inputs.values(), *problem.outputs.values()]
    floating = {tensor.dtype for tensor in tensors if "float" in tensor.dtype}
    if floating == {dtype}:
        return problem
    raise InvalidInput(f"{problem.name} is declared in {', '.join(sorted(floating))}; change the problem, not dtype")
