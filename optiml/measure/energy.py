"""Energy of one run, from the energy counter of the whole GPU over many runs in a row."""

from __future__ import annotations

from optiml.device.device import Repeated, TimedDevice, TimedSubject
from optiml.measure.timing import CALL_TIMEOUT_S, BenchInputs, Contender, contents_of

SECONDS = 0.6
LEAST_S = 0.4  # the counter moves in steps of up to a tenth of a second
LEAST_BUSY = 0.8  # of the time that the energy belongs to


def energy_per_run_mj(device: TimedDevice, subject: Contender, inputs: BenchInputs) -> float | None:
    """Millijoules of one run, weighted over the bench entries; None where there is no figure to be believed.

    It is the energy of the whole GPU, idle power included, with a warm L2 and whatever the inputs became.
    """
    total = 0.0
    for index, workload in enumerate(inputs.bench):
        plan = subject.plans[index]
        timed = TimedSubject(build=subject.build, plan=plan, contents=(contents_of(plan, inputs.sets[index][0]),))
        with device.timer([timed], timeout_s=CALL_TIMEOUT_S) as timer:
            one = per_run_mj(timer.repeat(0, seconds=SECONDS))
        if one is None:
            return None
        total += workload.weight * one
    return total


def per_run_mj(repeated: Repeated) -> float | None:
    """Millijoules of one of many runs, None where they took too short a time for the counter."""
    if repeated.energy_mj is None or not repeated.energy_mj or not repeated.count:
        return None
    if repeated.elapsed_s < LEAST_S or repeated.elapsed_s < LEAST_BUSY * repeated.wall_s:
        return None
    return repeated.energy_mj / repeated.count
