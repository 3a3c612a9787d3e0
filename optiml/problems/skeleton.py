"""A first draft of the Problem that a kernel's parameters suggest, for a person to complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "__half": "float16",
    "__nv_bfloat16": "bfloat16",
    "nv_bfloat16": "bfloat16",
    "char": "int8",
    "signed char": "int8",
    "int8_t": "int8",
    "unsigned char": "uint8",
    "uint8_t": "uint8",
    "short": "int16",
    "int16_t": "int16",
    "unsigned short": "uint16",
    "uint16_t": "uint16",
    "int": "int32",
    "int32_t": "int32",
    "unsigned": "uint32",
    "unsigned int": "uint32",
    "uint32_t": "uint32",
    "long long": "int64",
    "int64_t": "int64",
    "bool": "bool",
}
_SIZES = ("int", "unsigned", "unsigned int", "int32_t", "uint32_t", "size_t", "long long", "int64_t")
_QUALIFIERS = ("__restrict__", "__restrict", "restrict", "volatile")
EXAMPLE_SIZE = 1024


def dtype_of(text: str) -> str | None:
    """The dtype of what a C++ type names or points to; None where it is no element type."""
    words = [word for word in text.replace("*", " ").split() if word not in (*_QUALIFIERS, "const")]
    return _DTYPES.get(" ".join(words))


def problem_skeleton(name: str, parameters: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Fields of a Problem: pointers to const are inputs, other pointers outputs, integers axes, the rest scalars.

    Args:
        name: of the kernel.
        parameters: (type as written, name) of each parameter.

    Returns:
        A Problem in JSON form whose shapes and reference are guesses to be corrected: every array has the shape of
        all axes, and the reference raises until it is written.
    """
    axes: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    for text, parameter in parameters:
        words = [word for word in text.replace("*", " * ").split() if word not in _QUALIFIERS]
        constant, base = "const" in words, " ".join(word for word in words if word not in ("const", "*"))
        dtype = _DTYPES.get(base, "float32")
        if "*" in words:
            (inputs if constant else outputs)[parameter] = {"dtype": dtype, "shape": []}
        elif base in _SIZES:
            axes[parameter] = {"type": "var", "min": 1}
        else:
            inputs[parameter] = {"dtype": dtype, "shape": None}
    axes = axes or {"n": {"type": "var", "min": 1}}
    for tensor in (*inputs.values(), *outputs.values()):
        if tensor["shape"] is not None:
            tensor["shape"] = list(axes)
    arguments = ", ".join((*inputs, *axes))
    sizes: dict[str, Any] = {"axes": dict.fromkeys(axes, EXAMPLE_SIZE)}
    scalars = {parameter: 1 for parameter, tensor in inputs.items() if tensor["shape"] is None}
    if scalars:
        sizes["scalars"] = scalars
    return {
        "name": name,
        "description": f"what {name} computes",
        "axes": axes,
        "inputs": inputs,
        "outputs": outputs,
        "reference": f"def run({arguments}):\n    raise NotImplementedError('return {', '.join(outputs)} with numpy')",
        "workloads": [sizes],
        "bench": [sizes],
    }
