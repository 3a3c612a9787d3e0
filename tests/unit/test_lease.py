"""One timing at a time on a GPU, across processes."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from optiml.device import lease
from optiml.device.lease import Lease
from optiml.errors import Busy, SetupError


def two(folder: Path) -> tuple[Lease, Lease]:
    clock = iter(float(tick) for tick in range(10_000))
    made = [
        Lease("0000:07:00.0", folder=folder, clock=lambda: next(clock), sleep=lambda seconds: None) for _ in range(2)
    ]
    return made[0], made[1]


def test_two_that_want_the_gpu_alone_exclude_each_other(tmp_path: Path) -> None:
    first, second = two(tmp_path)
    with first.held(alone=True, patience_s=0), pytest.raises(Busy, match="try again in about 30 s"):
        second.held(alone=True, patience_s=30).__enter__()
    with second.held(alone=True, patience_s=0):
        pass


def test_runs_share_the_gpu_and_a_timing_waits_for_all_of_them(tmp_path: Path) -> None:
    first, second = two(tmp_path)
    with first.held(alone=False, patience_s=0), second.held(alone=False, patience_s=0):
        third, _ = two(tmp_path)
        with pytest.raises(Busy):
            third.held(alone=True, patience_s=3).__enter__()


def test_a_search_stands_back_while_a_person_waits(tmp_path: Path) -> None:
    person, search = two(tmp_path)
    order: list[str] = []
    with contextlib.ExitStack() as held:
        holder, _ = two(tmp_path)
        held.enter_context(holder.held(alone=True, patience_s=0))
        released = iter((False, False, True))

        def wait_then_release(seconds: float) -> None:
            with pytest.raises(Busy):  # the search gets nothing while the person waits, held or not
                search.held(alone=True, priority="search", patience_s=0).__enter__()
            order.append("search stood back")
            if next(released):
                held.close()

        clock = iter(float(tick) for tick in range(100))
        person = Lease("0000:07:00.0", folder=tmp_path, clock=lambda: next(clock), sleep=wait_then_release)
        with person.held(alone=True, patience_s=50):
            order.append("person")
    assert order == ["search stood back"] * 3 + ["person"]
    with search.held(alone=True, priority="search", patience_s=0):
        pass


def test_no_new_sharer_comes_while_somebody_waits_to_be_alone(tmp_path: Path) -> None:
    turned_away = []
    sharer, late = two(tmp_path)
    with contextlib.ExitStack() as held:
        held.enter_context(sharer.held(alone=False, patience_s=0))

        def while_waiting(seconds: float) -> None:
            with pytest.raises(Busy):
                late.held(alone=False, patience_s=0).__enter__()
            turned_away.append(True)
            held.close()

        clock = iter(float(tick) for tick in range(100))
        alone = Lease("0000:07:00.0", folder=tmp_path, clock=lambda: next(clock), sleep=while_waiting)
        with alone.held(alone=True, patience_s=50):
            assert turned_away == [True]


def test_the_lease_of_another_gpu_is_another_lease(tmp_path: Path) -> None:
    first, _ = two(tmp_path)
    with first.held(alone=True, patience_s=0), Lease("0000:08:00.0", folder=tmp_path).held(alone=True, patience_s=0):
        pass


def test_processes_with_temporary_folders_of_their_own_meet_at_the_same_locks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = Lease("0000:09:00.0")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    second = Lease("0000:09:00.0")
    with first.held(alone=True, patience_s=0), pytest.raises(Busy):
        second.held(alone=True, patience_s=0).__enter__()


def test_a_machine_without_a_common_folder_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lease, "FOLDERS", (str(tmp_path / "none"),))
    with pytest.raises(SetupError, match="locks"):
        Lease("0000:09:00.0")
