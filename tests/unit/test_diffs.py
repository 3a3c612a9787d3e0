"""Unified diffs, applied strictly."""

from __future__ import annotations

import pytest
from fakes import RELU
from hypothesis import given
from hypothesis import strategies as st

from optiml.diffs import apply_diff, make_diff
from optiml.errors import InvalidInput
from optiml.workbench import Workbench

LINES = st.lists(st.sampled_from(["a", "b", "c", "", "int x;", "+y", "-z"]), max_size=12)


@given(LINES, LINES)
def test_applying_a_made_diff_gives_the_new_text(before: list[str], after: list[str]) -> None:
    old, new = "".join(f"{line}\n" for line in before), "".join(f"{line}\n" for line in after)
    diff = make_diff(old, new)
    assert old == new if not diff else apply_diff(old, diff) == new


def test_a_hunk_finds_its_lines_where_they_moved_to() -> None:
    diff = make_diff("a\nb\nc\n", "a\nB\nc\n")
    assert apply_diff("new\nnew\na\nb\nc\n", diff) == "new\nnew\na\nB\nc\n"


@pytest.mark.parametrize(
    ("text", "diff", "message"),
    [
        ("x\n", "no diff at all", "no hunk"),
        ("x\n", "@@ -1 +1 @@\n-a\n+b\n", "not in the base"),
        ("q\na\nz\na\n", "@@ -1 +1 @@\n-a\n+b\n", "stand in 2 places"),
        ("a\n", "@@ -1,3 +1 @@\n-a\n", "middle of a hunk"),
        ("a\n", "@@ -1 +1 @@\n*a\n", "neither context nor change"),
    ],
)
def test_a_diff_that_does_not_fit_is_refused(text: str, diff: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        apply_diff(text, diff)


def test_a_diff_of_a_kernel_file_may_touch_its_launch_comment(bench: Workbench) -> None:
    problem = bench.problem("relu")
    changed = RELU.replace("BLOCK = 256", "BLOCK = 128").replace("(const float* x", "(const float* __restrict__ x")
    patched = bench.kernel({"base": RELU, "diff": make_diff(RELU, changed)}, problem)
    assert patched == bench.kernel(changed, problem)
    assert patched.params == {"BLOCK": 128}


def test_a_diff_of_the_source_that_was_shown_applies_as_well(bench: Workbench) -> None:
    problem = bench.problem("relu")
    shown = bench.kernel(RELU, problem).source
    changed = shown.replace("(const float* x", "(const float* __restrict__ x")
    patched = bench.kernel({"base": RELU, "diff": make_diff(shown, changed)}, problem)
    assert patched.source == changed
    assert patched.params == {"BLOCK": 256}


def test_a_diff_that_spoils_the_launch_comment_is_told_what_it_spoils(bench: Workbench) -> None:
    spoilt = RELU.replace("block =", "blok =")
    with pytest.raises(InvalidInput, match="blok"):
        bench.kernel({"base": RELU, "diff": make_diff(RELU, spoilt)}, bench.problem("relu"))
