"""Worker processes of tests have the environment of the test, and what all of them import."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from service import worker_process
from service.worker_process import WorkerProcess
from tests.service.forked_workers import ForkingContext


def seen() -> tuple[str | None, bool]:
    """Return the value of a variable in this process, and whether modules were imported before its first call."""
    return os.environ.get("OF_THE_TEST"), "torch" in sys.modules


@pytest.mark.slow
def test_forks_have_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork has imported the modules, unless a variable differs that they read."""
    assert isinstance(worker_process.CONTEXT, ForkingContext)
    monkeypatch.setenv("OF_THE_TEST", "yes")

    async def told() -> tuple[str | None, bool]:
        process = WorkerProcess("test")
        try:
            return await process.call(seen)
        finally:
            process.stop()

    assert asyncio.run(told()) == ("yes", True)
    monkeypatch.setenv("HF_HOME", "/elsewhere")
    assert asyncio.run(told()) == ("yes", False)
