"""Each built-in edit: what it makes of a kernel, that the result compiles, and where it keeps its hands off."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from cuda.bindings import nvrtc
from search_fakes import context, items_problem, profile, row_sum_kernel, rows_problem

from optiml.codec import decode, kernel_id
from optiml.kernel_file import read_kernel_text
from optiml.problems.problem import kernel_from_text, load_builtin
from optiml.records import Kernel, Launch, Problem
from optiml.search.edit import EditContext, Proposal
from optiml.search.edits import all_edits, edits_named

KERNELS = Path(__file__).parent / "data" / "kernels"
NAMES = sorted(path.stem for path in KERNELS.glob("*.cu"))


def given(name: str) -> EditContext:
    """The context of one of the kernels in data/kernels."""
    kernel = read_kernel_text((KERNELS / f"{name}.cu").read_text(encoding="utf-8"))
    problem = decode(Problem, json.loads((KERNELS / f"{name}.json").read_text(encoding="utf-8")), what=name)
    return context(kernel, problem)


def proposals(edit: str, where: EditContext) -> list[Proposal]:
    return list(edits_named((edit,))[0].propose(where))


def compile_log(kernel: Kernel) -> str:
    """What NVRTC has against a kernel; empty if it builds."""
    error, program = nvrtc.nvrtcCreateProgram(kernel.source.encode(), b"kernel.cu", 0, [], [])
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS
    options = [b"--gpu-architecture=compute_80", *(flag.encode() for flag in kernel.flags)]
    options += [f"-D{name}={value}".encode() for name, value in kernel.params.items()]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if error == nvrtc.nvrtcResult.NVRTC_SUCCESS:
        return ""
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)  # bytes would be written to in place, even the one-byte ones that all share
    nvrtc.nvrtcGetProgramLog(program, log)
    return log.decode()


def squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def has_all(kernel: Kernel, fragments: Sequence[str]) -> None:
    text = squeezed(kernel.source)
    for fragment in fragments:
        assert fragment in text, f"{fragment!r} is not in {text}"


def kernel_of(source: str, *, grid: tuple[int | str, ...] = ("ceil_div(n, 256)",), block: tuple[int, ...] = (256,),
              args: tuple[str, ...] = ("x", "y", "n"), params: dict[str, int] | None = None) -> Kernel:  # fmt: skip
    name = re.search(r"(\w+)\s*\(", source[source.index("__global__") :].replace("__launch_bounds__(", "")).group(1)  # type: ignore[union-attr]
    return Kernel(
        source=source, launches=(Launch(kernel=name, grid=grid, block=block, args=args),), params=params or {}
    )  # fmt: skip


ITEMS = """\
extern "C" __global__ void scale(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 2.0f * x[i];
}
"""


# --- all edits -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_what_the_edits_make_of_a_kernel_compiles_and_differs_from_it(name: str) -> None:
    where = given(name)
    made = 0
    for edit in all_edits():
        for proposal in list(edit.propose(where))[:2]:
            assert compile_log(proposal.kernel) == "", f"{edit.name}: {proposal.kernel.source}"
            assert kernel_id(proposal.kernel) != kernel_id(where.kernel)
            assert proposal.rationale
            assert proposal.expected
            made += 1
    assert made >= 3


@pytest.mark.parametrize("problem", ["softmax", "layernorm", "matmul", "relu", "sum", "transpose"])
def test_seeds_of_built_in_problems_are_edited_into_kernels_that_compile(problem: str) -> None:
    builtin = load_builtin(problem)
    where = context(kernel_from_text(builtin.seed_text, dtype="float32"), builtin.problem)
    for edit in all_edits():
        if edit.name != "swap_strategy":
            for proposal in list(edit.propose(where))[:1]:
                assert compile_log(proposal.kernel) == "", f"{edit.name}: {proposal.kernel.source}"


@pytest.mark.parametrize(
    "source",
    [
        "",
        "not CUDA {{{",
        "#define E extern \"C\" __global__ void\nE f(float* x) { x[0] = 1; }",
        'extern "C" __global__ void scale(float* x, int n) { if (n) { ',
        'template <class T> __global__ void scale(T* x) { auto f = [&](int i) { return x[i]; }; x[0] = f(1); }',
        'extern "C" __global__ void scale(float* x) { asm volatile("bar.sync 0;"); switch (1) { case 0: break; } }',
    ],
)  # fmt: skip
def test_odd_source_never_makes_an_edit_fail(source: str) -> None:
    kernel = Kernel(
        source=source, launches=(Launch(kernel="scale", grid=("n",), block=(256,), args=("x", "n")),)
    )  # fmt: skip
    for edit in all_edits():
        for proposal in edit.propose(context(kernel, items_problem())):
            assert proposal.kernel.launches


def test_ptx_kernels_are_left_alone() -> None:
    kernel = dataclasses.replace(kernel_of(ITEMS), language="ptx")
    names = {edit.name for edit in all_edits() for _ in edit.propose(context(kernel, items_problem()))}
    assert names <= {"block_shape", "retune_param"}


def test_each_edit_says_what_it_moves_and_where_it_comes_from() -> None:
    for edit in all_edits():
        assert edit.name
        assert edit.why.endswith(".")
        assert edit.source
        assert "." in edit.metric or edit.metric.startswith("launch__")
    assert len({edit.name for edit in all_edits()}) == len(all_edits())


# --- rows ------------------------------------------------------------------------------------------------------------
def test_row_per_warp_shares_the_row_and_folds_with_shuffles() -> None:
    (proposal,) = proposals("row_per_warp", context(row_sum_kernel(), rows_problem()))
    has_all(
        proposal.kernel,
        (
            "const int lane = threadIdx.x % 32;",
            "int r = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;",
            "for (int c = lane; c < C; c += 32) s += x[r * C + c];",
            "__shfl_xor_sync(0xffffffffu, s, offset)",
            "if (lane == 0) { y[r] = s; }",
        ),
    )
    assert proposal.kernel.launches[0].grid == ("ceil_div(R * 32, 128)",)
    assert compile_log(proposal.kernel) == ""


def test_row_per_block_folds_in_shared_memory() -> None:
    (proposal,) = proposals("row_per_block", context(row_sum_kernel(), rows_problem()))
    has_all(proposal.kernel, ("int r = blockIdx.x;", "c += blockDim.x", "__shared__ float s_parts[32];"))
    assert proposal.kernel.launches[0].grid == ("R",)
    assert compile_log(proposal.kernel) == ""


def test_maxima_in_every_spelling_are_folded() -> None:
    for fold in ("m = fmaxf(m, x[r * C + c]);", "m = x[r * C + c] > m ? x[r * C + c] : m;",
                 "if (x[r * C + c] > m) m = x[r * C + c];", "if (m < x[r * C + c]) { m = x[r * C + c]; }"):  # fmt: skip
        source = (
            row_sum_kernel().source.replace("s += x[r * C + c];", fold).replace("float s = 0.0f", "float m = -1e30f")
        )
        kernel = row_sum_kernel(source.replace("y[r] = s", "y[r] = m"))
        (proposal,) = proposals("row_per_warp", context(kernel, rows_problem()))
        assert compile_log(proposal.kernel) == ""
        assert "__shfl_xor_sync(0xffffffffu, m, offset)" in proposal.kernel.source


def test_a_sum_that_starts_with_a_value_counts_it_once() -> None:
    kernel = row_sum_kernel(row_sum_kernel().source.replace("float s = 0.0f", "float s = x[r * C]"))
    (proposal,) = proposals("row_per_warp", context(kernel, rows_problem()))
    has_all(proposal.kernel, ("const float s_before = s; s = 0;", "s = s_before + s;"))


def test_rows_walked_in_grid_strides_are_shared_too() -> None:
    (proposal,) = proposals("row_per_warp", given("row_max_strided"))
    has_all(
        proposal.kernel,
        (
            "for (int r = blockIdx.x * (BLOCK / 32) + threadIdx.x / 32; r < R; r += gridDim.x * (BLOCK / 32))",
            "for (int k = 1 + lane; k < C; k += 32)",
        ),
    )


def test_a_block_per_row_in_a_loop_waits_before_it_reuses_its_parts() -> None:
    (proposal,) = proposals("row_per_block", given("row_max_strided"))
    text = squeezed(proposal.kernel.source)
    assert text.index("best_parts[0]") < text.rindex("__syncthreads();") < text.index("top[r] = best")


def test_an_array_written_in_one_loop_and_read_in_the_next_is_ordered() -> None:
    (proposal,) = proposals("row_per_warp", given("row_softmax"))
    assert "__syncwarp();" in proposal.kernel.source


def test_csr_rows_with_bounds_from_memory_are_shared() -> None:
    source = """\
