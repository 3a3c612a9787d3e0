"""Nsight Compute as a program: found, driven by the metric table, read by column, its failures told apart."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from fake_ncu import (
    CONNECTED,
    DATA,
    FAILED,
    FORBIDDEN,
    NO_KERNELS,
    NOT_LOADED,
    UNKNOWN_OPTION,
    VERSION,
    calls_of,
    fake_ncu,
)

from optiml.device.cuda_job import JobItem
from optiml.device.plan import Plan, PlannedLaunch
from optiml.errors import InvalidInput, SetupError, ToolFailed, WorkerTimeout
from optiml.measure import nsight
from optiml.measure.metrics import METRICS
from optiml.measure.nsight import (
    Ncu,
    ProfiledLaunch,
    combined,
    command_line,
    find_ncu,
    metric_names,
    open_ncu,
    profile_command,
    profile_each,
    profile_job,
    read_csv,
    unit_scale,
)
from optiml.records import Build, BuildReport

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs are run on Linux only")

TABLE = DATA / "four_kernels.csv"
KERNELS = ("relu", "transpose_naive", "transpose_tiled", "void total<float>(const T1 *, T1 *, int)")


def item(*symbols: str) -> JobItem:
    report = BuildReport(
        arch="sm_90", compiler="nvrtc 13.5", registers_per_thread=None, shared_bytes_per_block=None, stack_bytes=None,
        spill_bytes=None, log="", seconds=0.0,
    )  # fmt: skip
    launches = tuple(
        PlannedLaunch(symbol=symbol, grid=(1, 1, 1), block=(32, 1, 1), shared_bytes=0, args=()) for symbol in symbols
    )
    build = Build(kernel_id="0" * 16, report=report, ptx="", cubin=b"cubin", entries={}, resources={})
    return JobItem(name=symbols[0], build=build, plan=Plan(steps=launches, arrays={}), contents={})


def profiled(folder: Path, items: Sequence[JobItem] = (item(*KERNELS),), **ending: object) -> object:
    path = fake_ncu(folder, **ending)  # type: ignore[arg-type]
    return profile_job(Ncu(path=str(path), version="2025.3.1"), items, metrics=("dram__bytes.sum",), timeout_s=20.0)


def raised(folder: Path, kind: type[Exception], **ending: object) -> Exception:
    with pytest.raises(kind) as caught:
        profiled(folder, **ending)
    return caught.value


# --- reading ---------------------------------------------------------------------------------------------------------
def test_columns_are_found_by_name_among_hundreds() -> None:
    launches = read_csv(TABLE.read_text())
    assert tuple(launch.kernel for launch in launches) == KERNELS
    naive = launches[1].metrics
    assert naive["l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum"] == 1048576
    assert naive["l1tex__t_sector_hit_rate.pct"] == 65.19
    assert naive["dram__bytes_write.sum"] == 407808
    assert launches[2].metrics["l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"] == 1015808


def test_almost_every_metric_of_the_table_is_one_that_nsight_compute_gives() -> None:
    seen = read_csv(TABLE.read_text())[0].metrics
    later = {"smsp__inst_executed_op_local_ld.sum", "smsp__inst_executed_op_local_st.sum"}  # than this recording
    assert {name for name in METRICS if seen.get(name) is None} == later


def page(*rows: str, units: str = '"","","byte","%"') -> str:
    return "\n".join(
        ['"ID","Kernel Name","dram__bytes.sum","sm__throughput.avg.pct_of_peak_sustained_elapsed"', units, *rows]
    )


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (('"1,234,567"', '"1.25"'), (1234567, 1.25)),
        (('"1.234.567"', '"1,25"'), (1234567, 1.25)),
        (('"1.234,5"', '"1.234"'), (1234.5, 1234)),
        (("\"1'234'567\"", '"0.5"'), (1234567, 0.5)),
        (('"1\u202f234\u202f567"', '"0,5"'), (1234567, 0.5)),
        (('"1,234"', '"99"'), (1234, 99)),
        (('"12"', '"0.123"'), (12, 0.123)),
        (('"nan"', '"n/a"'), (None, None)),
        (('""', '"inf"'), (None, None)),
    ],
)
def test_numbers_are_read_in_any_locale_and_what_is_none_is_none(
    cells: tuple[str, str], values: tuple[float | None, float | None]
) -> None:
    (launch,) = read_csv(page(f'"0","relu",{cells[0]},{cells[1]}'))
    assert tuple(launch.metrics.values()) == values


def test_a_page_with_semicolons_and_a_byte_order_mark_is_read_too() -> None:
    text = "\ufeff" + page('"0","relu","1.048.576","12,5"').replace('","', '";"')
    assert read_csv(text)[0].metrics["dram__bytes.sum"] == 1048576


def test_values_are_scaled_by_their_unit() -> None:
    (launch,) = read_csv(page('"0","relu","4.5","12.5"', units='"","","Mbyte","%"'))
    assert launch.metrics["dram__bytes.sum"] == 4.5e6
    assert [unit_scale(unit) for unit in ("ns", "usecond", "ms", "second")] == pytest.approx([1, 1e3, 1e6, 1e9])
    assert [unit_scale(unit) for unit in ("Gbyte/s", "byte/block", "%", "sector", "Kinst")] == [1e9, 1, 1, 1, 1e3]


def test_words_of_the_program_around_the_table_do_not_matter() -> None:
    assert len(read_csv("no error\n" + CONNECTED + TABLE.read_text())) == 4
    assert read_csv("nothing here") == ()


# --- driving ---------------------------------------------------------------------------------------------------------
def test_the_command_line_names_every_metric_of_the_table_and_leaves_the_clocks_alone() -> None:
    argv = command_line(
        Ncu(path="/opt/ncu", version="2025.3.1"), ["prog"], metrics=metric_names(), log=Path("log"), report=None
    )
    assert argv[argv.index("--clock-control") + 1] == "none"
    assert argv[argv.index("--metrics") + 1].split(",") == list(METRICS)
    assert argv[-1] == "prog"


def test_a_metric_name_that_could_be_an_option_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no name of a metric"):
        metric_names(["dram__bytes.sum", "--csv"])


def test_all_kernels_go_through_one_process_and_come_back_by_item(tmp_path: Path) -> None:
    answer = profiled(tmp_path, (item("relu"), item(*KERNELS[1:3]), item(KERNELS[3])), table=TABLE)
    assert [[launch.kernel for launch in launches] for launches in answer] == [  # type: ignore[attr-defined]
        ["relu"], ["transpose_naive", "transpose_tiled"], [KERNELS[3]],
    ]  # fmt: skip
    assert len(calls_of(tmp_path)) == 1


def test_a_launch_that_is_missing_from_the_table_is_an_error_not_a_shift(tmp_path: Path) -> None:
    error = raised(tmp_path, ToolFailed, items=(item("relu", "relu", *KERNELS[1:]),), table=TABLE)
    assert "4 of 5 launches" in str(error)
    assert "transpose_naive where relu" in str(error)


def test_no_counter_permission_says_how_to_get_it(tmp_path: Path) -> None:
    error = raised(tmp_path, SetupError, log=FORBIDDEN, status=1)
    assert error.code == "profiler_forbidden"  # type: ignore[attr-defined]
    assert "NVreg_RestrictProfilingToAdminUsers=0" in str(error)


def test_zero_kernels_lists_those_that_the_program_has(tmp_path: Path) -> None:
    assert "relu, total, transpose_naive" in str(raised(tmp_path, ToolFailed, log=NO_KERNELS))


@pytest.mark.parametrize("text", [UNKNOWN_OPTION, NOT_LOADED])
def test_a_profiler_that_does_not_fit_is_no_profiler(tmp_path: Path, text: str) -> None:
    error = raised(tmp_path, SetupError, stdout=text, status=1)
    assert error.code == "no_profiler"  # type: ignore[attr-defined]


def test_another_failure_carries_the_profilers_words_without_paths(tmp_path: Path) -> None:
    assert "returned an error code (1)" in str(raised(tmp_path, ToolFailed, log=FAILED, status=1))
    lost = "==ERROR== '/home/me/app' does not exist\n"
    assert "/home" not in str(raised(tmp_path, ToolFailed, log=lost, status=1))


def test_a_kernel_that_fails_under_the_profiler_says_why(tmp_path: Path) -> None:
    error = raised(tmp_path, ToolFailed, stdout="item 0 relu\nfailed 0 an illegal address\n", log=FAILED, status=1)
    assert str(error) == "the kernel did not run under the profiler: an illegal address"


def test_a_hang_is_stopped_and_told(tmp_path: Path) -> None:
    path = fake_ncu(tmp_path, hang=True)
    with pytest.raises(WorkerTimeout, match="launches run one at a time"):
        profile_job(Ncu(path=str(path), version="2025.3.1"), (item("relu"),), metrics=("x__y.sum",), timeout_s=1.0)


def test_one_bad_kernel_does_not_cost_the_others_their_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_by_the_second(ncu: Ncu, items: Sequence[JobItem], **options: object) -> object:
        if "bad" in [entry.name for entry in items]:
            raise ToolFailed("broke off")
        return tuple((ProfiledLaunch(kernel=entry.name, metrics={}),) for entry in items)

    monkeypatch.setattr(nsight, "profile_job", broken_by_the_second)
    items = [item("a"), item("bad"), item("c"), item("d")]
    answers = profile_each(Ncu(path="ncu", version="1"), items, metrics=())
    assert [isinstance(answer, ToolFailed) for answer in answers] == [False, True, False, False]


def test_a_command_runs_where_its_user_is_with_the_filters_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ncu = Ncu(path=str(fake_ncu(tmp_path, table=TABLE)), version="2025.3.1")
    profile_command(
        ncu, ["./train", "--steps", "2"], metrics=("dram__bytes.sum",), report=tmp_path / "out", timeout_s=20.0,
        kernel_regex="gemm.*", launch_skip=3, launch_count=1,
    )  # fmt: skip
    (argv,) = calls_of(tmp_path)
    assert (tmp_path / "where").read_text() == str(tmp_path)
    assert argv[-3:] == ["./train", "--steps", "2"]
    assert "--kernel-name\0regex:gemm.*\0--launch-skip\0003\0--launch-count\0001" in "\0".join(argv)
    with pytest.raises(InvalidInput, match="command is empty"):
        profile_command(ncu, [], metrics=(), report=tmp_path / "out", timeout_s=1.0)


# --- finding ---------------------------------------------------------------------------------------------------------
def test_it_is_found_on_the_path_in_cuda_home_and_where_installers_put_it(tmp_path: Path) -> None:
    places = [tmp_path / "path", tmp_path / "home" / "bin", tmp_path / "opt" / "nvidia" / "nsight-compute" / "2025.3.1"]
    for place in places:
        place.mkdir(parents=True)
        fake_ncu(place)
    newest = tmp_path / "opt" / "nvidia" / "nsight-compute" / "2025.10.0"
    newest.mkdir()
    fake_ncu(newest)
    given = {"PATH": str(places[0]), "CUDA_HOME": str(tmp_path / "home")}
    assert find_ncu(given, root=tmp_path) == str(places[0] / "ncu")
    assert find_ncu({**given, "PATH": ""}, root=tmp_path) == str(places[1] / "ncu")
    assert find_ncu({"PATH": ""}, root=tmp_path) == str(newest / "ncu")
    assert find_ncu({"PATH": ""}, root=tmp_path / "home") is None


def test_its_version_is_asked_for_and_one_that_is_too_old_is_refused(tmp_path: Path) -> None:
    fake_ncu(tmp_path)
    assert open_ncu({"PATH": str(tmp_path)}).version == "2025.3.1"
    fake_ncu(tmp_path, version=VERSION.replace("2025.3.1.0", "2019.5.0"))
    with pytest.raises(SetupError, match=r"2019\.5\.0 is too old") as caught:
        open_ncu({"PATH": str(tmp_path)})
    assert caught.value.code == "no_profiler"


def test_without_it_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsight, "PLACES", ())
    with pytest.raises(SetupError, match="comes with the CUDA toolkit") as caught:
        open_ncu({"PATH": str(tmp_path)})
    assert caught.value.code == "no_profiler"


def test_our_process_finds_its_modules_under_the_profiler() -> None:
    given = nsight._environment()
    assert any(
        Path(folder, "optiml", "device", "cuda_job.py").exists() for folder in given["PYTHONPATH"].split(os.pathsep)
    )


# --- several launches ------------------------------------------------------------------------------------------------
def test_totals_add_rates_are_weighted_by_time_and_launch_figures_are_the_longests() -> None:
    def launch(time_ns: float, total: float | None, rate: float, grid: float) -> ProfiledLaunch:
        return ProfiledLaunch(
            kernel="k",
            metrics={"gpu__time_duration.sum": time_ns, "dram__bytes.sum": total,
                     "sm__throughput.avg.pct_of_peak_sustained_elapsed": rate, "launch__grid_size": grid},
        )  # fmt: skip

    names = ("dram__bytes.sum", "sm__throughput.avg.pct_of_peak_sustained_elapsed", "launch__grid_size")
    two = [(1.0, launch(100, 10, 20, 5)), (2.0, launch(150, 7, 80, 6))]
    assert list(combined(two, names).values()) == [24, pytest.approx(65), 6]
    lacking = [two[0], (1.0, dataclasses.replace(launch(1, None, 1, 1)))]
    assert combined(lacking, names)["dram__bytes.sum"] is None
