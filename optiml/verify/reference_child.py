"""The child in which references run. The one place where text from outside is executed as Python.

By then the process can read the interpreter and nothing else, has no network and cannot start another process.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optiml.problems.data import raw
from optiml.process import serve

Array = NDArray[Any]
_SAME_DTYPE = {"float64": np.float64, "float32": np.float32, "float16": np.float16}  # the rest computes in float32


def handle(header: dict[str, Any], blobs: Sequence[memoryview]) -> tuple[dict[str, Any], list[memoryview]]:
    """Run `run(...)` in float64, and again in the declared dtype for the error of a trusted computation."""
    exact_inputs: dict[str, Array] = {}
    for item, blob in zip(header["arrays"], blobs, strict=True):
        dtype = np.dtype(np.float64) if "float" in item["dtype"] else np.dtype(_integer(item["dtype"]))
        exact_inputs[item["name"]] = np.frombuffer(blob, dtype=dtype).reshape(item["shape"])
    try:
        run = _load(header["source"], header["framework"])
        exact = _call(run, header, exact_inputs)
        arrays = [np.ascontiguousarray(_plain(item, spec)) for item, spec in zip(exact, header["outputs"], strict=True)]
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a stranger's code may raise anything; it becomes text
        return {"error": _text(error)}, []
    same: list[Array] = []
    try:
        same = _call(run, header, {name: _narrowed(name, a, header) for name, a in exact_inputs.items()})
    except (Exception, SystemExit):  # noqa: BLE001 - only float64 has to work
        same = []
    reply: dict[str, Any] = {"exact": [_facts(item) for item in arrays], "same": None}
    if len(same) == len(exact):
        narrow = [np.ascontiguousarray(item.astype(np.float64)) for item in same]
        reply["same"] = [_facts(item) for item in narrow]
        arrays += narrow
    return reply, [raw(item) for item in arrays]


def _integer(dtype: str) -> str:
    return "uint8" if dtype == "bool" else dtype


def _load(source: str, framework: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {"np": np, "__name__": "reference"}
    if framework == "torch":
        import torch  # only where a problem asks for it

        scope["torch"] = torch
    exec(compile(source, "reference.py", "exec"), scope)
    run: Callable[..., Any] = scope["run"]
    return run


def _call(run: Callable[..., Any], header: Mapping[str, Any], arrays: Mapping[str, Array]) -> list[Array]:
    given: dict[str, Any] = {**header["names"], **{name: array.copy() for name, array in arrays.items()}}
    if header["framework"] == "torch":
        torch = __import__("torch")
        declared = {item["name"]: item["dtype"] for item in header["arrays"]}
        given.update({name: torch.from_numpy(given[name]).to(getattr(torch, declared[name])) for name in arrays})
    wanted = inspect.signature(run).parameters
    with np.errstate(all="ignore"):
        result = run(**{name: value for name, value in given.items() if name in wanted})
    results = list(result) if isinstance(result, tuple | list) else [result]
    if len(results) != len(header["outputs"]):
        raise ValueError(f"run returned {len(results)} arrays for {len(header['outputs'])} outputs")
    return [np.asarray(item.double().numpy() if hasattr(item, "numpy") else item) for item in results]


def _narrowed(name: str, array: Array, header: Mapping[str, Any]) -> Array:
    if array.dtype.kind != "f":
        return array
    declared = next(item["dtype"] for item in header["arrays"] if item["name"] == name)
    with np.errstate(over="ignore"):
        return array.astype(_SAME_DTYPE.get(declared, np.float32))


def _plain(array: Array, spec: Mapping[str, str]) -> Array:
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{spec['name']} is no array of real numbers but of {array.dtype}")
    if "float" in spec["dtype"]:
        return array.astype(np.float64)
    return array if array.dtype.kind in "iuf" else array.astype(np.uint8 if array.dtype.kind == "b" else np.float64)


def _facts(array: Array) -> dict[str, Any]:
    return {"dtype": array.dtype.str, "shape": list(array.shape)}


def _text(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "reference.py"]
    where = f" (reference line {frames[-1].lineno})" if frames else ""
    said = re.sub(r"(?<![\w.])(?:/[\w.+-]+){2,}", "<path>", str(error)[:2000])  # folders of this machine stay here
    return f"{type(error).__name__}: {said}"[:300] + where


def main() -> None:
    serve(handle)


if __name__ == "__main__":
    main()
