"""Each opcode family on edge inputs, against Python integers, rational arithmetic or plain numpy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from exact import elementwise, rounded
from launching import evaluate, launch, snippet

from optiml.errors import Unsupported
from optiml.ptx import parse

F32, F64, U32, I32, U64, I64, U16, I16, F16 = (
    np.float32, np.float64, np.uint32, np.int32, np.uint64, np.int64, np.uint16, np.int16, np.float16,
)  # fmt: skip
INTS = [0, 1, 2, 3, 31, 32, 33, 64, 255, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xDEADBEEF, 12345]
LONGS = [*INTS, 0x7FFFFFFFFFFFFFFF, 0x8000000000000000, 0xFFFFFFFFFFFFFFFF, 0x123456789ABCDEF0]
MASK32, MASK64 = 2**32 - 1, 2**64 - 1
FLOATS = [
    0.0, -0.0, 1.0, -1.0, 1.5, 2.5, -2.5, 0.1, 3.0e38, -3.0e38, 1.1754944e-38, 1e-40, -1e-45, 1e-20, np.inf, -np.inf,
    np.nan, 16777216.0, 16777217.0, 0.33333334,
]  # fmt: skip


def pairs(values: list[Any], dtype: Any) -> tuple[Any, Any]:
    table = np.array(list(itertools.product(values, values)), dtype)
    return table[:, 0].copy(), table[:, 1].copy()


def same(got: Any, want: Any) -> bool:
    """Bit-equal, any NaN equal to any NaN."""
    want = np.asarray(want, got.dtype)
    if got.dtype.kind != "f":
        return np.array_equal(got, want)
    bits = np.dtype(f"u{got.dtype.itemsize}")
    return bool(np.all((got.view(bits) == want.view(bits)) | (np.isnan(got) & np.isnan(want))))


def masked(values: list[int], dtype: Any) -> Any:
    bits = 8 * np.dtype(dtype).itemsize
    return np.array([v & ((1 << bits) - 1) for v in values], f"u{bits // 8}").view(dtype)


def truncated(a: int, b: int) -> int:
    return -1 if b == 0 else (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


def remainder(a: int, b: int) -> int:
    return a if b == 0 else a - truncated(a, b) * b


def shifted_right(a: int, n: int, bits: int) -> int:
    return a >> min(n, bits)


INTEGER_CASES: list[tuple[str, Any, Callable[[int, int], int]]] = [
    ("add.s32", I32, lambda a, b: a + b),
    ("sub.s64", I64, lambda a, b: a - b),
    ("mul.lo.s32", I32, lambda a, b: a * b),
    ("mul.lo.u64", U64, lambda a, b: a * b),
    ("mul.hi.s32", I32, lambda a, b: a * b >> 32),
    ("mul.hi.u32", U32, lambda a, b: a * b >> 32),
    ("mul.hi.s64", I64, lambda a, b: a * b >> 64),
    ("mul.hi.u64", U64, lambda a, b: a * b >> 64),
    ("div.s32", I32, truncated),
    ("div.u32", U32, truncated),
    ("div.s64", I64, truncated),
    ("div.u64", U64, truncated),
    ("rem.s32", I32, remainder),
    ("rem.u32", U32, remainder),
    ("rem.s64", I64, remainder),
    ("min.s32", I32, min),
    ("min.u32", U32, min),
    ("max.s64", I64, max),
    ("max.u64", U64, max),
    ("and.b32", U32, lambda a, b: a & b),
    ("or.b64", U64, lambda a, b: a | b),
    ("xor.b32", U32, lambda a, b: a ^ b),
    ("add.sat.s32", I32, lambda a, b: max(-(2**31), min(2**31 - 1, a + b))),
    ("sub.sat.s32", I32, lambda a, b: max(-(2**31), min(2**31 - 1, a - b))),
    ("mul24.lo.s32", I32, lambda a, b: signed24(a) * signed24(b)),
    ("mul24.hi.u32", U32, lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 16),
]


def signed24(a: int) -> int:
    a &= 0xFFFFFF
    return a - (1 << 24) if a & 0x800000 else a


@pytest.mark.parametrize(("opcode", "dtype", "function"), INTEGER_CASES, ids=[c[0] for c in INTEGER_CASES])
def test_integer_operations(opcode: str, dtype: Any, function: Callable[[int, int], int]) -> None:
    wide = np.dtype(dtype).itemsize == 8
    a, b = pairs(LONGS if wide else INTS, U64 if wide else U32)
    a, b = a.view(dtype), b.view(dtype)
    got = evaluate(f"{opcode} %y, %x0, %x1;", a, b, output=dtype)
    assert same(got, masked([function(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)], dtype))


@pytest.mark.parametrize(
    ("opcode", "dtype", "function"),
    [
        ("shl.b32", U32, lambda a, n: a << min(n, 32)),
        ("shr.u32", U32, lambda a, n: a >> min(n, 32)),
        ("shr.s32", I32, lambda a, n: a >> min(n, 32)),
        ("shl.b64", U64, lambda a, n: a << min(n, 64)),
        ("shr.u64", U64, lambda a, n: a >> min(n, 64)),
        ("shr.s64", I64, lambda a, n: a >> min(n, 64)),
        ("shl.b16", U16, lambda a, n: a << min(n, 16)),
        ("shr.u16", U16, lambda a, n: a >> min(n, 16)),
        ("shr.s16", I16, lambda a, n: a >> min(n, 16)),
    ],
)
def test_shifts_clamp_the_amount(opcode: str, dtype: Any, function: Callable[[int, int], int]) -> None:
    amounts = [0, 1, 15, 16, 31, 32, 63, 64, 65, 256, 65536, 0x80000000, 0xFFFFFFFF]
    values = masked(LONGS, dtype)
    a = np.repeat(values, len(amounts))
    n = np.tile(np.array(amounts, U32), len(values))
    want = masked([function(x, y) for x, y in zip(a.tolist(), n.tolist(), strict=True)], dtype)
    assert same(evaluate(f"{opcode} %y, %x0, %x1;", a, n, output=dtype), want)
    for amount in amounts:
        got = evaluate(f"{opcode} %y, %x0, {amount};", values, output=dtype)
        assert same(got, masked([function(x, amount) for x in values.tolist()], dtype))


def test_products_of_twice_the_width() -> None:
    a, b = pairs(INTS, U32)
    got = evaluate("mul.wide.u32 %y, %x0, %x1;", a, b, output=U64)
    assert same(got, masked([x * y for x, y in zip(a.tolist(), b.tolist(), strict=True)], U64))
    c = masked([7 * i * 0x123456789 for i in range(len(a))], I64)
    got = evaluate("mad.wide.s32 %y, %x0, %x1, %x2;", a.view(I32), b.view(I32), c, output=I64)
    rows = zip(a.view(I32).tolist(), b.view(I32).tolist(), c.tolist(), strict=True)
    assert same(got, masked([x * y + z for x, y, z in rows], I64))
    h, g = a.astype(U16), b.astype(U16)
    assert same(evaluate("mul.wide.u16 %y, %x0, %x1;", h, g, output=U32), h.astype(U32) * g)


def test_multiply_and_add() -> None:
    a, b = pairs(INTS, U32)
    c = np.arange(len(a)).astype(U32) * U32(99991)
    rows = list(zip(a.tolist(), b.tolist(), c.tolist(), strict=True))
    assert same(evaluate("mad.lo.u32 %y, %x0, %x1, %x2;", a, b, c, output=U32),
                masked([x * y + z for x, y, z in rows], U32))  # fmt: skip
    assert same(evaluate("mad.hi.u32 %y, %x0, %x1, %x2;", a, b, c, output=U32),
                masked([(x * y >> 32) + z for x, y, z in rows], U32))  # fmt: skip
    assert same(evaluate("sad.u32 %y, %x0, %x1, %x2;", a, b, c, output=U32),
                masked([abs(x - y) + z for x, y, z in rows], U32))  # fmt: skip
    signed = [(i, j, k) for i, j, k in zip(a.view(I32).tolist(), b.view(I32).tolist(), c.tolist(), strict=True)]
    assert same(evaluate("sad.s32 %y, %x0, %x1, %x2;", a, b, c, output=U32),
                masked([abs(x - y) + z for x, y, z in signed], U32))  # fmt: skip


UNARY_CASES: list[tuple[str, Any, Any, Callable[[int], int]]] = [
    ("popc.b32", U32, U32, int.bit_count),
    ("popc.b64", U64, U32, int.bit_count),
    ("clz.b32", U32, U32, lambda a: 32 - a.bit_length()),
    ("clz.b64", U64, U32, lambda a: 64 - a.bit_length()),
    ("brev.b32", U32, U32, lambda a: int(f"{a:032b}"[::-1], 2)),
    ("brev.b64", U64, U64, lambda a: int(f"{a:064b}"[::-1], 2)),
    ("bfind.u32", U32, U32, lambda a: a.bit_length() - 1),
    ("bfind.s32", I32, U32, lambda a: (~a if a < 0 else a).bit_length() - 1),
    ("bfind.s64", I64, U32, lambda a: (~a if a < 0 else a).bit_length() - 1),
    ("bfind.shiftamt.u32", U32, U32, lambda a: 32 - a.bit_length() if a else -1),
    ("not.b32", U32, U32, lambda a: ~a),
    ("cnot.b32", U32, U32, lambda a: int(a == 0)),
    ("neg.s32", I32, I32, lambda a: -a),
    ("abs.s32", I32, I32, abs),
    ("abs.s64", I64, I64, abs),
]


@pytest.mark.parametrize(("opcode", "dtype", "out", "function"), UNARY_CASES, ids=[c[0] for c in UNARY_CASES])
def test_bit_operations(opcode: str, dtype: Any, out: Any, function: Callable[[int], int]) -> None:
    a = masked(LONGS, dtype)
    got = evaluate(f"{opcode} %y, %x0;", a, output=out)
    assert same(got, masked([function(x) for x in a.tolist()], out))


def test_bit_fields() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 2**32, 600).astype(U32) for _ in range(2))
    start, length = (rng.integers(0, 40, 600).astype(U32) for _ in range(2))
    rows = list(zip(a.tolist(), b.tolist(), start.tolist(), length.tolist(), strict=True))
    want = [(x >> s) & ((1 << n) - 1) for x, _, s, n in rows]
    assert same(evaluate("bfe.u32 %y, %x0, %x1, %x2;", a, start, length, output=U32), masked(want, U32))

    def signed_field(x: int, s: int, n: int) -> int:
        if n == 0:
            return 0
        sign = x >> min(s + n - 1, 31) & 1
        return sum((x >> (s + i) & 1 if i < n and s + i <= 31 else sign) << i for i in range(32))

    want = [signed_field(x, s, n) for x, _, s, n in rows]
    assert same(evaluate("bfe.s32 %y, %x0, %x1, %x2;", a.view(I32), start, length, output=U32), masked(want, U32))

    def inserted(x: int, y: int, s: int, n: int) -> int:
        for i in range(n):
            if s + i < 32:
                y = y & ~(1 << (s + i)) | (x >> i & 1) << (s + i)
        return y

    want = [inserted(*row) for row in rows]
    assert same(evaluate("bfi.b32 %y, %x0, %x1, %x2, %x3;", a, b, start, length, output=U32), masked(want, U32))


def test_bit_masks_and_extensions() -> None:
    a, b = pairs([0, 1, 5, 31, 32, 40, 0xFFFFFFFF], U32)
    value = np.full(len(a), 0x8765FEDC, U32)
    for mode in ("clamp", "wrap"):
        limit = lambda n, mode=mode: min(n, 32) if mode == "clamp" else n & 31  # noqa: E731
        want = [((1 << limit(n)) - 1) << limit(s) for s, n in zip(a.tolist(), b.tolist(), strict=True)]
        assert same(evaluate(f"bmsk.{mode}.b32 %y, %x0, %x1;", a, b, output=U32), masked(want, U32)), mode
        low = [0x8765FEDC & ((1 << limit(n)) - 1) for n in b.tolist()]
        assert same(evaluate(f"szext.{mode}.u32 %y, %x0, %x1;", value, b, output=U32), masked(low, U32))
        sizes = [limit(n) for n in b.tolist()]
        signed = [x - (1 << n) if n and x >> (n - 1) else x for x, n in zip(low, sizes, strict=True)]
        assert same(evaluate(f"szext.{mode}.s32 %y, %x0, %x1;", value, b, output=U32), masked(signed, U32))


def test_byte_permutation() -> None:
    rng = np.random.default_rng(1)
    a, b, c = (rng.integers(0, 2**32, 300).astype(U32) for _ in range(3))

    def permuted(x: int, y: int, selector: int) -> int:
        pool = (x | y << 32).to_bytes(8, "little")
        out = 0
        for i in range(4):
            n = selector >> 4 * i & 15
            octet = pool[n & 7]
            out |= ((0xFF if octet & 0x80 else 0) if n & 8 else octet) << 8 * i
        return out

    rows = list(zip(a.tolist(), b.tolist(), c.tolist(), strict=True))
    assert same(evaluate("prmt.b32 %y, %x0, %x1, %x2;", a, b, c, output=U32), masked([permuted(*r) for r in rows], U32))
    want = [x >> 8 | (y & 0xFF) << 24 for x, y, _ in rows]
    assert same(evaluate("prmt.b32.f4e %y, %x0, %x1, 1;", a, b, c, output=U32), masked(want, U32))


@pytest.mark.parametrize("table", [0x00, 0x80, 0xE8, 0x96, 0xCA, 0xFE, 0xFF, 0x1B])
def test_three_input_logic(table: int) -> None:
    rng = np.random.default_rng(2)
    a, b, c = (rng.integers(0, 2**32, 50).astype(U32) for _ in range(3))
    want = np.zeros(50, U32)
    for bit in range(32):
        row = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1)
        want |= ((table >> row) & 1).astype(U32) << U32(bit)
    assert same(evaluate(f"lop3.b32 %y, %x0, %x1, %x2, {table};", a, b, c, output=U32), want)


def test_funnel_shifts() -> None:
    a, b = pairs([0, 1, 0x80000000, 0xDEADBEEF], U32)
    for amount in (0, 1, 31, 32, 33, 100):
        rows = list(zip(a.tolist(), b.tolist(), strict=True))
        n, clamped = amount & 31, min(amount, 32)
        for opcode, want in (
            ("shf.l.wrap.b32", [((y << 32 | x) << n) >> 32 for x, y in rows]),
            ("shf.r.wrap.b32", [(y << 32 | x) >> n for x, y in rows]),
            ("shf.l.clamp.b32", [((y << 32 | x) << clamped) >> 32 for x, y in rows]),
            ("shf.r.clamp.b32", [(y << 32 | x) >> clamped for x, y in rows]),
        ):
            got = evaluate(f"{opcode} %y, %x0, %x1, {amount};", a, b, output=U32)
            assert same(got, masked(want, U32)), (opcode, amount)


def test_dot_products_of_small_integers() -> None:
    rng = np.random.default_rng(3)
    a, b, c = (rng.integers(0, 2**32, 100).astype(U32) for _ in range(3))
    octets = lambda x, t: x.view(t).reshape(-1, 4).astype(int)  # noqa: E731
    signs = {"u32.u32": (np.uint8, np.uint8), "s32.u32": (np.int8, np.uint8), "s32.s32": (np.int8, np.int8)}
    for opcode, (ta, tb) in signs.items():
        want = (octets(a, ta) * octets(b, tb)).sum(1) + c.view(I32 if "s32" in opcode else U32)
        got = evaluate(f"dp4a.{opcode} %y, %x0, %x1, %x2;", a, b, c, output=U32)
        assert same(got, masked(want.tolist(), U32))
    pair = a.view(I16).reshape(-1, 2).astype(int)
    want = (pair * octets(b, np.int8)[:, 2:]).sum(1) + c.view(I32)
    assert same(evaluate("dp2a.hi.s32.s32 %y, %x0, %x1, %x2;", a, b, c, output=U32), masked(want.tolist(), U32))


# -- float32 and float64 --------------------------------------------------------------------------------------------


def hard_triples(seed: int, count: int = 400) -> tuple[Any, Any, Any]:
    """Finite float32 triples, many of them on or near midpoints and in the subnormal range."""
    rng = np.random.default_rng(seed)
    a = rng.standard_normal(count) * 2.0 ** rng.integers(-80, 60, count)
    b = rng.standard_normal(count) * 2.0 ** rng.integers(-60, 60, count)
    c = rng.standard_normal(count) * 2.0 ** rng.integers(-140, 100, count)
    a, b, c = (x.astype(F32) for x in (a, b, c))
    third = count // 3
    # c an exact float32, a*b close to half a unit of it: the double-rounding trap
    exponent = rng.integers(-100, 100, third)
    c[:third] = ((1 + rng.integers(0, 2**23, third) / 2**23) * 2.0**exponent).astype(F32)
    a[:third] = ((1 + rng.integers(0, 4, third) / 2**23) * rng.choice([1, -1], third)).astype(F32)
    b[:third] = ((1 + rng.integers(0, 3, third) / 2**23) * 2.0 ** (exponent - 24)).astype(F32)
    # subnormal results
    a[third : 2 * third] = (rng.standard_normal(third) * 2.0**-70).astype(F32)
    b[third : 2 * third] = (rng.standard_normal(third) * 2.0 ** rng.integers(-80, -56, third)).astype(F32)
    c[third : 2 * third] = (rng.integers(-(2**22), 2**22, third) * 2.0**-149).astype(F32)
    return a, b, c


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_float32_fma_is_rounded_once(mode: str) -> None:
    a, b, c = hard_triples(4)
    want = elementwise(lambda x, y, z: x * y + z, "f32", mode, a, b, c).astype(F32)
    got = evaluate(f"fma.{mode}.f32 %y, %x0, %x1, %x2;", a, b, c, output=F32)
    assert np.array_equal(got, want)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("family", ["add", "sub", "mul"])
def test_float32_arithmetic_in_every_rounding(family: str, mode: str) -> None:
    a, b, c = hard_triples(5)
    function = {"add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y}[family]
    left, right = (a, b) if family == "mul" else (a, c)
    want = elementwise(function, "f32", mode, left, right).astype(F32)
    assert np.array_equal(evaluate(f"{family}.{mode}.f32 %y, %x0, %x1;", left, right, output=F32), want)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_float32_division_and_roots_in_every_rounding(mode: str) -> None:
    a, b, c = hard_triples(6)
    ok = b != 0
    want = elementwise(lambda x, y: x / y, "f32", mode, c[ok], b[ok]).astype(F32)
    assert np.array_equal(evaluate(f"div.{mode}.f32 %y, %x0, %x1;", c[ok], b[ok], output=F32), want)
    want = elementwise(lambda x: 1 / x, "f32", mode, b[ok]).astype(F32)
    assert np.array_equal(evaluate(f"rcp.{mode}.f32 %y, %x0;", b[ok], output=F32), want)
    root = evaluate(f"sqrt.{mode}.f32 %y, %x0;", np.abs(a), output=F32)
    for x, r in zip(np.abs(a).tolist(), root, strict=True):
        low, high = np.nextafter(r, F32(0)), np.nextafter(r, F32(np.inf))
        if mode in ("rz", "rm"):
            assert Fraction(float(r)) ** 2 <= Fraction(x) < Fraction(float(high)) ** 2
        elif mode == "rp":
            assert Fraction(float(low)) ** 2 < Fraction(x) <= Fraction(float(r)) ** 2 or x == 0
        else:
            assert abs(float(r) ** 2 - x) <= abs(float(low) ** 2 - x)
            assert abs(float(r) ** 2 - x) <= abs(float(high) ** 2 - x)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_float64_fma_is_rounded_once(mode: str) -> None:
    rng = np.random.default_rng(7)
    n = 300
    a, b = (rng.standard_normal(n) * 2.0 ** rng.integers(-200, 200, n) for _ in range(2))
    c = rng.standard_normal(n) * 2.0 ** rng.integers(-300, 300, n)
    c[:100] = -a[:100] * b[:100]  # heavy cancellation
    c[100:120] = 2.0**-1074 * rng.integers(-9, 9, 20)
    a[100:120] *= 2.0**-700
    b[100:110] *= 2.0**-300
    a[120:130], b[120:130] = 2.0**1000, 2.0**100  # overflow unless cancelled
    c[120:125] = -np.inf
    c[120:130] = -(2.0**1023)
    want = elementwise(lambda x, y, z: x * y + z, "f64", mode, a, b, c)
    got = evaluate(f"fma.{mode}.f64 %y, %x0, %x1, %x2;", a, b, c, output=F64)
    assert np.array_equal(got, want)


def test_float_special_values_follow_ieee() -> None:
    a, b = pairs(FLOATS, F32)
    with np.errstate(all="ignore"):
        for opcode, want in (
            ("add.f32", a + b), ("sub.rn.f32", a - b), ("mul.f32", a * b), ("div.rn.f32", a / b),
        ):  # fmt: skip
            assert same(evaluate(f"{opcode} %y, %x0, %x1;", a, b, output=F32), want), opcode
        assert same(evaluate("sqrt.rn.f32 %y, %x0;", a, output=F32), np.sqrt(a))
    c = a[::-1].copy()
    got = evaluate("fma.rn.f32 %y, %x0, %x1, %x2;", a, b, c, output=F32)
    for x, y, z, r in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        with np.errstate(all="ignore"):
            plain = F64(x) * F64(y) + F64(z)
        if not np.isfinite(plain) or plain == 0:
            assert str(r) == str(float(plain))


def test_exact_zero_sums_have_the_sign_of_the_rounding_mode() -> None:
    one, zero = np.ones(1, F32), np.zeros(1, F32)
    for mode, negative in (("rn", False), ("rz", False), ("rp", False), ("rm", True)):
        got = evaluate(f"add.{mode}.f32 %y, %x0, %x1;", one, -one, output=F32)
        assert got[0] == 0
        assert np.signbit(got[0]) == negative
        got = evaluate(f"fma.{mode}.f32 %y, %x0, %x0, %x1;", one, -one, output=F32)
        assert np.signbit(got[0]) == negative
        assert not np.signbit(evaluate(f"add.{mode}.f32 %y, %x0, %x0;", zero, output=F32)[0])


def test_flush_to_zero_and_saturation() -> None:
    a, b = pairs(FLOATS, F32)
    tiny = F32(2.0**-126)

    def flush(x: Any) -> Any:
        return np.where(np.abs(x) < tiny, np.copysign(F32(0), x), x)

    with np.errstate(all="ignore"):
        assert same(evaluate("add.ftz.f32 %y, %x0, %x1;", a, b, output=F32), flush(flush(a) + flush(b)))
        assert same(evaluate("mul.ftz.f32 %y, %x0, %x1;", a, b, output=F32), flush(flush(a) * flush(b)))
        total = a + b
        want = np.where(np.isnan(total), 0, np.clip(total, 0, 1)).astype(F32) + F32(0)
        assert same(evaluate("add.sat.f32 %y, %x0, %x1;", a, b, output=F32), want)


def test_minimum_and_maximum_prefer_numbers_and_order_zeros() -> None:
    a, b = pairs(FLOATS, F32)

    def key(x: float) -> tuple[float, int]:
        return (x, 0 if np.signbit(x) else 1)

    rows = list(zip(a.tolist(), b.tolist(), strict=True))
    least = [y if x != x else x if y != y else min(x, y, key=key) for x, y in rows]
    most = [y if x != x else x if y != y else max(x, y, key=key) for x, y in rows]
    assert same(evaluate("min.f32 %y, %x0, %x1;", a, b, output=F32), np.array(least, F32))
    assert same(evaluate("max.f32 %y, %x0, %x1;", a, b, output=F32), np.array(most, F32))
    strict = [np.nan if x != x or y != y else max(x, y, key=key) for x, y in rows]
    assert same(evaluate("max.NaN.f32 %y, %x0, %x1;", a, b, output=F32), np.array(strict, F32))
    wide = np.array(a, F64), np.array(b, F64)
    assert same(
        evaluate("max.f64 %y, %x0, %x1;", *wide, output=F64),
        np.array(
            [y if x != x else x if y != y else max(x, y, key=key) for x, y in zip(*map(list, wide), strict=True)], F64
        ),
    )


def test_sign_operations() -> None:
    a, b = pairs(FLOATS, F32)
    assert same(evaluate("neg.f32 %y, %x0;", a, output=F32), -a)
    assert same(evaluate("abs.f32 %y, %x0;", a, output=F32), np.abs(a))
    assert same(evaluate("copysign.f32 %y, %x0, %x1;", a, b, output=F32), np.copysign(b, a))


@pytest.mark.parametrize(
    ("opcode", "function", "tolerance"),
    [
        ("ex2.approx.f32", np.exp2, 2e-7), ("ex2.approx.ftz.f32", np.exp2, 2e-7), ("lg2.approx.f32", np.log2, 2e-7),
        ("rcp.approx.f32", lambda x: 1 / x, 1e-7), ("rsqrt.approx.f32", lambda x: 1 / np.sqrt(x), 1e-7),
        ("sqrt.approx.f32", np.sqrt, 1e-7), ("sin.approx.f32", np.sin, 1e-6), ("cos.approx.f32", np.cos, 1e-6),
        ("tanh.approx.f32", np.tanh, 1e-6),
    ],
)  # fmt: skip
def test_approximate_functions(opcode: str, function: Callable[[Any], Any], tolerance: float) -> None:
    x = np.concatenate([np.linspace(0.01, 20, 200), [1e-30, 1e30]]).astype(F32)
    with np.errstate(all="ignore"):
        want = function(x.astype(float)).astype(F32)
    assert np.allclose(evaluate(f"{opcode} %y, %x0;", x, output=F32), want, rtol=tolerance, atol=tolerance)


def test_approximate_functions_at_their_limits() -> None:
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], F32)
    assert same(evaluate("ex2.approx.f32 %y, %x0;", x, output=F32), [1, 1, np.inf, 0, np.nan])
    assert same(evaluate("lg2.approx.f32 %y, %x0;", x, output=F32), [-np.inf, -np.inf, np.inf, np.nan, np.nan])
    assert same(evaluate("rcp.approx.f32 %y, %x0;", x, output=F32), [np.inf, -np.inf, 0.0, -0.0, np.nan])
    assert same(evaluate("rsqrt.approx.f32 %y, %x0;", x, output=F32), [np.inf, -np.inf, 0, np.nan, np.nan])


def test_approximate_division_of_and_by_huge_numbers() -> None:
    a = np.array([1, np.inf, 1, -2], F32)
    b = np.array([3e38, 3e38, np.inf, 0.5], F32)
    assert same(evaluate("div.approx.f32 %y, %x0, %x1;", a, b, output=F32), [0, np.nan, 0, -4])


# -- comparison and selection -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "compare", ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
)
def test_float_comparisons(compare: str) -> None:
    a, b = pairs(FLOATS, F32)
    table = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
    unordered = np.isnan(a) | np.isnan(b)
    if compare == "num":
        want = ~unordered
    elif compare == "nan":
        want = unordered
    elif len(compare) == 3:
        want = table[compare[:2]] | unordered
    else:
        want = table[compare] & ~unordered
    got = evaluate(f"setp.{compare}.f32 %p1, %x0, %x1; selp.u32 %y, 1, 0, %p1;", a, b, output=U32)
    assert np.array_equal(got, want)


@pytest.mark.parametrize(("kind", "dtype"), [("s32", I32), ("u32", U32), ("s64", I64), ("u64", U64)])
def test_integer_comparisons(kind: str, dtype: Any) -> None:
    a, b = pairs(LONGS if np.dtype(dtype).itemsize == 8 else INTS, U64 if np.dtype(dtype).itemsize == 8 else U32)
    a, b = a.view(dtype), b.view(dtype)
    for compare, want in (("eq", a == b), ("ne", a != b), ("lt", a < b), ("le", a <= b), ("gt", a > b), ("ge", a >= b)):
        got = evaluate(f"setp.{compare}.{kind} %p1, %x0, %x1; selp.u32 %y, 1, 0, %p1;", a, b, output=U32)
        assert np.array_equal(got, want), compare


def test_comparisons_combine_with_a_predicate_and_have_two_results() -> None:
    a, b = pairs([0, 1, 2], I32)
    odd = (a & 1) == 1
    body = """and.b32 %r1, %x0, 1; setp.eq.s32 %p1, %r1, 1;
    setp.lt.{}.s32 %p2|%p3, %x0, %x1, {}%p1;
    selp.u32 %y, 1, 0, %p2; selp.u32 %r2, 2, 0, %p3; or.b32 %y, %y, %r2;"""
    for name, join in (("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)):
        for sign, flag in (("", odd), ("!", ~odd)):
            want = join(a < b, flag) + 2 * join(~(a < b), flag).astype(U32)
            assert np.array_equal(evaluate(body.format(name, sign), a, b, output=U32), want)


def test_set_writes_all_ones_or_one() -> None:
    a, b = pairs(FLOATS, F32)
    assert same(evaluate("set.lt.u32.f32 %y, %x0, %x1;", a, b, output=U32), np.where(a < b, 0xFFFFFFFF, 0))
    assert same(evaluate("set.geu.f32.f32 %y, %x0, %x1;", a, b, output=F32), np.where(a < b, 0.0, 1.0))


def test_slct_and_testp() -> None:
    a, b = pairs(FLOATS, F32)
    c = np.resize(np.array([-1, 0, 5], I32), len(a))
    assert same(evaluate("slct.f32.s32 %y, %x0, %x1, %x2;", a, b, c, output=F32), np.where(c >= 0, a, b))
    for name, want in (
        ("finite", np.isfinite(a)), ("infinite", np.isinf(a)), ("number", ~np.isnan(a)), ("notanumber", np.isnan(a)),
        ("normal", np.isfinite(a) & (np.abs(a) >= F32(2.0**-126))),
        ("subnormal", (np.abs(a) < F32(2.0**-126)) & (a != 0)),
    ):  # fmt: skip
        got = evaluate(f"testp.{name}.f32 %p1, %x0; selp.u32 %y, 1, 0, %p1;", a, output=U32)
        assert np.array_equal(got, want), name


# -- conversions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize(("kind", "out"), [("s32", I32), ("u32", U32), ("s64", I64), ("u64", U64)])
@pytest.mark.parametrize(("source", "dtype"), [("f32", F32), ("f64", F64)])
def test_float_to_integer_saturates_and_defines_nan(mode: str, kind: str, out: Any, source: str, dtype: Any) -> None:
    x = np.array([*FLOATS, 0.5, 1.5, -0.5, 2147483648.0, -2147483649.0, 4294967296.0, 1e19, -1e19, 9.2e18], dtype)
    info = np.iinfo(out)

    def convert(v: float) -> int:
        if v != v:
            bits = np.dtype(out).itemsize * 8
            return 0 if source == "f32" and bits == 32 else 1 << (bits - 1)
        if abs(v) == np.inf:
            return int(info.max if v > 0 else info.min)
        exact = Fraction(v)
        floor = exact.numerator // exact.denominator
        whole = {"rmi": floor, "rpi": -(-exact.numerator // exact.denominator), "rzi": int(exact), "rni": round(exact)}
        return max(int(info.min), min(int(info.max), whole[mode]))

    want = masked([convert(v) for v in x.tolist()], out)
    assert same(evaluate(f"cvt.{mode}.{kind}.{source} %y, %x0;", x, output=out), want)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_integer_to_float_is_rounded_once(mode: str) -> None:
    values = [0, 1, -1, 16777217, -16777219, 2**31 - 1, -(2**31), 33554431]
    want = elementwise(lambda v: v, "f32", mode, np.array(values, float)).astype(F32)
    assert np.array_equal(evaluate(f"cvt.{mode}.f32.s32 %y, %x0;", np.array(values, I32), output=F32), want)
    longs = [0, 1, 2**53 + 1, 2**62 + 1, 2**63 - 1, -(2**63), 2**24 + 1, 9007199791611905]
    array = np.array(longs, I64)
    for kind, out in (("f32", F32), ("f64", F64)):
        exact = np.array([rounded(Fraction(v), kind, mode) for v in longs], out)
        assert np.array_equal(evaluate(f"cvt.{mode}.{kind}.s64 %y, %x0;", array, output=out), exact)


def test_narrowing_and_widening_of_integers() -> None:
    a = masked(INTS, U32)
    assert same(evaluate("cvt.s32.s8 %y, %x0;", a, output=I32), a.astype(np.int8).astype(I32))
    assert same(evaluate("cvt.u32.u16 %y, %x0;", a, output=U32), a.astype(U16).astype(U32))
    assert same(evaluate("cvt.s64.s32 %y, %x0;", a.view(I32), output=I64), a.view(I32).astype(I64))
    assert same(evaluate("cvt.u64.u32 %y, %x0;", a, output=U64), a.astype(U64))
    assert same(evaluate("cvt.u32.u64 %y, %x0;", masked(LONGS, U64), output=U32), masked(LONGS, U32))
    assert same(evaluate("cvt.sat.s8.s32 %r1, %x0; cvt.s32.s8 %y, %r1;", a.view(I32), output=I32),
                np.clip(a.view(I32), -128, 127))  # fmt: skip
    assert same(evaluate("cvt.sat.u32.s32 %y, %x0;", a.view(I32), output=U32), np.maximum(a.view(I32), 0))


def test_rounding_to_integral_floats() -> None:
    x = np.array(FLOATS, F32)
    for mode, function in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)):
        assert same(evaluate(f"cvt.{mode}.f32.f32 %y, %x0;", x, output=F32), function(x))
    with np.errstate(all="ignore"):
        assert same(evaluate("cvt.sat.f32.f32 %y, %x0;", x, output=F32),
                    np.where(np.isnan(x), 0, np.clip(x, 0, 1)).astype(F32) + F32(0))  # fmt: skip


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_double_to_single(mode: str) -> None:
    rng = np.random.default_rng(8)
    x = rng.standard_normal(300) * 2.0 ** rng.integers(-150, 130, 300)
    want = elementwise(lambda v: v, "f32", mode, x).astype(F32)
    assert np.array_equal(evaluate(f"cvt.{mode}.f32.f64 %y, %x0;", x, output=F32), want)


# -- half precision -----------------------------------------------------------------------------------------------


def halves(seed: int, count: int = 300) -> Any:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(count) * 2.0 ** rng.integers(-20, 10, count)).astype(F16)


def bfloats(seed: int, count: int = 300) -> tuple[Any, Any]:
    """bfloat16 patterns and their values."""
    rng = np.random.default_rng(seed)
    bits = (rng.standard_normal(count) * 2.0 ** rng.integers(-60, 50, count)).astype(F32).view(U32) >> 16
    return bits.astype(U16), (bits << 16).astype(U32).view(F32)


def bf16_bits(values: Any) -> Any:
    return (np.asarray(values, F32).view(U32) >> 16).astype(U16)


def test_half_arithmetic_is_rounded_once() -> None:
    a, b, c = (halves(s) for s in (9, 10, 11))
    for body, function, columns in (
        ("add.f16 %y, %x0, %x1;", lambda x, y, z: x + y, (a, b, c)),
        ("sub.f16 %y, %x0, %x1;", lambda x, y, z: x - y, (a, b, c)),
        ("mul.f16 %y, %x0, %x1;", lambda x, y, z: x * y, (a, b, c)),
        ("fma.rn.f16 %y, %x0, %x1, %x2;", lambda x, y, z: x * y + z, (a, b, c)),
    ):
        with np.errstate(over="ignore"):
            want = elementwise(function, "f16", "rn", *columns).astype(F16)
        assert np.array_equal(evaluate(body, a, b, c, output=F16), want), body


def test_bfloat_arithmetic_is_rounded_once() -> None:
    (a, x), (b, y), (c, z) = (bfloats(s) for s in (12, 13, 14))
    c[:100] = bf16_bits(x[:100] * y[:100])  # near-ties
    z = (c.astype(U32) << 16).view(F32)
    for body, function in (
        ("add.bf16 %y, %x0, %x1;", lambda i, j, k: i + j),
        ("mul.bf16 %y, %x0, %x1;", lambda i, j, k: i * j),
        ("sub.bf16 %y, %x0, %x1;", lambda i, j, k: i - j),
        ("fma.rn.bf16 %y, %x0, %x1, %x2;", lambda i, j, k: i * j + k),
    ):
        want = bf16_bits(elementwise(function, "bf16", "rn", x, y, z))
        assert np.array_equal(evaluate(body, a, b, c, output=U16), want), body


def test_packed_halves_work_on_both_parts() -> None:
    a, b, c = (halves(s, 200) for s in (15, 16, 17))
    packed = [v.view(U32) for v in (a, b, c)]
    with np.errstate(over="ignore"):
        want = elementwise(lambda x, y, z: x * y + z, "f16", "rn", a, b, c).astype(F16)
    got = evaluate("fma.rn.f16x2 %y, %x0, %x1, %x2;", *packed, output=U32).view(F16)
    assert np.array_equal(got, want)
    assert np.array_equal(evaluate("max.f16x2 %y, %x0, %x1;", *packed[:2], output=U32).view(F16), np.maximum(a, b))
    assert np.array_equal(evaluate("neg.f16x2 %y, %x0;", packed[0], output=U32).view(F16), -a)
    (p, x), (q, y) = bfloats(18, 200), bfloats(19, 200)
    got = evaluate("min.bf16x2 %y, %x0, %x1;", p.view(U32), q.view(U32), output=U32).view(U16)
    assert np.array_equal(got, bf16_bits(np.minimum(x, y)))
    want = bf16_bits(elementwise(lambda i, j: i * j, "bf16", "rn", x, y))
    assert np.array_equal(evaluate("mul.bf16x2 %y, %x0, %x1;", p.view(U32), q.view(U32), output=U32).view(U16), want)


def test_conversions_to_half_formats() -> None:
    rng = np.random.default_rng(20)
    x = (rng.standard_normal(400) * 2.0 ** rng.integers(-30, 18, 400)).astype(F32)
    x[:4] = [1e30, -0.0, 65520.0, 2.0**-25]
    with np.errstate(over="ignore"):
        want = elementwise(lambda v: v, "f16", "rn", x).astype(F16)
    got = evaluate("cvt.rn.f16.f32 %y, %x0;", x, output=F16)
    assert np.array_equal(got, want)
    assert np.array_equal(evaluate("cvt.f32.f16 %y, %x0;", got, output=F32), got.astype(F32))
    bits = bf16_bits(elementwise(lambda v: v, "bf16", "rn", x))
    got = evaluate("cvt.rn.bf16.f32 %y, %x0;", x, output=U16)
    assert np.array_equal(got & 0x7FFF, bits & 0x7FFF)
    assert np.array_equal(evaluate("cvt.rz.bf16.f32 %y, %x0;", x, output=U16), bf16_bits(x))
    both = evaluate("cvt.rn.f16x2.f32 %y, %x0, %x1;", x, -x, output=U32)
    assert np.array_equal(both.view(F16).reshape(-1, 2), np.stack([-want, want], axis=1))
    both = evaluate("cvt.rn.bf16x2.f32 %y, %x0, %x1;", x, x, output=U32).view(U16).reshape(-1, 2)
    assert np.array_equal(both[:, 0], both[:, 1])
    assert np.array_equal(both[:, 0], got)
    assert np.isnan(evaluate("cvt.rn.f16.f32 %y, %x0;", np.array([np.nan], F32), output=F16))


def test_half_comparisons_and_special_functions() -> None:
    a, b = halves(21), halves(22)
    got = evaluate("setp.gt.f16 %p1, %x0, %x1; selp.u32 %y, 1, 0, %p1;", a, b, output=U32)
    assert np.array_equal(got, a > b)
    got = evaluate("set.eq.f16.f16 %y, %x0, %x1;", a, np.where(a > 0, a, b), output=F16)
    assert np.array_equal(got, np.where((a > 0) | (a == b), F16(1), F16(0)))
    small = (a / np.abs(a).max()).astype(F16)
    got = evaluate("ex2.approx.f16 %y, %x0;", small, output=F16)
    assert np.allclose(got.astype(float), np.exp2(small.astype(float)), rtol=1e-3)


def test_eight_bit_floats() -> None:
    x = np.array([0.0, -0.0, 1.0, 1.0625, 1.1875, 448.0, 500.0, -1e9, 2.0**-9, 2.0**-10, 0.3, np.nan], F32)
    zero = np.zeros(len(x), F32)
    got = evaluate("cvt.rn.satfinite.e4m3x2.f32 %y, %x1, %x0;", x, zero, output=U16)
    assert got.tolist() == [0x00, 0x80, 0x38, 0x38, 0x3A, 0x7E, 0x7E, 0xFE, 0x01, 0x00, 0x2A, 0x7F]
    back = evaluate("cvt.rn.f16x2.e4m3x2 %y, %x0;", got, output=U32).view(F16)[::2]
    assert same(back, np.array([0, -0.0, 1, 1, 1.25, 448, 448, -448, 2.0**-9, 0, 0.3125, np.nan], F16))


# -- moving bits ----------------------------------------------------------------------------------------------------


def test_packing_and_unpacking_of_registers() -> None:
    a, b = pairs(INTS, U32)
    got = evaluate("mov.b64 %y, {%x0, %x1};", a, b, output=U64)
    assert same(got, a.astype(U64) | b.astype(U64) << U64(32))
    assert same(evaluate("mov.b64 {%r1, %y}, %x0;", got, output=U32), b)
    assert same(evaluate("mov.b64 {%y, %r1}, %x0;", got, output=U32), a)
    h, g = a.astype(U16), b.astype(U16)
    assert same(evaluate("mov.b32 %y, {%x0, %x1};", h, g, output=U32), h.astype(U32) | g.astype(U32) << U32(16))


def test_values_keep_their_bits_between_register_types() -> None:
    x = np.array(FLOATS, F32)
    assert same(evaluate("mov.b32 %y, %x0;", x, output=U32), x.view(U32))
    assert same(evaluate("mov.b32 %y, %x0;", x.view(U32), output=F32), x)
    assert same(evaluate("mov.b64 %y, %x0;", x.astype(F64), output=U64), x.astype(F64).view(U64))


def test_literals_of_every_spelling() -> None:
    one = np.zeros(1, U32)
    spellings = {"0x1F": 31, "0b101": 5, "017": 15, "42U": 42, "-1": 0xFFFFFFFF, "0xFFFFFFFF": 0xFFFFFFFF}
    for text, value in spellings.items():
        assert evaluate(f"add.u32 %y, %x0, {text};", one, output=U32)[0] == value
    zero = np.zeros(1, F32)
    for text, value in (("0f3F800000", 1.0), ("1.5", 1.5), ("0fBF800000", -1.0)):
        assert evaluate(f"add.f32 %y, %x0, {text};", zero, output=F32)[0] == value
    assert evaluate("add.f64 %y, %x0, 0d3FF8000000000000;", np.zeros(1), output=F64)[0] == 1.5


def test_operations_on_literals_alone() -> None:
    assert evaluate("add.s32 %y, 3, 4; add.s32 %y, %y, %x0;", np.arange(3, dtype=I32), output=I32).tolist() == [7, 8, 9]


def test_predicated_instructions_leave_other_threads_alone() -> None:
    x = np.arange(64, dtype=I32)
    body = """and.b32 %r1, %x0, 1; setp.eq.s32 %p1, %r1, 0; mov.u32 %y, 5;
    @%p1 add.s32 %y, %x0, 100; @!%p1 mul.lo.s32 %y, %y, 2;"""
    assert np.array_equal(evaluate(body, x, output=I32), np.where(x % 2 == 0, x + 100, 10))


def test_predicated_loads_and_stores_touch_memory_only_where_they_may() -> None:
    x = np.arange(64, dtype=I32)
    body = """setp.lt.s32 %p1, %x0, 8; mov.u32 %y, 7; mov.u64 %rd1, 0;
    @!%p1 mov.u64 %rd1, %base0; @!%p1 ld.global.u32 %y, [%rd1];"""
    assert np.array_equal(evaluate(body, x, output=I32), np.where(x < 8, 7, x))


def test_special_registers() -> None:
    x = np.zeros(100, U32)
    for name, want in (
        ("%tid.x", np.arange(100)), ("%laneid", np.arange(100) % 32), ("%warpid", np.arange(100) // 32),
        ("%ntid.x", np.full(100, 100)), ("%nctaid.x", np.ones(100)), ("%tid.y", np.zeros(100)),
        ("%lanemask_lt", (1 << (np.arange(100) % 32)) - 1), ("%lanemask_eq", 1 << (np.arange(100) % 32)),
        ("%lanemask_ge", (0xFFFFFFFF << (np.arange(100) % 32)) & 0xFFFFFFFF),
    ):  # fmt: skip
        assert np.array_equal(evaluate(f"mov.u32 %y, {name};", x, output=U32), want), name


def test_clocks_go_forward() -> None:
    body = "mov.u64 %rd1, %clock64; mov.u64 %rd2, %clock64; sub.s64 %rd3, %rd2, %rd1; cvt.u32.u64 %y, %rd3;"
    assert (evaluate(body, np.zeros(4, U32), output=U32) > 0).all()


@pytest.mark.parametrize(
    "body",
    [
        "wgmma.fence.sync.aligned;", "tex.1d.v4.f32.f32 {%f0, %f1, %f2, %f3}, [%rd1, {%f1}];",
        "add.f32x2 %rd1, %rd1, %rd1;",
        "frobnicate.u32 %y, %x0;", "barrier.cluster.arrive;", "cvt.rn.f32.f128 %f1, %f2;", "mov.u32 %y, %envreg7;",
        "mul.rz.f16 %h1, %h1, %h1;",
    ],
)  # fmt: skip
def test_an_unknown_opcode_is_refused_by_name_and_line(body: str) -> None:
    text = snippet(f".loc 1 42 3\n{body}", [np.zeros(1, U32)], U32)
    module = parse(text)
    with pytest.raises(Unsupported) as raised:
        launch(module, "k", 1, 1, np.zeros(1, U32), np.zeros(1, U32))
    assert raised.value.line == 42
    assert body.split()[0].rstrip(";") in raised.value.feature or "%envreg7" in raised.value.feature


def test_an_unknown_opcode_in_another_kernel_does_no_harm() -> None:
    good = snippet("mov.u32 %y, 1;", [np.zeros(1, U32)], U32)
    bad = snippet("frobnicate.u32 %y;", [np.zeros(1, U32)], U32).split(".address_size 64")[1].replace(" k(", " other(")
    launched = launch(parse(good + bad), "k", 1, 1, np.zeros(1, U32), np.zeros(1, U32))
    assert launched.arrays[1][0] == 1


def test_arithmetic_with_the_carry_flag() -> None:
    rng = np.random.default_rng(23)
    edge = np.array([0, 1, MASK64, MASK64 - 1, 1 << 63, 0xFFFFFFFF00000000], U64)
    a, b = pairs([int(v) for v in edge] + rng.integers(0, 2**63, 6).tolist(), U64)
    rows = list(zip(a.tolist(), b.tolist(), strict=True))
    words = "mov.b64 {%r1, %r2}, %x0; mov.b64 {%r3, %r4}, %x1;"
    join = "mov.b64 %y, {%r5, %r6};"
    got = evaluate(f"{words} add.cc.u32 %r5, %r1, %r3; addc.u32 %r6, %r2, %r4; {join}", a, b, output=U64)
    assert same(got, masked([x + y for x, y in rows], U64))
    got = evaluate(f"{words} sub.cc.u32 %r5, %r1, %r3; subc.u32 %r6, %r2, %r4; {join}", a, b, output=U64)
    assert same(got, masked([x - y for x, y in rows], U64))
    # the upper half of a 64 by 32 bit product, whose middle word carries
    body = """mul.hi.u32 %r5, %r1, %r3; mad.lo.cc.u32 %r5, %r2, %r3, %r5; madc.hi.u32 %r6, %r2, %r3, 0;"""
    got = evaluate(f"{words} {body} {join}", a, b, output=U64)
    assert same(got, masked([x * (y & MASK32) >> 32 for x, y in rows], U64))
    got = evaluate("add.cc.u64 %rd1, %x0, %x1; addc.u64 %y, 0, 0;", a, b, output=U64)
    assert same(got, masked([x + y >> 64 for x, y in rows], U64))


def test_differences_of_bytes() -> None:
    rng = np.random.default_rng(24)
    a, b, c = (rng.integers(0, 2**32, 100).astype(U32) for _ in range(3))
    apart = np.abs(a.view(np.uint8).astype(int) - b.view(np.uint8))
    got = evaluate("vabsdiff4.u32.u32.u32 %y, %x0, %x1, %x2;", a, b, c, output=U32)
    assert np.array_equal(got.view(np.uint8), apart)
    got = evaluate("vabsdiff4.u32.u32.u32.add %y, %x0, %x1, %x2;", a, b, c, output=U32)
    assert same(got, masked((apart.reshape(-1, 4).sum(1) + c).tolist(), U32))
