"""What the parents and the children of devices agree on: launch plans as JSON."""

from __future__ import annotations

import re
from typing import Any

from optiml.device.plan import Copy, Memset, Plan, PlannedLaunch, Pointer, Step, Upload, Value

INDEX_VARIABLE = "OPTIML_CUDA_INDEX"  # tells the child of a GPU which device to open before its first call


def wire_arrays(plan: Plan) -> list[dict[str, Any]]:
    """Every array, in the order in which contents are sent; `undefined`: a kernel must not read it unwritten."""
    return [
        {
            "name": name,
            "nbytes": array.nbytes,
            "undefined": array.role in ("output", "workspace") and not array.zero,
        }
        for name, array in plan.arrays.items()
    ]


def wire_steps(plan: Plan, ptx: str = "") -> list[dict[str, Any]]:
    """Every step. Where `ptx` is given, launches carry the byte offset of each argument, which a GPU needs."""
    wired = [_wire_step(step) for step in plan.steps]
    for item in wired if ptx else ():
        if item["kind"] == "launch":
            item["offsets"] = argument_offsets(ptx, item["symbol"])
    return wired


def argument_offsets(ptx: str, symbol: str) -> list[int]:
    """Byte offset of every parameter of an entry: each at the next multiple of its alignment."""
    entry = re.search(rf"\.entry\s+{re.escape(symbol)}\s*(?:\(([^)]*)\))?", ptx)
    offsets, end = [], 0
    for item in re.finditer(r"\.param\s+([^,]*)", (entry.group(1) or "") if entry else ""):
        kind = re.search(r"\.[usfb](8|16|32|64)\b", item.group(1))
        count = re.search(r"\[(\d+)\]", item.group(1))
        aligned = re.search(r"\.align\s+(\d+)", item.group(1))
        element = int(kind.group(1)) // 8 if kind else 8
        alignment = int(aligned.group(1)) if aligned else element
        offsets.append(-(-end // alignment) * alignment)
        end = offsets[-1] + element * (int(count.group(1)) if count else 1)
    return offsets


def _wire_step(step: Step) -> dict[str, Any]:
    match step:
        case PlannedLaunch():
            return {
                "kind": "launch",
                "symbol": step.symbol,
                "grid": step.grid,
                "block": step.block,
                "shared_bytes": step.shared_bytes,
                "cluster": step.cluster,
                "cooperative": step.cooperative,
                "args": [_wire_argument(arg) for arg in step.args],
            }
        case Memset():
            return {"kind": "memset", "target": _wire(step.target), "value": step.value, "nbytes": step.nbytes}
        case Copy():
            return {
                "kind": "copy",
                "source": _wire(step.source),
                "target": _wire(step.target),
                "nbytes": step.nbytes,
            }
        case Upload():
            return {"kind": "upload", "target": _wire(step.target), "content": _wire_argument(step.content)}


def _wire(pointer: Pointer) -> dict[str, Any]:
    return {"symbol" if pointer.symbol else "array": pointer.name, "offset": pointer.offset}


def _wire_argument(arg: Pointer | Value) -> dict[str, Any]:
    if isinstance(arg, Pointer):
        return _wire(arg)
    return {"value": arg.data.hex(), "pointers": [[position, _wire(pointer)] for position, pointer in arg.pointers]}
