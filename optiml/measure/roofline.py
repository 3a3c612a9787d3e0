"""The least time that a problem's own bytes and operations allow on a device."""

from __future__ import annotations

from dataclasses import dataclass

from optiml.expressions import evaluate_float
from optiml.measure.hardware import Hardware
from optiml.problems.data import is_float
from optiml.problems.problem import names_of
from optiml.records import Problem, Workload

_TENSOR_ELEMENTS = {
    "float64": "f64", "float16": "f16", "bfloat16": "f16", "float8_e4m3": "f8", "float8_e5m2": "f8", "int8": "s8",
    "uint8": "s8",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Floor:
    """A lower bound of the time, and the resource that sets it: `dram`, `fp32`, `tensor` or `launch`."""

    us: float
    bound: str


def floor(problem: Problem, workload: Workload, hardware: Hardware) -> Floor | None:
    """Speed of light of one workload, None where the problem gives neither `flops` nor `bytes`.

        T = max(bytes / DRAM peak, flops / arithmetic peak, launch)

    The arithmetic peak is that of the tensor cores where they take the dtype of the first floating input as it is, and
    of the fp32 pipes otherwise: TF32 rounds its inputs, so it is no bound for fp32.

    Source: roofline model, Williams et al. 2009 (doi:10.1145/1498765.1498785).
    """
    if problem.flops is None and problem.bytes is None:
        return None
    names = names_of(problem, workload.axes, workload.scalars)
    bounds = [Floor(us=hardware.launch_us, bound="launch")]
    if problem.bytes is not None:
        moved = evaluate_float(problem.bytes, names)
        bounds.append(Floor(us=1e6 * moved / hardware.dram_bytes_per_s, bound="dram"))
    if problem.flops is not None:
        tensor = hardware.tensor_flops_per_s(_TENSOR_ELEMENTS.get(_dtype(problem), ""))
        flops = evaluate_float(problem.flops, names)
        peak = hardware.fp32_flops_per_s if tensor is None else tensor
        bounds.append(Floor(us=1e6 * flops / peak, bound="fp32" if tensor is None else "tensor"))
    return max(bounds, key=lambda item: item.us)


def impossible_us(problem: Problem, workload: Workload, hardware: Hardware) -> float | None:
    """A time that no kernel can go below, None where the problem gives neither `flops` nor `bytes`.

    More generous than `floor`: what fits in L2 may still lie there when the kernel ends, and any tensor core may have
    done the arithmetic.
    """
    if problem.flops is None and problem.bytes is None:
        return None
    names = names_of(problem, workload.axes, workload.scalars)
    bounds = [0.0]
    if problem.bytes is not None:
        moved = evaluate_float(problem.bytes, names) - hardware.l2_bytes
        bounds.append(1e6 * moved / hardware.dram_bytes_per_s)
    if problem.flops is not None:
        element = _TENSOR_ELEMENTS.get(_dtype(problem), "tf32")
        peak = hardware.tensor_flops_per_s(element) or hardware.fp32_flops_per_s
        bounds.append(1e6 * evaluate_float(problem.flops, names) / max(peak, hardware.fp32_flops_per_s))
    return max(bounds)


def least_bytes(problem: Problem, workload: Workload) -> float | None:
    """Bytes that the problem itself has to move, None where it does not say."""
    if problem.bytes is None:
        return None
    return evaluate_float(problem.bytes, names_of(problem, workload.axes, workload.scalars))


def _dtype(problem: Problem) -> str:
    arrays = [tensor.dtype for tensor in problem.inputs.values() if tensor.shape is not None]
    floating = [dtype for dtype in arrays if is_float(dtype)]
    return (floating or arrays or ["float32"])[0]
