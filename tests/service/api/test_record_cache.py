"""Results of one study are computed without delaying other requests."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from service.results.load import RunReader
from service.results.record import RunRecord
from service.store import Store
from tests.service.api.harness import ApiServer, finished_study, stored_study

WAIT_S = 60.0


class Slow:
    """A reader of records that, for one study, waits until the test releases it."""

    def __init__(self) -> None:
        self.study = ""
        self.num_computed = 0
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def reader(self, store: Store, study_id: str) -> RunReader:
        waiter = self

        class Reader(RunReader):
            def read(self) -> RunRecord:
                if study_id == waiter.study:
                    waiter.num_computed += 1
                    waiter.has_begun.set()
                    assert waiter.may_end.wait(WAIT_S)
                return super().read()

        return Reader(store, study_id)


@pytest.fixture
def slow(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Slow:
    slow = Slow()
    monkeypatch.setattr("service.api.record_cache.RunReader", slow.reader)
    slow.study = stored_study(server.store, name="slow").id
    return slow


def is_answered(http: httpx.Client, path: str) -> bool:
    try:
        return http.get(path, timeout=WAIT_S / 3).status_code == 200
    except httpx.ReadTimeout:
        return False


@pytest.mark.slow
def test_a_study_does_not_wait_for_the_results_of_another(http: httpx.Client, server: ApiServer, slow: Slow) -> None:
    other = finished_study(server.store, num_trials=3).id

    def get(number: int) -> httpx.Response:
        rest = ("summary", "pareto", "report", "plots/history")[number % 4]
        return httpx.get(f"{server.url}/v1/studies/{slow.study}/{rest}", timeout=2 * WAIT_S)

    with ThreadPoolExecutor(60) as pool:
        waiting = [pool.submit(get, number) for number in range(60)]  # more than the server has threads
        try:
            assert slow.has_begun.wait(WAIT_S)
            for rest in ("", "/summary", "/trials", "/report"):
                assert is_answered(http, f"/v1/studies/{other}{rest}"), rest
            assert not any(request.done() for request in waiting)
        finally:
            slow.may_end.set()
        assert {request.result().status_code for request in waiting} == {200}
    assert slow.num_computed == 1


def test_results_are_computed_again_once_the_study_has_changed(
    http: httpx.Client, server: ApiServer, slow: Slow
) -> None:
    slow.may_end.set()
    path = f"/v1/studies/{slow.study}/summary"
    assert http.get(path).json() == http.get(path).json()
    assert slow.num_computed == 1
    server.store.open_attempt(slow.study)
    http.get(path)
    assert slow.num_computed == 2


@pytest.mark.parametrize("rest", ["summary", "pareto", "report", "plots/history"])
def test_unchanged_results_are_not_sent_again(http: httpx.Client, server: ApiServer, rest: str) -> None:
    """A client that sends the tag of its answer gets 304 until the study changes."""
    study = finished_study(server.store, num_trials=3).id
    path = f"/v1/studies/{study}/{rest}"
    first = http.get(path)
    tag = first.headers["etag"]
    again = http.get(path, headers={"If-None-Match": f'"other", W/{tag}'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert http.get(path, headers={"If-None-Match": '"other"'}).content == first.content
    server.store.open_attempt(study).add_event("search_note", {"trial": 10, "text": "a note"})
    changed = http.get(path, headers={"If-None-Match": tag})
    assert changed.status_code == 200
    assert changed.headers["etag"] != tag


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ("", 4),  # the job, its last event, the job as of then, the counts of its trials
        ("/trials?limit=5", 5),  # the job, the version, trials, rungs, counts
        ("/summary", 2),  # the job, the version: the summary is known
        ("/plots/history", 2),
        ("/events", 3),  # the job, its events, their number
    ],
)
def test_a_repeated_read_takes_few_queries(http: httpx.Client, server: ApiServer, rest: str, expected: int) -> None:
    """Reads of an unchanged study send so many queries to the database; 304 takes no more."""
    study = finished_study(server.store, num_trials=3).id
    path, headers = f"/v1/studies/{study}{rest}", {"Accept": "application/json"}
    tag = http.get(path, headers=headers).headers.get("etag", "none")
    queries: list[str] = []

    def count(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        is_request = not threading.current_thread().name.startswith("notifications")  # sent meanwhile
        if is_request and statement.startswith("SELECT") and study in str(parameters):
            queries.append(statement)

    sa.event.listen(server.store.engine, "before_cursor_execute", count)
    try:
        assert http.get(path, headers=headers).status_code == 200
        assert len(queries) == expected, queries
        if tag.startswith('"') and rest:
            queries.clear()
            assert http.get(path, headers={**headers, "If-None-Match": tag}).status_code == 304
            assert len(queries) == 2
    finally:
        sa.event.remove(server.store.engine, "before_cursor_execute", count)
