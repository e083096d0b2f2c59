"""Results of one study are computed while nothing else waits for them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from service.results.load import run_record
from service.results.record import RunRecord
from service.store import Store
from tests.service.api.harness import ApiServer, finished_study, stored_study

WAIT_S = 60.0


class Slow:
    """`run_record`, which for one study waits until it is let go."""

    def __init__(self) -> None:
        self.study = ""
        self.num_computed = 0
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def __call__(self, store: Store, study_id: str) -> RunRecord:
        if study_id == self.study:
            self.num_computed += 1
            self.has_begun.set()
            assert self.may_end.wait(WAIT_S)
        return run_record(store, study_id)


@pytest.fixture
def slow(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Slow:
    slow = Slow()
    monkeypatch.setattr("service.api.record_cache.run_record", slow)
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