extern "C" __global__ void spmv(const int* ptr, const int* col, const float* val, const float* x, float* y, int R) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < R) {
        float total = 0.f;
        for (int j = ptr[row]; j < ptr[row + 1]; j++) total += val[j] * x[col[j]];
        y[row] = total;
    }
}
"""
    kernel = kernel_of(source, grid=("ceil_div(R, 128)",), block=(128,), args=("ptr", "col", "val", "x", "y", "R"))
    (proposal,) = proposals("row_per_warp", context(kernel, rows_problem()))
    has_all(proposal.kernel, ("for (int j = ptr[row] + lane; j < ptr[row + 1]; j += 32)", "if (lane == 0)"))
    assert compile_log(proposal.kernel) == ""


@pytest.mark.parametrize(
    "walk",
    [
        "const float* end = p + C;\n    while (p < end) s += *p++;",
        "const float* end = p + C;\n    while (p != end) { float v = *(p++); s += v; }",
        "for (int k = 0; k < C; ++k) s += *p++;",
    ],
)
def test_rows_walked_with_a_pointer_are_shared(walk: str) -> None:
    old = "for (int c = 0; c < C; ++c) s += x[r * C + c];"
    assert old in row_sum_kernel().source
    source = row_sum_kernel().source.replace(old, f"const float* p = x + r * C;\n    {walk}")
    (proposal,) = proposals("row_per_warp", context(row_sum_kernel(source), rows_problem()))
    assert re.search(r"= lane; \w+ < .*; \w+ \+= 32\)", proposal.kernel.source)
    assert "*p++" not in proposal.kernel.source
    assert compile_log(proposal.kernel) == ""


@pytest.mark.parametrize("walk", ["if (s < 1.f) s += *p++; else s -= 1.f;", "s += *p++ * *p;", "s += *p++; p++;"])
def test_pointers_that_move_unevenly_are_left_alone(walk: str) -> None:
    source = row_sum_kernel().source.replace(
        "for (int c = 0; c < C; ++c) s += x[r * C + c];",
        f"const float* p = x + r * C;\n    for (int c = 0; c < C; ++c) {{ {walk} }}",
    )
    assert proposals("row_per_warp", context(row_sum_kernel(source), rows_problem())) == []


ONLINE = """\
extern "C" __global__ void row_sum(const float* x, float* y, int R, int C) {
    int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= R) return;
    float m = -1e30f, d = 0.0f;
    for (int c = 0; c < C; ++c) {
        float n = fmaxf(m, x[r * C + c]);
        d = d * expf(m - n) + expf(x[r * C + c] - n);
        m = n;
    }
    y[r] = m + logf(d);
}
"""


def test_a_running_maximum_with_its_sum_is_folded_as_a_pair() -> None:
    for edit in ("row_per_warp", "row_per_block"):
        (proposal,) = proposals(edit, context(row_sum_kernel(ONLINE), rows_problem()))
        has_all(proposal.kernel, ("d = (m == both ? d : d * expf(m - both)) + (other_top == both ?", "m = both;"))
        assert compile_log(proposal.kernel) == ""


@pytest.mark.parametrize(
    ("old", "new"), [("expf(m - n)", "expf(n - m)"), ("d = 0.0f", "d = 1.0f"), ("m = n;", "m = n + 1.f;")]
)
def test_pairs_that_do_not_rescale_are_left_alone(old: str, new: str) -> None:
    assert old in ONLINE
    where = context(row_sum_kernel(ONLINE.replace(old, new)), rows_problem())
    assert proposals("row_per_warp", where) == []


def test_a_row_that_has_a_block_of_one_thread_gets_more_threads() -> None:
    source = row_sum_kernel().source.replace("blockIdx.x * blockDim.x + threadIdx.x", "blockIdx.x")
    kernel = dataclasses.replace(
        row_sum_kernel(source),
        launches=(Launch(kernel="row_sum", grid=("R",), block=(1,), args=("x", "y", "R", "C")),),
    )
    (warp,) = proposals("row_per_warp", context(kernel, rows_problem()))
    (block,) = proposals("row_per_block", context(kernel, rows_problem()))
    assert (warp.kernel.launches[0].grid, warp.kernel.launches[0].block) == (("R",), (32,))
    assert block.kernel.launches[0].block == (128,)
    has_all(block.kernel, ("const int lane = threadIdx.x;", "int r = blockIdx.x;", "c += blockDim.x"))
    assert compile_log(warp.kernel) == compile_log(block.kernel) == ""


def test_a_loop_that_ends_on_equality_ends_on_order_once_it_is_shared() -> None:
    source = row_sum_kernel().source.replace("c < C", "c != C")
    (proposal,) = proposals("row_per_warp", context(row_sum_kernel(source), rows_problem()))
    has_all(proposal.kernel, ("for (int c = lane; c < C; c += 32)",))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("s += x[r * C + c]", "s = s * 0.5f + x[r * C + c]"),  # a recurrence
        ("s += x[r * C + c]", "s += x[c * R + r]"),  # coalesced over the threads already
        ("s += x[r * C + c];", "{ s += x[r * C + c]; if (s > 9.f) break; }"),
        ("s += x[r * C + c];", "{ y[r * C + c] = s; s += x[r * C + c]; }"),  # a prefix sum
        ("y[r] = s;", "y[r] = s + threadIdx.x;"),
        ("float s = 0.0f;", "__shared__ float t[4]; float s = 0.0f;"),
        ("int r = blockIdx.x * blockDim.x + threadIdx.x;", "int r = threadIdx.x;"),
        ("s += x[r * C + c];", "{ s += x[r * C + c]; ++c; }"),
    ],
)
def test_rows_that_are_not_understood_are_left_alone(old: str, new: str) -> None:
    source = row_sum_kernel().source
    assert old in source
    assert proposals("row_per_warp", context(row_sum_kernel(source.replace(old, new)), rows_problem())) == []


def test_tunables_of_a_divided_block_stay_whole_warps() -> None:
    kernel = read_kernel_text((KERNELS / "row_max_strided.cu").read_text(encoding="utf-8"))
    kernel = dataclasses.replace(kernel, tunables={"BLOCK": (48, 64, 96)})
    (proposal,) = proposals("row_per_warp", context(kernel, given("row_max_strided").problem))
    assert proposal.kernel.tunables == {"BLOCK": (64, 96)}


def test_loops_of_a_team_are_vectorised_together() -> None:
    warp = proposals("row_per_warp", given("row_l2_norm"))[0].kernel
    (proposal,) = proposals("vectorise_rows", context(warp, given("row_l2_norm").problem))
    text = squeezed(proposal.kernel.source)
    assert text.count("*reinterpret_cast<const float_x4*>") == 2
    assert "% 16 == 0) ? (C) / 4 * 4 : 0;" in text
    assert compile_log(proposal.kernel) == ""


# --- items -----------------------------------------------------------------------------------------------------------
def test_elementwise_kernels_get_vectors_with_a_scalar_tail() -> None:
    found = proposals("vectorise_loads", context(kernel_of(ITEMS), items_problem()))
    has_all(
        found[0].kernel,
        (
            "struct alignas(16) float_x4 { float v[4]; };",
            "% 16 == 0 && first + 3 < n",
            "y_pack.v[k] = 2.0f * x_pack.v[k];",
            "for (int i = first; i < n && i < first + 4; ++i)",
        ),
    )
    assert found[0].kernel.launches[0].grid == ("ceil_div(n, 256 * 4)",)
    assert [compile_log(item.kernel) for item in found] == ["", ""]


def test_the_index_itself_keeps_its_value_inside_a_vector() -> None:
    source = ITEMS.replace("2.0f * x[i]", "x[i] * i + x[n - 1 - i]")
    found = proposals("vectorise_loads", context(kernel_of(source), items_problem()))
    has_all(found[0].kernel, ("const int i = first + k;", "x_pack.v[k] * i + x[n - 1 - i]"))
    assert compile_log(found[0].kernel) == ""


def test_grid_stride_loops_are_vectorised() -> None:
    source = """\
