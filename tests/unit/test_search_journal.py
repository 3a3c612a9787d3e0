"""The journal on disk: whole lines only, whatever moment the process died at."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from search_fakes import FakeEvaluator, row_sum_kernel, rows_problem

from optiml.errors import SetupError, ToolFailed
from optiml.search.journal import Event, Journal, read_events
from optiml.searches import Searches


def test_events_come_back_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run" / "journal.jsonl")
    journal.append({"event": "spec", "seed": 1})
    journal.append({"event": "end", "status": "finished"})
    assert [event["event"] for event in Journal(journal.path)] == ["spec", "end"]
    assert read_events(journal.path) == tuple(Journal(journal.path))


@pytest.mark.parametrize("torn", [b'{"event": "eval', b"{", b"\x80\xff", b"{}}"])
def test_a_torn_last_line_is_dropped_and_overwritten(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path).append({"event": "spec"})
    with path.open("ab") as file:
        file.write(torn)
    resumed = Journal(path)
    assert len(resumed) == 1
    resumed.append({"event": "evaluation"})
    assert [event["event"] for event in Journal(path)] == ["spec", "evaluation"]
    assert path.read_bytes().count(b"\n") == 2


def test_every_prefix_of_the_file_loads(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for number in range(3):
        journal.append({"event": "proposal", "node": number, "text": "é\n"})
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        assert len(read_events(path)) == data[:size].count(b"\n")


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"event": "spec"}\nnot json\n{"event": "end"}\n')
    with pytest.raises(ToolFailed, match="line 2"):
        Journal(path)


def test_each_event_is_on_disk_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append({"event": "spec"})
    assert journal.path.stat().st_size in synced


def test_a_missing_journal_has_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path / "none.jsonl") == ()


def test_a_run_whose_disk_is_full_says_so_and_goes_on_from_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator = SimpleNamespace(session=lambda problem, *, seed: FakeEvaluator(), fingerprint=None)
    searches = Searches(tmp_path, evaluator=lambda _: evaluator)  # type: ignore[arg-type, return-value]
    run_id = searches.start(
        problem=rows_problem(), kernel=row_sum_kernel(), evaluations=3, seconds=None, proposer="builtin",
        judge="rules", device="x", seed=0, edits=None, catalogue=True, write_to=None,
    )  # fmt: skip
    written, append = 0, Journal.append

    def full_after_two(journal: Journal, event: Event) -> None:
        nonlocal written
        written += 1
        if written > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(journal, event)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "append", full_after_two)
        with pytest.raises(SetupError, match="No space left") as caught:
            searches.run(run_id)
    assert caught.value.code == "busy"
    assert searches.result(run_id).status == "running"
    assert searches.run(run_id).status == "finished"
