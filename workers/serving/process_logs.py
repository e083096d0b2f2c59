"""Log files of a replica's process: its standard output, its standard error, and Serve's log."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler

__all__ = ["error_log", "keeping_serve_log", "log_file"]


def log_file() -> str:
    """Path of the file behind this process's standard output, which also contains vLLM's log."""
    return _file_behind(1) or "the replica's standard output"


def error_log() -> str:
    """Path of the file behind this process's standard error; "" if it is not a file."""
    return _file_behind(2)


@contextmanager
def keeping_serve_log() -> Iterator[None]:
    """Context manager that restores Serve's log handlers of this replica after an engine start closed them.

    vLLM configures logging when an engine starts, and Python then closes every log handler of the process. If the file
    of Serve's handler is closed, Serve's log is lost. Then Serve's controller also cannot recover the replica after a
    restart: it asks the replica for the file's name, gets an AttributeError, and fails the application (Ray 2.60).
    """
    handlers = [each for each in logging.getLogger("ray.serve").handlers if isinstance(each, MemoryHandler)]
    targets = [handler.target for handler in handlers]
    try:
        yield
    finally:
        for handler, target in zip(handlers, targets, strict=True):
            handler.setTarget(target)  # a closed file handler opens its file again when it is used


def _file_behind(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
