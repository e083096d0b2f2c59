"""The files behind the standard output and standard error of a replica's process."""

from __future__ import annotations

import os

__all__ = ["error_log", "log_file"]


def log_file() -> str:
    """The path of the file behind this process's standard output, which contains vLLM's log too."""
    return _file_behind(1) or "the replica's standard output"


def error_log() -> str:
    """The path of the file behind this process's standard error; "" if it is not a file."""
    return _file_behind(2)


def _file_behind(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
