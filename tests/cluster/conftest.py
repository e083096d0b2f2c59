"""Marks the tests of this package, which `make test` leaves out, and skips them where no machines can be made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.machines import reason_to_skip
from tests.deploy.conftest import helm, programs

__all__ = ["helm", "programs"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("cluster")


@pytest.fixture(scope="session", autouse=True)
def _machines_can_be_made() -> None:
    if (reason := reason_to_skip()) is not None:
        pytest.skip(reason)
