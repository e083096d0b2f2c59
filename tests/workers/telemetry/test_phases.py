"""Phases of a start: an outer phase returns after an inner one, and listeners are optional."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from workers.telemetry.phases import phase, report_to


@pytest.fixture
def told() -> Iterator[list[str]]:
    found: list[str] = []
    report_to(found.append)
    yield found
    report_to(None)


def test_phases_are_reported_in_order(told: list[str]) -> None:
    """The phase around another is reported again when the inner one ends, also by an error."""
    with phase("reads the sources"):
        with pytest.raises(OSError, match="no disk"), phase("waits for another process"):
            raise OSError("no disk")
        with phase("reads them itself"):
            pass
    with phase("starts vLLM"):
        pass
    assert told == [
        "reads the sources",
        "waits for another process",
        "reads the sources",
        "reads them itself",
        "reads the sources",
        "starts vLLM",
    ]


def test_nobody_has_to_listen(told: list[str]) -> None:
    report_to(None)
    with phase("starts vLLM"):
        pass
    assert told == []
