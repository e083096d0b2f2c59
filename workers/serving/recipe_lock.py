"""Lock of a replica: requests for the recipe that the engine holds go first, so that merges are swapped less often."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["RecipeLock"]


class RecipeLock:
    """Asyncio lock of an engine that prefers waiters for the last recipe, so that fewer merges are swapped.

    A swap writes the merge of another recipe into the engine. When the lock is released, the longest waiter for the
    last recipe gets the lock. If no one waits for the last recipe, the longest waiter for any recipe gets the lock.
    """

    def __init__(self) -> None:
        self._held: str | None = None
        self._is_taken = False
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()

    @property
    def has_waiters(self) -> bool:
        return any(not ready.done() for _, ready in self._waiting)

    @asynccontextmanager
    async def hold(self, digest: str) -> AsyncIterator[None]:
        """Async context manager that waits for the lock of an engine, and holds it for work with the recipe `digest`.

        When the lock is released, waiters with the recipe of the last holder come first. `digest` is "" for work
        without a recipe.
        """
        if self._is_taken:
            ready = asyncio.get_running_loop().create_future()
            self._waiting.append((digest, ready))
            try:
                await ready
            except asyncio.CancelledError:
                if ready.done() and not ready.cancelled():
                    self._pass_on()  # the waiter was cancelled just after it received the lock
                raise
        self._is_taken, self._held = True, digest
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        waiting = [entry for entry in self._waiting if not entry[1].done()]
        waiting.sort(key=lambda entry: entry[0] != self._held)  # stable: arrival order otherwise
        self._is_taken = bool(waiting)
        if waiting:
            self._waiting = deque(entry for entry in self._waiting if entry is not waiting[0] and not entry[1].done())
            waiting[0][1].set_result(None)
