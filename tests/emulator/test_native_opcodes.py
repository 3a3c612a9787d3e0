"""Every row of the native opcode table against the numpy engine, bit for bit, on edge inputs and partial warps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from launching import CHECKS, launch_once, same_bits, snippet

from optiml.errors import Unsupported
from optiml.ptx import engine_name, opcodes, parse
from optiml.ptx.native import table
from optiml.ptx.native.library import library

pytestmark = pytest.mark.skipif(engine_name() != "native", reason="the native engine was not built")

THREADS = 250  # the last warp is not full
CHUNK = 24  # rows per kernel

_INTS = [0, 1, 2, 3, 7, 15, 16, 31, 32, 33, 63, 64, 255, 0x7F, 0x80, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000,
         0xFFFFFFFF, 0xDEADBEEF, 2**63 - 1, 2**63, 2**64 - 1, 0x123456789ABCDEF0]  # fmt: skip
_FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 0.1, 65504.0, 65520.0, 1e-7, 6e-8, 3e38, -3e38, 1.1754944e-38,
           1e-40, -1e-45, 448.0, 57344.0, 16777217.0, 2147483648.0, -2147483649.0, 4294967295.0, 9.3e18, -9.3e18,
           1.9e19, 1e300, 5e-324, 2.2250738585072014e-308, np.inf, -np.inf, np.nan]  # fmt: skip


def column(token: str, seed: int) -> np.ndarray[Any, Any]:
    """Edge values and random bits for an operand."""
    rng = np.random.default_rng([seed, *token.encode()])
    size = 4 if token in ("p", "m") else int(token[1:])
    bits = np.dtype(f"u{size}")
    dtype = np.dtype(f"f{size}") if token[0] == "f" else bits
    with np.errstate(all="ignore"):
        if token[0] == "f":
            edges = np.array(_FLOATS).astype(dtype).view(bits)
            near = (rng.standard_normal(120) * 2.0 ** rng.integers(-12, 12, 120)).astype(dtype).view(bits)
        else:
            edges = np.array([value & ((1 << 8 * size) - 1) for value in _INTS], bits)
            near = rng.integers(0, 70, 120).astype(bits)
    random = rng.integers(0, 1 << 64, THREADS, np.uint64).astype(bits)
    everything = np.concatenate([np.tile(edges, 3), near, random])
    return rng.permutation(everything)[:THREADS]


_REGISTER = {"1": ("b16", "u8"), "2": ("b16", "u16"), "4": ("b32", "u32"), "8": ("b64", "u64")}


def declared(token: str) -> tuple[str, str]:
    """Register type and memory type of a token."""
    if token in ("p", "m"):
        return "b32", "u32"
    if token in ("f4", "f8"):
        return {"f4": ("f32", "f32"), "f8": ("f64", "f64")}[token]
    return _REGISTER[token[1:]]


def known_to_both(spelling: str) -> bool:
    """Whether the numpy engine has this form too."""
    parts = tuple(spelling.split("."))
    try:
        if parts[0] == "setp":
            opcodes.comparison(parts)
        else:
            opcodes.PURE[parts[0]](parts)
    except (opcodes.UnknownForm, KeyError, IndexError):
        return False
    return True


def kernel(spellings: Sequence[str], rows: Sequence[Any], guarded: bool) -> str:
    """PTX that evaluates each opcode on the inputs of thread t and stores the result at its own output row."""
    inputs = rows[0].inputs
    lines = [
        ".version 8.5", ".target sm_90", ".address_size 64", ".visible .entry k(",
        ",".join(f".param .u64 p{i}" for i in range(len(inputs) + 1)), ")", "{",
        ".reg .pred %q, %g; .reg .b32 %t, %w; .reg .b64 %a, %o; mov.u32 %t, %tid.x;",
        "and.b32 %w, %t, 5; setp.ne.u32 %g, %w, 1;",
    ]  # fmt: skip
    for i, token in enumerate(inputs):
        register, memory = declared(token)
        size = 4 if token in ("p", "m") else int(token[1:])
        lines.append(f".reg .{register} %x{i}; ld.param.u64 %a, [p{i}]; mad.wide.u32 %a, %t, {size}, %a;")
        lines.append(f"ld.global.{memory} %x{i}, [%a];")
        if token == "p":
            lines.append(f".reg .pred %b{i}; and.b32 %x{i}, %x{i}, 1; setp.eq.u32 %b{i}, %x{i}, 1;")
    operands = ", ".join(f"%b{i}" if token == "p" else f"%x{i}" for i, token in enumerate(inputs))
    lines.append(f"ld.param.u64 %o, [p{len(inputs)}]; mad.wide.u32 %o, %t, 8, %o;")
    if guarded:
        lines.append("@!%g bra $end;")  # the rest of the warp goes another way
        lines.append("and.b32 %w, %t, 2; setp.ne.u32 %g, %w, 0;")
    for index, (spelling, row) in enumerate(zip(spellings, rows, strict=True)):
        guard = "@%g " if guarded else ""
        at = f"[%o+{8 * THREADS * index}]"
        if row.output in ("p", "m"):
            lines.append(f"setp.ne.u32 %q, %t, %t; {guard}{spelling} %q, {operands}; selp.u32 %w, 1, 0, %q;")
            lines.append(f"st.global.u32 {at}, %w;")
            continue
        register, memory = declared(row.output)
        start = {"b16": "mov.b16", "b32": "mov.b32", "b64": "mov.b64", "f32": "mov.f32", "f64": "mov.f64"}[register]
        zero = "0f3F800000" if register == "f32" else "0d3FF0000000000000" if register == "f64" else "7"
        memory = "u16" if memory == "u8" else memory
        lines.append(f".reg .{register} %y{index}; {start} %y{index}, {zero}; {guard}{spelling} %y{index}, {operands};")
        lines.append(f"st.global.{memory} {at}, %y{index};")
    return "\n".join([*lines, "$end: ret;", "}"])


def groups() -> list[tuple[tuple[str, ...], list[str]]]:
    """Opcodes by operand types, in chunks that fit one kernel."""
    by_inputs: dict[tuple[str, ...], list[str]] = {}
    for key, spelling in table.SPELLINGS.items():
        if known_to_both(spelling):
            by_inputs.setdefault(table.ROWS[key].inputs, []).append(spelling)
    return [
        (inputs, spellings[at : at + CHUNK])
        for inputs, spellings in by_inputs.items()
        for at in range(0, len(spellings), CHUNK)
    ]


GROUPS = groups()


def results(
    spellings: Sequence[str], guarded: bool, engine: str, *, without_rows: bool = False
) -> tuple[np.ndarray[Any, Any], str]:
    """What opcodes make of the edge inputs; `without_rows` takes them out of the native table meanwhile."""
    rows = [table.ROWS[table.canonical(tuple(s.split(".")))] for s in spellings]
    columns = [column(token, position) for position, token in enumerate(rows[0].inputs)]
    output = np.zeros((len(spellings), THREADS), np.uint64)
    module = parse(kernel(spellings, rows, guarded))
    with pytest.MonkeyPatch.context() as patch:
        for spelling in spellings if without_rows else ():
            patch.delitem(table.ROWS, table.canonical(tuple(spelling.split("."))))
        launched = launch_once(module, "k", 1, THREADS, *columns, output, engine=engine)
    return launched.arrays[-1], launched.result.engine


def differences(spellings: Sequence[str], mine: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> list[str]:
    wrong = []
    for spelling, a, b in zip(spellings, mine, theirs, strict=True):
        token = table.ROWS[table.canonical(tuple(spelling.split(".")))].output
        kind = np.dtype(f"f{token[1:]}") if token[0] == "f" else np.dtype(np.uint64)
        if token == "u4" and "x2" in spelling and "f16" in spelling and not spelling.startswith(("abs", "neg")):
            kind = np.dtype(np.float16)
        if token == "u2" and "bf16" in spelling:  # through float32, where NaN is NaN
            a, b = ((x.astype(np.uint32) << 16).view(np.float32) for x in (a, b))
            kind = a.dtype
        if token == "u4" and "bf16x2" in spelling:
            a, b = (x.view(np.uint16).astype(np.uint32) << 16 for x in (a, b))
            kind = np.dtype(np.float32)
        if not same_bits(np.ascontiguousarray(a).view(kind), np.ascontiguousarray(b).view(kind)):
            wrong.append(spelling)
    return wrong


@pytest.mark.parametrize("guarded", [False, True], ids=["straight", "divided"])
@pytest.mark.parametrize("index", range(len(GROUPS)))
def test_native_results_equal_those_of_the_numpy_engine(index: int, guarded: bool) -> None:
    _, spellings = GROUPS[index]
    mine, engine = results(spellings, guarded, "auto")
    assert engine == "native"
    theirs, _ = results(spellings, guarded, "numpy")
    assert differences(spellings, mine, theirs) == []


def test_the_plain_instruction_set_gives_the_same_bits() -> None:
    engine = library()
    assert engine is not None
    for _, spellings in GROUPS[::4]:
        fast, _ = results(spellings, True, "auto")
        engine.ptx_use_plain(1)
        try:
            plain, _ = results(spellings, True, "auto")
        finally:
            engine.ptx_use_plain(0)
        assert differences(spellings, fast, plain) == []


def test_the_table_covers_what_the_numpy_engine_computes() -> None:
    spellings = list(table.SPELLINGS.values())
    both = [s for s in spellings if known_to_both(s)]
    assert len(both) > 0.9 * len(spellings), sorted(set(spellings) - set(both))


@pytest.mark.parametrize("guarded", [False, True], ids=["straight", "divided"])
def test_an_opcode_without_a_row_of_its_own_runs_natively_by_its_numpy_function(guarded: bool) -> None:
    for _, every in GROUPS:
        spellings = [s for s in every if s.split(".")[0] in opcodes.PURE][::3]
        if not spellings:
            continue
        mine, engine = results(spellings, guarded, "auto", without_rows=True)
        assert engine == "native"
        theirs, _ = results(spellings, guarded, "numpy")
        assert differences(spellings, mine, theirs) == []


def test_a_new_opcode_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = opcodes.Pure(inputs=("u4", "i2"), output="i4", apply=lambda a, b: a.astype(np.int32) * 3 + b)
    monkeypatch.setattr(opcodes, "PURE", {**opcodes.PURE, "triple": lambda parts: row})
    module = parse(snippet("triple.u32 %y, %x0, %x1;", [np.zeros(1, np.uint32), np.zeros(1, np.int16)], np.int32))
    x, y = np.arange(100, dtype=np.uint32), np.arange(100, dtype=np.int16) - 50
    for options in ({}, {"count": True}, {"checks": CHECKS}, {"engine": "numpy"}):
        launched = launch_once(module, "k", 1, 100, x, y, np.zeros(100, np.int32), **options)
        assert launched.result.engine == options.get("engine", "native")
        assert np.array_equal(launched.arrays[-1], 3 * x.astype(np.int32) + y)


def test_a_row_that_fails_is_named_and_ends_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(a: Any) -> Any:
        raise ValueError("no such number")

    row = opcodes.Pure(inputs=("u4",), output="u4", apply=fails)
    monkeypatch.setattr(opcodes, "PURE", {**opcodes.PURE, "broken": lambda parts: row})
    module = parse(snippet("broken.u32 %y, %x0;", [np.zeros(1, np.uint32)], np.uint32))
    with pytest.raises(Unsupported, match="ValueError: no such number"):
        launch_once(module, "k", 1, 32, np.zeros(32, np.uint32), np.zeros(32, np.uint32))
