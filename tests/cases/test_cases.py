"""Labelled kernels that a verifier must judge right; `README.md` of the set explains the labels."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from optiml.process import probe
from optiml.toolchain.nvcc import find_toolkit
from optiml.workbench import Workbench

FOLDER = Path(__file__).parent
LABELS: dict[str, dict[str, Any]] = json.loads((FOLDER / "labels.json").read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize("name", sorted(LABELS))
def test_a_labelled_kernel_gets_the_verdict_of_its_label(bench: Workbench, name: str) -> None:
    label = LABELS[name]
    case = json.loads((FOLDER / "kernels" / f"{name}.json").read_text(encoding="utf-8"))
    problem = json.loads((FOLDER / "kernels" / case["problem"]).read_text(encoding="utf-8"))
    found = bench.verify(case["kernel"], problem, seed=1)
    if "launcher" in label["needs"] and found.status == "unverified":
        assert find_toolkit() is None or shutil.which("g++") is None or not probe().strong, found.summary
        return
    if label.get("neutralised_ok") and found.status == "accepted":
        return  # only its recorded plan was run, and that is right
    assert found.status == label["status"], found.summary
    if label["status"] == "rejected":
        assert found.reason in {label["reason"], *label["also_ok"]}, found.summary
