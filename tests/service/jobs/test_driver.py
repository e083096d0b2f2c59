"""What a driver checks before it takes a job over."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from service.jobs import driver
from service.store import Store
from tests.postgresql import PostgreSQL


def warnings_of(store: Store, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        driver._check_clock(store)
    return caplog.messages


@pytest.mark.parametrize("skew_s", [-100.0, 100.0])
def test_a_driver_whose_clock_is_wrong_says_so(
    skew_s: float, postgresql: PostgreSQL, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver warns if its machine's clock is ahead of the database's or behind it, and only then."""
    url = postgresql.migrated()
    store = Store(url)
    assert warnings_of(store, caplog) == []
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + skew_s)
    text = "this machine's clock differs from the database's by {:.0f} s, and so do the times here"
    assert warnings_of(store, caplog) == [text.format(skew_s)]
    store.close()
    postgresql.drop(url)


def test_one_machine_has_one_clock(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With SQLite, stored times are those of the driver's own clock."""
    store = Store(f"sqlite:///{tmp_path / 'a.db'}")
    assert warnings_of(store, caplog) == []
    store.close()
