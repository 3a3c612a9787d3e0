"""The inside of the child that times baselines with torch; see `optiml.measure.baselines`."""

from __future__ import annotations

import inspect
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from optiml.errors import SetupError
from optiml.measure.baselines_torch import NEEDS, vendor_paths
from optiml.problems.data import raw, storage_dtype
from optiml.process import serve

Header = dict[str, Any]
Run = Callable[[], Any]
WARM_UP = 3
MOST_ROUNDS, LEAST_ROUNDS = 60, 5
FLUSH_BYTES = 256 << 20


def handle(header: Header, blobs: Sequence[memoryview]) -> tuple[Header, Sequence[memoryview]]:
    """Time every baseline at one size; the answer holds all single times of each, in µs of float64."""
    if not torch.cuda.is_available():
        raise SetupError("torch sees no GPU", code="no_device")
    torch.cuda.set_device(header["gpu"])
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_grad_enabled(False)
    sets = _inputs(header, blobs)
    runs, missing = _prepared(header, sets)
    times = _sampled(runs, header["seconds"])
    del sets, runs
    if "torch._dynamo" in sys.modules:  # what was compiled for this size is of no more use
        torch._dynamo.reset()
    torch.cuda.empty_cache()
    conditions = {"torch": torch.__version__, "cudnn": str(torch.backends.cudnn.version()), "tf32": "off"}
    return (
        {"names": list(times), "missing": missing, "conditions": conditions},
        [raw(np.asarray(item, dtype=np.float64)) for item in times.values()],
    )


def _inputs(header: Header, blobs: Sequence[memoryview]) -> list[dict[str, torch.Tensor]]:
    """Every set of inputs on the GPU; contents that are shorter than their array are repeated."""
    sets: list[dict[str, torch.Tensor]] = []
    count = len(header["arrays"])
    for number in range(header["sets"]):
        arrays = {}
        for position, item in enumerate(header["arrays"]):
            content = np.frombuffer(blobs[number * count + position], dtype=storage_dtype(item["dtype"]))
            size = int(np.prod(item["shape"], dtype=np.int64))
            whole = np.resize(content, size)
            if item["dtype"] == "bfloat16":
                tensor = torch.from_numpy(whole.view(np.int16).copy()).view(torch.bfloat16)
            else:
                tensor = torch.from_numpy(whole.copy())
            arrays[item["name"]] = tensor.reshape(item["shape"]).cuda()
        sets.append(arrays)
    return sets


def _prepared(
    header: Header, sets: Sequence[Mapping[str, torch.Tensor]]
) -> tuple[dict[str, list[Run]], dict[str, str]]:  # fmt: skip
    """A call without arguments for every baseline and set, warmed up; what fails is told."""
    runs: dict[str, list[Run]] = {}
    missing: dict[str, str] = {}
    for name, function in _functions(header, missing).items():
        wanted = inspect.signature(getattr(function, "_torchdynamo_orig_callable", function)).parameters
        calls = []
        for arrays in sets:
            given = {key: value for key, value in {**header["names"], **arrays}.items() if key in wanted}
            calls.append(_bound(function, given))
        try:
            for _ in range(WARM_UP):
                for call in calls:
                    call()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - torch raises all kinds of errors where it cannot do a thing
            missing[name] = _text(error)
            continue
        runs[name] = calls
    return runs, missing


def _bound(function: Callable[..., Any], given: Mapping[str, Any]) -> Run:
    return lambda: function(**given)


def _functions(header: Header, missing: dict[str, str]) -> dict[str, Callable[..., Any]]:
    if header["sources"] is not None:
        found: dict[str, Callable[..., Any]] = {}
        for name, source in header["sources"].items():
            try:
                found[name] = _loaded(source)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a stranger's code may raise anything
                missing[name] = _text(error)
        return found
    half = {item["dtype"] for item in header["arrays"]} <= {"float16", "bfloat16"}
    paths = vendor_paths(header["problem"])
    eager = paths["torch"]
    chosen = {name: path for name, path in paths.items() if half or name not in NEEDS}
    missing.update({name: NEEDS[name] for name in paths if name not in chosen})
    return {**chosen, "torch.compile": torch.compile(eager, dynamic=False)}


def _loaded(source: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {"torch": torch, "np": np, "__name__": "baseline"}
    exec(compile(source, "baseline.py", "exec"), scope)
    run: Callable[..., Any] = scope["run"]
    return run


def _sampled(runs: Mapping[str, Sequence[Run]], seconds: float) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    deadline = time.monotonic() + seconds
    turn = 0
    for index in range(MOST_ROUNDS):
        if index >= LEAST_ROUNDS and time.monotonic() > deadline:
            break
        taken = []
        for name in (*runs, *reversed(list(runs))):  # A B B A
            turn += 1
            flush.fill_(turn & 1)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            calls = runs[name]
            start.record()
            calls[turn % len(calls)]()
            end.record()
            taken.append((name, start, end))
        torch.cuda.synchronize()
        for name, start, end in taken:
            times[name].append(1000.0 * start.elapsed_time(end))
    return times


def _text(error: BaseException) -> str:
    said = re.sub(r"(?<![\w.])(?:/[\w.+-]+){2,}", "<path>", str(error).strip()[:2000])
    return f"{type(error).__name__}: {said.splitlines()[0] if said else ''}"[:200]


def main() -> None:
    serve(handle)


if __name__ == "__main__":
    main()
