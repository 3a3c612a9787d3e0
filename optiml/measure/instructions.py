"""What one PTX instruction costs once it is machine code: issue slots by pipe, and latency.

PTX is not what a GPU executes. Moves and parameter loads vanish, a widening multiply and the add behind it fuse, a
division becomes twenty instructions. The table below estimates that expansion per opcode, so that a kernel which
replaces divisions or hoists address arithmetic is seen to do so.

Source: reading of ptxas output for sm_80 and sm_90, rounded; not calibrated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

# Pipes: fp32 int fp16 fp64 sfu convert shuffle tensor memory control.
# Latency parts are fields of hardware.Latencies, or "load" for a global load, whose latency depends on hit rates.


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Machine instructions per pipe and the chain of latencies from operands to result, of one warp instruction."""

    slots: Mapping[str, float]
    latency: Mapping[str, float]  # latency part -> how many in a row
    tensor_fmas: Mapping[str, float]  # element type -> multiply-adds of the whole warp

    @property
    def issue_slots(self) -> float:
        return sum(self.slots.values())


def _cost(latency: Mapping[str, float], /, **slots: float) -> Cost:
    return Cost(slots={pipe: number for pipe, number in slots.items() if number}, latency=latency, tensor_fmas={})


_ALU = {"alu": 1.0}
_FREE = _cost({})
_INT = _cost(_ALU, int=0.75)  # every fourth folds: a shift and add, two logic operations, an address
_MULTIPLY = _cost(_ALU, int=1)
_INT_64 = _cost({"alu": 2}, int=2)
_FP32 = _cost(_ALU, fp32=1)
_FP16 = _cost(_ALU, fp16=1)
_FP64 = _cost({"fp64": 1}, fp64=1)
_CONTROL = _cost({}, control=1)

_FREE_FAMILIES = frozenset(
    {"mov", "cvta", "isspacep", "mapa", "abs", "neg", "pragma", "pmevent", "griddepcontrol", "applypriority", "discard"}
)
_CONTROL_FAMILIES = frozenset({"bra", "ret", "exit", "brx", "trap", "nanosleep", "prefetch", "prefetchu", "elect"})
_SLOW_INT = frozenset({"popc", "clz", "brev", "bfind", "fns"})  # a quarter of the integer rate, on the sfu pipe
_TYPES = frozenset(f"{kind}{bits}" for kind in "sufb" for bits in (8, 16, 32, 64)) | {
    "f16x2", "bf16", "bf16x2", "s16x2", "u16x2", "tf32", "e4m3", "e5m2", "e4m3x2", "e5m2x2", "pred", "b128", "u4", "s4",
}  # fmt: skip


