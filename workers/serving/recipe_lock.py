"""Lock of a replica: requests for the recipe that the engine holds go first, so that merges are swapped less often."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

__all__ = ["RecipeLock"]


@dataclass(frozen=True, eq=False)
class _Waiter:
    """A request that waits for the lock, with the arguments of the method `RecipeLock.hold`.

    `ready` is done when the request has received the lock or was cancelled.
    """

    digest: str
    in_turn: bool
    ready: asyncio.Future[None]


class RecipeLock:
    """Asyncio lock of an engine that prefers waiters for the last recipe, so that fewer merges are swapped.

    A swap writes the merge of another recipe into the engine. When the lock is released, it goes to the longest waiter
    for the last recipe; waiters that take turns (`in_turn`) do not count here. If there is none, it goes to the longest
    of all waiters.
    """

    def __init__(self) -> None:
        self._held: str | None = None
        self._is_taken = False
        self._waiting: deque[_Waiter] = deque()

    @property
    def has_waiters(self) -> bool:
        return any(not waiter.ready.done() for waiter in self._waiting)

    @asynccontextmanager
    async def hold(self, digest: str, *, in_turn: bool = False) -> AsyncIterator[None]:
        """Async context manager that waits for the lock of an engine, and holds it for work with the recipe `digest`.

        When the lock is released, waiters with the recipe of the last holder come first. With `in_turn`, this waiter
        never comes before one that has waited longer; requests that may continue without end need it, because they
        would otherwise keep all other recipes waiting. `digest` is "" for work without a recipe.
        """
        if self._is_taken:
            ready = asyncio.get_running_loop().create_future()
            self._waiting.append(_Waiter(digest, in_turn, ready))
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
        waiting = [waiter for waiter in self._waiting if not waiter.ready.done()]
        # A stable sort: otherwise in order of arrival.
        waiting.sort(key=lambda waiter: waiter.in_turn or waiter.digest != self._held)
        self._is_taken = bool(waiting)
        if waiting:
            first = waiting[0]
            self._waiting = deque(each for each in self._waiting if each is not first and not each.ready.done())
            first.ready.set_result(None)
