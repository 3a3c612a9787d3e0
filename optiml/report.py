"""A search result as Markdown or as one HTML page. It computes nothing: every figure stands in the result."""

from __future__ import annotations

import html as escape
from collections.abc import Iterable, Sequence

from optiml.codec import encode
from optiml.diffs import make_diff
from optiml.records import Evaluated, Kernel, PathStep, Profile, SearchResult

# Metrics of the before/after table, where a profile has them; a path step's own changes are cut to SHOWN_CHANGES.
SHOWN_METRICS = (
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "lts__t_sectors.sum",
    "lts__t_sectors_op_atom.sum",
    "dram__bytes.sum",
    "smsp__inst_executed.sum",
    "launch__registers_per_thread",
    "launch__shared_mem_per_block",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)
SHOWN_CHANGES = 3

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a}"
    "table{border-collapse:collapse;margin:.5rem 0}td,th{border:1px solid #ccc;padding:.25rem .6rem;text-align:left;"
    "vertical-align:top}td.n{text-align:right;font-variant-numeric:tabular-nums}"
    "pre{background:#f6f6f6;padding:.7rem;overflow:auto}.a{color:#05630c}.d{color:#a3120a}"
)


# --- Markdown --------------------------------------------------------------------------------------------------------
def markdown(result: SearchResult) -> str:
    """The report as Markdown."""
    parts = [f"# {_title(result)}", "", result.summary, ""]
    if result.path:
        parts += ["## Path", "", *_markdown_table(_PATH_HEAD, _path_rows(result.path)), ""]
        parts += [line for step in result.path for line in _kept(step)]
    if result.explanation:
        parts += ["## Why it is faster", "", *(f"- {sentence}" for sentence in result.explanation), ""]
    metrics = _metric_rows(result)
    if metrics:
        parts += ["## Metrics", "", *_markdown_table(("Metric", "Before", "After"), metrics), ""]
    diff = _diff(result)
    if diff:
        parts += ["## Change", "", "```diff", *diff, "```", ""]
    plan = _plan_rows(result)
    if plan:
        parts += ["## Launch plan", "", *_markdown_table(("", "Before", "After"), plan), ""]
    parts += ["## Verdict", "", *(f"- {line}" for line in _verdict_lines(result)), ""]
    parts += ["## Conditions", "", *(f"- {line}" for line in _condition_lines(result)), ""]
    return "\n".join(parts)


def _markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return lines + [
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows
    ]


# --- HTML ------------------------------------------------------------------------------------------------------------
def html(result: SearchResult) -> str:
    """The report as one HTML page that loads nothing."""
    title = _escaped(_title(result))
    parts = [f"<h1>{title}</h1>", f"<p>{_escaped(result.summary)}</p>"]
    if result.path:
        parts += ["<h2>Path</h2>", _html_table(_PATH_HEAD, _path_rows(result.path))]
        parts += [f"<p>{_escaped(line.removeprefix('- '))}</p>" for step in result.path for line in _kept(step) if line]
    if result.explanation:
        parts += ["<h2>Why it is faster</h2>", _html_list(result.explanation)]
    metrics = _metric_rows(result)
    if metrics:
        parts += ["<h2>Metrics</h2>", _html_table(("Metric", "Before", "After"), metrics)]
    diff = _diff(result)
    if diff:
        parts += ["<h2>Change</h2>", "<pre>" + "\n".join(_coloured(line) for line in diff) + "</pre>"]
    plan = _plan_rows(result)
    if plan:
        parts += ["<h2>Launch plan</h2>", _html_table(("", "Before", "After"), plan)]
    parts += ["<h2>Verdict</h2>", _html_list(_verdict_lines(result))]
    parts += ["<h2>Conditions</h2>", _html_list(_condition_lines(result))]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{_escaped(cell)}</th>" for cell in head)
    lines = "".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>\n" for row in rows)
    return f"<table><tr>{top}</tr>\n{lines}</table>"


def _cell(text: str) -> str:
    numeric = text[:1].isdigit()
    return f'<td class="n">{_escaped(text)}</td>' if numeric else f"<td>{_escaped(text)}</td>"


def _html_list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{_escaped(item)}</li>" for item in items) + "</ul>"


def _coloured(line: str) -> str:
    kind = "a" if line.startswith("+") else "d" if line.startswith("-") else ""
    return f'<span class="{kind}">{_escaped(line)}</span>' if kind else _escaped(line)


def _escaped(text: str) -> str:
    return escape.escape(text, quote=True)


