"""Arithmetic of the PTX ISA on numpy arrays, bit-exact wherever the ISA defines the bits.

Every function takes and returns one-dimensional arrays (length `n`, or 1 for a value that all threads share) and
never writes into an argument. Values of half precision are `float16`, bfloat16 values are their `uint16` patterns,
packed pairs are `uint32`.

Exact float32 fused multiply-add goes through float64: the product of two float32 is exact there, so the only error
is the double rounding of the sum, which can matter only where the float64 sum sits on a float32 midpoint (or the
result is subnormal). Those lanes are recomputed by rounding to odd.
Sources: PTX ISA 9 §9.7; Boldo and Melquiond, "Emulation of FMA and correctly rounded sums" (IEEE TC 57, 2008);
Knuth, TAOCP 2 §4.2.2 (error of a sum); Dekker 1971 (error of a product).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

Array = Any  # an ndarray; numpy's stubs type arithmetic of varying dtypes as Any too

U8, I8 = np.dtype(np.uint8), np.dtype(np.int8)
U16, I16, F16 = np.dtype(np.uint16), np.dtype(np.int16), np.dtype(np.float16)
U32, I32, F32 = np.dtype(np.uint32), np.dtype(np.int32), np.dtype(np.float32)
U64, I64, F64 = np.dtype(np.uint64), np.dtype(np.int64), np.dtype(np.float64)
BOOL = np.dtype(np.bool_)

_LOW29 = np.array(0x1FFFFFFF, U64)
_HALF29 = np.array(0x10000000, U64)
_MIN_NORMAL = {F32: np.array(2.0**-126, F32), F64: np.array(2.0**-1022, F64), F16: np.array(2.0**-14, F16)}
_ONE64 = np.array(1, U64)
_ZERO = {dtype: np.array(0, dtype) for dtype in (F16, F32, F64)}
_ONE = {dtype: np.array(1, dtype) for dtype in (F16, F32, F64)}
_LOWEST = {dtype: np.array(-np.inf, dtype) for dtype in (F16, F32, F64)}
_HIGHEST = {dtype: np.array(np.inf, dtype) for dtype in (F16, F32, F64)}
_SIGN = {F16: np.array(0x8000, U16), F32: np.array(0x80000000, U32), F64: np.array(1 << 63, U64)}
_BITS = {F16: U16, F32: U32, F64: U64}
_SPLITTER = 134217729.0  # 2**27 + 1, Veltkamp

_count = np.count_nonzero


# -- rounding tools -----------------------------------------------------------------------------------------------


def sum_error(a: Array, b: Array, s: Array) -> Array:
    """The exact error `a + b - s` of the float64 sum `s` (Knuth's two-sum)."""
    t = s - a
    return (a - (s - t)) + (b - t)


def round_to_odd(s: Array, error: Array) -> Array:
    """Turn the nearest float64 `s` of the exact value `s + error` into that value rounded to odd."""
    bits = s.view(U64)
    inexact = (error != 0) & ((bits & _ONE64) == 0) & np.isfinite(s)
    away = (error > 0) == (s > 0)
    step = np.where(away, bits + _ONE64, bits - _ONE64)
    return np.where(inexact, step, bits).view(F64)


def odd_float32(x: Array) -> Array:
    """Round float64 to float32 to odd, so that a later rounding to a narrower type is right."""
    r = x.astype(F32)
    back = r.astype(F64)
    bits = r.view(U32)
    one = np.uint32(1)
    inexact = (back != x) & ((bits & one) == 0) & ~np.isnan(x)
    step = np.where(np.abs(back) > np.abs(x), bits - one, bits + one)
    return np.where(inexact, step, bits).view(F32)


def directed(s: Array, error: Array, mode: str, out: np.dtype[Any]) -> Array:
    """Round the exact value `s + error` to `out` (float32 or float64) toward -inf (rm), +inf (rp) or zero (rz)."""
    r = s.astype(out)
    back = r.astype(F64)
    above = (back > s) | ((back == s) & (error < 0))
    below = (back < s) | ((back == s) & (error > 0))
    lower, upper = np.array(-np.inf, out), np.array(np.inf, out)
    if mode == "rm":
        return np.where(above, np.nextafter(r, lower), r)
    if mode == "rp":
        return np.where(below, np.nextafter(r, upper), r)
    r = np.where(above & (r > 0), np.nextafter(r, lower), r)
    return np.where(below & (r < 0), np.nextafter(r, upper), r)


SHORT = 512  # up to this length a look at the bytes is cheaper than numpy calls


def may_be_tiny(x: Array) -> bool:
    """Whether some float32 may be zero, subnormal or the least normal number; a cheap, cautious look."""
    if x.size > SHORT:
        return bool(_count(np.abs(x) <= _MIN_NORMAL[F32]))
    tops = x.tobytes()[3::4]  # sign and the upper seven exponent bits
    return b"\x00" in tops or b"\x80" in tops


def _may_be_midpoint(s: Array) -> bool:
    """Whether some float64 may lie halfway between two float32 (low 29 bits 0x10000000); a cheap, cautious look."""
    if s.size > SHORT:
        return bool(_count((s.view(U64) & _LOW29) == _HALF29))
    return b"\x00\x00\x00" in s.tobytes()


def flush(x: Array) -> Array:
    """Replace subnormals by zeros of the same sign (.ftz)."""
    if x.dtype is F32 and not may_be_tiny(x):
        return x
    small = np.abs(x) < _MIN_NORMAL[x.dtype]
    if not _count(small):
        return x
    return np.where(small, np.copysign(np.array(0, x.dtype), x), x)


def saturate(x: Array) -> Array:
    """Clamp to [0, 1]; NaN becomes +0 (.sat)."""
    zero, one = _ZERO[x.dtype], _ONE[x.dtype]
    return np.add(np.fmin(np.fmax(x, zero), one), zero)  # the sum turns -0 into +0


def relu(x: Array) -> Array:
    """Clamp to [0, inf); NaN becomes the canonical NaN (.relu)."""
    zero = np.array(0, x.dtype)
    return np.where(x > zero, x, np.where(np.isnan(x), np.array(np.nan, x.dtype), zero))


def flushed(operation: Callable[..., Array]) -> Callable[..., Array]:
    """`operation` with subnormal inputs and results flushed."""

    def run(*operands: Array) -> Array:
        return flush(operation(*[flush(x) for x in operands]))

    return run


def saturated(operation: Callable[..., Array]) -> Callable[..., Array]:
    """`operation` with its result clamped to [0, 1]."""
    return lambda *operands: saturate(operation(*operands))


# -- float32 and float64 ------------------------------------------------------------------------------------------


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    """`a * b + c` in float32 with one rounding to nearest even, subnormals kept.

    An operand may also be a float64 that holds a float32 value, which saves converting literals.
    """
    p = np.multiply(a if a.dtype is F64 else a.astype(F64), b if b.dtype is F64 else b.astype(F64))
    wide = c if c.dtype is F64 else c.astype(F64)
    s = np.add(p, wide)
    r = s.astype(F32)
    if _may_be_midpoint(s) or may_be_tiny(r):
        doubtful = (s.view(U64) & _LOW29) == _HALF29
        tiny = np.abs(r) <= _MIN_NORMAL[F32]
        if _count(tiny):
            doubtful |= tiny & (s != 0)
        if _count(doubtful):
            exact = round_to_odd(s, sum_error(p, wide, s)).astype(F32)
            r = np.where(doubtful, exact, r)
    return r


def fma_f32_directed(mode: str) -> Callable[..., Array]:
    """float32 fma rounded toward -inf (rm), +inf (rp) or zero (rz); operands as for `fma_f32`."""

    def run(a: Array, b: Array, c: Array) -> Array:
        p = np.multiply(a if a.dtype is F64 else a.astype(F64), b if b.dtype is F64 else b.astype(F64))
        return _sum_directed(p, c if c.dtype is F64 else c.astype(F64), mode, F32)

    return run


def _sum_directed(p: Array, c: Array, mode: str, out: np.dtype[Any]) -> Array:
    s = np.add(p, c)
    if out == F32 and mode != "rz":
        r = s.astype(F32)
        back = r.astype(F64)
        if not _count(back == s):  # the error of the sum can matter only where it was rounded to a float32
            if mode == "rm":
                return np.where(back > s, np.nextafter(r, _LOWEST[F32]), r)
            return np.where(back < s, np.nextafter(r, _HIGHEST[F32]), r)
    r = directed(s, sum_error(p, c, s), mode, out)
    if mode == "rm":  # an exact zero sum of unlike signs is -0 when rounding down
        negative = (s == 0) & (np.signbit(p) | np.signbit(c))
        r = np.where(negative, np.array(-0.0, out), r)
    return r


def add_directed(mode: str, out: np.dtype[Any]) -> Callable[..., Array]:
    """Addition with directed rounding, float32 or float64."""
    return lambda a, b: _sum_directed(a.astype(F64), b.astype(F64), mode, out)


def mul_f32_directed(mode: str) -> Callable[..., Array]:
    """float32 product with directed rounding."""

    def run(a: Array, b: Array) -> Array:
        p = np.multiply(a.astype(F64), b.astype(F64))
        return directed(p, np.zeros(1), mode, F32)

    return run


def product_error(a: Array, b: Array, p: Array) -> Array:
    """The exact error `a * b - p` of a float64 product (Dekker), if nothing over- or underflows."""
    t = _SPLITTER * a
    a_high = t - (t - a)
    a_low = a - a_high
    t = _SPLITTER * b
    b_high = t - (t - b)
    b_low = b - b_high
    return ((a_high * b_high - p) + a_high * b_low + a_low * b_high) + a_low * b_low


def _fma_f64_exactly(a: float, b: float, c: float) -> float:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c
    try:
        return float(exact)
    except OverflowError:
        return np.inf if exact > 0 else -np.inf


def fma_f64(a: Array, b: Array, c: Array) -> Array:
    """`a * b + c` in float64 with one rounding to nearest even.

    Lanes whose exponents could over- or underflow on the way are done in rational arithmetic.
    """
    a, b, c = np.broadcast_arrays(a, b, c)
    p = a * b
    error = product_error(a, b, p)
    high = c + error
    low = sum_error(c, error, high)
    total = p + high
    rest = sum_error(p, high, total)
    tail = low + rest
    tail = round_to_odd(tail, sum_error(low, rest, tail))
    r = total + tail
    plain = p + c
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    nothing = (a == 0) | (b == 0)
    r = np.where(finite & ~nothing, r, plain)
    big, small = 2.0**500, 2.0**-450
    size_a, size_b = np.abs(a), np.abs(b)
    safe = (size_a < big) & (size_b < big) & (size_a > small) & (size_b > small) & (np.abs(c) < 2.0**1000)
    safe &= (np.abs(r) > 2.0**-900) & ((np.abs(c) > 2.0**-900) | (c == 0))
    hard = finite & ~nothing & ~safe
    for lane in np.flatnonzero(hard):
        r[lane] = _fma_f64_exactly(float(a[lane]), float(b[lane]), float(c[lane]))
    return r


def _exact(operation: str, operands: tuple[float, ...]) -> Fraction:
    if operation == "mul":
        return Fraction(operands[0]) * Fraction(operands[1])
    if operation == "div":
        return Fraction(operands[0]) / Fraction(operands[1])
    return Fraction(operands[0]) * Fraction(operands[1]) + Fraction(operands[2])


def f64_directed(operation: str, mode: str) -> Callable[..., Array]:
    """float64 "mul", "div" or "fma" with directed rounding, lane by lane in rational arithmetic (rare in practice)."""

    def nearest(operands: tuple[Array, ...]) -> Array:
        if operation == "fma":
            return fma_f64(*operands)
        return np.multiply(*operands) if operation == "mul" else np.divide(*operands)

    def run(*operands: Array) -> Array:
        wide = np.broadcast_arrays(*operands)
        r = np.array(nearest(tuple(wide)))
        finite = np.ones(r.shape, bool)
        for x in wide:
            finite &= np.isfinite(x)
        if operation == "div":
            finite &= wide[1] != 0
        for lane in np.flatnonzero(finite):
            value = float(r[lane])
            exact = _exact(operation, tuple(float(x[lane]) for x in wide))
            above = value == np.inf or (value != -np.inf and Fraction(value) > exact)
            below = value == -np.inf or (value != np.inf and Fraction(value) < exact)
            if above and (mode == "rm" or (mode == "rz" and exact > 0)):
                r[lane] = np.nextafter(value, -np.inf)
            elif below and (mode == "rp" or (mode == "rz" and exact < 0)):
                r[lane] = np.nextafter(value, np.inf)
        return r

    return run


def div_f32_directed(mode: str) -> Callable[..., Array]:
    """float32 quotient with directed rounding: the sign of the exact residual says on which side the nearest lies."""

    def run(a: Array, b: Array) -> Array:
        r = np.divide(a, b).astype(F32)
        wide_b = b.astype(F64)
        residual = a.astype(F64) - r.astype(F64) * wide_b
        quotient_error = np.where(np.isfinite(residual), residual * np.sign(wide_b), 0.0)
        overflow = np.isinf(r) & np.isfinite(a) & (b != 0)
        quotient_error = np.where(overflow, np.where(r > 0, -1.0, 1.0), quotient_error)
        return _step(r, quotient_error, mode)

    return run


def sqrt_f32_directed(mode: str) -> Callable[..., Array]:
    """float32 square root with directed rounding."""

    def run(a: Array) -> Array:
        r = np.sqrt(a)
        wide = r.astype(F64)
        residual = a.astype(F64) - wide * wide
        return _step(r, np.where(np.isfinite(residual), residual, 0.0), mode)

    return run


def _step(r: Array, error: Array, mode: str) -> Array:
    """Move `r` one place where the exact value `r + error` demands it."""
    lower, upper = np.array(-np.inf, r.dtype), np.array(np.inf, r.dtype)
    down = error < 0
    up = error > 0
    if mode == "rm":
        return np.where(down, np.nextafter(r, lower), r)
    if mode == "rp":
        return np.where(up, np.nextafter(r, upper), r)
    r = np.where(down & (r > 0), np.nextafter(r, lower), r)
    return np.where(up & (r < 0), np.nextafter(r, upper), r)


def fmin(a: Array, b: Array) -> Array:
    """PTX min: a number beats NaN, and -0 is less than +0."""
    r = np.fmin(a, b)
    same = a == b
    if _count(same):
        bits = _BITS[r.dtype]
        r = np.where(same, (a.view(bits) | b.view(bits)), r.view(bits)).view(r.dtype)
    return r


def fmax(a: Array, b: Array) -> Array:
    """PTX max: a number beats NaN, and +0 is greater than -0."""
    r = np.fmax(a, b)
    same = a == b
    if _count(same):
        bits = _BITS[r.dtype]
        r = np.where(same, (a.view(bits) & b.view(bits)), r.view(bits)).view(r.dtype)
    return r


def propagate_nan(operation: Callable[..., Array]) -> Callable[..., Array]:
    """min.NaN and max.NaN: any NaN operand gives the canonical NaN."""

    def run(*operands: Array) -> Array:
        r = operation(*operands)
        bad = np.isnan(operands[0])
        for x in operands[1:]:
            bad = bad | np.isnan(x)
        return np.where(bad, np.array(np.nan, r.dtype), r)

    return run


def xorsign_abs(operation: Callable[..., Array]) -> Callable[..., Array]:
    """min/max.xorsign.abs: of the absolute values, with the sign the xor of both."""

    def run(a: Array, b: Array) -> Array:
        r = operation(np.abs(a), np.abs(b))
        bits, sign = _BITS[r.dtype], _SIGN[r.dtype]
        return (r.view(bits) | ((a.view(bits) ^ b.view(bits)) & sign)).view(r.dtype)

    return run


def negate(x: Array) -> Array:
    """Flip the sign bit."""
    return np.negative(x)


def copysign(a: Array, b: Array) -> Array:
    """PTX copysign: the sign of `a` on the magnitude of `b` (the operands are the other way round in C)."""
    return np.copysign(b, a)


def through_f64(operation: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """An approximate float32 function, computed in float64 and rounded."""
    return lambda x: operation(x.astype(F64)).astype(F32)


def div_approx(a: Array, b: Array) -> Array:
    """div.approx.f32: for 2**126 < |b| < 2**128 the result is 0, or NaN if `a` is infinite."""
    r = np.divide(a, b)
    huge = np.abs(b) > np.array(2.0**126, F32)
    if _count(huge):
        huge &= np.isfinite(b)
        edge = np.where(np.isinf(a), np.array(np.nan, F32), np.copysign(np.array(0, F32), a) * np.sign(b))
        r = np.where(huge, edge, r)
    return r


def reciprocal(x: Array) -> Array:
    """1 / x."""
    return np.divide(np.array(1, x.dtype), x)


# -- comparisons --------------------------------------------------------------------------------------------------


def _ordered_ne(a: Array, b: Array) -> Array:
    return np.less(a, b) | np.greater(a, b)


def _unordered(operation: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda a, b: np.logical_not(operation(a, b))


def _numbers(a: Array, b: Array) -> Array:
    return np.equal(a, a) & np.equal(b, b)


FLOAT_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": _ordered_ne, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "equ": _unordered(_ordered_ne), "neu": np.not_equal, "ltu": _unordered(np.greater_equal),
    "leu": _unordered(np.greater), "gtu": _unordered(np.less_equal), "geu": _unordered(np.less),
    "num": _numbers, "nan": _unordered(_numbers),
}  # fmt: skip
INT_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def test_property(name: str) -> Callable[[Array], Array]:
    """testp: finite, infinite, number, notanumber, normal or subnormal."""
    if name == "finite":
        return np.isfinite
    if name == "infinite":
        return np.isinf
    if name == "notanumber":
        return np.isnan
    if name == "number":
        return lambda x: np.equal(x, x)
    if name == "normal":
        return lambda x: np.isfinite(x) & (np.abs(x) >= _MIN_NORMAL[x.dtype])
    return lambda x: (np.abs(x) < _MIN_NORMAL[x.dtype]) & (x != 0)


# -- half precision -----------------------------------------------------------------------------------------------


def fma_f16(a: Array, b: Array, c: Array) -> Array:
    """float16 fma. A float64 sum is exact wherever a float16 midpoint is near, so one rounding remains."""
    return (a.astype(F64) * b.astype(F64) + c.astype(F64)).astype(F16)


def bf16_to_f32(x: Array) -> Array:
    """The float32 of a bfloat16 pattern (exact)."""
    return (x.astype(U32) << np.uint32(16)).view(F32)


def f32_to_bf16(x: Array) -> Array:
    """Round float32 to the nearest-even bfloat16 pattern; NaN becomes 0x7FFF."""
    bits = x.view(U32)
    sixteen = np.uint32(16)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> sixteen) & np.uint32(1)))) >> sixteen
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(U16)


