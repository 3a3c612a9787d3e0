"""The search as a whole, with an evaluation that models time from the source text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from search_fakes import LOAD_SECTORS, ROW_SUM, FakeEvaluator, items_problem, row_sum_kernel, rows_problem

from optiml.codec import kernel_id
from optiml.errors import InvalidInput, NotAccepted, ToolFailed
from optiml.records import Evaluation, Kernel, SearchResult
from optiml.search.journal import Journal
from optiml.search.optimise import (
    Depth,
    Search,
    SearchProgress,
    SearchSpec,
    load_spec,
    optimise,
)
from optiml.search.tree import MAX_DEPTH


def spec(**changes: object) -> SearchSpec:
    fields: dict[str, object] = {
        "run_id": "run", "problem": rows_problem(), "kernel": row_sum_kernel(), "evaluations": 20, "seed": 1
    }  # fmt: skip
    return SearchSpec(**{**fields, **changes})  # type: ignore[arg-type]


def run(evaluator: FakeEvaluator | None = None, journal: Journal | None = None, **changes: object) -> SearchResult:
    return optimise(Search(spec(**changes), journal), evaluator or FakeEvaluator(), clock=lambda: 0.0)


def test_the_search_finds_the_coalesced_kernel() -> None:
    result = run()
    assert result.status == "finished"
    assert result.speedup is not None
    assert result.speedup.median > 2.5
    assert any(step.edit in ("row_per_warp", "row_per_block") for step in result.path)


def test_the_same_seed_gives_the_same_path_and_another_seed_may_not_change_the_best() -> None:
    first, second = run(seed=3), run(seed=3)
    assert first.path == second.path
    assert first.best is not None
    assert second.best is not None
    assert first.best.kernel_id == second.best.kernel_id


def test_an_input_that_is_not_accepted_ends_the_run() -> None:
    search = Search(spec())
    with pytest.raises(NotAccepted, match="wrong_values"):
        optimise(search, FakeEvaluator(broken={"row_sum": ("full",)}))
    assert search.status == "failed"
    assert search.result().best is None


def test_the_budget_counts_kernels_and_not_final_checks() -> None:
    evaluator = FakeEvaluator()
    result = run(evaluator, evaluations=7)
    reduced = [call for call in evaluator.calls if call[1] == "reduced"]
    assert result.spent.evaluations == 1 + len(reduced) == 7
    assert [depth for _, depth in evaluator.calls if depth == "confirm"] == ["confirm"]


def test_a_budget_of_one_answers_with_the_input() -> None:
    result = run(evaluations=1)
    assert result.best is not None
    assert result.best.kernel_id == kernel_id(row_sum_kernel())
    assert result.path == ()
    assert result.speedup is not None
    assert result.speedup.median == 1.0


def test_no_kernel_is_evaluated_twice_at_one_depth() -> None:
    evaluator = FakeEvaluator()
    run(evaluator)
    assert len(evaluator.calls) == len(set(evaluator.calls))


def test_nothing_faster_leaves_the_input_as_the_answer() -> None:
    def flat(kernel: Kernel, *, depth: Depth) -> Evaluation:
        evaluation = FakeEvaluator()(row_sum_kernel(), depth=depth)
        return dataclasses.replace(evaluation, kernel_id=kernel_id(kernel), fingerprint=None)

    result = optimise(Search(spec(evaluations=6)), flat)
    assert result.best is not None
    assert result.best.kernel_id == kernel_id(row_sum_kernel())
    assert "faster than the input" in result.summary


def test_a_winner_that_fails_its_confirmation_gives_way_to_the_next() -> None:
    plain = run()
    assert plain.best is not None
    broken = run(FakeEvaluator(broken={"__shfl_xor_sync": ("confirm",)}))
    assert broken.best is not None
    assert "__shfl_xor_sync" in plain.best.kernel.source
    assert "__shfl_xor_sync" not in broken.best.kernel.source
    assert broken.best.verdict.status == "accepted"


def test_a_confirmation_that_says_nothing_of_the_kernel_is_run_once_more() -> None:
    plain = FakeEvaluator()
    said: list[str] = []

    def evaluate(kernel: Kernel, *, depth: Depth) -> Evaluation:
        evaluation = plain(kernel, depth=depth)
        if depth != "confirm":
            return evaluation
        said.append(evaluation.kernel_id)
        lost = dataclasses.replace(evaluation.verdict, status="unverified", levels=())
        return dataclasses.replace(evaluation, verdict=lost) if len(said) == 1 else evaluation

    result = optimise(Search(spec()), evaluate, clock=lambda: 0.0)
    assert len(said) == 2
    assert len(set(said)) == 1
    assert result.path == run().path


def test_a_winner_that_fails_the_full_check_gives_way_too() -> None:
    result = run(FakeEvaluator(broken={"__shfl_xor_sync": ("full",)}))
    assert result.best is not None
    assert "__shfl_xor_sync" not in result.best.kernel.source


def test_rejected_edits_are_counted_and_never_the_answer() -> None:
    result = run(FakeEvaluator(broken={"__shfl_xor_sync": ("reduced", "full", "confirm")}))
    assert result.spent.rejected >= 1
    assert result.best is not None
    assert "__shfl_xor_sync" not in result.best.kernel.source


def test_equal_code_costs_no_evaluation_where_the_fingerprint_is_cheap() -> None:
    evaluator = FakeEvaluator(same_code=True)
    result = optimise(Search(spec(evaluations=12)), evaluator, fingerprint=evaluator.fingerprint)
    fingerprints = [identity for identity, depth in evaluator.calls if depth == "reduced"]
    assert result.spent.duplicates >= 1
    assert len(fingerprints) == len(set(fingerprints)) == 11


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 8, 13, 21])
def test_a_killed_run_resumes_without_repeating_anything(tmp_path: Path, cut: int) -> None:
    whole = run(evaluations=12)
    path = tmp_path / "journal.jsonl"
    complete = FakeEvaluator()
    run(complete, Journal(path), evaluations=12)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:cut]) + (lines[cut][:7] if cut < len(lines) else b""))
    evaluator = FakeEvaluator()
    done = sum(b'"event":"evaluation"' in line for line in lines[:cut])
    resumed = run(evaluator, Journal(path), evaluations=12)
    assert evaluator.calls == complete.calls[done:]
    assert resumed.path == whole.path
    assert resumed.spent.evaluations == whole.spent.evaluations
    assert path.read_bytes().splitlines() == [line.rstrip(b"\n") for line in lines]


def test_a_finished_run_is_replayed_from_its_journal_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    result = run(journal=journal)
    evaluator = FakeEvaluator()
    search = Search(load_spec(Journal(journal.path)), Journal(journal.path))
    assert optimise(search, evaluator) == result
    assert evaluator.calls == []


def test_a_journal_of_another_run_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    run(journal=journal, evaluations=2)
    with pytest.raises(ToolFailed, match="another run"):
        Search(spec(evaluations=3), Journal(journal.path))


def test_should_stop_leaves_the_run_resumable(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    evaluator = FakeEvaluator()
    result = optimise(Search(spec(), journal), evaluator, should_stop=lambda: len(evaluator.calls) >= 4)
    assert result.status == "running"
    assert len(evaluator.calls) == 4
    assert run(FakeEvaluator(), Journal(journal.path)).path == run().path


def test_asking_again_gives_the_same_task() -> None:
    search = Search(spec())
    assert search.ask() == search.ask()
    task = search.ask()
    assert task is not None
    assert (task.purpose, task.depth) == ("input", "full")


def test_a_cancelled_run_asks_for_nothing_more() -> None:
    search = Search(spec())
    search.cancel()
    assert search.ask() is None
    assert search.result().status == "cancelled"


def test_the_budget_of_seconds_ends_the_tree_and_not_the_final_checks() -> None:
    ticks = iter(range(0, 10_000, 10))
    evaluator = FakeEvaluator()
    result = optimise(Search(spec(seconds=45.0)), evaluator, clock=lambda: float(next(ticks)))
    assert "45 seconds" in (result.stopped_because or "")
    assert result.best is not None
    assert result.best.verdict.status == "accepted"


def test_edits_outside_the_allow_list_are_not_used() -> None:
    result = run(edits=("unroll", "restrict_const"))
    assert {step.edit for step in result.path} <= {"unroll", "restrict_const"}


def test_an_unknown_edit_or_an_empty_budget_is_refused() -> None:
    with pytest.raises(InvalidInput, match="unknown edit 'nonsense'"):
        spec(edits=("nonsense",))
    with pytest.raises(InvalidInput, match="at least 1"):
        spec(evaluations=0)


def test_no_branch_is_deeper_than_the_limit() -> None:
    search = Search(spec(evaluations=60))
    optimise(search, FakeEvaluator())
    assert max(node.depth for node in search.tree.nodes) <= MAX_DEPTH


def test_a_small_budget_tries_different_edits_at_the_root_first() -> None:
    search = Search(spec(evaluations=10))
    optimise(search, FakeEvaluator())
    first = search.tree.nodes[1:6]
    assert all(node.parent is search.tree.root for node in first)
    assert len({node.edit for node in first}) >= 4


def test_the_explanation_cites_the_metric_that_fell_most_first() -> None:
    result = run()
    assert LOAD_SECTORS in result.explanation[0]
    assert " fell from 1" in result.explanation[0]
    assert "because" in result.explanation[0]
    assert "modelled time" in result.explanation[-1]


def test_each_step_lowers_the_time_or_says_why_it_was_kept() -> None:
    result = run(evaluations=40)
    assert result.path
    for step in result.path:
        assert (step.time_ratio > 1.0) != (step.kept_because is not None)


def test_steps_that_changed_nothing_are_taken_out_of_the_path_while_the_budget_lasts() -> None:
    plain = FakeEvaluator()

    def evaluate(kernel: Kernel, *, depth: Depth) -> Evaluation:
        """Qualifiers bring nothing here, but they are tried before the loop is divided."""
        return plain(dataclasses.replace(kernel, source=kernel.source.replace(" __restrict__", "")), depth=depth)

    def named(kernel: Kernel, *, depth: Depth) -> Evaluation:
        return dataclasses.replace(evaluate(kernel, depth=depth), kernel_id=kernel_id(kernel), fingerprint=None)

    result = optimise(Search(spec(evaluations=30)), named, clock=lambda: 0.0)
    assert "restrict_const" not in [step.edit for step in result.path]


def test_no_path_changes_the_block_twice_in_a_row() -> None:
    search = Search(spec(evaluations=40))
    optimise(search, FakeEvaluator())
    for node in search.tree.nodes[1:]:
        assert node.parent is not None
        assert (node.edit, node.parent.edit) != ("block_shape", "block_shape")


def test_a_kernel_that_no_launch_plan_can_hold_costs_one_evaluation_and_not_the_run() -> None:
    plain = FakeEvaluator()

    def evaluate(kernel: Kernel, *, depth: Depth) -> Evaluation:
        if "#pragma unroll" in kernel.source:
            raise InvalidInput("too many threads")
        return plain(kernel, depth=depth)

    result = optimise(Search(spec()), evaluate, clock=lambda: 0.0)
    assert result.status == "finished"
    assert result.spent.rejected >= 1


def test_the_ratios_of_the_path_multiply_to_the_speedup() -> None:
    result = run()
    product = 1.0
    for step in result.path:
        product *= step.time_ratio
    assert result.speedup is not None
    assert product == pytest.approx(result.speedup.median)


def test_progress_tells_the_best_so_far() -> None:
    seen: list[SearchProgress] = []
    optimise(Search(spec(evaluations=8)), FakeEvaluator(), on_progress=seen.append)
    assert seen[0].best_speedup == 1.0
    assert [item.evaluations for item in seen] == sorted(item.evaluations for item in seen)
    assert seen[-1].best_speedup > 1.0
    assert seen[0].last.startswith("input kernel")


def test_a_kernel_without_applicable_edits_ends_at_once() -> None:
    kernel = row_sum_kernel("this is not CUDA at all {{{")
    result = run(kernel=kernel, problem=items_problem())
    assert result.stopped_because == "no untried edit is left"
    assert result.spent.evaluations == 1


def test_the_source_of_the_input_is_never_changed() -> None:
    result = run()
    assert result.baseline is not None
    assert result.baseline.kernel.source == ROW_SUM
