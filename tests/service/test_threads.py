"""Each kind of work in the server has its own threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import anyio.to_thread
import pytest

from service.threads import LIMITS, MAX_THREADS, Work, in_thread, in_threads_of, limit_reads, sent_in_parts


@pytest.mark.parametrize("work", list(Work))
def test_work_that_waits_keeps_no_read(work: Work) -> None:
    """While all threads of one kind of work are busy, reads and every other kind have theirs."""

    async def scenario() -> None:
        limit_reads()
        release = threading.Event()
        busy = [asyncio.create_task(in_thread(work, release.wait, 30)) for _ in range(LIMITS[work] + 1)]
        try:
            await asyncio.sleep(0)
            async with asyncio.timeout(10):
                assert await anyio.to_thread.run_sync(lambda: True)
                for other in set(Work) - {work}:
                    assert await in_thread(other, lambda: True)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await in_thread(work, lambda: True)
        finally:
            release.set()
            assert all(await asyncio.gather(*busy))

    asyncio.run(scenario())


def test_few_reads_run_at_the_same_time() -> None:
    async def scenario() -> int:
        limit_reads()
        running, most = set[int](), 0
        lock = threading.Lock()

        def read() -> None:
            nonlocal most
            with lock:
                running.add(threading.get_ident())
                most = max(most, len(running))
            time.sleep(0.01)
            with lock:
                running.remove(threading.get_ident())

        await asyncio.gather(*(anyio.to_thread.run_sync(read) for _ in range(5 * MAX_THREADS)))
        return most

    assert asyncio.run(scenario()) == MAX_THREADS


def test_a_decorated_route_keeps_its_result_and_error() -> None:
    @in_threads_of(Work.WRITE)
    def divide(number: int, *, by: int) -> float:
        """Divide."""
        assert threading.current_thread() is not threading.main_thread()
        return number / by

    assert divide.__doc__ == "Divide."

    async def call(by: int) -> float:
        return await divide(3, by=by)

    assert asyncio.run(call(2)) == 1.5
    with pytest.raises(ZeroDivisionError):
        asyncio.run(call(0))


def test_a_download_is_closed_when_its_client_leaves() -> None:
    """All parts arrive, also empty ones; one that is left early is closed at once."""
    closed = []

    def parts() -> Iterator[bytes]:
        try:
            yield from (b"a", b"", b"b")
        finally:
            closed.append(True)

    async def scenario() -> None:
        assert [part async for part in sent_in_parts(parts())] == [b"a", b"", b"b"]
        left = sent_in_parts(parts())
        assert await anext(left) == b"a"
        assert len(closed) == 1
        await left.aclose()
        assert len(closed) == 2

    asyncio.run(scenario())
