"""Reports of Nsight Compute: read in a child, told in a few figures."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from fake_ncu import DATA, fake_ncu
from typer.testing import CliRunner

from optiml.cli import app
from optiml.errors import InvalidInput, SetupError
from optiml.measure import nsight_report
from optiml.measure.nsight import read_csv
from optiml.measure.nsight_report import read_report
from optiml.measure.nsight_rules import bottleneck_of
from optiml.settings import Settings
from optiml.workbench import Workbench

REPORT = DATA / "transpose.ncu-rep"


# --- what counters say -----------------------------------------------------------------------------------------------
def test_counters_tell_scattered_stores_bank_conflicts_and_an_idle_gpu_apart() -> None:
    relu, naive, tiled, total = (
        bottleneck_of(launch.metrics) for launch in read_csv((DATA / "four_kernels.csv").read_text())
    )
    assert relu is not None
    assert naive is not None
    assert tiled is not None
    assert total is not None
    assert (naive.kind, naive.evidence[0]) == ("memory", "L2 79 % of peak, the SMs 7 %")
    assert naive.evidence[1] == "global stores use 4 of the 32 bytes of a sector, 32 sectors a request"
    assert tiled.evidence[1] == "92 % of the passes through shared memory are bank conflicts"
    assert (total.kind, "0.12 waves: the grid does not fill the GPU once" in total.evidence) == ("latency", True)
    assert relu.kind == "launch" or relu.kind == "latency"


def test_without_throughputs_nothing_is_claimed() -> None:
    assert bottleneck_of({"dram__bytes.sum": 1.0}) is None
    assert bottleneck_of({}) is None


# --- a report --------------------------------------------------------------------------------------------------------
def test_a_report_tells_metrics_bottleneck_and_where_warps_wait_for_what() -> None:
    pytest.importorskip("ncu_report", reason="needs the package ncu-report")
    report = read_report(REPORT, metrics=("dram__bytes.sum", "no__such.sum"))
    (kernel,) = report.kernels
    assert (kernel.name, kernel.grid, report.device, report.total) == ("transpose", (4096, 1, 1), "NVIDIA H200", 1)
    assert kernel.metrics["dram__bytes.sum"] == pytest.approx(4.6e6, rel=0.3)
    assert kernel.metrics["no__such.sum"] is None
    assert kernel.bottleneck is not None
    assert "global stores use 4 of the 32 bytes of a sector" in kernel.bottleneck.evidence[1]
    line = kernel.hot_lines[0]  # y[column * R + row] = x[i]; a report of a kernel compiled in memory has no source
    assert line.line == 30
    assert (line.file, line.sectors_per_request) == ("kernel.cu", 18.0)
    assert next(iter(line.stalls)) == "long_scoreboard"
    (finding,) = kernel.findings
    assert finding.rule == "UncoalescedGlobalAccess"
    assert "Check the L2 Theoretical Sectors Global Excessive table" in finding.message
    assert "@" not in finding.message


def test_a_filter_that_lets_no_kernel_by_lists_those_there_are() -> None:
    pytest.importorskip("ncu_report", reason="needs the package ncu-report")
    assert read_report(REPORT, kernel_regex="^trans").total == 1
    with pytest.raises(InvalidInput, match="none of the 1 kernels of the report by: transpose"):
        read_report(REPORT, kernel_regex="softmax")
    with pytest.raises(InvalidInput, match="none of the 1 kernels"):
        read_report(REPORT, launch_skip=1)


def test_the_command_line_shows_a_report() -> None:
    pytest.importorskip("ncu_report", reason="needs the package ncu-report")
    shown = CliRunner().invoke(app, ["profile", "--report", str(REPORT)])
    assert shown.exit_code == 0
    assert "kernel.cu:30" in shown.stdout


# --- what goes wrong -------------------------------------------------------------------------------------------------
def test_a_file_that_is_no_report_is_told_so(tmp_path: Path) -> None:
    pytest.importorskip("ncu_report", reason="needs the package ncu-report")
    junk = tmp_path / "junk.ncu-rep"
    junk.write_bytes(b"\x89NCU" + bytes(range(256)) * 40)
    with pytest.raises(InvalidInput, match=r"no profiled kernel|cannot be read"):
        read_report(junk)
    with pytest.raises(InvalidInput, match="check its path"):
        read_report(tmp_path / "nothing.ncu-rep")
    with pytest.raises(InvalidInput, match="is no file"):
        read_report(tmp_path)
    with pytest.raises(InvalidInput, match="no regular expression"):
        read_report(junk, kernel_regex="(")


def test_without_its_reader_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nsight_report, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match="ncu-report") as caught:
        read_report(tmp_path / "x.ncu-rep")
    assert caught.value.code == "no_profiler"


# --- through the workbench -------------------------------------------------------------------------------------------
def test_a_report_outside_the_roots_is_refused_whether_it_exists_or_not(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "outside.ncu-rep").write_bytes(b"")
    with Workbench(Settings(home=tmp_path / "home", roots=(inside,))) as bench:
        for name in ("../outside.ncu-rep", "../missing.ncu-rep"):
            with pytest.raises(InvalidInput, match="outside the allowed roots"):
                bench.profile_report(name)


def test_a_command_runs_only_where_the_settings_allow_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(home=tmp_path / "home", roots=(tmp_path,))
    with Workbench(settings) as bench, pytest.raises(InvalidInput, match="--allow-commands"):
        bench.profile_command(["./train"])
    fake_ncu(tmp_path, log="==WARNING== No kernels were profiled.\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    allowed = dataclasses.replace(settings, allow_commands=True)
    with Workbench(allowed) as bench, pytest.raises(Exception, match="profiled no kernel"):
        bench.profile_command(["./train"])
