from __future__ import annotations

from collections.abc import Iterator

import pytest

from service.notifications import retries
from service.store import Store
from tests.service.notifications.office import Office


@pytest.fixture
def office(database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Office]:
    """A notifier with short pauses between tries, on a database of each kind."""
    monkeypatch.setattr(retries, "FIRST_S", 0.05)
    monkeypatch.setattr(retries, "LONGEST_S", 0.2)
    store = Store(database)
    with Office(store) as office:
        yield office
    store.close()
