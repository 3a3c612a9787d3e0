"""Reports show what a result holds, and compute nothing."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser

import pytest
from search_fakes import FakeEvaluator, row_sum_kernel, rows_problem

from optiml.records import SearchResult
from optiml.report import html, markdown
from optiml.search.optimise import Search, SearchSpec, optimise


@pytest.fixture(scope="module")
def result() -> SearchResult:
    spec = SearchSpec(run_id="r1", problem=rows_problem(), kernel=row_sum_kernel(), evaluations=12, seed=1)
    return optimise(Search(spec), FakeEvaluator(), clock=lambda: 0.0)


def test_the_headline_names_the_speedup_and_the_source_of_its_times(result: SearchResult) -> None:
    assert result.speedup is not None
    first = markdown(result).splitlines()[0]
    assert first == f"# row_sum: {result.speedup.median:.2f}x faster (modelled)"


def test_every_part_of_the_answer_is_in_the_report(result: SearchResult) -> None:
    text = markdown(result)
    for heading in ("## Path", "## Why it is faster", "## Metrics", "## Change", "## Verdict", "## Conditions"):
        assert heading in text
    for sentence in result.explanation:
        assert sentence in text
    for step in result.path:
        assert f"| {step.edit} |" in text
    assert "-    for (int c = 0; c < C; ++c) s += x[r * C + c];" in text
    assert "ceil_div(R" in text
    assert "seed 1" in text


def test_a_step_that_was_kept_says_why(result: SearchResult) -> None:
    step = dataclasses.replace(result.path[0], kept_because="the next step needed it")
    assert "was kept because the next step needed it" in markdown(dataclasses.replace(result, path=(step,)))


def test_pipes_in_texts_do_not_break_the_tables(result: SearchResult) -> None:
    step = dataclasses.replace(result.path[0], rationale="a || b")
    text = markdown(dataclasses.replace(result, path=(step,)))
    assert "a \\|\\| b" in text


def test_a_result_without_a_better_kernel_says_so(result: SearchResult) -> None:
    same = dataclasses.replace(result, best=result.baseline, path=(), explanation=("nothing helped",))
    assert "no faster kernel" in markdown(same).splitlines()[0]
    assert "## Change" not in markdown(same)


def test_a_failed_run_is_reported_without_a_best_kernel(result: SearchResult) -> None:
    failed = dataclasses.replace(
        result, status="failed", best=None, speedup=None, path=(), explanation=(), stopped_because="fault: it crashed"
    )
    assert "fault: it crashed" in markdown(failed)
    assert "fault: it crashed" in html(failed)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        self.fetched += [str(value) for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_loads_nothing(result: SearchResult) -> None:
    tags = _Tags()
    tags.feed(html(result))
    assert tags.open == []
    assert tags.fetched == []


def test_kernel_text_cannot_inject_markup(result: SearchResult) -> None:
    assert result.best is not None
    evil = dataclasses.replace(result.best.kernel, source="// <script>alert(1)</script>\n")
    page = html(dataclasses.replace(result, best=dataclasses.replace(result.best, kernel=evil)))
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
