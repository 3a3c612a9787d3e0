"""Stage `correct`: what is right is accepted at level 2, what is wrong is rejected, and times can be compared."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from gpu_stage import ROOT, Item, Stage, bench, say
from run_cases import agreement

from optiml.codec import encode, kernel_id
from optiml.errors import InvalidInput, SetupError
from optiml.generate.catalogue import strategies, strategy_kernel
from optiml.measure.timing import Budget, contender, ratio_of, time_together
from optiml.problems.problem import builtin_names, main_dtype
from optiml.records import Kernel
from optiml.workbench import seed_kernel

CASES = ROOT / "tests" / "cases"
HEAD = (
    'extern "C" __global__ void relu(const float* x, float* y, int n) {\n'
    "  int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
)
RIGHT = "  if (i < n) y[i] = fmaxf(x[i], 0.0f);\n"
BAD: dict[str, tuple[str, set[str]]] = {  # what goes before the right line, and the reasons that may be given
    "trap": ("  if (i == 0) __trap();\n", {"fault"}),
    "assert": ("  if (i == 3) __assertfail(\"no\", \"kernel.cu\", 3, \"relu\", 1);\n", {"fault"}),
    "null write": ("  if (i == 0) *(volatile float*)0 = 1.0f;\n", {"fault"}),
    "endless loop": ("  while (*(volatile const float*)x < 1e30f) { }\n", {"timed_out"}),
    "write behind the end": ("  if (i == 0) y[n] = 1.0f;\n", {"fault"}),
    "far write": ("  if (i == 0) y[1u << 30] = 1.0f;\n", {"fault"}),
    "misaligned": ("  if (i == 0) *(volatile double*)(y + 1) = 0.0;\n", {"fault"}),
    "device malloc of everything": (
        "  char* p = (char*)malloc(1u << 26); if (p == nullptr) return; p[0] = 1;\n", {"unwritten_output"}),
}  # fmt: skip
TOLD = ("original", "expected", "status", "reason", "detail", "error")
TIMEOUT_S = 5.0  # of a kernel, as the workbench of the stage has it
TOGETHER = 13  # kernels under one start of a sanitizer: one share of the built-in ones for each process
TRIALS = 100
PLANTED_TRIALS = 60
COMPARED = ("relu", "softmax", "transpose")


def verify_at_level_two(device: str, tasks: Sequence[tuple[str, str, str]]) -> list[Item]:
    """Built-in kernels: seeds or strategies, the sanitizers once over all of them."""
    evaluator = bench().evaluator(device)
    started = time.monotonic()
    asked = []
    for problem_name, _, text in tasks:
        problem = bench().problem(problem_name)
        asked.append((bench().kernel(json.loads(text), problem), problem))
    verdicts = evaluator.verify_together(asked)
    each = round((time.monotonic() - started) / len(tasks), 2)
    return [
        {
            "problem": problem_name, "kernel": name, "status": verdict.status, "reason": verdict.reason,
            "detail": verdict.detail, "levels": list(verdict.levels),
            "sanitizer": None if verdict.sanitizer is None else dict(verdict.sanitizer), "seconds": each,
        }
        for (problem_name, name, _), verdict in zip(tasks, verdicts, strict=True)
    ]  # fmt: skip


def judge_case(device: str, task: str) -> Item:
    """One labelled case."""
    path = CASES / "kernels" / task
    case = json.loads(path.read_text(encoding="utf-8"))
    label = json.loads((CASES / "labels.json").read_text(encoding="utf-8"))["cases"][path.stem]
    problem = json.loads((path.parent / case["problem"]).read_text(encoding="utf-8"))
    started = time.monotonic()
    verdict = bench().verify(case["kernel"], problem, level="L2", device=device)
    found = {"status": verdict.status, "reason": verdict.reason, "detail": verdict.detail}
    return {
        "original": label["original"], "expected": label.get("reason") or label["status"],
        "agreement": agreement(label, found), **found, "seconds": round(time.monotonic() - started, 2),
    }  # fmt: skip


def reject_then_accept(device: str, task: str) -> Item:
    """A kernel that breaks something, and an honest one right after it."""
    before, reasons = BAD[task]
    problem = bench().problem("relu")
    honest = seed_kernel(problem)
    bench().verify(honest, problem, device=device, seed=1)  # warm, as a server is
    started = time.monotonic()
    bad = bench().verify(HEAD + before + RIGHT + "}\n", problem, device=device)
    middle = time.monotonic()
    good = bench().verify(honest, problem, device=device, seed=os.getpid() + int(1e6 * middle) % 1_000_000)
    seconds, after = middle - started, time.monotonic() - middle
    return {
        "status": bad.status, "reason": bad.reason, "detail": bad.detail, "after": good.status,
        "seconds": round(seconds, 2), "seconds_after": round(after, 2),
        "ok": bad.status == "rejected" and bad.reason in reasons and good.status == "accepted"
        and seconds <= TIMEOUT_S + 2.0 and after <= TIMEOUT_S + 2.0,
    }  # fmt: skip


def run(stage: Stage) -> tuple[dict[str, Any], list[str]]:
    stage.spread_together(verify_at_level_two, _builtin_kernels(), TOGETHER)
    stage.spread(judge_case, _cases())
    processes, stage.processes = stage.processes, 2
    stage.spread(reject_then_accept, {f"bad: {name}": name for name in BAD})
    stage.processes = processes
    for name, check in (("R18", _two_at_once), ("R25", _odd_devices)):
        if stage.wanted(name):
            stage.results.put(name, check(stage.device))
            say(f"{name}: {stage.results.items[name]}")
    for problem in COMPARED:
        if stage.left_s > 20 and stage.wanted(f"A/A: {problem}"):
            stage.results.put(f"A/A: {problem}", _same_against_itself(stage.device, problem))
            say(f"A/A: {problem}: {stage.results.items[f'A/A: {problem}']}")
    if stage.left_s > 20 and stage.wanted("planted"):
        stage.results.put("planted", _planted(stage.device))
        say(f"planted: {stage.results.items['planted']}")
    return _summed_up(stage)


def _summed_up(stage: Stage) -> tuple[dict[str, Any], list[str]]:
    items = stage.results.items
    built = {name: item for name, item in items.items() if name.startswith("built-in: ")}
    cases = {name: item for name, item in items.items() if name.startswith("case: ")}
    bad = {name: item for name, item in items.items() if name.startswith("bad: ")}
    same = [item for name, item in items.items() if name.startswith("A/A: ")]
    accepted = [name for name, item in built.items() if item.get("status") == "accepted" and "L2" in item["levels"]]
    misses = {name: item for name, item in cases.items() if item.get("agreement") != "right"}
    alarms = sum(item["alarms"] for item in same)
    trials = sum(item["trials"] for item in same)
    summary = {
        "built_in_accepted_at_L2": f"{len(accepted)} of {len(_builtin_kernels())}",
        "not_accepted": {name: built.get(name, {}) for name in _builtin_kernels() if name not in accepted},
        "cases_as_labelled": f"{len(cases) - len(misses)} of {len(_cases())}",
        "case_misses": {name: {key: item.get(key) for key in TOLD} for name, item in misses.items()},
        "bad_kernels_rejected_and_next_accepted": f"{sum(bool(item.get('ok')) for item in bad.values())} of {len(BAD)}",
        "false_alarms": f"{alarms} of {trials}",
        "planted_found": items.get("planted", {}).get("found_pct"),
    }  # fmt: skip
    bars: dict[str, bool | None] = {  # None: not run
        "every built-in kernel accepted at L2": len(accepted) == len(_builtin_kernels())
        if len(built) == len(_builtin_kernels()) else None,
        "bad kernels rejected, the next accepted": all(item.get("ok") for item in bad.values())
        if len(bad) == len(BAD) else None,
        "false alarms at most 1 %": alarms <= 0.01 * trials if trials else None,
        "a planted 3 % found 95 % of the time": items["planted"]["found_pct"] >= 95.0 if "planted" in items else None,
        "R18": items["R18"]["ok"] if "R18" in items else None,
        "R25": items["R25"]["ok"] if "R25" in items else None,
        "no false accept": not any(item.get("agreement") == "false accept" for item in cases.values())
        if len(cases) == len(_cases()) else None,
    }  # fmt: skip
    summary["bars_not_run"] = [name for name, holds in bars.items() if holds is None]
    return summary, [name for name, holds in bars.items() if holds is False]


def _builtin_kernels() -> dict[str, tuple[str, str, str]]:
    tasks = {}
    for name in builtin_names():
        problem = bench().problem(name)
        kernels = {"seed": seed_kernel(problem)}
        dtype = main_dtype(problem)
        for strategy in strategies(name):
            if dtype in strategy.dtypes:
                kernels[strategy.name] = strategy_kernel(strategy, dtype)
        for label, kernel in kernels.items():
            tasks[f"built-in: {name} {label}"] = (name, label, json.dumps(encode(kernel)))
    return tasks


def _cases() -> dict[str, str]:
    """The labelled cases that hold no host code."""
    found = {}
    for path in sorted((CASES / "kernels").glob("*.json")):
        case = json.loads(path.read_text(encoding="utf-8"))
        if not case["kernel"].get("launcher"):
            found[f"case: {path.stem}"] = path.name
    return found


# --- requests that must not break anything ---------------------------------------------------------------------------
def _two_at_once(device: str) -> Item:
    """R18: two profiles of one GPU at once; the leases of their timings must not overlap."""
    script = (
        "import sys, time; from gpu_stage import open_gpu; from optiml.device.cuda import CudaDevice\n"
        "made = CudaDevice(open_gpu(sys.argv[1]))\n"
        "for _ in range(5):\n"
        "    with made.used(alone=True):\n"
        "        start = time.monotonic(); time.sleep(0.05); print(start, time.monotonic(), flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT), str(ROOT / "tools")])}
    processes = [
        subprocess.Popen([sys.executable, "-c", script, device], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    spans = []
    for process in processes:
        out, _ = process.communicate(timeout=60)
        spans += [tuple(float(text) for text in line.split()) for line in out.splitlines()]
    spans.sort()
    overlaps = sum(later[0] < earlier[1] for earlier, later in itertools.pairwise(spans))
    profiles: list[str] = []

    def profile(name: str) -> None:
        problem = bench().problem(name)
        profiles.append(bench().profile(seed_kernel(problem), problem, device=device).time.source)

    threads = [threading.Thread(target=profile, args=(name,)) for name in ("relu", "gelu")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"spans": len(spans), "overlaps": overlaps, "profiles": len(profiles),
            "ok": overlaps == 0 and len(spans) == 15 and profiles == ["measured"] * 2}  # fmt: skip


def _odd_devices(device: str) -> Item:
    """R25: devices that do not exist, and none at all."""
    told = {}
    for name in ("cuda:99", "cuda:-1", "cuda:0;1", "cuda:MIG-1234", "cuda:0x0"):
        try:
            bench().verify(seed_kernel(bench().problem("relu")), "relu", device=name)
            told[name] = "accepted"
        except SetupError as error:
            told[name] = error.code if "cuda:0" in str(error) else f"{error.code}, but does not say what there is"
        except InvalidInput as error:
            told[name] = error.code
    script = (
        "from optiml.settings import read_settings; from optiml.workbench import Workbench\n"
        "import tempfile; from pathlib import Path\n"
        "bench = Workbench(read_settings(environment={}, home=tempfile.mkdtemp()))\n"
        "print(bench.evaluator('auto').device.info.kind)\n"
        "try: bench.evaluator('cuda:0')\n"
        "except Exception as error: print(error.code)\n"
    )
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=hidden, check=False)
    told["CUDA_VISIBLE_DEVICES="] = " ".join(done.stdout.split()) or done.stderr[-200:]
    after = bench().verify(seed_kernel(bench().problem("relu")), "relu", device=device).status
    wanted = {"no_device"}
    named = {value for name, value in told.items() if name.startswith("cuda:")}
    ok = named == wanted and told["CUDA_VISIBLE_DEVICES="] == "emulator no_device" and after == "accepted"
    return {**told, "after": after, "ok": ok}


# --- comparisons -----------------------------------------------------------------------------------------------------
def _pair(device: str, problem_name: str, new: Kernel, old: Kernel) -> Any:
    """A function that compares two kernels once, as `optiml compare` does, without the profiles around it."""
    problem = bench().problem(problem_name)
    evaluator = bench().evaluator(device)
    inputs = evaluator._profiler.inputs(problem, problem.bench)  # type: ignore[attr-defined]
    contenders = []
    for kernel in (new, old):
        checked = bench().kernel(kernel, problem)
        build = evaluator.build(checked)
        contenders.append(contender(checked, build, problem, problem.bench, evaluator.device))  # type: ignore[arg-type]

    def compare(seconds: float = 1.5) -> Any:
        timing = time_together(evaluator.device, contenders, inputs, budget=Budget(seconds=seconds))  # type: ignore[arg-type]
        return ratio_of(timing, 0, 1)

    return compare


def _same_against_itself(device: str, problem_name: str) -> Item:
    kernel = seed_kernel(bench().problem(problem_name))
    compare = _pair(device, problem_name, kernel, kernel)
    started = time.monotonic()
    found = []
    while len(found) < TRIALS and time.monotonic() - started < 40:
        found.append(compare())
    verdicts = [item.verdict for item in found]
    ratios = sorted(item.ratio for item in found)
    return {
        "kernel_id": kernel_id(kernel), "trials": len(found),
        "alarms": verdicts.count("faster") + verdicts.count("slower"), "inconclusive": verdicts.count("inconclusive"),
        "ratio_range": [round(ratios[0], 5), round(ratios[-1], 5)],
        "noise_pct": round(sorted(item.noise_pct for item in found)[len(found) // 2], 3),
        "seconds_each": round((time.monotonic() - started) / len(found), 3),
    }  # fmt: skip


def _planted(device: str) -> Item:
    """A copy that does part of its work twice, so much that a long measurement finds it 3 % slower."""

    def slowed(extra: int) -> str:
        return (
            '/* optiml\n[[launch]]\nkernel = "relu"\n'
            f'grid = ["ceil_div(n, 256) + ceil_div(n, 256) * {extra} // 10000"]\nblock = [256]\n'
            'args = ["x", "y", "n"]\n*/\n'
            'extern "C" __global__ void relu(const float* x, float* y, int n) {\n'
            "  unsigned blocks = (n + 255u) / 256u, b = blockIdx.x;\n"
            "  unsigned i = (b < blocks ? b : b - blocks) * 256u + threadIdx.x;\n"
            "  if (i < (unsigned)n) y[i] = fmaxf(x[i], 0.0f);\n}\n"
        )

    base = bench().kernel(slowed(0), bench().problem("relu"))
    extra, true = 300, 1.0
    for _ in range(3):
        compare = _pair(device, "relu", bench().kernel(slowed(extra), bench().problem("relu")), base)
        true = 1.0 / sorted(compare(4.0).ratio for _ in range(3))[1]
        if abs(true - 1.03) < 0.002:
            break
        extra = max(50, round(extra * 0.03 / max(true - 1.0, 0.003)))
    found = [compare().verdict for _ in range(PLANTED_TRIALS)]
    return {
        "true_slowdown": round(true, 4), "extra_work_pct": extra / 100.0, "trials": len(found),
        "found_pct": round(100.0 * found.count("slower") / len(found), 1),
        "verdicts": {name: found.count(name) for name in sorted(set(found))},
    }  # fmt: skip
