"""Turns of requests at a few places: no client waits for the queue of another client."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from service.api.limits.fair_queue import FairQueue
from service.api.problems import Unavailable


class Scene:
    """Requests that hold their turn until the test releases them; `begun` has their names in the order of turns."""

    def __init__(self, num_places: int = 2, *, max_waiting: int = 10, max_clients: int = 10) -> None:
        self.queue = FairQueue(num_places, max_waiting=max_waiting, max_clients=max_clients)
        self.begun: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def send(self, *names: str) -> None:
        """Send requests. Each name is a client and a digit, such as "a1"."""
        for name in names:
            self.ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._request(name))
        await settle()

    async def end(self, *names: str) -> None:
        for name in names:
            self.ends[name].set()
        await settle()

    async def _request(self, name: str) -> None:
        async with self.queue.turn(name[0]):
            self.begun.append(name)
            await self.ends[name].wait()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def test_a_client_leaves_a_place_to_the_others() -> None:
    async def scenario() -> None:
        scene = Scene(2)
        await scene.send("a1", "a2", "a3")
        assert scene.begun == ["a1"]
        await scene.send("b1")
        assert scene.begun == ["a1", "b1"]
        await scene.end("a1", "b1")
        assert scene.begun == ["a1", "b1", "a2"]

    run(scenario())


def test_one_place_is_used_by_anybody() -> None:
    async def scenario() -> None:
        scene = Scene(1)
        await scene.send("a1", "a2")
        assert scene.begun == ["a1"]
        await scene.end("a1")
        assert scene.begun == ["a1", "a2"]

    run(scenario())


def test_waiting_clients_take_turns() -> None:
    async def scenario() -> None:
        scene = Scene(2)
        await scene.send("x1", "y1", *(f"{client}{i}" for client in "abc" for i in range(3)))
        for _ in range(9):
            await scene.end(*scene.begun)
        assert scene.begun[2:] == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]

    run(scenario())


def test_too_many_requests_are_sent_away() -> None:
    async def scenario() -> None:
        scene = Scene(2, max_waiting=2, max_clients=1)
        await scene.send("a1", "a2", "a3", "a4", "b1", "c1")
        with pytest.raises(Unavailable, match="2 requests of this client wait to be checked already"):
            await scene.tasks["a4"]
        with pytest.raises(Unavailable, match="requests of 1 clients wait to be checked already"):
            await scene.tasks["c1"]
        assert scene.begun == ["a1", "b1"]
        await scene.end("a1", "a2", "a3")
        assert scene.begun == ["a1", "b1", "a2", "a3"]

    run(scenario())


def test_cancelled_requests_take_no_turn_and_give_theirs_back() -> None:
    async def scenario() -> None:
        scene = Scene(2)
        await scene.send("a1", "b1", "a2", "b2")
        scene.tasks["a2"].cancel()
        scene.tasks["a1"].cancel()
        await settle()
        await scene.send("a3")
        assert scene.begun == ["a1", "b1", "a3"]
        scene.ends["a3"].set()
        scene.tasks["b2"].cancel()  # at the same moment as its turn may come
        await scene.end("b1")
        await scene.send("c1", "d1")
        assert scene.begun[3:] == ["c1", "d1"]

    run(scenario())
