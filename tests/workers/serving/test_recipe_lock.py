import asyncio
from collections.abc import Sequence

from workers.serving.recipe_lock import RecipeLock


def order(arrivals: Sequence[str]) -> list[str]:
    """The order in which recipes get the lock, if all arrive while the first one holds it.

    Recipes in capital letters wait in turn.
    """

    async def run() -> list[str]:
        lock, served = RecipeLock(), []

        async def chunk(digest: str) -> None:
            async with lock.hold(digest.lower(), in_turn=digest.isupper()):
                served.append(digest)
                await asyncio.sleep(0.001)

        await asyncio.gather(*map(chunk, arrivals))
        return served

    return asyncio.run(run())


def test_held_recipe_goes_first() -> None:
    """Chunks of the held recipe go first, others in order of arrival."""
    assert order(["a", "b", "c", "a", "b", "a"]) == ["a", "a", "a", "b", "b", "c"]
    assert order(["a", "b", "c", "d"]) == ["a", "b", "c", "d"]


def test_a_waiter_in_turn_passes_nobody() -> None:
    """A waiter in turn gets the lock before nobody who waits longer; chunks of its recipe still go first."""
    assert order(["A", "b", "A", "c", "A"]) == ["A", "b", "A", "c", "A"]
    assert order(["A", "b", "A", "b", "a"]) == ["A", "a", "b", "b", "A"]


def test_a_chunk_that_gives_up_waiting_does_not_block_the_rest() -> None:
    async def run() -> list[str]:
        lock, served = RecipeLock(), []

        async def chunk(digest: str, seconds: float) -> None:
            async with lock.hold(digest):
                await asyncio.sleep(seconds)
                served.append(digest)

        first = asyncio.create_task(chunk("a", 0.02))
        await asyncio.sleep(0)
        second, third = asyncio.create_task(chunk("b", 0)), asyncio.create_task(chunk("c", 0))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(first, third)
        await chunk("d", 0)
        # Cancelled just after the lock was passed on to it: it must pass the lock on again.
        fourth = asyncio.create_task(chunk("e", 0.01))
        await asyncio.sleep(0)
        fifth, sixth = asyncio.create_task(chunk("f", 0)), asyncio.create_task(chunk("g", 0))
        await fourth
        fifth.cancel()
        await sixth
        return served

    async def limited() -> list[str]:
        async with asyncio.timeout(5):
            return await run()

    assert asyncio.run(limited()) == ["a", "c", "d", "e", "g"]
