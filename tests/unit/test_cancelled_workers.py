"""What a child did not live to say, because we ended it, is never held against the kernel."""

from typing import Any

import pytest

from optiml.device.emulated import EmulatedDevice
from optiml.errors import WorkerDied
from optiml.process import Worker
from optiml.workbench import Workbench

SOURCE = """extern "C" __global__ void relu(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = fmaxf(x[i], 0.0f); // cancelled
}
"""


def cancelled(*_: Any, **__: Any) -> None:
    raise WorkerDied("was cancelled", cancelled=True)


def test_a_cancelled_compilation_is_no_verdict(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "call", cancelled)
    with pytest.raises(WorkerDied):
        bench.verify(SOURCE + "// not compiled before\n", "relu")


def test_a_cancelled_run_is_no_verdict(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmulatedDevice, "run", cancelled)
    with pytest.raises(WorkerDied):
        bench.verify(SOURCE, "relu")


def test_the_same_kernel_is_accepted_once_it_may_run(bench: Workbench) -> None:
    assert bench.verify(SOURCE, "relu").status == "accepted"