extern "C" __global__ void add(const float* a, const float* b, float* c, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) c[i] = a[i] + b[i];
}
"""
    found = proposals("vectorise_loads", context(kernel_of(source, args=("a", "b", "c", "n")), items_problem()))
    has_all(found[0].kernel, ("first += (gridDim.x * blockDim.x) * 4", "c_pack.v[k] = a_pack.v[k] + b_pack.v[k];"))
    assert found[0].kernel.launches[0].grid == ("ceil_div(n, 256)",)
    assert compile_log(found[0].kernel) == ""


def test_half_precision_takes_eight_elements() -> None:
    builtin = load_builtin("relu")
    where = context(kernel_from_text(builtin.seed_text, dtype="float16"), builtin.problem, dtype="float16")
    assert "struct alignas(16) T_x8 { T v[8]; };" in proposals("vectorise_loads", where)[0].kernel.source


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("y[i] = 2.0f * x[i]", "if (x[i] > 0) y[i] = x[i]"),  # not every element is written
        ("y[i] = 2.0f * x[i]", "y[i + 1] = x[i]"),
        ("y[i] = 2.0f * x[i]", "y[i] = y[i / 2]"),
        ("y[i] = 2.0f * x[i]", "atomicAdd(&y[i], x[i])"),
        ("i < n", "i < n && i > 3"),
    ],
)
def test_items_that_vectors_would_change_are_left_alone(old: str, new: str) -> None:
    assert old in ITEMS
    assert proposals("vectorise_loads", context(kernel_of(ITEMS.replace(old, new)), items_problem())) == []


def test_both_branches_writing_counts_as_always_writing() -> None:
    source = ITEMS.replace("y[i] = 2.0f * x[i];", "{ if (x[i] > 0) y[i] = x[i]; else y[i] = 0; }")
    assert proposals("vectorise_loads", context(kernel_of(source), items_problem()))


def test_an_early_return_becomes_a_guard_of_each_item() -> None:
    source = """\
