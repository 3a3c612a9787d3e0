"""The workbench of the server: short questions are answered here, what takes long is carried out in other processes.

Verifying, profiling and searching are mostly Python, so in threads of the server they would hold up every other
answer, and what they leave behind in memory would stay with it. A host (`optiml_mcp.host`) is a process with a
workbench of its own. It does one call at a time, can be killed in the middle of it, and shares the store, the kernels
and the run folders with the server.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from optiml.codec import adapter_of, encode, restore
from optiml.errors import OptimlError, SetupError, WorkerDied
from optiml.evaluate import CachedCompiler
from optiml.process import Worker
from optiml.records import Build, Generated, Judgement, Kernel, NsightReport, Problem, Profile, SearchResult, Verdict
from optiml.sandbox import Policy
from optiml.search.edits import all_edits
from optiml.settings import Settings
from optiml.toolchain.nvrtc import CompileFailure
from optiml.workbench import SearchProgress, Workbench
from optiml_mcp.background import current_cancellation

LOG = logging.getLogger(__name__)
HOST_MODULE = "optiml_mcp.host"
START_TIMEOUT_S = 120.0  # an interpreter and its imports, on a machine that is busy otherwise
CALL_TIMEOUT_S = 30 * 86_400.0  # work has limits of its own; this one only bounds a host that says nothing
HOST_NICENESS = 3  # the answers of the server itself go first
CALLS_PER_HOST = 500  # then a fresh one takes over
METHODS: Mapping[str, Any] = {  # of a workbench -> what they answer
    "verify": Verdict,
    "profile": Profile,
    "profile_report": NsightReport,
    "profile_command": NsightReport,
    "judge": Judgement,
    "generate": Generated,
    "run_search": SearchResult,
    "ptx": str,
}
# What a host gets of the environment: all but the token that lets clients in, and what is set for it anyway.
KEPT_BACK = ("OPTIML_HTTP_TOKEN", "OPTIML_HTTP_TOKEN_FILE", "TMPDIR", "OPTIML_HOME", "OPTIML_ROOTS")


class Hosts:
    """Processes that carry out calls, one at a time each; as many as there are callers at once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings_to_json(settings)
        self._environment = {name: value for name, value in os.environ.items() if name not in KEPT_BACK}
        self._lock = threading.Lock()
        self._idle: list[tuple[Worker, int]] = []  # with the number of calls answered; the last one used comes last
        self._busy: list[Worker] = []
        self._closed = False

    def call(
        self,
        method: str,
        positional: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
        *,
        on_question: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> Any:
        """Let a host call a method of its workbench; arguments and answer are JSON.

        The cancellation of the background job that this thread works for kills the host.

        Raises:
            OptimlError: what the method raised.
            WorkerDied: the host was killed, by a cancellation, by `close` or from outside.
        """
        header = {
            "settings": self._settings,
            "folder": os.getcwd(),
            "method": method,
            "positional": encode(list(positional)),
            "named": encode(dict(named or {})),
        }
        with self._host() as worker, current_cancellation().ending(worker.cancel):
            answer, _ = worker.call(header, timeout_s=CALL_TIMEOUT_S, on_question=on_question)
        for name, message in answer["log"]:
            logging.getLogger(name).warning("%s", message)
        return answer["value"]

    @contextlib.contextmanager
    def _host(self) -> Iterator[Worker]:
        with self._lock:
            if self._closed:
                raise WorkerDied("the server is closing", cancelled=True)
            worker, calls = self._idle.pop() if self._idle else (self._new(), 0)
            self._busy.append(worker)
        try:
            yield worker
        finally:
            with self._lock:
                self._busy.remove(worker)
                spent = self._closed or calls + 1 >= CALLS_PER_HOST
                if not spent:
                    self._idle.append((worker, calls + 1))
            if spent:
                worker.close()

    def _new(self) -> Worker:
        return Worker(
            HOST_MODULE,
            policy=Policy(trusted=True),
            environment=self._environment,
            start_timeout_s=START_TIMEOUT_S,
            niceness=HOST_NICENESS,
        )

    def close(self) -> None:
        """End every host, those in the middle of a call too."""
        with self._lock:
            self._closed = True
            workers = [*self._busy, *(worker for worker, _ in self._idle)]
            self._idle = []
        for worker in workers:
            worker.close()


class _KnownVersion:
    """Stands for the compiler in the server, where nothing is compiled: results are kept under its version."""

    def __init__(self, version: str) -> None:
        self.version = version

    def compile(self, kernel: Kernel, arch: str) -> Build | CompileFailure:
        raise SetupError("the server itself compiles nothing", code="no_compiler")

    def close(self) -> None:
        """Nothing to end."""


class HostedWorkbench(Workbench):
    """A workbench whose long work is done by hosts; what the store holds is answered from here."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._hosts = Hosts(settings)
        self._greeted = threading.Event()
        self._version: str | None = None  # of the compiler; until a host has told it, the store cannot be asked
        threading.Thread(target=self._greet, name="optiml-greet", daemon=True).start()
        _import_and_build()

    def _greet(self) -> None:
        """Start the first host while this process still imports, and learn the compiler's version from it."""
        try:
            self._version = self._hosts.call("compiler_version")
        except OptimlError as error:  # the first call will meet the same, and say so
            LOG.info("the first host gives no version: %s", error)
        finally:
            self._greeted.set()

    def close(self) -> None:
        """End every host and every other child."""
        self._hosts.close()
        super().close()

    def _compiler_of(self) -> CachedCompiler:
        with self._lock:
            if self._compiler is None:
                assert self._version is not None
                self._compiler = CachedCompiler(_KnownVersion(self._version), self.store)
            return self._compiler

    # --- answered from the store, where that can be ------------------------------------------------------------------
    def known_verdict(self, *positional: Any, **named: Any) -> Verdict | None:
        """As the workbench's own; None as long as the compiler's version is not known."""
        return None if self._version is None else super().known_verdict(*positional, **named)

    def known_profile(self, *positional: Any, **named: Any) -> Profile | None:
        """As the workbench's own; None as long as the compiler's version is not known."""
        return None if self._version is None else super().known_profile(*positional, **named)

    # --- carried out by a host ---------------------------------------------------------------------------------------
    def _hosted(self, method: str, positional: Sequence[Any], named: Mapping[str, Any]) -> Any:
        self._greeted.wait()  # the host that is just starting will do
        return restore(METHODS[method], self._hosts.call(method, positional, named))

    def verify(self, *positional: Any, **named: Any) -> Verdict:
        """As the workbench's own, in a host."""
        verdict: Verdict = self._hosted("verify", positional, named)
        return verdict

    def profile(self, *positional: Any, **named: Any) -> Profile:
        """As the workbench's own, in a host."""
        profile: Profile = self._hosted("profile", positional, named)
        return profile

    def profile_report(self, *positional: Any, **named: Any) -> NsightReport:
        """As the workbench's own, in a host."""
        report: NsightReport = self._hosted("profile_report", positional, named)
        return report

    def profile_command(self, *positional: Any, **named: Any) -> NsightReport:
        """As the workbench's own, in a host."""
        report: NsightReport = self._hosted("profile_command", positional, named)
        return report

    def judge(self, *positional: Any, **named: Any) -> Judgement:
        """As the workbench's own, in a host."""
        judgement: Judgement = self._hosted("judge", positional, named)
        return judgement

    def generate(self, *positional: Any, **named: Any) -> Generated:
        """As the workbench's own, in a host."""
        generated: Generated = self._hosted("generate", positional, named)
        return generated

    def ptx(self, identity: str) -> str:
        """As the workbench's own, in a host."""
        text: str = self._hosted("ptx", (identity,), {})
        return text

    def run_search(
        self,
        run_id: str,
        *,
        on_progress: Callable[[SearchProgress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> SearchResult:
        """As the workbench's own, in a host, which asks here at every step."""

        def on_question(question: dict[str, Any]) -> dict[str, Any]:
            if "progress" in question and on_progress is not None:
                on_progress(restore(SearchProgress, question["progress"]))
            return {"stop": "should_stop" in question and should_stop is not None and should_stop()}

        self._greeted.wait()
        found = self._hosts.call("run_search", (run_id,), on_question=on_question)
        result: SearchResult = restore(SearchResult, found)
        return result


def _import_and_build() -> None:
    """What the first answers would do otherwise, beside others that wait: now the first host starts anyway."""
    all_edits()
    for kind in (*METHODS.values(), SearchProgress, Problem, Kernel):
        adapter_of(kind)


# --- settings as JSON ------------------------------------------------------------------------------------------------
def settings_to_json(settings: Settings) -> dict[str, Any]:
    """Settings for the private channel to a host; keys of models are never among them, only where they lie."""
    fields: dict[str, Any] = _SETTINGS.dump_python(settings, mode="json")
    return fields


def settings_from_json(data: Mapping[str, Any]) -> Settings:
    """The inverse of `settings_to_json`."""
    return _SETTINGS.validate_python(data)


_SETTINGS = TypeAdapter(Settings)
