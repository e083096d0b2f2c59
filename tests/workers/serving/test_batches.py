"""Batches of completions in a replica, without models: requests that join, wait, or make way for others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.workers.serving.test_replica_faults import recipe, request
from workers.errors import EngineBusy, EngineUnavailable, TrialFailed
from workers.serving.completions import CompletionRequest
from workers.serving.fake import FakeScorer
from workers.serving.replica import ScoringReplica

STEP_S = 0.02


def words(number: int, weight: float = 0.3, **options: Any) -> CompletionRequest:
    """A completion of `number` words."""
    return CompletionRequest(recipe(weight), " ".join(["a"] * (number - 1)), **{"yields": False, **options})


class Timeline:
    """The work of a replica in order, in steps of a fake engine."""

    def __init__(self, **options: Any) -> None:
        self.worker = FakeScorer(sample_delay_s=STEP_S, **options)
        self.replica = ScoringReplica(lambda: self.worker)
        self.events: list[str] = []

    async def complete(self, name: str, completion: CompletionRequest) -> None:
        async for part in self.replica.complete(completion):
            self.events.append(name)
            assert part.recipe_digest == completion.recipe.digest

    async def score(self, name: str, weight: float) -> None:
        await self.replica.score(request(weight))
        self.events.append(name)

    async def after(self, steps: float, work: Coroutine[Any, Any, None]) -> None:
        await asyncio.sleep(steps * STEP_S)
        await work


def test_later_request_joins_between_steps() -> None:
    """A request for the merge that is being completed joins at the next step; neither waits for the other's end."""
    timeline = Timeline()

    async def both() -> None:
        await asyncio.gather(
            timeline.complete("first", words(12)), timeline.after(4, timeline.complete("second", words(4)))
        )

    asyncio.run(both())
    assert timeline.events.index("second") > 2
    assert timeline.events[-1] == "first", "the second one ended earlier"
    assert (timeline.events.count("first"), timeline.events.count("second")) == (12, 4)


def test_other_merge_waits_and_nobody_joins_before_it() -> None:
    """A merge that waits gets its turn: requests that come after it do not join the batch before it."""
    timeline = Timeline()

    async def three() -> None:
        await asyncio.gather(
            timeline.complete("first", words(12)),
            timeline.after(3, timeline.complete("other", words(2, weight=0.7))),
            timeline.after(6, timeline.complete("late", words(2))),
        )

    asyncio.run(three())
    assert timeline.events[:12] == ["first"] * 12, "nothing is mixed with another merge, and nobody joins"
    assert timeline.events[12:] == ["other", "other", "late", "late"]


def test_chat_without_end_delays_no_search() -> None:
    """A chunk of a search gets its turn after the running batch, although the next prompts for its merge wait."""
    timeline = Timeline()

    async def chat_and_search() -> None:
        prompts = (timeline.after(4 * number, timeline.complete("chat", words(8))) for number in range(8))
        await asyncio.gather(*prompts, timeline.after(3, timeline.score("search", 0.7)))

    asyncio.run(chat_and_search())
    assert timeline.events.index("search") == 8
    assert timeline.worker._swaps == 3
    assert timeline.events.count("chat") == 64


def test_search_waits_for_the_batch_with_consent() -> None:
    """A completion that does not yield ends before a chunk of a search begins; the chunk's evidence is its own."""
    timeline = Timeline()

    async def both() -> None:
        await asyncio.gather(timeline.complete("chat", words(8)), timeline.after(3, timeline.score("search", 0.7)))

    asyncio.run(both())
    assert timeline.events == ["chat"] * 8 + ["search"]


def test_completion_that_yields_gives_way() -> None:
    """A completion that yields ends before the next step when a search comes, and is refused while one is there."""
    timeline = Timeline()

    async def both() -> None:
        chat = asyncio.create_task(timeline.complete("chat", words(50, yields=True)))
        await asyncio.sleep(4 * STEP_S)
        search = asyncio.create_task(timeline.score("search", 0.7))
        await asyncio.sleep(0)
        with pytest.raises(EngineBusy, match="works for a search"):
            await timeline.complete("refused", words(3, yields=True))
        with pytest.raises(EngineBusy, match="is needed by a search"):
            await chat
        await search

    asyncio.run(both())
    assert timeline.events[-1] == "search"
    assert 0 < timeline.events.count("chat") < 20


def test_one_completion_that_yields_at_a_time() -> None:
    """Completions that yield take one of a replica's places, so that chunks of a search always reach the replica."""
    timeline = Timeline()

    async def both() -> None:
        chat = asyncio.create_task(timeline.complete("chat", words(6, yields=True)))
        await asyncio.sleep(2 * STEP_S)
        with pytest.raises(EngineBusy, match="completes another prompt"):
            await timeline.complete("second", words(3, yields=True))
        await chat

    asyncio.run(both())


def test_abandoned_request_swaps_nothing() -> None:
    """A request whose caller has gone before its turn does not swap the merge; one that has begun ends early."""
    timeline = Timeline()

    async def leave() -> None:
        chat = asyncio.create_task(timeline.complete("chat", words(12)))
        await asyncio.sleep(2 * STEP_S)
        waiting = asyncio.create_task(timeline.complete("waiting", words(2, weight=0.7)))
        await asyncio.sleep(2 * STEP_S)
        waiting.cancel()
        await asyncio.wait([waiting])
        await chat
        begun = asyncio.create_task(timeline.complete("begun", words(500)))
        await asyncio.sleep(4 * STEP_S)
        begun.cancel()
        await asyncio.wait([begun])
        await asyncio.sleep(4 * STEP_S)
        assert not timeline.replica._batches

    asyncio.run(leave())
    assert "waiting" not in timeline.events
    assert timeline.worker._swaps == 1
    assert timeline.events.count("begun") < 20


def test_errors_reach_every_request_of_a_batch() -> None:
    """A merge that fails fails its completions and the replica continues; a crash ends it for all later requests."""
    timeline = Timeline(failing=frozenset({recipe(0.3).digest}), crashing=[recipe(0.7).digest])

    async def both(weight: float) -> list[Any]:
        found = (timeline.complete(name, words(3, weight=weight)) for name in "ab")
        return await asyncio.gather(*found, return_exceptions=True)

    assert [type(error) for error in asyncio.run(both(0.3))] == [TrialFailed] * 2
    asyncio.run(timeline.complete("healthy", words(2, weight=0.5)))
    assert all(isinstance(error, EngineUnavailable) for error in asyncio.run(both(0.7)))
    with pytest.raises(EngineUnavailable):
        asyncio.run(timeline.complete("later", words(2, weight=0.5)))
