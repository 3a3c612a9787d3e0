"""Writes the C functions of the opcode table: run by the build, into files that the engine includes."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path
from typing import Any

_C_TYPES = {
    "u1": "uint8_t", "i1": "int8_t", "u2": "uint16_t", "i2": "int16_t", "f2": "uint16_t", "u4": "uint32_t",
    "i4": "int32_t", "f4": "float", "u8": "uint64_t", "i8": "int64_t", "f8": "double", "p": "int32_t", "m": "int32_t",
}  # fmt: skip
_ROUNDING = {"rm": 1, "rp": 2, "rz": 3}


def _stored(token: str) -> str:
    """C type of a register lane: 4 bytes for everything narrower."""
    if token in ("p", "m"):
        return "int32_t"
    if token[0] == "f" and token != "f2":
        return _C_TYPES[token]
    return "uint64_t" if token[1:] == "8" else "uint32_t"


def handler(name: str, row: Any) -> str:
    """The C function of one row."""
    out = _stored(row.output)
    width = 8 if row.output[1:] == "8" else 4
    lines = [
        f"static void {name}(Cx* cx, const Ins* i) {{",
        "    uint32_t m = writing(cx, i);",
        "    if (!m) return;",
        f"    {out} other[LANES] ALIGNED32, *target = P({out}, i->d[0]), *d = m == FULL ? target : other;",
    ]
    for position, (letter, token) in enumerate(zip("abce", row.inputs, strict=False)):
        lines.append(f"    const {_stored(token)}* p{letter} = P({_stored(token)}, i->s[{position}]);")
    if row.rounding != "rn":
        lines.append(f"    set_rounding({_ROUNDING[row.rounding]});")
    lines += ['    _Pragma("GCC ivdep")', "    for (int l = 0; l < LANES; l++) {"]
    for letter, token in zip("abce", row.inputs, strict=False):
        lines.append(f"        {_C_TYPES[token]} {letter} = ({_C_TYPES[token]})p{letter}[l];")
    if row.output == "p":
        lines.append(f"        d[l] = -(int32_t)({row.expression});")
    elif row.output in ("i1", "i2", "i4"):
        lines.append(f"        d[l] = (uint32_t)(int32_t)({_C_TYPES[row.output]})({row.expression});")
    else:
        lines.append(f"        d[l] = ({_C_TYPES[row.output]})({row.expression});")
    lines.append("    }")
    if row.rounding != "rn":
        lines.append("    set_rounding(0);")
    lines += [f"    if (d == other) blend{width}(target, other, m);", "}"]
    return "\n".join(lines) + "\n"


def _tables(table: dict[str, Any]) -> str:
    parts = [f'#define FINGERPRINT "{table["fingerprint"]()}"\n']
    for name, (halves, values) in table["fp8_tables"]().items():
        parts.append(f"static const uint16_t {name}_half[256] = {{{', '.join(map(str, halves))}}};\n")
        middles = [(x + y) / 2 for x, y in itertools.pairwise(values)]
        parts.append(f"static const double {name}_middle[{len(middles)}] = {{{', '.join(map(float.hex, middles))}}};\n")
        parts.append(
            f"static inline uint32_t to_{name}(float x) {{\n"
            "    if (x != x) return 0x7F;\n"
            "    double size = fabs((double)x);\n"
            f"    int low = 0, high = {len(middles)};\n"
            "    while (low < high) { /* the number of middles below */\n"
            "        int at = (low + high) / 2;\n"
            f"        if ({name}_middle[at] < size) low = at + 1; else high = at;\n"
            "    }\n"
            f"    if (low < {len(middles)} && {name}_middle[low] == size && (low & 1)) low++;\n"
            "    return (uint32_t)low | (f_bits(x) >> 31) << 7;\n"
            "}\n"
        )
    return "".join(parts)


def write(table_file: Path, folder: Path) -> None:
    """Write tables.h, handlers.inc and effects.inc into `folder`, leaving a file alone that would not change."""
    table = runpy.run_path(str(table_file), run_name="optiml_opcode_table")
    rows = table["PURE_HANDLERS"]
    functions = [handler(f"h_{number}", row) for number, row in enumerate(rows)]
    pure = ", ".join(f"h_{number}" for number in range(len(rows)))
    handlers = "".join(functions) + (
        f"const Handler NAME(pure_handlers)[] = {{{pure}}};\nconst uint32_t NAME(pure_count) = {len(rows)};\n"
    )
    effects = f"static const Handler EFFECT_HANDLERS[] = {{{', '.join(f'h_{name}' for name in table['EFFECTS'])}}};\n"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("tables.h", _tables(table)), ("handlers.inc", handlers), ("effects.inc", effects)):
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
