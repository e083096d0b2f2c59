"""A wrong RAY_ADDRESS is reported at once, without Ray's own timeout of minutes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from service.cluster.session import SETTINGS_FRAME, check_reachable, ray_session
from workers.merging.node import SharedDirectory

ADVICE = "start Ray there, correct RAY_ADDRESS, or unset it to have Ray started on this machine"


@contextmanager
def listening(answer: bytes | None) -> Iterator[str]:
    """Address of a server that sends `answer` to every client, or nothing at all (None)."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                if answer is not None:
                    connection.sendall(answer)
                else:
                    connection.recv(1)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.timeout(60)  # Ray's own patience is minutes
def test_a_port_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConnectionError, match=f"^RAY_ADDRESS={address}: no Ray answers there .*refused.*; {ADVICE}$"):
        check_reachable()
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # as it is in a command of its own
    with pytest.raises(ConnectionError, match="no Ray answers there"), ray_session():
        pass


def test_end_removes_what_killed_processes_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a command's own Ray removes memory of killed processes, but none that another process uses."""
    monkeypatch.setattr("workers.merging.node.SHARED_MEMORY", tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    monkeypatch.setattr("service.cluster.session.start_ray", lambda: SimpleNamespace(dashboard_url=None))
    used = SharedDirectory("used")
    with ray_session():
        left = used.path.parent / "left"
        left.mkdir()
        (left / "users").touch()
    assert [each.name for each in used.path.parent.iterdir()] == ["used"]
    used.close()


@pytest.mark.parametrize("address", ["no-such-host.invalid:6379", "127.0.0.1:99999", "ray://127.0.0.1:1"])
def test_addresses_that_cannot_be(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConnectionError, match=f"^RAY_ADDRESS={address}: no Ray answers there"):
        check_reachable()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", f"the program that answers there is not Ray; {ADVICE}"),
        (b"", "the program that answers there is not Ray"),
        (None, r"no Ray answers there \(timed out\)"),
    ],
)
def test_what_listens_but_is_no_ray(monkeypatch: pytest.MonkeyPatch, answer: bytes | None, message: str) -> None:
    with listening(answer) as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConnectionError, match=message):
            check_reachable(timeout_s=0.5)


def test_what_speaks_http2_may_be_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(bytes([0, 0, 0, SETTINGS_FRAME, 0, 0, 0, 0, 0])) as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        check_reachable()


@pytest.mark.parametrize("address", ["", "auto", "local"])
def test_names_are_left_to_ray(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    check_reachable()
