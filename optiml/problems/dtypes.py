"""The CUDA text that makes one kernel source serve several dtypes.

A built-in kernel is written once, in terms of `T` (how an element is stored) and `A` (what is computed and
summed in); the line `//@ types` in its source stands for `prelude(dtype)`.
"""

from __future__ import annotations

from dataclasses import dataclass

from optiml.errors import InvalidInput


@dataclass(frozen=True, kw_only=True)
class CudaType:
    """How one dtype of the contract is spelled in CUDA C++.

    `up` and `down` are C++ expressions of one operand `v`; `down` rounds to nearest even.
    """

    element_bytes: int
    storage: str
    arithmetic: str
    header: str = ""
    up: str = "v"
    down: str = "v"


CUDA_TYPES = {
    "float64": CudaType(element_bytes=8, storage="double", arithmetic="double"),
    "float32": CudaType(element_bytes=4, storage="float", arithmetic="float"),
    "float16": CudaType(
        element_bytes=2, storage="__half", arithmetic="float", header="cuda_fp16.h",
        up="__half2float(v)", down="__float2half_rn(v)",
    ),
    "bfloat16": CudaType(
        element_bytes=2, storage="__nv_bfloat16", arithmetic="float", header="cuda_bf16.h",
        up="__bfloat162float(v)", down="__float2bfloat16_rn(v)",
    ),
    "float8_e4m3": CudaType(
        element_bytes=1, storage="__nv_fp8_e4m3", arithmetic="float", header="cuda_fp8.h",
        up="float(v)", down="__nv_fp8_e4m3(v)",
    ),
    "float8_e5m2": CudaType(
        element_bytes=1, storage="__nv_fp8_e5m2", arithmetic="float", header="cuda_fp8.h",
        up="float(v)", down="__nv_fp8_e5m2(v)",
    ),
    "int8": CudaType(element_bytes=1, storage="signed char", arithmetic="signed char"),
    "uint8": CudaType(element_bytes=1, storage="unsigned char", arithmetic="unsigned char"),
    "int16": CudaType(element_bytes=2, storage="short", arithmetic="short"),
    "uint16": CudaType(element_bytes=2, storage="unsigned short", arithmetic="unsigned short"),
    "int32": CudaType(element_bytes=4, storage="int", arithmetic="int"),
    "uint32": CudaType(element_bytes=4, storage="unsigned int", arithmetic="unsigned int"),
    "int64": CudaType(element_bytes=8, storage="long long", arithmetic="long long"),
    "bool": CudaType(element_bytes=1, storage="bool", arithmetic="bool"),
}  # fmt: skip


def prelude(dtype: str) -> str:
    """CUDA declarations for kernels over `dtype`; text that ends in a newline.

    They are `T` (storage), `A` (arithmetic: float for floats of 32 bits and fewer, double for float64, the
    type itself for integers), `A up(T)`, `T down(A)` (round to nearest), `Pack<N>` (N elements that are loaded
    and stored as one aligned vector), `ELEMENT_BYTES`, and `INFINITY` and `NAN` where the compiler lacks them.

    Raises:
        InvalidInput: the contract has no such dtype.
    """
    cuda = cuda_type(dtype)
    include = f"#include <{cuda.header}>\n" if cuda.header else ""
    return (
        f"{include}"
        f"typedef {cuda.storage} T;\n"
        f"typedef {cuda.arithmetic} A;\n"
        f"#define ELEMENT_BYTES {cuda.element_bytes}\n"
        f"__device__ __forceinline__ A up(T v) {{ return {cuda.up}; }}\n"
        f"__device__ __forceinline__ T down(A v) {{ return {cuda.down}; }}\n"
        "template <int N> struct alignas(sizeof(T) * N) Pack { T v[N]; };\n"
        "#ifndef INFINITY\n"
        "#define INFINITY __int_as_float(0x7f800000)\n"
        "#endif\n"
        "#ifndef NAN\n"
        "#define NAN __int_as_float(0x7fffffff)\n"
        "#endif\n"
    )


def cuda_type(dtype: str) -> CudaType:
    """The CUDA spelling of a dtype.

    Raises:
        InvalidInput: the contract has no such dtype.
    """
    if dtype not in CUDA_TYPES:
        raise InvalidInput(f"unknown dtype {dtype!r}: use one of {', '.join(CUDA_TYPES)}")
    return CUDA_TYPES[dtype]
