"""Stage `search`: the best kernel of a built-in search against the best of torch, for every built-in problem."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

from gpu_stage import Item, Stage, bench, open_gpu, say

from optiml.codec import encode
from optiml.device.cuda import CudaDevice
from optiml.measure.baselines import TorchBaselines
from optiml.measure.measured import MeasuredProfiler
from optiml.problems.problem import builtin_names
from optiml.workbench import seed_kernel

EVALUATIONS = 60
SECONDS = 240.0  # of one search
BARS = {"relu": 0.95, "softmax": 0.85, "layernorm": 0.85, "transpose": 0.85, "sum": 0.85}  # of the best of torch
NAIVE_GAIN = ("matmul", 3.0)
VENDORS = ("torch", "torch.compile")
AXES = {"matmul": {"M": 2048, "N": 2048, "K": 2048}}  # sizes of the bar, where the problem's own are others


def search(device: str, task: tuple[str, dict[str, int] | None]) -> Item:
    """One search; the winner is timed once more, in turns with the kernel that it started from."""
    name, axes = task
    problem = bench().problem(name, axes=axes)
    if axes is not None:  # only the timed size changes: what is verified stays what the problem says
        own = bench().problem(name)
        problem = dataclasses.replace(own, bench=problem.bench)
    seed = seed_kernel(problem)
    started = time.monotonic()
    run = bench().start_search(problem, seed, device=device, evaluations=EVALUATIONS, seconds=SECONDS, seed=1)
    result = bench().run_search(run)
    seconds = time.monotonic() - started
    if result.best is None or result.baseline is None:
        return {"problem": name, "error": result.summary}
    evaluator = bench().evaluator(device)
    profiler = MeasuredProfiler(counted=False)
    build = evaluator.build(result.best.kernel)
    final = profiler.profile(
        result.best.kernel,
        build,
        problem,
        evaluator.device,
        bench=problem.bench,
        timeout_s=60.0,  # type: ignore[arg-type]
    )
    return {
        "problem": name, "axes": dict(problem.bench[0].axes), "time_us": round(final.time.median_us, 2),
        "noise_pct": round(final.time.noise_pct or 0.0, 3),
        "speed_of_light_pct": None if final.speed_of_light is None else round(final.speed_of_light.pct, 1),
        "speedup": None if result.speedup is None else round(result.speedup.median, 3),
        "ci95": None if result.speedup is None or result.speedup.ci95 is None else
        [round(value, 3) for value in result.speedup.ci95],
        "source": None if result.speedup is None else result.speedup.source,
        "path": [step.edit for step in result.path], "verdict": result.best.verdict.status,
        "levels": list(result.best.verdict.levels), "evaluations": result.spent.evaluations,
        "accepted": result.spent.accepted, "rejected": result.spent.rejected, "duplicates": result.spent.duplicates,
        "stopped_because": result.stopped_because, "seconds": round(seconds, 1),
        "kernel": encode(result.best.kernel),
    }  # fmt: skip


def torch_times(device: str, task: tuple[str, dict[str, int] | None]) -> Item:
    """What torch takes for a problem, by the same harness."""
    name, axes = task
    problem = bench().problem(name, axes=axes)
    gpu = open_gpu(device)
    held = CudaDevice(gpu, patience_s=300.0)
    baselines = TorchBaselines(gpu=gpu.index, hold=lambda: held.used(alone=True))
    try:
        inputs = MeasuredProfiler(counted=False).inputs(problem, problem.bench)
        found = baselines.measure(problem, inputs)
    finally:
        baselines.close()
    return {"problem": name, "times_us": {key: round(value, 2) for key, value in found.medians_us.items()},
            "missing": dict(found.missing)}  # fmt: skip


def run(stage: Stage) -> tuple[dict[str, Any], list[str]]:
    names = tuple(sorted(builtin_names(), key=lambda name: name not in (*BARS, NAIVE_GAIN[0])))  # bars first
    tasks = {name: (name, _axes(name)) for name in names}
    stage.spread(search, {f"search: {name}": tasks[name] for name in names})
    lacking = [name for name in names if _best_of_torch(stage, name) is None]
    stage.spread(torch_times, {f"torch: {name}": tasks[name] for name in lacking})
    return _summed_up(stage, names)


def _best_of_torch(stage: Stage, name: str) -> float | None:
    """From this stage, or from the stage `baselines` where that timed the same sizes."""
    own = stage.results.items.get(f"torch: {name}", {}).get("times_us", {})
    found = own or (stage.results.other("baselines").get(name, {}).get("times_us", {}) if name not in AXES else {})
    return min((float(found[key]) for key in VENDORS if found.get(key) is not None), default=None)


def _axes(name: str) -> dict[str, int] | None:
    wanted = AXES.get(name)
    if wanted is None:
        return None
    own = bench().problem(name).axes
    return wanted if set(wanted) <= set(own) else None


def _summed_up(stage: Stage, names: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    rows: dict[str, Any] = {}
    shares = []
    for name in names:
        found, best = stage.results.items.get(f"search: {name}", {}), _best_of_torch(stage, name)
        share = None if best is None or "time_us" not in found else round(best / found["time_us"], 3)
        if share is not None:
            shares.append(share)
        rows[name] = {
            "time_us": found.get("time_us"), "best_of_torch_us": best, "share_of_torch": share,
            "speedup": found.get("speedup"), "ci95": found.get("ci95"), "levels": found.get("levels"),
            "error": found.get("error"),
        }  # fmt: skip
        say(f"{name}: {rows[name]}")
    bars = {f"{name} at {bar:.0%} of torch": (rows[name]["share_of_torch"], bar) for name, bar in BARS.items()}
    bars[f"{NAIVE_GAIN[0]} {NAIVE_GAIN[1]:g}x the naive kernel"] = (rows[NAIVE_GAIN[0]]["speedup"], NAIVE_GAIN[1])
    failed = [bar for bar, (reached, wanted) in bars.items() if reached is not None and reached < wanted]
    unknown = [bar for bar, (reached, _) in bars.items() if reached is None]
    geomean = math.exp(sum(math.log(share) for share in shares) / len(shares)) if shares else None
    share = None if geomean is None else round(geomean, 3)
    return {"problems": rows, "geomean_share_of_torch": share, "bars_not_run": unknown}, failed
