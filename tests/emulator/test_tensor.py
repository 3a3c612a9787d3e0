"""Matrix instructions with the fragment layouts of the PTX ISA, written out element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from launching import compiled, launch, snippet

from optiml.errors import KernelFault, Unsupported
from optiml.ptx import parse

F16, F32, U32, I32 = np.float16, np.float32, np.uint32, np.int32
Place = Callable[[int, int], tuple[int, int]]


def a_16_bit(lane: int, i: int) -> tuple[int, int]:
    row = lane // 4 + (8 if i in (2, 3, 6, 7) else 0)
    return row, lane % 4 * 2 + (i & 1) + (8 if i >= 4 else 0)


def b_16_bit(lane: int, i: int) -> tuple[int, int]:
    return lane % 4 * 2 + (i & 1) + (8 if i >= 2 else 0), lane // 4


def c_16_by_8(lane: int, i: int) -> tuple[int, int]:
    return lane // 4 + (8 if i >= 2 else 0), lane % 4 * 2 + (i & 1)


def a_tf32(lane: int, i: int) -> tuple[int, int]:
    return lane // 4 + 8 * (i & 1), lane % 4 + (4 if i >= 2 else 0)


def b_tf32(lane: int, i: int) -> tuple[int, int]:
    return lane % 4 + 4 * i, lane // 4


def a_8_bit(lane: int, i: int) -> tuple[int, int]:
    row = lane // 4 + (8 if 4 <= i < 8 or i >= 12 else 0)
    return row, lane % 4 * 4 + (i & 3) + (16 if i >= 8 else 0)


def b_8_bit(lane: int, i: int) -> tuple[int, int]:
    return lane % 4 * 4 + (i & 3) + (16 if i >= 4 else 0), lane // 4


def dealt(matrix: Any, place: Place, each: int) -> Any:
    """Registers of 32 lanes that hold a matrix: `[32, words]` uint32."""
    out = np.empty((32, each), matrix.dtype)
    for lane in range(32):
        for i in range(each):
            out[lane, i] = matrix[place(lane, i)]
    return out.view(U32)


def run_mma(opcode: str, a: Any, b: Any, c: Any, places: tuple[Place, Place, Place], out: Any) -> Any:
    """Run one mma on matrices and put its result together again."""
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    counts = (m * k // 32, k * n // 32, m * n // 32)
    fragments = [dealt(x, p, e) for x, p, e in zip((a, b, c), places, counts, strict=True)]
    inputs = [np.ascontiguousarray(f[:, i]) for f in fragments for i in range(f.shape[1])]
    names = iter(range(len(inputs)))
    lists = ["{" + ", ".join(f"%x{next(names)}" for _ in range(f.shape[1])) + "}" for f in fragments]
    words = fragments[2].shape[1]
    rows = []
    for word in range(words):
        targets = "{" + ", ".join(f"%r{i}" for i in range(words)) + "}"
        body = f"{opcode} {targets}, {lists[0]}, {lists[1]}, {lists[2]}; mov.b32 %y, %r{word};"
        rows.append(launch(parse(snippet(body, inputs, U32)), "k", 1, 32, *inputs, np.zeros(32, U32)).arrays[-1])
    result = np.stack(rows, axis=1).view(out)
    matrix = np.empty((m, n), out)
    for lane in range(32):
        for i in range(counts[2]):
            matrix[places[2](lane, i)] = result[lane, i]
    return matrix


def random_matrices(seed: int, m: int, n: int, k: int, dtype: Any) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)
    return rng.integers(-128, 128, (m, k)).astype(dtype), rng.integers(-128, 128, (k, n)).astype(dtype)


@pytest.mark.parametrize("k", [8, 16])
@pytest.mark.parametrize("out", [F32, F16])
def test_half_products(k: int, out: Any) -> None:
    a, b = random_matrices(1, 16, 8, k, F16)
    c = np.random.default_rng(2).standard_normal((16, 8)).astype(out)
    name = "f32" if out is F32 else "f16"
    opcode = f"mma.sync.aligned.m16n8k{k}.row.col.{name}.f16.f16.{name}"
    got = run_mma(opcode, a, b, c, (a_16_bit, b_16_bit, c_16_by_8), out)
    want = a.astype(float) @ b.astype(float) + c
    assert np.allclose(got.astype(float), want, atol=1e-4 if out is F32 else 2e-2)


def test_bfloat_products() -> None:
    a, b = random_matrices(3, 16, 8, 16, F32)
    bits = [(x.view(U32) >> 16).astype(np.uint16) for x in (a, b)]
    wide = [(x.astype(U32) << 16).view(F32).astype(float) for x in bits]
    c = np.zeros((16, 8), F32)
    got = run_mma("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", *bits, c, (a_16_bit, b_16_bit, c_16_by_8), F32)
    assert np.allclose(got, wide[0] @ wide[1], atol=1e-4)


def test_tf32_products() -> None:
    a, b = random_matrices(4, 16, 8, 8, F32)
    c = np.ones((16, 8), F32)
    got = run_mma("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", a, b, c, (a_tf32, b_tf32, c_16_by_8), F32)
    assert np.allclose(got, a.astype(float) @ b + 1, atol=2e-2)


@pytest.mark.parametrize("k", [16, 32])
def test_integer_products_are_exact(k: int) -> None:
    a, b = random_matrices(5, 16, 8, k, np.int8)
    c = np.random.default_rng(6).integers(-1000, 1000, (16, 8)).astype(I32)
    got = run_mma(f"mma.sync.aligned.m16n8k{k}.row.col.s32.s8.s8.s32", a, b, c, (a_8_bit, b_8_bit, c_16_by_8), I32)
    assert np.array_equal(got, a.astype(int) @ b.astype(int) + c)


def test_transposed_loads_and_stores_of_matrices() -> None:
    body = """.shared .align 16 .b8 s[512]; mov.u32 %r1, s; mad.lo.u32 %r2, %tid, 4, %r1; st.shared.u32 [%r2], %x0;
    bar.warp.sync -1; and.b32 %r3, %tid, 7; mad.lo.u32 %r3, %r3, 16, %r1;
    ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%y}, [%r3];"""
    x = np.arange(64, dtype=np.uint16)
    got = launch(parse(snippet(body, [x.view(U32)], U32)), "k", 1, 32, x.view(U32), np.zeros(32, U32)).arrays[1]
    assert np.array_equal(got.view(np.uint16).reshape(8, 8), x.reshape(8, 8).T)
    moved = launch(
        parse(snippet("movmatrix.sync.aligned.m8n8.trans.b16 %y, %x0;", [x.view(U32)], U32)), "k", 1, 32, x.view(U32),
        np.zeros(32, U32),
    ).arrays[1]  # fmt: skip
    assert np.array_equal(moved, got)
    body = (
        body.split("ldmatrix")[0]
        + """stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%r3], {%x0};
    bar.warp.sync -1; ld.shared.u32 %y, [%r2];"""
    )
    stored = launch(parse(snippet(body, [x.view(U32)], U32)), "k", 1, 32, x.view(U32), np.zeros(32, U32)).arrays[1]
    assert np.array_equal(stored, got)


@pytest.mark.parametrize(("layout_a", "layout_b"), [("row", "col"), ("col", "row"), ("col", "col")])
@pytest.mark.parametrize("accumulator", ["float", "half"])
def test_wmma_in_every_layout_through_shared_memory(layout_a: str, layout_b: str, accumulator: str) -> None:
    source = f"""#include <mma.h>
    using namespace nvcuda;
    extern "C" __global__ void k(const half* A, const half* B, {accumulator}* C) {{
      __shared__ half s[256]; for (int i = threadIdx.x; i < 256; i += 32) s[i] = A[i]; __syncwarp();
      wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::{layout_a}_major> a;
      wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::{layout_b}_major> b;
      wmma::fragment<wmma::accumulator, 16, 16, 16, {accumulator}> c, d;
      wmma::fill_fragment(c, ({accumulator})0.5f);
      wmma::load_matrix_sync(a, s, 16); wmma::load_matrix_sync(b, B, 16); wmma::mma_sync(d, a, b, c);
      for (int i = 0; i < d.num_elements; i++) d.x[i] = d.x[i] * ({accumulator})2.0f;
      wmma::store_matrix_sync(C, d, 16, wmma::mem_col_major); }}"""
    rng = np.random.default_rng(7)
    a, b = (rng.standard_normal((16, 16)).astype(F16) for _ in range(2))
    out = F32 if accumulator == "float" else F16
    got = launch(parse(compiled(source)), "k", 1, 32, a, b, np.zeros((16, 16), out), count=True)
    left = a.astype(float) if layout_a == "row" else a.astype(float).T
    right = b.astype(float) if layout_b == "row" else b.astype(float).T
    want = 2 * (left @ right + 0.5)
    assert np.allclose(got.arrays[2].T.astype(float), want, atol=1e-4 if out is F32 else 3e-2)
    assert got.counters.global_load.sectors == 2 * 256 * 2 // 32
    assert got.counters.global_store.sectors == 256 * np.dtype(out).itemsize // 32


def test_a_product_in_part_of_a_warp_is_a_fault() -> None:
    body = """mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%r0, %r1, %r2, %y}, {%x0, %x0}, {%x0},
    {%x0, %x0, %x0, %x0};"""
    x = np.zeros(16, U32)
    with pytest.raises(KernelFault) as raised:
        launch(parse(snippet(body, [x], U32)), "k", 1, 16, x, x)
    assert raised.value.fault.kind == "illegal"


def test_shapes_that_do_not_exist_are_refused() -> None:
    body = "mma.sync.aligned.m16n8k4.row.col.f32.f16.f16.f32 {%r0, %r1, %r2, %y}, {%x0}, {%x0}, {%x0, %x0, %x0, %x0};"
    x = np.zeros(32, U32)
    with pytest.raises(Unsupported):
        launch(parse(snippet(body, [x], U32)), "k", 1, 32, x, x)
