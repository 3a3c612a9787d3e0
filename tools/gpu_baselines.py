"""Stage `baselines`: torch eager, torch.compile and the vendor libraries for every built-in problem."""

from __future__ import annotations

from typing import Any

from gpu_stage import Stage, say

from optiml.device.cuda import CudaDevice
from optiml.measure.baselines import Baselines, TorchBaselines, best_of
from optiml.measure.counted import INPUT_SEED
from optiml.measure.timing import bench_inputs
from optiml.problems.problem import builtin_names, load_builtin

LEAST_LEFT_S = 30.0


def run(stage: Stage) -> tuple[dict[str, Any], list[str]]:
    """Time the baselines of each problem at its bench sizes; every problem must have torch's two."""
    device = CudaDevice(stage.gpu)
    child = TorchBaselines(gpu=stage.gpu.index, hold=lambda: device.used(alone=True))
    try:
        for name in builtin_names():
            if not stage.wanted(name):
                continue
            if stage.left_s < LEAST_LEFT_S:
                stage.results.not_run[name] = "the time of the stage was over"
                continue
            problem = load_builtin(name).problem
            found = child.measure(problem, bench_inputs(problem, problem.bench, seed=INPUT_SEED))
            stage.results.put(name, _item(found))
            say(f"{name}: {found.medians_us}" + (f"; missing: {dict(found.missing)}" if found.missing else ""))
    finally:
        child.close()
        device.close()
    items = stage.results.items
    lacking = sorted(name for name, item in items.items() if not {"torch", "torch.compile"} <= item["times_us"].keys())
    summary = {
        "problems": len(items),
        "with_torch_and_torch_compile": len(items) - len(lacking),
        "lacking": lacking,
        "best_us": {name: item["best_us"] for name, item in items.items()},
    }
    return summary, ["baselines"] if lacking else []


def _item(found: Baselines) -> dict[str, Any]:
    return {
        "times_us": {name: round(item.median_us, 2) for name, item in found.times.items()},
        "ci95_us": {name: [round(value, 2) for value in item.ci95] for name, item in found.times.items()},
        "best_us": best_of(found),
        "missing": dict(found.missing),
        "conditions": dict(found.conditions),
    }
