"""Kernels in Numba, and what writes their PTX beside this file: `pip install numba-cuda`, then run it."""

from __future__ import annotations

import re
from pathlib import Path

from numba import cuda, float32, int32


def saxpy(a, x, y):
    at = cuda.grid(1)
    if at < x.size:
        y[at] = a * x[at] + y[at]


def row_sums(x, out):
    part = cuda.shared.array(128, float32)
    row, t = cuda.blockIdx.x, cuda.threadIdx.x
    total = float32(0)
    for column in range(t, x.shape[1], 128):
        total += x[row, column]
    part[t] = total
    cuda.syncthreads()
    width = 64
    while width > 0:
        if t < width:
            part[t] += part[t + width]
        cuda.syncthreads()
        width //= 2
    if t == 0:
        out[row] = part[0]


def histogram(values, bins):
    at = cuda.grid(1)
    if at < values.size:
        cuda.atomic.add(bins, values[at] % bins.size, 1)


KERNELS = (
    (saxpy, (float32, float32[::1], float32[::1])),
    (row_sums, (float32[:, ::1], float32[::1])),
    (histogram, (int32[::1], int32[::1])),
)


def main() -> None:
    for kernel, signature in KERNELS:
        text, _ = cuda.compile_ptx(kernel, signature, cc=(8, 0), lineinfo=True)
        (mangled,) = re.findall(r"\.entry\s+(\w+)\(", text)
        text = text.replace(mangled, kernel.__name__)
        text = re.sub(r'(\.file\s+\d+\s+)"[^"]*"', rf'\1"{Path(__file__).name}"', text)
        Path(__file__).with_name(f"numba_{kernel.__name__}.ptx").write_text(text)


if __name__ == "__main__":
    main()