extern "C" __global__ void scale(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    if (x[i] < 0) return;
    y[i] = x[i];
}
"""
    found = proposals("items_per_thread", context(kernel_of(source), items_problem()))
    has_all(found[0].kernel, ("if (i >= n) break;", "if (x[i] < 0) continue;"))
    assert found[0].kernel.launches[0].grid == ("ceil_div(n, 256 * 4)",)
    assert found[-1].kernel.launches[0].grid[0].startswith("min(ceil_div(n, 256), ")  # type: ignore[union-attr]
    assert all(compile_log(item.kernel) == "" for item in found)


# --- indices ---------------------------------------------------------------------------------------------------------
def test_the_axes_of_a_swapped_stencil_are_exchanged() -> None:
    (proposal,) = proposals("swap_indices", given("swapped_stencil"))
    has_all(proposal.kernel, ("int row = blockIdx.y * blockDim.y + threadIdx.y;",))
    assert proposal.kernel.launches[0].grid == ("ceil_div(W, 16)", "ceil_div(H, 16)")


def test_a_block_of_one_axis_exchanges_index_variables_and_gains_the_missing_guard() -> None:
    (proposal,) = proposals("swap_indices", given("line_stencil"))
    has_all(proposal.kernel, ("int y = blockIdx.y; int x = blockIdx.x * BLOCK + threadIdx.x; if (x >= W) return;",))
    assert proposal.kernel.launches[0].grid == ("ceil_div(W, BLOCK)", "H")


def test_the_parts_of_a_flat_index_are_exchanged() -> None:
    (proposal,) = proposals("swap_indices", given("flat_scale"))
    has_all(proposal.kernel, ("int r = t / C;", "int c = t % C;"))


def test_a_flat_index_that_is_used_itself_keeps_its_parts() -> None:
    where = given("flat_scale")
    kernel = dataclasses.replace(where.kernel, source=where.kernel.source.replace("y[r * C + c] =", "y[t] ="))
    assert proposals("swap_indices", context(kernel, where.problem)) == []


def test_coalesced_kernels_keep_their_indices() -> None:
    assert proposals("swap_indices", context(kernel_of(ITEMS), items_problem())) == []
    swapped = proposals("swap_indices", given("swapped_stencil"))[0].kernel
    assert proposals("swap_indices", context(swapped, given("swapped_stencil").problem)) == []


def transposing(body: str, *, grid: tuple[int | str, ...], block: tuple[int, ...]) -> EditContext:
    source = f'extern "C" __global__ void turn(const float* x, float* y, int R, int C) {{\n{body}\n}}\n'
    kernel = kernel_of(source, grid=grid, block=block, args=("x", "y", "R", "C"))
    return context(kernel, given("unpadded_transpose").problem)


def test_a_direct_transpose_is_staged_in_a_tile() -> None:
    where = transposing(
        "int c = blockIdx.x * blockDim.x + threadIdx.x, r = blockIdx.y * blockDim.y + threadIdx.y;\n"
        "if (r >= R || c >= C) return;\ny[c * R + r] = 2.0f * x[r * C + c];",
        grid=("ceil_div(C, 32)", "ceil_div(R, 8)"), block=(32, 8),
    )  # fmt: skip
    (proposal,) = proposals("tile_transpose", where)
    has_all(
        proposal.kernel,
        (
            "__shared__ float tile[32][32 + 1];",
            "if (r < R && c < C) tile[k][threadIdx.x] = 2.0f * x[r * C + c];",
            "if (r < R && c < C) y[c * R + r] = tile[threadIdx.x][k];",
        ),
    )
    assert proposal.kernel.launches[0].grid == ("ceil_div(C, 32)", "ceil_div(R, 32)")
    assert compile_log(proposal.kernel) == ""


def test_a_transpose_by_flat_index_is_staged_too() -> None:
    where = transposing(
        "int i = blockIdx.x * blockDim.x + threadIdx.x;\nif (i < R * C) {\nint r = i / C, c = i % C;\n"
        "y[c * R + r] = x[i];\n}",
        grid=("ceil_div(R * C, 256)",), block=(256,),
    )  # fmt: skip
    (proposal,) = proposals("tile_transpose", where)
    has_all(proposal.kernel, ("const int i = (int)r * C + c;", "tile[k][threadIdx.x] = x[i];"))
    assert proposal.kernel.launches[0].block == (32, 8)
    assert compile_log(proposal.kernel) == ""


def test_copies_that_are_contiguous_on_both_sides_are_not_staged() -> None:
    where = transposing(
        "int c = blockIdx.x * blockDim.x + threadIdx.x, r = blockIdx.y * blockDim.y + threadIdx.y;\n"
        "if (r < R && c < C) y[r * C + c] = x[r * C + c];",
        grid=("ceil_div(C, 32)", "ceil_div(R, 8)"), block=(32, 8),
    )  # fmt: skip
    assert proposals("tile_transpose", where) == []


CHUNKS = """\
extern "C" __global__ void scale(const float* x, float* y, int n) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    for (int k = 0; k < 8; ++k) {
        int i = t * 8 + k;
        if (i < n) y[i] = 2.0f * x[i];
    }
}
"""


def test_chunks_are_handed_out_in_turn() -> None:
    kernel = kernel_of(CHUNKS, grid=("ceil_div(n, 256 * 8)",))
    (proposal,) = proposals("interleave_chunks", context(kernel, items_problem()))
    has_all(proposal.kernel, ("int i = blockIdx.x * 256 * 8 + k * 256 + threadIdx.x;",))
    assert compile_log(proposal.kernel) == ""


def test_chunks_counted_by_their_own_index_are_handed_out_in_turn() -> None:
    source = """\
