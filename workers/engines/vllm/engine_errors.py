"""Which errors end an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from search_spaces.errors import SearchSpaceError
from workers.errors import EngineCrashed, WorkerError

__all__ = ["engine_errors"]


@contextmanager
def engine_errors() -> Iterator[None]:
    """Around a call of vLLM: raises EngineCrashed for an error from inside it.

    A file that cannot be read or written is not one: after a failed swap the engine holds no recipe, and the next swap
    writes all weights. A lost connection is one: a process of the engine has ended.
    """
    try:
        yield
    except (SearchSpaceError, WorkerError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and not isinstance(error, ConnectionError):
            raise
        raise EngineCrashed(f"the engine failed: {type(error).__name__}: {error}") from error
