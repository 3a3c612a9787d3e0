"""Check OptiML on a real GPU, stage by stage, and merge what is found into benchmarks/<gpu>.json.

    python tools/gpu_check.py correct|search|baselines|emulator|calibrate [--device cuda:0] [--minutes 8] [--fresh]

A stage that is started again goes on where it stopped, unless the commit changed. What cannot run here (no ncu, no
compute-sanitizer, no torch) is reported under `not_run`, and a bar that needs more than `--only` let run under
`bars_not_run`. Exit 0: every bar of what was asked for holds.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

import gpu_stage
from gpu_stage import Results, Stage, say

from optiml.device.cuda import find_gpus
from optiml.device.cuda_job import JobItem
from optiml.device.plan import Plan, PlannedLaunch
from optiml.device.wrapped import job_folder, run_wrapped
from optiml.errors import OptimlError
from optiml.measure.nsight import open_ncu, profile_job
from optiml.measure.timing import EMPTY_KERNEL
from optiml.toolchain.nvrtc import CompileFailure, Compiler
from optiml.toolchain.tools import find_tool

STAGES = {  # stage -> module beside this file, with run(stage) -> (summary, bars that failed)
    "correct": "gpu_correct",
    "search": "gpu_search",
    "baselines": "gpu_baselines",
    "emulator": "gpu_emulator",
    "calibrate": "gpu_calibrate",
}
PROBES = {"compute-sanitizer": ("--tool", "memcheck", "--report-api-errors", "no")}
PROBE_S = 10.0


def probe(name: str, index: int) -> str | None:
    """Why a tool of NVIDIA's cannot be used here, None if it can."""
    program = find_tool(name)
    if program is None:
        return "it is not installed"
    try:
        with job_folder([], gpu=index) as folder:
            done = run_wrapped([str(program), *PROBES[name]], folder, timeout_s=PROBE_S)
    except OptimlError as error:
        return str(error)
    text = (done.stdout + done.stderr).decode("utf-8", errors="replace")
    told = [line for line in text.splitlines() if "rror" in line and "ERROR SUMMARY: 0" not in line]
    return (told or [f"exit code {done.exit_code}"])[0][:200] if done.exit_code or told else None


def probe_ncu(index: int) -> str | None:
    """Why Nsight Compute cannot read counters here, None if it can; profiles an empty kernel."""
    compiler = Compiler()
    try:
        ncu = open_ncu()
        build = compiler.compile(EMPTY_KERNEL, find_gpus()[index].arch)
        if isinstance(build, CompileFailure):
            return build.detail
        launch = PlannedLaunch(symbol="empty", grid=(1, 1, 1), block=(32, 1, 1), shared_bytes=0, args=())
        item = JobItem(name="empty", build=build, plan=Plan(steps=(launch,), arrays={}), contents={})
        profile_job(ncu, [item], metrics=("smsp__inst_executed.sum",), device=index, timeout_s=20.0)
    except OptimlError as error:
        return f"{error.code}: {error}"
    finally:
        compiler.close()
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--json", type=Path, default=None, help="the result file")
    parser.add_argument("--only", nargs="*", default=(), help="parts of item names")
    parser.add_argument("--fresh", action="store_true", help="forget what is known of this stage")
    options = parser.parse_args()
    gpu = gpu_stage.open_gpu(options.device)
    results = Results(options.json or gpu_stage.result_path(gpu), options.stage, fresh=options.fresh)
    stage = Stage(
        results, gpu, device=options.device, minutes=options.minutes, processes=options.processes, only=options.only
    )
    for name in (*PROBES, "ncu"):
        why = probe_ncu(gpu.index) if name == "ncu" else probe(name, gpu.index)
        say(f"{name}: {why or 'usable'}")
        if why is not None:
            results.not_run[name] = why
        else:
            results.not_run.pop(name, None)
    started = time.monotonic()
    summary, failed = importlib.import_module(STAGES[options.stage]).run(stage)
    results.finish({**summary, "failed_bars": failed}, seconds=time.monotonic() - started, gpu=gpu)
    for key, value in summary.items():
        say(f"{key}: {value}")
    unknown = summary.get("bars_not_run", [])
    say(f"bars that do not hold: {', '.join(failed) or 'none'}")
    return 1 if failed or (unknown and not options.only) else 0


if __name__ == "__main__":
    sys.exit(main())
