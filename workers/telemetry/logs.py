"""Log lines of a process, as text or as JSON, with the job, trial and attempt that they are about.

The fields of JSON lines come from the context in which a message is logged (function `fields`), not from its text.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from workers.telemetry import tracing

__all__ = ["FORMATS", "VARIABLE", "AccessFields", "JsonLines", "fields", "is_json", "log_in_worker", "log_to_stderr"]

log = logging.getLogger(__name__)

# Environment variable with the format of logs, and its values. Others count as text.
VARIABLE = "MERGESEARCH_LOG_FORMAT"
FORMATS = ("text", "json")

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

# Attribute of a log record with further fields of its line.
EXTRA = "fields"

_fields: ContextVar[Mapping[str, Any]] = ContextVar("log fields", default={})  # noqa: B039 (it is never changed)


@contextmanager
def fields(**values: Any) -> Iterator[None]:
    """Context manager that adds the given fields, such as the job, to each log line of this thread.

    Contexts can be nested; a line has the fields of all contexts around it. A value of None adds no field. Other
    threads have the fields only if they run in a copy of the context (module `contextvars`).
    """
    token = _fields.set({**_fields.get(), **{name: value for name, value in values.items() if value is not None}})
    try:
        yield
    finally:
        _fields.reset(token)


def is_json() -> bool:
    """Whether this process writes its logs as JSON lines."""
    return os.environ.get(VARIABLE) == "json"


def log_to_stderr() -> None:
    """Write the logs of this process, from level INFO on, to standard error, as text or as JSON lines.

    An environment variable selects the format (function `is_json`). With JSON lines, warnings, and exceptions that end
    the process or a thread, are written as log lines too.
    """
    logging.basicConfig(level=logging.INFO, handlers=[_handler()])
    if is_json():
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda hook: _log_uncaught(hook.exc_type, hook.exc_value, hook.exc_traceback)


def log_in_worker() -> None:
    """Write the logs of a Ray worker as JSON lines if an environment variable selects this format (function `is_json`).

    With any other format, nothing is changed. Messages of this project are written from level INFO on, and messages of
    other packages are written from level WARNING on. Ray stores the standard error of its workers in files.
    """
    root = logging.getLogger()
    if is_json() and not any(isinstance(handler.formatter, JsonLines) for handler in root.handlers):
        root.addHandler(_handler())
        for package in ("workers", "service"):
            logging.getLogger(package).setLevel(logging.INFO)


def _log_uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if not issubclass(kind, SystemExit):  # with which a thread may end
        log.critical("%s: %s", kind.__name__, error, exc_info=(kind, error or kind(), trace))


def _handler() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if is_json() else logging.Formatter(TEXT))
    return handler


class JsonLines(logging.Formatter):
    """Formatter of log records as JSON lines; the line of a message contains its exception, if it has one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields.get(),
            **tracing.trace_ids(),
            **getattr(record, EXTRA, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line, default=str)


class AccessFields(logging.Filter):
    """Filter of uvicorn's access log, which removes the queries of URLs, because they may have secrets.

    The filter also gives each record separate fields for client, method, path and status, for log lines in JSON.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        client, method, target, version, status = record.args  # type: ignore[misc]
        path = str(target).partition("?")[0]
        record.args = (client, method, path, version, status)
        setattr(record, EXTRA, {"client": client, "method": method, "path": path, "status": status})
        return True
