"""Stage `emulator`: results and counts of the embedded device against the GPU; see `emulator_vs_gpu`."""

from __future__ import annotations

from typing import Any

import emulator_vs_gpu
from gpu_stage import Stage

LEAST_MEMORY_SHARE = 0.9


def run(stage: Stage) -> tuple[dict[str, Any], list[str]]:
    """All kernels at once; a stage that is started again compares only what is not known yet."""
    known = set(stage.results.items)
    record = emulator_vs_gpu.check(leave_out=known)
    for name, row in record["kernels"].items():
        stage.results.items[name] = row
    stage.results.save()
    summary = emulator_vs_gpu.summary(stage.results.items)
    return summary, failed_bars(summary)


def failed_bars(summary: dict[str, Any]) -> list[str]:
    """The bars of the comparison that do not hold."""
    failed = []
    if summary["exact_bit_equal"] < summary["exact_kernels"]:
        failed.append("exact results")
    if summary["probes_within_bounds"] < summary["probes"]:
        failed.append("approximate instructions")
    unexplained = any("unexplained" in item["why"] for item in summary["memory_off"].values())
    if summary["counted"] and (summary["memory_share"] < LEAST_MEMORY_SHARE or unexplained):
        failed.append("global sectors and requests")
    if any("unexplained" in item["why"] for item in summary["conflicts_off"].values()):
        failed.append("bank conflicts")
    return failed