def f32_to_bf16_rz(x: Array) -> Array:
    """Truncate float32 to a bfloat16 pattern; NaN becomes 0x7FFF."""
    return np.where(np.isnan(x), np.uint32(0x7FFF), x.view(U32) >> np.uint32(16)).astype(U16)


def fma_bf16(a: Array, b: Array, c: Array) -> Array:
    """bfloat16 fma with one rounding."""
    p = bf16_to_f32(a).astype(F64) * bf16_to_f32(b).astype(F64)
    wide = bf16_to_f32(c).astype(F64)
    s = p + wide
    return f32_to_bf16(odd_float32(round_to_odd(s, sum_error(p, wide, s))))


_BF16_ONE = np.array([0x3F80], U16)
_BF16_MINUS_ONE = np.array([0xBF80], U16)
_BF16_MINUS_ZERO = np.array([0x8000], U16)


def add_bf16(a: Array, b: Array) -> Array:
    """bfloat16 sum with one rounding."""
    return fma_bf16(a, _BF16_ONE, b)


def sub_bf16(a: Array, b: Array) -> Array:
    """bfloat16 difference with one rounding."""
    return fma_bf16(b, _BF16_MINUS_ONE, a)


def mul_bf16(a: Array, b: Array) -> Array:
    """bfloat16 product with one rounding."""
    return fma_bf16(a, b, _BF16_MINUS_ZERO)


