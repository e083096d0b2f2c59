"""Timeline of a study's replicas: the shares of time for merging, swapping weights, scoring samples and being idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter

from service.store.records import ChunkWork, EventRecord
from service.types import EventKind

__all__ = ["EVENTS", "TITLE", "TimelinePlot", "timeline", "timeline_json"]

Time = Annotated[float, Field(description="Seconds since the epoch.")]

TITLE = "Shares of time in which each replica merged, swapped weights, scored samples or was idle."

# Phases of a chunk in their order, with the names of its timings.
PHASES = {"merge": "materialise", "swap": "swap", "score": "score"}

# Kinds of events that explain times without work.
EVENTS = (EventKind.ATTEMPT, EventKind.WAITING, EventKind.ENGINE_FAULT)

# Single chunks are listed below this number.
MAX_CHUNKS = 500

# Digits of shares.
DIGITS = 4

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class TimelineChunk:
    """Chunk of samples that a replica scored in one request, with the times of its phases.

    `merge`, `swap` and `score` are the times at which these phases began; scoring ended at `end`.
    """

    replica: Annotated[int, Field(description="Index in `replicas`.")]
    trial: int
    samples: int
    merge: Time
    swap: Time
    score: Time
    end: Time


@dataclass(frozen=True)
class ReplicaShares:
    """Shares of a replica's time: computing merges, swapping weights, scoring samples, and being idle.

    Each list has a number from 0 to 1 for each bin of a timeline. The numbers of the four lists sum to 1 in each bin.
    """

    merge: list[float]
    swap: list[float]
    score: list[float]
    idle: list[float]


@dataclass(frozen=True)
class TimelineEvent:
    """Event that explains why engines did not work for some time.

    The kind `attempt` is the beginning of a driver's work, `waiting` is the beginning of a wait, and `engine_fault` is
    an engine that failed a check.
    """

    time: Time
    kind: Literal["attempt", "waiting", "engine_fault"]
    text: str


@dataclass(frozen=True)
class TimelinePlot:
    """Shares of time that each replica spent on each kind of work, in bins of equal length.

    A replica runs an engine that scores chunks of samples. If the chunks are fewer than 500, `chunks` lists each of
    them. Times are computed from the time at which results were stored and from measured seconds, so they are inexact
    by fractions of a second.
    """

    plot: Literal["timeline"]
    start: Annotated[float | None, Field(description="Beginning of the first bin; null before anything is scored.")]
    end: Annotated[float | None, Field(description="End of the last bin.")]
    replicas: list[str]
    bins: Annotated[list[ReplicaShares], Field(description="Shares of each bin, by replica.")]
    chunks: Annotated[list[TimelineChunk] | None, Field(description="Null if there are 500 or more.")]
    events: Annotated[list[TimelineEvent], Field(description="Drivers, waits and faults before the end, in order.")]


def timeline(
    chunks: Sequence[ChunkWork],
    *,
    start: float | None = None,
    end: float | None = None,
    num_bins: int,
    events: Sequence[EventRecord] = (),
) -> TimelinePlot:
    """Compute the activity of each engine of a study over time, from the chunks (samples of one request) it scored.

    An engine has four activities: it computes a merge, writes it to its weights (swap), scores samples, or idles.

    Args:
        chunks: The chunks, with the times at which an engine worked on them; chunks outside of the given time are left
            out.
        start: Beginning of the timeline in seconds since the epoch; None is the beginning of the first chunk.
        end: End of the timeline; None is the end of the last chunk.
        num_bins: Number of bins into which the time is divided.
        events: Events that explain why engines did not work, of the kinds in EVENTS. All events before `end` are
            listed, also those before `start`.
    """
    told = [_event(event) for event in events if end is None or event.time < end]
    spans = [(chunk, _times(chunk)) for chunk in chunks]
    shown = [
        (chunk, times)
        for chunk, times in spans
        if (start is None or times[-1] > start) and (end is None or times[0] < end)
    ]
    if not shown:
        return TimelinePlot("timeline", start, end, [], [], [], told)
    start = min(times[0] for _, times in shown) if start is None else start
    end = max(times[-1] for _, times in shown) if end is None else end
    replicas = list(dict.fromkeys(chunk.replica for chunk, _ in shown))
    edges = np.linspace(start, end, num_bins + 1)
    bins = [_shares(np.array([times for c, times in shown if c.replica == name]), edges) for name in replicas]
    listed = None
    if len(shown) < MAX_CHUNKS:
        index = {name: position for position, name in enumerate(replicas)}
        listed = [TimelineChunk(index[c.replica], c.trial, c.num_samples, *times) for c, times in shown]
    return TimelinePlot("timeline", start, end, replicas, bins, listed, told)


def timeline_json(plot: TimelinePlot) -> bytes:
    """Encode `plot`, the activity of each engine of a study over time, as JSON text in UTF-8."""
    return _ADAPTER.dump_json(plot)


def _event(event: EventRecord) -> TimelineEvent:
    """Describe an event of a study for the timeline; the event has one of the kinds in EVENTS."""
    payload = event.payload
    if event.kind == EventKind.ATTEMPT:
        because = payload.get("because")
        text = f"attempt {payload['attempt']}" + (f": {because}" if because else "")
        return TimelineEvent(event.time, "attempt", text)
    if event.kind == EventKind.WAITING:
        return TimelineEvent(event.time, "waiting", f"waits: {payload['reason']}")
    faults = "; ".join(f"{replica}: {reason}" for replica, reason in payload["replicas"].items())
    return TimelineEvent(event.time, "engine_fault", faults)


def _times(chunk: ChunkWork) -> tuple[float, ...]:
    """Times at which the phases of a chunk began, and at which its last phase ended, in seconds since the epoch.

    A chunk is the samples of one request. The phases are the computation of the merge, the swap (writing the merge into
    the engine) and the scoring of the samples.
    """
    seconds = [chunk.timings_s.get(name, 0.0) for name in PHASES.values()]
    begins = [chunk.finished_at - sum(seconds[phase:]) for phase in range(len(seconds))]
    return (*begins, chunk.finished_at)


def _shares(times: Seconds, edges: Seconds) -> ReplicaShares:
    """Compute the shares of one engine's time in each phase of work, for each bin of a timeline.

    `times` [num_chunks, 4] has one row for each chunk of samples: when the computation of its merge, the swap (writing
    the merge into the engine) and the scoring began, and when the scoring ended. `edges` are the times at which bins
    begin and end.
    """
    widths = np.diff(edges)
    found = []
    for phase in range(len(PHASES)):
        spent = np.diff(_before(times[:, phase], edges) - _before(times[:, phase + 1], edges))
        found.append(np.divide(spent, widths, out=np.zeros_like(spent), where=widths > 0).clip(0.0, 1.0))
    total = np.maximum(1.0, sum(found))  # inexact times may overlap
    shares = [(share / total).round(DIGITS) for share in found]
    idle = (1.0 - sum(shares)).clip(0.0, 1.0).round(DIGITS)
    return ReplicaShares(*(share.tolist() for share in (*shares, idle)))


def _before(moments: Seconds, edges: Seconds) -> Seconds:
    """For each of the times `edges`, compute the sum of `edge - moment`, in seconds, over all `moments` before it."""
    ordered = np.sort(moments)
    sums = np.concatenate([[0.0], np.cumsum(ordered - edges[0])])
    count = np.searchsorted(ordered, edges)
    result: Seconds = count * (edges - edges[0]) - sums[count]
    return result


_ADAPTER = TypeAdapter(TimelinePlot)
