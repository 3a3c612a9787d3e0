"""A search that asks an agent: rounds of requests, what becomes of proposals, and going on after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from search_fakes import ROW_SUM, FakeEvaluator, row_sum_kernel, rows_problem

from optiml.codec import encode, kernel_id
from optiml.errors import InvalidInput
from optiml.records import Kernel
from optiml.search.asktell import AGENT_EDIT, Answer, AskTell
from optiml.search.journal import Journal, read_events
from optiml.search.optimise import SearchSpec, optimise

FASTER = ROW_SUM.replace("const float* x", "const float* __restrict__ x")
UNROLLED = ROW_SUM.replace("    for (", "    #pragma unroll 4\n    for (")
BOTH = FASTER.replace("    for (", "    #pragma unroll 4\n    for (")


def spec(**changes: object) -> SearchSpec:
    fields: dict[str, object] = {
        "run_id": "run", "problem": rows_problem(), "kernel": row_sum_kernel(), "evaluations": 20, "seed": 1,
        "proposer": "agent",
    }  # fmt: skip
    return SearchSpec(**{**fields, **changes})  # type: ignore[arg-type]


class Run:
    """A run in a folder, opened anew for every step: as if the process had been killed in between."""

    def __init__(self, folder: Path, **changes: object) -> None:
        self._folder = folder
        self._spec = spec(**changes)
        self.evaluator = FakeEvaluator(broken={"wrong": ("reduced", "full")})

    def open(self) -> AskTell:
        told = self._folder / "told.jsonl"
        return AskTell(self._spec, Journal(self._folder / "journal.jsonl"), told=lambda: read_events(told))

    def advance(self) -> AskTell:
        search = self.open()
        optimise(search, self.evaluator, fingerprint=self.evaluator.fingerprint, clock=lambda: 0.0)
        return search

    def tell(self, *proposals: Any) -> tuple[Answer, ...]:
        return self.open().answer(proposals, read_kernel, Journal(self._folder / "told.jsonl"))

    def tell_source(self, source: str, request_id: str | None = None) -> Answer:
        request = request_id or self.open().requests()[0].request_id
        return self.tell({"request_id": request, "kernel": source, "rationale": "the compiler may reorder loads"})[0]


def read_kernel(given: Any) -> Kernel:
    if not isinstance(given, str) or "row_sum" not in given:
        raise InvalidInput("it is no kernel")
    return row_sum_kernel(given)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_the_input_is_evaluated_and_then_the_agent_is_asked(run: Run) -> None:
    search = run.advance()
    assert search.status == search.result().status == "needs_proposals"
    request = search.requests()[0]
    assert request.parent_kernel_id == kernel_id(row_sum_kernel())
    assert request.diagnosis.kind == "memory"
    assert request.profile_brief is not None
    assert request.profile_brief.time_ratio == 1.0
    assert request.tried == ()
    assert request.request_id in {item.request_id for item in run.open().requests()}


def test_opening_a_run_writes_nothing(run: Run, tmp_path: Path) -> None:
    run.advance()
    before = (tmp_path / "journal.jsonl").read_bytes()
    run.open().requests()
    run.open().result()
    assert (tmp_path / "journal.jsonl").read_bytes() == before


def test_a_queued_proposal_is_evaluated_once_and_the_next_round_shows_what_came_of_it(run: Run) -> None:
    run.advance()
    told = run.tell_source(FASTER)
    assert told.outcome == "queued"
    assert run.open().status == "running"
    search = run.advance()
    assert search.status == "needs_proposals"
    tried = [item for request in search.requests() for item in request.tried]
    best = search.result().best
    assert best is not None
    assert best.kernel_id == told.kernel_id
    assert [(item.kernel_id, item.outcome) for item in tried] == [(told.kernel_id, "faster")]
    assert [depth for identity, depth in run.evaluator.calls if identity == told.kernel_id] == ["reduced"]


def test_several_proposals_of_one_tell_are_all_evaluated(run: Run) -> None:
    request = run.advance().requests()[0].request_id
    outcomes = run.tell(*({"request_id": request, "kernel": source} for source in (FASTER, UNROLLED, BOTH)))
    assert [item.outcome for item in outcomes] == ["queued"] * 3
    assert run.advance().evaluations == 4


def test_a_kernel_that_is_known_or_waiting_is_a_duplicate(run: Run) -> None:
    request = run.advance().requests()[0].request_id
    assert run.tell_source(ROW_SUM).outcome == "duplicate"
    assert run.tell_source(FASTER).outcome == "queued"
    assert run.tell_source(FASTER, request).outcome == "duplicate"


def test_a_request_of_an_earlier_round_is_stale(run: Run) -> None:
    request = run.advance().requests()[0].request_id
    run.tell_source(FASTER)
    run.advance()
    answer = run.tell_source(UNROLLED, request)
    assert answer.outcome == "stale"
    assert run.open().requests()[0].request_id in answer.why


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"request_id": "q99"}, "no such request"),
        ({"kernel": 5}, "no kernel"),
        ({"kernal": ROW_SUM}, "'kernel'"),
        ({"expected": [{"metric": "dram__bytes.sum", "direction": "sideways"}]}, "direction"),
        ({"rationale": 5}, "rationale"),
    ],
)
def test_a_proposal_with_a_mistake_is_invalid_and_says_why(run: Run, change: dict[str, Any], named: str) -> None:
    request = run.advance().requests()[0].request_id
    (answer,) = run.tell({"request_id": request, "kernel": FASTER, **change})
    assert answer.outcome == "invalid"
    assert named in answer.why
    assert run.open().status == "needs_proposals"


@pytest.mark.parametrize("proposal", [None, "text", 5, []])
def test_what_is_no_proposal_is_invalid(run: Run, proposal: Any) -> None:
    run.advance()
    assert run.tell(proposal)[0].outcome == "invalid"


def test_a_wrong_kernel_is_tried_and_never_the_best(run: Run) -> None:
    run.advance()
    wrong = run.tell_source(FASTER + "// wrong\n")
    search = run.advance()
    tried = [item for request in search.requests() for item in request.tried]
    assert [(item.kernel_id, item.outcome) for item in tried] == [(wrong.kernel_id, "rejected")]
    assert tried[0].why is not None
    assert tried[0].why.startswith("wrong_values")
    assert search.result().path == ()


def test_code_that_was_evaluated_before_is_not_evaluated_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.evaluator = FakeEvaluator(same_code=True)
    run.advance()
    told = run.tell_source(FASTER)
    search = run.advance()
    assert search.evaluations == 1
    assert [item.outcome for request in search.requests() for item in request.tried] == ["duplicate"]
    assert told.kernel_id not in [identity for identity, _ in run.evaluator.calls]


def test_no_more_proposals_ends_the_search_with_the_final_checks(run: Run) -> None:
    run.advance()
    run.tell_source(FASTER)
    run.advance()
    assert run.tell() == ()
    search = run.advance()
    assert search.status == "finished"
    result = search.result()
    assert result.stopped_because == "the agent has no further proposals"
    assert [step.edit for step in result.path] == [AGENT_EDIT]
    assert [depth for _, depth in run.evaluator.calls[2:]] == ["full", "confirm"]
    assert run.tell_source(UNROLLED, "q1").outcome == "stale"


def test_the_budget_ends_the_search_and_cannot_be_overdrawn(tmp_path: Path) -> None:
    run = Run(tmp_path, evaluations=3)
    request = run.advance().requests()[0].request_id
    outcomes = run.tell(*({"request_id": request, "kernel": source} for source in (FASTER, UNROLLED, BOTH)))
    assert [item.outcome for item in outcomes] == ["queued", "queued", "stale"]
    search = run.advance()
    assert (search.status, search.evaluations) == ("finished", 3)


def test_a_run_that_waits_can_be_cancelled(run: Run) -> None:
    search = run.advance()
    search.cancel()
    assert run.open().status == "cancelled"
    assert run.open().requests() == ()


def test_a_run_killed_between_two_tasks_goes_on_without_evaluating_twice(run: Run) -> None:
    run.advance()
    run.tell_source(FASTER)
    task = run.open().ask()  # killed after the proposal entered the tree, before its evaluation
    assert task is not None
    again = run.open().ask()
    assert encode(again) == encode(task)
    search = run.advance()
    assert search.evaluations == 2
    assert len(run.evaluator.calls) == 2


def test_later_rounds_ask_for_the_better_kernel_too(run: Run) -> None:
    run.advance()
    told = run.tell_source(FASTER)
    parents = set()
    for source in (UNROLLED, BOTH, ROW_SUM.replace("0.0f", "0.f")):
        search = run.advance()
        parents |= {request.parent_kernel_id for request in search.requests()}
        run.tell_source(source)
    assert told.kernel_id in parents
