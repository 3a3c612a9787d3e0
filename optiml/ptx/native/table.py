"""What the native engine computes by itself: canonical PTX spelling -> operand types and a C expression.

An opcode of `optiml.ptx.opcodes` that has no row here runs in the native engine all the same, by calling its numpy
function for each warp; a row makes it as fast as the rest.

A row is an operation without side effects on one lane. `ROWS` is keyed by the spelling that `canonical` makes of an
opcode; `HANDLERS` lists the distinct C functions, and the position in it is the number by which a lowered instruction
names its handler. The build generates one C function per handler (see `generate.py`); nothing else has to change when
a row is added. Opcodes that touch memory, other lanes or control flow are written by hand and named in `EFFECTS`.

Operand types are tokens as in `optiml.ptx.opcodes`: u, i, f and a size in bytes, p for predicates. In the expressions
the operands are `a`, `b`, `c`, `e`; a half (f2) is its 16-bit pattern; a predicate is 0 or -1, as is a result of
type p after the generated negation of the truth value.

This module needs nothing but the standard library: the build runs it before anything is installed.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """One lane's operation: result type, operand types, C expression, rounding mode in which it is evaluated."""

    output: str
    inputs: tuple[str, ...]
    expression: str
    rounding: str = "rn"


# Modifiers that say what is true anyway, by family; `canonical` leaves them out.
_SILENT: dict[str, frozenset[str]] = {
    **dict.fromkeys(("add", "sub", "mul", "fma", "mad", "div", "sqrt", "rcp"), frozenset({"rn", "full"})),
    "neg": frozenset(), "cvt": frozenset({"satfinite"}),
}  # fmt: skip


def canonical(parts: tuple[str, ...]) -> str:
    """The key of an opcode: its parts without silent modifiers, modifiers in alphabetical order before the types."""
    family = parts[0]
    silent = _SILENT.get(family, frozenset())
    kept = [p for p in parts[1:] if p not in silent]
    types = [p for p in kept if p in _TYPE_NAMES]
    modifiers = sorted(p for p in kept if p not in _TYPE_NAMES)
    return ".".join([family, *modifiers, *types])


_TOKEN = {
    "u8": "u1", "s8": "i1", "b8": "u1", "u16": "u2", "s16": "i2", "b16": "u2", "f16": "f2", "bf16": "u2", "u32": "u4",
    "s32": "i4", "b32": "u4", "f32": "f4", "f16x2": "u4", "bf16x2": "u4", "tf32": "u4", "u64": "u8", "s64": "i8",
    "b64": "u8", "f64": "f8", "pred": "p", "u16x2": "u4", "s16x2": "u4", "e4m3x2": "u2", "e5m2x2": "u2",
}  # fmt: skip
_TYPE_NAMES = frozenset(_TOKEN)
_INTS = ("u16", "s16", "u32", "s32", "u64", "s64")
_ROUNDINGS = ("rn", "rz", "rm", "rp")

ROWS: dict[str, Row] = {}
SPELLINGS: dict[str, str] = {}  # by key: an opcode as a program writes it


def _row(spelling: str, output: str, inputs: str, expression: str, rounding: str = "rn") -> None:
    key = canonical(tuple(spelling.split(".")))
    SPELLINGS.setdefault(key, spelling)
    ROWS[key] = Row(output=output, inputs=tuple(inputs.split()), expression=expression, rounding=rounding)


def _modified(expression: str, *, ftz: bool, sat: bool, kind: str) -> str:
    if ftz:
        expression = f"flush_f({expression})"
    if sat:
        expression = f"sat_{kind}({expression})"
    return expression


