"""Changed PTX: no crash, no hang, and only errors with a name. `tools/fuzz_ptx.py` runs many more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from fuzz_ptx import fuzz, seeds

from optiml.errors import InvalidInput, KernelFault, PtxSyntaxError, Unsupported
from optiml.ptx import Limits, Machine, parse
from optiml.ptx.lower import program_of


@pytest.mark.timeout(120)
def test_changed_text_gives_a_result_or_a_named_error() -> None:
    outcomes = fuzz(seeds(longest=2500), inputs=250, seed=20, seconds=None, run=True)
    assert sum(outcomes.values()) == 250
    assert {"PtxSyntaxError", "Unsupported"} <= set(outcomes)
    assert outcomes["ran"] + outcomes["faulted"] > 10


HEAD = ".version 8.5\n.target sm_80\n.address_size 64\n"


def kernel(body: str, params: str = "") -> str:
    return f"{HEAD}.visible .entry k({params})\n{{\n{body}\n}}\n"


@pytest.mark.parametrize(
    "body",
    [
        ".reg .b32 %r<3>; add.u32 %r1, %r2;",
        ".reg .b32 %r<3>; add.u32;",
        ".reg .b32 %r<3>; mov.u32 %r1, nothing;",
        ".reg .b32 %r<3>; ld.global.u32 %r1, %r2;",
        ".reg .b32 %r<3>; shfl.sync.up.b32 %r1, %r2; ret;",
        ".reg .pred %p<3>; @%r9 bra nowhere; ret;",
        ".reg .b32 %r<3>; bra %r1;",
        ".reg .b32 %r<3>; setp.lt.s32 %r1, %r2, %r1;",
        ".reg .b32 %r<3>; frobnicate.u32 %r1, %r2;",
    ],
)
def test_operands_that_do_not_fit_are_refused_by_name(body: str) -> None:
    with pytest.raises((PtxSyntaxError, Unsupported)):
        program_of(parse(kernel(body)), "k", counting=False)


def launched(text: str, grid: tuple[int, int, int], *, budget: int = 100_000, args: tuple[bytes, ...] = ()) -> None:
    machine = Machine()
    machine.launch(machine.load(parse(text)), "k", grid=grid, block=(32, 1, 1), shared_bytes=0, args=args,
                   limits=Limits(warp_instructions=budget))  # fmt: skip


def test_an_enormous_grid_ends_at_its_budget() -> None:
    with pytest.raises(KernelFault, match="budget") as raised:
        launched(kernel(".reg .b32 %r<3>; mov.u32 %r1, %tid.x; add.u32 %r1, %r1, 1; ret;"), (2**31 - 1, 65535, 65535))
    assert raised.value.fault.kind == "timed_out"


def test_recursion_device_malloc_and_too_much_memory_are_refused_by_name() -> None:
    recursive = f"{HEAD}.func f() {{ call f; ret; }}\n" + kernel("call f; ret;").removeprefix(HEAD)
    with pytest.raises(Unsupported, match="recursive"):
        launched(recursive, (1, 1, 1))
    malloc = f"{HEAD}.extern .func (.param .b64 r) malloc (.param .b64 n);\n" + kernel(
        "{ .param .b64 n; .param .b64 r; call.uni (r), malloc, (n); } ret;"
    ).removeprefix(HEAD)
    with pytest.raises(Unsupported, match="malloc"):
        launched(malloc, (1, 1, 1))
    with pytest.raises(InvalidInput, match="local memory"):
        launched(kernel(".local .align 4 .b8 big[1000000]; .reg .b64 %d; mov.u64 %d, big; ret;"), (1, 1, 1))
    with pytest.raises(InvalidInput, match="shared memory"):
        launched(kernel(".shared .align 4 .b8 big[1000000]; .reg .b64 %d; mov.u64 %d, big; ret;"), (1, 1, 1))
