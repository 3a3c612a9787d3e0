"""Random programs with divergence, loops, shuffles and shared memory: both engines leave the same bytes and counts."""

from __future__ import annotations

import random

import numpy as np
import pytest
from launching import launch

from optiml.ptx import engine_name, parse

pytestmark = pytest.mark.skipif(engine_name() != "native", reason="the native engine was not built")

OPERATIONS = ("add.u32", "sub.s32", "mul.lo.s32", "xor.b32", "and.b32", "or.b32", "min.s32", "max.u32", "mul.hi.u32",
              "div.u32", "rem.s32")  # fmt: skip


def program(seed: int) -> str:
    """A kernel over registers %r0..%r7; every loop ends, every barrier is reached by all."""
    pick = random.Random(seed)
    labels = iter(range(1000))

    def register() -> str:
        return f"%r{pick.randrange(8)}"

    def straight(count: int) -> list[str]:
        lines = []
        for _ in range(count):
            guard = pick.choice(["", "", "@%p0 ", "@!%p1 "])
            kind = pick.randrange(8)
            if kind < 5:
                other = pick.choice([register(), str(pick.randrange(1, 1 << 20))])
                lines.append(f"{guard}{pick.choice(OPERATIONS)} {register()}, {register()}, {other};")
            elif kind == 5:
                compare = pick.choice(["lt.s32", "gt.u32", "eq.s32", "ne.u32"])
                lines.append(f"setp.{compare} %p{pick.randrange(2)}, {register()}, {register()};")
            elif kind == 6:
                lines.append(f"{guard}selp.b32 {register()}, {register()}, {register()}, %p0;")
            else:
                lines.append(f"{guard}shf.l.wrap.b32 {register()}, {register()}, {register()}, {pick.randrange(40)};")
        return lines

    def block(depth: int) -> list[str]:
        lines = straight(pick.randrange(1, 6))
        shape = pick.randrange(4) if depth else 3
        if shape == 0:  # if and else
            other, end = next(labels), next(labels)
            lines.append(f"and.b32 %c, {register()}, {pick.choice([1, 3, 8])};")
            lines.append(f"setp.eq.u32 %p2, %c, 0; @%p2 bra $L{other};")
            lines += [*block(depth - 1), f"bra $L{end};", f"$L{other}:", *block(depth - 1), f"$L{end}:"]
        elif shape == 1:  # a loop of a length of its own in every thread
            head, counter = next(labels), f"%n{depth}"
            lines += [f"and.b32 {counter}, {register()}, 3;", f"$L{head}:", *block(depth - 1)]
            lines += [f"setp.ne.u32 %p3, {counter}, 0; sub.u32 {counter}, {counter}, 1; @%p3 bra $L{head};"]
        elif shape == 2:
            lines.append(f"shfl.sync.bfly.b32 {register()}, {register()}, {pick.choice([1, 2, 16])}, 31, -1;")
        return lines

    body: list[str] = []
    for _ in range(3):
        body += block(3)
        body += ["shl.b32 %a, %t, 2; mov.u32 %c, s; add.u32 %a, %a, %c;", f"st.shared.u32 [%a], {register()};",
                 "bar.sync 0;", "xor.b32 %a, %t, 37; shl.b32 %a, %a, 2; add.u32 %a, %a, %c;",
                 f"ld.shared.u32 {register()}, [%a];", "bar.sync 0;"]  # fmt: skip
    results = "".join(f"st.global.u32 [%o+{4 * i}], %r{i}; " for i in range(8))
    setup = "".join(f"mad.lo.u32 %r{i}, %t, {pick.randrange(1, 99999)}, {pick.randrange(1 << 30)}; " for i in range(8))
    text = "\n".join(body)
    return f""".version 8.5
.target sm_80
.address_size 64
.visible .entry k(.param .u64 y) {{
.reg .b32 %r<8>, %n<4>, %t, %a, %c, %g; .reg .pred %p<4>; .reg .b64 %o; .shared .align 4 .b8 s[512];
mov.u32 %t, %tid.x; {setup}
setp.lt.u32 %p0, %t, 7; setp.gt.u32 %p1, %t, 50;
{text}
mov.u32 %g, %ctaid.x; mad.lo.u32 %g, %g, 128, %t; ld.param.u64 %o, [y]; mad.wide.u32 %o, %g, 32, %o;
{results}
ret;
}}"""


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_run_alike(seed: int) -> None:
    launched = launch(parse(program(seed)), "k", 2, 128, np.zeros((256, 8), np.uint32))
    assert launched.result.engine == "native"
