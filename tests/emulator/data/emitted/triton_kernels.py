"""Kernels in Triton, and what writes their PTX beside this file: `pip install triton`, then run it without a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def add_rows(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def softmax_rows(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    value = tl.load(x + row * columns + at, mask=inside, other=-float("inf"))
    value = tl.exp(value - tl.max(value, axis=0))
    tl.store(out + row * columns + at, value / tl.sum(value, axis=0), mask=inside)


@triton.jit
def matmul_f32(a, b, c, n, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, n, BLOCK):
        inner = k + tl.arange(0, BLOCK)
        left = tl.load(a + rows[:, None] * n + inner[None, :])
        right = tl.load(b + inner[:, None] * n + columns[None, :])
        total += tl.dot(left, right, input_precision="ieee")
    tl.store(c + rows[:, None] * n + columns[None, :], total)


@triton.jit
def matmul_f16(a, b, c, n, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, n, BLOCK):
        inner = k + tl.arange(0, BLOCK)
        left = tl.load(a + rows[:, None] * n + inner[None, :])
        right = tl.load(b + inner[:, None] * n + columns[None, :])
        total += tl.dot(left, right)
    tl.store(c + rows[:, None] * n + columns[None, :], total)


@triton.jit
def sum_all(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out, tl.sum(tl.load(x + at, mask=at < n, other=0.0), axis=0))


KERNELS = (
    (add_rows, {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}, 1024),
    (softmax_rows, {"x": "*fp32", "out": "*fp32", "columns": "i32"}, 1024),
    (matmul_f32, {"a": "*fp32", "b": "*fp32", "c": "*fp32", "n": "i32"}, 32),
    (matmul_f16, {"a": "*fp16", "b": "*fp16", "c": "*fp32", "n": "i32"}, 32),
    (sum_all, {"x": "*fp32", "out": "*fp32", "n": "i32"}, 1024),
)


def main() -> None:
    for kernel, signature, block in KERNELS:
        # arrays start at multiples of 16 bytes; sizes may be anything
        kinds = list(signature.values())
        attributes = {(k,): [["tt.divisibility", 16]] for k in range(len(kinds)) if kinds[k].startswith("*")}
        source = ASTSource(kernel, {**signature, "BLOCK": "constexpr"}, constexprs={"BLOCK": block}, attrs=attributes)
        built = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": 4})
        text = re.sub(r'(\.file\s+\d+\s+)"[^"]*"(\s*"[^"]*")?', rf'\1"{Path(__file__).name}"', built.asm["ptx"])
        text = text.split("\t.section\t.debug")[0]  # debugging tables hold folder names, and the engine needs none
        text = f"// launch with {built.metadata.shared} bytes of dynamic shared memory\n" + text.lstrip()
        Path(__file__).with_name(f"triton_{kernel.__name__}.ptx").write_text(text)


if __name__ == "__main__":
    main()
