"""Counted profiles: what is run, what is reported, and what is said when it cannot be."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from measure_samples import CountingDevice, copy_build, copy_kernel

from optiml.codec import encode, restore
from optiml.device.emulated import EmulatedDevice, emulated_info
from optiml.errors import Fault, InvalidInput, KernelFault, Unsupported
from optiml.kernel_file import read_kernel_text
from optiml.measure.compare import compare
from optiml.measure.counted import CountedProfiler
from optiml.measure.hardware import A100
from optiml.measure.roofline import floor
from optiml.problems.problem import load_builtin
from optiml.records import Axis, Build, DeviceInfo, Problem, Profile, Tensor, Workload
from optiml.reward import SPILL_CONDITION
from optiml.toolchain.nvrtc import Compiler

N = 1 << 24
COPY = Problem(
    name="copy",
    axes={"n": Axis(type="var", min=1)},
    inputs={"x": Tensor(dtype="float32", shape=("n",))},
    outputs={"y": Tensor(dtype="float32", shape=("n",))},
    reference="def run(x, n):\n    return x",
    workloads=(Workload(axes={"n": 1024}),),
    bytes="8*n",
    flops="n",
)
BENCH = (Workload(axes={"n": N}),)


def profiled(device: CountingDevice | None = None, **fields: object) -> Profile:
    arguments: dict[str, object] = {"bench": BENCH, "timeout_s": 5.0, **fields}
    build = arguments.pop("build", copy_build())
    problem = arguments.pop("problem", COPY)
    return CountedProfiler().profile(copy_kernel(), build, problem, device or CountingDevice(), **arguments)  # type: ignore[arg-type]


def test_a_profile_names_its_time_metrics_bottleneck_and_line() -> None:
    profile = profiled()
    assert profile.time.source == "modelled"
    assert (profile.time.runs, profile.time.p10_us, profile.time.noise_pct) == (0, None, None)
    assert profile.metrics["dram__bytes.sum"] == 8.0 * N
    assert profile.metric_source["l1tex__t_sectors.sum"] == "counted"
    assert profile.metric_source["dram__bytes.sum"] == "modelled"
    assert profile.hot_lines[0].source == "if (i < n) y[i] = x[i];"
    assert profile.speed_of_light is not None
    assert profile.speed_of_light.us == pytest.approx(8e6 * N / A100.dram_bytes_per_s)
    assert profile.occupancy is not None
    assert profile.axes == {"n": N}


def test_a_profile_says_that_it_is_modelled_for_an_emulated_gpu_and_sampled() -> None:
    profile = profiled()
    assert "Modelled" in profile.summary
    assert "NVIDIA A100 (emulated)" in profile.summary
    assert any("not measured" in warning and "not calibrated" in warning for warning in profile.warnings)
    assert any("4 of 65536 blocks ran" in warning for warning in profile.warnings)
    assert profile.next_action


def test_the_same_kernel_gives_the_same_profile_again() -> None:
    assert profiled() == profiled()


def test_a_profile_survives_the_wire() -> None:
    profile = profiled()
    assert restore(Profile, encode(profile)) == profile


def test_only_metrics_that_were_asked_for_are_reported_and_unknown_ones_are_null() -> None:
    profile = profiled(metrics=("dram__bytes.sum", "no__such.metric"))
    assert dict(profile.metrics) == {"dram__bytes.sum": 8.0 * N, "no__such.metric": None}
    assert dict(profile.metric_source) == {"dram__bytes.sum": "modelled"}
    assert len(profile.bench[0].metrics) > 40  # what comparing needs


def test_a_few_blocks_run_first_and_more_if_the_program_is_short() -> None:
    device = CountingDevice()
    profiled(device)
    assert device.asked == [2, 4]


def test_long_kernels_are_profiled_on_their_first_blocks() -> None:
    device = CountingDevice()
    device.changes = {"warp_instructions": 10**9}
    profile = profiled(device)
    assert device.asked == [2]
    assert profile.bench[0].blocks_run == 2


def test_a_small_grid_runs_whole_and_carries_no_sampling_warning() -> None:
    device = CountingDevice()
    profile = profiled(device, bench=(Workload(axes={"n": 300}),))
    assert device.asked == [2]
    assert (profile.bench[0].blocks_run, profile.bench[0].blocks_total) == (2, 2)
    assert not any("blocks ran" in warning for warning in profile.warnings)


def test_arrays_that_the_kernel_writes_start_as_zeros() -> None:
    device = CountingDevice()
    profiled(device)
    assert not device.contents[0]["y"].any()
    assert device.contents[0]["x"].any()


def test_bench_entries_are_summed_by_weight() -> None:
    light = Workload(axes={"n": N}, weight=1.0)
    heavy = Workload(axes={"n": N}, weight=3.0)
    once = profiled()
    both = profiled(bench=(light, heavy))
    assert both.time.median_us == pytest.approx(4.0 * once.time.median_us)
    assert both.metrics["dram__bytes.sum"] == pytest.approx(4.0 * 8.0 * N)
    ratio = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio"
    assert both.metrics[ratio] == once.metrics[ratio]
    assert both.speed_of_light is not None
    assert once.speed_of_light is not None
    assert both.speed_of_light.pct == pytest.approx(once.speed_of_light.pct)
    assert [entry.weight for entry in both.bench] == [1.0, 3.0]


def test_a_problem_without_formulas_has_no_speed_of_light() -> None:
    assert profiled(problem=dataclasses.replace(COPY, bytes=None, flops=None)).speed_of_light is None


def test_spills_are_among_the_conditions() -> None:
    assert profiled(build=copy_build(spill_bytes=12)).conditions[SPILL_CONDITION] == "12"


def test_a_device_without_a_table_is_refused() -> None:
    other = DeviceInfo(name="other", kind="emulator", arch="sm_80", model="other", engine="numpy")
    with pytest.raises(InvalidInput, match="no time model"):
        profiled(CountingDevice(other))


def test_blocks_that_need_the_others_are_unsupported_on_a_big_grid_and_run_whole_on_a_small_one() -> None:
    fault = KernelFault(Fault(kind="timed_out", detail="the kernel did not end"))
    with pytest.raises(Unsupported, match="on a sample of its blocks"):
        profiled(CountingDevice(fails={2: fault}))
    device = CountingDevice(fails={2: fault})
    profile = profiled(device, bench=(Workload(axes={"n": 256 * 40}),))
    assert device.asked == [2, None]
    assert profile.bench[0].blocks_run == 40


# --- speed of light --------------------------------------------------------------------------------------------------
def test_the_floor_is_the_slowest_of_bytes_arithmetic_and_launch() -> None:
    def bound(**fields: object) -> str:
        found = floor(dataclasses.replace(COPY, **fields), BENCH[0], A100)  # type: ignore[arg-type]
        assert found is not None
        return found.bound

    assert bound() == "dram"
    assert bound(flops="100000*n") == "fp32"
    assert bound(flops=None, bytes="n // n") == "launch"
    half = {"x": Tensor(dtype="float16", shape=("n",))}
    assert bound(flops="100000*n", inputs=half) == "tensor"


# --- real kernels on the embedded device -----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def emulator() -> Iterator[EmulatedDevice]:
    device = EmulatedDevice(emulated_info("emulator:a100"))
    yield device
    device.close()


@pytest.fixture(scope="module")
def hopper() -> Iterator[EmulatedDevice]:
    device = EmulatedDevice(emulated_info("emulator:h200"))
    yield device
    device.close()


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    made = Compiler()
    yield made
    made.close()


HEADER = """/* optiml
[[launch]]
kernel = "k"
grid = [{grid}]
block = [{block}]
args = ["x", "y", "R", "C"]
{more}*/
extern "C" __global__ void k(const float* x, float* y, int R, int C) {{
"""
TILE = """
    __shared__ float tile[32][WIDTH];
    int c = blockIdx.x * 32 + threadIdx.x, r = blockIdx.y * 32;
    for (int i = threadIdx.y; i < 32; i += 8) tile[i][threadIdx.x] = x[(r + i) * C + c];
    __syncthreads();
    for (int i = threadIdx.y; i < 32; i += 8)
        y[(blockIdx.x * 32 + i) * R + r + threadIdx.x] = tile[threadIdx.x][i];
}
"""
AGAIN = """
[[launch]]
kernel = "again"
grid = ["ceil_div(R * C, 256)"]
block = [256]
args = ["y"]
"""


def profile_text(
    text: str, problem: str, compiler: Compiler, device: EmulatedDevice, *, size: int = 2048
) -> Profile:  # fmt: skip
    kernel = read_kernel_text(text)
    build = compiler.compile(kernel, device.info.arch)
    assert isinstance(build, Build), build
    bench = (Workload(axes={"R": size, "C": size}),)
    return CountedProfiler().profile(
        kernel, build, load_builtin(problem).problem, device, bench=bench, timeout_s=30.0
    )  # fmt: skip


def transpose(width: int) -> str:
    return HEADER.format(grid='"C // 32", "R // 32"', block="32, 8", more="") + TILE.replace("WIDTH", str(width))


def copy(row: str, column: str, *, again: bool = False) -> str:
    head = HEADER.format(grid='"C // 32", "R // 8"', block="32, 8", more=AGAIN if again else "")
    body = f"    int r = {row}, c = {column};\n    y[r * C + c] = x[r * C + c];\n}}\n"
    second = 'extern "C" __global__ void again(float* y) { y[blockIdx.x * 256 + threadIdx.x] += 0.0f; }\n'
    return head + body + (second if again else "")


COALESCED = copy("blockIdx.y * 8 + threadIdx.y", "blockIdx.x * 32 + threadIdx.x")
SWAPPED = copy("blockIdx.x * 32 + threadIdx.x", "blockIdx.y * 8 + threadIdx.y")


def test_swapped_indices_are_found_and_cost_time(compiler: Compiler, emulator: EmulatedDevice) -> None:
    good = profile_text(COALESCED, "matrix_copy", compiler, emulator)
    bad = profile_text(SWAPPED, "matrix_copy", compiler, emulator)
    assert bad.time.median_us > 1.5 * good.time.median_us
    assert bad.hot_lines[0].sectors_per_request == 32.0
    assert bad.bottleneck.kind == "memory"
    assert any("32.0 sectors per request (4 would be ideal)" in item for item in bad.bottleneck.evidence)
    verdict = compare(good, bad)
    assert verdict.verdict == "faster"
    assert verdict.metric_changes["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"] == pytest.approx(0.125)


def test_padding_a_tile_removes_its_conflicts_and_time(compiler: Compiler, emulator: EmulatedDevice) -> None:
    plain = profile_text(transpose(32), "transpose", compiler, emulator)
    padded = profile_text(transpose(33), "transpose", compiler, emulator)
    conflicts = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"
    requests = 2048 * 2048 // 32
    assert plain.metrics[conflicts] == 31 * requests
    assert padded.metrics[conflicts] == 0.0
    assert compare(padded, plain).verdict == "faster"
    assert "pad" in plain.next_action.lower()


def test_an_extra_pass_is_slower_and_identical_code_is_the_same(compiler: Compiler, emulator: EmulatedDevice) -> None:
    good = profile_text(COALESCED, "matrix_copy", compiler, emulator)
    renamed = profile_text(COALESCED.replace("int r", "int  r"), "matrix_copy", compiler, emulator)
    extra = profile_text(copy("blockIdx.y * 8 + threadIdx.y", "blockIdx.x * 32 + threadIdx.x", again=True),
                         "matrix_copy", compiler, emulator)  # fmt: skip
    assert renamed.kernel_id != good.kernel_id
    assert (compare(renamed, good).verdict, compare(renamed, good).ratio) == ("same", 1.0)
    assert compare(extra, good).verdict == "slower"
    assert compare(good, extra).verdict == "faster"


FLAT = """/* optiml
[[launch]]
kernel = "k"
grid = ["R * C // WIDTH // BLOCK"]
block = ["BLOCK"]
args = ["x", "y"]
[params]
BLOCK = {block}
WIDTH = {width}
*/
extern "C" __global__ void k(const {type}* x, {type}* y) {{
    y[blockIdx.x * BLOCK + threadIdx.x] = x[blockIdx.x * BLOCK + threadIdx.x];
}}
"""


@pytest.mark.parametrize(
    ("text", "problem", "measured_us"),  # medians of 20 runs on one H200, L2 cold and clean, 4096 x 4096 floats
    [
        (FLAT.format(block=256, width=1, type="float"), "matrix_copy", 51.1),
        (FLAT.format(block=32, width=1, type="float"), "matrix_copy", 319.5),
        (FLAT.format(block=256, width=4, type="float4"), "matrix_copy", 32.6),
        (SWAPPED, "matrix_copy", 260.0),
        (transpose(32), "transpose", 81.5),
        (transpose(33), "transpose", 40.7),
    ],
    ids=["copy", "copy in blocks of 32", "copy of float4", "copy by columns", "transpose", "padded transpose"],
)
def test_modelled_times_are_near_those_of_one_h200(
    text: str, problem: str, measured_us: float, compiler: Compiler, hopper: EmulatedDevice
) -> None:
    profile = profile_text(text, problem, compiler, hopper, size=4096)
    assert measured_us / 1.4 < profile.time.median_us < 1.4 * measured_us