def _float_arithmetic() -> None:
    shapes = {"add": ("{a} + {b}", 2), "sub": ("{a} - {b}", 2), "mul": ("{a} * {b}", 2), "div": ("{a} / {b}", 2),
              "fma": ("fma_{k}({a}, {b}, {c})", 3)}  # fmt: skip
    for family, (shape, arity) in shapes.items():
        for kind, k, token in (("f32", "f", "f4"), ("f64", "d", "f8")):
            for mode in _ROUNDINGS:
                for ftz in (False, True) if kind == "f32" else (False,):
                    for sat in (False, True) if family != "div" and kind == "f32" else (False,):
                        names = {x: f"flush_f({x})" if ftz else x for x in "abc"}
                        expression = _modified(shape.format(k=k, **names), ftz=ftz, sat=sat, kind=k)
                        words = [family, mode, *(["ftz"] if ftz else []), *(["sat"] if sat else []), kind]
                        _row(".".join(words), token, " ".join([token] * arity), expression, mode)
                        if family == "fma":
                            _row(".".join(["mad", *words[1:]]), token, " ".join([token] * arity), expression, mode)
    for mode in _ROUNDINGS:
        for ftz in (False, True):
            x = "flush_f(a)" if ftz else "a"
            word = f"{mode}.ftz" if ftz else mode
            _row(f"rcp.{word}.f32", "f4", "f4", _modified(f"1.0f / {x}", ftz=ftz, sat=False, kind="f"), mode)
            _row(f"sqrt.{word}.f32", "f4", "f4", _modified(f"sqrtf({x})", ftz=ftz, sat=False, kind="f"), mode)
    _row("rcp.rn.f64", "f8", "f8", "1.0 / a")
    _row("sqrt.rn.f64", "f8", "f8", "sqrt(a)")
    _row("div.approx.f32", "f4", "f4 f4", "div_approx(a, b)")
    _row("div.approx.ftz.f32", "f4", "f4 f4", "flush_f(div_approx(flush_f(a), flush_f(b)))")
    approximate = {"rcp": "1.0 / {x}", "sqrt": "sqrt({x})", "rsqrt": "rsqrt_d({x})", "sin": "sin({x})",
                   "cos": "cos({x})", "lg2": "log2({x})", "ex2": "exp2({x})", "tanh": "tanh({x})"}  # fmt: skip
    for family, shape in approximate.items():
        _row(f"{family}.approx.f32", "f4", "f4", f"(float)({shape.format(x='(double)a')})")
        _row(f"{family}.approx.ftz.f32", "f4", "f4", f"flush_f((float)({shape.format(x='(double)flush_f(a)')}))")
        half = f"d2h({shape.format(x='(double)h2f(a)')})"
        bfloat = f"f2b(odd_f({shape.format(x='(double)b2f(a)')}))"
        for word in ("", ".approx", ".ftz", ".approx.ftz"):
            _row(f"{family}{word}.f16", "f2", "f2", half)
            _row(f"{family}{word}.bf16", "u2", "u2", bfloat)
            for name, form in (("f16x2", half), ("bf16x2", bfloat)):
                low, high = form.replace("(a)", "(low_of(a))"), form.replace("(a)", "(high_of(a))")
                _row(f"{family}{word}.{name}", "u4", "u4", f"pair({low}, {high})")
    _row("rcp.approx.ftz.f64", "f8", "f8", "flush_d(1.0 / flush_d(a))")
    _row("rsqrt.approx.ftz.f64", "f8", "f8", "flush_d(rsqrt_d(flush_d(a)))")
    _row("rsqrt.approx.f64", "f8", "f8", "rsqrt_d(a)")
    for name in ("min", "max"):
        for ftz in (False, True):
            for nan in (False, True):
                for sign in (False, True):
                    a, b = ("flush_f(a)", "flush_f(b)") if ftz else ("a", "b")
                    inner = f"{name}_f(fabsf({a}), fabsf({b}))" if sign else f"{name}_f({a}, {b})"
                    inner = f"xorsign_f({inner}, {a}, {b})" if sign else inner
                    inner = f"nan_f({inner}, {a}, {b})" if nan else inner
                    words = [name, *["ftz"] * ftz, *["NaN"] * nan, *["xorsign", "abs"] * sign]
                    _row(".".join([*words, "f32"]), "f4", "f4 f4", f"flush_f({inner})" if ftz else inner)
        _row(f"{name}.f64", "f8", "f8 f8", f"{name}_d(a, b)")
        _row(f"{name}.NaN.f64", "f8", "f8 f8", f"nan_d({name}_d(a, b), a, b)")
    for ftz in (False, True):
        word, x, y = (".ftz", "flush_f(a)", "flush_f({})") if ftz else ("", "a", "{}")
        _row(f"abs{word}.f32", "f4", "f4", y.format(f"fabsf({x})"))
        _row(f"neg{word}.f32", "f4", "f4", y.format(f"-({x})"))
    _row("abs.f64", "f8", "f8", "fabs(a)")
    _row("neg.f64", "f8", "f8", "-a")
    _row("copysign.f32", "f4", "f4 f4", "copysignf(b, a)")
    _row("copysign.f64", "f8", "f8 f8", "copysign(b, a)")
    for kind, token, tiny, most in (("f32", "f4", "0x1p-126f", "0x1.fffffep127f"),
                                    ("f64", "f8", "0x1p-1022", "0x1.fffffffffffffp1023")):  # fmt: skip
        size = "fabsf(a)" if kind == "f32" else "fabs(a)"
        tests = {"finite": f"{size} <= {most}", "infinite": f"{size} > {most}", "number": "a == a",
                 "notanumber": "a != a", "normal": f"{size} >= {tiny} && {size} <= {most}",
                 "subnormal": f"{size} < {tiny} && a != 0"}  # fmt: skip
        for name, test in tests.items():
            _row(f"testp.{name}.{kind}", "p", token, test)


