"""The child of the embedded device, called in this process."""

from __future__ import annotations

import numpy as np

from optiml.device.worker import handle

EMPTY_MODULE = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k()\n{\n\tret;\n}\n"


def test_short_contents_fill_the_array_in_every_run_zeros_too() -> None:
    header = {
        "ptx": EMPTY_MODULE, "arrays": [{"name": "y", "nbytes": 10, "undefined": True}], "launches": [], "runs": 3, "count": False,
        "sample_blocks": None, "l1_share_bytes": 1 << 16, "outputs": True, "timeout_s": 10.0, "checks": [],
        "checked_runs": 0, "unwritten": 0xFF, "reverse": False, "shift_bytes": 0,
    }  # fmt: skip
    contents = [np.array([1, 2, 3], np.uint8), np.zeros(1, np.uint8), np.arange(10, dtype=np.uint8)]
    _, answers = handle(header, [item.data for item in contents])
    assert [list(bytes(item)) for item in answers] == [[1, 2, 3] * 3 + [1], [0] * 10, list(range(10))]
