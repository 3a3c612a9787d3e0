"""The command line over a fake workbench: what it prints where, and its exit status."""

import json
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from fakes import FASTER_RELU, RELU, WRONG_RELU, FakeWorkbench
from typer.testing import CliRunner, Result

from optiml import cli
from optiml.codec import decode, encode, kernel_id
from optiml.errors import InvalidInput
from optiml.kernel_file import read_kernel_text
from optiml.problems.problem import check_problem, load_builtin
from optiml.problems.skeleton import problem_skeleton
from optiml.records import Problem
from optiml_mcp.__main__ import client_config


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> FakeWorkbench:
    fake = FakeWorkbench()
    monkeypatch.setattr(cli, "open_bench", lambda **_: fake)
    return fake


@pytest.fixture
def kernel(tmp_path: Path) -> str:
    path = tmp_path / "relu.cu"
    path.write_text(RELU, encoding="utf-8")
    return str(path)


@pytest.fixture
def faster(tmp_path: Path) -> str:
    path = tmp_path / "faster.cu"
    path.write_text(FASTER_RELU, encoding="utf-8")
    return str(path)


@pytest.fixture
def wrong(tmp_path: Path) -> str:
    path = tmp_path / "wrong.cu"
    path.write_text(WRONG_RELU, encoding="utf-8")
    return str(path)


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), input=stdin)


def document(result: Result) -> Any:
    """The one JSON document on stdout."""
    return json.loads(result.stdout)


# --- verify ----------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("bench")
def test_an_accepted_kernel_exits_0_and_shows_its_cases(kernel: str) -> None:
    result = run("verify", kernel, "--problem", "relu")
    assert result.exit_code == 0
    assert result.stdout.startswith("accepted")
    assert "n=258" in result.stdout
    assert "hidden" in result.stdout


@pytest.mark.usefixtures("bench")
def test_a_wrong_kernel_exits_1_and_shows_the_first_mismatch(wrong: str) -> None:
    result = run("verify", wrong, "--problem", "relu")
    assert result.exit_code == 1
    assert "y[0] = -1.5, expected 0.0" in result.stdout


@pytest.mark.usefixtures("bench")
def test_a_kernel_that_cannot_be_judged_exits_2(tmp_path: Path) -> None:
    path = tmp_path / "k.cu"
    path.write_text(RELU + "// unknown_opcode\n", encoding="utf-8")
    assert run("verify", str(path), "--problem", "relu").exit_code == 2


@pytest.mark.usefixtures("bench")
def test_json_is_the_whole_verdict_and_nothing_else(kernel: str) -> None:
    verdict = document(run("verify", kernel, "--problem", "relu", "--json"))
    assert verdict["kernel_id"] == kernel_id(read_kernel_text(RELU))
    assert len(verdict["cases"]) == 14
    assert verdict["reason"] is None


@pytest.mark.usefixtures("bench")
def test_a_kernel_can_come_from_stdin_from_json_and_by_id(tmp_path: Path) -> None:
    path = tmp_path / "relu.json"
    path.write_text(json.dumps(encode(read_kernel_text(RELU))), encoding="utf-8")
    identifiers = [
        document(run("verify", "-", "--problem", "relu", "--json", stdin=RELU))["kernel_id"],
        document(run("verify", str(path), "--problem", "relu", "--json"))["kernel_id"],
        document(run("verify", kernel_id(read_kernel_text(RELU)), "--problem", "relu", "--json"))["kernel_id"],
    ]
    assert len(set(identifiers)) == 1


@pytest.mark.usefixtures("bench")
def test_a_problem_can_come_from_json_and_from_stdin(tmp_path: Path, kernel: str) -> None:
    text = json.dumps(encode(load_builtin("relu").problem))
    path = tmp_path / "problem.json"
    path.write_text(text, encoding="utf-8")
    assert run("verify", kernel, "--problem", str(path)).exit_code == 0
    assert run("verify", kernel, "--problem", "-", stdin=text).exit_code == 0


