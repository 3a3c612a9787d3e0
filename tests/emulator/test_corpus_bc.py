"""The rest of the corpus: half precision, tensor cores, CUB, cooperative groups, calls, printf, constants, atomics."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

Run = Callable[..., Any]
F32, F16, U16, U32, I32 = np.float32, np.float16, np.uint16, np.uint32, np.int32


@pytest.fixture(params=["compute_80", "compute_90"])
def b(corpus: Run, request: pytest.FixtureRequest) -> Run:
    return functools.partial(corpus, "b", arch=request.param)


@pytest.fixture
def c(corpus: Run) -> Run:
    return functools.partial(corpus, "c")


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


def zeros(*shape: int, dtype: Any = F32) -> Any:
    return np.zeros(shape, dtype)


def bf16(values: Any) -> Any:
    """Nearest-even bfloat16 of finite float32 values, as float32."""
    bits = np.asarray(values, F32).view(U32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(U32).view(F32)


def patterns(values: Any) -> Any:
    return (np.asarray(values, F32).view(U32) >> 16).astype(U16)


def test_packed_half_fma_and_max(b: Run) -> None:
    x, y = normal(1, 200).astype(F16), normal(2, 200).astype(F16)
    got = b("half2k", 1, 128, x, y, zeros(200, dtype=F16), 100).arrays[2]
    want = np.maximum((x.astype(float) * y + x).astype(F16), F16(0))
    assert np.array_equal(got, want)


def test_mixed_half_arithmetic(b: Run) -> None:
    x, y = normal(3, 100).astype(F16), normal(4, 100).astype(F16)
    got = b("halfmix", 1, 128, x, y, zeros(100, dtype=F16), 100).arrays[2]
    p = (x.astype(F32) * y.astype(F32) + F32(1)).astype(F16)
    want = p * x + np.exp(y.astype(float)).astype(F16)
    want = np.where(x > y, want + x, want)
    assert np.allclose(got.astype(float), want.astype(float), rtol=3e-3, atol=3e-3)


def test_bfloat_kernels(b: Run) -> None:
    x, y = bf16(normal(5, 100)), bf16(normal(6, 100))
    got = b("bf16k", 1, 128, patterns(x), patterns(y), zeros(100, dtype=U16), 100).arrays[2]
    want = bf16(bf16(x * y) + bf16(x * y))
    assert np.array_equal(got, patterns(want))
    got = b("bf162k", 1, 64, patterns(x), patterns(y), zeros(100, dtype=U16), 50).arrays[2]
    wide = x.astype(float) * y + x
    assert np.allclose((got.astype(U32) << 16).view(F32), wide, rtol=2.0**-8, atol=1e-6)


def test_wmma_matmul(b: Run) -> None:
    n = 48
    x, y = normal(7, n, n).astype(F16), normal(8, n, n).astype(F16)
    got = b("wmmak", (3, 3), 32, x, y, zeros(n, n), n).arrays[2]
    assert np.allclose(got, x.astype(float) @ y.astype(float), atol=1e-4)


def test_mma_of_16_by_8_by_16(b: Run) -> None:
    x, y = normal(9, 16, 16).astype(F16), normal(10, 8, 16).astype(F16)  # the second operand is stored by column
    got = b("mmak", 1, 32, x, y, zeros(16, 8)).arrays[2]
    assert np.allclose(got, x.astype(float) @ y.astype(float).T, atol=1e-5)


def test_ldmatrix(b: Run) -> None:
    x = np.arange(256, dtype=F16)
    got = b("ldmat", 1, 32, x, zeros(128, dtype=U32)).arrays[1].view(F16).reshape(32, 4, 2)
    tile = x.reshape(16, 16)
    for lane in range(32):
        row, column = lane // 4, lane % 4 * 2
        want = [tile[row, column : column + 2], tile[row + 8, column : column + 2],
                tile[row, column + 8 : column + 10], tile[row + 8, column + 8 : column + 10]]  # fmt: skip
        assert np.array_equal(got[lane], want)


def test_asynchronous_copies(b: Run) -> None:
    x = normal(11, 2, 128, 4)
    assert np.array_equal(b("cpasync", 2, 128, x, zeros(2, 128, 4)).arrays[1], x[:, ::-1])


def test_struct_parameters_and_constant_memory(c: Run) -> None:
    x = normal(12, 100)

    def struct_bytes(machine: Any, placed: Any) -> bytes:
        addresses = []
        for value in (x, zeros(100)):
            address = machine.allocate(value.nbytes)
            machine.memory(address)[:] = value.view(np.uint8)
            placed.append((address, value))
            addresses.append(address)
        return struct.pack("<ifQQ", 100, 3.0, *addresses)

    assert np.array_equal(c("k_struct", 1, 128, struct_bytes).arrays[1], x * F32(3))


def test_cub_block_reduce_and_scan(c: Run) -> None:
    x = normal(13, 256)
    assert np.isclose(c("k_cub", 1, 256, x, zeros(1)).arrays[1][0], x.sum(dtype=float), atol=1e-4)
    i = np.random.default_rng(14).integers(-9, 9, 256).astype(I32)
    assert np.array_equal(c("k_cubscan", 1, 256, i, zeros(256, dtype=I32)).arrays[1], np.cumsum(i) - i)


def test_cooperative_group_tiles(c: Run) -> None:
    x = normal(15, 128)
    assert np.isclose(c("k_cg", 1, 128, x, zeros(1)).arrays[1][0], x.sum(dtype=float), atol=1e-4)


@pytest.mark.parametrize("n", [0, 1, 7])
def test_calls_of_device_functions(c: Run, n: int) -> None:
    x = normal(16, 64)
    want = x.copy()
    for _ in range(n):
        want = (want.astype(float) * x + 1).astype(F32)
    assert np.array_equal(c("k_call", 1, 64, x, zeros(64), n).arrays[1], want)


def test_switch(c: Run) -> None:
    x = np.arange(-2, 62, dtype=I32)
    cases: dict[int, Callable[[int, int], int]] = {
        0: lambda v, t: 7, 1: lambda v, t: 3, 2: lambda v, t: 2 ^ 99, 3: lambda v, t: -3, 4: lambda v, t: 16,
        5: lambda v, t: t, 6: lambda v, t: 39, 7: lambda v, t: int(f"{7:032b}"[::-1], 2) - (1 << 32),
    }  # fmt: skip
    want = [cases[v](v, t) if v in cases else v for t, v in enumerate(x.tolist())]
    assert np.array_equal(c("k_switch", 1, 64, x, zeros(64, dtype=I32)).arrays[1], want)


def test_printf(c: Run) -> None:
    assert c("k_printf", 2, 32, np.array([-42], I32)[:1] * -1).result.printf == "42\n42\n"


def test_many_math_functions(c: Run) -> None:
    x = np.abs(normal(17, 32)) * 4 + F32(0.1)
    got = c("k_math", 1, 32, x, zeros(32)).arrays[1]
    v = x.astype(float)
    want = np.sin(v) + np.log(v) + v / 3 + np.cos(v) + np.log2(v) + np.exp2(v) + np.cbrt(v) + np.fmod(v, 3)
    want += np.floor(v + 0.5) + np.floor(v) + np.ceil(v) + np.trunc(v) + np.abs(v) + 1 / np.sqrt(v) + 1 / v
    want += np.sqrt(v) + np.tanh(v) + np.log1p(v) + np.expm1(v) + np.arctan2(v, 2) + np.clip(v, 0, 1)
    assert np.allclose(got, want, rtol=2e-6)


def test_tanh_instruction(c: Run) -> None:
    assert np.isclose(c("k_tanh", 1, 1, np.array([0.7], F32), zeros(1)).arrays[1][0], np.tanh(0.7), atol=1e-6)


def test_bit_intrinsics(c: Run) -> None:
    v, w = 0xDEADBEEF, 0x01234569
    old = np.array([0, 0x0F0F0F0F], U32)
    got = c("k_bits", 1, 1, np.array([v, w], U32), old).arrays[1][0]
    signed = lambda x: x - (1 << 32) if x & 0x80000000 else x  # noqa: E731
    m = 0xFFFFFFFF
    add4 = sum((((v >> s & 255) + (w >> s & 255)) & 255) << s for s in (0, 8, 16, 24))
    low24 = lambda x: (x & 0xFFFFFF) - (1 << 24 if x & 0x800000 else 0)  # noqa: E731
    want = ((w << 32 | v) << 5 >> 32) + v + bin(v).count("1") + add4 + abs(signed(v) - signed(w)) + 3
    want += ((v ^ w) & 0x0F0F0F0F | ~v & m) + (v * w >> 32) + low24(v) * low24(w) + (signed(v) + signed(w) >> 1)
    want += v >> (w & 7) & 15
    assert int(got) == want & m


def test_atomics_of_many_types(c: Run) -> None:
    d = np.array([2.5])
    h = np.array([1, 2, 3, 4], F16)
    bf = patterns(np.array([1.5, 2.0], F32))
    u = np.array([3], np.uint64)
    f = np.array([1.0], F32)
    got = c("k_atom", 1, 1, d, h, bf, u, f).arrays
    assert got[0][0] == 3.5
    assert got[1].tolist() == [4, 6, 3, 4]
    assert got[2][0] == patterns(np.array([3.5], F32))[0]
    assert got[3][0] == 5
    word = int(f.view(U32)[0]) & 3
    word = 0 if word >= 9 else word + 1
    bits = (np.array([word], U32).view(F32) + F32(1)).view(I32)
    assert got[4].view(I32)[0] == min(int(bits[0]), 3)


@pytest.mark.parametrize("arch", ["compute_80", "compute_90"])
def test_eight_bit_floats(corpus: Run, arch: str) -> None:
    x = np.concatenate([normal(18, 30), [500, -0.001]]).astype(F32)
    got = corpus("c", "k_fp8", 1, 32, x, zeros(32, dtype=np.uint8), zeros(32), arch=arch).arrays
    exact = np.clip(x.astype(float), -448, 448)
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.abs(exact))), -6) - 3)
    assert np.array_equal(got[2], np.rint(exact / step) * step)


def test_packing_pairs_of_floats(c: Run) -> None:
    x = normal(19, 64)
    _, y, z = c("k_bfpack", 1, 32, x, zeros(64, dtype=U16), zeros(64, dtype=F16)).arrays
    assert np.array_equal(y, patterns(bf16(x)))
    assert np.array_equal(z, x.astype(F16))


def test_uninitialised_shared_memory_is_not_zero(c: Run) -> None:
    got = c("k_uninit", 1, 64, zeros(64), clean=False).arrays[0]
    assert (got[:32] == 1).all()
    assert np.isnan(got[32:]).all()


def test_cache_operators(c: Run) -> None:
    x = np.arange(1, 33, dtype=F32)
    assert np.array_equal(c("k_ldcg", 1, 32, x, zeros(34)).arrays[1][:1], [3])


def test_clock_votes_and_fences(c: Run) -> None:
    clock, z = c("k_misc", 1, 32, np.zeros(1, np.int64), zeros(8, dtype=I32)).arrays
    assert clock[0] >= 0
    assert z[:5].tolist() == [0, -1, 0, 0, 0]


def test_swish_in_half_precision(c: Run) -> None:
    x = normal(20, 100).astype(F16)
    got = c("k_swish", 1, 128, x, zeros(100, dtype=F16), 100).arrays[1]
    v = x.astype(float)
    assert np.allclose(got.astype(float), v / (1 + np.exp(-v)), rtol=1e-3)


def test_welford(c: Run) -> None:
    x = normal(21, 500)
    got = c("k_welford", 1, 32, x, zeros(2), 500).arrays[1]
    assert np.allclose(got, [x.mean(dtype=float), x.var(dtype=float)], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("n", [0, 1])
def test_pointers_to_shared_or_global_memory(c: Run, n: int) -> None:
    x = normal(22, 32)
    # with n = 0 lanes overwrite what others have yet to read
    got = c("k_generic", 1, 32, x, zeros(32), n, clean=bool(n)).arrays[1]
    assert np.array_equal(got, x[::-1]) if n else np.array_equal(np.sort(got)[-1:], [x.max()])
