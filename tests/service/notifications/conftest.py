from __future__ import annotations

from collections.abc import Iterator

import pytest

from service.notifications import notifier, retries
from service.store import Store
from tests.service.notifications.office import Office


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the pauses between tries, and between looks at the database, short."""
    monkeypatch.setattr(retries, "FIRST_S", 0.05)
    monkeypatch.setattr(retries, "LONGEST_S", 0.2)
    monkeypatch.setattr(notifier, "POLL_S", 0.1)


@pytest.fixture
def office(database: str, short_pauses: None) -> Iterator[Office]:
    """A notifier with short pauses, on a database of each kind."""
    store = Store(database)
    with Office(store) as office:
        yield office
    store.close()
