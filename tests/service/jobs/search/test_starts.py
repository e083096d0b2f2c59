"""A driver's reports while engines start."""

from __future__ import annotations

import time
from typing import Any

import pytest

from service.jobs.heartbeat import ENGINE
from service.jobs.search import starts
from workers.serving.start_phases import start_text, summary


def test_phases_of_many_replicas_are_counted() -> None:
    """Sixteen replicas say what they wait for, the most frequent first."""
    phases = ["downloads owner/name", *["waits for another process"] * 12, *["starts vLLM"] * 3]
    assert summary(phases) == (
        "12 of 16: waits for another process; 3 of 16: starts vLLM; 1 of 16: downloads owner/name"
    )
    assert summary(["starts vLLM"]) == "it starts vLLM"
    assert summary([]) == ""


def test_changed_phases_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver waits for what replicas do: the job's document and the log have it when it changes."""
    texts = iter(["", "it downloads owner/name", "it downloads owner/name", "it starts vLLM"])
    monkeypatch.setattr(starts, "start_text", lambda application: next(texts, "it starts vLLM"))
    monkeypatch.setattr(starts, "LOOK_S", 0.01)
    waits: list[str | None] = []
    lines: list[str] = []

    class Heartbeat:
        def wait_for(self, what: str | None) -> None:
            waits.append(what)

    heartbeat: Any = Heartbeat()
    with starts.telling_starts("scorer-1", heartbeat, lines.append):
        deadline = time.monotonic() + 30
        while len(lines) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert waits == [f"{ENGINE}: it downloads owner/name", f"{ENGINE}: it starts vLLM"]
    assert lines == ["Engines start: it downloads owner/name", "Engines start: it starts vLLM"]


def test_without_ray_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    assert start_text("scorer-1") == ""
