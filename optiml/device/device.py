"""The device protocol, and the one table of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from optiml.device.nvml import Clocks
from optiml.device.plan import Plan
from optiml.ptx.counters import Counters
from optiml.records import Build, DeviceInfo

Array = NDArray[Any]
DEFAULT_L1_SHARE_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class LaunchReport:
    """What one launch did. Counters are totals over the blocks run, None unless asked for."""

    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    blocks_total: int
    blocks_run: int
    counters: Counters | None
    printed: str = ""
    engine: str = ""  # what ran it: "native" or "numpy" on the embedded device
    threads: int = 1  # threads of this computer that shared the work there


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Raw contents of every array after each run; no verdict."""

    runs: tuple[Mapping[str, Array], ...]  # name -> array in storage dtype and shape
    launches: tuple[LaunchReport, ...]  # of the last run


@dataclass(frozen=True, kw_only=True)
class Scrutiny:
    """What the embedded device looks for, and what it does otherwise than usual, while it carries out a plan.

    Attributes:
        checks: "race" and "uninitialised", which only the native engine can look for (`LaunchReport.engine`).
        runs: how many of the first runs are checked; None for all.
        unwritten: byte that shared and local memory hold until something is written.
        reverse: run the blocks of each launch from last to first.
        shift_bytes: start every array so far into its memory.
    """

    checks: frozenset[str] = frozenset()
    runs: int | None = None
    unwritten: int = 0xFF
    reverse: bool = False
    shift_bytes: int = 0


class Device(Protocol):
    """A GPU, the PTX engine, or a script in a test."""

    info: DeviceInfo

    def run(
        self,
        build: Build,
        plan: Plan,
        contents: tuple[Mapping[str, Array], ...],
        *,
        timeout_s: float,
        count: bool = False,
        sample_blocks: int | None = None,
        l1_share_bytes: int = DEFAULT_L1_SHARE_BYTES,
        outputs: bool = True,
        scrutiny: Scrutiny | None = None,
    ) -> RunResult:
        """Load the build once and carry out the plan once for each set of contents.

        Every array of the plan keeps its address between the runs and is filled from `contents[i]` before run i;
        module-scope variables of the kernel keep their values, as on a GPU.

        Args:
            contents: for each run, every array of the plan in storage dtype; one that is shorter than planned is
                repeated to fill its place.
            timeout_s: for the whole call.
            count: fill `LaunchReport.counters` for the last run.
            sample_blocks: carry out only about this many blocks of each launch (then outputs mean nothing).
            l1_share_bytes: L1 capacity that one block may count on, for the hit model of `count`.
            outputs: return the arrays; False saves the transfer.
            scrutiny: for the embedded device; others run as usual.

        Raises:
            KernelFault: the kernel broke a rule of the machine, or outlived `timeout_s` (kind `timed_out`).
            Unsupported: the emulator lacks an opcode; nothing is known of the kernel.
            WorkerDied: the child ended without an answer; nothing is known of the kernel.
        """

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class TimedSubject:
    """A plan to be timed, with the sets of contents that it is given in turn; each set names every array.

    Arrays that are the same object in several subjects are sent and kept once.
    """

    build: Build
    plan: Plan
    contents: tuple[Mapping[str, Array], ...]


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Raw times of float32 `(rounds, subjects, 2)` in microseconds.

    In a round every subject runs twice, the second time in reverse order (A B B A), so that a drift of the clocks
    weighs on all alike.
    """

    times_us: Array
    before: Clocks
    after: Clocks


@dataclass(frozen=True, kw_only=True)
class TimedOutputs:
    """What the arrays held after the last timed run, and the index of the contents that it was given."""

    arrays: Mapping[str, Array]
    contents: int


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """One plan launched over and over: how often, in which time on the device, with how much energy of the whole GPU.

    `wall_s` is the time that the energy belongs to; None where the driver does not tell the energy.
    """

    count: int
    elapsed_s: float
    energy_mj: float | None
    wall_s: float


class Timer(Protocol):
    """Subjects loaded on a device that is held alone."""

    def sample(self, rounds: int, *, flush: bool = True) -> Samples:
        """Time every subject twice in each round; before each run its arrays are restored, and L2 is overwritten."""

    def outputs(self, subject: int) -> TimedOutputs:
        """What the last timed run produced, to be checked again; it is the run of subject 0."""

    def repeat(self, subject: int, *, seconds: float) -> Repeated:
        """Launch one subject without a pause and without restoring anything, for at least `seconds`."""


@runtime_checkable
class TimedDevice(Device, Protocol):
    """A device whose time is real."""

    def driver_version(self) -> str | None:
        """Of the GPU's driver, None where it does not tell."""

    def timer(self, subjects: Sequence[TimedSubject], *, timeout_s: float) -> AbstractContextManager[Timer]:
        """Load the subjects and hold the device alone until the block ends.

        Args:
            timeout_s: for each call of the timer.

        Raises:
            Busy: others use the device.
            KernelFault: a subject broke a rule of the machine, or outlived `timeout_s`.
        """
