"""A study's events as server-sent events (WHATWG HTML, section 9.2): what came is cut into frames, and where the
connection is lost the reader goes on after the last event it saw. No input or output here."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from service.client.flows import Call, Response, TransportError, path_of, refusal
from service.errors import InvalidAnswer, RequestRefused, ServerUnreachable

__all__ = ["SILENCE_S", "Event", "EventReader"]

# The server says something every 15 s; a connection that was silent for so long is gone.
SILENCE_S = 45.0

FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 10.0


@dataclass(frozen=True)
class Event:
    """Something that happened to a study: `kind`, when (RFC 3339), and what about it.

    Without an id and a time it tells how things stand and is no part of the history: "progress" (its payload is a
    ProgressDocument) and "end", the last one."""

    kind: str
    id: int | None
    time: str | None
    payload: Mapping[str, Any]


class EventReader:
    """Where the reader of one study's events stands.

    `call` is the next request to make, `feed` takes what comes of it. Once the connection has ended, whyever,
    `pause_s` says how long to wait before the next, or raises what ends the reading: ServerUnreachable if the first
    connection failed, or none was made for `patience_s`.
    """

    def __init__(
        self, study: str, *, after: int, patience_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.has_ended = False
        self.after = after
        self._path = path_of(study, "events")
        self._patience_s = patience_s
        self._clock = clock
        self._rest = b""
        self._fields: dict[str, str] = {}
        self._heard_at: float | None = None
        self._failures = 0

    def call(self) -> Call:
        self._rest, self._fields = b"", {}
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store", "Last-Event-ID": str(self.after)}
        return Call("GET", self._path, headers=headers)

    def feed(self, data: bytes) -> Iterator[Event]:
        """The events that `data` completes, each once."""
        self._heard_at, self._failures = self._clock(), 0
        # Cut at line feeds only: str.splitlines knows more ends of lines, and JSON text may hold those.
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            event = self._line(line.removesuffix(b"\r").decode("utf-8", errors="replace"))
            if event is not None and (event.id is None or event.id > self.after):
                self.after = self.after if event.id is None else event.id
                self.has_ended = event.kind == "end"
                yield event

    def pause_s(self, outcome: Response | TransportError) -> float:
        """Raises RequestRefused and InvalidAnswer if asking again would not change the response."""
        wait_s: float = min(FIRST_PAUSE_S * 2**self._failures, MAX_PAUSE_S) * random.uniform(0.5, 1.0)
        self._failures = min(self._failures + 1, 10)
        if isinstance(outcome, TransportError):
            error: Exception = ServerUnreachable(f"{outcome.url}: no answer: {outcome.reason}")
        elif outcome.status == 200:
            return wait_s  # the server ended the connection, as it does when it is stopped
        else:
            error = refusal(outcome)
            if outcome.status < 500:
                raise error
            if isinstance(error, RequestRefused) and error.retry_after_s is not None:
                wait_s = min(error.retry_after_s, MAX_PAUSE_S)
        if self._heard_at is None or self._clock() - self._heard_at + wait_s > self._patience_s:
            raise error
        return wait_s

    def _line(self, line: str) -> Event | None:
        if not line:
            fields, self._fields = self._fields, {}
            return _event(fields) if "data" in fields else None
        name, _, value = line.partition(":")
        if name:  # without a name it is a comment
            value = value.removeprefix(" ")
            self._fields[name] = f"{self._fields['data']}\n{value}" if name == "data" in self._fields else value
        return None


def _event(fields: Mapping[str, str]) -> Event:
    try:
        data = json.loads(fields["data"])
        kind = fields["event"]
        if "id" not in fields:
            return Event(kind, None, None, data)
        return Event(kind, int(fields["id"]), data["time"], data["payload"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidAnswer(f"no event of a mergesearch server: {dict(fields)!r:.200}") from error