def _halves() -> None:
    for family, arity in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3)):
        operands = "abc"[:arity]
        for words in ([], ["ftz"], ["sat"], ["ftz", "sat"], ["relu"], ["ftz", "relu"]):
            if "relu" in words and family != "fma":
                continue

            def half(part: str, words: list[str] = words, family: str = family, operands: str = operands) -> str:
                flush = "h_flush({})" if "ftz" in words else "{}"
                inner = f"h_{family}({', '.join(flush.format(part.format(x)) for x in operands)})"
                inner = flush.format(inner)
                for word in ("sat", "relu"):
                    inner = f"h_{word}({inner})" if word in words else inner
                return inner

            def bfloat(part: str, words: list[str] = words, family: str = family, operands: str = operands) -> str:
                inner = f"b_{family}({', '.join(part.format(x) for x in operands)})"
                return f"b_relu({inner})" if "relu" in words else inner

            name = ".".join([family, *words])
            inputs = " ".join(["f2"] * arity)
            _row(f"{name}.f16", "f2", inputs, half("{}"))
            _row(f"{name}.f16x2", "u4", " ".join(["u4"] * arity), f"pair({half('low_of({})')}, {half('high_of({})')})")
            if not {"ftz", "sat"} & set(words):
                _row(f"{name}.bf16", "u2", " ".join(["u2"] * arity), bfloat("{}"))
                _row(f"{name}.bf16x2", "u4", " ".join(["u4"] * arity),
                     f"pair({bfloat('low_of({})')}, {bfloat('high_of({})')})")  # fmt: skip
    for name in ("min", "max"):
        for nan in (False, True):
            word = ".NaN" if nan else ""
            for kind, to, back, token in (("f16", "f2h", "h2f", "f2"), ("bf16", "f2b", "b2f", "u2")):

                def extreme(part: str, to: str = to, back: str = back, name: str = name, nan: bool = nan) -> str:
                    a, b = (f"{back}({part.format(x)})" for x in "ab")
                    return f"{to}(nan_f({name}_f({a}, {b}), {a}, {b}))" if nan else f"{to}({name}_f({a}, {b}))"

                _row(f"{name}{word}.{kind}", token, f"{token} {token}", extreme("{}"))
                _row(f"{name}{word}.{kind}x2", "u4", "u4 u4",
                     f"pair({extreme('low_of({})')}, {extreme('high_of({})')})")  # fmt: skip
    for kind in ("f16", "bf16"):
        for word in ("", ".ftz"):
            _row(f"abs{word}.{kind}", "u2", "u2", "a & 0x7FFFu")
            _row(f"neg{word}.{kind}", "u2", "u2", "a ^ 0x8000u")
            _row(f"abs{word}.{kind}x2", "u4", "u4", "a & 0x7FFF7FFFu")
            _row(f"neg{word}.{kind}x2", "u4", "u4", "a ^ 0x80008000u")


