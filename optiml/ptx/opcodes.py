"""The one table of what the engine executes: PTX opcode family -> how.

A family without side effects is a `Pure` row: a function of the full opcode that names the operand types, the result
type and the numpy function. Families that touch memory, other threads or control flow are named in `EFFECTS` with the
name of the method of the lowering that builds them. An opcode that is in neither table, or whose row does not know
one of its modifiers, is unsupported: it is refused by name when a kernel containing it is launched.

Operand types are written as tokens: a kind and a size in bytes. Kinds: u, i, f (unsigned, signed, float), p
(predicate), x (integer of either sign: the operation does not care), w (any bits: the operation only moves them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from optiml.ptx import numerics as num
from optiml.ptx.numerics import BOOL, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64

DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "u1": U8, "i1": I8, "u2": U16, "i2": I16, "f2": F16, "u4": U32, "i4": I32, "f4": F32,
        "u8": U64, "i8": I64, "f8": F64, "p": BOOL,
    }
)  # fmt: skip

TOKENS: Mapping[str, str] = MappingProxyType(
    {
        "u8": "u1", "s8": "i1", "b8": "w1", "u16": "u2", "s16": "i2", "b16": "w2", "f16": "f2", "bf16": "u2",
        "u32": "u4", "s32": "i4", "b32": "w4", "f32": "f4", "f16x2": "u4", "bf16x2": "u4", "tf32": "u4",
        "u64": "u8", "s64": "i8", "b64": "w8", "f64": "f8", "pred": "p", "e4m3x2": "u2", "e5m2x2": "u2",
    }
)  # fmt: skip

Operation = Callable[..., Any]


class UnknownForm(Exception):
    """The row of this family does not cover this spelling."""


# What a lowering raises for an instruction whose operands are not those of its opcode: too few, of another sort, out of
# range. Callers turn them into `Unsupported`, so that malformed text costs an error and not a process.
MALFORMED = (
    UnknownForm, KeyError, IndexError, ValueError, OverflowError, AttributeError, TypeError, AssertionError,
    RecursionError,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Pure:
    """An operation without side effects: tokens of its operands and result, and the function.

    `wide_literals`: the function also takes float32 literals as float64.
    """

    inputs: tuple[str, ...]
    output: str
    apply: Operation
    wide_literals: bool = False


def _integer(type_name: str) -> str:
    """Token of an operand whose signedness does not matter."""
    return "x" + TOKENS[type_name][1:]


def _only(parts: tuple[str, ...], *allowed: str) -> frozenset[str]:
    """The modifiers between family and type; every one must be in `allowed`."""
    found = frozenset(parts[1:-1])
    if found - set(allowed):
        raise UnknownForm
    return found


def _modified(operation: Operation, found: frozenset[str]) -> Operation:
    if "ftz" in found:
        operation = num.flushed(operation)
    if "sat" in found:
        operation = num.saturated(operation)
    if "relu" in found:
        plain = operation
        return lambda *operands: num.relu(plain(*operands))
    return operation


def _half(
    kind: str, found: frozenset[str], half: Operation, bfloat: Operation, arity: int, out: str | None = None
) -> Pure:
    """A row on f16, bf16, f16x2 or bf16x2 from its scalar forms on float16 values and on bfloat16 patterns."""
    if kind.startswith("bf16"):
        if found & {"ftz", "sat"}:
            raise UnknownForm
        operation = bfloat
        if "relu" in found:
            plain = bfloat

            def operation(*operands: Any) -> Any:
                return num.in_bf16(num.relu)(plain(*operands))

        element: np.dtype[Any] = U16
        token = "u2"
    else:
        operation = _modified(half, found)
        element, token = F16, "f2"
    if kind.endswith("x2"):
        return Pure(inputs=("u4",) * arity, output=out or "u4", apply=num.packed(operation, element))
    return Pure(inputs=(token,) * arity, output=out or token, apply=operation)


_ROUNDINGS = ("rn", "rz", "rm", "rp")
_HALVES = frozenset({"f16", "f16x2", "bf16", "bf16x2"})


def _rounding(found: frozenset[str]) -> str:
    modes = [mode for mode in _ROUNDINGS if mode in found]
    return modes[0] if modes else "rn"


def _add_sub(parts: tuple[str, ...]) -> Pure:
    family, kind = parts[0], parts[-1]
    plain = np.add if family == "add" else np.subtract
    if kind in _HALVES:
        found = _only(parts, "rn", "ftz", "sat")
        return _half(kind, found, plain, num.add_bf16 if family == "add" else num.sub_bf16, 2)
    if kind in ("f32", "f64"):
        found = _only(parts, *_ROUNDINGS, "ftz", "sat")
        mode = _rounding(found)
        operation: Operation = plain
        if mode != "rn":
            operation = directed = num.add_directed(mode, DTYPES[TOKENS[kind]])
            if family == "sub":

                def operation(a: Any, b: Any) -> Any:
                    return directed(a, np.negative(b))

        return Pure(inputs=(TOKENS[kind],) * 2, output=TOKENS[kind], apply=_modified(operation, found))
    found = _only(parts, "sat")
    if found:
        return Pure(
            inputs=("i4", "i4"), output="i4", apply=num.saturating_add if family == "add" else num.saturating_sub
        )
    if kind in ("u16x2", "s16x2"):
        return Pure(inputs=("u4", "u4"), output="u4", apply=num.packed(plain, U16))
    token = _integer(kind)
    return Pure(inputs=(token, token), output=token, apply=plain)


def _wide(token: str) -> str:
    return token[0] + str(2 * int(token[1:]))


def _mul(parts: tuple[str, ...]) -> Pure:
    kind = parts[-1]
    if kind in _HALVES:
        return _half(kind, _only(parts, "rn", "ftz", "sat"), np.multiply, num.mul_bf16, 2)
    if kind in ("f32", "f64"):
        found = _only(parts, *_ROUNDINGS, "ftz", "sat")
        mode = _rounding(found)
        operation: Operation = np.multiply
        if mode != "rn":
            operation = num.mul_f32_directed(mode) if kind == "f32" else num.f64_directed("mul", mode)
        return Pure(inputs=(TOKENS[kind],) * 2, output=TOKENS[kind], apply=_modified(operation, found))
    found = _only(parts, "lo", "hi", "wide")
    token = TOKENS[kind]
    if "wide" in found:
        return Pure(inputs=(token, token), output=_wide(token), apply=num.mul_wide)
    if "hi" in found:
        return Pure(inputs=(token, token), output=token, apply=num.mul_high)
    return Pure(inputs=(_integer(kind),) * 2, output=_integer(kind), apply=np.multiply)


def _mad(parts: tuple[str, ...]) -> Pure:
    kind = parts[-1]
    if kind in ("f32", "f64"):
        return _fma(parts)
    found = _only(parts, "lo", "hi", "wide", "sat")
    token = TOKENS[kind]
    if "sat" in found:
        raise UnknownForm
    if "wide" in found:
        wide = _wide(token)
        return Pure(inputs=(token, token, wide), output=wide, apply=lambda a, b, c: np.add(num.mul_wide(a, b), c))
    if "hi" in found:
        return Pure(inputs=(token,) * 3, output=token, apply=lambda a, b, c: np.add(num.mul_high(a, b), c))
    multiply, add = np.multiply, np.add
    return Pure(inputs=(_integer(kind),) * 3, output=_integer(kind), apply=lambda a, b, c: add(multiply(a, b), c))


def _mul24(parts: tuple[str, ...]) -> Pure:
    found = _only(parts, "lo", "hi")
    token = TOKENS[parts[-1]]
    operation = partial(num.mul24, high="hi" in found)
    if parts[0] == "mad24":
        return Pure(inputs=(token,) * 3, output=token, apply=lambda a, b, c: np.add(operation(a, b), c))
    return Pure(inputs=(token, token), output=token, apply=operation)


def _fma(parts: tuple[str, ...]) -> Pure:
    kind = parts[-1]
    if kind in _HALVES:
        return _half(kind, _only(parts, "rn", "ftz", "sat", "relu"), num.fma_f16, num.fma_bf16, 3)
    found = _only(parts, *_ROUNDINGS, "ftz", "sat")
    mode = _rounding(found)
    token = TOKENS[kind]
    if kind == "f32":
        operation: Operation = num.fma_f32 if mode == "rn" else num.fma_f32_directed(mode)
    elif kind == "f64":
        operation = num.fma_f64 if mode == "rn" else num.f64_directed("fma", mode)
    else:
        raise UnknownForm
    plain = kind == "f32" and not found & {"ftz"}
    return Pure(inputs=(token,) * 3, output=token, apply=_modified(operation, found), wide_literals=plain)


def _div(parts: tuple[str, ...]) -> Pure:
    kind = parts[-1]
    token = TOKENS[kind]
    if kind not in ("f32", "f64"):
        _only(parts)
        return Pure(inputs=(token, token), output=token, apply=num.div_truncating)
    found = _only(parts, *_ROUNDINGS, "approx", "full", "ftz")
    mode = _rounding(found)
    operation: Operation = num.div_approx if "approx" in found else np.divide
    if mode != "rn":
        operation = num.div_f32_directed(mode) if kind == "f32" else num.f64_directed("div", mode)
    return Pure(inputs=(token, token), output=token, apply=_modified(operation, found))


def _rem(parts: tuple[str, ...]) -> Pure:
    _only(parts)
    token = TOKENS[parts[-1]]
    return Pure(inputs=(token, token), output=token, apply=num.remainder_truncating)


def _abs_neg(parts: tuple[str, ...]) -> Pure:
    kind = parts[-1]
    family = parts[0]
    found = _only(parts, "ftz")
    if kind in _HALVES:
        # sign-bit operations on the pattern, NaN included
        mask, flip = np.uint16(0x7FFF), np.uint16(0x8000)

        def on_bits(x: Any) -> Any:
            return x & mask if family == "abs" else x ^ flip

        if kind.endswith("x2"):
            return Pure(inputs=("u4",), output="u4", apply=num.packed(on_bits, U16))
        return Pure(inputs=("u2",), output="u2", apply=on_bits)
    token = TOKENS[kind]
    return Pure(inputs=(token,), output=token, apply=_modified(np.abs if family == "abs" else np.negative, found))


def _min_max(parts: tuple[str, ...]) -> Pure:
    kind = parts[-1]
    smallest = parts[0] == "min"
    if kind in _HALVES or kind in ("f32", "f64"):
        found = _only(parts, "ftz", "NaN", "xorsign", "abs")
        operation: Operation = num.fmin if smallest else num.fmax
        if "xorsign" in found:
            operation = num.xorsign_abs(operation)
        if "NaN" in found:
            operation = num.propagate_nan(operation)
        rest = found - {"NaN", "xorsign", "abs"}
        if kind in _HALVES:
            return _half(kind, rest, operation, num.in_bf16(operation), 2)
        return Pure(inputs=(TOKENS[kind],) * 2, output=TOKENS[kind], apply=_modified(operation, rest))
    found = _only(parts, "relu")
    plain = np.minimum if smallest else np.maximum
    if kind in ("s16x2", "u16x2"):
        return Pure(inputs=("u4", "u4"), output="u4", apply=num.packed(plain, I16 if kind[0] == "s" else U16))
    if found:
        raise UnknownForm
    return Pure(inputs=(TOKENS[kind],) * 2, output=TOKENS[kind], apply=plain)


_BITWISE: Mapping[str, Operation] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def _logic(parts: tuple[str, ...]) -> Pure:
    _only(parts)
    token = "p" if parts[-1] == "pred" else _integer(parts[-1])
    return Pure(inputs=(token, token), output=token, apply=_BITWISE[parts[0]])


def _not(parts: tuple[str, ...]) -> Pure:
    _only(parts)
    token = "p" if parts[-1] == "pred" else _integer(parts[-1])
    if parts[0] == "cnot":
        dtype = DTYPES["u" + token[1:]]
        token = "u" + token[1:]
        return Pure(inputs=(token,), output=token, apply=lambda a: (a == 0).astype(dtype))
    return Pure(inputs=(token,), output=token, apply=np.invert)


def _shift(parts: tuple[str, ...]) -> Pure:
    """shl and shr; amounts at or above the width leave only the fill, which is also numpy's rule."""
    _only(parts)
    kind = parts[-1]
    token = TOKENS[kind] if parts[0] == "shr" and kind[0] == "s" else "u" + TOKENS[kind][1:]
    if parts[0] == "shl":
        token = _integer(kind)
    operation = np.left_shift if parts[0] == "shl" else np.right_shift
    if token[1:] == "4":  # an amount of 2**31 or more turns negative as int32, and is out of range there too
        return Pure(inputs=(token, token), output=token, apply=operation)
    most = np.uint32(255)
    return Pure(
        inputs=(token, "u4"), output=token, apply=lambda a, n: operation(a, np.minimum(n, most).astype(a.dtype))
    )


