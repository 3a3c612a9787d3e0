"""The parent's side of a GPU, over a scripted child."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cuda_context import BUILD, PLAN, N

from optiml.device.cuda import CudaDevice, Gpu, model_of
from optiml.device.device import TimedDevice, TimedSubject, Timer
from optiml.device.lease import Lease
from optiml.device.plan import Plan
from optiml.errors import Busy, Fault, KernelFault, WorkerDied, WorkerTimeout

GPU = Gpu(
    index=0, name="NVIDIA H200", arch="sm_90", pci_bus_id="0000:07:00.0", memory_bytes=141 << 30, driver_cuda="13.0",
    sms=132, l2_bytes=60 << 20, clock_khz=1_980_000, max_threads_per_block=1024,
    max_shared_bytes_per_block=227 << 10, max_grid=(2**31 - 1, 65535, 65535), max_block=(1024, 1024, 64),
    max_threads_per_sm=2048, registers_per_sm=65536, shared_bytes_per_sm=228 << 10,
)  # fmt: skip
Reply = tuple[dict[str, Any], list[memoryview]]


class ScriptedWorker:
    """Answers each call with the next step of a script: a reply, or an error to raise."""

    def __init__(self, *script: Reply | Exception | Callable[[dict[str, Any], list[Any]], Reply]) -> None:
        self._script = list(script)
        self.asked: list[dict[str, Any]] = []
        self.blobs: list[list[Any]] = []
        self.closed = 0
        self.pid: int | None = 1

    def call(self, header: dict[str, Any], blobs: Iterable[Any] = (), *, timeout_s: float) -> Reply:
        self.asked.append(header)
        self.blobs.append(list(blobs))
        step = self._script.pop(0)
        if isinstance(step, Exception):
            raise step
        return step if isinstance(step, tuple) else step(header, self.blobs[-1])

    def close(self) -> None:
        self.closed += 1
        self.pid = None


def device(folder: Path, worker: ScriptedWorker, **options: Any) -> CudaDevice:
    return CudaDevice(GPU, worker=worker, lease=Lease(GPU.pci_bus_id, folder=folder), **options)  # type: ignore[arg-type]


def run(made: CudaDevice) -> Any:
    contents = {"x": np.arange(N, dtype=np.float32), "y": np.zeros(N, dtype=np.float32)}
    return made.run(BUILD, PLAN, (contents,), timeout_s=1.0)


def echo(header: dict[str, Any], blobs: list[Any]) -> Reply:
    reports = [{**launch, "blocks_total": 1, "blocks_run": 1} for launch in header["steps"]]
    return {"launches": reports}, [memoryview(bytes(blob)) for blob in blobs[1:]]


def test_a_run_answers_arrays_in_their_dtype_and_shape(tmp_path: Path) -> None:
    result = run(device(tmp_path, ScriptedWorker(echo)))
    assert np.array_equal(result.runs[0]["x"], np.arange(N, dtype=np.float32))
    assert result.launches[0].symbol == "double"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (WorkerTimeout("late"), "timed_out"),
        (WorkerDied("gone", signal=11), "illegal"),
        (KernelFault(Fault(kind="trap")), "trap"),
    ],
)
def test_a_kernel_that_hangs_crashes_or_faults_is_blamed_and_the_next_one_runs(
    tmp_path: Path, error: Exception, kind: str
) -> None:
    worker = ScriptedWorker(error, echo)
    made = device(tmp_path, worker)
    with pytest.raises(KernelFault) as caught:
        run(made)
    assert caught.value.fault.kind == kind
    assert run(made).launches[0].blocks_run == 1


def test_after_a_fault_the_child_is_thrown_away(tmp_path: Path) -> None:
    worker = ScriptedWorker(KernelFault(Fault(kind="trap")))
    with pytest.raises(KernelFault):
        run(device(tmp_path, worker))
    assert worker.closed == 1


def test_a_child_that_leaves_by_itself_says_nothing_of_the_kernel(tmp_path: Path) -> None:
    with pytest.raises(WorkerDied):
        run(device(tmp_path, ScriptedWorker(WorkerDied("left", exit_code=1))))


def subject() -> TimedSubject:
    sets = tuple({"x": np.full(N, value, np.float32), "y": np.zeros(N, np.float32)} for value in (1.0, 2.0))
    return TimedSubject(build=BUILD, plan=PLAN, contents=sets)


def test_a_timer_holds_the_gpu_alone_and_sends_shared_contents_once(tmp_path: Path) -> None:
    times = np.ones((3, 2, 2), dtype=np.float32)
    worker = ScriptedWorker(({}, []), ({}, [times.reshape(-1).view(np.uint8).data]), ({}, []))
    made = device(tmp_path, worker)
    assert isinstance(made, TimedDevice)
    one = subject()
    with made.timer([one, TimedSubject(build=BUILD, plan=PLAN, contents=one.contents)], timeout_s=1.0) as timer:
        held: Timer = timer
        assert held.sample(3).times_us.shape == (3, 2, 2)
        other = device(tmp_path, ScriptedWorker(echo), patience_s=0.0)
        with pytest.raises(Busy):
            run(other)
    assert [call["op"] for call in worker.asked] == ["open_timer", "sample", "close_timer"]
    assert len(worker.blobs[0]) == 4 + 2  # two sets of two arrays, two cubins
    run(device(tmp_path, ScriptedWorker(echo), patience_s=0.0))


def test_a_fault_inside_a_timer_releases_the_gpu(tmp_path: Path) -> None:
    worker = ScriptedWorker(({}, []), KernelFault(Fault(kind="trap")))
    made = device(tmp_path, worker)
    with pytest.raises(KernelFault), made.timer([subject()], timeout_s=1.0) as timer:
        timer.sample(1)
    run(device(tmp_path, ScriptedWorker(echo), patience_s=0.0))


def test_several_launches_are_replayed_as_one_graph(tmp_path: Path) -> None:
    worker = ScriptedWorker(({}, []), ({}, []))
    twice = TimedSubject(build=BUILD, plan=Plan(steps=PLAN.steps * 2, arrays=PLAN.arrays), contents=subject().contents)
    with device(tmp_path, worker).timer([subject(), twice], timeout_s=1.0):
        pass
    assert [item["graph"] for item in worker.asked[0]["subjects"]] == [False, True]


def test_the_hardware_table_is_chosen_by_name() -> None:
    assert [model_of(name) for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA H200", "NVIDIA L4")] == [
        "a100",
        "h200",
        "other",
    ]