@pytest.mark.usefixtures("bench")
def test_a_problem_can_be_written_in_toml(tmp_path: Path, kernel: str) -> None:
    path = tmp_path / "problem.toml"
    path.write_text(
        'name = "mine"\nreference = "def run(x): return x"\nworkloads = [{axes = {n = 4}}]\n'
        '[axes.n]\ntype = "var"\n[inputs.x]\ndtype = "float32"\nshape = ["n"]\n'
        '[outputs.y]\ndtype = "float32"\nshape = ["n"]\n',
        encoding="utf-8",
    )
    assert run("verify", kernel, "--problem", str(path)).exit_code == 0


def test_an_input_without_a_shape_is_a_scalar_in_toml(tmp_path: Path) -> None:
    path = tmp_path / "problem.toml"
    path.write_text(
        'name = "mine"\n[inputs.x]\ndtype = "float32"\nshape = ["n"]\n[inputs.a]\ndtype = "float32"\n',
        encoding="utf-8",
    )
    problem = cli.read_problem(str(path))
    assert isinstance(problem, dict)
    assert problem["inputs"]["a"]["shape"] is None
    assert problem["inputs"]["x"]["shape"] == ["n"]


def test_a_problem_file_with_another_ending_is_not_taken_for_a_name() -> None:
    with pytest.raises(InvalidInput, match=r"mine\.jsn is neither a built-in name nor a \.json or \.toml file"):
        cli.read_problem("mine.jsn")


@pytest.mark.usefixtures("bench")
def test_without_a_problem_a_kernel_is_unverified_and_gets_a_skeleton(kernel: str) -> None:
    result = run("verify", kernel, "--json")
    assert result.exit_code == 2
    skeleton = document(result)["problem_skeletons"][0]
    assert skeleton["outputs"] == {"y": {"dtype": "float32", "shape": ["n"]}}


def test_a_skeleton_is_a_well_formed_problem() -> None:
    parameters = [("const __half* __restrict__", "a"), ("float*", "c"), ("int", "m"), ("int", "k"), ("float", "alpha")]
    problem = check_problem(decode(Problem, problem_skeleton("gemv", parameters), what="skeleton"))
    assert problem.inputs["a"].dtype == "float16"
    assert problem.inputs["a"].shape == ("m", "k")
    assert problem.inputs["alpha"].shape is None


