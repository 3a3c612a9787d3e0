"""The journal on disk: whole lines only, whatever moment the process died at."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from optiml.errors import ToolFailed
from optiml.search.journal import Journal, read_events


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
