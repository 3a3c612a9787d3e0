"""Kernels that bring a launcher: what is recorded, what is refused and why, and that hostile ones do no harm.

Each source holds many launchers, because building one takes seconds.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from optiml.cli import app
from optiml.codec import decode
from optiml.device.emulated import MODELS, EmulatedDevice
from optiml.device.plan import BadLaunch, Copy, Memset, Plan, PlannedLaunch, Pointer, Upload, resolve_plan
from optiml.device.recorded import plan_of
from optiml.errors import Unsupported
from optiml.kernel_file import write_kernel_text
from optiml.process import Finished, probe
from optiml.records import Build, BuildReport, Kernel, Problem, Workload
from optiml.sandbox import Layers
from optiml.toolchain import record
from optiml.toolchain.nvcc import NvccCompiler, find_toolkit
from optiml.toolchain.nvrtc import CompileFailure
from optiml.toolchain.record import Entry, Orders, Recording
from optiml.verify.reference import References
from optiml.verify.verify import Verifier
from optiml.workbench import Workbench

FOLDER = Path(__file__).parent / "data" / "launchers"
A100 = MODELS["a100"]
PROBLEM = decode(
    Problem,
    {
        "name": "scaled",
        "axes": {"n": {"type": "var", "min": 1}},
        "inputs": {"x": {"dtype": "float32", "shape": ["n"]}, "a": {"dtype": "float32", "shape": None}},
        "outputs": {"y": {"dtype": "float32", "shape": ["n"]}},
        "reference": "def run(x, a):\n    return a * x",
        "workloads": [{"axes": {"n": 1000}, "scalars": {"a": 1.5}}],
    },
    what="problem",
)


def missing() -> str:
    """What this machine lacks for launchers, or nothing."""
    if find_toolkit() is None:
        return "no nvcc here"
    if shutil.which("g++") is None:
        return "no host compiler here"
    return "" if probe().strong else "no strong sandbox here"


class FakeCompiler:
    """Always answers the same."""

    def __init__(self, answer: Build | CompileFailure) -> None:
        self._answer = answer

    def compile(self, kernel: Kernel, arch: str) -> Build | CompileFailure:
        return self._answer


needs_nvcc = pytest.mark.skipif(bool(missing()), reason=missing() or "everything is there")


@pytest.fixture(scope="module")
def compiler() -> NvccCompiler:
    return NvccCompiler()


@pytest.fixture(scope="module")
def device() -> Iterator[EmulatedDevice]:
    made = EmulatedDevice(A100)
    yield made
    made.close()


def launcher(name: str, *, file: str = "styles") -> Kernel:
    return Kernel(source=(FOLDER / f"{file}.cu").read_text(encoding="utf-8"), launcher=name)


def built(compiler: NvccCompiler, kernel: Kernel) -> Build:
    build = compiler.compile(kernel, "sm_80")
    assert isinstance(build, Build), build
    return build


def planned(compiler: NvccCompiler, name: str, *, n: int = 1000, file: str = "styles") -> Plan:
    kernel = launcher(name, file=file)
    workload = Workload(axes={"n": n}, scalars={"a": 1.5})
    return resolve_plan(kernel, built(compiler, kernel), PROBLEM, workload, A100)


@needs_nvcc
@pytest.mark.parametrize(
    "name",
    [
        "plain", "templated", "by_api", "by_config", "cooperative", "by_occupancy", "with_scratch",
        "with_async_scratch", "cleared_then_added", "large_shared", "side_stream_joined", "uploaded", "in_halves",
        "struct_of_pointers", "table_of_pointers",
    ],
)  # fmt: skip
def test_an_honest_launcher_of_any_style_is_carried_out(
    name: str, compiler: NvccCompiler, device: EmulatedDevice
) -> None:
    for n in (7, 1000):
        plan = planned(compiler, name, n=n)
        contents = {key: np.zeros(array.shape, array.dtype) for key, array in plan.arrays.items()}
        contents["x"] = np.arange(n, dtype=np.float32)
        contents["y"] = np.full(n, np.nan, np.float32)
        result = device.run(built(compiler, launcher(name)), plan, (contents,), timeout_s=20.0).runs[0]
        assert np.array_equal(result["y"], 1.5 * contents["x"])


@needs_nvcc
def test_a_plan_holds_the_steps_in_order_and_addresses_by_name(compiler: NvccCompiler) -> None:
    (launch,) = planned(compiler, "plain").steps
    assert isinstance(launch, PlannedLaunch)
    assert (launch.grid, launch.block, launch.args[:2]) == (
        (4, 1, 1),
        (256, 1, 1),
        (Pointer(name="x"), Pointer(name="y")),
    )
    _, second = planned(compiler, "in_halves").launches
    assert second.args[:2] == (Pointer(name="x", offset=2000), Pointer(name="y", offset=2000))
    kinds = [type(step) for step in planned(compiler, "cleared_then_added").steps]
    assert kinds == [Memset, PlannedLaunch]
    plan = planned(compiler, "with_scratch")
    assert [type(step) for step in plan.steps] == [PlannedLaunch, Copy]
    assert [array.nbytes for array in plan.arrays.values() if array.role == "workspace"] == [4000]
    uploads = [step for step in planned(compiler, "uploaded").steps if isinstance(step, Upload)]
    assert [(step.target.name, step.target.symbol) for step in uploads] == [
        (name, True) for name in ("table", "factor", "unused")
    ]


@needs_nvcc
@pytest.mark.parametrize(
    ("name", "reason", "told"),
    [
        ("no_attribute", "bad_launch", "cudaFuncSetAttribute"),
        ("over_bounds", "bad_launch", "launch bounds"),
        ("large_block", "bad_launch", r"block of \(2048, 1, 1\)"),
        ("after_free", "bad_launch", "freed"),
        ("memset_past_end", "bad_launch", "leaves the device memory"),
        ("crashes", "fault", "crashed"),
        ("throws", "fault", "exception"),
        ("side_stream_left", "host_escape", "never waits for"),
        ("default_stream", "host_escape", "default stream"),
        ("host_address", "host_escape", "a host address as argument 1 of scale"),
        ("copies_back", "host_escape", "cudaMemcpyDeviceToHost"),
        ("touches", "host_escape", "host access to device memory"),
        ("too_much_memory", "resource_limit", "allocations"),
        ("wrong_signature", "bad_launch", "takes 4 parameters and gets 5"),
        ("wrong_type", "bad_launch", "double a|'double'"),
        ("nowhere", "bad_launch", "no extern"),
    ],
)
def test_what_the_runtime_refuses_or_a_plan_cannot_hold_is_named(
    name: str, reason: str, told: str, compiler: NvccCompiler
) -> None:
    with pytest.raises(BadLaunch, match=told) as caught:
        planned(compiler, name)
    assert caught.value.reason == reason


@needs_nvcc
@pytest.mark.parametrize(
    ("name", "reason", "told"),
    [
        ("fork_bomb", "host_escape", "new process"),
        ("runs_system", "host_escape", "another program"),
        ("runs_program", "host_escape", "another program"),
        ("starts_thread", "host_escape", "thread"),
        ("opens_socket", "host_escape", "network"),
        ("writes_file", "host_escape", "a file"),
        ("reads_file", "host_escape", "a file"),
        ("reads_environment", "host_escape", "environment"),
        ("traces_parent", "host_escape", "another process"),
        ("kills_parent", "host_escape", "another process"),
        ("reads_parent", "host_escape", "another process"),
        ("loads_library", "host_escape", "dlopen"),
        ("exits", "host_escape", "calls exit"),
        ("exits_at_once", "host_escape", "before it returned"),
        ("host_function", "host_escape", "cudaLaunchHostFunc"),
        ("forges_record", "host_escape", "record"),
    ],
)
def test_a_hostile_launcher_is_harmless_and_named(name: str, reason: str, told: str, compiler: NvccCompiler) -> None:
    with pytest.raises(BadLaunch, match=told) as caught:
        planned(compiler, name, file="hostile")
    assert caught.value.reason == reason
    assert planned(compiler, "honest", file="hostile").launches


@needs_nvcc
@pytest.mark.parametrize("name", ["floods", "spins", "takes_memory"])
def test_a_launcher_that_takes_all_it_can_get_is_stopped(
    name: str, compiler: NvccCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "CPU_S", 0)
    monkeypatch.setattr(record, "OUTPUT_BYTES", 1 << 20)
    monkeypatch.setattr(record, "MEMORY_BYTES", 1 << 28)
    with pytest.raises(BadLaunch) as caught:
        planned(compiler, name, file="hostile")
    assert caught.value.reason == {"floods": "resource_limit", "spins": "timed_out", "takes_memory": "fault"}[name]


@needs_nvcc
def test_constructors_of_a_library_get_no_further_than_its_launcher(compiler: NvccCompiler) -> None:
    assert len(planned(compiler, "after_constructors", file="hostile").launches) == 1


@needs_nvcc
def test_what_a_launcher_prints_is_no_part_of_its_record(compiler: NvccCompiler) -> None:
    assert len(planned(compiler, "prints", file="hostile").steps) == 1


@needs_nvcc
def test_a_whole_program_becomes_a_problem_and_a_kernel_to_complete(bench: Workbench) -> None:
    imported = bench.import_program(Kernel(source=(FOLDER / "program.cu").read_text(encoding="utf-8")))
    problem, made = imported.problem, imported.kernel
    assert problem["inputs"]["x"] == {"dtype": "float32", "shape": ["rows", "cols"]}
    assert problem["outputs"] == {"sums": {"dtype": "float32", "shape": ["rows"]}}
    assert problem["workloads"] == [{"axes": {"rows": 48, "cols": 100}, "scalars": {"alpha": 2.5}}]
    assert made is not None
    assert [(launch.kernel, launch.grid) for launch in made.launches] == [
        ("scaled_rows<float>", ("ceil_div(cols, 16)", "ceil_div(rows, 16)")),
        ("row_sums", ("ceil_div(rows, 32)",)),
    ]
    problem["reference"] = "def run(x, alpha):\n    return (alpha * x).sum(axis=1)"
    problem["accumulation"] = "cols"
    assert bench.verify(write_kernel_text(made), problem, seed=1).status == "accepted"


def test_a_program_that_cannot_be_run_still_gets_a_skeleton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTIML_HOME", str(tmp_path))
    monkeypatch.setattr("optiml.toolchain.nvcc.find_toolkit", lambda: None)
    result = CliRunner().invoke(app, ["verify", str(FOLDER / "program.cu"), "--json"])
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["status"]) == (2, "unverified")
    assert "nvcc, which was not found" in answer["warnings"][0]
    assert [skeleton["name"] for skeleton in answer["problem_skeletons"]] == ["scaled_rows", "row_sums"]


def test_without_nvcc_a_launcher_is_unverified_and_the_way_out_is_named(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optiml.toolchain.nvcc.find_toolkit", lambda: None)
    failure = NvccCompiler().compile(launcher("plain"), "sm_80")
    assert isinstance(failure, CompileFailure)
    assert failure.reason is None
    assert "pip install 'optiml[toolchain]'" in failure.detail
    verifier = Verifier(FakeCompiler(failure), EmulatedDevice(A100), References(timeout_s=10.0))
    found = verifier.verify(launcher("plain"), PROBLEM)
    assert (found.status, found.reason, found.detail) == ("unverified", None, failure.detail)


@needs_nvcc
def test_where_no_strong_sandbox_can_be_made_nothing_of_a_launcher_runs(
    compiler: NvccCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = built(compiler, launcher("plain"))
    monkeypatch.setattr("optiml.process._decode_layers", lambda message: Layers(notes=("no Landlock",)))
    with pytest.raises(Unsupported, match="no Landlock"):
        resolve_plan(launcher("plain"), build, PROBLEM, Workload(axes={"n": 77}, scalars={"a": 1.0}), A100)
    failure = NvccCompiler().compile(launcher("plain"), "sm_80")
    assert isinstance(failure, CompileFailure)
    assert failure.reason is None


@needs_nvcc
def test_a_launcher_kernel_is_verified_profiled_and_told_apart_by_its_host_code(bench: Workbench) -> None:
    kernel = launcher("cleared_then_added")
    assert bench.verify(kernel, PROBLEM, seed=1).status == "accepted"
    profile = bench.profile(kernel, PROBLEM)
    assert profile.time.median_us > 0
    other = bench.evaluator().fingerprint(launcher("large_shared"))
    assert bench.evaluator().fingerprint(kernel) != other


def forged(*rows: str) -> Recording:
    """What is read of a record that a library wrote by itself."""
    orders = Orders(name="go", mode="launcher", device=(8, 0, 108, 1, 1, 1), entries=(ENTRY,))
    text = "\n".join(["optiml-record N", *rows, '{"do":"end","how":"returned"}', "optiml-end N", ""]).encode()
    finished = Finished(exit_code=0, stdout=text, stderr=b"", truncated=False, seconds=0.0, layers=Layers())
    return record._read(finished, "N", orders)


ENTRY = Entry(symbol="k", shared_bytes=0, registers=8, local_bytes=0, max_threads=1024, parameters=(4,))
LAUNCH = (
    '{"do":"launch","kernel":"k","grid":[1,1,1],"block":[32,1,1],"shared":0,"cooperative":0,"cluster":[0,0,0],'
    '"args":["00000000"]}'
)


def test_a_record_that_a_library_forges_is_read_as_a_plan_or_not_at_all() -> None:
    assert len(forged(LAUNCH).events) == 1
    for row in (
        LAUNCH.replace('"k"', '"other"'),
        LAUNCH.replace('"00000000"', '"0000000000"'),
        LAUNCH.replace("[32,1,1]", "[0,1,1]"),
        LAUNCH.replace("[32,1,1]", '["a",1,1]'),
        LAUNCH.replace('"shared":0', '"shared":-1'),
        '{"do":"memset","target":[600,0],"value":0,"bytes":4}',
        '{"do":"allocate","slot":1,"bytes":1e30}',
        '{"do":"verdict","status":"accepted"}',
        "[]",
        "{" * 100_000,
        "nan",
    ):
        assert forged(row).ending == "damaged", row
        assert forged(row).events == ()


def test_limits_that_a_forged_record_leaves_out_hold_all_the_same(compiler_free_build: Build) -> None:
    for rows, reason in (
        ([LAUNCH.replace("[32,1,1]", "[2048,1,1]")], "bad_launch"),
        ([LAUNCH.replace('"shared":0', '"shared":900000')], "bad_launch"),
        ([LAUNCH] * 5000, "resource_limit"),
        (['{"do":"allocate","slot":7,"bytes":1000000000000}'], "resource_limit"),
    ):
        with pytest.raises(BadLaunch) as caught:
            plan_of(forged(*rows), compiler_free_build, {}, A100)
        assert caught.value.reason == reason


@pytest.fixture
def compiler_free_build() -> Build:
    report = BuildReport(
        arch="sm_80", compiler="c", registers_per_thread=8, shared_bytes_per_block=0, stack_bytes=0, spill_bytes=0,
        log="", seconds=0.0,
    )  # fmt: skip
    ptx = ".visible .entry k(.param .u32 n)\n{ ret; }"
    return Build(kernel_id="0" * 16, report=report, ptx=ptx, cubin=b"", entries={"k": "k"}, resources={})
