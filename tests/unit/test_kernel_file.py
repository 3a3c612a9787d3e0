"""Kernels as one `.cu` file with a TOML block."""

from __future__ import annotations

import pytest

from optiml.codec import kernel_id
from optiml.errors import InvalidInput
from optiml.kernel_file import merge_block, read_kernel_text, write_kernel_text
from optiml.records import Kernel, Launch, Workspace

TEXT = """/* optiml
[[launch]]
kernel = "relu"
grid = ["ceil_div(n, BLOCK)"]
block = ["BLOCK"]
args = ["x", "y", "n"]
[params]
BLOCK = 256
*/
extern "C" __global__ void relu() {}
"""


def test_the_block_becomes_fields_and_line_numbers_stay() -> None:
    kernel = read_kernel_text(TEXT)
    assert kernel.launches[0].kernel == "relu"
    assert kernel.params == {"BLOCK": 256}
    assert kernel.source.split("\n")[9].startswith("extern")
    assert "optiml" not in kernel.source


def test_a_file_without_a_block_is_only_source() -> None:
    assert read_kernel_text("int x;\n") == Kernel(source="int x;\n")


def test_a_block_later_in_the_file_is_an_ordinary_comment() -> None:
    text = "int x;\n/* optiml\nnonsense [\n*/\n"
    assert read_kernel_text(text).source == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/* optiml\n[[launch\n*/\n", "not TOML"),
        ("/* optiml\nlaunches = []\n[[launch]]\nkernel='k'\n*/\n", "both"),
        ("/* optiml\nsource = 'x'\n*/\n", "may not give source"),
        ("/* optiml\nparam = {A = 1}\n*/\n", "did you mean 'params'"),
        ("/* optiml\n# " + "x" * 20000 + "\n*/\n", "larger"),
    ],
)
def test_a_bad_block_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read_kernel_text(text)


def test_fields_given_twice_are_refused() -> None:
    kernel = Kernel(source=TEXT, params={"BLOCK": 128})
    with pytest.raises(InvalidInput, match="params is given twice"):
        merge_block(kernel)


def test_a_record_may_leave_its_fields_to_the_block() -> None:
    assert merge_block(Kernel(source=TEXT)) == read_kernel_text(TEXT)


def test_a_kernel_read_from_a_file_keeps_its_id_when_written_again() -> None:
    kernel = read_kernel_text(TEXT)
    assert kernel_id(read_kernel_text(write_kernel_text(kernel))) == kernel_id(kernel)


def test_what_is_written_reads_back_the_same() -> None:
    kernel = Kernel(
        source="// a\nint y;\n",
        launches=(
            Launch(
                kernel="a<float, 4>", grid=("ceil_div(n, B)", 2), block=("B",), args=("x", 3, 0.5), shared_bytes="4*B"
            ),
            Launch(kernel="b", grid=(1,), block=(32,), args=("w",), cooperative=True),
        ),
        params={"B": 64, "FAST": True, "S": 0.25},
        tunables={"B": (32, 64)},
        workspace={"w": Workspace(dtype="float32", shape=("n", 2), init="zero")},
        flags=("--use_fast_math",),
    )
    back = read_kernel_text(write_kernel_text(kernel))
    assert back.source.lstrip("\n") == kernel.source
    assert kernel_id(merge_block(back)) == kernel_id(Kernel(**{**vars(kernel), "source": back.source}))
    assert back.tunables == kernel.tunables