extern "C" __global__ void scale(const float* x, float* y, int n) {
    int start = (blockIdx.x * blockDim.x + threadIdx.x) * 16;
    for (int i = start; i < min(start + 16, n); i++) y[i] = 2.0f * x[i];
}
"""
    kernel = kernel_of(source, grid=("ceil_div(n, 256 * 16)",))
    (proposal,) = proposals("interleave_chunks", context(kernel, items_problem()))
    has_all(proposal.kernel, ("for (int i = (blockIdx.x * 256) * 16 + threadIdx.x;", "i += 256)", "+ 256 * 16, n)"))
    assert compile_log(proposal.kernel) == ""


@pytest.mark.parametrize(
    ("old", "new"),
    [("t * 8 + k", "k * 256 + t"), ("y[i] = 2.0f * x[i]", "{ y[i] = x[i]; t++; }"), ("t * 8", "t * 4")],
)
def test_loops_that_are_no_chunks_are_left_alone(old: str, new: str) -> None:
    assert old in CHUNKS
    kernel = kernel_of(CHUNKS.replace(old, new), grid=("ceil_div(n, 256 * 8)",))
    assert proposals("interleave_chunks", context(kernel, items_problem())) == []


# --- blocks and launches ---------------------------------------------------------------------------------------------
def test_the_grid_follows_the_block() -> None:
    shapes = {item.kernel.launches[0].block: item.kernel.launches[0].grid
              for item in proposals("block_shape", context(kernel_of(ITEMS), items_problem()))}  # fmt: skip
    assert shapes[(128,)] == ("ceil_div(n, 128)",)
    assert shapes[(1024,)] == ("ceil_div(n, 1024)",)


def test_a_block_size_in_the_source_changes_with_the_plan() -> None:
    source = ITEMS.replace("blockDim.x", "256")
    found = proposals("block_shape", context(kernel_of(source), items_problem()))
    assert (
        "blockIdx.x * 128 + threadIdx.x" in next(i for i in found if i.kernel.launches[0].block == (128,)).kernel.source
    )


def test_a_tile_with_padding_grows_whole() -> None:
    source = """\
