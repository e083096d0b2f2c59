"""A driver's checks before it takes over a job."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from service.jobs import driver
from service.store import Store
from service.store.database_url import VARIABLE, parse_url, remember
from tests.postgresql import PASSWORD, PostgreSQL


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


def said_by_driver(directory: Path, **environment: str) -> str:
    """Output of the driver for a job that does not exist."""
    done = subprocess.run(
        [sys.executable, "-m", "service.jobs.driver", "--data", str(directory), "--job", "nope"],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_driver_finds_the_database_and_shows_no_password(postgresql: PostgreSQL, tmp_path: Path) -> None:
    """A driver opens the database of its server's directory, or of its machine's variable; no password is shown."""
    urls = [postgresql.migrated(), postgresql.migrated()]
    remember(tmp_path, parse_url(urls[0]))
    told = [said_by_driver(tmp_path), said_by_driver(tmp_path, **{VARIABLE: urls[1]})]
    for url, text in zip(urls, told, strict=True):
        assert f"job 'nope': no such job in postgresql://tests:***@/{parse_url(url).database}" in text
        assert PASSWORD not in text
        assert parse_url(url).render_as_string(hide_password=False) not in text
        postgresql.drop(url)