def in_bf16(operation: Callable[..., Array]) -> Callable[..., Array]:
    """A float32 function on bfloat16 patterns, rounded once (exact for min, max, abs, neg)."""
    return lambda *operands: f32_to_bf16(operation(*[bf16_to_f32(x) for x in operands]))


def packed(operation: Callable[..., Array], element: np.dtype[Any]) -> Callable[..., Array]:
    """Apply `operation` to both 16-bit halves of `uint32` operands; a half is `element` (float16, uint16, int16)."""

    def run(*operands: Array) -> Array:
        halves = [np.ascontiguousarray(x).reshape(-1, 1).view(element) for x in operands]
        return np.ascontiguousarray(operation(*halves)).view(U32).reshape(-1)

    return run


# -- integers -----------------------------------------------------------------------------------------------------


def div_truncating(a: Array, b: Array) -> Array:
    """Integer quotient toward zero; all ones for a zero divisor, INT_MIN / -1 wraps."""
    if a.dtype.kind == "u":
        zero = b == 0
        q = np.floor_divide(a, np.where(zero, np.array(1, b.dtype), b))
        return np.where(zero, np.array(np.iinfo(a.dtype).max, a.dtype), q)
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    size_a, size_b = np.abs(a).view(unsigned), np.abs(b).view(unsigned)
    zero = size_b == 0
    q = np.floor_divide(size_a, np.where(zero, np.array(1, unsigned), size_b)).view(a.dtype)
    q = np.where((a < 0) != (b < 0), np.negative(q), q)
    return np.where(zero, np.array(-1, a.dtype), q)


