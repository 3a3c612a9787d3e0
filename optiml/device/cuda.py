"""A GPU: a disposable child that holds the CUDA context, and the GPUs that this machine has.

A kernel that breaks the context, hangs or takes the child down costs one restart; the next kernel finds a fresh one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from optiml.device.device import (
    DEFAULT_L1_SHARE_BYTES,
    Array,
    LaunchReport,
    Repeated,
    RunResult,
    Samples,
    Scrutiny,
    TimedOutputs,
    TimedSubject,
)
from optiml.device.lease import Lease, Priority
from optiml.device.nvml import Clocks, Nvml
from optiml.device.plan import Plan
from optiml.device.wire import INDEX_VARIABLE, wire_arrays, wire_steps
from optiml.errors import Fault, KernelFault, OptimlError, SetupError, WorkerDied, WorkerTimeout
from optiml.problems.data import raw, storage_dtype
from optiml.process import Worker
from optiml.records import Build, DeviceInfo
from optiml.sandbox import Policy
from optiml.toolchain.tools import library_folders

LOG = logging.getLogger(__name__)
MODULE = "optiml.device.cuda_worker"
PASSED_ON = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
FRAME_BYTES = 8 << 30
START_TIMEOUT_S = 60.0
LOOK_TIMEOUT_S = 30.0
CALL_SLACK_S = 1.0  # of a call beyond the kernel's own time
TRANSFER_BYTES_PER_S = 1e9  # at least; contents are copied through a socket
DEFAULT_PATIENCE_S = 60.0
INSTALL = "pip install 'optiml[gpu]' (pycuda builds from source and needs the CUDA toolkit)"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as its driver describes it. Names follow the driver's attributes."""

    index: int  # among those that CUDA_VISIBLE_DEVICES leaves
    name: str
    arch: str
    pci_bus_id: str
    memory_bytes: int
    driver_cuda: str  # highest CUDA version that the driver supports
    sms: int
    l2_bytes: int
    clock_khz: int
    max_threads_per_block: int
    max_shared_bytes_per_block: int
    max_grid: tuple[int, int, int]
    max_block: tuple[int, int, int]
    max_threads_per_sm: int
    registers_per_sm: int
    shared_bytes_per_sm: int

    @property
    def info(self) -> DeviceInfo:
        """As the rest of the library sees a device."""
        return DeviceInfo(
            name=self.name,
            kind="cuda",
            arch=self.arch,
            model=model_of(self.name),
            engine="cuda",
            max_threads_per_block=self.max_threads_per_block,
            max_shared_bytes_per_block=self.max_shared_bytes_per_block,
            max_grid=self.max_grid,
            max_block=self.max_block,
        )


def model_of(name: str) -> str:
    """The key of the hardware table for a GPU's name, "other" where there is none."""
    match = re.search(r"\b(A100|H100|H200)\b", name, re.IGNORECASE)
    return match.group(1).lower() if match else "other"


def has_gpu_nodes() -> bool:
    """Whether the system shows an NVIDIA GPU at all; costs nothing."""
    return any(re.fullmatch(r"nvidia\d+|nvhost-gpu|dxg", path.name) for path in Path("/dev").glob("*"))


def find_gpus() -> tuple[Gpu, ...]:
    """The GPUs that CUDA shows to this process, in its order; starts a child for about a second.

    Raises:
        SetupError: code `no_device`: pycuda or a usable driver is missing.
    """
    if find_spec("pycuda") is None:
        raise SetupError(f"running on a GPU needs pycuda: {INSTALL}", code="no_device")
    with Worker(MODULE, policy=Policy(gpu=True), environment=gpu_environment()) as worker:
        try:
            reply, _ = worker.call({"op": "devices"}, timeout_s=LOOK_TIMEOUT_S)
        except (WorkerDied, WorkerTimeout) as error:
            LOG.warning("looking for GPUs failed: %s; %s", error, getattr(error, "stderr_tail", "")[-500:])
            raise SetupError(f"the CUDA driver cannot be used: {error}", code="no_device") from error
    return tuple(_gpu(item) for item in reply["devices"])


