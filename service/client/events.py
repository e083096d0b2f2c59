"""Parsers of server-sent events of one job or of all jobs (WHATWG HTML, section 9.2), without access to a network.

After a lost connection, the caller asks for the events after the last one received.
"""

from __future__ import annotations

import json
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from service.client.requests import (
    TOO_MANY_REQUESTS,
    Call,
    Reference,
    Response,
    TransportError,
    no_server,
    path_of,
    refusal,
)
from service.errors import InvalidAnswer, RequestRefused, ServerUnreachable

__all__ = ["PATIENCE_S", "SILENCE_S", "Event", "EventReader", "JobsEventReader", "is_event_stream"]

# Ids of events that a reader of all jobs remembers, so that it yields each event once.
MAX_KNOWN = 10_000

# The server sends something at least every 15 s; a connection that is silent for this long is lost.
SILENCE_S = 45.0

FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 10.0

# Default time for which a reader tries to reconnect to a server that has responded before.
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Event:
    """Event of a job, such as the end of a trial.

    Events of the kinds "progress" and "end" describe the current state and are not stored. The payload of "progress"
    is the job's latest progress. "end" is the last event of a stream.

    Attributes:
        kind: What happened, such as "trial".
        id: Id of the stored event, after which a stream can be resumed; None for "progress" and "end".
        time: Time in RFC 3339; None for "progress" and "end".
        payload: Details as JSON, which depend on the kind.
        job: Id of the job, in the stream of all jobs; None in the stream of one job.
    """

    kind: str
    id: int | None
    time: str | None
    payload: Mapping[str, Any]
    job: str | None = None


def is_event_stream(headers: Mapping[str, str]) -> bool:
    """Whether a response with the given `headers`, keyed by name, has server-sent events as its content."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == "text/event-stream"


class EventReader:
    """Parser of the event stream of a job; it does no network access itself.

    The caller sends the request that the method `call` returns, and passes the received bytes to the method `feed`,
    which yields events. When a connection has ended, the method `pause_s` returns how long to wait before the next
    request, or raises the final error.

    - `job`: the job whose events are read, as the id of a study or a document that the server returned for a job; None
      for the events of all jobs
    - `after`: the id of the last event received so far
    - `patience_s`: the number of seconds without a connection after which reading fails
    - `clock`: the function that returns the time in seconds
    """

    def __init__(
        self, job: Reference | None, *, after: int, patience_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.has_ended = False
        self.after = after
        self._path = "/v1/events" if job is None else path_of(job, "events")
        self._patience_s = patience_s
        self._clock = clock
        self._rest = b""
        self._fields: dict[str, str] = {}
        self._heard_at: float | None = None
        self._failures = 0

    def call(self) -> Call:
        """Build the request for the job's events after the last event received."""
        self._rest, self._fields = b"", {}
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store", "Last-Event-ID": str(self.after)}
        return Call("GET", self._path, headers=headers)

    def feed(self, data: bytes) -> Iterator[Event]:
        """Parse the received bytes `data`, and yield the events that are complete now, each event once."""
        self._heard_at, self._failures = self._clock(), 0
        # Split at line feeds only: str.splitlines also splits at characters that JSON text may contain.
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            fields = self._line(line.removesuffix(b"\r").decode("utf-8", errors="replace"))
            if fields is None:
                continue
            try:
                yield from self._events(fields)
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidAnswer(f"not an event of a mergesearch server: {dict(fields)!r:.200}") from error

    def pause_s(self, outcome: Response | TransportError) -> float:
        """Seconds to wait before the event stream is requested again.

        A server that refuses the request because of too many requests (status 429) gets all the time that it asks for.

        Args:
            outcome: The response or the error with which the last connection ended.

        Raises:
            RequestRefused: The server refused the request, and would refuse a retry too.
            InvalidAnswer: The response is not from a mergesearch server.
            ServerUnreachable: The first connection failed, or no connection was made for `patience_s` seconds.
        """
        wait_s: float = min(FIRST_PAUSE_S * 2**self._failures, MAX_PAUSE_S) * random.uniform(0.5, 1.0)
        self._failures = min(self._failures + 1, 10)
        if isinstance(outcome, TransportError):
            error: Exception = ServerUnreachable(f"{outcome.url}: no answer: {outcome.reason}")
        elif outcome.status == 200:
            if not is_event_stream(outcome.headers):
                raise no_server(outcome, "no event stream")
            return wait_s  # the server ended the connection, as it does when it is stopped
        else:
            error, has_too_many = refusal(outcome), outcome.status == TOO_MANY_REQUESTS
            if outcome.status < 500 and not has_too_many:
                raise error
            if isinstance(error, RequestRefused) and (asked_s := error.retry_after_s) is not None:
                wait_s = max(asked_s, FIRST_PAUSE_S) if has_too_many else min(asked_s, MAX_PAUSE_S)
            if has_too_many and self._heard_at is None:
                self._heard_at = self._clock()  # there is a server, which accepts a later request
        if self._heard_at is None or self._clock() - self._heard_at + wait_s > self._patience_s:
            raise error
        return wait_s

    def _events(self, fields: Mapping[str, str]) -> Iterator[Event]:
        """Yield the event that the given `fields` of the stream describe, unless it was yielded before.

        `fields` contains texts, keyed by name, such as "data". Raises KeyError or ValueError if the fields do not
        describe an event of the server.
        """
        data, kind = json.loads(fields["data"]), fields["event"]
        if "id" not in fields:
            self.has_ended = kind == "end"
            yield Event(kind, None, None, data)
        elif (number := int(fields["id"])) > self.after:
            self.after = number
            yield Event(kind, number, data["time"], data["payload"])

    def _line(self, line: str) -> Mapping[str, str] | None:
        """Add a line of the stream to the next event; return the fields of the event if the line ends it, else None."""
        if not line:
            fields, self._fields = self._fields, {}
            return fields if "data" in fields else None
        name, _, value = line.partition(":")
        if name:  # without a name it is a comment
            value = value.removeprefix(" ")
            self._fields[name] = f"{self._fields['data']}\n{value}" if name == "data" in self._fields else value
        return None


class JobsEventReader(EventReader):
    """Parser of the endless stream of the events of all jobs.

    After a reconnection, a server may send events of the last seconds again, but each event is yielded only once.
    Events with ids above `after` are read. If `after` is None, only new events are read. The other arguments are the
    same as for `EventReader`.
    """

    def __init__(self, *, after: int | None, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(None, after=after or 0, patience_s=patience_s, clock=clock)
        self._knows_start = after is not None
        self._known: deque[int] = deque(maxlen=MAX_KNOWN)

    def call(self) -> Call:
        """Build the request for the events of all jobs after the last event received."""
        call = super().call()
        left_out = () if self._knows_start else ("Last-Event-ID",)
        return replace(call, headers={name: value for name, value in call.headers.items() if name not in left_out})

    def _events(self, fields: Mapping[str, str]) -> Iterator[Event]:
        data, kind = json.loads(fields["data"]), fields["event"]
        if "id" in fields:
            self.after, self._knows_start = int(fields["id"]), True
        if kind == "start":
            return
        if "id" not in fields:
            yield Event(kind, None, None, data.get("progress", {}), data["job"])
        elif (number := data["id"]) not in self._known:
            self._known.append(number)
            yield Event(kind, number, data["time"], data["payload"], data["job"])