def remainder_truncating(a: Array, b: Array) -> Array:
    """Integer remainder with the sign of the dividend; the dividend itself for a zero divisor."""
    if a.dtype.kind == "u":
        zero = b == 0
        return np.where(zero, a, np.remainder(a, np.where(zero, np.array(1, b.dtype), b)))
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    size_a, size_b = np.abs(a).view(unsigned), np.abs(b).view(unsigned)
    zero = size_b == 0
    r = np.remainder(size_a, np.where(zero, np.array(1, unsigned), size_b)).view(a.dtype)
    return np.where(zero, a, np.where(a < 0, np.negative(r), r))


_WIDER: dict[Any, np.dtype[Any]] = {I16: I32, U16: U32, I32: I64, U32: U64}


def mul_wide(a: Array, b: Array) -> Array:
    """The full product in twice the width."""
    wide = _WIDER[a.dtype]
    return np.multiply(a.astype(wide), b.astype(wide))


def mul_high(a: Array, b: Array) -> Array:
    """The upper half of the full product."""
    bits = 8 * a.dtype.itemsize
    if bits < 64:
        return (mul_wide(a, b) >> np.array(bits, _WIDER[a.dtype])).astype(a.dtype)
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    x, y = a.view(U64), b.view(U64)
    x_low, x_high, y_low, y_high = x & mask, x >> shift, y & mask, y >> shift
    middle = x_high * y_low + ((x_low * y_low) >> shift)
    carry = (middle & mask) + x_low * y_high
    high = x_high * y_high + (middle >> shift) + (carry >> shift)
    if a.dtype == I64:
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
        return high.view(I64)
    return high


