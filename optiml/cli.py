"""The command line: parse, one call of the workbench, print.

Exit status: 0 done or accepted, 1 rejected (compare: slower), 2 unverified or an error, 130 interrupted. With --json
stdout is exactly one JSON document; progress and error lines go to stderr.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import signal
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_args

import typer
from typer.core import TyperCommand

from optiml.codec import MAX_SOURCE_BYTES, encode, kernel_id
from optiml.errors import InvalidInput, NotAccepted, OptimlError, SetupError
from optiml.kernel_file import write_kernel_text
from optiml.records import Comparison, Generated, Kernel, Level, Reason, SearchResult, Verdict
from optiml.show import (
    show_built_pairs,
    show_checks,
    show_generate_bench,
    show_generated,
    show_judgement,
    show_problem,
    show_problems,
    show_profile,
    show_report,
    show_result,
    show_runs,
    show_search_bench,
    show_skeleton,
    show_trained,
    show_verdict,
)

if TYPE_CHECKING:  # imported when a command needs it: `optiml --help` stays fast
    from optiml.mixture.training import Progress
    from optiml.workbench import SearchProgress, Workbench

LOG = logging.getLogger(__name__)
INTERRUPTED = 130
_COMMAND = "optiml.command"  # where a context keeps what follows `--`
_KERNEL_ID = re.compile(r"[0-9a-f]{16}")

app = typer.Typer(
    name="optiml",
    help="Turn a CUDA kernel or an intent into a verified, faster kernel, and say why it is faster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

KernelArgument = Annotated[str, typer.Argument(metavar="KERNEL", help="A .cu, .ptx or .json file, a kernel_id, or -.")]
ProblemOption = Annotated[
    str | None, typer.Option("--problem", metavar="P", help="A problem's name, a JSON or TOML file, or -.")
]
AxesOption = Annotated[str | None, typer.Option("--axes", metavar="R=4096,C=4096", help="Sizes to run at.")]
DtypeOption = Annotated[str | None, typer.Option("--dtype", help="Element type of a built-in problem.")]
DeviceOption = Annotated[
    str, typer.Option("--device", help="auto, emulator, emulator:a100, emulator:h100, emulator:h200 or cuda:N.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
TrustOption = Annotated[
    bool, typer.Option("--trust-reference", help="Run the problem's reference even where no sandbox can hold it.")
]
SeedOption = Annotated[int | None, typer.Option("--seed", min=0, help="The same seed gives the same answer.")]


def main() -> None:
    """Entry point of the `optiml` command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # µ and × on an ASCII terminal
    app(prog_name="optiml")


def open_bench(*, trust_reference: bool = False, allow_commands: bool = False) -> Workbench:
    """The workbench of this command; paths on the command line are the user's own, so any may be read."""
    from optiml.settings import read_settings  # here, so that `optiml --help` stays fast
    from optiml.workbench import Workbench

    settings = read_settings(
        trust_reference=trust_reference, allow_commands=allow_commands, roots=(Path.cwd(), Path("/"))
    )
    for warning in settings.warnings:
        _note(f"warning: {warning}")
    return Workbench(settings)


# --- commands --------------------------------------------------------------------------------------------------------
@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Say what this machine can do, and the command that fixes each gap."""
    with _errors_reported(as_json), open_bench() as bench:
        _finish(bench.doctor(), show_checks, as_json)


@app.command()
def problems(
    name: Annotated[str | None, typer.Argument(help="Show this one in full.")] = None, as_json: JsonOption = False
) -> None:
    """List the built-in problems, or show one."""
    from optiml.problems.problem import builtin_names, load_builtin  # numpy comes with it

    with _errors_reported(as_json):
        if name is not None:
            _finish(load_builtin(name).problem, show_problem, as_json)
        _finish([load_builtin(item) for item in builtin_names()], show_problems, as_json, of_json=_listed)


@app.command()
def generate(
    text: Annotated[str | None, typer.Argument(help='Plain English, such as "fp16 softmax over rows of 4096".')] = None,
    problem: ProblemOption = None,
    axes: AxesOption = None,
    dtype: DtypeOption = None,
    generator: Annotated[str, typer.Option(help="auto, catalogue, mixture, text_mixture or chat.")] = "auto",
    count: Annotated[int, typer.Option(min=1, max=64, help="Kernels wanted.")] = 1,
    device: DeviceOption = "auto",
    verify: Annotated[bool, typer.Option(help="Check each kernel.")] = True,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the first kernel to this file.")] = None,
    trust_reference: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Generate verified kernels for an intent or a problem."""
    with _errors_reported(as_json), open_bench(trust_reference=trust_reference) as bench:
        if text is None and problem is None:
            raise InvalidInput("nothing to generate: give TEXT or --problem")
        generated = bench.generate(
            text,
            None if problem is None else read_problem(problem),
            axes=parse_axes(axes),
            dtype=dtype,
            count=count,
            generator=generator,
            verify=verify,
            device=device,
        )
        if output is not None and generated.candidates:
            _write(output, write_kernel_text(generated.candidates[0].kernel))
        _finish(generated, show_generated, as_json, status=_status_of_generated(generated))


