"""The arithmetic of the tools that compare the embedded device with a GPU and fit the time model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TOOLS = Path(__file__).parent.parent.parent / "tools"
sys.path.insert(0, str(TOOLS))

import calibrate  # noqa: E402
import emulator_vs_gpu  # noqa: E402
import gpu_emulator  # noqa: E402

from optiml.measure.hardware import H200  # noqa: E402
from optiml.measure.model import TERMS  # noqa: E402

LOADS, STORES, _ = emulator_vs_gpu.REQUESTS
CONFLICTS, WAVEFRONTS = next(iter(emulator_vs_gpu.CONFLICTS.items()))


def counts(emulator: dict[str, float], gpu: dict[str, float], code: str = "") -> dict[str, Any]:
    every = dict.fromkeys((*emulator_vs_gpu.COMPARED, *emulator_vs_gpu.EXPLAINING), 0.0)
    return emulator_vs_gpu.compare_counts({**every, **emulator}, {**every, **gpu}, code)


# --- emulator against GPU --------------------------------------------------------------------------------------------
def test_counts_within_one_per_cent_hold_and_others_are_explained_by_the_machine_code() -> None:
    assert counts({LOADS: 1000.0}, {LOADS: 1009.0})["memory_ok"]
    merged = counts({LOADS: 8.0}, {LOADS: 4.0, "smsp__inst_executed_op_global_ld.sum": 4.0})
    assert (merged["memory_ok"], merged["off"]) == (False, [LOADS])
    assert merged["explained"][0].startswith("ld: the machine code executes 4 instructions")
    assert counts({LOADS: 8.0}, {LOADS: 4.0, "smsp__inst_executed_op_global_ld.sum": 8.0})["explained"] == []


def test_bank_conflicts_hold_within_five_per_cent_or_one_per_cent_of_the_passes() -> None:
    assert counts({CONFLICTS: 104.0}, {CONFLICTS: 100.0, WAVEFRONTS: 200.0})["conflicts_ok"]
    assert counts({CONFLICTS: 0.0}, {CONFLICTS: 9.0, WAVEFRONTS: 1000.0})["conflicts_ok"]
    assert not counts({CONFLICTS: 0.0}, {CONFLICTS: 8.0, WAVEFRONTS: 168.0})["conflicts_ok"]


def test_a_bar_that_nothing_explains_fails() -> None:
    row = {"group": "builtin", "counts": counts({CONFLICTS: 0.0}, {CONFLICTS: 8.0, WAVEFRONTS: 168.0}),
           "result": {"bit_equal": True, "relative": 0.0, "approximate": False, "atomic": False}}  # fmt: skip
    assert gpu_emulator.failed_bars(emulator_vs_gpu.summary({"k": row})) == ["bank conflicts"]
    wrong = {**row, "result": {**row["result"], "bit_equal": False}}
    assert "exact results" in gpu_emulator.failed_bars(emulator_vs_gpu.summary({"k": wrong}))


def test_neighbouring_floats_are_one_apart_also_across_zero() -> None:
    values = np.array([-1.0, 0.0, 1.0, np.nextafter(np.float32(1), np.float32(2))], np.float32)
    ordered = emulator_vs_gpu._ordered(values)
    assert ordered[3] - ordered[2] == 1
    assert list(np.argsort(ordered)) == [0, 1, 2, 3]


# --- calibration -----------------------------------------------------------------------------------------------------
def test_rank_correlation_is_spearmans_with_ties_averaged() -> None:
    assert calibrate.spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert calibrate.spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert list(calibrate.ranks([5.0, 1.0, 5.0])) == [2.5, 1.0, 2.5]
    assert calibrate.spearman([1, 1, 1], [1, 2, 3]) is None


def test_a_fit_finds_the_constant_that_made_the_times() -> None:
    rng = np.random.default_rng(1)
    terms = np.zeros((40, len(TERMS)))
    terms[:, TERMS.index("dram")] = rng.uniform(20, 60, 40)
    terms[:, TERMS.index("launch")] = H200.launch_us
    powers = np.zeros((40, len(TERMS), len(calibrate.FITTED)))
    powers[:, TERMS.index("dram"), calibrate.FITTED.index("dram_efficiency")] = -1.0
    measured = H200.launch_us + terms[:, TERMS.index("dram")] * 1.25  # as if 0.8 of the efficiency were reached
    samples = tuple(
        calibrate.Sample(
            problem=f"p{index % 4}", label=str(index), is_seed=False, measured_us=float(value), launches=(), module=None
        )  # type: ignore[arg-type]
        for index, value in enumerate(measured)
    )
    start = np.array([calibrate.value_of(H200, name) for name in calibrate.FITTED])
    near = calibrate.Surrogate(
        samples=samples, terms=terms, powers=powers, weights=np.ones(40), owner=np.arange(40), start=start
    )
    fitted = calibrate.fit(near, H200)
    assert fitted.dram_efficiency == pytest.approx(0.8 * H200.dram_efficiency, rel=0.02)
    assert fitted.latency == H200.latency
    assert len(near.without(["p0"]).samples) == 30