def saturating_add(a: Array, b: Array) -> Array:
    """add.sat.s32."""
    return np.clip(a.astype(I64) + b.astype(I64), -(2**31), 2**31 - 1).astype(I32)


def saturating_sub(a: Array, b: Array) -> Array:
    """sub.sat.s32."""
    return np.clip(a.astype(I64) - b.astype(I64), -(2**31), 2**31 - 1).astype(I32)


def mul24(a: Array, b: Array, *, high: bool) -> Array:
    """mul24: the 48-bit product of the low 24 bits; bits 31..0 (.lo) or 47..16 (.hi)."""
    shift = np.array(8, a.dtype)
    wide = _WIDER[a.dtype]
    product = ((a << shift) >> shift).astype(wide) * ((b << shift) >> shift).astype(wide)
    return ((product >> np.array(16, wide)) if high else product).astype(a.dtype)


def sad(a: Array, b: Array, c: Array) -> Array:
    """c + |a - b|."""
    return np.add(c, np.where(a < b, np.subtract(b, a), np.subtract(a, b)))


def funnel_left(low: Array, high: Array, amount: Array, *, wrap: bool) -> Array:
    """shf.l: the upper word of (high:low) << amount."""
    n = (amount & np.uint32(31)) if wrap else np.minimum(amount, np.uint32(32))
    value = (high.astype(U64) << np.uint64(32)) | low.astype(U64)
    return ((value << n.astype(U64)) >> np.uint64(32)).astype(U32)


