"""Separate threads of the server for each kind of work, so that no kind of work has to wait for another kind.

Threads of one Python process run one at a time. With many threads that compute at once, each thread waits for the
interpreter, and the event loop, which sends events to watchers, waits too. Therefore requests that only read share the
few default threads of the event loop: routes that are plain functions run in these threads. Work that may wait long for
a lock, a disk or another machine has separate threads, because it would otherwise occupy the few threads for reads.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from enum import StrEnum
from typing import ParamSpec, TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

__all__ = ["MAX_THREADS", "Work", "in_thread", "in_threads_of", "limit_reads", "limiter", "sent_in_parts"]

Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")

# Reads at the same time. More of them make none faster, as they compute most of the time.
MAX_THREADS = 4


class Work(StrEnum):
    """Kind of work that has threads of its own, because it may wait long."""

    WRITE = "write"  # waits for the lock of the database, or for other admissions
    RAY = "ray"  # waits for Ray's dashboard, or for a call on a node
    DOWNLOAD = "download"  # waits for a disk or an object store
    BACKGROUND = "background"  # removes files and converts stored data; no request waits for it


# Threads for each kind of work. All but those of Ray may have a connection of the database each.
LIMITS = {Work.WRITE: 6, Work.RAY: 16, Work.DOWNLOAD: 8, Work.BACKGROUND: 6}

_limiters: RunVar[dict[Work, anyio.CapacityLimiter]] = RunVar("limiters of the server's threads")


def limit_reads() -> None:
    """Limit the default threads of the running event loop, in which read requests run, to MAX_THREADS threads."""
    anyio.to_thread.current_default_thread_limiter().total_tokens = MAX_THREADS


async def in_thread(
    work: Work, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """Call `function` in a thread for the given kind of work, and return its result or raise its error.

    If all threads of this kind are busy, the call waits for a free thread.
    """
    return await anyio.to_thread.run_sync(functools.partial(function, *args, **kwargs), limiter=limiter(work))


def in_threads_of(
    work: Work,
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Awaitable[Result]]]:
    """Decorator that lets a route (a plain function) run in a thread for `work` instead of a thread for reads."""

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Awaitable[Result]]:
        @functools.wraps(function)
        async def wrapped(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            return await in_thread(work, function, *args, **kwargs)

        return wrapped

    return decorate


async def sent_in_parts(parts: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the parts of a download; each is read in a thread for downloads.

    The iterator is closed at the end, also if the client left earlier.
    """
    try:
        while (part := await in_thread(Work.DOWNLOAD, next, parts, None)) is not None:
            yield part
    finally:
        if (close := getattr(parts, "close", None)) is not None:
            close()


def limiter(work: Work) -> anyio.CapacityLimiter:
    """Limiter, in the running event loop, of the number of threads that do this kind of `work` at the same time."""
    try:
        limiters = _limiters.get()
    except LookupError:
        limiters = {kind: anyio.CapacityLimiter(number) for kind, number in LIMITS.items()}
        _limiters.set(limiters)
    return limiters[work]
