"""The seeded bugs and sound kernels of this folder: how many there are, and that no mode finds fault with a sound one.

The kernels of the corpus come on top: see `launching.launch`, which runs each of them in every mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import test_native_checks as checks
import test_native_ordering as ordering
from launching import CHECKS, Launched, always_divided

from optiml.ptx import engine_name

pytestmark = pytest.mark.skipif(engine_name() != "native", reason="the native engine was not built")
Run = Callable[..., Launched]
SOUND: Mapping[str, Run] = MappingProxyType(
    {
        **{f"{bug.name}, repaired": partial(checks.run, bug, bug.fixed) for bug in checks.BUGS},
        **{f"{bug.name}, repaired": partial(ordering.run, bug.fixed) for bug in ordering.BUGS},
        **{name: partial(ordering.run, body, before=ordering.GROUPS if "cg::" in body else "")
           for name, body in ordering.SOUND.items()},
    }
)  # fmt: skip
MODES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "plain": {"count": False},
        "counters": {"count": True},
        "races": {"checks": frozenset({"race"})},
        "unwritten memory": {"checks": frozenset({"uninitialised"})},
        "all checks and counters": {"checks": CHECKS, "count": True},
        "two threads": {"threads": 2},
        "two threads and counters": {"threads": 2, "count": True},
    }
)


def test_there_are_at_least_thirty_seeded_bugs_and_sixty_sound_kernels() -> None:
    marked = {bug.name for bug in (*checks.BUGS, *ordering.BUGS) if bug.body.count("// BUG") == 1}
    assert len(marked) == len(checks.BUGS) + len(ordering.BUGS) >= 30
    assert len(SOUND) == len(marked) + len(ordering.SOUND) >= 60
    assert {bug.kind for bug in (*checks.BUGS, *ordering.BUGS)} == {
        "out_of_bounds", "misaligned", "uninitialised", "race", "barrier_divergence", "deadlock", "timed_out", "trap",
    }  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_no_sound_kernel_raises_an_alarm(mode: str) -> None:
    with always_divided():
        assert all(run(**MODES[mode]).result.engine == "native" for run in SOUND.values())