# --- mistakes --------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("bench")
@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["verify", "missing.cu", "--problem", "relu"], "invalid_params", "missing.cu"),
        (["verify", "KERNEL", "--problem", "rellu"], "unknown_problem", "'relu'"),
        (["verify", "0123456789abcdef", "--problem", "relu"], "unknown_kernel", "0123456789abcdef"),
        (["verify", "KERNEL", "--problem", "relu", "--axes", "n"], "invalid_params", "--axes"),
        (["verify", "KERNEL", "--problem", "relu", "--axes", "n=-4"], "invalid_params", "--axes"),
        (["verify", "KERNEL", "--problem", "relu", "--axes", "m=4"], "invalid_params", "'m'"),
        (["verify", "KERNEL", "--problem", "missing.json"], "invalid_params", "missing.json"),
        (["verify", "BINARY", "--problem", "relu"], "invalid_params", "UTF-8"),
        (["verify", "HUGE", "--problem", "relu"], "too_large", "1048576"),
        (["verify", "JSON", "--problem", "relu"], "invalid_params", "broken.json"),
        (["profile", "KERNEL"], "invalid_params", "--problem"),
        (["profile", "--report", "x.ncu-rep", "--problem", "relu"], "invalid_params", "only one of them"),
        (["profile", "--problem", "relu", "--", "./train", "--device", "3"], "invalid_params", "only one of them"),
        (["profile", "k.cu", "--", "ls"], "invalid_params", "only one of them"),
        (["compare", "KERNEL", "KERNEL"], "invalid_params", "--problem"),
        (["search"], "invalid_params", "--problem"),
        (["search", "--resume", "r-9"], "unknown_run", "r-9"),
        (["report", "r-9"], "unknown_run", "r-9"),
        (["problems", "rellu"], "unknown_problem", "'relu'"),
        (["generate"], "invalid_params", "TEXT"),
        (["serve", "--print-config", "emacs"], "invalid_params", "claude-code"),
        (["serve", "--http", "0.0.0.0:1"], "invalid_params", "127.0.0.1"),
        (["serve", "--root", "/missing/folder"], "invalid_params", "--root"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_status_2(
    tmp_path: Path, kernel: str, arguments: list[str], code: str, named: str
) -> None:
    (tmp_path / "binary.cu").write_bytes(b"\xff\xfe")
    (tmp_path / "huge.cu").write_bytes(b"x" * ((1 << 20) + 1))
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    files = {"KERNEL": kernel, **{key: str(tmp_path / name) for key, name in FILES.items()}}
    result = run(*[files.get(item, item) for item in arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"optiml: {code}: ")
    assert result.stderr.count("\n") == 1
    assert named in result.stderr


FILES = {"BINARY": "binary.cu", "HUGE": "huge.cu", "JSON": "broken.json"}


@pytest.mark.usefixtures("bench")
def test_with_json_an_error_is_the_document() -> None:
    result = run("verify", "missing.cu", "--problem", "relu", "--json")
    assert document(result)["error"]["code"] == "invalid_params"
    assert result.exit_code == 2


def test_a_defect_of_ours_does_not_look_like_a_rejected_kernel(
    bench: FakeWorkbench, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(bench, "verify", broken)
    result = run("verify", kernel, "--problem", "relu", "--json")
    assert result.exit_code == 2
    assert document(result)["error"]["code"] == "internal"


@pytest.mark.usefixtures("bench")
def test_advice_names_commands_and_not_tools(kernel: str) -> None:
    assert "next: Profile it with optiml profile." in run("verify", kernel, "--problem", "relu").stdout


def test_axes_are_read_as_integers() -> None:
    assert cli.parse_axes("R=4096, C=1") == {"R": 4096, "C": 1}
    with pytest.raises(InvalidInput, match="R=4096,C=4096"):
        cli.parse_axes("R=1.5")


# --- the other commands ----------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("bench")
def test_a_profile_shows_time_bottleneck_and_hot_lines(kernel: str) -> None:
    result = run("profile", kernel, "--problem", "relu")
    assert result.exit_code == 0
    assert "49.00 us modelled" in result.stdout
    assert "fmaxf" in result.stdout
    assert "dram__bytes.sum" in result.stdout


@pytest.mark.usefixtures("bench")
def test_a_rejected_kernel_is_not_profiled_and_exits_1(wrong: str) -> None:
    result = run("profile", wrong, "--problem", "relu")
    assert result.exit_code == 1
    assert result.stderr.startswith("optiml: not_accepted: wrong_values")


@pytest.mark.usefixtures("bench")
def test_compare_exits_0_if_faster_or_same_and_1_if_slower(kernel: str, faster: str) -> None:
    assert run("compare", faster, kernel, "--problem", "relu").exit_code == 0
    assert run("compare", kernel, kernel, "--problem", "relu").exit_code == 0
    slower = run("compare", kernel, faster, "--problem", "relu")
    assert slower.exit_code == 1
    assert slower.stdout.startswith("slower  0.500x")


@pytest.mark.usefixtures("bench")
def test_an_edit_is_judged(kernel: str, faster: str) -> None:
    result = run("judge", kernel, faster, "--problem", "relu")
    assert result.exit_code == 0
    assert result.stdout.startswith("try  score 0.70")


@pytest.mark.usefixtures("bench")
def test_generate_prints_a_kernel_that_can_be_read_back(tmp_path: Path) -> None:
    path = tmp_path / "out.cu"
    result = run("generate", "a relu", "--count", "2", "-o", str(path))
    assert result.exit_code == 0
    assert "grid_stride" in result.stdout
    assert "fmaxf" in read_kernel_text(path.read_text(encoding="utf-8")).source


@pytest.mark.usefixtures("bench")
def test_an_unknown_intent_exits_2_with_a_template() -> None:
    result = run("generate", "fold proteins")
    assert result.exit_code == 2
    assert "__global__" in result.stdout


@pytest.mark.usefixtures("bench")
def test_problems_lists_all_and_shows_one_in_full() -> None:
    assert "softmax" in run("problems").stdout
    assert {"name", "dtypes"} <= set(document(run("problems", "--json"))[0])
    assert "0..1073741824" in run("problems", "relu").stdout
    assert document(run("problems", "relu", "--json"))["name"] == "relu"


@pytest.mark.usefixtures("bench")
def test_doctor_says_what_is_missing_and_how_to_get_it() -> None:
    result = run("doctor")
    assert result.exit_code == 0
    assert "pip install 'optiml[gpu]'" in result.stdout


# --- search ----------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("bench")
def test_a_search_reports_each_kernel_on_stderr_and_the_result_on_stdout(tmp_path: Path) -> None:
    path = tmp_path / "best.cu"
    result = run("search", "--problem", "relu", "--evaluations", "3", "--seed", "1", "--json", "-o", str(path))
    assert result.exit_code == 0
    found = document(result)
    assert (found["status"], found["seed"], found["speedup"]["median"]) == ("finished", 1, 2.0)
    written = read_kernel_text(path.read_text(encoding="utf-8")).source
    assert found["best"]["kernel"]["source"].strip() == written.strip()
    assert [line.split()[0] for line in result.stderr.splitlines()] == ["1/3", "2/3", "3/3"]


@pytest.mark.usefixtures("bench")
def test_a_search_shows_its_path_and_why(kernel: str) -> None:
    result = run("search", kernel, "--problem", "relu", "--evaluations", "2")
    assert "2.00x modelled" in result.stdout
    assert "DRAM bytes fell by 50 %." in result.stdout


@pytest.mark.usefixtures("bench")
def test_a_search_from_a_wrong_kernel_exits_1(wrong: str) -> None:
    assert run("search", wrong, "--problem", "relu").exit_code == 1


def test_an_interrupted_search_exits_130_and_can_be_resumed(
    bench: FakeWorkbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry_on = FakeWorkbench.run_search

    def interrupted(self: FakeWorkbench, run_id: str, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return carry_on(self, run_id, **options)

    monkeypatch.setattr(FakeWorkbench, "run_search", interrupted)
    result = run("search", "--problem", "relu", "--json")
    run_id = document(result)["run_id"]
    assert result.exit_code == 130
    assert f"optiml search --resume {run_id}" in result.stderr
    monkeypatch.setattr(FakeWorkbench, "run_search", carry_on)
    assert bench.searches[run_id].status == "running"
    assert run("search", "--resume", run_id).exit_code == 0
    assert run("runs", run_id).stdout.startswith(f"finished  {run_id}")
    assert run_id in run("runs").stdout
    assert run("report", run_id).stdout.startswith("# Search")


# --- serve and start-up ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("client", ["claude-code", "cursor", "vscode", "codex"])
def test_the_configuration_of_a_client_parses_and_starts_this_interpreter(client: str) -> None:
    _, text = client_config(client)
    table = tomllib.loads(text) if client == "codex" else json.loads(text)
    entry = next(iter(table.values()))["optiml"]
    assert (entry["command"], entry["args"]) == (sys.executable, ["-m", "optiml_mcp"])


def test_help_needs_neither_numpy_nor_the_mcp_sdk_nor_the_workbench() -> None:
    program = "import sys, optiml.cli; print([n for n in ('numpy', 'mcp', 'optiml.workbench') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.usefixtures("bench")
def test_a_problem_file_may_begin_with_a_byte_order_mark(tmp_path: Path, kernel: str) -> None:
    path = tmp_path / "relu.json"
    path.write_text("\ufeff" + json.dumps(encode(load_builtin("relu").problem)), encoding="utf-8")
    assert run("verify", kernel, "--problem", str(path)).exit_code == 0
