"""The child of the embedded device, called in this process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from optiml.device import worker
from optiml.device.worker import handle
from optiml.errors import Busy, InvalidInput, KernelFault

EMPTY_MODULE = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k()\n{\n\tret;\n}\n"


ENDLESS_MODULE = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k()\n{\n$L:\n\tbra $L;\n}\n"


SYMBOL_MODULE = (
    ".version 8.0\n.target sm_80\n.address_size 64\n.visible .global .align 4 .b8 table[8];\n"
    ".visible .entry k(.param .u64 p)\n{\n\t.reg .b64 %rd<3>;\n\t.reg .b32 %r<2>;\n\tmov.u64 %rd1, table;\n"
    "\tld.param.u64 %rd2, [p];\n\tld.global.u32 %r1, [%rd1+4];\n\tst.global.u32 [%rd2], %r1;\n\tret;\n}\n"
)


def header(*steps: dict[str, Any], ptx: str = EMPTY_MODULE, nbytes: int = 10, runs: int = 1) -> dict[str, Any]:
    return {
        "ptx": ptx, "arrays": [{"name": "y", "nbytes": nbytes, "undefined": True}], "steps": list(steps),
        "runs": runs, "count": False, "sample_blocks": None, "l1_share_bytes": 1 << 16, "outputs": True,
        "timeout_s": 10.0, "checks": [], "checked_runs": 0, "unwritten": 0xFF, "reverse": False, "shift_bytes": 0,
        "threads": 1, "again": False,
    }  # fmt: skip


def test_short_contents_fill_the_array_in_every_run_zeros_too() -> None:
    contents = [np.array([1, 2, 3], np.uint8), np.zeros(1, np.uint8), np.arange(10, dtype=np.uint8)]
    _, answers = handle(header(runs=3), [item.data for item in contents])
    assert [list(bytes(item)) for item in answers] == [[1, 2, 3] * 3 + [1], [0] * 10, list(range(10))]


def test_the_steps_of_a_plan_run_in_order_and_reach_arrays_and_variables() -> None:
    y, table = {"array": "y", "offset": 0}, {"symbol": "table", "offset": 4}
    ones = {"value": "01010101", "pointers": []}
    steps = (
        {"kind": "memset", "target": y, "value": 7, "nbytes": 12},
        {"kind": "upload", "target": table, "content": ones},
        {"kind": "launch", "symbol": "k", "grid": [1, 1, 1], "block": [1, 1, 1], "shared_bytes": 0, "args": [
            {"array": "y", "offset": 4}]},
        {"kind": "copy", "source": {"array": "y", "offset": 4}, "target": {"array": "y", "offset": 8}, "nbytes": 2},
    )  # fmt: skip
    _, (answer,) = handle(header(*steps, ptx=SYMBOL_MODULE, nbytes=12), [np.zeros(12, np.uint8).data])
    assert list(bytes(answer)) == [7] * 4 + [1] * 4 + [1, 1, 7, 7]


def test_an_upload_may_hold_addresses() -> None:
    content = {"value": "00" * 16, "pointers": [[8, {"array": "y", "offset": 3}]]}
    step = {"kind": "upload", "target": {"array": "y", "offset": 0}, "content": content}
    _, (answer,) = handle(header(step, nbytes=16), [np.zeros(16, np.uint8).data])
    low, high = np.frombuffer(answer, np.uint64)
    assert low == 0
    assert int(high) % 8 == 3


def test_a_step_that_leaves_its_array_is_refused() -> None:
    step = {"kind": "memset", "target": {"array": "y", "offset": 8}, "value": 0, "nbytes": 4}
    with pytest.raises(InvalidInput, match="leave its 10 bytes"):
        handle(header(step), [np.zeros(10, np.uint8).data])


ENDLESS = {"kind": "launch", "symbol": "k", "grid": [1, 1, 1], "block": [1, 1, 1], "shared_bytes": 0, "args": []}


@pytest.mark.parametrize(
    ("used_s", "load", "again", "error"),
    [
        (0.0, 0.0, False, Busy),
        (0.0, 0.0, True, KernelFault),
        (0.06, 0.0, False, KernelFault),
        (0.06, 1e6, False, Busy),  # one of the two cores was elsewhere
        (9.0, 1e6, False, KernelFault),
    ],
)
def test_a_kernel_that_got_too_little_processor_time_has_a_second_chance(
    used_s: float, load: float, again: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = iter((100.0, 100.0 + used_s))
    monkeypatch.setattr(worker.time, "process_time", lambda: next(moments))
    monkeypatch.setattr(worker.os, "getloadavg", lambda: (load, load, load))
    short = {**header(ENDLESS, ptx=ENDLESS_MODULE), "timeout_s": 0.06, "threads": 2, "again": again}
    with pytest.raises(error):
        handle(short, [np.zeros(10, np.uint8).data])