def _integers() -> None:
    for kind in _INTS:
        token = _TOKEN[kind]
        bits = 8 * int(token[1:])
        u = "u" + token[1:]
        ctype = f"{'u' if kind[0] == 'u' else ''}int{bits}_t"
        for family, sign in (("add", "+"), ("sub", "-")):
            _row(f"{family}.{kind}", u, f"{u} {u}", f"a {sign} b")
        product = "(uint32_t)a * b" if bits == 16 else "a * b"
        _row(f"mul.lo.{kind}", u, f"{u} {u}", product)
        _row(f"mad.lo.{kind}", u, f"{u} {u} {u}", f"{product} + c")
        if bits < 64:
            wide = f"{token[0]}{2 * int(token[1:])}"
            wtype = f"{'u' if kind[0] == 'u' else ''}int{2 * bits}_t"
            _row(f"mul.wide.{kind}", wide, f"{token} {token}", f"({wtype})a * ({wtype})b")
            _row(f"mad.wide.{kind}", "u" + wide[1:], f"{token} {token} u{wide[1:]}",
                 f"(u{wtype.lstrip('u')})(({wtype})a * ({wtype})b) + c")  # fmt: skip
            high = f"({ctype})((({wtype})a * ({wtype})b) >> {bits})"
        else:
            high = f"mulhi_{kind}(a, b)"
        _row(f"mul.hi.{kind}", token, f"{token} {token}", high)
        _row(f"mad.hi.{kind}", u, f"{token} {token} {u}", f"(u{ctype.lstrip('u')})({high}) + c")
        wider = kind if bits > 16 else kind[0] + "32"
        _row(f"div.{kind}", token, f"{token} {token}", f"({ctype})div_{wider}(a, b)")
        _row(f"rem.{kind}", token, f"{token} {token}", f"({ctype})rem_{wider}(a, b)")
        _row(f"min.{kind}", token, f"{token} {token}", "a < b ? a : b")
        _row(f"max.{kind}", token, f"{token} {token}", "a > b ? a : b")
        difference = f"(u{ctype.lstrip('u')})(a < b ? (u{ctype.lstrip('u')})b - a : (u{ctype.lstrip('u')})a - b)"
        _row(f"sad.{kind}", u, f"{token} {token} {u}", f"{difference} + c")
        if kind[0] == "s":
            _row(f"abs.{kind}", u, token, f"(u{ctype})(a < 0 ? 0 - (u{ctype})a : (u{ctype})a)")
            _row(f"neg.{kind}", u, u, "0 - a")
        fill = "0" if kind[0] == "u" else f"({ctype})(a < 0 ? -1 : 0)"
        _row(f"shr.{kind}", token, f"{token} u4", f"b < {bits} ? ({ctype})(a >> b) : {fill}")
    for bits in (16, 32, 64):
        u = f"u{bits // 8}"
        _row(f"shl.b{bits}", u, f"{u} u4", f"b < {bits} ? (uint{bits}_t)(a << b) : 0")
        _row(f"shr.b{bits}", u, f"{u} u4", f"b < {bits} ? (uint{bits}_t)(a >> b) : 0")
        for family, sign in (("and", "&"), ("or", "|"), ("xor", "^")):
            _row(f"{family}.b{bits}", u, f"{u} {u}", f"a {sign} b")
        _row(f"not.b{bits}", u, u, "~a")
        _row(f"cnot.b{bits}", u, u, "a == 0")
        _row(f"selp.b{bits}", u, f"{u} {u} p", "c ? a : b")
        for name in ("u", "s", "f"):
            if f"{name}{bits}" in _TYPE_NAMES:
                ROWS[f"selp.{name}{bits}"] = ROWS[f"selp.b{bits}"]
    for family, sign in (("and", "&"), ("or", "|"), ("xor", "^")):
        ROWS[f"{family}.pred"] = Row(output="m", inputs=("p", "p"), expression=f"a {sign} b")
    ROWS["not.pred"] = Row(output="m", inputs=("p",), expression="~a")
    ROWS["selp.bf16"] = ROWS["selp.f16"]
    _row("add.sat.s32", "i4", "i4 i4", "clamp_s32((int64_t)a + b)")
    _row("sub.sat.s32", "i4", "i4 i4", "clamp_s32((int64_t)a - b)")
    for kind, token, cut in (("u32", "u4", "(uint64_t)({} & 0xFFFFFFu)"), ("s32", "i4", "low24_s({})")):
        for part, shift in (("lo", 0), ("hi", 16)):
            form = f"(uint32_t)({cut.format('a')} * {cut.format('b')} >> {shift})"
            _row(f"mul24.{part}.{kind}", "u4", f"{token} {token}", form)
            _row(f"mad24.{part}.{kind}", "u4", f"{token} {token} u4", f"{form} + c")
    for kind, sign in (("u16x2", "uint16_t"), ("s16x2", "int16_t")):
        for family, operation in (("add", "+"), ("sub", "-"), ("min", "<"), ("max", ">")):
            low, high = ("({t})low_of({x})", "({t})high_of({x})")

            def lane(form: str, operation: str = operation, sign: str = sign) -> str:
                a, b = (form.format(t=sign, x=x) for x in "ab")
                if operation in "+-":
                    return f"(uint16_t)({a} {operation} {b})"
                return f"(uint16_t)({a} {operation} {b} ? {a} : {b})"

            _row(f"{family}.{kind}", "u4", "u4 u4", f"pair({lane(low)}, {lane(high)})")
    for direction in "lr":
        _row(f"shf.{direction}.wrap.b32", "u4", "u4 u4 u4", f"funnel_{direction}(a, b, c & 31)")
        _row(f"shf.{direction}.clamp.b32", "u4", "u4 u4 u4", f"funnel_{direction}(a, b, c < 32 ? c : 32)")
    for bits, suffix in ((32, ""), (64, "ll")):
        u, i = f"u{bits // 8}", f"i{bits // 8}"
        _row(f"popc.b{bits}", "u4", u, f"(uint32_t)__builtin_popcount{suffix}(a)")
        _row(f"clz.b{bits}", "u4", u, f"clz{bits}(a)")
        _row(f"brev.b{bits}", u, u, f"brev{bits}(a)")
        for kind, token, plain in ((f"u{bits}", u, "a"), (f"s{bits}", i, f"(uint{bits}_t)(a < 0 ? ~a : a)")):
            _row(f"bfind.{kind}", "u4", token, f"{bits - 1} - clz{bits}({plain})")
            shifted = f"({plain}) ? clz{bits}({plain}) : 0xFFFFFFFFu"
            _row(f"bfind.shiftamt.{kind}", "u4", token, shifted)
            extension = f"(uint64_t){'(int64_t)' if token[0] == 'i' else ''}a"
            _row(f"bfe.{kind}", u, f"{token} u4 u4",
                 f"(uint{bits}_t)bfe_bits({extension}, b, c, {bits}, {int(token[0] == 'i')})")  # fmt: skip
    _row("bfind.b32", "u4", "u4", "31 - clz32(a)")
    _row("bfind.b64", "u4", "u8", "63 - clz64(a)")
    _row("bfi.b32", "u4", "u4 u4 u4 u4", "bfi32(a, b, c, e)")
    _row("bfi.b64", "u8", "u8 u8 u4 u4", "bfi_bits(a, b, c, e)")
    _row("prmt.b32", "u4", "u4 u4 u4", "prmt(a, b, c)")
    # the bytes picked, lowest in the lowest nibble, for each value of the selector's lower two bits
    for mode, picks in (("f4e", (0x3210, 0x4321, 0x5432, 0x6543)), ("b4e", (0x5670, 0x6701, 0x7012, 0x0123)),
                        ("rc8", (0, 0x1111, 0x2222, 0x3333)), ("ecl", (0x3210, 0x3211, 0x3222, 0x3333)),
                        ("ecr", (0, 0x1110, 0x2210, 0x3210)), ("rc16", (0x1010, 0x3232, 0x1010, 0x3232))):  # fmt: skip
        word = sum(pick << 16 * place for place, pick in enumerate(picks))
        _row(f"prmt.b32.{mode}", "u4", "u4 u4 u4", f"prmt_places(a, b, (uint32_t)({word}ull >> 16 * (c & 3)) & 0xFFFF)")
    for mode, cut in (("clamp", "({0} < 32 ? {0} : 32)"), ("wrap", "({0} & 31)")):
        _row(f"bmsk.{mode}.b32", "u4", "u4 u4", f"bmsk({cut.format('a')}, {cut.format('b')})")
        _row(f"szext.{mode}.u32", "u4", "u4 u4", f"szext(a, {cut.format('b')}, 0)")
        _row(f"szext.{mode}.s32", "u4", "u4 u4", f"szext(a, {cut.format('b')}, 1)")
    for kind in ("u32", "s32"):
        for ending, adds in (("", 0), (".add", 1)):
            _row(f"vabsdiff4.{kind}.{kind}.{kind}{ending}", "u4", "u4 u4 u4",
                 f"vabsdiff4(a, b, c, {int(kind == 's32')}, {adds})")  # fmt: skip
    for a in "us":
        for b in "us":
            signs = f"{int(a == 's')}, {int(b == 's')}"
            _row(f"dp4a.{a}32.{b}32", "u4", "u4 u4 u4", f"dp4a(a, b, c, {signs})")
            _row(f"dp2a.lo.{a}32.{b}32", "u4", "u4 u4 u4", f"dp2a(a, b, c, {signs})")
            _row(f"dp2a.hi.{a}32.{b}32", "u4", "u4 u4 u4", f"dp2a(a, b >> 16, c, {signs})")
    for kind in ("u16", "s16", "b16", "u32", "s32", "b32", "f32", "u64", "s64", "b64", "f64"):
        u = "u" + _TOKEN[kind][1:]
        _row(f"slct.{kind}.s32", u, f"{u} {u} i4", "c >= 0 ? a : b")
        _row(f"slct.{kind}.f32", u, f"{u} {u} f4", "c >= 0 ? a : b")


