"""Errors that end an engine, and the reason why an engine did not start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from search_spaces.errors import SearchSpaceError
from workers.errors import EngineCrashed, EngineUnavailable, WorkerError
from workers.types import Family

__all__ = ["engine_errors", "not_started"]


@contextmanager
def engine_errors() -> Iterator[None]:
    """Context manager around calls of vLLM that raises EngineCrashed if vLLM fails.

    This project's own errors are raised unchanged. Errors of reading or writing a file (OSError) are also raised
    unchanged, because the engine can continue: after a failed write of a merge it holds no recipe, and the next write
    covers all weights. ConnectionError is also an OSError, but raises EngineCrashed, because it shows that a process of
    the engine has ended.
    """
    try:
        yield
    except (SearchSpaceError, WorkerError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and not isinstance(error, ConnectionError):
            raise
        raise EngineCrashed(f"the engine failed: {type(error).__name__}: {error}") from error


def not_started(family: Family, error: BaseException, log_file: str | None) -> EngineUnavailable:
    """Build the EngineUnavailable error for an engine of vLLM whose start failed with `error`.

    The message has the directory of the base model, the reason, and the path `log_file` of vLLM's log if it is not
    None. `family` describes the models that the engine was to merge: the base model and its experts.
    """
    return EngineUnavailable(
        f"vLLM did not start for {family.base.directory}: {type(error).__name__}: {_reason(error)}"
        + (f"; its log is {log_file}" if log_file else "")
    )


def _reason(error: BaseException) -> str:
    """First line of an error's message, for users.

    vLLM checks its options with pydantic. If vLLM rejects an option, the result is the first problem that pydantic
    reports.
    """
    details = error.errors() if hasattr(error, "errors") else ()
    text = str(details[0]["msg"] if details else error).strip()
    return text.splitlines()[0] if text else ""
