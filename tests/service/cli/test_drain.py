"""`mergesearch drain`, which holds jobs back while a server is upgraded."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from service.disk import DRAINED, job_dir
from service.errors import StaleAttempt
from service.jobs.driver import drive
from service.store import Store
from service.store.connection import transaction
from service.store.jobs import _lock_drains
from service.types import ALIVE_S, JobRecord, JobState
from tests.postgresql import PostgreSQL
from tests.service.api.harness import ApiServer, document
from tests.service.cli.terminals import Terminal

END = "drained; no job has a driver, and jobs wait until `mergesearch drain --end`"


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.delenv("MERGESEARCH_DATABASE", raising=False)
    return Terminal(capsys)


def test_a_drained_server_accepts_no_jobs(terminal: Terminal, tmp_path: Path) -> None:
    """A new job is refused with the reason; a repeated request gets its job, and everything can be read."""
    with ApiServer(tmp_path) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        first = http.post("/v1/studies", json=document(), headers={"Idempotency-Key": "a"}).json()
        assert terminal.run("drain", "--data", tmp_path) == (0, f"{tmp_path}: {END}\n", "")
        refused = http.post("/v1/studies", json=document())
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert refused.json()["detail"] == f"{DRAINED}; send the study again then"
        again = http.post("/v1/studies", json=document(), headers={"Idempotency-Key": "a"})
        assert (again.status_code, again.json()["id"]) == (200, first["id"])
        assert len(http.get("/v1/studies").json()["studies"]) == 1
        assert terminal.run("drain", "--data", tmp_path, "--end")[1] == f"{tmp_path}: jobs are accepted and continue\n"
        assert http.post("/v1/studies", json=document()).status_code == 201


def test_drivers_that_still_work_are_named(terminal: Terminal, tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'mergesearch.db'}")
    working, idle = (store.create_job(kind="search", name=n, document={}, accepted={}) for n in ("a", "b"))
    store.open_attempt(working.id).heartbeat(wall_clock_s=1.0)
    code, out, _ = terminal.run("drain", "--data", tmp_path, "--wait", 0)
    assert (code, out) == (
        1,
        f"{tmp_path}: drained, but drivers still work on a; wait, or end them with their Ray\n",
    )
    assert store.is_drained()
    code, out, _ = terminal.run("drain", "--data", tmp_path, "--wait", 0, "--json")
    assert (code, json.loads(out)) == (1, {"drained": True, "working": ["a"]})
    assert idle.state is JobState.CREATED
    store.close()


def test_a_drain_misses_no_driver_that_begins(terminal: Terminal, tmp_path: Path) -> None:
    """A driver that has just begun is waited for; one that was submitted and begins later ends without any work."""
    store = Store(f"sqlite:///{tmp_path / 'mergesearch.db'}")
    begun, submitted = (store.create_job(kind="search", name=n, document={}, accepted={}) for n in ("a", "b"))
    for job in (begun, submitted):
        store.record_submission(job.id, 1)
    store.open_attempt(begun.id, as_driver=True)
    assert terminal.run("drain", "--data", tmp_path, "--wait", 0)[:2] == (
        1,
        f"{tmp_path}: drained, but drivers still work on a; wait, or end them with their Ray\n",
    )
    assert drive(store, submitted.id, work_dir=job_dir(tmp_path, submitted.id)) == 0
    assert (store.job(submitted.id).attempt, store.job(submitted.id).state) == (0, JobState.CREATED)
    store.open_attempt(submitted.id, because="it was cancelled").set_state(JobState.CANCELLED)
    assert terminal.run("drain", "--data", tmp_path, "--end")[0] == 0
    store.open_attempt(begun.id, as_driver=True)
    store.close()


def test_servers_with_directories_of_their(terminal: Terminal, tmp_path: Path) -> None:
    """The drain is in the database, which a server's own directory or the option names."""
    database = f"sqlite:///{tmp_path / 'shared.db'}"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with ApiServer(tmp_path / "one", database=database) as server, httpx.Client(base_url=server.url) as http:
        assert terminal.run("drain", "--data", tmp_path / "two", "--database", database)[0] == 0
        assert http.post("/v1/studies", json=document()).status_code == 503


@pytest.mark.timeout(120)
def test_a_driver_that_is_just_beginning_delays_a_drain(postgresql: PostgreSQL) -> None:
    """On PostgreSQL a drain waits for transactions in which drivers begin, so that it finds their heartbeats."""
    url = postgresql.migrated()
    stores = [Store(url), Store(url)]
    job = stores[0].create_job(kind="search", name="a", document={}, accepted={})
    drained = threading.Thread(target=lambda: stores[1].set_drained(drained=True))
    with transaction(stores[0].engine) as connection:
        _lock_drains(connection, is_shared=True)  # as `open_attempt` does first
        drained.start()
        drained.join(1.0)
        assert drained.is_alive()
    drained.join(60)
    with pytest.raises(StaleAttempt, match=f"job {job.id}: {DRAINED}"):
        stores[0].open_attempt(job.id, as_driver=True)
    for store in stores:
        store.close()
    postgresql.drop(url)


def test_a_job_has_a_driver_while_it_sends_heartbeats() -> None:
    job = JobRecord("1", "a", JobState.RUNNING, {}, {}, 0.0, "search", heartbeat_at=100.0)
    assert job.has_driver(now=100.0 + ALIVE_S - 1)
    assert not job.has_driver(now=100.0 + ALIVE_S + 1)
    assert not replace(job, heartbeat_at=None).has_driver(now=100.0)
    assert not replace(job, state=JobState.COMPLETE).has_driver(now=100.0)


def test_a_directory_that_is_not_there_is_refused(terminal: Terminal, tmp_path: Path) -> None:
    code, _, err = terminal.run("drain", "--data", tmp_path / "none")
    assert code == 2
    assert err == f"mergesearch: --data {tmp_path / 'none'}: is not a directory; give the data directory of a server\n"
