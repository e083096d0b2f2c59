"""Messages that repeat while Ray does not start are logged only once in a while."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service.cluster import host
from service.cluster.reconciler import RayCluster
from service.cluster.repeats import REPEAT_S, Repeats
from service.store import Store


def test_a_message_is_logged_again_after_a_while() -> None:
    """Messages that differ in numbers and addresses of objects are one; each is logged once in REPEAT_S seconds."""
    now = [0.0]
    repeats = Repeats(clock=lambda: now[0])
    assert repeats.is_new("again in 31.5 s: <object at 0x7fa4c0>")
    now[0] = REPEAT_S - 1
    assert not repeats.is_new("again in 7 s: <object at 0xb012ff>")
    assert repeats.is_new("another one")
    now[0] = REPEAT_S
    assert repeats.is_new("again in 3 s: <object at 0x7>")


def test_a_ray_that_does_not_start_fills_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """An hour of rounds with a Ray that ends at each start logs a few lines in REPEAT_S seconds, not one a second."""
    now, started = [1000.0], []

    class Ended:
        pid = 2**22 + 1

        def __init__(self, *_: Any, **__: Any) -> None:
            started.append(now[0])

        def poll(self) -> int:
            return 1

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setattr(subprocess, "Popen", Ended)
    monkeypatch.setattr(host, "time", SimpleNamespace(monotonic=lambda: now[0]))
    store = Store(f"sqlite:///{tmp_path / 'studies.db'}")
    cluster = RayCluster(store, tmp_path, dashboard_host="127.0.0.1", dashboard_port=None)
    cluster._repeats = Repeats(clock=lambda: now[0])
    with caplog.at_level(logging.INFO, logger="service.cluster"):
        for _ in range(3600):
            cluster._round()
            now[0] += 1.0
    store.close()
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("service.cluster")]
    assert len(started) > 50
    assert any("Ray ended and is started again in" in message for message in messages)
    assert len(messages) <= 3 * 3600 / REPEAT_S
