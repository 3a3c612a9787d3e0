"""What PyTorch and the vendors' libraries take for a problem, timed by the rules that kernels are timed by.

A child holds torch: for each bench entry all baselines run in turns, A B B A, with rotated inputs, L2 overwritten
before each run and CUDA events around it. TF32 is off. What cannot run is absent, with a reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np

from optiml.device.device import Array
from optiml.errors import SetupError, WorkerDied, WorkerTimeout
from optiml.measure.timing import BenchInputs
from optiml.problems.data import array_shape, raw
from optiml.problems.problem import builtin_names, load_builtin, names_of
from optiml.process import Worker
from optiml.records import Problem
from optiml.sandbox import Policy

MODULE = "optiml.measure.baselines_child"
PASSED_ON = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LD_LIBRARY_PATH", "CUDA_HOME")
COMPILE_S = 120.0  # torch.compile of one baseline, cold
START_S = 120.0
SECONDS = 1.0  # of sampling, for each bench entry


@dataclass(frozen=True, kw_only=True)
class BaselineTime:
    """One baseline: its median with the 95 % interval of that median, weighted over the bench entries."""

    median_us: float
    ci95: tuple[float, float]
    runs: int


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """Times by name (`torch`, `torch.compile`, `cublas` …), and why the others are missing."""

    times: Mapping[str, BaselineTime] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    conditions: Mapping[str, str] = field(default_factory=dict)

    @property
    def medians_us(self) -> dict[str, float]:
        return {name: item.median_us for name, item in self.times.items()}


class TorchBaselines:
    """Times baselines on one GPU through warm children.

    Args:
        gpu: index among the GPUs that CUDA shows.
        hold: a block in which nobody else uses the GPU.
        trust: run a caller's own baselines where no sandbox can hold them.
    """

    def __init__(
        self, *, gpu: int, hold: Callable[[], AbstractContextManager[object]], trust: bool = False
    ) -> None:  # fmt: skip
        self._gpu = gpu
        self._hold = hold
        self._trust = trust
        self._own: Worker | None = None
        self._foreign: Worker | None = None

    def measure(self, problem: Problem, inputs: BenchInputs, *, seconds: float = SECONDS) -> Baselines:
        """Time every baseline of a problem: those of a built-in one, and those that its author gave.

        Raises:
            Busy: the GPU is in use.
        """
        if find_spec("torch") is None:
            return Baselines(missing={"torch": "torch is not installed: pip install torch"})
        parts = []
        own = is_builtin_name(problem)
        if own:
            parts.append(self._measured(self._own_child(), problem, inputs, None, seconds))
        if problem.baselines and not (own and problem.baselines == load_builtin(problem.name).problem.baselines):
            parts.append(self._foreign_ones(problem, inputs, seconds))
        return Baselines(
            times={name: item for part in parts for name, item in part.times.items()},
            missing={name: item for part in parts for name, item in part.missing.items()},
            conditions={name: item for part in parts for name, item in part.conditions.items()},
        )

    def _own_child(self) -> Worker:
        """Our own text, which may compile: torch.compile starts compilers and writes its cache."""
        if self._own is None:
            self._own = self._worker(Policy(trusted=True, gpu=True, processes=True, network=True))
        return self._own

    def _foreign_ones(self, problem: Problem, inputs: BenchInputs, seconds: float) -> Baselines:
        """A caller's text, in the sandbox: it sees the GPU and the interpreter."""
        if self._foreign is None:
            self._foreign = self._worker(Policy(gpu=True))
        try:
            if not self._trust and not self._foreign.layers.files:
                raise SetupError("no sandbox can be set up here: pass --trust-reference", code="no_sandbox")
        except SetupError as error:
            return Baselines(missing=dict.fromkeys(problem.baselines, str(error)))
        return self._measured(self._foreign, problem, inputs, problem.baselines, seconds)

    def _worker(self, policy: Policy) -> Worker:
        given = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        return Worker(
            MODULE, policy=policy, environment={**given, "TORCHINDUCTOR_COMPILE_THREADS": "1"}, start_timeout_s=START_S,
            frame_limit_bytes=4 << 30,
        )  # fmt: skip

    def _measured(
        self, worker: Worker, problem: Problem, inputs: BenchInputs, sources: Mapping[str, str] | None, seconds: float
    ) -> Baselines:
        totals: dict[str, list[tuple[float, Array]]] = {}
        missing: dict[str, str] = {}
        conditions: dict[str, str] = {}
        for index, workload in enumerate(inputs.bench):
            header, blobs = _call(problem, inputs, index, self._gpu, sources, seconds)
            try:
                with self._hold():
                    reply, answers = worker.call(header, blobs, timeout_s=seconds + 8 * COMPILE_S)
            except (WorkerDied, WorkerTimeout, SetupError) as error:
                return Baselines(missing={"torch": f"torch could not be used: {error}"})
            missing.update(reply["missing"])
            conditions.update(reply["conditions"])
            for name, blob in zip(reply["names"], answers, strict=True):
                totals.setdefault(name, []).append((workload.weight, np.frombuffer(blob, dtype=np.float64)))
        whole = {name: parts for name, parts in totals.items() if len(parts) == len(inputs.bench)}
        return Baselines(
            times={name: _time(parts) for name, parts in whole.items()}, missing=missing, conditions=conditions
        )

    def close(self) -> None:
        """End the children."""
        for worker in (self._own, self._foreign):
            if worker is not None:
                worker.close()
        self._own = self._foreign = None


def is_builtin_name(problem: Problem) -> bool:
    """Whether a problem computes what the built-in one of its name does; its baselines then are known."""
    return problem.name in builtin_names() and load_builtin(problem.name).problem.reference == problem.reference


def _call(
    problem: Problem, inputs: BenchInputs, index: int, gpu: int, sources: Mapping[str, str] | None, seconds: float
) -> tuple[dict[str, Any], list[memoryview]]:
    workload = inputs.bench[index]
    names = names_of(problem, workload.axes, workload.scalars)
    arrays = [(name, tensor) for name, tensor in problem.inputs.items() if tensor.shape is not None]
    header = {
        "problem": problem.name,
        "gpu": gpu,
        "names": dict(names),
        "sources": None if sources is None else dict(sources),
        "seconds": seconds,
        "sets": len(inputs.sets[index]),
        "arrays": [
            {"name": name, "dtype": tensor.dtype, "shape": list(array_shape(tensor.shape or (), names))}
            for name, tensor in arrays
        ],
    }
    return header, [raw(contents[name]) for contents in inputs.sets[index] for name, _ in arrays]


def _time(parts: Sequence[tuple[float, Array]]) -> BaselineTime:
    runs = min(len(times) for _, times in parts)
    total = sum(weight * times[:runs] for weight, times in parts)
    values = np.asarray(total)
    resampled = np.median(values[np.random.default_rng(0).integers(0, runs, (1000, runs))], axis=1)
    low, high = (float(item) for item in np.percentile(resampled, (2.5, 97.5)))
    return BaselineTime(median_us=float(np.median(values)), ci95=(low, high), runs=runs)


def best_of(baselines: Baselines, names: Sequence[str] = ("torch", "torch.compile")) -> float | None:
    """The shortest of some baselines, in µs."""
    present = [baselines.times[name].median_us for name in names if name in baselines.times]
    return min(present) if present else None
