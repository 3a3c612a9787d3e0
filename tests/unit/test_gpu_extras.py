"""What a profile on a GPU carries besides its time: ceilings, energy, baselines, hardware counters."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_ncu import DATA, FORBIDDEN, fake_ncu

from optiml.device.device import Repeated, Samples, TimedSubject
from optiml.device.nvml import Clocks
from optiml.device.plan import Plan, PlannedLaunch
from optiml.errors import SetupError
from optiml.measure import baselines as baselines_module
from optiml.measure.baselines import Baselines, BaselineTime, TorchBaselines, _call, _time, best_of, is_builtin_name
from optiml.measure.ceilings import Ceilings, Facts, measure_ceilings, with_ceilings
from optiml.measure.energy import per_run_mj
from optiml.measure.hardware import H200
from optiml.measure.nsight import Ncu
from optiml.measure.nsight_reader import NsightReader, hot_lines
from optiml.measure.timing import Contender, bench_inputs
from optiml.problems.problem import load_builtin
from optiml.records import Build, BuildReport, DeviceInfo, Kernel, Launch, ReportedKernel, ReportedLine, Workload
from optiml.toolchain.nvrtc import CompileFailure

FACTS = Facts(sms=100, l2_bytes=40 << 20, clock_hz=1e9, arch="sm_90")
CLOCKS = Clocks(sm_mhz=1980, memory_mhz=None, temperature_c=None, power_w=None, throttled=())


def built(symbol: str = "relu") -> Build:
    report = BuildReport(
        arch="sm_90", compiler="nvrtc 13.5", registers_per_thread=None, shared_bytes_per_block=None, stack_bytes=None,
        spill_bytes=None, log="", seconds=0.0,
    )  # fmt: skip
    return Build(kernel_id="0" * 16, report=report, ptx="", cubin=symbol.encode(), entries={}, resources={})


class ClockedDevice:
    """Every run takes 100 µs, those of the kernels in `broken` are refused."""

    info = DeviceInfo(name="A GPU", kind="cuda", arch="sm_90", model="other", engine="cuda")

    def __init__(self, broken: Sequence[str] = ()) -> None:
        self.seen: list[str] = []
        self._broken = broken

    @contextlib.contextmanager
    def timer(self, subjects: Sequence[TimedSubject], *, timeout_s: float) -> Iterator[Any]:
        (launch,) = subjects[0].plan.launches
        self.seen.append(launch.symbol)
        if launch.symbol in self._broken:
            raise SetupError("no such instruction", code="no_device")
        yield self

    def sample(self, rounds: int, *, flush: bool = True) -> Samples:
        times = np.full((rounds, 1, 2), 100.0, dtype=np.float32)
        return Samples(times_us=times, before=CLOCKS, after=CLOCKS)


# --- ceilings --------------------------------------------------------------------------------------------------------
def test_every_ceiling_is_the_work_of_its_kernel_over_its_time() -> None:
    compiled: list[str] = []

    def compiler(kernel: Kernel, arch: str) -> Build | CompileFailure:
        compiled.append(arch)
        return built()

    device = ClockedDevice()
    found = measure_ceilings(device, FACTS, compiler, driver="580")  # type: ignore[arg-type]
    assert compiled == ["sm_90", "sm_90a"]
    assert found.copy_bytes_per_s == pytest.approx(2 * (512 << 20) / 100e-6)
    assert found.fp32_flops_per_s == pytest.approx(2 * 64 * 32 * 2000 * 100 * 4 * 16 / 100e-6)
    assert found.tensor_flops_per_s["f64"] == pytest.approx(2 * 8 * 8 * 4 * 4 * 2000 * 100 * 2 * 16 / 100e-6)
    assert found.launch_us == 100
    assert {"wgmma_f8", "mma_f64", "read_l2", "read_shared", "empty"} <= set(device.seen)


def test_a_benchmark_that_cannot_run_leaves_its_ceiling_out() -> None:
    device = ClockedDevice(broken=("mma_f64", "read_l2"))
    found = measure_ceilings(
        device, Facts(sms=10, l2_bytes=4 << 20, clock_hz=1e9, arch="sm_80"), lambda kernel, arch: built(), driver=""
    )  # type: ignore[arg-type]
    assert found.l2_bytes_per_s is None
    assert "f64" not in found.tensor_flops_per_s
    assert not any(name.startswith("wgmma") for name in device.seen)


def test_measured_ceilings_replace_the_data_sheet() -> None:
    ceilings = Ceilings(
        device="NVIDIA H200", driver="580", copy_bytes_per_s=4.06e12, read_bytes_per_s=4.3e12, l2_bytes_per_s=9.5e12,
        shared_bytes_per_s=None, fp32_flops_per_s=64.7e12, tensor_flops_per_s={"f16": 959e12}, launch_us=6.0,
    )  # fmt: skip
    facts = Facts(sms=132, l2_bytes=60 << 20, clock_hz=1.98e9, arch="sm_90")
    table = with_ceilings(H200, ceilings, facts)
    assert table.dram_bytes_per_s == 4.3e12
    assert table.fp32_flops_per_s == pytest.approx(64.7e12, rel=0.01)
    assert table.tensor_flops_per_s("f16") == pytest.approx(959e12, rel=0.01)
    assert table.tensor_flops_per_s("f64") == H200.tensor_flops_per_s("f64")
    assert table.launch_us == H200.launch_us


# --- energy ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("repeated", "energy"),
    [
        (Repeated(count=1000, elapsed_s=0.6, energy_mj=300_000.0, wall_s=0.65), 300.0),
        (Repeated(count=10, elapsed_s=0.1, energy_mj=50_000.0, wall_s=0.11), None),
        (Repeated(count=1000, elapsed_s=0.6, energy_mj=300_000.0, wall_s=2.0), None),
        (Repeated(count=1000, elapsed_s=0.6, energy_mj=None, wall_s=0.65), None),
    ],
)
def test_energy_is_told_only_where_it_can_be_believed(repeated: Repeated, energy: float | None) -> None:
    assert per_run_mj(repeated) == energy


# --- baselines -------------------------------------------------------------------------------------------------------
def test_without_torch_baselines_are_missing_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines_module, "find_spec", lambda name: None)
    problem = load_builtin("relu").problem
    found = TorchBaselines(gpu=0, hold=contextlib.nullcontext).measure(problem, bench_inputs(problem, (), seed=1))
    assert (dict(found.times), found.missing["torch"].split(":")[0]) == ({}, "torch is not installed")


def test_a_call_of_the_child_names_every_size_and_sends_every_set() -> None:
    problem = load_builtin("conv2d").problem
    entry = Workload(
        axes={"N": 1, "C": 2, "H": 5, "W": 5, "K": 3, "R": 3, "S": 3}, scalars={"stride": 1, "padding": 1},
        inputs={"x": "normal", "w": "normal"},
    )  # fmt: skip
    inputs = bench_inputs(problem, (entry,), seed=1)
    header, blobs = _call(problem, inputs, 0, 0, None, 1.0)
    assert [item["shape"] for item in header["arrays"]] == [[1, 2, 5, 5], [3, 2, 3, 3]]
    assert header["names"]["stride"] == 1
    assert len(blobs) == 2 * len(inputs.sets[0])


def test_a_changed_problem_of_a_known_name_gets_none_of_its_baselines() -> None:
    problem = load_builtin("relu").problem
    other = load_builtin("gelu").problem
    assert is_builtin_name(problem)
    assert not is_builtin_name(__import__("dataclasses").replace(problem, reference=other.reference))


def test_the_time_of_a_baseline_is_weighted_and_has_an_interval() -> None:
    found = _time([(1.0, np.array([10.0, 11.0, 12.0])), (2.0, np.array([1.0, 1.0, 1.0, 9.0]))])
    assert (found.median_us, found.runs) == (13.0, 3)
    assert found.ci95[0] <= 13.0 <= found.ci95[1]
    slow = BaselineTime(median_us=20.0, ci95=(19.0, 21.0), runs=5)
    assert best_of(Baselines(times={"torch": slow, "torch.compile": found, "cublas": slow})) == 13.0
    assert best_of(Baselines()) is None


# --- counters --------------------------------------------------------------------------------------------------------
def read_with(ncu: Ncu | SetupError, reader: list[NsightReader] | None = None) -> Any:
    names = ("relu", "transpose_naive", "transpose_tiled", "void total<float>(const T1 *, T1 *, int)")
    launches = tuple(
        PlannedLaunch(symbol=name, grid=(1, 1, 1), block=(32, 1, 1), shared_bytes=0, args=()) for name in names
    )
    problem = load_builtin("relu").problem
    inputs = bench_inputs(problem, problem.bench, seed=1)
    subject = Contender(build=built(), plans=(Plan(steps=launches, arrays={}),))
    made = NsightReader(ncu, gpu=0, hold=contextlib.nullcontext)
    if reader is not None:
        reader.append(made)
    kernel = Kernel(source="a\nb\n", launches=(Launch(kernel="relu", grid=(1,), block=(1,), args=()),))
    return made.read(kernel, subject, inputs, ClockedDevice(), metrics=None, timeout_s=1.0)  # type: ignore[arg-type]


@pytest.mark.skipif(sys.platform != "linux", reason="programs are run on Linux only")
def test_counters_of_all_launches_become_one_set_of_metrics(tmp_path: Path) -> None:
    ncu = Ncu(path=str(fake_ncu(tmp_path, table=DATA / "four_kernels.csv")), version="2025.3.1")
    counters = read_with(ncu)
    assert counters.values["l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"] == 4 * 32768
    assert counters.bottleneck is not None
    assert counters.conditions == {"ncu": "2025.3.1"}
    assert "no source lines" in counters.warnings[0]  # the program that stands in writes no report


@pytest.mark.skipif(sys.platform != "linux", reason="programs are run on Linux only")
def test_a_missing_permission_is_asked_for_once_and_changes_the_key_of_profiles(tmp_path: Path) -> None:
    ncu = Ncu(path=str(fake_ncu(tmp_path, log=FORBIDDEN, status=1)), version="2025.3.1")
    reader: list[NsightReader] = []
    with pytest.raises(SetupError, match="may not read"):
        read_with(ncu, reader)
    assert reader[0].version == "ncu/profiler_forbidden/1"
    assert (tmp_path / "calls").read_text().count("\n") == 1


def test_lines_of_headers_are_no_lines_of_the_kernel() -> None:
    def line(file: str, number: int) -> ReportedLine:
        stalls: Mapping[str, float] = {}
        return ReportedLine(
            file=file, line=number, source="", share_pct=50.0, sectors_per_request=4.0, stalls=stalls
        )  # fmt: skip

    kernel = ReportedKernel(
        name="k", grid=None, block=None, metrics={}, bottleneck=None, findings=(),
        hot_lines=(line("cuda_fp16.hpp", 3), line("kernel.cu", 2)),
    )  # fmt: skip
    assert [(item.line, item.source) for item in hot_lines(kernel, "a\n  b = c;\n")] == [(2, "b = c;")]
