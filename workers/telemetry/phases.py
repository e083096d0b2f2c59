"""Phases of a process's start, such as a download, which the process reports because it cannot answer requests yet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["phase", "report_to"]

_lock = threading.Lock()
_current: list[str] = []
_report: Callable[[str], None] | None = None


def report_to(report: Callable[[str], None] | None) -> None:
    """Set the function that is called with each phase of this process; with None, phases are not reported."""
    global _report
    with _lock:
        _report = report


@contextmanager
def phase(text: str) -> Iterator[None]:
    """Context manager for one phase, which reports `text` at its start and, at its end, the enclosing phase.

    `text` completes a sentence about the process, such as "downloads owner/name".
    """
    with _lock:
        _current.append(text)
    _tell()
    try:
        yield
    finally:
        with _lock:
            _current.remove(text)
        _tell()


def _tell() -> None:
    with _lock:
        report, text = _report, _current[-1] if _current else ""
    if report is not None and text:
        report(text)
