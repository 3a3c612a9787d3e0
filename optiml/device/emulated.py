"""The embedded device: the PTX engine in a disposable child, standing for one of three GPUs."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from optiml.codec import restore
from optiml.device.cores import cores_taken
from optiml.device.device import DEFAULT_L1_SHARE_BYTES, Array, LaunchReport, RunResult, Scrutiny
from optiml.device.plan import Plan
from optiml.device.wire import wire_arrays, wire_steps
from optiml.errors import Busy, Fault, InvalidInput, KernelFault, WorkerDied, WorkerTimeout
from optiml.problems.data import raw, storage_dtype
from optiml.process import Worker
from optiml.ptx import engine_name, usable_threads
from optiml.ptx.counters import Counters
from optiml.records import Build, DeviceInfo
from optiml.sandbox import Policy

# Launch limits from the CUDA programming guide, table "technical specifications per compute capability".
MODELS: Mapping[str, DeviceInfo] = {
    model: DeviceInfo(
        name=f"NVIDIA {model.upper()} (emulated)",
        kind="emulator",
        arch=arch,
        model=model,
        engine=engine_name(),
        max_shared_bytes_per_block=shared,
    )
    for model, arch, shared in (
        ("a100", "sm_80", 163 * 1024),
        ("h100", "sm_90", 227 * 1024),
        ("h200", "sm_90", 227 * 1024),
    )
}
LOG = logging.getLogger(__name__)
DEFAULT_MODEL = "a100"
MEMORY_BYTES = 12 << 30  # address space of the child
PATIENCE = 4.0  # times the time for a kernel that the machine kept from running
SLACK_S = 2.0  # for the child to notice its own deadline


def emulated_info(name: str) -> DeviceInfo:
    """The device that `emulator` or `emulator:h200` names."""
    match = re.fullmatch(r"emulator(?::(\w+))?", name)
    model = (match.group(1) or DEFAULT_MODEL) if match else ""
    if model not in MODELS:
        raise InvalidInput(f"{name[:60]!r} is no emulated device; choose emulator:{', emulator:'.join(MODELS)}")
    return MODELS[model]


class EmulatedDevice:
    """Runs builds in a warm child; a hang or a crash costs that child only."""

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self._worker = Worker(
            "optiml.device.worker", policy=Policy(address_space_bytes=MEMORY_BYTES), frame_limit_bytes=4 << 30
        )
        self._lock = threading.Lock()

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
        names = list(plan.arrays)
        closely = scrutiny or Scrutiny()
        header = {
            "op": "run",
            "ptx": build.ptx,
            "arrays": wire_arrays(plan),
            "steps": wire_steps(plan),
            "runs": len(contents),
            "count": count,
            "sample_blocks": sample_blocks,
            "outputs": outputs,
            "timeout_s": timeout_s,
            "l1_share_bytes": l1_share_bytes,
            "checks": sorted(closely.checks),
            "checked_runs": len(contents) if closely.runs is None else closely.runs,
            "unwritten": closely.unwritten,
            "reverse": closely.reverse,
            "shift_bytes": closely.shift_bytes,
        }
        blobs = [raw(filled[name]) for filled in contents for name in names]
        with self._lock, cores_taken(usable_threads()) as threads:
            try:
                reply, answers = self._patiently({**header, "threads": threads}, blobs, timeout_s)
            except WorkerTimeout as error:
                raise KernelFault(
                    Fault(kind="timed_out", detail=f"the kernel did not end within {timeout_s:g} s")
                ) from error
        runs = []
        for index in range(len(contents) if outputs else 0):
            arrays = {}
            for position, name in enumerate(names):
                planned = plan.arrays[name]
                data = np.frombuffer(answers[index * len(names) + position], dtype=storage_dtype(planned.dtype))
                arrays[name] = data.reshape(planned.shape)
            runs.append(arrays)
        return RunResult(runs=tuple(runs), launches=tuple(_report(item) for item in reply["launches"]))

    def _patiently(
        self, header: dict[str, Any], blobs: list[memoryview], timeout_s: float
    ) -> tuple[dict[str, Any], list[memoryview]]:
        """One call; on a machine that has other work to do a second one, with PATIENCE times the time."""
        try:
            return self._call({**header, "again": False}, blobs, timeout_s + SLACK_S)
        except Busy as error:
            LOG.warning("%s: it gets %g times the time", error, PATIENCE)
        longer_s = PATIENCE * timeout_s
        return self._call({**header, "again": True, "timeout_s": longer_s}, blobs, longer_s + SLACK_S)

    def _call(
        self, header: dict[str, Any], blobs: list[memoryview], timeout_s: float
    ) -> tuple[dict[str, Any], list[memoryview]]:
        """One call; a child that died gets one successor, since its death need not be this kernel's doing."""
        try:
            return self._worker.call(header, blobs, timeout_s=timeout_s)
        except WorkerDied as error:
            if error.cancelled:
                raise
            LOG.warning("the device's process ended (%s); trying once more: %s", error, error.stderr_tail[-500:])
            return self._worker.call(header, blobs, timeout_s=timeout_s)

    def close(self) -> None:
        self._worker.close()


def _report(item: Mapping[str, Any]) -> LaunchReport:
    counters = item["counters"]
    if counters is not None:
        executions = {}
        for key, count in counters["block_executions"].items():
            function, _, index = key.rpartition("#")
            executions[function, int(index)] = count
        counters = restore(Counters, {**counters, "block_executions": executions})
    return LaunchReport(
        symbol=item["symbol"],
        grid=_triple(item["grid"]),
        block=_triple(item["block"]),
        shared_bytes=item["shared_bytes"],
        blocks_total=item["blocks_total"],
        blocks_run=item["blocks_run"],
        counters=counters,
        printed=item["printed"],
        engine=item["engine"],
        threads=item["threads"],
    )


def _triple(value: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = value
    return x, y, z
