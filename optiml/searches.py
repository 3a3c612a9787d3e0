"""Searches as folders on disk: started, carried out under a lock, resumed, listed, cancelled, reported.

runs/<run_id>/run.json       what the journal does not hold: device, where to write the best
runs/<run_id>/journal.jsonl  every event of the search (optiml.search.journal)
runs/<run_id>/cancelled      present once someone asked for the end
runs/<run_id>/told.jsonl     what an agent proposed, where one was asked (optiml.search.asktell)
runs/<run_id>/tell.lock      flock of whoever writes that
runs/<run_id>/lock           flock of whoever carries the run out; the kernel releases it when that process dies
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from optiml.codec import encode
from optiml.errors import Busy, InvalidInput, ModelFailed, OptimlError, SetupError
from optiml.evaluate import Evaluator
from optiml.kernel_file import write_kernel_text
from optiml.llm.model import Model
from optiml.records import Kernel, Problem, SearchResult
from optiml.report import markdown
from optiml.search.asktell import Answer, AskTell, Request
from optiml.search.journal import JOURNAL_NAME, Event, Journal, read_events, read_events_after
from optiml.search.model_search import ModelSearch
from optiml.search.optimise import Search, SearchProgress, SearchSpec, load_spec, optimise

LOG = logging.getLogger(__name__)
TOLD_NAME = "told.jsonl"
TELL_PATIENCE_S = 5.0
MOST_FOLLOWED = 12  # searches kept in memory for those who ask about them
RULES = "rules"
UNDER_WAY = ("running", "needs_proposals")
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EFBIG)
RUN_ID = re.compile(r"r-[0-9]{8}-[0-9a-f]{8}")

__all__ = ["Answer", "Request", "RunSummary", "SearchProgress", "Searches"]


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One line of the list of runs."""

    run_id: str
    status: str
    problem: str
    evaluations: int
    budget: int
    best_speedup: float | None
    started: str  # ISO 8601, UTC


@dataclass(kw_only=True)
class _Followed:
    """A search that callers look at, and how much of its journal it holds."""

    search: Search | None  # None once the run has ended: the rest is all that is asked for then
    size: int  # bytes of the journal
    budget: int
    evaluations: int
    result: SearchResult


