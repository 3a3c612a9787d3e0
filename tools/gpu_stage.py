"""What the stages of `gpu_check` share: their results on disk, their deadline, work spread over processes."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from optiml.device.cuda import Gpu, find_gpus
from optiml.device.nvml import Nvml
from optiml.settings import read_settings
from optiml.workbench import Workbench

ROOT = Path(__file__).resolve().parent.parent
Item = dict[str, Any]


class Results:
    """The merged result file of one GPU: stages, each with items by name, written after every item."""

    def __init__(self, path: Path, stage: str, *, fresh: bool) -> None:
        self._path = path
        self._whole: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"stages": {}}
        stages = self._whole["stages"]
        if fresh or stages.get(stage, {}).get("commit") != commit():
            stages[stage] = {"commit": commit(), "items": {}, "summary": {}, "not_run": {}}
        self._stage: dict[str, Any] = stages[stage]

    @property
    def items(self) -> dict[str, Item]:
        """What this stage knows already, by name; a stage leaves out what is here."""
        return self._stage["items"]

    def other(self, stage: str) -> dict[str, Item]:
        """What another stage found, by name; empty where it has not run."""
        found: dict[str, Item] = self._whole["stages"].get(stage, {}).get("items", {})
        return found

    @property
    def not_run(self) -> dict[str, str]:
        """What could not run, and why."""
        return self._stage["not_run"]

    def put(self, name: str, item: Item) -> None:
        self.items[name] = item
        self.save()

    def finish(self, summary: Mapping[str, Any], *, seconds: float, gpu: Gpu) -> None:
        """Add the summary and under which conditions it was found."""
        self._stage.update(
            summary=dict(summary), seconds=round(seconds, 1), at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        )
        nvml = Nvml(gpu.pci_bus_id)
        clocks = nvml.clocks()
        self._whole["gpu"] = {
            "name": gpu.name, "arch": gpu.arch, "sms": gpu.sms, "memory_gib": round(gpu.memory_bytes / 2**30),
            "driver": nvml.driver_version(), "cuda": gpu.driver_cuda, "sm_clock_mhz": clocks.sm_mhz,
            "memory_clock_mhz": clocks.memory_mhz, "cores": os.cpu_count(),
        }  # fmt: skip
        self.save()

    def save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._whole, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        part.replace(self._path)


class Stage:
    """One run of a stage: where it runs, what it knows, and when it has to end."""

    def __init__(
        self, results: Results, gpu: Gpu, *, device: str, minutes: float, processes: int, only: Sequence[str]
    ) -> None:
        self.results = results
        self.gpu = gpu
        self.device = device
        self.processes = processes
        self.only = tuple(only)
        self.started = time.monotonic()
        self._deadline = self.started + 60.0 * minutes

    @property
    def left_s(self) -> float:
        return self._deadline - time.monotonic()

    def wanted(self, name: str) -> bool:
        """Whether an item is still to be done."""
        return name not in self.results.items and (not self.only or any(part in name for part in self.only))

    def spread(self, work: Callable[[str, Any], Item], tasks: Mapping[str, Any]) -> None:
        """Do `work(device, task)` for every task that is not done yet, in several processes; stop at the deadline.

        `work` is a module-level function; an item that ends in an exception is kept as an error.
        """
        self._spread(work, {(name,): task for name, task in tasks.items() if self.wanted(name)})

    def spread_together(self, work: Callable[[str, Any], Sequence[Item]], tasks: Mapping[str, Any], size: int) -> None:
        """As `spread`, with `work(device, tasks)` for up to `size` tasks at once; it answers one item for each."""
        todo = [name for name in tasks if self.wanted(name)]
        self._spread(work, {tuple(names): [tasks[name] for name in names] for names in chunks(todo, size)})

    def _spread(self, work: Callable[[str, Any], Item | Sequence[Item]], todo: Mapping[tuple[str, ...], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        pool = concurrent.futures.ProcessPoolExecutor(max_workers=self.processes, mp_context=context)
        running = {pool.submit(work, self.device, task): names for names, task in todo.items()}
        try:
            for done in concurrent.futures.as_completed(running, timeout=max(self.left_s, 1.0)):
                names, error = running[done], done.exception()
                found = {"error": f"{type(error).__name__}: {error}"[:500]} if error is not None else done.result()
                items = [found] * len(names) if isinstance(found, dict) else found
                for name, item in zip(names, items, strict=True):
                    self.results.put(name, item)
                    say(f"{name}: {short(item)}")
        except TimeoutError:
            for future, names in running.items():
                if not future.done():
                    self.results.not_run.update(dict.fromkeys(names, "the time of the stage was over"))
            self.results.save()
        finally:
            workers = list((pool._processes or {}).values())
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers if self.left_s <= 0 else ():
                worker.terminate()


_bench: Workbench | None = None


def bench() -> Workbench:
    """The workbench of this process, with a home of its own; made once."""
    global _bench
    if _bench is None:
        home = tempfile.mkdtemp(prefix="optiml-gpu-check-")
        _bench = Workbench(read_settings(environment={}, home=home, roots=(Path("/"),), kernel_timeout_s=5.0))
    return _bench


def open_gpu(device: str) -> Gpu:
    """The GPU that a device name means."""
    index = int(device.removeprefix("cuda:") or 0)
    return find_gpus()[index]


def result_path(gpu: Gpu) -> Path:
    return ROOT / "benchmarks" / (gpu.name.lower().removeprefix("nvidia ").replace(" ", "-") + ".json")


def commit() -> str:
    """The commit of this tree; a tree without its history is told by OPTIML_COMMIT."""
    if "OPTIML_COMMIT" in os.environ:
        return os.environ["OPTIML_COMMIT"]
    done = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def short(item: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in item.items() if not isinstance(value, dict | list))[:200]


def say(text: str) -> None:
    print(text, flush=True)


def chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