def shift_by_constant(parts: tuple[str, ...]) -> Pure:
    """A shift whose amount is a literal: it is stored in the dtype of the value, so nothing is converted."""
    row = _shift(parts)
    operation = np.left_shift if parts[0] == "shl" else np.right_shift
    return Pure(inputs=(row.inputs[0],) * 2, output=row.output, apply=operation)


def _funnel(parts: tuple[str, ...]) -> Pure:
    if len(parts) != 4 or parts[2] not in ("wrap", "clamp") or parts[1] not in ("l", "r"):
        raise UnknownForm
    operation = num.funnel_left if parts[1] == "l" else num.funnel_right
    return Pure(inputs=("u4",) * 3, output="u4", apply=partial(operation, wrap=parts[2] == "wrap"))


def _bits(operation: Operation, output: str | None = None) -> Callable[[tuple[str, ...]], Pure]:
    def row(parts: tuple[str, ...]) -> Pure:
        _only(parts)
        token = "u" + TOKENS[parts[-1]][1:]
        return Pure(inputs=(token,), output=output or token, apply=operation)

    return row


def _bfind(parts: tuple[str, ...]) -> Pure:
    found = _only(parts, "shiftamt")
    return Pure(
        inputs=(TOKENS[parts[-1]].replace("w", "u"),),
        output="u4",
        apply=partial(num.find_highest, shift_amount="shiftamt" in found),
    )