def funnel_right(low: Array, high: Array, amount: Array, *, wrap: bool) -> Array:
    """shf.r: the lower word of (high:low) >> amount."""
    n = (amount & np.uint32(31)) if wrap else np.minimum(amount, np.uint32(32))
    value = (high.astype(U64) << np.uint64(32)) | low.astype(U64)
    return (value >> n.astype(U64)).astype(U32)


def population(x: Array) -> Array:
    """popc: the number of one bits."""
    return np.bitwise_count(x).astype(U32)


def _smear(x: Array) -> Array:
    """Set every bit below the highest one bit."""
    bits = 8 * x.dtype.itemsize
    step = 1
    while step < bits:
        x = x | (x >> np.array(step, x.dtype))
        step *= 2
    return x


def leading_zeros(x: Array) -> Array:
    """clz: zero bits above the highest one bit; the width for 0."""
    return (8 * x.dtype.itemsize - np.bitwise_count(_smear(x)).astype(np.int32)).astype(U32)


_REVERSED_BYTE = np.array([int(f"{i:08b}"[::-1], 2) for i in range(256)], np.uint8)


def reverse_bits(x: Array) -> Array:
    """brev."""
    octets = np.ascontiguousarray(x).reshape(-1, 1).view(U8)
    return np.ascontiguousarray(_REVERSED_BYTE[octets][:, ::-1]).view(x.dtype).reshape(-1)


def find_highest(x: Array, *, shift_amount: bool) -> Array:
    """bfind: position of the highest significant bit (of ~x if negative); 0xFFFFFFFF if there is none."""
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    plain = np.where(x < 0, ~x, x).view(unsigned) if x.dtype.kind == "i" else x
    position = np.bitwise_count(_smear(plain)).astype(np.int32) - 1
    found = (8 * x.dtype.itemsize - 1 - position) if shift_amount else position
    return np.where(position < 0, np.int32(-1), found).astype(I32).view(U32)


def extract_field(a: Array, start: Array, length: Array) -> Array:
    """bfe: `length` bits from bit `start`, sign-extended for a signed type."""
    bits = 8 * a.dtype.itemsize
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    position = (start & np.uint32(0xFF)).astype(np.int64)
    count = (length & np.uint32(0xFF)).astype(np.int64)
    fill = np.zeros(1, unsigned)
    if a.dtype.kind == "i":
        last = np.minimum(position + count - 1, bits - 1)
        sign = (a.view(unsigned) >> np.maximum(last, 0).astype(unsigned)) & np.array(1, unsigned)
        fill = np.where((sign != 0) & (count > 0), np.array(np.iinfo(unsigned).max, unsigned), np.array(0, unsigned))
    present = np.clip(bits - position, 0, count)
    mask = low_mask(present, unsigned)
    body = (a.view(unsigned) >> np.minimum(position, bits).astype(unsigned)) & mask
    return (body | (fill & ~mask)).view(a.dtype)


def low_mask(count: Array, unsigned: np.dtype[Any]) -> Array:
    """`count` one bits from bit 0 up, with 0 <= count; at or above the width all ones."""
    bits = 8 * unsigned.itemsize
    whole: Array = np.array(int(np.iinfo(unsigned).max), unsigned)
    return np.where(count >= bits, whole, (np.array(1, unsigned) << np.minimum(count, bits).astype(unsigned)) - 1)


def insert_field(a: Array, b: Array, start: Array, length: Array) -> Array:
    """bfi: `b` with its field of `length` bits at `start` replaced by the low bits of `a`."""
    unsigned = a.dtype
    position = (start & np.uint32(0xFF)).astype(unsigned)
    mask = low_mask((length & np.uint32(0xFF)).astype(np.int64), unsigned) << position
    return (b & ~mask) | ((a << position) & mask)


def bit_mask(start: Array, length: Array, *, clamp: bool) -> Array:
    """bmsk: `length` one bits from bit `start`; both are taken modulo 32, or clamped to 32."""
    if clamp:
        position, count = np.minimum(start, np.uint32(32)), np.minimum(length, np.uint32(32))
    else:
        position, count = start & np.uint32(31), length & np.uint32(31)
    return np.left_shift(low_mask(count.astype(np.int64), U32), position)


def extend_from(a: Array, width: Array, *, clamp: bool) -> Array:
    """szext: the low `width` bits of `a`, sign- or zero-extended by its type; width modulo 32, or clamped to 32."""
    count = (np.minimum(width, np.uint32(32)) if clamp else width & np.uint32(31)).astype(np.int64)
    mask = low_mask(count, U32)
    low = a.view(U32) & mask
    if a.dtype.kind == "u":
        return low
    sign = np.where(count > 0, (a.view(U32) >> np.maximum(count - 1, 0).astype(U32)) & np.uint32(1), np.uint32(0))
    return np.where(sign != 0, low | ~mask, low).view(I32)


