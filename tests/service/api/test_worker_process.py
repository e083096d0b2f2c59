"""A process beside the server: results and errors come back, its death is told and mended."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest

from search_spaces.errors import InvalidStudy, Problem
from service.api.worker_process import ProcessDied, WorkerProcess

TIMEOUT_S = 60.0


def refuse(field: str) -> None:
    raise InvalidStudy((Problem(field, "no"),))


class Unportable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def fail_unportably() -> None:
    raise Unportable("of", "two")


def nap(seconds: float) -> None:
    time.sleep(seconds)


def warm() -> None:
    os.environ["WARM"] = "yes"


def is_warm() -> str | None:
    return os.environ.get("WARM")


@asynccontextmanager
async def side_process(**arguments: object) -> AsyncIterator[WorkerProcess]:
    process = WorkerProcess("test", **arguments)  # type: ignore[arg-type]
    try:
        yield process
    finally:
        await asyncio.to_thread(process.stop)


def test_results_and_errors_come_back_from_one_and_the_same_process() -> None:
    async def scenario() -> None:
        async with side_process(warm_up=warm) as process:
            pid = await process.call(os.getpid)
            assert pid != os.getpid()
            assert await process.call(is_warm) == "yes"
            with pytest.raises(InvalidStudy) as caught:
                await process.call(refuse, "models.base")
            assert caught.value.problems == (Problem("models.base", "no"),)
            with pytest.raises(RuntimeError, match=r"Unportable\('of two'\)"):
                await process.call(fail_unportably)
            assert await process.call(os.getpid) == pid == process.pid

    asyncio.run(scenario())


def test_calls_take_turns() -> None:
    async def scenario() -> None:
        async with side_process() as process:
            assert await asyncio.gather(*(process.call(abs, -i) for i in range(20))) == list(range(20))

    asyncio.run(scenario())


def test_a_killed_process_is_told_of_once_and_replaced() -> None:
    async def scenario() -> None:
        async with side_process() as process:
            pid = await process.call(os.getpid)
            call = asyncio.create_task(process.call(nap, TIMEOUT_S))
            await asyncio.sleep(0.1)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(ProcessDied, match="test: the process ended before the call did"):
                await call
            assert await process.call(os.getpid) != pid

    asyncio.run(scenario())


def test_a_process_that_died_while_nobody_asked_is_replaced_unnoticed() -> None:
    async def scenario() -> None:
        async with side_process() as process:
            pid = await process.call(os.getpid)
            os.kill(pid, signal.SIGKILL)
            psutil.wait_procs([psutil.Process(pid)], timeout=TIMEOUT_S)
            assert await process.call(os.getpid) != pid

    asyncio.run(scenario())


def test_a_call_that_takes_too_long_is_ended() -> None:
    async def scenario() -> None:
        async with side_process() as process:
            pid = await process.call(os.getpid)
            with pytest.raises(TimeoutError, match=r"no answer within 0\.2 s"):
                await process.call(nap, TIMEOUT_S, timeout_s=0.2)
            assert not psutil.pid_exists(pid)
            assert await process.call(abs, -1) == 1

    asyncio.run(scenario())


def test_stopping_ends_the_call_that_is_running_and_refuses_later_ones() -> None:
    async def scenario() -> None:
        async with side_process() as process:
            await process.call(os.getpid)
            call = asyncio.create_task(process.call(nap, TIMEOUT_S))
            await asyncio.sleep(0.1)
            process.stop()
            with pytest.raises(ProcessDied):
                await call
            with pytest.raises(ProcessDied, match="was stopped"):
                await process.call(os.getpid)

    asyncio.run(scenario())
