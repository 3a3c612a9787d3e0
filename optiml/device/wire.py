"""What the parents and the children of devices agree on: launch plans as JSON."""

from __future__ import annotations

from typing import Any

from optiml.device.plan import Plan, Pointer

INDEX_VARIABLE = "OPTIML_CUDA_INDEX"  # tells the child of a GPU which device to open before its first call


def wire_arrays(plan: Plan) -> list[dict[str, Any]]:
    """Name and size in bytes of every array, in the order in which contents are sent."""
    return [{"name": name, "nbytes": array.nbytes} for name, array in plan.arrays.items()]


def wire_launches(plan: Plan) -> list[dict[str, Any]]:
    """Every launch; an argument is the name of an array, or the bytes of a value as hexadecimal text."""
    return [
        {
            "symbol": launch.symbol,
            "grid": launch.grid,
            "block": launch.block,
            "shared_bytes": launch.shared_bytes,
            "args": [
                {"array": arg.name} if isinstance(arg, Pointer) else {"value": arg.data.hex()} for arg in launch.args
            ],
        }
        for launch in plan.launches
    ]
