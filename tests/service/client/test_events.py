"""Reading server-sent events: every event once, however the bytes are divided and connections end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from service.client.events import MAX_PAUSE_S, Event, EventReader
from service.client.requests import Response, TransportError
from service.errors import InvalidAnswer, NotFound, RequestRefused, ServerUnreachable

TIME = "2031-05-04T12:00:00Z"
# U+2028 and U+0085 end a line for str.splitlines, but not in an event stream.
REASON = "NaN in line\u2028separator\u0085 ü"
LOST = TransportError("http://server", "Connection refused", was_cut=False)


def frame(kind: str, document: dict[str, Any], number: int | None = None, *, end: str = "\n") -> bytes:
    lines = [] if number is None else [f"id: {number}"]
    return end.join([*lines, f"event: {kind}", f"data: {json.dumps(document, ensure_ascii=False)}", "", ""]).encode()


def happened(number: int, kind: str = "trial") -> bytes:
    return frame(kind, {"id": number, "time": TIME, "kind": kind, "payload": {"reason": REASON}}, number)


STREAM = b": hello\n\n" + happened(3) + b": still here\n\n" + frame("progress", {"stage": "searching"}) + happened(7)
EVENTS = [
    Event("trial", 3, TIME, {"reason": REASON}),
    Event("progress", None, None, {"stage": "searching"}),
    Event("trial", 7, TIME, {"reason": REASON}),
]


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def reader(*, after: int = 0, clock: Clock | None = None) -> EventReader:
    return EventReader("c0ffee", after=after, patience_s=60.0, clock=clock or Clock())


def read(events: EventReader, *parts: bytes) -> list[Event]:
    return [event for part in parts for event in events.feed(part)]


def answered(status: int, document: dict[str, Any] | None = None, **headers: str) -> Response:
    if document is not None:
        headers["content-type"] = "application/problem+json"
    return Response("http://server/events", status, headers, json.dumps(document).encode())


def test_events_survive_any_cut() -> None:
    """Events arrive as they were sent wherever the bytes are cut."""
    for cut in range(len(STREAM)):
        assert read(reader(), STREAM[:cut], STREAM[cut:]) == EVENTS
    assert read(reader(), *(bytes([byte]) for byte in STREAM)) == EVENTS


def test_line_ends_and_several_data_lines() -> None:
    """Lines may end with CR LF, and data may have several lines."""
    stream = b'event: progress\r\ndata: {"a":\r\ndata:  1}\r\n\r\n'
    assert read(reader(), stream) == [Event("progress", None, None, {"a": 1})]


def test_a_request_asks_for_what_comes_after_the_last_event_seen() -> None:
    events = reader(after=2)
    assert events.call().headers["Last-Event-ID"] == "2"
    read(events, STREAM)
    assert events.call().headers["Last-Event-ID"] == "7"
    assert events.call().path == "/v1/studies/c0ffee/events"


def test_half_a_frame_of_a_lost_connection_is_forgotten() -> None:
    events = reader()
    assert read(events, happened(3) + happened(4)[:-20]) == EVENTS[:1]
    events.call()
    assert [event.id for event in read(events, happened(4))] == [4]


def test_an_event_that_comes_again_is_told_once() -> None:
    assert [event.id for event in read(reader(after=4), happened(3), happened(4), happened(5), happened(5))] == [5]


def test_the_end_ends_it() -> None:
    events = reader()
    read(events, STREAM)
    assert not events.has_ended
    assert [event.kind for event in read(events, frame("end", {}))] == ["end"]
    assert events.has_ended


def test_what_is_no_event_of_ours_is_refused() -> None:
    for stream in (
        b"data: 5\n\n",
        b"event: a\ndata: {\n\n",
        b"event: a\nid: x\ndata: {}\n\n",
        b"event: a\nid: 1\ndata: {}\n\n",
    ):
        with pytest.raises(InvalidAnswer, match="not an event of a mergesearch server: "):
            read(reader(), stream)


def test_a_server_that_was_never_there_is_reported_at_once() -> None:
    with pytest.raises(ServerUnreachable, match=r"^http://server: no answer: Connection refused$"):
        reader().pause_s(LOST)
    with pytest.raises(InvalidAnswer, match="status 502"):
        reader().pause_s(answered(502))


def test_reconnections_have_growing_pauses() -> None:
    """Reconnections to a lost server have growing pauses until patience ends."""
    clock = Clock()
    events = reader(clock=clock)
    read(events, happened(3))
    pauses: list[float] = []

    def wait_for_ever() -> None:
        while True:
            pauses.append(events.pause_s(LOST))
            clock.now += pauses[-1]

    with pytest.raises(ServerUnreachable):
        wait_for_ever()
    assert 0.1 <= pauses[0] <= 0.2
    assert pauses[4] > 4 * pauses[0]
    assert max(pauses) <= MAX_PAUSE_S
    assert 40 < sum(pauses) <= 60


def test_pauses_start_anew_once_the_server_was_heard() -> None:
    events = reader()
    read(events, happened(3))
    ended = answered(200, None, **{"content-type": "text/event-stream; charset=utf-8"})
    assert max(events.pause_s(ended) for _ in range(8)) > 1
    read(events, b": still here\n\n")
    assert events.pause_s(ended) <= 0.2


def test_a_server_that_asks_to_wait_is_given_that_time() -> None:
    events = reader()
    read(events, happened(3))
    problem = {"type": "about:blank", "title": "Unavailable", "status": 503, "detail": "Ray is away"}
    assert events.pause_s(answered(503, problem, **{"retry-after": "5"})) == 5
    assert events.pause_s(answered(503, problem, **{"retry-after": "3600"})) == MAX_PAUSE_S


def test_too_many_requests_are_waited_for() -> None:
    """Status 429 is waited for as the server asks, also at the first request, until patience ends."""
    problem = {"type": "about:blank", "title": "Too Many", "status": 429, "detail": "all 3 of 3 requests are used"}
    clock = Clock()
    events = reader(clock=clock)
    for _ in range(3):
        wait_s = events.pause_s(answered(429, problem, **{"retry-after": "20"}))
        assert wait_s == 20
        clock.now += wait_s
    with pytest.raises(RequestRefused, match="all 3 of 3 requests are used"):
        events.pause_s(answered(429, problem, **{"retry-after": "20"}))
    read(events, happened(3))
    assert events.pause_s(answered(429, problem, **{"retry-after": "20"})) == 20
    assert events.pause_s(answered(429)) <= MAX_PAUSE_S  # a proxy's


def test_a_refusal_ends_the_reading() -> None:
    events = reader()
    read(events, happened(3))
    problem = {"type": "about:blank", "title": "Not Found", "status": 404, "detail": "study 'c0ffee': no such study"}
    with pytest.raises(RequestRefused, match="no such study") as refused:
        events.pause_s(answered(404, problem))
    assert refused.value.status == 404
    with pytest.raises(InvalidAnswer, match="is redirected to https://elsewhere"):
        events.pause_s(answered(301, location="https://elsewhere"))


def test_what_is_no_event_stream_is_not_read_again() -> None:
    events = reader()
    read(events, happened(3))
    for headers in ({"content-type": "text/html"}, {"content-type": "application/json"}, {}):
        with pytest.raises(InvalidAnswer, match="no mergesearch server answers there: no event stream"):
            events.pause_s(answered(200, None, **headers))


def test_events_need_a_study() -> None:
    with pytest.raises(NotFound, match="give the id of a study"):
        EventReader("", after=0, patience_s=1)
