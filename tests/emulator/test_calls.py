"""Device functions, by-value structs, dynamic indexing of parameters, printf formats."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from launching import compiled, launch

from optiml.errors import Unsupported
from optiml.ptx import Module, parse

SOURCE = """
extern "C" __device__ int printf(const char*, ...);
struct S { int a[16]; float f; };
extern "C" __global__ void indexed(const __grid_constant__ S s, const int* i, int* y) {
  y[threadIdx.x] = s.a[i[threadIdx.x]]; }
extern "C" __global__ void copied(S s, const int* i, int* y) { y[threadIdx.x] = s.a[i[threadIdx.x]]; }
__device__ __noinline__ void pick(const S* s, int i, int* out) { *out = s->a[i & 15]; }
extern "C" __global__ void pointed(const __grid_constant__ S s, const int* i, int* y) {
  int v; pick(&s, i[threadIdx.x], &v); y[threadIdx.x] = v; }
__device__ __noinline__ S make(int i) { S s; for (int k = 0; k < 16; k++) s.a[k] = i * k; s.f = 1; return s; }
extern "C" __global__ void returned(const int* i, int* y) {
  S s = make(i[threadIdx.x]); int t = 0; for (int k = 0; k < 16; k++) t += s.a[k]; y[threadIdx.x] = t; }
__device__ __noinline__ int early(int x) { if (x < 4) return -x; for (int k = 0; k < 5; k++) x += k & 1; return x; }
extern "C" __global__ void divergent(const int* i, int* y) {
  int v = i[threadIdx.x]; if (v & 1) v = early(v); y[threadIdx.x] = early(v + 1); }
__device__ int fibonacci(int n) { return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2); }
extern "C" __global__ void recursive(const int* i, int* y) { y[threadIdx.x] = fibonacci(i[threadIdx.x]); }
extern "C" __global__ void printing() {
  printf("%5.2f|%-4d|%s|%llx|%c|%%|%u\\n", 1.5f + threadIdx.x, -3, "hi", 0x123456789abULL, 'q', 7u); }
extern "C" __global__ void verbose() { for (int i = 0; i < 1000; i++) printf("%0100d", i); }
"""


@cache
def module() -> Module:
    return parse(compiled(SOURCE))


def indices() -> Any:
    return np.random.default_rng(0).integers(0, 16, 64).astype(np.int32)


def out() -> Any:
    return np.zeros(64, np.int32)


@pytest.mark.parametrize("kernel", ["indexed", "copied", "pointed"])
def test_structs_by_value_may_be_indexed_by_each_thread(kernel: str) -> None:
    content = np.arange(100, 117, dtype=np.int32).tobytes()
    assert np.array_equal(launch(module(), kernel, 1, 64, content, indices(), out()).arrays[1], indices() + 100)


def test_functions_return_structs() -> None:
    assert np.array_equal(launch(module(), "returned", 1, 64, indices(), out()).arrays[1], indices() * 120)


def test_functions_return_early_for_some_threads() -> None:
    def early(x: int) -> int:
        return -x if x < 4 else x + 2

    small = np.array([0, 1, 2, 3, 4, 5, 9, 12, -5, -6] * 6, np.int32)
    want = [early((early(v) if v & 1 else v) + 1) for v in small.tolist()]
    assert np.array_equal(launch(module(), "divergent", 1, 60, small, np.zeros(60, np.int32)).arrays[1], want)


def test_recursion_is_refused() -> None:
    with pytest.raises(Unsupported, match="recursive call"):
        launch(module(), "recursive", 1, 1, indices(), out())


def test_printf_formats() -> None:
    line = "{:5.2f}|-3  |hi|123456789ab|q|%|7\n"
    assert launch(module(), "printing", 1, 2).result.printf == line.format(1.5) + line.format(2.5)


def test_printf_output_is_capped() -> None:
    assert len(launch(module(), "verbose", 1, 1).result.printf) == 64 * 1024