def permute_bytes(mode: str) -> Callable[..., Array]:
    """prmt: pick four bytes of the eight in (b:a); `mode` is "" or f4e b4e rc8 ecl ecr rc16."""
    fixed = {
        "f4e": [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]],
        "b4e": [[0, 7, 6, 5], [1, 0, 7, 6], [2, 1, 0, 7], [3, 2, 1, 0]],
        "rc8": [[0] * 4, [1] * 4, [2] * 4, [3] * 4],
        "ecl": [[0, 1, 2, 3], [1, 1, 2, 3], [2, 2, 2, 3], [3, 3, 3, 3]],
        "ecr": [[0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 2, 2], [0, 1, 2, 3]],
        "rc16": [[0, 1, 0, 1], [2, 3, 2, 3], [0, 1, 0, 1], [2, 3, 2, 3]],
    }

    def run(a: Array, b: Array, selector: Array) -> Array:
        pool = (b.astype(U64) << np.uint64(32)) | a.astype(U64)
        result = np.zeros(1, U32)
        for place in range(4):
            if mode:
                table = np.array([row[place] for row in fixed[mode]], np.uint64)
                source = table[(selector & np.uint32(3)).astype(np.intp)]
                octet = (pool >> (source * np.uint64(8))) & np.uint64(0xFF)
            else:
                nibble = (selector >> np.uint32(4 * place)) & np.uint32(0xF)
                octet = (pool >> ((nibble & np.uint32(7)).astype(U64) * np.uint64(8))) & np.uint64(0xFF)
                sign = np.where(octet >= 0x80, np.uint64(0xFF), np.uint64(0))
                octet = np.where((nibble & np.uint32(8)) != 0, sign, octet)
            result = result | (octet.astype(U32) << np.uint32(8 * place))
        return result

    return run