def _bfe(parts: tuple[str, ...]) -> Pure:
    _only(parts)
    token = TOKENS[parts[-1]]
    return Pure(inputs=(token, "u4", "u4"), output=token, apply=num.extract_field)


def _bfi(parts: tuple[str, ...]) -> Pure:
    _only(parts)
    token = "u" + TOKENS[parts[-1]][1:]
    return Pure(inputs=(token, token, "u4", "u4"), output=token, apply=num.insert_field)


def _mask_or_extend(parts: tuple[str, ...]) -> Pure:
    """bmsk.mode.b32 and szext.mode.type."""
    if len(parts) != 3 or parts[1] not in ("clamp", "wrap"):
        raise UnknownForm
    clamp = parts[1] == "clamp"
    if parts[0] == "bmsk":
        return Pure(inputs=("u4", "u4"), output="u4", apply=partial(num.bit_mask, clamp=clamp))
    token = TOKENS[parts[2]]
    return Pure(inputs=(token, "u4"), output=token, apply=partial(num.extend_from, clamp=clamp))


def _prmt(parts: tuple[str, ...]) -> Pure:
    mode = parts[2] if len(parts) == 3 else ""
    if mode not in ("", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16"):
        raise UnknownForm
    return Pure(inputs=("u4",) * 3, output="u4", apply=num.permute_bytes(mode))


def _dp(parts: tuple[str, ...]) -> Pure:
    """dp4a.atype.btype and dp2a.mode.atype.btype."""
    a_signed, b_signed = parts[-2][0] == "s", parts[-1][0] == "s"
    out = "i4" if a_signed or b_signed else "u4"
    if parts[0] == "dp4a":
        operation = num.dot_bytes(a_signed, b_signed)
    else:
        operation = num.dot_halves(a_signed, b_signed, high=parts[1] == "hi")
    return Pure(inputs=("u4", "u4", out), output=out, apply=operation)


def _vabsdiff4(parts: tuple[str, ...]) -> Pure:
    """vabsdiff4.u32.u32.u32[.add]: absolute differences of bytes, or their sum added to the third operand."""
    signed = parts[2] == "s32"
    if parts[2] != parts[3] or parts[4:] not in ((), ("add",)):
        raise UnknownForm
    element = I8 if signed else U8

    def run(a: Any, b: Any, c: Any) -> Any:
        x, y = (np.ascontiguousarray(v).reshape(-1, 1).view(element).astype(I32) for v in (a, b))
        apart = np.abs(x - y)
        if "add" in parts:
            return (c.astype(np.int64) + apart.sum(axis=1)).astype(U32)
        return np.ascontiguousarray(apart.astype(U8)).view(U32).reshape(-1)

    return Pure(inputs=("u4",) * 3, output="u4", apply=run)


def _sad(parts: tuple[str, ...]) -> Pure:
    _only(parts)
    token = TOKENS[parts[-1]]
    return Pure(inputs=(token,) * 3, output=token, apply=num.sad)


def _unary_float(
    approximate: Operation, exact: Operation | None = None, directed: Callable[[str], Operation] | None = None
) -> Callable[[tuple[str, ...]], Pure]:
    """A row for rcp, sqrt, rsqrt, sin, cos, lg2, ex2, tanh: approximate in float64, or exact where the ISA says so."""

    def row(parts: tuple[str, ...]) -> Pure:
        kind = parts[-1]
        found = _only(parts, "approx", "ftz", *_ROUNDINGS)
        if kind in _HALVES:
            plain = lambda x: approximate(x.astype(F64)).astype(F16)  # noqa: E731

            def bfloat(x: Any) -> Any:
                return num.f32_to_bf16(num.odd_float32(approximate(num.bf16_to_f32(x).astype(F64))))

            return _half(kind, found - {"approx", "ftz"}, plain, bfloat, 1)
        token = TOKENS[kind]
        mode = _rounding(found)
        operation: Operation
        if "approx" in found:
            operation = num.through_f64(approximate) if kind == "f32" else approximate
        elif exact is None:
            raise UnknownForm
        elif mode != "rn":
            if directed is None or kind != "f32":
                raise UnknownForm
            operation = directed(mode)
        else:
            operation = exact
        return Pure(inputs=(token,), output=token, apply=_modified(operation, found))

    return row


def _rcp_directed(mode: str) -> Operation:
    divide = num.div_f32_directed(mode)
    return lambda x: divide(np.ones(1, F32), x)


def _rsqrt(x: Any) -> Any:
    return np.divide(1.0, np.sqrt(x))


def _copysign(parts: tuple[str, ...]) -> Pure:
    _only(parts)
    token = TOKENS[parts[-1]]
    return Pure(inputs=(token, token), output=token, apply=num.copysign)


def _testp(parts: tuple[str, ...]) -> Pure:
    return Pure(inputs=(TOKENS[parts[-1]],), output="p", apply=num.test_property(parts[1]))


def _selp(parts: tuple[str, ...]) -> Pure:
    _only(parts)
    token = "w" + TOKENS[parts[-1]][1:]
    where = np.where
    return Pure(inputs=(token, token, "p"), output=token, apply=lambda a, b, p: where(p, a, b))


def _slct(parts: tuple[str, ...]) -> Pure:
    """slct.dtype.ctype: a if c >= 0 else b."""
    names = [p for p in parts[1:] if p != "ftz"]
    token = "w" + TOKENS[names[0]][1:]
    return Pure(inputs=(token, token, TOKENS[names[1]]), output=token, apply=lambda a, b, c: np.where(c >= 0, a, b))


def comparison(parts: tuple[str, ...]) -> tuple[tuple[str, str], Operation, str]:
    """Operand tokens, compare function and combining operation ("", and, or, xor) of a setp or set."""
    names = [p for p in parts[1:] if p != "ftz"]
    kind = names[-1]
    if parts[0] == "set":
        names = names[:-1]  # the destination type
    combine = names[1] if len(names) > 2 else ""
    if combine not in ("", "and", "or", "xor") or len(names) > 3:
        raise UnknownForm
    token = TOKENS[kind]
    if kind in _HALVES or kind in ("f32", "f64"):
        operation = num.FLOAT_COMPARE.get(names[0])
        if operation is None:
            raise UnknownForm
        if "ftz" in parts and kind == "f32":
            plain = operation

            def operation(a: Any, b: Any) -> Any:
                return plain(num.flush(a), num.flush(b))

        if kind in ("bf16", "bf16x2"):
            base = operation

            def operation(a: Any, b: Any) -> Any:
                return base(num.bf16_to_f32(a), num.bf16_to_f32(b))

    else:
        operation = num.INT_COMPARE.get(names[0])
        if operation is None:
            raise UnknownForm
        if names[0] in ("eq", "ne"):
            token = _integer(kind)
        elif token[0] == "w":
            token = "u" + token[1:]
    return (token, token), operation, combine


def combined(operation: Operation, combine: str) -> Operation:
    """A compare whose result is combined with a predicate operand."""
    join = _BITWISE[combine]
    return lambda a, b, p: join(operation(a, b), p)


def _set(parts: tuple[str, ...]) -> Pure:
    """set.cmp[.bool].dtype.stype: all ones or 1.0 where the comparison holds."""
    names = [p for p in parts[1:] if p != "ftz"]
    out_name, kind = names[-2], names[-1]
    inputs, compare, combine = comparison(parts)
    if combine:
        compare = combined(compare, combine)
        inputs = (*inputs, "p")  # type: ignore[assignment]
    if kind.endswith("x2"):
        element = F16 if kind == "f16x2" else U16
        true = {"f16x2": 0x3C00, "bf16x2": 0x3F80}.get(out_name, 0xFFFF)
        chosen = np.uint16(true)
        run = num.packed(lambda a, b: np.where(compare(a, b), chosen, np.uint16(0)), element)
        return Pure(inputs=inputs, output="u4", apply=run)
    out = TOKENS[out_name]
    ones: Any
    if out[0] == "f":
        ones = np.array(1.0, DTYPES[out])
    elif out_name == "bf16":
        ones = np.uint16(0x3F80)
    else:
        out = "u" + out[1:]
        ones = np.array(np.iinfo(DTYPES[out]).max, DTYPES[out])
    zero = np.array(0, DTYPES[out])
    return Pure(inputs=inputs, output=out, apply=lambda *operands: np.where(compare(*operands), ones, zero))


def _cvt(parts: tuple[str, ...]) -> Pure:
    to, source = parts[-2], parts[-1]
    found = frozenset(parts[1:-2])
    known = {*_ROUNDINGS, "rni", "rzi", "rmi", "rpi", "rna", "ftz", "sat", "relu", "satfinite", "pack"}
    if found - known or "pack" in found:
        raise UnknownForm
    mode = next((m for m in (*_ROUNDINGS, "rni", "rzi", "rmi", "rpi", "rna") if m in found), "")
    if to in ("f16x2", "bf16x2", "e4m3x2", "e5m2x2"):
        return _cvt_packed(to, source, mode, found)
    if source in ("e4m3x2", "e5m2x2"):
        raise UnknownForm
    if to == "tf32":
        if mode != "rna" or source != "f32":
            raise UnknownForm
        return Pure(inputs=("f4",), output="u4", apply=num.f32_to_tf32)
    floats = ("f16", "bf16", "f32", "f64")
    from_float, to_float = source in floats, to in floats
    inputs = (TOKENS[source].replace("w", "u"),)
    output = TOKENS[to].replace("w", "u")
    in_dtype, out_dtype = DTYPES[inputs[0]], DTYPES[output]
    operation: Operation
    if from_float and to_float:
        operation = _float_to_float(source, to, mode)
        if "ftz" in found:
            plain = operation
            into, out_of = to == "f32", source == "f32"

            def operation(x: Any) -> Any:
                r = plain(num.flush(x) if out_of else x)
                return num.flush(r) if into else r

        if "sat" in found:
            operation = num.saturated(operation) if to != "bf16" else num.in_bf16(num.saturate)
        if "relu" in found:
            clamp = num.in_bf16(num.relu) if to == "bf16" else num.relu
            base = operation
            operation = lambda x: clamp(base(x))  # noqa: E731
    elif from_float:
        convert = num.float_to_int(mode or "rzi", out_dtype)
        flush_first = "ftz" in found and source == "f32"
        if source == "bf16":
            operation = lambda x: convert(num.bf16_to_f32(x))  # noqa: E731
        else:
            operation = (lambda x: convert(num.flush(x))) if flush_first else convert
    elif to_float:
        if to == "bf16":

            def operation(x: Any) -> Any:  # 32-bit integers are exact in float64
                if in_dtype.itemsize > 4:
                    raise UnknownForm
                return num.f32_to_bf16(num.odd_float32(x.astype(F64)))

            if mode in ("rz", "rm", "rp"):
                narrow = num.f32_to_bf16_rz if mode == "rz" else num.f32_to_bf16_toward(mode)
                operation = lambda x: narrow(num.odd_float32(x.astype(F64)))  # noqa: E731
        else:
            operation = num.int_to_float(mode or "rn", out_dtype)
            if "sat" in found:
                operation = num.saturated(operation)
    elif "sat" in found:
        operation = num.clamp_int(out_dtype)
    elif in_dtype.itemsize == out_dtype.itemsize:
        operation = lambda x: x.view(out_dtype)  # noqa: E731
    else:
        operation = lambda x: x.astype(out_dtype)  # noqa: E731
    return Pure(inputs=inputs, output=output, apply=operation)


def _float_to_float(source: str, to: str, mode: str) -> Operation:
    integral = num.to_integral(mode) if mode in ("rni", "rzi", "rmi", "rpi") else None
    if source == "bf16":
        if to == "f32":
            return num.bf16_to_f32
        if to == "f64":
            return lambda x: num.bf16_to_f32(x).astype(F64)
        if to == "f16":
            to_half = _float_to_float("f32", "f16", mode)
            return lambda x: to_half(num.bf16_to_f32(x))
        if integral is None:
            return lambda x: x
        return num.in_bf16(integral)
    if to == "bf16":
        if mode in ("rz", "rm", "rp"):
            narrow = num.f32_to_bf16_rz if mode == "rz" else num.f32_to_bf16_toward(mode)
            return lambda x: narrow(num.odd_float32(x) if source == "f64" else x.astype(F32))
        if mode != "rn":
            raise UnknownForm
        if source == "f64":
            return lambda x: num.f32_to_bf16(num.odd_float32(x))
        return lambda x: num.f32_to_bf16(x.astype(F32))
    out = DTYPES[TOKENS[to]]
    if integral is not None:
        if source != to:
            raise UnknownForm
        return integral
    if source == to:
        return lambda x: x
    narrowing = DTYPES[TOKENS[source]].itemsize > out.itemsize
    if narrowing and mode in ("rz", "rm", "rp"):
        if out == F32:
            return num.f64_to_f32_directed(mode)
        return num.to_f16_rz if mode == "rz" else num.to_f16_toward(mode)
    return lambda x: x.astype(out)


def _cvt_packed(to: str, source: str, mode: str, found: frozenset[str]) -> Pure:
    """cvt to a packed pair: the first operand becomes the upper half."""
    if source == "f32":
        convert: Operation
        if to in ("e4m3x2", "e5m2x2"):
            if "satfinite" not in found:
                raise UnknownForm
            convert = num.to_fp8(to[:4])
            if "relu" in found:
                saturating = convert
                convert = lambda x: saturating(num.relu(x))  # noqa: E731
            return Pure(
                inputs=("f4", "f4"),
                output="u2",
                apply=lambda a, b: (convert(a).astype(U16) << np.uint16(8)) | convert(b).astype(U16),
            )
        if "satfinite" in found:
            raise UnknownForm
        convert = _float_to_float("f32", to[:-2], mode)
        if "relu" in found:
            plain = convert
            convert = lambda x: plain(num.relu(x))  # noqa: E731
        shift = np.uint32(16)
        return Pure(
            inputs=("f4", "f4"),
            output="u4",
            apply=lambda a, b: (convert(a).view(U16).astype(U32) << shift) | convert(b).view(U16).astype(U32),
        )
    if source in ("e4m3x2", "e5m2x2") and to == "f16x2":
        decode = num.from_fp8(source[:4])

        def unpack(x: Any) -> Any:
            octets = np.ascontiguousarray(x).reshape(-1, 1).view(U8)
            halves = decode(octets)
            if "relu" in found:
                halves = num.relu(halves)
            return np.ascontiguousarray(halves).view(U32).reshape(-1)

        return Pure(inputs=("u2",), output="u4", apply=unpack)
    if source == "f16x2" and to in ("e4m3x2", "e5m2x2"):
        encode = num.to_fp8(to[:4])

        def pack(x: Any) -> Any:
            halves = np.ascontiguousarray(x).reshape(-1, 1).view(F16)
            return np.ascontiguousarray(encode(halves)).view(U16).reshape(-1)

        return Pure(inputs=("u4",), output="u2", apply=pack)
    raise UnknownForm


Row = Callable[[tuple[str, ...]], Pure]

PURE: Mapping[str, Row] = MappingProxyType(
    {
        "add": _add_sub, "sub": _add_sub, "mul": _mul, "mad": _mad, "mul24": _mul24, "mad24": _mul24, "fma": _fma,
        "div": _div, "rem": _rem, "abs": _abs_neg, "neg": _abs_neg, "min": _min_max, "max": _min_max,
        "and": _logic, "or": _logic, "xor": _logic, "not": _not, "cnot": _not, "shl": _shift, "shr": _shift,
        "shf": _funnel, "popc": _bits(num.population, "u4"), "clz": _bits(num.leading_zeros, "u4"),
        "brev": _bits(num.reverse_bits), "bfind": _bfind, "bfe": _bfe, "bfi": _bfi, "prmt": _prmt,
        "bmsk": _mask_or_extend, "szext": _mask_or_extend,
        "dp4a": _dp, "dp2a": _dp, "vabsdiff4": _vabsdiff4, "sad": _sad, "copysign": _copysign, "testp": _testp,
        "rcp": _unary_float(num.reciprocal, num.reciprocal, _rcp_directed),
        "sqrt": _unary_float(np.sqrt, np.sqrt, num.sqrt_f32_directed),
        "rsqrt": _unary_float(_rsqrt), "sin": _unary_float(np.sin), "cos": _unary_float(np.cos),
        "lg2": _unary_float(np.log2), "ex2": _unary_float(np.exp2), "tanh": _unary_float(np.tanh),
        "selp": _selp, "slct": _slct, "set": _set, "cvt": _cvt,
    }
)  # fmt: skip


def pure_row(parts: tuple[str, ...]) -> Row | None:
    """The row of an opcode without side effects; the forms that use the carry flag are not among them."""
    return None if "cc" in parts else PURE.get(parts[0])


def effect(parts: tuple[str, ...]) -> str | None:
    """The method that lowers an opcode with effects, or None."""
    return "carry" if "cc" in parts else EFFECTS.get(parts[0])


# Families built by a method of the lowering: memory, warps, barriers, calls, several destinations.
EFFECTS: Mapping[str, str] = MappingProxyType(
    {
        "mov": "mov", "setp": "setp", "lop3": "lop3", "cvta": "cvta", "isspacep": "isspacep",
        "addc": "carry", "subc": "carry", "madc": "carry", "mbarrier": "mbarrier",
        "ld": "load", "ldu": "load", "st": "store", "atom": "atomic",
        "red": "atomic", "cp": "copy_async", "prefetch": "nothing", "prefetchu": "nothing", "membar": "nothing",
        "fence": "nothing", "nanosleep": "pause", "pmevent": "nothing", "discard": "nothing",
        "applypriority": "nothing", "createpolicy": "policy", "trap": "trap", "brkpt": "trap", "shfl": "shuffle",
        "vote": "vote", "match": "match", "redux": "redux", "activemask": "activemask", "elect": "elect",
        "mma": "mma", "wmma": "wmma", "ldmatrix": "ldmatrix", "stmatrix": "ldmatrix",
        "movmatrix": "movmatrix", "call": "builtin_call",
        "griddepcontrol": "nothing",
    }
)  # fmt: skip

# Families that only make sense for a whole warp at once: the lowering starts a new segment before each.
WARP_FAMILIES = frozenset(
    {"shfl", "vote", "match", "redux", "mma", "wmma", "ldmatrix", "stmatrix", "movmatrix", "elect"}
)
CONTROL = frozenset({"bra", "brx", "ret", "exit", "bar", "barrier"})

CLASSES = ("fadd", "fmul", "ffma", "fp64", "fp16", "sfu", "int", "cvt", "control", "memory", "tensor", "other")
_MEMORY = frozenset(
    {"ld", "ldu", "st", "atom", "red", "cp", "prefetch", "prefetchu", "membar", "fence", "discard", "applypriority",
     "ldmatrix", "stmatrix", "mbarrier"}
)  # fmt: skip
_CONTROL = frozenset({"bra", "brx", "ret", "exit", "bar", "barrier", "call", "nanosleep", "trap", "brkpt"})


def operation_class(parts: tuple[str, ...]) -> str:
    """The class under which counters file an instruction; see `CLASSES`."""
    family, kind = parts[0], parts[-1]
    if family in _MEMORY or (family == "wmma" and parts[1] in ("load", "store")):
        return "memory"
    if family in _CONTROL:
        return "control"
    if family in ("mma", "wmma", "wgmma"):
        return "tensor"
    if family == "cvt":
        return "cvt"
    if kind in _HALVES:
        return "fp16"
    if kind == "f64":
        return "fp64"
    if kind == "f32":
        if family in ("add", "sub"):
            return "fadd"
        if family == "mul":
            return "fmul"
        if family in ("fma", "mad"):
            return "ffma"
        if family in ("rcp", "sqrt", "rsqrt", "sin", "cos", "lg2", "ex2", "tanh", "div"):
            return "sfu"
        return "fadd" if family in ("min", "max", "abs", "neg", "setp", "set") else "other"
    if family in PURE or family in ("setp", "lop3", "addc", "subc", "madc"):
        return "int"
    return "other"