def _comparisons() -> None:
    signs = {"eq": "a == b", "ne": "a != b", "lt": "a < b", "le": "a <= b", "gt": "a > b", "ge": "a >= b",
             "lo": "a < b", "ls": "a <= b", "hi": "a > b", "hs": "a >= b"}  # fmt: skip
    for kind in (*_INTS, "b16", "b32", "b64"):
        for name, test in signs.items():
            token = "u" + _TOKEN[kind][1:] if name in ("eq", "ne") else _TOKEN[kind]
            _row(f"setp.{name}.{kind}", "p", f"{token} {token}", test)
    floats = {"eq": "{a} == {b}", "ne": "{a} < {b} || {a} > {b}", "lt": "{a} < {b}", "le": "{a} <= {b}",
              "gt": "{a} > {b}", "ge": "{a} >= {b}", "equ": "!({a} < {b} || {a} > {b})", "neu": "{a} != {b}",
              "ltu": "!({a} >= {b})", "leu": "!({a} > {b})", "gtu": "!({a} <= {b})", "geu": "!({a} < {b})",
              "num": "{a} == {a} && {b} == {b}", "nan": "{a} != {a} || {b} != {b}"}  # fmt: skip
    for name, test in floats.items():
        plain = test.format(a="a", b="b")
        _row(f"setp.{name}.f32", "p", "f4 f4", plain)
        _row(f"setp.{name}.ftz.f32", "p", "f4 f4", test.format(a="flush_f(a)", b="flush_f(b)"))
        _row(f"setp.{name}.f64", "p", "f8 f8", plain)
        for word in ("", ".ftz"):  # no flushing of halves: as in the numpy engine
            _row(f"setp.{name}{word}.f16", "p", "f2 f2", test.format(a="h2f(a)", b="h2f(b)"))
            _row(f"setp.{name}{word}.bf16", "p", "u2 u2", test.format(a="b2f(a)", b="b2f(b)"))


