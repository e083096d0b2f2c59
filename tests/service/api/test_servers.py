"""Two servers of one PostgreSQL, as processes: replaced one after the other, while a client watches through a proxy."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.client import Client
from service.store import JobWriter, Store
from service.types import JobState
from tests.end_to_end.server import Server
from tests.postgresql import PASSWORD, PostgreSQL
from tests.service.api.harness import stored_study
from tests.service.cluster.test_reconciler import Dashboard

START_S = 120.0


@pytest.fixture
def url(postgresql: PostgreSQL) -> Iterator[str]:
    url = postgresql.migrated()
    yield url
    postgresql.drop(url)


class Proxy:
    """Passes each connection on to the first of `ports` that accepts it."""

    def __init__(self) -> None:
        self.ports: list[int] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                for port in list(self.ports):
                    try:
                        server = socket.create_connection(("127.0.0.1", port))
                    except OSError:
                        continue
                    for ends in ((client, server), (server, client)):
                        threading.Thread(target=_pass_on, args=ends, daemon=True).start()
                    break
                else:
                    client.close()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


class Servers:
    """Two servers with one database and one data directory, behind a proxy."""

    def __init__(self, directory: Path, database: str, ray_address: str) -> None:
        self.proxy = Proxy()
        self.servers: list[Server] = []
        environment = {"MERGESEARCH_DATABASE": database, "RAY_ADDRESS": ray_address, "RAY_AUTH_MODE": "disabled"}
        environment["FAKE_LATE_CHECKS"] = "1"  # no study is sent to them
        for number in range(2):
            server = Server(["tests.benchmarks.fake_serve"], directory / "data", environment=environment)
            server.log_file = directory / f"server-{number}.log"
            self.servers.append(server)

    def start(self, number: int) -> None:
        self.servers[number].start(timeout_s=START_S)
        self.proxy.ports = [int(server.url.rpartition(":")[2]) for server in self.servers if server.url]

    def end(self) -> None:
        self.proxy.close()
        for server in self.servers:
            if server.url:
                server.end()


def wait_until(is_true: Callable[[], bool], servers: Servers) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline, "".join(server.log for server in servers.servers)
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_watcher_misses_nothing_while_servers_are_replaced(url: str, tmp_path: Path) -> None:
    """A client sees each event once while both servers are replaced; the other one leads, and answers the same."""
    store, dashboard = Store(url), Dashboard()
    (tmp_path / "data").mkdir()
    with dashboard.serving() as address:
        servers = Servers(tmp_path, url, address)
        try:
            servers.start(0)
            servers.start(1)
            study = stored_study(store)
            wait_until(lambda: len(dashboard.jobs) == 1, servers)

            def answers() -> list[Any]:
                return [httpx.get(f"{server.url}/v1/studies/{study.id}").json() for server in servers.servers]

            wait_until(lambda: [found["waiting_for"] for found in answers()] == ["its driver to start"] * 2, servers)
            first, second = answers()
            assert first == second
            writer = store.open_attempt(study.id)
            seen: list[int] = []
            watcher = threading.Thread(target=watch, args=(servers.proxy.url, study.id, seen))
            watcher.start()
            stop = threading.Event()
            writing = threading.Thread(target=write, args=(writer, stop))
            writing.start()
            wait_until(lambda: len(seen) > 20, servers)
            assert servers.servers[0].stop() == 0
            progress = len(seen)
            wait_until(lambda: len(seen) > progress + 20, servers)
            another = stored_study(store, name="another")
            wait_until(lambda: len(dashboard.jobs) == 2, servers)  # by the second server, which leads now
            servers.start(0)
            servers.servers[1].kill()
            progress = len(seen)
            wait_until(lambda: len(seen) > progress + 20, servers)
            third = stored_study(store, name="third")
            wait_until(lambda: len(dashboard.jobs) == 3, servers)  # by the first one, which leads again
            stop.set()
            writing.join()
            writer.set_state(JobState.COMPLETE)
            watcher.join(60)
            assert seen == [event.id for event in store.events(study.id)]
            names = {name.rsplit("-", 2)[1] for name in dashboard.jobs}
            assert names == {job.id[:8] for job in (study, another, third)}
        finally:
            servers.end()
    store.close()
    told = "".join(server.log for server in servers.servers)
    assert told.count("this server is the leader") == 3
    assert PASSWORD not in told
    assert os.environ.get("MERGESEARCH_DATABASE") is None


def watch(url: str, study: str, seen: list[int]) -> None:
    with Client(url) as client:
        seen.extend(event.id for event in client.events(study) if event.id is not None)


def write(writer: JobWriter, stop: threading.Event) -> None:
    while not stop.wait(0.02):
        writer.add_event("note", {})
