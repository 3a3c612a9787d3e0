"""The server's log on stderr, as text or as one JSON object a line: ids, codes and times, never sources or secrets."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
_QUIET = ("mcp", "uvicorn.access", "httpx", "asyncio")  # at info they say the same again, a line for each message


def fields(**known: Any) -> dict[str, Any]:
    """The `extra` of a log call: what a reader may want to filter by. Absent values are left out."""
    return {"fields": {name: value for name, value in known.items() if value is not None}}


class JsonLines(logging.Formatter):
    """One object a line: time, level, logger, message, the fields, and a traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Text(logging.Formatter):
    """`LEVEL logger: message name=value ...`."""

    def format(self, record: logging.LogRecord) -> str:
        known = "".join(f" {name}={value}" for name, value in getattr(record, "fields", {}).items())
        text = f"{record.levelname} {record.name}: {record.getMessage()}{known}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def log_to_stderr(*, form: str, level: str) -> None:
    """Send the log of this process to stderr, and nowhere else."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else Text())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
