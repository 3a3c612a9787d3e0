"""The sound kernels of the corpus against independent numpy computations, for two architectures."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from launching import compiled, launch

from optiml.ptx import parse

RNG = np.random.default_rng
Run = Callable[..., Any]


@pytest.fixture(params=["compute_80", "compute_90"])
def run(corpus: Run, request: pytest.FixtureRequest) -> Run:
    return functools.partial(corpus, "a", arch=request.param)


def normal(seed: int, *shape: int) -> Any:
    return RNG(seed).standard_normal(shape).astype(np.float32)


def empty(*shape: int, dtype: Any = np.float32) -> Any:
    return np.full(shape, 77, dtype)


def test_vadd(run: Run) -> None:
    a, b = normal(1, 1000), normal(2, 1000)
    assert np.array_equal(run("vadd", 4, 256, a, b, empty(1000), 1000).arrays[2], a + b)


def test_vadd_leaves_what_lies_beyond_n(run: Run) -> None:
    a, b = normal(1, 300), normal(2, 300)
    c = run("vadd", 2, 256, a, b, empty(300), 290).arrays[2]
    assert np.array_equal(c[:290], (a + b)[:290])
    assert (c[290:] == 77).all()


@pytest.mark.parametrize("n", [1, 37, 64])
def test_matmul_naive(run: Run, n: int) -> None:
    a, b = normal(1, n, n), normal(2, n, n)
    grid = -(-n // 16)
    got = run("matmul_naive", (grid, grid), (16, 16), a, b, empty(n, n), n).arrays[2]
    assert np.allclose(got, a.astype(float) @ b, atol=1e-4)


def test_matmul_tiled(run: Run) -> None:
    a, b = normal(1, 64, 64), normal(2, 64, 64)
    got = run("matmul_tiled", (4, 4), (16, 16), a, b, empty(64, 64), 64).arrays[2]
    assert np.allclose(got, a.astype(float) @ b, atol=1e-4)


def test_matmul_register_tiled(run: Run) -> None:
    a, b = normal(1, 128, 128), normal(2, 128, 128)
    got = run("regtile", (2, 2), 256, a, b, empty(128, 128), 128).arrays[2]
    assert np.allclose(got, a.astype(float) @ b, atol=1e-3)


def test_block_reduce(run: Run) -> None:
    x = normal(3, 5000)
    got = run("block_reduce", 4, 256, x, empty(4), 5000).arrays[1]
    lanes = np.resize(np.arange(5000) // 256 % 4, 5000)
    want = [x[lanes == b].sum(dtype=float) for b in range(4)]
    assert np.allclose(got, want, atol=1e-3)


@pytest.mark.parametrize("columns", [1, 100, 1000])
def test_softmax(run: Run, columns: int) -> None:
    x = normal(4, 5, columns) * 5
    got = run("softmax", 5, 256, x, empty(5, columns), columns).arrays[1]
    e = np.exp(x.astype(float) - x.max(axis=1, keepdims=True))
    assert np.allclose(got, e / e.sum(axis=1, keepdims=True), rtol=3e-6)


def test_divergent_collatz_is_exact(run: Run) -> None:
    x = RNG(5).integers(1, 10000, 500).astype(np.int32)
    want = []
    for i, start in enumerate(x):
        v, c = int(start), 0
        while v != 1 and c < 1000:
            v = 3 * v + 1 if v & 1 else v >> 1
            c += 1
        want.append(c if c % 3 == 0 else -c if c % 3 == 1 else sum(k * c for k in range(i & 7)))
    assert np.array_equal(run("diverge", 4, 128, x, empty(500, dtype=np.int32), 500).arrays[1], want)


def test_relu_on_vectors_of_four(run: Run) -> None:
    x = normal(6, 400)
    x[:3] = [-0.0, np.nan, np.inf]
    got = run("relu4", 1, 128, x, empty(400), 100).arrays[1]
    assert np.array_equal(got, np.fmax(x, 0))


def test_histogram_with_shared_atomics(run: Run) -> None:
    x = RNG(7).integers(0, 256, 3000).astype(np.uint8)
    got = run("hist", 3, 256, x, np.zeros(256, np.uint32), 3000).arrays[1]
    assert np.array_equal(got, np.bincount(x, minlength=256))


@pytest.mark.parametrize("kernel", ["transp", "transp_pad"])
def test_transpose(run: Run, kernel: str) -> None:
    x = normal(8, 64, 64)
    assert np.array_equal(run(kernel, (2, 2), (32, 8), x, empty(64, 64), 64).arrays[1], x.T)


def test_copies(run: Run) -> None:
    x = normal(9, 512)
    assert np.array_equal(run("copy_coal", 2, 256, x, empty(512)).arrays[1], x)
    assert np.array_equal(run("copy_stride", 1, 128, x, empty(512), 4).arrays[1][::4], x[::4])


def test_max_pool_3d(run: Run) -> None:
    n, d, h, w, k, s = 2, 6, 7, 8, 3, 2
    x = normal(10, n, d, h, w)
    od, oh, ow = (d - k) // s + 1, (h - k) // s + 1, (w - k) // s + 1
    want = np.empty((n, od, oh, ow), np.float32)
    for z, y, v in np.ndindex(od, oh, ow):
        want[:, z, y, v] = x[:, z * s : z * s + k, y * s : y * s + k, v * s : v * s + k].max(axis=(1, 2, 3))
    got = run("maxpool3d", 1, 128, x, empty(*want.shape), n, d, h, w, k, s).arrays[1]
    assert np.array_equal(got, want)


def test_convolution_2d(run: Run) -> None:
    n, c, h, w, o, k, pad = 2, 3, 9, 10, 4, 3, 1
    x, f, bias = normal(11, n, c, h, w), normal(12, o, c, k, k), normal(13, o)
    padded = np.pad(x.astype(float), ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    want = np.zeros((n, o, h, w)) + bias[None, :, None, None]
    for i, j in np.ndindex(k, k):
        want += np.einsum("nchw,oc->nohw", padded[:, :, i : i + h, j : j + w], f[:, :, i, j].astype(float))
    got = run("conv2d", (1, 1, n * o), (16, 16), x, f, bias, empty(n, o, h, w), n, c, h, w, o, k, pad).arrays[3]
    assert np.allclose(got, want, atol=1e-4)


def test_layer_norm(run: Run) -> None:
    x, g, b = normal(14, 3, 200), normal(15, 200), normal(16, 200)
    got = run("layernorm", 3, 128, x, g, b, empty(3, 200), 200, 1e-5).arrays[3]
    wide = x.astype(float)
    want = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5) * g + b
    assert np.allclose(got, want, atol=1e-4)


def test_attention_with_dynamic_shared_memory(run: Run) -> None:
    length, d = 48, 16
    q, k, v = normal(17, length, d), normal(18, length, d), normal(19, length, d)
    got = run(
        "attention", length, 64, q, k, v, empty(length, d), length, d, 0.25, shared_bytes=4 * (length + 32)
    ).arrays[3]
    s = (q.astype(float) @ k.T) * 0.25
    e = np.exp(s - s.max(1, keepdims=True))
    assert np.allclose(got, e / e.sum(1, keepdims=True) @ v, atol=1e-5)


def test_block_scan_and_warp_scan(run: Run) -> None:
    x = RNG(20).integers(-9, 9, 200).astype(np.int32)
    assert np.array_equal(run("scan", 1, 256, x, empty(200, dtype=np.int32), 200).arrays[1], np.cumsum(x))
    x = RNG(21).integers(-9, 9, 128).astype(np.int32)
    got = run("wscan", 1, 128, x, empty(128, dtype=np.int32)).arrays[1]
    assert np.array_equal(got, np.cumsum(x.reshape(4, 32), axis=1).reshape(-1))


def test_sparse_matrix_vector(run: Run) -> None:
    rng = RNG(22)
    dense = rng.standard_normal((40, 40)).astype(np.float32) * (rng.random((40, 40)) < 0.2)
    rows = np.concatenate([[0], np.cumsum((dense != 0).sum(1))]).astype(np.int32)
    columns = np.nonzero(dense)[1].astype(np.int32)
    x = normal(23, 40)
    got = run("spmv", 2, 32, rows, columns, dense[dense != 0], x, empty(40), 40).arrays[4]
    assert np.allclose(got, dense.astype(float) @ x, atol=1e-5)


def test_stencil_with_halo(run: Run) -> None:
    x = normal(24, 48, 48)
    padded = np.pad(x, 1)
    want = np.float32(0.25) * (((padded[1:-1, :-2] + padded[1:-1, 2:]) + padded[:-2, 1:-1]) + padded[2:, 1:-1])
    assert np.allclose(run("stencil", (3, 3), (16, 16), x, empty(48, 48), 48).arrays[1], want, atol=1e-6)


@pytest.mark.parametrize(
    ("kernel", "function"),
    [
        ("gelu", lambda v: 0.5 * v * (1 + np.vectorize(math.erf)(v * 0.70710678))),
        ("gelut", lambda v: 0.5 * v * (1 + np.tanh(0.79788456 * (v + 0.044715 * v**3)))),
        ("sigm", lambda v: 1 / (1 + np.exp(-v))),
        ("powk", lambda v: np.abs(v) ** 2.5 + np.sqrt(np.abs(v)) + np.sin(v)),
    ],
)
def test_elementwise_functions(run: Run, kernel: str, function: Callable[[Any], Any]) -> None:
    x = normal(25, 1000) * 3
    got = run(kernel, 4, 256, x, empty(1000), 1000).arrays[1]
    assert np.allclose(got, function(x.astype(float)), rtol=3e-6, atol=1e-6)


SINE = 'extern "C" __global__ void k(const float* x, float* y) { y[threadIdx.x] = sinf(x[threadIdx.x]); }'


def test_sine_of_large_arguments_takes_the_slow_path_with_a_constant_table() -> None:
    x = np.array([1e6, -3e7, 1e20, 123456.0, 0.5, 3e38], np.float32)
    got = launch(parse(compiled(SINE)), "k", 1, 6, x, empty(6)).arrays[1]
    assert np.allclose(got, np.sin(x.astype(float)), atol=2e-7)


def test_log_sum_exp(run: Run) -> None:
    x = normal(26, 100, 8)
    got = run("logsumexp", 1, 128, x, empty(100), 100).arrays[1]
    assert np.allclose(got, np.log(np.exp(x.astype(float)).sum(1)), rtol=1e-5, atol=1e-6)


def test_double_precision(run: Run) -> None:
    x = RNG(27).standard_normal(500) * 10
    got = run("dbl", 2, 256, x, empty(500, dtype=np.float64), 500).arrays[1]
    assert np.allclose(got, np.exp(x) / np.sqrt(x * x + 1), rtol=4e-16 * 4)


def test_argmax_takes_the_first_of_equals(run: Run) -> None:
    x = RNG(28).integers(0, 20, (6, 100)).astype(np.float32)
    got = run("argmax", 6, 32, x, empty(6, dtype=np.int32), 100).arrays[1]
    assert np.array_equal(got, x.argmax(axis=1))


def test_atomics_on_floats_and_flags(run: Run) -> None:
    x = np.abs(normal(29, 300))
    _, total, flags = run("atomf", 2, 256, x, np.zeros(1, np.float32), np.zeros(3, np.float32), 300).arrays
    assert np.isclose(total[0], x.sum(dtype=float), rtol=1e-5)
    assert flags[0] == x.max()
    # lanes run in order: lane 0 writes 0, which leaves the flag at 0, so lane 1 also sees 0 and sets it
    assert flags.view(np.int32)[1] == 1
    assert flags.view(np.int32)[2] == 1


def test_votes_matches_and_bit_tricks(run: Run) -> None:
    x = RNG(30).integers(-8, 8, 64).astype(np.int32)
    x[3] = 0
    got = run("ballot", 1, 64, x, empty(2, dtype=np.uint32), empty(64, dtype=np.int32)).arrays
    want_mask, want = [], []
    for w in range(2):
        lanes = x[32 * w : 32 * w + 32]
        mask = sum(1 << i for i in range(32) if lanes[i] > 0)
        want_mask.append(mask)
        for i, v in enumerate(lanes.tolist()):
            u = v & 0xFFFFFFFF
            value = (mask & ((1 << i) - 1)).bit_count() + (32 - u.bit_length()) + ((u & -u).bit_length())
            value += int(f"{u:032b}"[::-1], 2) + (100 if (lanes == 7).any() else 0)
            value += int(((lanes & 3) == (v & 3)).sum()) + int(lanes.sum())
            want.append(value & 0xFFFFFFFF)
    assert np.array_equal(got[1], want_mask)
    assert np.array_equal(got[2].view(np.uint32), np.array(want, np.uint32))


def test_64_bit_hash_is_exact(run: Run) -> None:
    x = RNG(31).integers(0, 2**63, 200, dtype=np.uint64)
    want = []
    for value in x.tolist():
        h = value ^ (value >> 33)
        h = h * 0xFF51AFD7ED558CCD % 2**64
        h ^= h >> 33
        want.append((h % 1000003 + h // 7 + (h * h >> 64)) % 2**64)
    assert np.array_equal(run("u64h", 1, 256, x, empty(200, dtype=np.uint64), 200).arrays[1], np.array(want, np.uint64))


def test_int8_quantisation(run: Run) -> None:
    x = normal(32, 4, 50)
    q, s = run("i8q", 4, 32, x, empty(4, 50, dtype=np.int8), empty(4), 50).arrays[1:]
    scale = np.abs(x).max(1) / np.float32(127)
    assert np.array_equal(s, scale)
    assert np.array_equal(q, np.clip(np.rint(x / scale[:, None]), -128, 127).astype(np.int8))


def test_dot_products_of_bytes(run: Run) -> None:
    a, b = (RNG(s).integers(-(2**31), 2**31, 160).astype(np.int32) for s in (33, 34))
    want = (a.view(np.int8).astype(int) * b.view(np.int8)).reshape(20, 32).sum(1)
    assert np.array_equal(run("dp4", 1, 32, a, b, empty(20, dtype=np.int32), 20).arrays[2], want)


def test_local_arrays_with_dynamic_indices(run: Run) -> None:
    x, index = normal(35, 64, 16), RNG(36).integers(0, 16, 16).astype(np.int32)
    got = run("locarr", 1, 64, x, empty(64), index).arrays[1]
    assert np.allclose(got, x[:, index].sum(1, dtype=float), atol=1e-5)


def test_reading_across_warps_without_a_barrier_is_not_seen_as_a_fault(run: Run) -> None:
    x = normal(37, 256)
    run("race", 1, 256, x, empty(256), same=False, clean=False)
