"""Unified diffs, applied strictly."""

from __future__ import annotations

import pytest
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


PLANNED = """/* optiml
[[launch]]
kernel = "relu"
grid = ["ceil_div(n, BLOCK)"]
block = ["BLOCK"]
args = ["x", "y", "n"]
[params]
BLOCK = 128
*/
extern "C" __global__ void relu(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = fmaxf(x[i], 0.0f);
}
"""


def test_a_diff_of_a_kernel_file_may_touch_its_launch_comment(bench: Workbench) -> None:
    problem = bench.problem("relu")
    changed = PLANNED.replace("BLOCK = 128", "BLOCK = 256").replace("(const float* x", "(const float* __restrict__ x")
    patched = bench.kernel({"base": PLANNED, "diff": make_diff(PLANNED, changed)}, problem)
    assert patched == bench.kernel(changed, problem)
    assert patched.params == {"BLOCK": 256}


def test_a_diff_of_the_source_that_was_shown_applies_as_well(bench: Workbench) -> None:
    problem = bench.problem("relu")
    shown = bench.kernel(PLANNED, problem).source
    changed = shown.replace("(const float* x", "(const float* __restrict__ x")
    patched = bench.kernel({"base": PLANNED, "diff": make_diff(shown, changed)}, problem)
    assert patched.source == changed
    assert patched.params == {"BLOCK": 128}
