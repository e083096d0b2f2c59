"""Marks the tests of this package, which `make test` leaves out, and skips them if no machines can be made here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.machines import reason_to_skip
from tests.cluster.site import Site, site_on
from tests.deploy.conftest import helm, programs
from tests.postgresql import PostgreSQL

__all__ = ["helm", "programs"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("cluster")


@pytest.fixture(scope="session", autouse=True)
def _machines_can_be_made() -> None:
    if (reason := reason_to_skip()) is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def site(
    tmp_path_factory: pytest.TempPathFactory, _machines_can_be_made: None, _postgresql: PostgreSQL
) -> Iterator[Site]:
    with site_on(tmp_path_factory.mktemp("site"), _postgresql) as site:
        yield site