class Searches:
    """The runs below one folder.

    Args:
        evaluator: gives the evaluator of a device by name.
        models: gives the language models that are set up, by the name of their generator.
    """

    def __init__(
        self,
        folder: Path,
        evaluator: Callable[[str], Evaluator],
        models: Callable[[], Mapping[str, Model]] = dict,
    ) -> None:
        self._folder = folder
        self._evaluator = evaluator
        self._models = models
        self._followed: OrderedDict[str, _Followed] = OrderedDict()
        self._summaries: dict[str, tuple[int, RunSummary]] = {}  # of ended runs, with the size of their journal
        self._lock = threading.Lock()

    def start(
        self,
        *,
        problem: Problem,
        kernel: Kernel,
        evaluations: int,
        seconds: float | None,
        proposer: str,
        judge: str,
        device: str,
        seed: int | None,
        edits: tuple[str, ...] | None,
        catalogue: bool,
        write_to: str | None,
    ) -> str:
        """Write a new run to disk.

        Raises:
            InvalidInput: a budget out of range, an unknown edit.
            ModelFailed: a proposer or judge whose model is not set up.
        """
        if proposer not in ("builtin", "agent"):
            model_named(self._models(), proposer, "proposer", otherwise="builtin or agent")
        if judge != RULES:
            judge = model_named(self._models(), judge, "judge", otherwise=RULES).name
        if not 1 <= evaluations <= 10_000:
            raise InvalidInput(f"evaluations must lie in 1..10000, not {evaluations}")
        run_id = f"r-{datetime.now(UTC):%Y%m%d}-{secrets.token_hex(4)}"
        spec = SearchSpec(
            run_id=run_id,
            problem=problem,
            kernel=kernel,
            evaluations=evaluations,
            seconds=seconds,
            seed=secrets.randbits(31) if seed is None else seed,
            edits=edits,
            catalogue=catalogue,
            proposer=proposer,
            judge=judge,
        )
        folder = self._folder / run_id
        try:
            folder.mkdir(parents=True, mode=0o700)
            facts = {"device": device, "write_to": write_to, "started": datetime.now(UTC).isoformat(timespec="seconds")}
            (folder / "run.json").write_text(json.dumps(facts), encoding="utf-8")
            Search(spec, Journal(folder / JOURNAL_NAME))
        except OSError as error:
            raise Busy(
                f"the run cannot be written below OPTIML_HOME ({error.strerror}): free some space, or set OPTIML_HOME "
                "to a folder that can be written, then start it again"
            ) from error
        return run_id

    def run(
        self,
        run_id: str,
        *,
        on_progress: Callable[[SearchProgress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> SearchResult:
        """Carry a run out to its end, from wherever it stands.

        Raises:
            Busy: another process carries it out.
            NotAccepted: the input kernel is not right.
            SetupError: code `busy`: its folder cannot be written; what is in there is whole, and it can go on later.
        """
        folder = self._run_folder(run_id)
        facts = _facts(folder)
        with _written_to(), _locked(folder):
            search = self._to_carry_out(folder)
            evaluator = self._evaluator(str(facts["device"]))
            result = optimise(
                search,
                evaluator.session(search.spec.problem, seed=search.spec.seed),
                fingerprint=evaluator.fingerprint,
                on_progress=on_progress,
                should_stop=lambda: _is_cancelled(folder) or (should_stop is not None and should_stop()),
            )
            if search.status in UNDER_WAY and _is_cancelled(folder):
                search.cancel()
                result = search.result()
        return self._finished(result, facts)

    def _to_carry_out(self, folder: Path) -> Search:
        """The search of a folder with the models that it needs."""
        journal = Journal(folder / JOURNAL_NAME)
        spec = load_spec(journal)
        if spec.proposer in ("builtin", "agent") and spec.judge == RULES:
            return _search_of(folder, journal)
        models = self._models()
        judge = None if spec.judge == RULES else model_named(models, spec.judge, "judge", otherwise=RULES)
        if spec.proposer in ("builtin", "agent"):
            return _search_of(folder, journal, judge=judge)
        model = model_named(models, spec.proposer, "proposer", otherwise="builtin or agent")
        return ModelSearch(spec, journal, model=model, judge=judge)

    def _finished(self, result: SearchResult, facts: Mapping[str, Any]) -> SearchResult:
        target = facts.get("write_to")
        if target is None or result.best is None or result.status in UNDER_WAY:
            return result
        try:
            publish(Path(target), write_kernel_text(result.best.kernel))
        except OSError as error:
            warning = f"the best kernel could not be written to the file asked for: {error.strerror}"
            return dataclasses.replace(result, warnings=(*result.warnings, warning))
        return dataclasses.replace(result, written_to=str(target))

    def result(self, run_id: str) -> SearchResult:
        """Result of a run; its best so far while it runs."""
        with self._lock:
            return self._follow(run_id).result

    def tree(self, run_id: str) -> tuple[Mapping[str, Any], ...]:
        """Every node of a run: parent, edit, state, time and reward."""
        search = _load(self._run_folder(run_id))
        return tuple(
            {
                "node": node.index,
                "parent": None if node.parent is None else node.parent.index,
                "kernel_id": node.kernel_id,
                "edit": node.edit,
                "rationale": node.rationale,
                "state": node.state,
                "visits": node.visits,
                "time_us": node.time_us if node.time_us != float("inf") else None,
                "reward": None if node.reward is None else encode(node.reward),
            }
            for node in search.tree.nodes
        )

    def ids(self) -> tuple[str, ...]:
        """The ids of all runs, newest first; nothing of them is read."""
        found = []
        for folder in self._folder.glob("r-*") if self._folder.is_dir() else ():
            with contextlib.suppress(OSError):
                if RUN_ID.fullmatch(folder.name) and not folder.is_symlink():
                    found.append((folder.stat().st_mtime, folder.name))
        return tuple(name for _, name in sorted(found, reverse=True))

    def list(self) -> tuple[RunSummary, ...]:
        """All readable runs, newest first."""
        summaries = []
        for folder in self._folder.glob("r-*") if self._folder.is_dir() else ():
            if RUN_ID.fullmatch(folder.name) and not folder.is_symlink():
                with contextlib.suppress(OptimlError, OSError, ValueError, KeyError):
                    summaries.append(self._summary(folder))
        return tuple(sorted(summaries, key=lambda item: (item.started, item.run_id), reverse=True))

    def _summary(self, folder: Path) -> RunSummary:
        size = (folder / JOURNAL_NAME).stat().st_size
        known = self._summaries.get(folder.name)
        if known is not None and known[0] == size:
            return known[1]
        with self._lock:
            followed = self._follow(folder.name)
        result = followed.result
        summary = RunSummary(
            run_id=folder.name,
            status=_status(folder, result),
            problem=result.problem,
            evaluations=followed.evaluations,
            budget=followed.budget,
            best_speedup=None if result.speedup is None else result.speedup.median,
            started=str(_facts(folder)["started"]),
        )
        if result.status not in UNDER_WAY:
            self._summaries[folder.name] = (size, summary)
        return summary

    def cancel(self, run_id: str) -> None:
        """Ask for the end of a run; at once where nobody carries it out.

        Raises:
            SetupError: code `busy`: its folder cannot be written.
        """
        folder = self._run_folder(run_id)
        with _written_to():
            (folder / "cancelled").touch()
            with contextlib.suppress(Busy), _locked(folder):
                _load(folder).cancel()

    def requests(self, run_id: str) -> tuple[Request, ...]:
        """What a run asks of its agent; nothing while it evaluates, after its end and with another proposer."""
        with self._lock:
            search = self._follow(run_id).search
            return search.requests() if isinstance(search, AskTell) else ()

    def tell(
        self, run_id: str, proposals: Sequence[Any], read_kernel: Callable[[Any, Problem], Kernel]
    ) -> tuple[Answer, ...]:
        """Answer requests of a run, whoever carries it out; an empty list says that no more proposals come.

        Raises:
            InvalidInput: the run asks no agent.
            Busy: another caller is telling it something just now.
            SetupError: code `busy`: its folder cannot be written.
        """
        folder = self._run_folder(run_id)
        with _written_to(), _locked(folder, name="tell.lock", patience_s=TELL_PATIENCE_S):
            journal = Journal(folder / JOURNAL_NAME)
            if load_spec(journal).proposer != "agent":  # before the replay, which takes long
                raise InvalidInput(f"{run_id} makes its own proposals: only runs with proposer=agent take any")
            search = _search_of(folder, journal)
            assert isinstance(search, AskTell)
            problem = search.spec.problem
            return search.answer(proposals, lambda spec: read_kernel(spec, problem), Journal(folder / TOLD_NAME))

    def report(self, run_id: str) -> str:
        """The run as Markdown."""
        return markdown(self.result(run_id))

    def _follow(self, run_id: str) -> _Followed:
        """A run as its journal stands now, read on from where the last caller left it.

        Only for looking at, under the lock: a search that is carried out is loaded anew under the run's lock.
        """
        folder = self._run_folder(run_id)
        followed = self._followed.get(run_id)
        size = (folder / JOURNAL_NAME).stat().st_size
        if followed is None or size < followed.size or (followed.search is None and size != followed.size):
            journal = Journal(folder / JOURNAL_NAME)
            followed = _looked_at(_search_of(folder, journal), journal.size)
        elif followed.search is not None and (size > followed.size or isinstance(followed.search, AskTell)):
            events, size = read_events_after(folder / JOURNAL_NAME, followed.size)
            followed.search.follow(events)
            followed = _looked_at(followed.search, size)
        self._followed[run_id] = followed
        self._followed.move_to_end(run_id)
        while len(self._followed) > MOST_FOLLOWED:
            self._followed.popitem(last=False)
        return followed

    def _run_folder(self, run_id: str) -> Path:
        folder = self._folder / run_id if RUN_ID.fullmatch(run_id) else None
        if folder is None or folder.is_symlink() or not (folder / "run.json").is_file():
            raise InvalidInput(f"no run {run_id[:40]!r} is known here; optiml runs lists them", code="unknown_run")
        return folder


def _looked_at(search: Search, size: int) -> _Followed:
    result = search.result()
    return _Followed(
        search=search if result.status in UNDER_WAY else None,
        size=size,
        budget=search.spec.evaluations,
        evaluations=search.evaluations,
        result=result,
    )


def publish(path: Path, text: str) -> None:
    """Write a file by a temporary neighbour and one rename."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _load(folder: Path) -> Search:
    """The search of a folder without writing to it."""
    return _search_of(folder, Journal(folder / JOURNAL_NAME))


def _search_of(folder: Path, journal: Journal, *, judge: Model | None = None) -> Search:
    spec = load_spec(journal)
    if spec.proposer == "agent":
        return AskTell(spec, journal, told=_Told(folder / TOLD_NAME), judge=judge)
    return Search(spec, journal, judge=judge) if spec.proposer == "builtin" else ModelSearch(spec, journal)


def model_named(models: Mapping[str, Model], name: str, role: str, *, otherwise: str) -> Model:
    """The model that a caller means by its generator (`chat`) or by its own name (`chat:gpt-5`).

    Raises:
        ModelFailed: code `model_unavailable`: it is not set up.
    """
    if name in models:
        return models[name]
    found = next((model for model in models.values() if model.name == name), None)
    if found is None:
        known = ", ".join([*models, *sorted({model.name for model in models.values()} - set(models))]) or "none"
        raise ModelFailed(
            f"the {role} {name[:60]!r} needs a language model that is not set up (there: {known}): name one in "
            f"optiml.toml, or use {role}={otherwise}"
        )
    return found


class _Told:
    """Reads the log of what was told, again only when it grew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = -1
        self._events: tuple[Event, ...] = ()

    def __call__(self) -> tuple[Event, ...]:
        size = self._path.stat().st_size if self._path.exists() else 0
        if size != self._size:
            self._size, self._events = size, read_events(self._path)
        return self._events


def _facts(folder: Path) -> Mapping[str, Any]:
    facts: Mapping[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return facts


def _is_cancelled(folder: Path) -> bool:
    return (folder / "cancelled").exists()


def _status(folder: Path, result: SearchResult) -> str:
    return "cancelled" if result.status in UNDER_WAY and _is_cancelled(folder) else result.status


@contextlib.contextmanager
def _written_to() -> Iterator[None]:
    """Say of a folder that cannot be written what can be done about it."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        raise SetupError(
            f"the run cannot be written below OPTIML_HOME any more ({error.strerror}): free some space, then go on "
            "with it",
            code=Busy.code,
        ) from error


@contextlib.contextmanager
def _locked(folder: Path, *, name: str = "lock", patience_s: float = 0.5) -> Iterator[None]:
    descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise Busy(f"{folder.name} is being carried out by another process; follow it by its id") from error
                time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)
