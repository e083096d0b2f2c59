"""Intervals in which replicas merged, swapped, scored or were idle."""

from __future__ import annotations

import numpy as np
import pytest

from service.results.timeline import MAX_CHUNKS, TimelineChunk, TimelineEvent, timeline
from service.store.records import ChunkWork, EventRecord


def work(replica: str, finished_at: float, merge: float, swap: float, score: float, *, trial: int = 0) -> ChunkWork:
    timings = {"materialise": merge, "swap": swap, "score": score, "wait": 9.0}
    return ChunkWork(replica, trial, 8, timings, finished_at)


CHUNKS = (work("a", 110, 2, 1, 7), work("a", 120, 0, 0, 5, trial=1), work("b", 108, 1, 1, 2))


def test_bins_have_the_shares_of_phases() -> None:
    """Phases follow each other and end when the chunk was stored; what is left of a bin is idle time."""
    plot = timeline(CHUNKS, num_bins=4)
    assert (plot.start, plot.end, plot.replicas) == (100, 120, ["a", "b"])
    a, b = plot.bins
    assert a.merge == [0.4, 0, 0, 0]
    assert a.swap == [0.2, 0, 0, 0]
    assert a.score == [0.4, 1, 0, 1]
    assert a.idle == [0, 0, 1, 0]
    assert b.merge == [0.2, 0, 0, 0]
    assert b.swap == pytest.approx([0, 0.2, 0, 0])
    assert b.score == pytest.approx([0, 0.4, 0, 0])
    assert b.idle == pytest.approx([0.8, 0.4, 1, 1])
    assert plot.chunks == [
        TimelineChunk(0, 0, 8, 100, 102, 103, 110),
        TimelineChunk(0, 1, 8, 115, 115, 115, 120),
        TimelineChunk(1, 0, 8, 104, 105, 106, 108),
    ]


def test_a_time_has_the_chunks_that_it_meets() -> None:
    plot = timeline(CHUNKS, start=109, end=117, num_bins=4)
    assert [chunk.trial for chunk in plot.chunks or ()] == [0, 1]
    assert plot.bins[0].score == [0.5, 0, 0, 1]
    assert timeline(CHUNKS, start=200, num_bins=4).bins == []
    assert timeline((), num_bins=4).start is None


def test_many_chunks_are_shown_in_bins_alone() -> None:
    """The time in bins is that of the chunks, also if inexact times overlap."""
    rng = np.random.default_rng(0)
    made = [work("a", 100 + 2 * n, *rng.uniform(0, 0.5, 3)) for n in range(MAX_CHUNKS)]
    plot = timeline(made, num_bins=37)
    assert plot.chunks is None
    assert plot.start is not None
    assert plot.end is not None
    width = (plot.end - plot.start) / 37
    for name, key in (("merge", "materialise"), ("swap", "swap"), ("score", "score")):
        seconds = sum(chunk.timings_s[key] for chunk in made)
        assert sum(getattr(plot.bins[0], name)) * width == pytest.approx(seconds, rel=1e-2)
    overlapping = timeline([work("a", 110, 0, 0, 10), work("a", 111, 5, 0, 5)], num_bins=3).bins[0]
    for shares in zip(overlapping.merge, overlapping.swap, overlapping.score, overlapping.idle, strict=True):
        assert sum(shares) == pytest.approx(1, abs=1e-3)


def test_events_say_why_nothing_was_scored() -> None:
    """Attempts, waits and faults before the end are listed, also those before the beginning."""
    events = [
        EventRecord(1, 90, "attempt", {"attempt": 1, "because": None}),
        EventRecord(2, 111, "waiting", {"reason": "a GPU"}),
        EventRecord(3, 114, "attempt", {"attempt": 2, "because": "the driver ended"}),
        EventRecord(4, 118, "engine_fault", {"replicas": {"a": "sum", "b": "logits"}, "samples": 8}),
    ]
    told = timeline(CHUNKS, start=100, num_bins=2, events=events).events
    assert told == [
        TimelineEvent(90, "attempt", "attempt 1"),
        TimelineEvent(111, "waiting", "waits: a GPU"),
        TimelineEvent(114, "attempt", "attempt 2: the driver ended"),
        TimelineEvent(118, "engine_fault", "a: sum; b: logits"),
    ]
    assert timeline(CHUNKS, end=112, num_bins=2, events=events).events == told[:2]
    assert timeline((), num_bins=2, events=events).events == told
