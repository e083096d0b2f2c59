from __future__ import annotations

import io

import pytest

from service.cli.export_progress import ExportView
from workers.export.shards import Progress

GIB = 2**30


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, *points: tuple[float, float], kept: float = 0, unit: int = GIB) -> str:
    """Output for an export of ten GiB (or `unit`), after pairs of elapsed seconds and written GiB."""
    clock = Clock()
    with ExportView(stream=stream, clock=clock) as view:
        for elapsed_s, written in points:
            clock.now = 100 + elapsed_s
            view.update(Progress(int(written * unit), int(kept * unit), 10 * unit))
    return stream.getvalue()


def test_a_short_export_says_nothing() -> None:
    assert shown(io.StringIO(), (0, 0), (1, 5), (1.9, 10)) == ""
    assert shown(Terminal(), (0, 0), (1, 5), (1.9, 10)) == ""


def test_a_long_one_says_now_and_then_how_far_it_is() -> None:
    lines = shown(io.StringIO(), (0, 0), (2, 1), (5, 2), (13, 4), (14, 5)).splitlines()
    assert lines == [
        "[2s] writing: 1.0 of 10.0 GiB, 512 MiB/s, 18s left",
        "[13s] writing: 4.0 of 10.0 GiB, 315 MiB/s, 20s left",
    ]


def test_what_was_there_is_not_counted_as_speed() -> None:
    assert shown(io.StringIO(), (0, 6), (10, 8), kept=6).splitlines() == [
        "[10s] writing: 8.0 of 10.0 GiB (6.0 GiB already there), 205 MiB/s, 10s left"
    ]


def test_small_models_are_measured_in_mib() -> None:
    lines = shown(io.StringIO(), (0, 2), (10, 4), (20, 10), kept=2, unit=2**20).splitlines()
    assert lines == [
        "[10s] writing: 4.0 of 10.0 MiB (2.0 MiB already there), 205 KiB/s, 30s left",
        "[20s] writing: 10.0 of 10.0 MiB (2.0 MiB already there), 410 KiB/s, 0s left",
    ]


def test_a_line_is_no_longer_than_the_terminal_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    assert shown(Terminal(), (0, 0), (2, 1)) == "\r\x1b[K[2s] writing: 1.0 of 10.0 GiB\n"


def test_a_terminal_has_one_line_that_rewrites_itself() -> None:
    text = shown(Terminal(), (0, 0), (2, 1), (2.1, 1.1), (3, 1.5))
    assert text.count("\r\x1b[K") == 2
    assert text.endswith("left\n")
    assert text.count("\n") == 1