def _conversions() -> None:
    ints = {"u8": ("u1", 8), "s8": ("i1", 8), **{k: (_TOKEN[k], 8 * int(_TOKEN[k][1:])) for k in _INTS}}
    limits = {k: (0, 2**bits - 1) if k[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
              for k, (_, bits) in ints.items()}  # fmt: skip
    rounds = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
    to_double = {"f16": "(double)h2f(a)", "bf16": "(double)b2f(a)", "f32": "(double)a", "f64": "a"}
    for to, (out, bits) in ints.items():
        ctype = f"{'u' if to[0] == 'u' else ''}int{bits}_t"
        for source, (token, _) in ints.items():
            _row(f"cvt.{to}.{source}", out, token, f"({ctype})a")
            low, high = max(limits[to][0], limits[source][0]), min(limits[to][1], limits[source][1])
            tests = []
            if limits[source][0] < low:
                tests.append(f"a < {_c_integer(low, token)} ? ({ctype}){_c_integer(low, token)} :")
            if limits[source][1] > high:
                tests.append(f"a > {_c_integer(high, token)} ? ({ctype}){_c_integer(high, token)} :")
            _row(f"cvt.sat.{to}.{source}", out, token, " ".join([*tests, f"({ctype})a"]))
        for source, value in to_double.items():
            for mode, function in rounds.items():
                for ftz in (False, True) if source == "f32" else (False,):
                    x = "(double)flush_f(a)" if ftz else value
                    if bits == 64:
                        form = f"d_to_{to}({function}({x}))"
                    else:
                        top = (1 << (bits - 1)) if to[0] == "u" else limits[to][0]
                        nan = top if source == "f64" else 0
                        low, high = limits[to]
                        form = f"({ctype})d_to_int({function}({x}), {low}.0, {high}.0, {nan}ll)"
                    for sat in ("", ".sat"):
                        _row(f"cvt.{mode}{'.ftz' if ftz else ''}{sat}.{to}.{source}", out, _TOKEN[source], form)
    for source, (token, bits) in ints.items():
        for mode in _ROUNDINGS:
            for sat in ("", ".sat"):
                clip = {"f4": "sat_f({})", "f8": "sat_d({})"} if sat else {"f4": "{}", "f8": "{}"}
                _row(f"cvt.{mode}{sat}.f32.{source}", "f4", token, clip["f4"].format("(float)a"), mode)
                _row(f"cvt.{mode}{sat}.f64.{source}", "f8", token, clip["f8"].format("(double)a"), mode)
        for sat in ("", ".sat"):
            form = "d2h((double)a)"
            _row(f"cvt.rn{sat}.f16.{source}", "f2", token, f"h_sat({form})" if sat else form)
        if bits <= 32:
            _row(f"cvt.rn.bf16.{source}", "u2", token, "f2b(odd_f((double)a))")
    for ftz in (False, True):
        word, x = (".ftz", "flush_f(a)") if ftz else ("", "a")
        for clamp in (False, True):
            for mode, function in (("", ""), *rounds.items()):
                inner = f"{function}f({x})" if function else x
                words = [w for w in (mode, "ftz" * ftz, "sat" * clamp) if w]
                _row(".".join(["cvt", *words, "f32.f32"]), "f4", "f4", _modified(inner, ftz=ftz, sat=clamp, kind="f"))
            for mode in _ROUNDINGS:
                form = _modified("(float)a", ftz=ftz, sat=clamp, kind="f")
                _row(f"cvt.{mode}{word}{'.sat' * clamp}.f32.f64", "f4", "f8", form, mode)
            form = f"(double){x}"
            _row(f"cvt{word}{'.sat' * clamp}.f64.f32", "f8", "f4", f"sat_d({form})" if clamp else form)
            form = _modified("h2f(a)", ftz=ftz, sat=clamp, kind="f")
            _row(f"cvt{word}{'.sat' * clamp}.f32.f16", "f4", "f2", form)
            form = f"f2h({x})"
            _row(f"cvt.rn{word}{'.sat' * clamp}.f16.f32", "f2", "f4", f"h_sat({form})" if clamp else form)
        _row(f"cvt.rz{word}.f16.f32", "f2", "f4", f"f2h_rz({x})")
    for mode, function in rounds.items():
        _row(f"cvt.{mode}.f64.f64", "f8", "f8", f"{function}(a)")
        _row(f"cvt.{mode}.f16.f16", "f2", "f2", f"f2h({function}f(h2f(a)))")
        _row(f"cvt.{mode}.bf16.bf16", "u2", "u2", f"f2b({function}f(b2f(a)))")
    _row("cvt.sat.f64.f64", "f8", "f8", "sat_d(a)")
    _row("cvt.f64.f64", "f8", "f8", "a")
    _row("cvt.f16.f16", "f2", "f2", "a")
    _row("cvt.sat.f16.f16", "f2", "f2", "h_sat(a)")
    _row("cvt.f64.f16", "f8", "f2", "(double)h2f(a)")
    _row("cvt.rn.f16.f64", "f2", "f8", "d2h(a)")
    _row("cvt.rz.f16.f64", "f2", "f8", "d2h_rz(a)")
    _row("cvt.f32.bf16", "f4", "u2", "b2f(a)")
    _row("cvt.f64.bf16", "f8", "u2", "(double)b2f(a)")
    _row("cvt.rn.bf16.f64", "u2", "f8", "f2b(odd_f(a))")
    _row("cvt.rn.bf16.f16", "u2", "f2", "f2b(h2f(a))")
    _row("cvt.rn.f16.bf16", "f2", "u2", "f2h(b2f(a))")
    _row("cvt.rna.tf32.f32", "u4", "f4", "f_to_tf32(a)")
    for mode, half, bfloat in (("rn", "f2h", "f2b"), ("rz", "f2h_rz", "f2b_rz")):
        for relu in (False, True):
            word = ".relu" * relu
            a, b = ("relu_f(a)", "relu_f(b)") if relu else ("a", "b")
            _row(f"cvt.{mode}{word}.f16x2.f32", "u4", "f4 f4", f"pair({half}({b}), {half}({a}))")
            _row(f"cvt.{mode}{word}.bf16x2.f32", "u4", "f4 f4", f"pair({bfloat}({b}), {bfloat}({a}))")
            _row(f"cvt.{mode}{word}.bf16.f32", "u2", "f4", f"b_relu({bfloat}(a))" if relu else f"{bfloat}(a)")
    _row("cvt.rn.relu.f16.f32", "f2", "f4", "h_relu(f2h(a))")
    # directed roundings to 16 bits
    for mode, code in (("rm", 1), ("rp", 2), ("rz", 3)):
        for source, (token, bits) in ints.items():
            _row(f"cvt.{mode}.f16.{source}", "f2", token, f"d2h_toward((double)a, {code})")
            if bits <= 32:
                _row(f"cvt.{mode}.bf16.{source}", "u2", token, f"f2b_toward(odd_f((double)a), {code})")
        if mode != "rz":
            _row(f"cvt.{mode}.f16.f32", "f2", "f4", f"d2h_toward((double)a, {code})")
            _row(f"cvt.{mode}.f16.f64", "f2", "f8", f"d2h_toward(a, {code})")
            _row(f"cvt.{mode}.bf16.f32", "u2", "f4", f"f2b_toward(a, {code})")
        _row(f"cvt.{mode}.bf16.f64", "u2", "f8", f"f2b_toward(odd_f(a), {code})")
        _row(f"cvt.{mode}.bf16.f16", "u2", "f2", f"f2b_toward(h2f(a), {code})")
        _row(f"cvt.{mode}.f16.bf16", "f2", "u2", f"d2h_toward((double)b2f(a), {code})")
    for kind in ("e4m3", "e5m2"):
        for relu in (False, True):
            a, b = ("relu_f(a)", "relu_f(b)") if relu else ("a", "b")
            _row(f"cvt.rn.satfinite{'.relu' * relu}.{kind}x2.f32", "u2", "f4 f4",
                 f"(uint16_t)(to_{kind}({a}) << 8 | to_{kind}({b}))")  # fmt: skip
        _row(f"cvt.rn.satfinite.{kind}x2.f16x2", "u2", "u4",
             f"(uint16_t)(to_{kind}(h2f(high_of(a))) << 8 | to_{kind}(h2f(low_of(a))))")  # fmt: skip
        _row(f"cvt.rn.f16x2.{kind}x2", "u4", "u2", f"pair({kind}_half[a & 0xFF], {kind}_half[a >> 8])")
        _row(f"cvt.rn.relu.f16x2.{kind}x2", "u4", "u2",
             f"pair(h_relu({kind}_half[a & 0xFF]), h_relu({kind}_half[a >> 8]))")  # fmt: skip


def _c_integer(value: int, token: str) -> str:
    return f"{value}ull" if token == "u8" else str(value) if value > -(2**31) else f"({value + 1} - 1)"


# Moves that the lowering itself asks for: between registers, halves and words of registers.
_MOVES = {
    "@mov4": Row(output="u4", inputs=("u4",), expression="a"),
    "@mov8": Row(output="u8", inputs=("u8",), expression="a"),
    "@low": Row(output="u4", inputs=("u8",), expression="(uint32_t)a"),
    "@widen": Row(output="u8", inputs=("u4",), expression="a"),
    "@high": Row(output="u4", inputs=("u8",), expression="(uint32_t)(a >> 32)"),
    "@low2": Row(output="u4", inputs=("u4",), expression="a & 0xFFFFu"),
    "@high2": Row(output="u4", inputs=("u4",), expression="a >> 16"),
    "@field": Row(output="u4", inputs=("u8", "u4"), expression="(uint32_t)(a >> b) & 0xFFFFu"),
    "@pack8": Row(output="u8", inputs=("u4", "u4"), expression="(uint64_t)b << 32 | a"),
    "@pack4": Row(output="u4", inputs=("u2", "u2"), expression="(uint32_t)b << 16 | a"),
    "@pack2": Row(output="u2", inputs=("u1", "u1"), expression="(uint32_t)b << 8 | a"),
    "@add8": Row(output="u8", inputs=("u8", "u8"), expression="a + b"),
    **{
        f"@{name}{width}": Row(output=output or f"u{width}", inputs=(f"u{width}", f"u{width}", "p"), expression=form)
        for width in (4, 8)
        for name, output, form in (
            ("addc", "", "a + b + (c != 0)"),
            ("subc", "", "a - b - (c != 0)"),
            ("addc_out", "p", f"(uint{8 * width}_t)(a + b) < a || (c && (uint{8 * width}_t)(a + b + 1) == 0)"),
            ("subc_out", "p", "a < b || (c && a == b)"),
        )
    },
    "@missing": Row(output="u4", inputs=("u8",), expression="(uint32_t)(a >> 20) & 0xFFFFFu"),
    "@window": Row(output="p", inputs=("u8", "u8"), expression="(a >> 36) == b"),
    "@beyond": Row(output="p", inputs=("u8", "u8"), expression="(a >> 36) >= b"),
}

_float_arithmetic()
_halves()
_integers()
_comparisons()
_conversions()
ROWS.update(_MOVES)

# Handlers written by hand in csrc: memory by element size, extension and register width; warps; special cases.
EFFECTS: tuple[str, ...] = (
    *(f"load_{element}_{width}_{lanes}"
      for element, width in (("u1", 4), ("i1", 4), ("u2", 4), ("i2", 4), ("u4", 4), ("u8", 8))
      for lanes in (1, 2, 4) if int(element[1]) * lanes <= 16),
    *(f"load_{element}_8_1" for element in ("u1", "i1", "u2", "i2", "u4", "i4")),
    *(f"store_{size}_{lanes}" for size in (1, 2, 4, 8) for lanes in (1, 2, 4) if size * lanes <= 16),
    "atomic_4", "atomic_8", "atomic_2", "copy_async", "copy_wait", "join", "shuffle", "vote",
    "match_4", "match_8", "redux", "activemask",
    "elect", "product", "load_matrices", "store_matrices", "transpose", "load_fragment", "store_fragment",
    "barrier_object", "lop3", "trap", "clock_4", "clock_8", "print", "numpy",
)  # fmt: skip

PURE_HANDLERS: tuple[Row, ...] = tuple(dict.fromkeys(ROWS.values()))
NUMBERS: dict[Row, int] = {row: number for number, row in enumerate(PURE_HANDLERS)}
EFFECT_NUMBERS: dict[str, int] = {name: len(PURE_HANDLERS) + index for index, name in enumerate(EFFECTS)}


def _fp8_values(exponent_bits: int, fraction_bits: int) -> list[float]:
    bias = (1 << (exponent_bits - 1)) - 1
    values = []
    for pattern in range(128):
        exponent, fraction = pattern >> fraction_bits, pattern & ((1 << fraction_bits) - 1)
        if exponent == 0:
            values.append(fraction * 2.0 ** (1 - bias - fraction_bits))
        else:
            values.append((1 + fraction / (1 << fraction_bits)) * 2.0 ** (exponent - bias))
    if exponent_bits == 4:
        values[127] = float("nan")
    else:
        values[124], values[125:] = float("inf"), [float("nan")] * 3
    return values


def fp8_tables() -> dict[str, tuple[list[int], list[float]]]:
    """By format: float16 patterns of its 256 codes, and the values of its finite non-negative codes."""
    tables = {}
    for name, exponent_bits, fraction_bits, largest in (("e4m3", 4, 3, 126), ("e5m2", 5, 2, 123)):
        values = _fp8_values(exponent_bits, fraction_bits)
        halves = [struct.unpack("<H", struct.pack("<e", v))[0] for v in values]
        tables[name] = ([*halves, *(h | 0x8000 for h in halves)], values[: largest + 1])
    return tables


def fingerprint() -> str:
    """Digest of the handler numbering: a library built from another table must not be used with this one."""
    text = repr([PURE_HANDLERS, EFFECTS])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