extern "C" __global__ void t(const float* x, float* y, int n) {
    __shared__ float s[16][17];
    int i = blockIdx.y * 16 + threadIdx.y, j = blockIdx.x * 16 + threadIdx.x;
    s[threadIdx.y][threadIdx.x] = x[i * n + j];
    __syncthreads();
    y[i * n + j] = s[threadIdx.y][15 - threadIdx.x];
}
"""
    kernel = kernel_of(source, grid=("ceil_div(n, 16)", "ceil_div(n, 16)"), block=(16, 16))
    found = proposals("block_shape", context(kernel, items_problem()))
    assert [item.kernel.launches[0].block for item in found] == [(32, 32)]
    has_all(found[0].kernel, ("s[32][33]", "blockIdx.y * 32", "blockIdx.x * 32"))


def test_launch_bounds_follow_the_block() -> None:
    source = ITEMS.replace("__global__", "__global__ __launch_bounds__(256, 4)")
    found = {item.kernel.launches[0].block: item.kernel for item in
             proposals("block_shape", context(kernel_of(source), items_problem()))}  # fmt: skip
    assert "__launch_bounds__(1024)" in found[(1024,)].source


def test_a_macro_that_holds_the_block_size_keeps_the_block() -> None:
    assert proposals("block_shape", given("unpadded_transpose")) == []


def test_a_block_that_walks_a_row_may_have_any_size() -> None:
    source = """\
