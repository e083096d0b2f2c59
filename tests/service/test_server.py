"""`mergesearch serve`: the limits of the process and of its connections."""

from __future__ import annotations

import logging
import resource
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from service import open_files
from service.server import serve

LONGEST_KEPT_S = 60  # of the clients and proxies that we know: nginx keeps connections to a server for so long


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[uvicorn.Config]:
    """Configurations of the servers that `serve` would have run."""
    found: list[uvicorn.Config] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, **_: found.append(server.config))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return found


def test_connections_outlive_those_of_proxies(configs: list[uvicorn.Config], tmp_path: Path) -> None:
    """The server closes an idle connection later than its clients, whose requests would be reset otherwise."""
    serve(tmp_path / "data", port=0)
    (config,) = configs
    assert config.timeout_keep_alive > LONGEST_KEPT_S


@pytest.mark.usefixtures("configs")
def test_the_limit_of_open_files_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """A server whose limit cannot become high enough says so."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(open_files, "FEW", open_files.ENOUGH + 1)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, before[1]))
        with caplog.at_level(logging.WARNING, logger="service.server"):
            serve(tmp_path / "data", port=0)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1000
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert "files, and every connection of a client is one" in caplog.text
