"""Log lines of a process: one JSON object each, with the fields of their context."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import subprocess
import sys
import threading
from contextvars import copy_context
from typing import Any

import pytest

from workers.telemetry.logs import VARIABLE, AccessFields, JsonLines, fields

PROGRAM = """
import logging
from workers.telemetry import logs
logs.log_to_stderr()
with logs.fields(job="j"):
    logging.getLogger("a").info("told %s", "you")
    logging.getLogger("a").debug("not told")
"""


FAILING = """
import threading, warnings
from workers.telemetry import logs
logs.log_to_stderr()
warnings.warn("careful")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise ValueError("two\\nlines")
"""


class Log:
    """Messages of a logger as JSON lines."""

    def __init__(self) -> None:
        self._text = io.StringIO()
        self.logger = logging.Logger("service.tests")
        handler = logging.StreamHandler(self._text)
        handler.setFormatter(JsonLines())
        self.logger.addHandler(handler)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._text.getvalue().splitlines()]


@pytest.fixture
def log() -> Log:
    return Log()


def test_a_line_has_the_fields_of_its_contexts(log: Log) -> None:
    """Fields of outer contexts stay in inner ones, None leaves one out, and all end with their context."""
    with fields(job="abc", attempt=2):
        with fields(trial=7, attempt=None):
            log.logger.warning("%d samples", 30)
        log.logger.info("done")
    log.logger.info("after")
    first, second, third = log.lines()
    assert {name: first[name] for name in first if name != "time"} == {
        "level": "WARNING",
        "logger": "service.tests",
        "message": "30 samples",
        "job": "abc",
        "attempt": 2,
        "trial": 7,
    }
    assert first["time"].endswith("+00:00")
    assert "trial" not in second
    assert (second["job"], second["attempt"]) == ("abc", 2)
    assert third.keys() == {"time", "level", "logger", "message"}


def test_an_exception_is_part_of_its_line(log: Log) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.logger.exception("it failed")
    (line,) = log.lines()
    assert line["message"] == "it failed"
    assert line["exception"].startswith("Traceback (most recent call last):\n")
    assert line["exception"].endswith("ValueError: two\nlines")


def test_concurrent_requests_keep_their_fields_apart(log: Log) -> None:
    """Tasks that run at the same time, and threads in a copy of their context, have the fields of their own."""

    async def one(job: str) -> None:
        with fields(job=job):
            await asyncio.sleep(0.01)
            await asyncio.to_thread(log.logger.info, job)

    async def every() -> None:
        await asyncio.gather(*(one(f"job-{number}") for number in range(20)))

    asyncio.run(every())
    with fields(job="copied"):
        thread = threading.Thread(target=copy_context().run, args=(log.logger.info, "copied"))
    thread.start()
    thread.join()
    assert sorted(line["message"] for line in log.lines()) == sorted(line["job"] for line in log.lines())
    assert len(log.lines()) == 21


def test_what_is_not_json_becomes_text(log: Log) -> None:
    with fields(trial=object):
        log.logger.info("tells")
    assert log.lines()[0]["trial"] == "<class 'object'>"


def test_an_access_line_has_no_query(log: Log) -> None:
    """Queries may have codes and tokens; the path, the method and the status are fields."""
    log.logger.addFilter(AccessFields())
    target = "/v1/login/callback?code=s3cr3t&state=x"
    log.logger.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:4711", "GET", target, "1.1", 303)
    (line,) = log.lines()
    assert line["message"] == '127.0.0.1:4711 - "GET /v1/login/callback HTTP/1.1" 303'
    assert (line["method"], line["path"], line["status"]) == ("GET", "/v1/login/callback", 303)
    assert "s3cr3t" not in json.dumps(line)


def test_what_nobody_catches_is_one_line() -> None:
    """An exception that ends the process, one that ends a thread, and a warning are one line each."""
    done = subprocess.run(
        [sys.executable, "-c", FAILING], capture_output=True, text=True, env={VARIABLE: "json"}, check=False
    )
    assert done.returncode == 1
    warning, thread, process = map(json.loads, done.stderr.splitlines())
    assert "UserWarning: careful" in warning["message"]
    assert (thread["message"], thread["level"]) == ("ZeroDivisionError: division by zero", "CRITICAL")
    assert process["message"] == "ValueError: two\nlines"
    assert process["exception"].startswith("Traceback")


@pytest.mark.parametrize("chosen", ["json", "text", "other", None])
def test_the_environment_chooses_the_format(chosen: str | None) -> None:
    """Lines are JSON with MERGESEARCH_LOG_FORMAT=json, and text otherwise."""
    environment = {} if chosen is None else {VARIABLE: chosen}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=True)
    (line,) = done.stderr.splitlines()
    if chosen == "json":
        assert json.loads(line).items() >= {"message": "told you", "job": "j", "level": "INFO"}.items()
    else:
        assert line.endswith(" INFO a: told you")
