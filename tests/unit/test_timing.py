"""Times, intervals and verdicts from scripted samples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from test_cuda_context import BUILD, PLAN, N

from optiml.device.device import Repeated, Samples, TimedDevice, TimedOutputs, TimedSubject
from optiml.device.nvml import Clocks
from optiml.measure.timing import (
    MOST_ROUNDS,
    BenchInputs,
    Budget,
    Contender,
    contents_of,
    ratio_of,
    time_of,
    time_together,
)
from optiml.records import DeviceInfo, Workload

CLOCKS = Clocks(sm_mhz=1980, memory_mhz=3201, temperature_c=40, power_w=100.0, throttled=())
INFO = DeviceInfo(name="NVIDIA H200", kind="cuda", arch="sm_90", model="h200", engine="cuda")


class ScriptedTimer:
    """Times drawn around given means, with a drift that all subjects share."""

    def __init__(self, means_us: Sequence[float], noise: float, seed: int) -> None:
        self._means, self._noise = np.asarray(means_us), noise
        self._rng = np.random.default_rng(seed)
        self.rounds = 0

    def sample(self, rounds: int, *, flush: bool = True) -> Samples:
        shape = (rounds, len(self._means), 2)
        drift = 1.0 + 0.05 * np.sin(0.1 * np.arange(self.rounds, self.rounds + rounds))[:, None, None]
        times = self._means[None, :, None] * drift * (1.0 + self._noise * self._rng.standard_normal(shape))
        self.rounds += rounds
        return Samples(times_us=times.astype(np.float32), before=CLOCKS, after=CLOCKS)

    def outputs(self, subject: int) -> TimedOutputs:
        return TimedOutputs(arrays={}, contents=0)

    def repeat(self, subject: int, *, seconds: float) -> Repeated:
        raise NotImplementedError


class ScriptedGpu:
    """A timed device whose kernels take the times that they are given, in the order of the subjects."""

    info = INFO

    def __init__(self, *means_us: float, noise: float = 0.004, seed: int = 0) -> None:
        self.timer_made = ScriptedTimer(means_us, noise, seed)
        self.subjects: list[TimedSubject] = []

    def run(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    def driver_version(self) -> str | None:
        return "580.1"

    @contextlib.contextmanager
    def timer(self, subjects: Sequence[TimedSubject], *, timeout_s: float) -> Iterator[ScriptedTimer]:
        self.subjects = list(subjects)
        yield self.timer_made

    def close(self) -> None:
        return


INPUTS = BenchInputs(
    bench=(Workload(axes={"n": N}),), sets=(tuple({"x": np.full(N, value, np.float32)} for value in (1.0, 2.0, 3.0)),)
)
ONE = Contender(build=BUILD, plans=(PLAN,))


def measured(gpu: ScriptedGpu, count: int, **budget: Any) -> Any:
    device: TimedDevice = gpu
    ticks = iter(0.001 * tick for tick in range(100_000))
    return time_together(
        device, [ONE] * count, INPUTS, budget=Budget(**{"seconds": 10.0, **budget}), clock=lambda: next(ticks)
    )


def verdicts(ratio: float, trials: int, noise: float) -> list[str]:
    found = []
    for seed in range(trials):
        timing = measured(ScriptedGpu(50.0 / ratio, 50.0, noise=noise, seed=seed), 2)
        found.append(ratio_of(timing, 0, 1).verdict)
    return found


def test_the_same_kernel_against_itself_raises_no_alarm() -> None:
    found = verdicts(1.0, 25, noise=0.01)
    assert found.count("faster") + found.count("slower") == 0


def test_three_per_cent_are_found_in_either_direction() -> None:
    assert verdicts(1 / 1.03, 8, noise=0.01).count("slower") == 8
    assert verdicts(1.03, 8, noise=0.01).count("faster") == 8


def test_a_drift_of_the_clocks_does_not_touch_the_ratio() -> None:
    ratio = ratio_of(measured(ScriptedGpu(50.0, 60.0), 2), 0, 1)
    assert ratio.ratio == pytest.approx(1.2, rel=0.003)
    assert ratio.ci95[0] < ratio.ratio < ratio.ci95[1]
    assert 0.0 < ratio.noise_pct < 2.0


def test_rounds_end_when_the_interval_is_narrow_and_not_before() -> None:
    quiet, loud = ScriptedGpu(50.0, 50.0, noise=0.0005), ScriptedGpu(50.0, 50.0, noise=0.1)
    measured(quiet, 2)
    measured(loud, 2)
    assert quiet.timer_made.rounds < 20
    assert loud.timer_made.rounds >= MOST_ROUNDS


def test_a_hopeless_contender_is_given_up_early() -> None:
    slow = ScriptedGpu(100.0, 50.0, noise=0.1)
    measured(slow, 2, hopeless=1.3)
    assert slow.timer_made.rounds < 12


def test_the_time_is_a_median_with_its_spread_and_the_number_of_runs() -> None:
    gpu = ScriptedGpu(50.0, noise=0.02)
    spent = time_of(measured(gpu, 1), 0)
    assert spent.median_us == pytest.approx(50.0, rel=0.05)
    assert spent.p10_us is not None
    assert spent.p90_us is not None
    assert spent.p10_us < spent.median_us < spent.p90_us
    assert spent.source == "measured"
    assert spent.runs == 2 * (gpu.timer_made.rounds - 2)  # two rounds warm up


def test_inputs_rotate_and_what_the_kernel_has_to_write_starts_poisoned() -> None:
    gpu = ScriptedGpu(50.0)
    measured(gpu, 1)
    sets = gpu.subjects[0].contents
    assert [float(each["x"][0]) for each in sets] == [1.0, 2.0, 3.0]
    assert all(np.isnan(each["y"]).all() for each in sets)
    assert set(contents_of(PLAN, {"x": np.ones(N, np.float32)})) == {"x", "y"}
