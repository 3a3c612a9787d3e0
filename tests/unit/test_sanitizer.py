"""What compute-sanitizer prints, as faults."""

from __future__ import annotations

import pytest

from optiml.verify.sanitizer import Tool, first_finding, until_findings

MEMCHECK = """\
item 0 relu n=1003
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at relu+0x90 in kernel.cu:3
=========     by thread (235,0,0) in block (3,0,0)
=========     Access at 0x7f1000000fac is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f1000000000 of size 4,012 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: function at 0x123 in host.py:77
=========
========= ERROR SUMMARY: 21 errors
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at relu+0x70 in kernel.cu:3
=========     and Read access at relu+0xa0 in kernel.cu:4 [2046 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
INITCHECK = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at relu+0x60 in kernel.cu:3
=========     by thread (0,0,0) in block (0,0,0)
=========     Access at 0x7f1000002000
========= ERROR SUMMARY: 32 errors
"""
SYNCCHECK = """\
========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in block.
=========     at relu+0x50 in kernel.cu:3
=========     by thread (40,0,0) in block (0,0,0)
========= ERROR SUMMARY: 8 errors
"""


@pytest.mark.parametrize(
    ("tool", "text", "kind", "line"),
    [
        ("memcheck", MEMCHECK, "out_of_bounds", 3),
        ("memcheck", MEMCHECK.replace("is out of bounds", "is misaligned"), "misaligned", 3),
        ("racecheck", RACECHECK, "race", 3),
        ("initcheck", INITCHECK, "uninitialised", 3),
        ("synccheck", SYNCCHECK, "barrier_divergence", 3),
    ],
)
def test_each_tool_names_kind_and_line(tool: Tool, text: str, kind: str, line: int) -> None:
    fault = first_finding(tool, text)
    assert fault is not None
    assert (fault.kind, fault.line) == (kind, line)
    assert fault.detail.startswith(f"{tool}: ")


def test_an_access_names_its_thread_and_size() -> None:
    fault = first_finding("memcheck", MEMCHECK)
    assert fault is not None
    assert (fault.access, fault.bytes, fault.thread, fault.block) == ("write", 4, (235, 0, 0), (3, 0, 0))


def test_a_race_names_both_lines() -> None:
    fault = first_finding("racecheck", RACECHECK)
    assert fault is not None
    assert fault.other is not None
    assert fault.other.line == 4
    assert "line 3 and line 4" in fault.detail


def test_a_clean_output_has_no_finding() -> None:
    clean = "item 0 relu n=1\n========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
    assert first_finding("memcheck", clean) is None


def test_a_tool_may_stop_once_another_finding_begins() -> None:
    first, rest = INITCHECK.split("========= ERROR SUMMARY")
    assert not until_findings(2)(first.encode())
    assert until_findings(2)((first + first.replace("COMPUTE-SANITIZER", "")).encode())
    assert not until_findings(2)(f"========= ERROR SUMMARY{rest}".encode())


def test_findings_are_counted_across_the_pieces_of_an_output() -> None:
    enough = until_findings(2)
    told = [enough(INITCHECK[at : at + 7].encode()) for at in range(0, len(INITCHECK), 7)]
    assert not any(told)
    assert enough(INITCHECK.encode())