def _gpu(item: Mapping[str, Any]) -> Gpu:
    grid, block = ((int(x), int(y), int(z)) for x, y, z in (item["max_grid"], item["max_block"]))
    return Gpu(**{**item, "max_grid": grid, "max_block": block})


def gpu_environment() -> dict[str, str]:
    """What a process on a GPU has to be told: which GPUs it may see, and where the libraries of CUDA lie."""
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    own = os.environ.get("LD_LIBRARY_PATH")
    return {**passed, "LD_LIBRARY_PATH": os.pathsep.join([*([own] if own else []), *library_folders()])}


class CudaDevice:
    """Runs and times builds on one GPU through a warm child.

    Args:
        priority: of its lease: work for a person goes before a search.
        patience_s: how long a call waits for others that use the GPU.
    """

    def __init__(
        self,
        gpu: Gpu,
        *,
        priority: Priority = "interactive",
        patience_s: float = DEFAULT_PATIENCE_S,
        worker: Worker | None = None,
        lease: Lease | None = None,
    ) -> None:
        self.gpu = gpu
        self.info = gpu.info
        self.nvml = Nvml(gpu.pci_bus_id)
        self.lease = lease or Lease(gpu.pci_bus_id)
        self._priority = priority
        self._patience_s = patience_s
        self._worker = worker or Worker(
            MODULE,
            policy=Policy(gpu=True),
            environment={**gpu_environment(), INDEX_VARIABLE: str(gpu.index)},
            start_timeout_s=START_TIMEOUT_S,
            frame_limit_bytes=FRAME_BYTES,
        )
        self._lock = threading.Lock()

    # --- running -----------------------------------------------------------------------------------------------------
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
        """See `Device.run`. A GPU counts nothing here and runs every block, so those arguments change nothing."""
        del count, sample_blocks, l1_share_bytes, scrutiny
        names = list(plan.arrays)
        header = {
            "op": "run",
            "arrays": wire_arrays(plan),
            "steps": wire_steps(plan, build.ptx),
            "runs": len(contents),
            "outputs": outputs,
        }
        blobs = [memoryview(build.cubin), *(raw(filled[name]) for filled in contents for name in names)]
        moved = sum(len(blob) for blob in blobs) + len(contents) * sum(item.nbytes for item in plan.arrays.values())
        with self._lock, self.lease.held(alone=False, priority=self._priority, patience_s=self._patience_s):
            reply, answers = self._call(header, blobs, timeout_s=timeout_s, moved_bytes=moved)
        runs = []
        for index in range(len(contents) if outputs else 0):
            part = answers[index * len(names) : (index + 1) * len(names)]
            runs.append({name: _array(plan, name, blob) for name, blob in zip(names, part, strict=True)})
        return RunResult(runs=tuple(runs), launches=tuple(_report(item) for item in reply["launches"]))

    def _call(
        self, header: dict[str, Any], blobs: Sequence[memoryview] = (), *, timeout_s: float, moved_bytes: int = 0
    ) -> tuple[dict[str, Any], list[memoryview]]:
        """One call of the child; whatever goes wrong in it while a kernel runs is that kernel's doing."""
        try:
            return self._worker.call(
                header, blobs, timeout_s=timeout_s + CALL_SLACK_S + moved_bytes / TRANSFER_BYTES_PER_S
            )
        except WorkerTimeout as error:
            raise KernelFault(
                Fault(kind="timed_out", detail=f"the kernel did not end within {timeout_s:g} s")
            ) from error
        except WorkerDied as error:
            if error.cancelled or error.exit_code is not None:  # it left by itself: no fault of the kernel's
                raise
            detail = f"the process that ran it was ended by signal {error.signal}"
            raise KernelFault(Fault(kind="illegal", detail=detail)) from error
        except KernelFault:
            self._worker.close()  # the context may be broken for good, and nobody can tell
            raise

    @contextlib.contextmanager
    def used(self, *, alone: bool) -> Iterator[None]:
        """Hold the GPU for another program: a sanitizer, or a profiler that wants to be alone."""
        with self.lease.held(alone=alone, priority=self._priority, patience_s=self._patience_s):
            yield

    # --- timing ------------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def timer(self, subjects: Sequence[TimedSubject], *, timeout_s: float) -> Iterator[CudaTimer]:
        """Hold the GPU alone, with `subjects` loaded and ready to be timed in turns."""
        blobs: list[memoryview] = []
        known: dict[int, int] = {}

        def sent(item: Array) -> int:
            if id(item) not in known:
                known[id(item)] = len(blobs)
                blobs.append(raw(item))
            return known[id(item)]

        described = []
        for subject in subjects:
            arrays = [
                {**array, "blobs": [sent(contents[array["name"]]) for contents in subject.contents]}
                for array in wire_arrays(subject.plan)
            ]
            blobs.append(memoryview(subject.build.cubin))
            steps = wire_steps(subject.plan, subject.build.ptx)
            described.append({"cubin": len(blobs) - 1, "arrays": arrays, "steps": steps, "graph": len(steps) > 1})
        moved = sum(len(blob) for blob in blobs)
        with self._lock, self.lease.held(alone=True, priority=self._priority, patience_s=self._patience_s):
            self._call({"op": "open_timer", "subjects": described}, blobs, timeout_s=timeout_s, moved_bytes=moved)
            try:
                yield CudaTimer(self, subjects, timeout_s)
            finally:
                if self._worker.pid is not None:
                    with contextlib.suppress(OptimlError):  # the error that led here is the one to tell
                        self._call({"op": "close_timer"}, timeout_s=timeout_s)

    def driver_version(self) -> str | None:
        """Of the GPU's driver, None where it does not tell."""
        return self.nvml.driver_version()

    def clocks(self) -> Clocks:
        """Clocks and what holds them down, as NVML reads them now."""
        return self.nvml.clocks()

    def close(self) -> None:
        self._worker.close()