def lookup3(table: int) -> Callable[..., Array]:
    """lop3: the bitwise function of three inputs whose truth table is the byte `table`."""

    def run(a: Array, b: Array, c: Array) -> Array:
        result = np.zeros(1, a.dtype)
        for row in range(8):
            if table >> row & 1:
                term = (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
                result = result | term
        return result

    return run


def dot_bytes(a_signed: bool, b_signed: bool) -> Callable[..., Array]:
    """dp4a: c plus the dot product of four bytes."""

    def run(a: Array, b: Array, c: Array) -> Array:
        x = np.ascontiguousarray(a).reshape(-1, 1).view(I8 if a_signed else U8).astype(np.int64)
        y = np.ascontiguousarray(b).reshape(-1, 1).view(I8 if b_signed else U8).astype(np.int64)
        return (c.astype(np.int64) + (x * y).sum(axis=1)).astype(c.dtype)

    return run


def dot_halves(a_signed: bool, b_signed: bool, *, high: bool) -> Callable[..., Array]:
    """dp2a: c plus the dot product of two 16-bit parts of `a` with the low or high two bytes of `b`."""

    def run(a: Array, b: Array, c: Array) -> Array:
        x = np.ascontiguousarray(a).reshape(-1, 1).view(I16 if a_signed else U16).astype(np.int64)
        y = np.ascontiguousarray(b).reshape(-1, 1).view(I8 if b_signed else U8).astype(np.int64)
        part = y[:, 2:] if high else y[:, :2]
        return (c.astype(np.int64) + (x * part).sum(axis=1)).astype(c.dtype)

    return run


# -- conversions --------------------------------------------------------------------------------------------------

_INTEGRAL: dict[str, Callable[[Array], Array]] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def to_integral(mode: str) -> Callable[[Array], Array]:
    """Round a float to an integral value of its own type: rni, rzi, rmi or rpi."""
    return _INTEGRAL[mode]


def _integer(value: int, dtype: np.dtype[Any]) -> Array:
    return np.array(value, dtype)


def float_to_int(mode: str, out: np.dtype[Any]) -> Callable[[Array], Array]:
    """Float to integer: rounded by `mode`, clamped to the range of `out`.

    NaN gives 0, except that a float64 source or a 64-bit destination gives the top bit alone (PTX ISA, cvt).
    """
    info = np.iinfo(out)
    round_ = _INTEGRAL[mode]
    top = 1 << (8 * out.itemsize - 1)

    def run(x: Array) -> Array:
        top_bit_for_nan = x.dtype == F64 or out.itemsize == 8
        wide = round_(x.astype(F64))
        nan = np.isnan(wide)
        if out.itemsize < 8:
            r = np.where(nan, 0.0, np.clip(wide, float(info.min), float(info.max))).astype(np.int64).astype(out)
        else:
            limit = float(info.max) + 1.0  # 2**63 or 2**64, exact
            high, low = wide >= limit, wide < float(info.min)
            r = np.where(nan | high | low, 0.0, wide).astype(out)
            r = np.where(high, _integer(info.max, out), np.where(low, _integer(info.min, out), r))
        if _count(nan):
            value = (top if out.kind == "u" else info.min) if top_bit_for_nan else 0
            r = np.where(nan, _integer(value, out), r)
        return r

    return run


def int_to_float(mode: str, out: np.dtype[Any]) -> Callable[[Array], Array]:
    """Integer to float16, float32 or float64 with rounding rn, rz, rm or rp."""

    def nearest(x: Array) -> Array:
        if out == F16:
            return _int_to_f16(x)
        return x.astype(out)

    if mode == "rn":
        return nearest

    def run(x: Array) -> Array:
        r = nearest(x)
        for lane in range(r.shape[0]):  # rare: exactness over speed
            value, exact = float(r[lane]), int(x[lane])
            above, below = value > exact, value < exact
            if above and (mode == "rm" or (mode == "rz" and exact > 0)):
                r[lane] = np.nextafter(r[lane], np.array(-np.inf, out))
            elif below and (mode == "rp" or (mode == "rz" and exact < 0)):
                r[lane] = np.nextafter(r[lane], np.array(np.inf, out))
        return r

    return run


def _int_to_f16(x: Array) -> Array:
    # float64 holds 32-bit integers exactly; larger ones overflow float16 long before float64 rounds
    return x.astype(F64).astype(F16)


def clamp_int(out: np.dtype[Any]) -> Callable[[Array], Array]:
    """Integer to integer with saturation (cvt.sat)."""
    info = np.iinfo(out)

    def run(x: Array) -> Array:
        source = np.iinfo(x.dtype)
        low, high = max(info.min, source.min), min(info.max, source.max)
        return np.clip(x, np.array(low, x.dtype), np.array(high, x.dtype)).astype(out)

    return run


def f64_to_f32_directed(mode: str) -> Callable[[Array], Array]:
    """float64 to float32 with directed rounding."""
    return lambda x: directed(x, np.zeros(1), mode, F32)


def to_f16_rz(x: Array) -> Array:
    """float32 or float64 to float16 toward zero."""
    r = x.astype(F16)
    wide, exact = r.astype(F64), x.astype(F64)
    down = (wide > exact) & (wide > 0)
    up = (wide < exact) & (wide < 0)
    r = np.where(down, np.nextafter(r, np.array(-np.inf, F16)), r)
    return np.where(up, np.nextafter(r, np.array(np.inf, F16)), r)


def to_f16_toward(mode: str) -> Callable[[Array], Array]:
    """Floats to float16 toward minus (rm) or plus infinity (rp)."""

    def run(x: Array) -> Array:
        r = x.astype(F16)
        wide, exact = r.astype(F64), x.astype(F64)
        wrong = wide > exact if mode == "rm" else wide < exact
        return np.where(wrong, np.nextafter(r, np.array(-np.inf if mode == "rm" else np.inf, F16)), r)

    return run


def f32_to_bf16_toward(mode: str) -> Callable[[Array], Array]:
    """float32 to a bfloat16 pattern toward minus (rm) or plus infinity (rp); NaN becomes 0x7FFF."""

    def run(x: Array) -> Array:
        bits = x.view(U32)
        away = ((bits & np.uint32(0xFFFF)) != 0) & ((bits >> np.uint32(31) != 0) == (mode == "rm"))
        return np.where(np.isnan(x), np.uint32(0x7FFF), (bits >> np.uint32(16)) + away).astype(U16)

    return run


def f32_to_tf32(x: Array) -> Array:
    """cvt.rna.tf32: keep 10 fraction bits, ties away from zero; the pattern as uint32."""
    bits = x.view(U32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded, bits)


def _fp8_values(exponent_bits: int, fraction_bits: int) -> Array:
    """Values of the 128 non-negative patterns of an 8-bit float; NaN and infinity as the format has them."""
    bias = (1 << (exponent_bits - 1)) - 1
    values = []
    for pattern in range(128):
        exponent, fraction = pattern >> fraction_bits, pattern & ((1 << fraction_bits) - 1)
        if exponent == 0:
            values.append(fraction * 2.0 ** (1 - bias - fraction_bits))
        else:
            values.append((1 + fraction / (1 << fraction_bits)) * 2.0 ** (exponent - bias))
    if exponent_bits == 4:
        values[127] = np.nan
    else:
        values[124], values[125:] = np.inf, [np.nan] * 3
    return np.array(values, np.float64)


_FP8 = {"e4m3": _fp8_values(4, 3), "e5m2": _fp8_values(5, 2)}
_FP8_LARGEST = {"e4m3": 126, "e5m2": 123}


def to_fp8(kind: str) -> Callable[[Array], Array]:
    """Float to e4m3 or e5m2 patterns (uint8), nearest even, saturating to the largest finite; NaN is 0x7F."""
    largest = _FP8_LARGEST[kind]
    values = _FP8[kind][: largest + 1]
    middles = (values[:-1] + values[1:]) / 2

    def run(x: Array) -> Array:
        size = np.abs(x).astype(F64)
        below = np.searchsorted(middles, size, side="left")  # ties: the lower neighbour
        tie = (below < len(middles)) & (middles[np.minimum(below, len(middles) - 1)] == size)
        pattern = np.where(tie & (below % 2 == 1), below + 1, below)
        pattern = np.where(np.isnan(x), 0x7F, pattern)
        return (pattern | np.where(np.signbit(x) & ~np.isnan(x), 0x80, 0)).astype(U8)

    return run


def from_fp8(kind: str) -> Callable[[Array], Array]:
    """e4m3 or e5m2 patterns (uint8) to float16 (exact)."""
    half = _FP8[kind].astype(F16)
    table = np.concatenate([half, -half])
    return lambda x: table[x]