@app.command()
def verify(
    kernel: KernelArgument,
    problem: ProblemOption = None,
    level: Annotated[Level, typer.Option(help="How thorough.")] = "L1",
    axes: AxesOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = "auto",
    arch: Annotated[str | None, typer.Option(help="Such as sm_90; default: the device's.")] = None,
    seed: SeedOption = None,
    trust_reference: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check KERNEL against a problem's reference. Exit 0 accepted, 1 rejected, 2 unverified."""
    with _errors_reported(as_json), open_bench(trust_reference=trust_reference) as bench:
        if problem is None:
            _finish(_unverified(bench, kernel), show_skeleton, as_json, status=2)
        verdict = bench.verify(
            read_kernel(kernel),
            read_problem(problem),
            level=level,
            axes=parse_axes(axes),
            dtype=dtype,
            device=device,
            arch=arch,
            seed=seed,
        )
        _finish(verdict, show_verdict, as_json, status=_status_of_verdict(verdict))


class _WithCommand(TyperCommand):
    """A command that takes everything after `--` as somebody's program, also what looks like an option of ours."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            here = args.index("--")
            ctx.meta[_COMMAND] = args[here + 1 :]
            args = args[:here]
        return super().parse_args(ctx, args)


@app.command(cls=_WithCommand)
def profile(
    context: typer.Context,
    kernel: Annotated[str | None, typer.Argument(metavar="KERNEL", help="A file, a kernel_id, or -.")] = None,
    problem: ProblemOption = None,
    baseline: Annotated[str | None, typer.Option(metavar="KERNEL", help="Also compare with this kernel.")] = None,
    report: Annotated[Path | None, typer.Option(help="An .ncu-rep file to read instead.")] = None,
    axes: AxesOption = None,
    dtype: DtypeOption = None,
    metrics: Annotated[str | None, typer.Option(help="Nsight Compute names, with commas.")] = None,
    kernel_regex: Annotated[str | None, typer.Option(help="With --report or a command: which kernels.")] = None,
    launch_skip: Annotated[int | None, typer.Option(min=0, help="With these: launches to skip.")] = None,
    launch_count: Annotated[int | None, typer.Option(min=1, help="With these: launches to take.")] = None,
    device: DeviceOption = "auto",
    trust_reference: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Time, counters, bottleneck and hot lines of an accepted KERNEL, of a report, or of a program (-- COMMAND ...)."""
    command: list[str] | None = context.meta.get(_COMMAND)
    rights = {"trust_reference": trust_reference, "allow_commands": command is not None}
    with _errors_reported(as_json), open_bench(**rights) as bench:
        names = None if metrics is None else tuple(metrics.split(","))
        if report is not None or command is not None:
            if kernel is not None or problem is not None or baseline is not None or (report and command):
                raise InvalidInput("give KERNEL and --problem, or --report FILE, or -- COMMAND: only one of them")
            elsewhere: dict[str, Any] = {
                "metrics": names, "kernel_regex": kernel_regex, "launch_skip": launch_skip, "launch_count": launch_count
            }  # fmt: skip
            if command is not None:
                _finish(bench.profile_command(command, **elsewhere), show_report, as_json)
            _finish(bench.profile_report(str(Path(str(report)).absolute()), **elsewhere), show_report, as_json)
        if kernel is None:
            raise InvalidInput("nothing to profile: give KERNEL and --problem, or --report FILE, or -- COMMAND")
        found = bench.profile(
            read_kernel(kernel),
            read_problem(_needed(problem)),
            baseline=None if baseline is None else read_kernel(baseline),
            axes=parse_axes(axes),
            dtype=dtype,
            metrics=names,
            device=device,
        )
        _finish(found, show_profile, as_json)


@app.command()
def compare(
    new: Annotated[str, typer.Argument(metavar="NEW", help="The kernel that should be faster.")],
    old: Annotated[str, typer.Argument(metavar="OLD", help="The kernel to compare it with.")],
    problem: ProblemOption = None,
    axes: AxesOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = "auto",
    trust_reference: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare two kernels. Exit 0 faster or same, 1 slower or rejected, 2 inconclusive or error."""
    with _errors_reported(as_json), open_bench(trust_reference=trust_reference) as bench:
        found = bench.compare(
            read_kernel(new),
            read_kernel(old),
            read_problem(_needed(problem)),
            axes=parse_axes(axes),
            dtype=dtype,
            device=device,
        )
        _finish(found, show_profile, as_json, status=_status_of_comparison(found.comparison))


@app.command()
def judge(
    before: Annotated[str, typer.Argument(metavar="BEFORE", help="The kernel as it is.")],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="The edited kernel, or a .diff of it.")],
    problem: ProblemOption = None,
    judged_by: Annotated[str, typer.Option("--judge", help="rules, or a model: chat.")] = "rules",
    device: DeviceOption = "auto",
    trust_reference: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Judge an edit before it is measured."""
    with _errors_reported(as_json), open_bench(trust_reference=trust_reference) as bench:
        old = read_kernel(before)
        new = {"base": old, "diff": _read_text(after)} if after.endswith((".diff", ".patch")) else read_kernel(after)
        found = bench.judge(read_problem(_needed(problem)), old, new, judge=judged_by, device=device)
        _finish(found, show_judgement, as_json)


@app.command()
def search(
    kernel: Annotated[str | None, typer.Argument(metavar="[KERNEL]", help="Default: the problem's naive one.")] = None,
    problem: ProblemOption = None,
    intent: Annotated[str | None, typer.Option(help="Plain English, in place of --problem.")] = None,
    evaluations: Annotated[int, typer.Option(min=1, help="Kernels to try.")] = 40,
    seconds: Annotated[float | None, typer.Option(min=1, help="Also stop after so many seconds.")] = None,
    seed: SeedOption = None,
    proposer: Annotated[str, typer.Option(help="builtin, or a model: chat, text_mixture, mixture.")] = "builtin",
    judge: Annotated[str, typer.Option(help="rules, or a model: chat.")] = "rules",
    edits: Annotated[str | None, typer.Option(help="Only these kinds of edit, with commas.")] = None,
    catalogue: Annotated[bool, typer.Option(help="Also try the catalogue's strategies.")] = True,
    axes: AxesOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = "auto",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the best kernel to this file.")] = None,
    resume: Annotated[str | None, typer.Option(metavar="RUN_ID", help="Go on with a search.")] = None,
    trust_reference: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Search for a faster kernel. Ctrl-C stops it; --resume goes on with it."""
    with _errors_reported(as_json), open_bench(trust_reference=trust_reference) as bench:
        if resume is None:
            if problem is None and intent is None:
                raise InvalidInput("nothing to search for: give --problem, --intent or --resume")
            resume = bench.start_search(
                None if problem is None else read_problem(problem),
                None if kernel is None else read_kernel(kernel),
                intent=intent,
                axes=parse_axes(axes),
                dtype=dtype,
                evaluations=evaluations,
                seconds=seconds,
                proposer=proposer,
                judge=judge,
                device=device,
                seed=seed,
                edits=None if edits is None else tuple(edits.split(",")),
                catalogue=catalogue,
            )
        with _stopped_by_interrupt() as stopped, _progress_shown() as shown:
            result = bench.run_search(resume, on_progress=shown, should_stop=stopped)
        if output is not None and result.best is not None and result.best.verdict.status == "accepted":
            _write(output, write_kernel_text(result.best.kernel))
        if stopped():
            _note(f"interrupted; go on with: optiml search --resume {resume}")
        _finish(result, show_result, as_json, status=INTERRUPTED if stopped() else _status_of_result(result))


@app.command()
def runs(
    run_id: Annotated[str | None, typer.Argument(metavar="[RUN_ID]", help="Show this one's result.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the searches, or show one."""
    with _errors_reported(as_json), open_bench() as bench:
        if run_id is None:
            _finish(bench.runs(), show_runs, as_json)
        _finish(bench.search_result(run_id), show_result, as_json)


@app.command()
def report(
    run_id: Annotated[str, typer.Argument(metavar="RUN_ID")],
    as_json: JsonOption = False,
) -> None:
    """Print the report of a search as Markdown."""
    with _errors_reported(as_json), open_bench() as bench:
        text = bench.report(run_id)
        if as_json:
            _finish({"run_id": run_id, "report": text}, show_runs, as_json)
        typer.echo(text)


bench_app = typer.Typer(help="Measure the generators and the search.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench_app, name="bench")
EvaluationsOption = Annotated[int, typer.Option(min=1, help="Kernels to try in each search.")]
ProposerOption = Annotated[str, typer.Option(help="builtin, or a model: chat, text_mixture, mixture.")]
FileOption = Annotated[Path | None, typer.Option("-o", "--output", help="Also write the JSON to this file.")]


@bench_app.command("generate")
def bench_generate(
    arms: Annotated[str | None, typer.Option(help="Only these, with commas; default: all.")] = None,
    samples: Annotated[int, typer.Option(min=1, max=100, help="Texts of each model for each prompt.")] = 1,
    prompts: Annotated[str | None, typer.Option(help="Only the prompts of these ids, with commas.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: DeviceOption = "auto",
    output: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """How often each generator writes a kernel that builds and is right: build@k and pass@k over the prompts."""
    from optiml.bench.generate import ARMS, bench_generate
    from optiml.bench.prompts import load_prompts

    with _errors_reported(as_json), open_bench() as bench:
        wanted = None if prompts is None else set(prompts.split(","))
        chosen = tuple(item for item in load_prompts() if wanted is None or item.id in wanted)
        found = bench_generate(
            bench,
            chosen,
            arms=ARMS if arms is None else tuple(arms.split(",")),
            samples=samples,
            seed=seed,
            device=device,
            on_progress=_note,
        )
        _written_too(output, found)
        _finish(found, show_generate_bench, as_json)


@bench_app.command("search")
def bench_search(
    problems: Annotated[str | None, typer.Option(help="Only these, with commas; default: all built-in ones.")] = None,
    evaluations: EvaluationsOption = 24,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    proposer: ProposerOption = "builtin",
    device: DeviceOption = "auto",
    output: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """How much faster the search makes the naive kernel of each problem."""
    from optiml.bench.search import bench_search

    with _errors_reported(as_json), open_bench() as bench:
        found = bench_search(
            bench,
            problems=None if problems is None else tuple(problems.split(",")),
            evaluations=evaluations,
            seed=seed,
            proposer=proposer,
            device=device,
            on_progress=_note,
        )
        _written_too(output, found)
        _finish(found, show_search_bench, as_json)


@bench_app.command("suite")
def bench_suite(
    evaluations: EvaluationsOption = 24,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    proposer: ProposerOption = "builtin",
    device: DeviceOption = "auto",
    output: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """From an intent to a searched kernel, for kernels that papers report."""
    from optiml.bench.search import bench_suite

    with _errors_reported(as_json), open_bench() as bench:
        found = bench_suite(
            bench, evaluations=evaluations, seed=seed, proposer=proposer, device=device, on_progress=_note
        )
        _written_too(output, found)
        _finish(found, show_search_bench, as_json)


def _written_too(path: Path | None, answer: Any) -> None:
    if path is not None:
        _write(path, json.dumps(encode(answer), indent=1) + "\n")


@app.command("train-mixture")
def train_mixture(
    data: Annotated[Path, typer.Argument(metavar="PAIRS.jsonl", help="Pairs of intent and kernel, one per line.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder of the checkpoint.")] = None,
    build: Annotated[bool, typer.Option("--build", help="Write PAIRS.jsonl from the catalogue first.")] = False,
    only: Annotated[str | None, typer.Option(help="With --build: only these problems, with commas.")] = None,
    dtypes: Annotated[str | None, typer.Option(help="With --build: only these element types, with commas.")] = None,
    variants: Annotated[int, typer.Option(min=1, help="With --build: settings of each kernel's tunables.")] = 2,
    intents: Annotated[int, typer.Option(min=1, help="With --build: paraphrases of each kernel's intent.")] = 4,
    hold_out: Annotated[str | None, typer.Option(help="Families of operators to measure on, with commas.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps in all; more than before goes on.")] = 1000,
    batch: Annotated[int, typer.Option(min=1, help="Pairs in one pass.")] = 4,
    accumulate: Annotated[int, typer.Option(min=1, help="Passes in one step.")] = 2,
    learning_rate: Annotated[float, typer.Option(help="At its highest.")] = 3e-4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longer pairs are left out.")] = 2048,
    shared_width: Annotated[int, typer.Option(min=1, help="Width in which experts meet.")] = 256,
    seed: SeedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train the experts of [mixture] to write kernels together. Ctrl-C saves; the same command goes on."""
    with _errors_reported(as_json), open_bench() as bench, _stopped_by_interrupt() as stopped:
        if build:
            built = bench.build_pairs(
                data,
                problems=_names(only),
                dtypes=_names(dtypes),
                variants=variants,
                intents=intents,
                seed=seed or 0,
                on_pair=lambda pair: _note(f"{pair.kernel_id}  {pair.intent}"),
                should_stop=stopped,
            )
            if output is None or stopped():
                _finish(built, show_built_pairs, as_json, status=INTERRUPTED if stopped() else 0)
        if output is None:
            raise InvalidInput("nothing to do: give --output, the folder of the checkpoint, or --build")
        trained = bench.train_mixture(
            data,
            output,
            held_out=_names(hold_out) or (),
            steps=steps,
            batch=batch,
            accumulate=accumulate,
            learning_rate=learning_rate,
            max_tokens=max_tokens,
            shared_width=shared_width,
            seed=seed or 0,
            on_progress=_note_step,
            should_stop=stopped,
        )
        _finish(trained, show_trained, as_json, status=INTERRUPTED if trained.step < trained.steps else 0)


def _note_step(now: Progress) -> None:
    measured = "".join(f"  {name} {value:.4f}" for name, value in (now.held_out or {}).items())
    _note(f"{now.step}/{now.steps}  loss {now.loss:.4f}{measured}")


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(name.strip() for name in text.split(","))


@app.command()
def serve(
    http: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Serve HTTP instead of stdio.")] = None,
    root: Annotated[
        list[Path] | None, typer.Option(help="Folder whose files callers may name; default: the working folder.")
    ] = None,
    allow_commands: Annotated[bool, typer.Option(help="Let profile_ncu run commands.")] = False,
    trust_reference: TrustOption = False,
    log: Annotated[str, typer.Option(help="Form of the log on stderr: text or json.")] = "text",
    log_level: Annotated[str, typer.Option(help="debug, info (a line for each call), warning or error.")] = "warning",
    print_config: Annotated[
        str | None,
        typer.Option(metavar="CLIENT", help="Print the configuration for claude-code, codex, cursor, vscode."),
    ] = None,
) -> None:
    """Serve the five tools over MCP, on stdin and stdout unless --http is given."""
    from optiml_mcp.__main__ import client_config, serve_with  # the SDK takes most of a second

    with _errors_reported(as_json=False):
        if print_config is not None:
            place, text = client_config(print_config)
            _note(f"for {place}:")
            typer.echo(text)
            return
        serve_with(
            http=http,
            roots=root,
            allow_commands=allow_commands,
            trust_reference=trust_reference,
            log=log,
            log_level=log_level,
        )


# --- reading what the user named -------------------------------------------------------------------------------------
def read_kernel(text: str) -> str | dict[str, Any]:
    """A kernel as the workbench takes it, from a file, an id, or `-` for stdin.

    Raises:
        InvalidInput: neither a file nor an id, too large, or not UTF-8.
    """
    if text != "-" and not Path(text).exists() and _KERNEL_ID.fullmatch(text):
        return text
    content = _read_text(text)
    if text.endswith(".json") or (text == "-" and content.lstrip().startswith("{")):
        return _parsed(json.loads, content, text)
    return {"source": content, "language": "ptx"} if text.endswith(".ptx") else content


def read_problem(text: str) -> str | dict[str, Any]:
    """A problem as the workbench takes it, from a name, a JSON or TOML file, or `-` for stdin.

    Raises:
        InvalidInput: the file is too large, not UTF-8, or neither JSON nor TOML.
    """
    if text != "-" and not text.endswith((".json", ".toml")):
        if "." in text or "/" in text:
            raise InvalidInput(f"--problem: {text[:200]} is neither a built-in name nor a .json or .toml file")
        return text
    content = _read_text(text)
    if not text.endswith(".toml") and (text != "-" or content.lstrip().startswith("{")):
        return _parsed(json.loads, content, text)
    problem = _parsed(tomllib.loads, content, text)
    inputs = problem.get("inputs")
    for tensor in inputs.values() if isinstance(inputs, dict) else ():
        if isinstance(tensor, dict):
            tensor.setdefault("shape", None)  # TOML has no null: an input without a shape is a scalar
    return problem


def parse_axes(text: str | None) -> dict[str, int] | None:
    """`R=4096,C=4096` as a mapping.

    Raises:
        InvalidInput: a part is not NAME=INTEGER.
    """
    if text is None:
        return None
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not re.fullmatch(r"\d{1,19}", size.strip()) or not name.strip():
            raise InvalidInput(f"--axes: {part[:60]!r} is not NAME=SIZE: write R=4096,C=4096")
        axes[name.strip()] = int(size)
    return axes


def _read_text(name: str) -> str:
    try:
        if name == "-":
            raw = b"" if sys.stdin is None else sys.stdin.buffer.read(MAX_SOURCE_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                raw = file.read(MAX_SOURCE_BYTES + 1)
    except OSError as error:
        hint = "" if "." in name or "/" in name else " and no kernel_id"
        raise InvalidInput(f"{name[:200]} cannot be read ({error.strerror}){hint}: name a file") from error
    if len(raw) > MAX_SOURCE_BYTES:
        raise InvalidInput(f"{name[:200]} is larger than {MAX_SOURCE_BYTES} bytes: shorten it", code="too_large")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{name[:200]} is not UTF-8 at byte {error.start}: save it as UTF-8") from error


def _parsed(parse: Callable[[str], Any], content: str, name: str) -> dict[str, Any]:
    try:
        data = parse(content)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{name[:200]} cannot be parsed: {error}") from error
    if not isinstance(data, dict):
        raise InvalidInput(f"{name[:200]} holds no object: give one with named fields")
    return data


def _unverified(bench: Workbench, name: str) -> dict[str, Any]:
    """The verdict on a kernel of which nobody said what it should compute, with a first draft of that."""
    from optiml.problems.skeleton import problem_skeleton  # only here
    from optiml.toolchain.signatures import host_parameters, kernel_signatures

    kernel = bench.kernel(read_kernel(name), None)
    warnings = []
    if kernel.language == "cuda" and host_parameters(kernel.source, "main") is not None:
        try:
            return _imported(bench, kernel, name)
        except (SetupError, InvalidInput) as error:
            warnings = [f"the program was not run to see its launches: {error}"]
    found = kernel_signatures(kernel.source) if kernel.language == "cuda" else ()
    held = f"{len(found)} kernel{'' if len(found) == 1 else 's'}"
    return {
        "kernel_id": kernel_id(kernel),
        "status": "unverified",
        "reason": None,
        "detail": "no problem was given, so nothing says what the kernel should compute",
        "levels": [],
        "summary": f"Unverified: {name} holds {held}, but no problem says what is right.",
        "next_action": "Complete a skeleton, save it as problem.json, and verify with --problem problem.json.",
        "warnings": warnings,
        "problem_skeletons": [problem_skeleton(item.name, item.parameters) for item in found],
    }


def _imported(bench: Workbench, program: Kernel, name: str) -> dict[str, Any]:
    """The verdict on a whole program: what it was seen to do, as a problem and a kernel to complete."""
    found = bench.import_program(program)
    return {
        "kernel_id": kernel_id(program if found.kernel is None else found.kernel),
        "status": "unverified",
        "reason": None,
        "detail": "a program says what it launches, but not what the results should be",
        "levels": [],
        "summary": f"Unverified: {name} is a whole program; its launches were recorded, but no problem says what is "
        "right.",
        "next_action": "Write the reference into the problem, save it as problem.json and the kernel as kernel.cu, "
        "then: optiml verify kernel.cu --problem problem.json",
        "warnings": list(found.notes),
        "problem_skeletons": [found.problem],
        "kernel": None if found.kernel is None else write_kernel_text(found.kernel),
    }


def _needed(problem: str | None) -> str:
    if problem is None:
        raise InvalidInput("--problem is missing: give a name (optiml problems lists them) or a JSON or TOML file")
    return problem


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written ({error.strerror}): choose another file") from error


# --- answering -------------------------------------------------------------------------------------------------------
def _finish(
    answer: Any,
    show: Callable[[Any], None],
    as_json: bool,
    *,
    status: int = 0,
    of_json: Callable[[Any], Any] = encode,
) -> NoReturn:
    """Print the answer and leave with its exit status."""
    try:
        if as_json:
            _print_json(of_json(answer))
        else:
            show(answer)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the interpreter's last flush has somewhere to go
        if not isinstance(error, BrokenPipeError):  # a reader that has seen enough is no fault
            _note(f"internal: the answer could not be written ({error.strerror}): free some space")
            status = 2
    raise typer.Exit(status)


def _print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2))


def _note(text: str) -> None:
    typer.echo(f"optiml: {text}", err=True)


@contextlib.contextmanager
def _errors_reported(as_json: bool) -> Iterator[None]:
    """Anticipated errors become one line on stderr (and the JSON document, where one was asked for)."""
    try:
        yield
    except OptimlError as error:
        _note(f"{error.code}: {error}")
        if as_json:
            _print_json({"error": {"code": error.code, "message": str(error)}})
        raise typer.Exit(_status_of_error(error)) from error
    except KeyboardInterrupt:
        _note("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except typer.Exit:
        raise
    except Exception as error:
        # Left to Python, a defect of ours would exit with 1, which says that a kernel was rejected.
        LOG.exception("a defect of OptiML, please report it")
        if as_json:
            _print_json({"error": {"code": "internal", "message": f"a defect of OptiML: {type(error).__name__}"}})
        raise typer.Exit(2) from error


def _status_of_error(error: OptimlError) -> int:
    """1 where a stage refused a kernel because it is wrong, 2 for every other error."""
    reason = str(error).split(":")[0]
    return 1 if isinstance(error, NotAccepted) and reason in get_args(Reason) and reason != "problem_degenerate" else 2


def _status_of_verdict(verdict: Verdict) -> int:
    return {"accepted": 0, "rejected": 1, "unverified": 2}[verdict.status]


def _status_of_comparison(comparison: Comparison | None) -> int:
    return 2 if comparison is None else {"faster": 0, "same": 0, "slower": 1, "inconclusive": 2}[comparison.verdict]


def _status_of_generated(generated: Generated) -> int:
    """That of the best candidate; 0 where verification was not asked for, 2 where there is no kernel."""
    if not generated.candidates:
        return 2
    return min(0 if item.verdict is None else _status_of_verdict(item.verdict) for item in generated.candidates)


def _status_of_result(result: SearchResult) -> int:
    if result.status == "finished" and result.best is not None:
        return _status_of_verdict(result.best.verdict)
    return 2


def _listed(builtins: Any) -> list[dict[str, Any]]:
    return [
        {
            "name": item.name,
            "description": item.problem.description,
            "dtypes": list(item.dtypes),
            "axes": encode(item.problem.axes),
            "inputs": encode(item.problem.inputs),
            "outputs": encode(item.problem.outputs),
        }
        for item in builtins
    ]


# --- searching in the foreground -------------------------------------------------------------------------------------
@contextlib.contextmanager
def _stopped_by_interrupt() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C (or SIGTERM) asks the search to stop at its next step; the second ends the command."""
    stop = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal stop
        if stop:
            raise KeyboardInterrupt
        stop = True
        _note("stopping after this kernel; once more to stop at once")

    earlier = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: stop
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _progress_shown() -> Iterator[Callable[[SearchProgress], None]]:
    """A live bar on a terminal, one plain line per kernel elsewhere; both on stderr."""
    if not sys.stderr.isatty():
        yield lambda now: typer.echo(
            f"{now.evaluations}/{now.budget}  best {now.best_speedup:.2f}x  {now.last}", err=True
        )
        return
    from rich.console import Console  # only where there is a terminal to draw on
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("best {task.fields[best]:.2f}x", markup=False),
        TimeElapsedColumn(),
        TextColumn("{task.fields[last]}", markup=False),
        console=Console(stderr=True, markup=False),
    ) as bar:
        task = bar.add_task("search", total=None, best=1.0, last="starting")
        yield lambda now: bar.update(
            task, completed=now.evaluations, total=now.budget, best=now.best_speedup, last=now.last
        )