extern "C" __global__ void row(const float* x, float* y, int n) {
    for (int c = threadIdx.x; c < n; c += blockDim.x) y[blockIdx.x * n + c] = x[blockIdx.x * n + c];
}
"""
    found = proposals("block_shape", context(kernel_of(source, grid=("R",)), rows_problem()))
    assert {item.kernel.launches[0].block for item in found} == {(64,), (128,), (512,), (1024,)}
    assert {item.kernel.launches[0].grid for item in found} == {("R",)}


def test_tunables_are_tried_nearest_first_and_other_params_by_powers_of_two() -> None:
    kernel = dataclasses.replace(
        kernel_of(ITEMS, grid=("ceil_div(n, B)",)),
        launches=(Launch(kernel="scale", grid=("ceil_div(n, B)",), block=("B",), args=("x", "y", "n")),),
        params={"B": 256, "U": 4},
        tunables={"B": (64, 128, 256, 1024)},
    )
    tried = [dict(item.kernel.params) for item in proposals("retune_param", context(kernel, items_problem()))]
    assert [item["B"] for item in tried[:3]] == [128, 64, 1024]
    assert [item["U"] for item in tried[3:]] == [8, 2, 16]


def test_no_value_makes_a_block_that_cannot_be_launched() -> None:
    kernel = dataclasses.replace(
        kernel_of(ITEMS),
        launches=(Launch(kernel="scale", grid=("ceil_div(n, B)",), block=("B", 2), args=("x", "y", "n")),),
        params={"B": 512},
    )
    tried = [item.kernel.params["B"] for item in proposals("retune_param", context(kernel, items_problem()))]
    assert tried == [256]


def test_launch_bounds_are_offered_where_registers_limit_the_occupancy() -> None:
    limited = profile(limiter="registers", occupancy_pct=50.0)
    found = proposals("launch_bounds", context(kernel_of(ITEMS), items_problem(), profile=limited))
    assert "__global__ __launch_bounds__(256) void" in found[0].kernel.source
    assert compile_log(found[-1].kernel) == ""
    free = profile(limiter="threads", occupancy_pct=100.0)
    assert proposals("launch_bounds", context(kernel_of(ITEMS), items_problem(), profile=free)) == []


# --- memory ----------------------------------------------------------------------------------------------------------
def test_only_pointers_that_are_never_written_become_const() -> None:
    source = ITEMS.replace("const float* x", "float *x")
    (proposal,) = proposals("restrict_const", context(kernel_of(source), items_problem()))
    has_all(proposal.kernel, ("scale(const float * __restrict__ x, float* __restrict__ y, int n)",))
    assert compile_log(proposal.kernel) == ""


def test_one_array_behind_two_pointers_is_never_restrict() -> None:
    assert proposals("restrict_const", context(kernel_of(ITEMS, args=("x", "x", "n")), items_problem())) == []


def test_a_pointer_that_a_callee_takes_keeps_its_type() -> None:
    source = "__device__ void put(float* p, int i) { p[i] = 1; }\n" + ITEMS.replace(
        "y[i] = 2.0f * x[i]", "put(y, i)"
    ).replace("const float* x", "const float* __restrict__ x")
    (proposal,) = proposals("restrict_const", context(kernel_of(source), items_problem()))
    assert "float* __restrict__ y" in proposal.kernel.source
    assert "const float* __restrict__ y" not in proposal.kernel.source
    assert compile_log(proposal.kernel) == ""


def test_shared_rows_are_padded_by_one() -> None:
    source = "__shared__ float t[32][32];"
    kernel = kernel_of(f'extern "C" __global__ void k(float* y) {{ {source} t[0][threadIdx.x] = 1; y[0] = t[1][2]; }}')
    (proposal,) = proposals("pad_shared", context(kernel, items_problem()))
    assert "t[32][32 + 1]" in proposal.kernel.source


@pytest.mark.parametrize("use", ["float* p = &t[0][0]; y[0] = p[40];", "float* p = t[3]; y[0] = p[4];"])
def test_shared_rows_used_as_flat_memory_are_not_padded(use: str) -> None:
    kernel = kernel_of(f'extern "C" __global__ void k(float* y) {{ __shared__ float t[32][32]; {use} }}')
    assert proposals("pad_shared", context(kernel, items_problem())) == []


def test_a_matrix_product_is_tiled_with_the_output_along_x() -> None:
    found = proposals("tile_product", given("swapped_matmul"))
    has_all(
        found[0].kernel,
        ("down_tile[e % 16][e / 16] = i < M && k < K ? (float)(A[i * K + k]) : (float)0;", "C[i * N + j] = acc;"),
    )
    # 512 x 512 results make 64 tiles of 64 x 64, too few for all SMs: smaller tiles come first.
    assert [item.kernel.launches[0].grid[0] for item in found] == [
        "ceil_div(N, 32)",
        "ceil_div(N, 64)",
        "ceil_div(N, 128)",
    ]
    assert found[0].kernel.launches[0].block == (16, 16)


@pytest.mark.parametrize(
    ("old", "new"),
    [("acc += A[i * K + k] * B[k * N + j]", "acc += A[i * K + k] - B[k * N + j]"),
     ("acc += A[i * K + k] * B[k * N + j]", "acc += A[i * K + k] * A[i * K + k]"),
     ("float acc = 0.0f", "float acc = 1.0f")],
)  # fmt: skip
def test_sums_that_are_no_matrix_product_are_not_tiled(old: str, new: str) -> None:
    where = given("swapped_matmul")
    assert old in where.kernel.source
    kernel = dataclasses.replace(where.kernel, source=where.kernel.source.replace(old, new))
    assert proposals("tile_product", context(kernel, where.problem)) == []


def test_a_sum_in_global_memory_moves_into_a_register() -> None:
    source = row_sum_kernel().source.replace("float s = 0.0f;", "y[r] = 0;").replace("s += x", "y[r] += x")
    kernel = row_sum_kernel(source.replace("    y[r] = s;\n", ""))
    (proposal,) = proposals("register_accumulator", context(kernel, rows_problem()))
    has_all(proposal.kernel, ("float y_total = y[r];", "y_total += x[r * C + c];", "y[r] = y_total;"))
    assert compile_log(proposal.kernel) == ""


def test_a_sum_whose_place_changes_stays_in_memory() -> None:
    source = row_sum_kernel().source.replace("s += x[r * C + c]", "y[c] += x[r * C + c]")
    assert proposals("register_accumulator", context(row_sum_kernel(source), rows_problem())) == []


TILED = """\
extern "C" __global__ void mm(const float* A, const float* B, float* C, int M, int N, int K) {
    __shared__ float sa[16][17], sb[16][17];
    int tx = threadIdx.x, ty = threadIdx.y;
    int r = blockIdx.y * 16 + ty, c = blockIdx.x * 16 + tx;
    float acc = 0.f;
    for (int k = 0; k < K; k += 16) {
        sa[ty][tx] = r < M && k + tx < K ? A[r * K + k + tx] : 0.f;
        sb[ty][tx] = c < N && k + ty < K ? B[(k + ty) * N + c] : 0.f;
        __syncthreads();
        for (int t = 0; t < 16; ++t) acc += sa[ty][t] * sb[t][tx];
        __syncthreads();
    }
    if (r < M && c < N) C[r * N + c] = acc;
}
"""


def tiled(source: str = TILED) -> EditContext:
    kernel = kernel_of(source, grid=("ceil_div(N, 16)", "ceil_div(M, 16)"), block=(16, 16),
                       args=("A", "B", "C", "M", "N", "K"))  # fmt: skip
    return context(kernel, given("swapped_matmul").problem)


def test_merged_blocks_load_what_they_share_once() -> None:
    found = proposals("merge_blocks", tiled())
    along_x = next(item.kernel for item in found if item.kernel.launches[0].grid[0] == "ceil_div(N, 16 * 4)")
    has_all(
        along_x,
        (
            "int r = blockIdx.y * 16 + ty;",
            "int c_x3 = (blockIdx.x * 4 + 3) * 16 + tx;",
            "__shared__ float sa[16][17]; __shared__ float sb_x0[16][17];",
            "acc_x3 += sa[ty][t] * sb_x3[t][tx]; }",
        ),
    )
    assert along_x.source.count("A[r * K") == 1
    assert along_x.source.count("__syncthreads()") == 2
    assert all(compile_log(item.kernel) == "" for item in found)


def test_merged_blocks_can_be_merged_along_the_other_axis() -> None:
    once = next(
        item.kernel for item in proposals("merge_blocks", tiled()) if "16 * 2" in item.kernel.launches[0].grid[0]
    )  # type: ignore[operator]
    again = proposals("merge_blocks", context(once, given("swapped_matmul").problem))
    assert any("_y1" in item.kernel.source and "_x1" in item.kernel.source for item in again)
    assert all(compile_log(item.kernel) == "" for item in again)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    float acc", "    if (r >= M || c >= N) return;\n    float acc"),  # threads of some blocks would leave
        ("    float acc", "    if (r < M && c < N) __syncthreads();\n    float acc"),
        ("C[r * N + c] = acc", "C[r * N + c] = acc + gridDim.x + gridDim.y"),
        ("    float acc", "    atomicAdd(&C[0], 1.f);\n    float acc"),  # counts the blocks
    ],
)
def test_blocks_whose_number_matters_are_not_merged(old: str, new: str) -> None:
    assert old in TILED
    assert proposals("merge_blocks", tiled(TILED.replace(old, new))) == []


# --- arithmetic ------------------------------------------------------------------------------------------------------
def test_inner_loops_get_a_pragma_on_a_line_of_its_own() -> None:
    found = proposals("unroll", context(row_sum_kernel(), rows_problem()))
    assert "\n    #pragma unroll 4\n    for (int c" in found[0].kernel.source
    one_line = row_sum_kernel(row_sum_kernel().source.replace("\n", " "))
    made = proposals("unroll", context(one_line, rows_problem()))[0].kernel
    assert re.search(r"^#pragma unroll 4$", made.source, re.MULTILINE)
    assert compile_log(made) == ""


def test_loops_that_have_a_pragma_are_left_alone() -> None:
    once = proposals("unroll", context(row_sum_kernel(), rows_problem()))[0].kernel
    assert proposals("unroll", context(once, rows_problem())) == []


def test_intrinsics_replace_functions_and_the_flag_comes_second() -> None:
    source = ITEMS.replace("2.0f * x[i]", "expf(x[i]) / 3.0f")
    found = proposals("fast_math", context(kernel_of(source), items_problem()))
    assert "__expf(x[i])" in found[0].kernel.source
    assert found[1].kernel.flags == ("--use_fast_math",)
    assert all(item.risks for item in found)


def test_integer_division_and_doubles_get_no_fast_math() -> None:
    source = ITEMS.replace("2.0f * x[i]", "x[i / 2]")
    assert proposals("fast_math", context(kernel_of(source), items_problem())) == []
    assert (
        proposals(
            "fast_math", context(kernel_of(ITEMS.replace("2.0f *", "expf(1.f) *")), items_problem(), dtype="float64")
        )
        == []
    )


def test_division_by_an_invariant_becomes_a_multiplication() -> None:
    (proposal,) = proposals("reciprocal", given("row_softmax"))
    has_all(proposal.kernel, ("const float total_inverse = float(1) / total;", "prob[r * C + c] *= total_inverse;"))


def test_division_by_what_the_loop_changes_stays() -> None:
    source = row_sum_kernel().source.replace("s += x[r * C + c]", "s = x[r * C + c] / s")
    assert proposals("reciprocal", context(row_sum_kernel(source), rows_problem())) == []


def test_atomics_on_one_address_are_reduced_first() -> None:
    found = proposals("reduce_atomics", given("atomic_sum"))
    has_all(found[0].kernel, ("total += v * v;", "__shfl_down_sync", "if (threadIdx.x == 0) atomicAdd(out, total);"))
    assert found[0].kernel.launches[1].grid == ("min(ceil_div(n, 256), 864)",)


@pytest.mark.parametrize(
    "call", ["atomicAdd(&out[i % 8], v * v)", "atomicMax((int*)out, (int)v)", "out[i] = atomicAdd(out, v)"]
)
def test_other_atomics_are_left_alone(call: str) -> None:
    where = given("atomic_sum")
    kernel = dataclasses.replace(where.kernel, source=where.kernel.source.replace("atomicAdd(out, v * v)", call))
    assert proposals("reduce_atomics", context(kernel, where.problem)) == []


def test_tree_reductions_end_in_shuffles() -> None:
    source = """\
