"""The inside of a host: one workbench in a process of its own, which carries out what takes long.

Started by `optiml_mcp.hosted`, never by hand. A call is `{"settings", "folder", "method", "positional", "named"}`; the
answer is `{"value"}`, as JSON, with the warnings that were logged meanwhile. The host dies with the server, and its own
children die with it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from optiml.codec import encode
from optiml.niceness import be_nice
from optiml.process import ask, serve
from optiml.workbench import SearchProgress, Workbench
from optiml_mcp.hosted import METHODS, settings_from_json

MOST_WARNINGS = 50  # logged in one call, that are told
SEARCH_NICENESS = 2  # beyond that of every host: a search is in no hurry; whoever asks for a verdict is


class _Host:
    """Answers calls with one workbench, made when the first one says with which settings."""

    def __init__(self) -> None:
        self._bench: Workbench | None = None
        self._niceness = os.nice(0)  # as it was started
        self._log = _Kept()
        logging.getLogger().addHandler(self._log)

    def __call__(self, header: dict[str, Any], _: list[memoryview]) -> tuple[dict[str, Any], Sequence[bytes]]:
        if self._bench is None:
            os.chmod(os.environ["TMPDIR"], 0o711)  # our children have uids of their own, and folders of theirs in it
            os.chdir(header["folder"])
            self._bench = Workbench(settings_from_json(header["settings"]))
        method = header["method"]
        if method == "compiler_version":
            value: Any = self._bench.compiler_version()
        elif method in METHODS:
            named = header["named"]
            if method == "run_search":
                be_nice(self._niceness + SEARCH_NICENESS)
                named = {**named, "on_progress": _tell_progress, "should_stop": _should_stop}
            function: Callable[..., Any] = getattr(self._bench, method)
            value = encode(function(*header["positional"], **named))
        else:
            raise ValueError(f"a host has no method {method!r}")
        return {"value": value, "log": self._log.taken()}, ()


class _Kept(logging.Handler):
    """The warnings of one call."""

    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)
        self._records: list[list[str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._records) < MOST_WARNINGS:
            self._records.append([record.name, record.getMessage()])

    def taken(self) -> list[list[str]]:
        """The warnings so far; they are not kept."""
        taken, self._records = self._records, []
        return taken


def _tell_progress(progress: SearchProgress) -> None:
    ask({"progress": encode(progress)})


def _should_stop() -> bool:
    return bool(ask({"should_stop": True})["stop"])


if __name__ == "__main__":
    serve(_Host())
