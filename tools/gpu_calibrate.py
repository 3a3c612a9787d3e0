"""Stage `calibrate`: the time model before and after its constants are fitted to this GPU; see `calibrate`."""

from __future__ import annotations

from typing import Any

import calibrate
from gpu_stage import ROOT, Stage

from optiml.measure.measured import stand_in

LEAST_SPEARMAN = 0.7
LEAST_PROBLEMS = 8
LEAST_FASTER = 0.8
FIT_S = 200.0  # of the stage's time are kept for counting and fitting


def run(stage: Stage) -> tuple[dict[str, Any], list[str]]:
    """Measure (or read what an earlier run measured), fit, judge on held-out problems."""
    model = stand_in(stage.gpu.info.model, stage.gpu.arch)
    times = ROOT / "benchmarks" / f"{stage.gpu.name.lower().removeprefix('nvidia ').replace(' ', '-')}_times.json"
    data = calibrate.gather(times, arch=stage.gpu.arch, model=model, seconds=max(30.0, stage.left_s - FIT_S))
    record = calibrate.calibrate(data, model)
    stage.results.put("record", record)
    held = record["held_out"]
    summary = {
        part: {key: value for key, value in record[part].items() if key != "by_problem"}
        for part in ("before", "held_out", "all")
    }
    failed = []
    if held["problems_with_5_variants"] < LEAST_PROBLEMS or (held["mean_spearman"] or 0.0) < LEAST_SPEARMAN:
        failed.append("rank correlation")
    if held["picks_faster_by_5_pct"] < LEAST_FASTER * held["picks"]:
        failed.append("winners")
    return {**summary, "constants": record["constants"]}, failed