# --- what both show --------------------------------------------------------------------------------------------------
_PATH_HEAD = ("Step", "Edit", "Why", "Diagnosis before", "Metric changes", "Time ratio", "Reward")


def _title(result: SearchResult) -> str:
    if result.speedup is None or not result.path:
        return f"{result.problem}: no faster kernel ({result.status})"
    return f"{result.problem}: {result.speedup.median:.2f}x faster ({result.speedup.source})"


def _path_rows(path: Sequence[PathStep]) -> list[tuple[str, ...]]:
    return [
        (
            str(number), step.edit, step.rationale, step.diagnosis, _changes(step), f"{step.time_ratio:.3g}",
            f"{step.reward.total:.3f} (time {step.reward.time:.2f}, proxies {step.reward.proxies:.2f}, "
            f"guardrails {step.reward.guardrails:.2f}, judge {step.reward.judge:.2f})",
        )
        for number, step in enumerate(path, start=1)
    ]  # fmt: skip


def _changes(step: PathStep) -> str:
    shown = [name for name in SHOWN_METRICS if name in step.metric_changes][:SHOWN_CHANGES]
    return "; ".join(f"{name} x{step.metric_changes[name]:.3g}" for name in shown) or "none of the listed"


def _kept(step: PathStep) -> list[str]:
    return [f"- `{step.edit}` was kept because {step.kept_because}.", ""] if step.kept_because else []


def _metric_rows(result: SearchResult) -> list[tuple[str, str, str]]:
    before, after = _profile(result.baseline), _profile(result.best)
    if before is None or after is None:
        return []
    rows = [(f"time ({after.time.source}), us", _figure(before.time.median_us), _figure(after.time.median_us))]
    for name in SHOWN_METRICS:
        if before.metrics.get(name) is not None or after.metrics.get(name) is not None:
            rows.append((name, _figure(before.metrics.get(name)), _figure(after.metrics.get(name))))
    return rows


def _profile(evaluated: Evaluated | None) -> Profile | None:
    return None if evaluated is None else evaluated.profile


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.6g}"


def _diff(result: SearchResult) -> list[str]:
    if result.baseline is None or result.best is None:
        return []
    return make_diff(result.baseline.kernel.source, result.best.kernel.source).splitlines()


def _plan_rows(result: SearchResult) -> list[tuple[str, str, str]]:
    if result.baseline is None or result.best is None:
        return []
    before, after = _plan(result.baseline.kernel), _plan(result.best.kernel)
    names = [*before, *(name for name in after if name not in before)]
    return [
        (name, before.get(name, "none"), after.get(name, "none"))
        for name in names
        if before.get(name) != after.get(name)
    ]


def _plan(kernel: Kernel) -> dict[str, str]:
    plan = {}
    for number, launch in enumerate(kernel.launches, start=1):
        for field in ("kernel", "grid", "block", "shared_bytes"):
            value = encode(getattr(launch, field))
            text = " x ".join(str(item) for item in value) if isinstance(value, list) else str(value)
            plan[f"launch {number} {field}"] = text
    plan.update({f"param {name}": str(value) for name, value in kernel.params.items()})
    plan["flags"] = " ".join(kernel.flags) or "none"
    return plan


def _verdict_lines(result: SearchResult) -> list[str]:
    if result.best is None:
        return [result.stopped_because or "no kernel was accepted"]
    verdict = result.best.verdict
    lines = [f"{verdict.status} at {', '.join(verdict.levels) or 'no level'}: {verdict.summary}"]
    if verdict.domain:
        lines.append(f"domain checked: {verdict.domain}")
    lines += [f"warning: {text}" for text in (*verdict.warnings, *result.warnings)]
    return lines


def _condition_lines(result: SearchResult) -> list[str]:
    spent = result.spent
    lines = [
        f"run {result.run_id}, seed {result.seed}, status {result.status}",
        f"{spent.evaluations} evaluations in {spent.seconds:.4g} s: {spent.accepted} accepted, "
        f"{spent.rejected} rejected, {spent.duplicates} duplicates",
    ]
    if result.stopped_because:
        lines.append(f"stopped because {result.stopped_because}")
    profile = _profile(result.best)
    if profile is not None:
        sizes = ", ".join(f"{name} = {value}" for name, value in profile.axes.items())
        lines.append(f"profiled at {sizes}" if sizes else "profiled at the problem's bench size")
        lines += [f"{name}: {value}" for name, value in profile.conditions.items()]
    if result.best is not None:
        lines.append(f"input kernel {result.baseline.kernel_id if result.baseline else 'unknown'}")
        lines.append(f"best kernel {result.best.kernel_id}")
    return lines
