"""A process beside the server: results and errors come back, and its death is reported and repaired."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from search_spaces.errors import InvalidStudy, Problem
from service.worker_process import CallLimits, LimitExceeded, ProcessDied, WorkerProcess, lift_limits

TIMEOUT_S = 60.0

# Each starts a process that imports as the server's do.
pytestmark = pytest.mark.slow


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


def test_one_process_answers_all_calls() -> None:
    """Results and errors come back from one process."""

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


def test_idle_death_is_unnoticed() -> None:
    """A process that died while idle is replaced without an error."""

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


def burn() -> None:
    while True:
        pass


def allocate(num_bytes: int) -> int:
    return len(bytearray(num_bytes))


def test_call_beyond_limits_ends_alone() -> None:
    """A call that exceeds its limits is ended, and the next one is not."""
    limits = CallLimits(cpu_s=1, memory_bytes=2**30)

    async def scenario() -> None:
        async with side_process() as process:
            pid = await process.call(os.getpid, limits=limits)
            with pytest.raises(LimitExceeded, match=r"^1 s of processor time$"):
                await process.call(burn, limits=limits, timeout_s=TIMEOUT_S)
            assert not psutil.pid_exists(pid)
            with pytest.raises(LimitExceeded, match=r"^1\.0 GiB of memory$"):
                await process.call(allocate, 2**31, limits=limits)
            assert await process.call(allocate, 2**20, limits=limits) == 2**20
            pid = await process.call(os.getpid)
            for _ in range(3):  # of each call by itself
                await process.call(nap_busily, 0.5, limits=limits)
            assert await process.call(allocate, 2**31) == 2**31
            assert await process.call(os.getpid) == pid

    asyncio.run(scenario())


def nap_busily(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def lift_and_allocate(num_bytes: int) -> int:
    lift_limits()
    return allocate(num_bytes)


def test_a_call_may_lift_its_limits() -> None:
    async def scenario() -> None:
        async with side_process() as process:
            limits = CallLimits(memory_bytes=2**30)
            assert await process.call(lift_and_allocate, 2**31, limits=limits) == 2**31
            with pytest.raises(LimitExceeded):
                await process.call(allocate, 2**31, limits=limits)

    asyncio.run(scenario())


def child() -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def start_child_and_nap(file: str) -> None:
    Path(file).write_text(str(child()))
    time.sleep(TIMEOUT_S)


def test_what_a_call_has_started_ends_with_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with side_process() as process:
            await process.call(os.getpid)  # it has started, which may take longer than the call
            with pytest.raises(TimeoutError):
                await process.call(start_child_and_nap, str(tmp_path / "pid"), timeout_s=5.0)
            started = psutil.Process(int((tmp_path / "pid").read_text()))
            gone, _ = psutil.wait_procs([started], timeout=TIMEOUT_S)
            assert gone

    with contextlib.suppress(psutil.NoSuchProcess):
        asyncio.run(scenario())


def test_stop_ends_the_running_call() -> None:
    """A stop ends the running call and refuses later ones."""

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
