"""Fixtures of terminals, alone or with a study or a server; no command of a test may start Ray or vLLM."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.cli.remote import SERVER_VARIABLE
from tests.builders import tiny_family
from tests.service.cli.terminals import ServerTerminal, Workplace
from tests.service.site import Site
from workers.models.family import open_family
from workers.types import Family


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test whose command starts Ray or imports vLLM; earlier tests of the session may have done both."""

    def started() -> None:
        raise AssertionError("Ray would have been started")

    monkeypatch.setattr("service.jobs.resources.ray_session", started)
    before = "vllm" in sys.modules, ray_is_up()
    yield
    assert ("vllm" in sys.modules, ray_is_up()) == before


def ray_is_up() -> bool:
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("family")
    tiny_family(directory, experts=("math", "text"))
    return directory


@pytest.fixture
def family(models: Path) -> Family:
    return open_family(models / "base", {alias: models / alias for alias in ("math", "text")})


@pytest.fixture
def place(tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str]) -> Workplace:
    return Workplace(capsys, tmp_path, models)


@pytest.fixture
def terminal(site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> ServerTerminal:
    monkeypatch.delenv(SERVER_VARIABLE, raising=False)
    monkeypatch.chdir(site.directory)
    return ServerTerminal(capsys, site)
