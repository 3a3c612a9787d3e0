"""Records as text for a person at a terminal: one `show_<record>` per answer of the command line.

Plain aligned columns, no boxes, nothing cut; colours only on a terminal.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from optiml.errors import Fault
from optiml.kernel_file import write_kernel_text
from optiml.records import (
    BuildReport,
    CaseResult,
    Comparison,
    DeviceInfo,
    Generated,
    Judgement,
    Mismatch,
    NsightReport,
    PathStep,
    Problem,
    Profile,
    SearchResult,
    Tensor,
    Verdict,
)

if TYPE_CHECKING:  # numpy comes with both; `optiml --help` stays fast
    from optiml.bench.generate import GenerateBench, Rates
    from optiml.bench.search import SearchBench
    from optiml.mixture.run import BuiltPairs, Trained
    from optiml.problems.problem import Builtin
    from optiml.workbench import Check, RunSummary

COLOURS = {
    "accepted": "bold green",
    "faster": "bold green",
    "finished": "bold green",
    "ok": "green",
    "try": "bold green",
    "same": "cyan",
    "rejected": "bold red",
    "slower": "bold red",
    "failed": "bold red",
    "missing": "red",
    "reject": "bold red",
    "unverified": "yellow",
    "inconclusive": "yellow",
    "warn": "yellow",
}
COMMANDS = {  # advice speaks of the tools; at a terminal they are commands
    "compile_verify": "optiml verify",
    "profile_ncu": "optiml profile",
    "judge_patch": "optiml judge",
    "generate_kernel": "optiml generate",
    "run_mcts": "optiml search",
}
_TOOL = re.compile("|".join(COMMANDS))
_START = re.compile(r"run_mcts with action start, problem (\w+) and this kernel")
_STATUS = {"running": "unfinished"}  # whether some process works on it just now is not known
LEAST_ROOM = 24  # columns; text is not broken into less
INDENT = 4  # of a column that stands below the others
MOST_CASES = 40  # --json has them all


class _Terminal(Console):
    """rich would leave with status 1 when the reader goes; here that status means a rejected kernel."""

    def on_broken_pipe(self) -> None:
        """Let the command decide."""
        raise BrokenPipeError


def _console() -> Console:
    return _Terminal(highlight=False, markup=False, emoji=False)


def _line(*parts: str) -> None:
    """One line; words with a colour of their own get it."""
    text = Text()
    for index, part in enumerate(parts):
        text.append(("  " if index else "") + part, style=COLOURS.get(part, ""))
    _console().print(text, soft_wrap=True)


def _wrapped(text: str, indent: int) -> str:
    """On a terminal, text broken at spaces to stand from column `indent` on; elsewhere text as it is."""
    console = _console()
    room = console.width - indent
    if not console.is_terminal or len(text) <= room:
        return text
    below = room < LEAST_ROOM  # too little beside the other columns: on lines of its own
    if below:
        indent, room = INDENT, max(LEAST_ROOM, console.width - INDENT)
    lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
    return f"\n{'':{indent}}".join(["", *lines] if below else lines)


def _fields(rows: Iterable[tuple[str, str]]) -> None:
    """Aligned `name  value` lines; empty values are left out."""
    shown = [(name, value) for name, value in rows if value]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        _line(f"  {name:<{width}}", _wrapped(value, width + 4))


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Aligned columns; the last one is as long as it is."""
    lines = [tuple(titles), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    for number, line in enumerate(lines):
        text = Text(style="bold" if number == 0 else "")
        for cell, width in zip(line[:-1], widths, strict=False):
            text.append(f"{cell:<{width}}  ", style=COLOURS.get(cell, ""))
        text.append(_wrapped(line[-1], sum(widths[:-1]) + 2 * len(widths[:-1])), style=COLOURS.get(line[-1], ""))
        text.rstrip()
        _console().print(text, soft_wrap=True)


def _closing(next_action: str, warnings: Sequence[str]) -> None:
    for warning in warnings:
        _line(_wrapped(f"warning: {warning}", 0))
    if next_action:
        _line(_wrapped(f"next: {_TOOL.sub(lambda tool: COMMANDS[tool[0]], next_action)}", 0))


def _sizes(axes: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in axes.items())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


# --- one function per answer -----------------------------------------------------------------------------------------
def show_built_pairs(built: BuiltPairs) -> None:
    """A data set that was written."""
    _line(f"{built.pairs} pairs of {built.kernels} kernels in {built.path}; families: {', '.join(built.families)}")
    for line in built.refused:
        _line(f"left out  {line}")


def show_trained(trained: Trained) -> None:
    """A checkpoint, and what it is worth on the families that were held out."""
    _line(f"{trained.step} of {trained.steps} steps on {trained.pairs} pairs: {trained.checkpoint}")
    _line(f"experts: {', '.join(trained.experts)}")
    if trained.held_out:
        _line(f"loss on {trained.held_out_pairs} held-out pairs, nats per character:")
    for name, value in trained.held_out.items():
        _line(f"  {value:.4f}  {name}")


def show_checks(checks: Sequence[Check]) -> None:
    """What this machine can do, and below each gap the command that fixes it."""
    width = max(len(item.name) for item in checks)
    for item in checks:
        _line(item.state, f"{'':{7 - len(item.state)}}{item.name:<{width}}", item.detail)
        if item.fix:
            _line(f"{'':{11 + width}}to get it: {item.fix}")


def show_problems(builtins: Sequence[Builtin]) -> None:
    """The built-in problems as a table."""
    _table(
        ("problem", "axes", "dtypes", "computes"),
        [
            (item.name, " ".join(item.problem.axes), " ".join(item.dtypes), item.problem.description)
            for item in builtins
        ],
    )


def show_skeleton(unverified: Mapping[str, Any]) -> None:
    """What to complete before a kernel can be verified."""
    _line(unverified["status"], unverified["kernel_id"])
    _line(unverified["summary"])
    for skeleton in unverified["problem_skeletons"]:
        _source(json.dumps(skeleton, indent=2))
    if unverified.get("kernel") is not None:
        _source(unverified["kernel"])
    _closing(unverified["next_action"], unverified["warnings"])


def show_problem(problem: Problem) -> None:
    """One problem in full."""
    from optiml.problems.problem import describe_axis  # numpy comes with it

    _line(problem.name, problem.description)
    _fields([(f"axis {name}", describe_axis(axis)) for name, axis in problem.axes.items()])
    _fields([(f"input {name}", _tensor(tensor)) for name, tensor in problem.inputs.items()])
    _fields([(f"output {name}", _tensor(tensor)) for name, tensor in problem.outputs.items()])
    _fields(
        [
            ("constraints", ", ".join(problem.constraints)),
            ("flops", "" if problem.flops is None else str(problem.flops)),
            ("bytes", "" if problem.bytes is None else str(problem.bytes)),
            ("measured at", "; ".join(_sizes(item.axes) for item in problem.bench)),
            ("checked at", "; ".join(_sizes(item.axes) for item in problem.workloads) + " and hidden sizes"),
        ]
    )
    if isinstance(problem.reference, str):
        _line("reference:")
        _console().print(Text(problem.reference.rstrip()), soft_wrap=True)


def _tensor(tensor: Tensor) -> str:
    return tensor.dtype + (" scalar" if tensor.shape is None else f" [{', '.join(map(str, tensor.shape))}]")


def show_verdict(verdict: Verdict) -> None:
    """Whether a kernel is right, and if not what went wrong first."""
    _line(verdict.status, verdict.kernel_id, verdict.reason or "", " ".join(verdict.levels))
    _line(_wrapped(verdict.summary, 0))
    _fields(
        [
            ("detail", verdict.detail or ""),
            ("fault", "" if verdict.fault is None else _fault(verdict.fault)),
            ("mismatch", "" if verdict.first_mismatch is None else _mismatch(verdict.first_mismatch)),
            ("build", "" if verdict.build is None else _build(verdict.build)),
            ("device", "" if verdict.device is None else _device(verdict.device)),
            ("domain", verdict.domain),
            ("sanitizer", " ".join(f"{name}={state}" for name, state in (verdict.sanitizer or {}).items())),
            ("took", f"{verdict.seconds:.2f} s" + (" (cached)" if verdict.cached else "")),
        ]
    )
    if verdict.status != "accepted" and verdict.build is not None and verdict.build.log:
        _console().print(Text(verdict.build.log.rstrip()), soft_wrap=True)
    if verdict.cases:
        _cases(verdict.cases)
    _closing(verdict.next_action, verdict.warnings)


def _cases(cases: Sequence[CaseResult]) -> None:
    wrong_first = sorted(cases, key=lambda case: case.ok)
    _table(
        ("", "sizes", "data", "", "max error", "relative", "allowed"),
        [
            (
                "ok" if case.ok else "WRONG",
                _sizes(case.axes),
                " ".join(f"{name}:{kind}" for name, kind in case.distribution.items()),
                "hidden" if case.hidden else "",
                _number(case.max_abs_error),
                _number(case.max_rel_error),
                "" if case.tolerance is None else f"{case.tolerance.atol:.1e} + {case.tolerance.rtol:.1e} * |value|",
            )
            for case in wrong_first[:MOST_CASES]
        ],
    )
    if len(cases) > MOST_CASES:
        _line(f"... and {len(cases) - MOST_CASES} more cases; --json lists all")


def _mismatch(mismatch: Mismatch) -> str:
    index = ", ".join(map(str, mismatch.index))
    unwritten = ", never written" if mismatch.unwritten else ""
    return (
        f"{mismatch.output}[{index}] = {mismatch.actual}, expected {mismatch.expected}{unwritten} "
        f"(at {_sizes(mismatch.axes)})"
    )


def _fault(fault: Fault) -> str:
    parts = [fault.kind.replace("_", " ")]
    if fault.access is not None:
        parts.append(fault.access + ("" if fault.bytes is None else f" of {fault.bytes} bytes"))
    if fault.block is not None and fault.thread is not None:
        parts.append(f"block {fault.block} thread {fault.thread}")
    if fault.line is not None:
        parts.append(f"line {fault.line}")
    if fault.other is not None:
        parts.append(f"against block {fault.other.block} thread {fault.other.thread} line {fault.other.line}")
    return ", ".join(parts)


def _build(build: BuildReport) -> str:
    used = [
        ("registers", build.registers_per_thread),
        ("shared bytes", build.shared_bytes_per_block),
        ("spilled bytes", build.spill_bytes),
    ]
    figures = ", ".join(f"{value} {name}" for name, value in used if value is not None)
    return f"{build.arch}, {build.compiler}" + (f", {figures}" if figures else "")


def _device(device: DeviceInfo) -> str:
    return f"{device.name} ({device.arch})"


def show_profile(profile: Profile) -> None:
    """What a kernel costs and why; the comparison first where there is one."""
    if profile.comparison is not None:
        _comparison(profile.comparison)
    spread = "" if profile.time.p10_us is None else f" ({profile.time.p10_us:.2f} to {profile.time.p90_us:.2f})"
    _line(profile.kernel_id, f"{profile.time.median_us:.2f} us {profile.time.source}{spread}", _sizes(profile.axes))
    _line(_wrapped(profile.summary, 0))
    light, occupancy = profile.speed_of_light, profile.occupancy
    _fields(
        [
            ("bottleneck", profile.bottleneck.kind),
            *(("because", item) for item in profile.bottleneck.evidence),
            *(("advice", item) for item in profile.bottleneck.advice),
            ("occupancy", "" if occupancy is None else f"{occupancy.theoretical_pct:.0f} %, limit {occupancy.limiter}"),
            ("best possible", "" if light is None else f"{light.us:.2f} us by {light.bound}; at {light.pct:.0f} %"),
            ("conditions", ", ".join(f"{name} {value}" for name, value in profile.conditions.items())),
            *((f"baseline {name}", f"{value:.2f} us") for name, value in profile.baselines.items()),
        ]
    )
    if profile.hot_lines:
        _table(
            ("line", "share", "sectors/request", "source"),
            [
                (str(item.line), f"{item.share_pct:.0f} %", _number(item.sectors_per_request), item.source.strip())
                for item in profile.hot_lines
            ],
        )
    if profile.comparison is None:  # next to the changes the counts would say everything twice
        _table(
            ("metric", "value", "source"),
            [(name, _metric(value), profile.metric_source.get(name, "")) for name, value in profile.metrics.items()],
        )
    else:
        _line(f"{len(profile.metrics)} metrics of this kernel: --json lists them")
    _closing(profile.next_action, profile.warnings + (("answered from the cache",) if profile.cached else ()))


def show_report(report: NsightReport) -> None:
    """The kernels of an Nsight Compute report."""
    _line(report.summary)
    for kernel in report.kernels:
        _line()
        _line(kernel.name, "" if kernel.grid is None else f"grid {kernel.grid} block {kernel.block}")
        if kernel.bottleneck is not None:
            _fields(
                [
                    ("bottleneck", kernel.bottleneck.kind),
                    *(("because", item) for item in kernel.bottleneck.evidence),
                    *(("advice", item) for item in kernel.bottleneck.advice),
                ]
            )
        if kernel.hot_lines:
            _table(
                ("line", "share", "waiting for", "source"),
                [
                    (
                        f"{item.file}:{item.line}",
                        f"{item.share_pct:.0f} %",
                        ", ".join(f"{name} {share:.0f} %" for name, share in item.stalls.items()),
                        item.source,
                    )
                    for item in kernel.hot_lines
                ],
            )
        _fields((item.title or item.rule, item.message) for item in kernel.findings)
        present = [(name, _metric(value)) for name, value in kernel.metrics.items() if value is not None]
        _table(("metric", "value"), present)
    _closing(report.next_action, report.warnings)


def _metric(value: float | None) -> str:
    """Counts in full, everything else to six digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.6g}"


def _comparison(comparison: Comparison) -> None:
    interval = "" if comparison.ci95 is None else f" (95 %: {comparison.ci95[0]:.3f} to {comparison.ci95[1]:.3f})"
    _line(comparison.verdict, f"{comparison.ratio:.3f}x{interval}", comparison.source)
    _fields(("because", reason) for reason in comparison.reasons)
    if comparison.metric_changes:
        _table(
            ("metric", "new / old"),
            [(name, f"{change:.3f}") for name, change in comparison.metric_changes.items()],
        )


def show_judgement(judgement: Judgement) -> None:
    """An opinion on an edit."""
    _line(judgement.verdict, f"score {judgement.score:.2f}", f"by {judgement.judge}")
    _line(_wrapped(judgement.summary, 0))
    addresses = {True: "yes", False: "no", None: "cannot tell"}[judgement.addresses_diagnosis]
    _fields(
        [
            ("diagnosis", f"{judgement.diagnosis.kind}: {'; '.join(judgement.diagnosis.evidence)}"),
            ("addressed", addresses),
            *(("risk", risk) for risk in judgement.risks),
            *(
                ("expected", f"{item.metric} {item.direction}" + (f" x{item.factor:.3g}" if item.factor else ""))
                for item in judgement.expected
            ),
            *(
                (name.replace("_", " "), f"{_number(before)} -> {_number(after)}")
                for name, (before, after) in judgement.static_deltas.items()
            ),
        ]
    )
    for suggestion in judgement.suggestions:
        _line(f"suggestion: {suggestion.edit}: {suggestion.why}")
        if suggestion.patch:
            _console().print(Text(suggestion.patch.rstrip()), soft_wrap=True)
    _closing(judgement.next_action, judgement.warnings)


def show_generated(generated: Generated) -> None:
    """The kernels found, and the source of the first."""
    _line(_wrapped(generated.summary, 0))
    _fields(("assumed", item) for item in generated.assumed)
    if generated.candidates:
        _table(
            ("verdict", "kernel_id", "strategy", "by", "why"),
            [
                (
                    "not checked" if item.verdict is None else item.verdict.status,
                    item.kernel_id,
                    item.strategy,
                    item.generator,
                    item.rationale,
                )
                for item in generated.candidates
            ],
        )
        _source(write_kernel_text(generated.candidates[0].kernel))
    elif generated.template:
        _source(generated.template)
    _closing(_START.sub(_search_of(generated), generated.next_action), generated.warnings)


def _search_of(generated: Generated) -> str:
    """The command that searches on from the first kernel, at the dtype and sizes it was written for."""
    if generated.problem is None or not generated.candidates:
        return "optiml search"
    from optiml.problems.problem import main_dtype  # numpy comes with it

    problem = generated.problem
    sizes = ",".join(f"{name}={size}" for name, size in problem.bench[0].axes.items()) if problem.bench else ""
    return (
        f"optiml search {generated.candidates[0].kernel_id} --problem {problem.name} --dtype {main_dtype(problem)}"
        + (f" --axes {sizes}" if sizes else "")
    )


def _source(text: str) -> None:
    _console().print(Text("\n" + text.rstrip() + "\n"), soft_wrap=True)


def show_result(result: SearchResult) -> None:
    """The outcome of a search: the gain, the edits that led there and why each helped."""
    gain = "" if result.speedup is None else f"{result.speedup.median:.2f}x {result.speedup.source}"
    _line(_STATUS.get(result.status, result.status), result.run_id, result.problem, gain)
    _line(_wrapped(result.summary, 0))
    best = result.best
    _fields(
        [
            ("best", "" if best is None else f"{best.kernel_id} {best.verdict.status}"),
            ("levels", "" if best is None else " ".join(best.verdict.levels)),
            ("time", "" if best is None or best.profile is None else f"{best.profile.time.median_us:.2f} us"),
            (
                "started from",
                ""
                if result.baseline is None or result.baseline.profile is None
                else f"{result.baseline.kernel_id} {result.baseline.profile.time.median_us:.2f} us",
            ),
            (
                "spent",
                f"{result.spent.evaluations} kernels in {result.spent.seconds:.1f} s: "
                f"{result.spent.accepted} accepted, {result.spent.rejected} rejected, "
                f"{result.spent.duplicates} duplicates",
            ),
            ("seed", str(result.seed)),
            ("stopped", result.stopped_because or ""),
            ("written to", result.written_to or ""),
        ]
    )
    if result.path:
        _table(
            ("edit", "time", "reward", "why"),
            [_step(step) for step in result.path],
        )
    for sentence in result.explanation:
        _line(f"  {sentence}")
    if best is not None:
        _source(write_kernel_text(best.kernel))
    unfinished = f"Go on with: optiml search --resume {result.run_id}"
    _closing(unfinished if result.status == "running" else result.next_action, result.warnings)


def _step(step: PathStep) -> tuple[str, ...]:
    why = step.rationale if step.kept_because is None else f"{step.rationale}; kept because {step.kept_because}"
    return step.edit, f"{step.time_ratio:.2f}x", f"{step.reward.total:.2f}", why


def show_runs(runs: Sequence[RunSummary]) -> None:
    """The searches of this machine."""
    if not runs:
        _line("no searches yet; start one with: optiml search --problem softmax")
        return
    _table(
        ("run", "status", "problem", "tried", "best", "started"),
        [
            (
                item.run_id,
                _STATUS.get(item.status, item.status),
                item.problem,
                f"{item.evaluations}/{item.budget}",
                "-" if item.best_speedup is None else f"{item.best_speedup:.2f}x",
                str(item.started),
            )
            for item in runs
        ],
    )


def show_generate_bench(found: GenerateBench) -> None:
    """build@1 and pass@k of every arm, and the paired differences."""
    _line(
        f"{found.prompts} prompts, {found.inside} of them in the catalogue; {found.samples} texts of each model; "
        f"judged on {found.device}"
    )
    _table(
        ("arm", "status", "build@1", "pass@1", "95 %", "in catalogue", "outside", "wrong", "refused"),
        [
            (
                item.arm,
                item.status if item.why is None else f"{item.status}: {item.why}",
                *_rate_cells(item.every),
                _rate(None if item.inside is None else item.inside.pass_at["1"]),
                _rate(None if item.outside is None else item.outside.pass_at["1"]),
                str(item.wrong_problems),
                str(item.refused),
            )
            for item in found.arms
        ],
    )
    for arm in found.arms:
        if arm.counted and arm.texts != 1:
            _line(f"{arm.arm}: {arm.counted}")
    for item in found.differences:
        _line(f"{item.first} - {item.second}: {item.mean:+.3f}, 95 % {item.ci95[0]:+.3f} to {item.ci95[1]:+.3f}")


def _rate_cells(rates: Rates | None) -> tuple[str, str, str]:
    if rates is None:
        return "-", "-", "-"
    low_high = rates.pass_at_1_ci95
    between = "-" if low_high is None else f"{low_high[0]:.2f}-{low_high[1]:.2f}"
    return _rate(rates.build_at["1"]), _rate(rates.pass_at["1"]), between


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def show_search_bench(found: SearchBench) -> None:
    """The speed-up of each search, and their geometric mean."""
    _table(
        ("problem", "from", "before us", "after us", "speed-up", "tried", "steps"),
        [
            (
                row.problem,
                row.start,
                "-" if row.before_us is None else f"{row.before_us:.4g}",
                "-" if row.after_us is None else f"{row.after_us:.4g}",
                row.status if row.speedup is None else f"{row.speedup:.2f}x {row.source}",
                str(row.evaluations),
                " > ".join(row.path) or "none",
            )
            for row in found.rows
        ],
    )
    if found.geometric_mean is not None:
        _line(f"geometric mean {found.geometric_mean:.2f}x on {found.device}, seed {found.seed}")
