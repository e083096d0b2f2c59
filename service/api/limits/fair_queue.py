"""Fair queue: clients take turns, so that a client with many requests does not delay the other clients."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.api.problems import Unavailable

__all__ = ["FairQueue"]


class FairQueue:
    """Queue of requests, of which at most `num_places` run at a time; clients with waiting requests take turns.

    If `num_places` is above 1, one client runs at most `num_places - 1` requests at a time, so that requests of other
    clients can start. A queue is bound to one asyncio event loop.
    """

    def __init__(self, num_places: int, *, max_waiting: int, max_clients: int) -> None:
        """Create a queue that runs at most `num_places` requests at a time.

        At most `max_clients` clients may have waiting requests, and each client may have at most `max_waiting` waiting
        requests.
        """
        self._free = num_places
        self._per_client = max(1, num_places - 1)
        self._max_waiting = max_waiting
        self._max_clients = max_clients
        self._running: Counter[str] = Counter()
        # Waiting requests of each client, the client whose turn is next first; clients without requests are removed.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Context in which a request of `client` runs; entering the context waits until the request may run.

        Raises Unavailable if the client has too many waiting requests, or too many clients have waiting requests.
        """
        await self._wait(client)
        try:
            yield
        finally:
            self._end_turn(client)

    async def _wait(self, client: str) -> None:
        if self._free == 0 or self._running[client] >= self._per_client:
            self._check_room(len(self._waiting.get(client, ())))
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._give_turns()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(client, turn)
            else:  # the turn was given at the same moment
                self._end_turn(client)
            raise

    def _check_room(self, num_waiting: int) -> None:
        if num_waiting >= self._max_waiting:
            raise Unavailable(f"{num_waiting} requests of this client wait to be checked already; try again later")
        if num_waiting == 0 and len(self._waiting) >= self._max_clients:
            raise Unavailable(f"requests of {len(self._waiting)} clients wait to be checked already; try again later")

    def _end_turn(self, client: str) -> None:
        self._free += 1
        self._running[client] -= 1
        self._running += Counter()  # drops clients without a turn
        self._give_turns()

    def _leave(self, client: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(client, deque())
        if turn in queue:
            queue.remove(turn)
        if not queue:
            self._waiting.pop(client, None)

    def _give_turns(self) -> None:
        while self._free > 0:
            client = next((name for name in self._waiting if self._running[name] < self._per_client), None)
            if client is None:
                return
            turn = self._waiting[client][0]
            self._leave(client, turn)
            if client in self._waiting:
                self._waiting.move_to_end(client)
            if not turn.cancelled():
                self._free -= 1
                self._running[client] += 1
                turn.set_result(None)
