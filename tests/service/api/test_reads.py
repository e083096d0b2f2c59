"""Reads are answered while other requests wait: for Ray, or for the lock of the database."""

from __future__ import annotations

import inspect
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
from fastapi.routing import APIRoute

from service.threads import LIMITS, MAX_THREADS, Work
from service.types import JobRecord
from tests.service.api.harness import ApiServer, stored_study

ANSWER_S = 10.0


@contextmanager
def sent(url: str, paths: list[tuple[str, str]]) -> Iterator[list[Future[httpx.Response]]]:
    """Send requests (method and path) at the same time. They may be unanswered; the context's end waits for them."""
    with httpx.Client(base_url=url, timeout=60, limits=httpx.Limits()) as http, ThreadPoolExecutor(len(paths)) as pool:
        yield [pool.submit(http.request, method, path) for method, path in paths]


def is_read(server: ApiServer, study: JobRecord) -> bool:
    """Whether reads of all kinds are answered within ANSWER_S."""
    with httpx.Client(base_url=server.url, timeout=ANSWER_S) as http:
        paths = ("/v1/studies", f"/v1/studies/{study.id}", f"/v1/studies/{study.id}/trials", "/readyz", "/metrics")
        return [http.get(path).status_code for path in paths] == [200] * len(paths)


def test_a_slow_ray_keeps_no_read(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """While more logs are asked of Ray than there are threads for reads, reads are answered."""
    study, answers, asked = stored_study(server.store), threading.Event(), threading.Semaphore(0)

    def log(_: JobRecord) -> str:
        asked.release()
        assert answers.wait(60)
        return "log"

    monkeypatch.setattr(server.cluster, "log", log)
    paths = [("GET", f"/v1/studies/{study.id}/log")] * (2 * MAX_THREADS)
    with sent(server.url, paths) as logs:
        try:
            for _ in paths:
                assert asked.acquire(timeout=ANSWER_S)
            assert is_read(server, study)
            assert not any(log.done() for log in logs)
        finally:
            answers.set()
    assert [log.result().text for log in logs] == ["log"] * len(paths)


def test_writes_that_wait_for_a_lock_keep_no_read(server: ApiServer) -> None:
    """While another process holds the lock of the database, studies cannot be paused, and are read."""
    studies = [stored_study(server.store, name=f"study-{number}") for number in range(LIMITS[Work.WRITE] + MAX_THREADS)]
    paths = [("POST", f"/v1/studies/{study.id}:cancel") for study in studies]
    other = sqlite3.connect(server.data_dir / "mergesearch.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    with sent(server.url, paths) as writes:
        try:
            time.sleep(0.3)  # until all have begun
            assert is_read(server, studies[0])
            assert not any(write.done() for write in writes)
        finally:
            other.execute("ROLLBACK")
            other.close()
    assert [write.result().status_code for write in writes] == [202] * len(writes)


def test_routes_that_write_use_no_threads_of_reads(server: ApiServer) -> None:
    """A route that is a plain function runs in the threads for reads, so only routes that read may be one."""
    routes = [route for route in server.app.routes if isinstance(route, APIRoute)]
    writing = [route for route in routes if route.methods - {"GET", "HEAD"}]
    assert len(writing) > 30
    assert [
        f"{route.methods} {route.path}" for route in writing if not inspect.iscoroutinefunction(route.endpoint)
    ] == []