class CudaTimer:
    """An open timer of a `CudaDevice`; see `Timer` in `optiml.device.device`."""

    def __init__(self, device: CudaDevice, subjects: Sequence[TimedSubject], timeout_s: float) -> None:
        self._device = device
        self._subjects = tuple(subjects)
        self._timeout_s = timeout_s

    def sample(self, rounds: int, *, flush: bool = True) -> Samples:
        before = self._device.clocks()
        _, blobs = self._call({"op": "sample", "rounds": rounds, "flush": flush})
        times = np.frombuffer(blobs[0], dtype=np.float32).reshape(rounds, len(self._subjects), 2)
        return Samples(times_us=times, before=before, after=self._device.clocks())

    def outputs(self, subject: int) -> TimedOutputs:
        reply, blobs = self._call({"op": "timed_outputs", "subject": subject})
        plan = self._subjects[subject].plan
        arrays = {name: _array(plan, name, blob) for name, blob in zip(reply["names"], blobs, strict=True)}
        return TimedOutputs(arrays=arrays, contents=reply["set"])

    def repeat(self, subject: int, *, seconds: float) -> Repeated:
        nvml = self._device.nvml
        started, before = time.monotonic(), nvml.energy_mj()
        reply, _ = self._call({"op": "repeat", "subject": subject, "seconds": seconds})
        after, wall_s = nvml.energy_mj(), time.monotonic() - started
        energy = None if before is None or after is None else float(after - before)
        return Repeated(count=reply["count"], elapsed_s=reply["elapsed_s"], energy_mj=energy, wall_s=wall_s)

    def _call(self, header: dict[str, Any]) -> tuple[dict[str, Any], list[memoryview]]:
        return self._device._call(header, timeout_s=self._timeout_s)


def _array(plan: Plan, name: str, blob: memoryview) -> Array:
    planned = plan.arrays[name]
    return np.frombuffer(blob, dtype=storage_dtype(planned.dtype)).reshape(planned.shape)


def _report(item: Mapping[str, Any]) -> LaunchReport:
    grid, block = ((int(x), int(y), int(z)) for x, y, z in (item["grid"], item["block"]))
    return LaunchReport(
        symbol=item["symbol"],
        grid=grid,
        block=block,
        shared_bytes=item["shared_bytes"],
        blocks_total=item["blocks_total"],
        blocks_run=item["blocks_run"],
        counters=None,
    )
