"""PTX that Triton and Numba wrote (see data/emitted): right, without alarms, and natively."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from launching import CHECKS, DATA, launch, launch_once

from optiml.errors import InvalidInput, KernelFault
from optiml.ptx import Module, engine_name, parse

F16, F32, I32 = np.float16, np.float32, np.int32
RNG = np.random.default_rng(5)
X = RNG.standard_normal((40, 160)).astype(F32)
SQUARE = [RNG.standard_normal((64, 64)).astype(F32) for _ in range(2)]


def emitted(name: str) -> Module:
    return parse((DATA / "emitted" / f"{name}.ptx").read_text())


def shared_bytes(name: str) -> int:
    """Dynamic shared memory that the first line asks for."""
    first = (DATA / "emitted" / f"{name}.ptx").read_text().splitlines()[0]
    found = re.match(r"// launch with (\d+) bytes", first)
    return int(found[1]) if found else 0


def run(name: str, grid: Any, block: int, *args: Any, **options: Any) -> list[np.ndarray[Any, Any]]:
    module = emitted(name)
    (kernel,) = module.kernels
    scratch = [0] * (len(module.kernels[kernel].params) - len(args))  # Triton's last parameters may be null
    launched = launch(module, kernel, grid, block, *args, *scratch, shared_bytes=shared_bytes(name), **options)
    assert launched.result.engine == engine_name()
    return launched.arrays


def described(array: np.ndarray[Any, Any]) -> list[Any]:
    """An array as Numba passes it: two pointers it leaves null, sizes, address, shape, strides."""
    return [0, 0, array.size, array.itemsize, array, *array.shape, *array.strides]


def test_triton_adds() -> None:
    x = X.reshape(-1)
    assert np.array_equal(run("triton_add_rows", 7, 128, x, x[::-1].copy(), np.zeros_like(x), x.size)[2], x + x[::-1])


def test_triton_softmax() -> None:
    want = np.exp(X - X.max(axis=1, keepdims=True))
    want /= want.sum(axis=1, keepdims=True)
    got = run("triton_softmax_rows", 40, 128, X, np.zeros_like(X), 160)[1]
    assert np.allclose(got, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("name", "kind", "tolerance"), [("f32", F32, 1e-4), ("f16", F16, 1e-3)])
def test_triton_matmul(name: str, kind: Any, tolerance: float) -> None:
    a, b = (m.astype(kind) for m in SQUARE)
    got = run(f"triton_matmul_{name}", (2, 2), 128, a, b, np.zeros((64, 64), F32), 64)[2]
    assert np.allclose(got, a.astype(F32) @ b.astype(F32), atol=tolerance)


def test_triton_sums_with_atomics() -> None:
    x = X.reshape(-1)
    got = run("triton_sum_all", 7, 128, x, np.zeros(1, F32), x.size, same=False)[1]
    assert np.allclose(got, x.sum(), rtol=1e-4)


def test_numba_saxpy() -> None:
    x = X.reshape(-1)
    y = np.ones_like(x)
    got = run("numba_saxpy", 50, 128, 2.5, *described(x), *described(y))[1]
    assert np.allclose(got, F32(2.5) * x + y, rtol=1e-5, atol=1e-6)


def test_numba_sums_rows_through_shared_memory() -> None:
    got = run("numba_row_sums", 40, 128, *described(X), *described(np.zeros(40, F32)))[1]
    assert np.allclose(got, X.sum(axis=1), atol=1e-4)


def test_numba_histogram() -> None:
    values = RNG.integers(0, 1000, 999).astype(I32)
    got = run("numba_histogram", 8, 128, *described(values), *described(np.zeros(13, I32)))[1]
    assert np.array_equal(got, np.bincount(values % 13, minlength=13))


@pytest.mark.skipif(engine_name() != "native", reason="the native engine was not built")
def test_a_barrier_taken_out_of_what_triton_wrote_is_a_race() -> None:
    text = (DATA / "emitted" / "triton_softmax_rows.ptx").read_text()
    module = parse(text.replace("bar.sync", "// bar.sync", 1))
    with pytest.raises(KernelFault) as raised:
        launch_once(module, "softmax_rows", 40, 128, X, np.zeros_like(X), 160, 0, 0, shared_bytes=16, checks=CHECKS)
    assert raised.value.fault.kind == "race"
    assert raised.value.fault.line is not None


def test_a_block_of_another_size_than_the_kernel_requires_is_refused() -> None:
    x = X.reshape(-1)
    with pytest.raises(InvalidInput, match="128"):
        launch_once(emitted("triton_add_rows"), "add_rows", 7, 64, x, x, x, x.size, 0, 0)
