"""Speed of the PTX engines on a few kernels: thread-instructions per second, in every mode, both engines side by side.

    python tools/bench_ptx.py [--json] [--quick] [--numpy]

Times are the best of three, wall clock and processor time of this process; on a loaded machine compare the latter.
`two_threads` is the same launch on two threads, in turns with one: `times_faster` by the wall clock, which needs two
cores at rest, and `times_faster_at_rest` by the processor time of the busier thread.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "emulator"))

from launching import corpus_module

from optiml.ptx import Machine, engine_name
from optiml.ptx.native import execute
from optiml.ptx.native.lowering import NativeLowering

TWO_THREADS_BAR = 1.5  # times faster, for all but the shortest
IN_TURNS = 5  # launches on one and on two threads
BARS_S = {"matmul_naive 256": 0.15, "matmul_naive 512": 1.3, "matmul_tiled 512": 1.3, "softmax 1024": 0.10,
          "maxpool3d 8x32x64x64": 0.04}  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "off": {},
    "counters": {"count": True},
    "checks": {"checks": frozenset(execute.CHECKS)},
}


def cases(quick: bool) -> list[tuple[str, str, tuple[int, int, int], tuple[int, int, int], list[Any], list[int]]]:
    """(name, kernel, grid, block, arrays, integers) of each benchmark."""
    rng = np.random.default_rng(0)

    def floats(*shape: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape).astype(np.float32)

    square = {n: [floats(n, n) for _ in range(3)] for n in (256, 512)}
    rows = 128 if quick else 1024
    found = [
        ("matmul_naive 256", "matmul_naive", (16, 16, 1), (16, 16, 1), square[256], [256]),
        ("matmul_tiled 256", "matmul_tiled", (16, 16, 1), (16, 16, 1), square[256], [256]),
        (f"softmax {rows}", "softmax", (rows, 1, 1), (256, 1, 1), [floats(rows, 1024), floats(rows, 1024)], [1024]),
    ]
    if not quick:
        volume = (8, 32, 64, 64)
        pooled = [floats(*volume), floats(8, 15, 31, 31)]
        found += [
            (
                "maxpool3d 8x32x64x64",
                "maxpool3d",
                (-(-pooled[1].size // 256), 1, 1),
                (256, 1, 1),
                pooled,
                [*volume, 3, 2],
            ),
            ("matmul_naive 512", "matmul_naive", (32, 32, 1), (16, 16, 1), square[512], [512]),
            ("matmul_tiled 512", "matmul_tiled", (32, 32, 1), (16, 16, 1), square[512], [512]),
        ]
    return found


def measure(
    kernel: str, grid: Any, block: Any, arrays: list[Any], integers: list[int], engine: str, repeats: int,
    options: dict[str, Any], threads: int = 1,
) -> tuple[float, float, float, Any]:  # fmt: skip
    """Best wall time, processor time and processor time of the busier of two threads of a launch, and its result."""
    walls, cpus, busiest, result = [], [], [], None
    for _ in range(repeats):
        machine = Machine(engine=engine, threads=threads)
        loaded = machine.load(corpus_module("a"))
        args = []
        for array in arrays:
            address = machine.allocate(array.nbytes)
            machine.memory(address)[:] = array.view(np.uint8).reshape(-1)
            args.append(address.to_bytes(8, "little"))
        args += [value.to_bytes(4, "little") for value in integers]
        wall, cpu, mine = time.perf_counter(), time.process_time(), time.thread_time()
        result = machine.launch(loaded, kernel, grid=grid, block=block, shared_bytes=0, args=args, **options)
        walls.append(time.perf_counter() - wall)
        mine = time.thread_time() - mine
        cpus.append(time.process_time() - cpu)
        busiest.append(max(mine, cpus[-1] - mine))
    return min(walls), min(cpus), min(busiest), result


def two_threads(launch: Any, options: dict[str, Any]) -> dict[str, Any]:
    """One thread and two in turns, so that both meet the same load."""
    found: dict[int, list[Any]] = {1: [], 2: []}
    for _ in range(IN_TURNS):
        for threads, times in found.items():
            times.append(measure(*launch, "auto", 1, options, threads))
    wall, busiest = ({n: min(each[k] for each in times) for n, times in found.items()} for k in (0, 2))
    return {"threads": found[2][0][3].threads, "wall_s": round(wall[2], 4), "busier_thread_s": round(busiest[2], 4),
            "times_faster": round(wall[1] / wall[2], 2),
            "times_faster_at_rest": round(busiest[1] / busiest[2], 2)}  # fmt: skip


def lowering_ms_per_1000() -> float:
    """Milliseconds of lowering per 1000 PTX instructions, over the kernels of one corpus file."""
    module = corpus_module("a")
    count = sum(len(list(f.instructions())) for f in module.kernels.values())
    start = time.process_time()
    for function in module.kernels.values():
        NativeLowering(module, function)
    return (time.process_time() - start) * 1e6 / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--numpy", action="store_true", help="run the numpy engine too")
    options = parser.parse_args()
    report: dict[str, Any] = {"engine": engine_name(), "load": os.getloadavg()[0], "cases": []}
    report["lowering_ms_per_1000_instructions"] = round(lowering_ms_per_1000(), 1)
    for name, kernel, grid, block, arrays, integers in cases(options.quick):
        row: dict[str, Any] = {"name": name, "bar_s": BARS_S.get(name)}
        *_, counted = measure(kernel, grid, block, arrays, integers, "auto", 1, {"count": True})
        row["thread_instructions"] = counted.counters.thread_instructions
        for mode, extra in MODES.items():
            wall, cpu, _, result = measure(kernel, grid, block, arrays, integers, "auto", 3, extra)
            row[mode] = {"engine": result.engine, "wall_s": round(wall, 4), "cpu_s": round(cpu, 4),
                         "ti_per_s": round(row["thread_instructions"] / cpu)}  # fmt: skip
            row[mode]["times_off"] = round(cpu / row["off"]["cpu_s"], 2)
            if mode != "checks":  # which stay on one thread
                row[mode]["two_threads"] = two_threads((kernel, grid, block, arrays, integers), extra)
        if options.numpy:
            wall, cpu, _, result = measure(kernel, grid, block, arrays, integers, "numpy", 1, {})
            row["numpy"] = {"engine": result.engine, "wall_s": round(wall, 4), "cpu_s": round(cpu, 4),
                            "ti_per_s": round(row["thread_instructions"] / cpu)}  # fmt: skip
            row["times_faster"] = round(cpu / row["off"]["cpu_s"], 1)
        report["cases"].append(row)
    report["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    if options.json:
        print(json.dumps(report))
        return
    print(f"engine {report['engine']}, load {report['load']:.1f}, peak {report['peak_rss_mb']} MB, lowering "
          f"{report['lowering_ms_per_1000_instructions']} ms per 1000 instructions")  # fmt: skip
    for row in report["cases"]:
        figures = [
            f"{mode} {row[mode]['cpu_s']:.3f} s ({row[mode]['ti_per_s'] / 1e9:.2f} G/s)"
            for mode in (*MODES, "numpy")
            if mode in row
        ]
        bar = f"  bar {row['bar_s']} s" if row["bar_s"] else ""
        print(f"{row['name']:20} {row['thread_instructions'] / 1e6:8.1f} M  {'  '.join(figures)}{bar}")
        shared = [
            f"{mode} {row[mode]['two_threads']['times_faster']:.2f} times faster"
            f" (at rest {row[mode]['two_threads']['times_faster_at_rest']:.2f})"
            for mode in ("off", "counters")
        ]
        print(f"{'':20} two threads  {'  '.join(shared)}  bar {TWO_THREADS_BAR}")


if __name__ == "__main__":
    main()