@lru_cache(maxsize=4096)
def cost(opcode: str) -> Cost:
    """Cost of an opcode as PTX spells it in full, such as `ld.global.nc.v4.f32`; an unknown one is taken as integer."""
    parts = opcode.split(".")
    family = parts[0]
    types = [part for part in parts[1:] if part in _TYPES]
    kind = types[0] if types else ""
    if family in _FREE_FAMILIES:
        return _FREE
    if family in _CONTROL_FAMILIES:
        return _CONTROL
    if family == "call":
        return _cost({"alu": 2}, control=4)
    if family in ("bar", "barrier"):
        return _cost({} if "warp" in parts else {"barrier": 1}, control=1)
    if family in ("membar", "fence"):
        return _cost({"l2": 1}, control=1)
    if family in ("ld", "ldu", "st", "atom", "red", "cp", "ldmatrix", "stmatrix", "wmma", "mma"):
        return _memory_or_tensor(family, parts)
    if family == "shfl":
        return _cost({"shuffle": 1}, shuffle=1)
    if family == "match":
        return _cost({"shuffle": 3}, shuffle=64)  # one comparison after another; measured on one H200
    if family in ("vote", "redux", "activemask"):
        return _cost({"alu": 2}, int=1)
    if family == "cvt":
        return _convert(types)
    if family in _SLOW_INT:
        return _cost({"sfu": 1}, sfu=1)
    if family in ("div", "rem", "sqrt", "rcp", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh"):
        return _special(family, parts, kind)
    return _arithmetic(family, parts, kind)


def _memory_or_tensor(family: str, parts: list[str]) -> Cost:
    space = next((part for part in parts if part in ("global", "shared", "local", "const", "param")), "global")
    if family == "mma" or (family == "wmma" and "mma" in parts):
        return _tensor(parts)
    if family == "wmma":  # a 16 x 16 fragment is loaded or stored in four pieces
        return _cost({"load" if "load" in parts and space == "global" else "shared": 1}, memory=4, int=2)
    if space == "param":
        return _FREE  # an operand read straight from the constant bank
    if family == "st":
        return _cost({}, memory=1)
    if family == "red":
        return _cost({}, memory=1)
    if family == "atom":
        return _cost({"shared": 2} if space == "shared" else {"atomic": 1}, memory=1)
    if family == "cp":  # cp.async: the wait, not the copy, meets the latency
        if "wait_all" in parts or "wait_group" in parts:
            return _cost({"load": 1}, control=1)
        return _FREE if "commit_group" in parts else _cost({}, memory=1)
    if family in ("ldmatrix", "stmatrix") or space == "shared":
        return _cost({"shared": 1}, memory=1)
    if space == "const":
        return _cost({"alu": 2}, memory=1)
    return _cost({"l1": 1} if space == "local" else {"load": 1}, memory=1)


def _tensor(parts: list[str]) -> Cost:
    shape = next((part for part in parts if part.startswith("m") and "n" in part and "k" in part), "m16n8k16")
    m, rest = shape[1:].split("n", 1)
    n, k = rest.split("k", 1)
    fmas = float(int(m) * int(n) * int(k))
    types = [part for part in parts if part in _TYPES]
    operand = types[1] if len(types) > 1 else "f16"  # order of the types: d, a, b, c; wmma names d, c only for f16
    element = {"bf16": "f16", "f16": "f16", "tf32": "tf32", "f64": "f64", "s8": "s8", "u8": "s8"}.get(operand)
    if element is None:
        element = "f8" if operand in ("e4m3", "e5m2") else "f16"
    return Cost(
        slots={"tensor": max(1.0, fmas / 2048.0)},
        latency={"tensor": max(1.0, fmas / 4096.0)},
        tensor_fmas={element: fmas},
    )


def _convert(types: list[str]) -> Cost:
    if any(kind in ("f64", "s64", "u64") for kind in types) and any("f" in kind for kind in types):
        return _cost({"sfu": 1}, convert=4)
    if any("f" in kind or kind.startswith("e") for kind in types):
        return _cost({"alu": 2}, convert=1)
    if "s64" in types or "u64" in types:
        return _cost(_ALU, int=0.5)  # half of these fold into the multiply or the address that follows
    return _INT


def _special(family: str, parts: list[str], kind: str) -> Cost:
    if kind in ("s32", "u32", "s16", "u16"):
        return _cost({"alu": 14, "sfu": 1}, int=18, sfu=1, convert=2)
    if kind in ("s64", "u64"):
        return _cost({"alu": 50, "sfu": 1}, int=70, sfu=1, convert=4)
    if kind == "f64":
        return _cost({"fp64": 9, "sfu": 1}, fp64=9, sfu=1, int=4)
    if kind in ("f16", "f16x2", "bf16", "bf16x2"):
        return _cost({"sfu": 1}, sfu=2 if kind.endswith("x2") else 1)
    if "approx" in parts or "full" in parts:
        fp32 = {"div": 2.0, "sqrt": 1.0, "sin": 1.0, "cos": 1.0}.get(family, 0.0)
        scaling = 0.0 if "ftz" in parts else 2.0  # denormals are scaled up and back
        return _cost({"sfu": 1, "alu": fp32 + scaling}, sfu=1, fp32=fp32 + scaling)
    return _cost({"sfu": 1, "alu": 8}, sfu=1, fp32=7, int=2, control=1)  # IEEE rounding: div.rn, sqrt.rn, rcp.rn


def _arithmetic(family: str, parts: list[str], kind: str) -> Cost:
    wide = kind in ("s64", "u64", "b64")
    if family in ("setp", "set", "min", "max", "selp", "slct", "testp") and kind != "f64":
        return _INT_64 if wide else _INT  # comparisons of floats run on the integer pipe
    if kind in ("f16", "f16x2", "bf16", "bf16x2"):
        return _FP16
    if kind == "f64":
        return _FP64
    if kind == "f32":
        return _FP32
    if family in ("mul", "mad", "mul24", "mad24"):
        if "hi" in parts:
            return _cost({"alu": 2}, int=6 if wide else 2)
        if wide and "wide" not in parts:
            return _cost({"alu": 3}, int=4)
        return _MULTIPLY
    if family in ("add", "sub"):
        return _INT  # a 64-bit add is two, and every other one folds into a multiply or an address
    return _INT_64 if wide else _INT