extern "C" __global__ void total(const float* x, float* y, int n) {
    __shared__ float s[256];
    s[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
    __syncthreads();
    for (int d = blockDim.x / 2; d > 0; d >>= 1) {
        if (threadIdx.x < d) s[threadIdx.x] += s[threadIdx.x + d];
        __syncthreads();
    }
    if (threadIdx.x == 0) y[blockIdx.x] = s[0];
}
"""
    (proposal,) = proposals("shuffle_reduction", context(kernel_of(source), items_problem()))
    has_all(proposal.kernel, ("d >= 32;", "__shfl_down_sync(0xffffffffu, part_0, lane_offset)", "s[0] = part_0;"))
    assert compile_log(proposal.kernel) == ""


def test_interleaved_trees_become_contiguous_ones() -> None:
    source = """\
extern "C" __global__ void total(const float* x, float* y, int n) {
    __shared__ float s[256];
    int t = threadIdx.x;
    s[t] = x[blockIdx.x * blockDim.x + t];
    __syncthreads();
    for (int d = 1; d < blockDim.x; d *= 2) {
        if (t % (2 * d) == 0) s[t] += s[t + d];
        __syncthreads();
    }
    if (t == 0) y[blockIdx.x] = s[0];
}
"""
    (proposal,) = proposals("shuffle_reduction", context(kernel_of(source), items_problem()))
    has_all(
        proposal.kernel, ("for (int d = blockDim.x / 2; d >= 32; d /= 2)", "if (t < d) { s[t] = s[t] + s[t + d]; }")
    )
    assert compile_log(proposal.kernel) == ""


def test_trees_over_part_of_the_block_are_left_alone() -> None:
    source = """\
extern "C" __global__ void total(const float* x, float* y, int n) {
    __shared__ float s[256];
    s[threadIdx.x] = x[threadIdx.x];
    for (int d = 1; d < 64; d *= 2) {
        if (threadIdx.x % (2 * d) == 0) s[threadIdx.x] += s[threadIdx.x + d];
        __syncthreads();
    }
    y[blockIdx.x] = s[0];
}
"""
    assert proposals("shuffle_reduction", context(kernel_of(source), items_problem())) == []


# --- the catalogue ---------------------------------------------------------------------------------------------------
def test_strategies_are_offered_for_built_in_problems_only() -> None:
    builtin = load_builtin("softmax")
    where = context(kernel_from_text(builtin.seed_text, dtype="float32"), builtin.problem)
    assert len(proposals("swap_strategy", where)) >= 2
    assert proposals("swap_strategy", context(row_sum_kernel(), rows_problem())) == []
