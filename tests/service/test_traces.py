"""A request is traced from its header `traceparent` to the phases of scoring, through all processes between.

Ray's own part is left out here: `tests/end_to_end` has the same chain over Ray Jobs, trial actors and Serve.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.jobs.base import Attempt, Resources
from service.jobs.driver import drive
from service.jobs.registry import kind_of
from service.tune.ray_tune import _EvaluationSource, _Interrupt, _Raised
from service.tune.trainable import EvaluationTrainable
from service.types import Demand
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan, otlp_receiver
from tests.service.api.harness import ApiServer, document
from tests.service.tune.harness import coordinator_of
from workers.serving.fake import FakeScorer
from workers.serving.replica import ScoringReplica
from workers.telemetry import tracing
from workers.types import ScoreRequest, ScoreResult

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

# Allowed attributes: ids, names given by users, numbers, routes. Texts of models and messages are not allowed.
OWN = "job name kind attempt submission replicas trial split rung recipe samples objective replica"
ATTRIBUTES = {f"mergesearch.{name}" for name in OWN.split()}
ATTRIBUTES |= {"http.request.method", "http.route", "http.response.status_code"}


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    """A collector that gets the spans of this process."""
    for name in os.environ:
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    with otlp_receiver() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        tracing.start_tracing("tests")
        yield found
        tracing.stop_tracing()


class OneReplica:
    """A scorer that sends requests to one replica with a fake worker."""

    def __init__(self) -> None:
        self._replica = ScoringReplica(lambda: FakeScorer(swap_delay_s=0.01, sample_delay_s=0.001))

    def score(self, request: ScoreRequest) -> ScoreResult:
        with_no_context = ScoreRequest(**request.__dict__)
        return asyncio.run(self._replica.score(with_no_context))


def score_one_trial(attempt: Attempt) -> None:
    """Work of a driver: one chunk of the first evaluation of the attempt's study, by one trial actor."""
    coordinator = coordinator_of(attempt.store, attempt.job.id)
    source = _EvaluationSource(coordinator, 1, _Interrupt(print), _Raised(), lambda: None)
    actor = EvaluationTrainable.__new__(EvaluationTrainable)
    actor.setup(source.suggest("t"), OneReplica())  # type: ignore[arg-type]
    actor.step()
    outcome: Any = actor.step()["outcome"]
    assert isinstance(outcome, ScoreResult)
    source.on_trial_complete("t")


def no_resources(*_: Any) -> Any:
    raise AssertionError


def run_driver(server: ApiServer, job_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver of a job that works as `score_one_trial` does."""

    class Kind:
        work = staticmethod(score_one_trial)
        demand = staticmethod(lambda job: Demand())

    monkeypatch.setattr("service.jobs.driver.kind_of", lambda name: Kind if name == "search" else kind_of(name))
    resources = Resources(*[no_resources] * 5)
    assert drive(server.store, job_id, work_dir=server.data_dir / "jobs" / job_id, resources=resources) == 0


def test_a_request_is_followed_to_its_samples(
    receiver: OtlpReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans' parents and links lead from the phases of scoring to the caller of the request, for every driver."""
    with ApiServer(tmp_path) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        answer = http.post("/v1/studies", json=document(), headers={"traceparent": PARENT})
        job_id = answer.json()["id"]
        for _ in range(2):  # as after a kill
            run_driver(server, job_id, monkeypatch)
        http.get(f"/v1/studies/{job_id}")
        http.get("/healthz")
    receiver.wait(
        lambda: len(receiver.named("generate and score")) == 2 and receiver.named("GET /v1/studies/{study_id}")
    )

    (request,) = receiver.named("POST /v1/studies")
    assert (request.trace, request.parent) == tuple(PARENT.split("-")[1:3])
    assert request.attributes["mergesearch.job"] == job_id
    assert request.attributes["http.response.status_code"] == 201
    (check,) = receiver.named("check")
    assert receiver.parent_of(check) == request
    drivers = receiver.named("driver")
    assert [receiver.parent_of(driver) for driver in drivers] == [request, request]
    assert [driver.attributes["mergesearch.attempt"] for driver in drivers] == [1, 3]  # 2 is the test's coordinator
    for driver, phase in zip(drivers, receiver.named("generate and score"), strict=True):
        trial = follow(receiver, phase, ["score", "chunk", "trial"])
        assert (trial.parent, receiver.linked_by(trial)) == ("", driver)
        assert trial.trace != driver.trace
        assert trial.attributes["mergesearch.job"] == job_id
    (first, *_) = receiver.named("swap")
    assert first.seconds == pytest.approx(0.01, abs=0.001)
    assert {name for span in receiver.spans for name in span.attributes} <= ATTRIBUTES
    assert not any("healthz" in span.name for span in receiver.spans)


def follow(receiver: OtlpReceiver, span: ReceivedSpan, names: list[str]) -> ReceivedSpan:
    """The ancestor of a span that is reached through ancestors of the given names."""
    for name in names:
        span = receiver.parent_of(span)
        assert span.name == name
    return span


def test_errors_and_streams_end_their_spans(receiver: OtlpReceiver, tmp_path: Path) -> None:
    """A stream's span ends when the stream begins; a request that has no route has no path in its name."""
    with ApiServer(tmp_path) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        job_id = http.post("/v1/studies", json=document()).json()["id"]
        with http.stream("GET", f"/v1/studies/{job_id}/events"):
            receiver.wait(lambda: receiver.named("GET /v1/studies/{study_id}/events"))
        http.get("/v1/none?token=s3cr3t", headers={"traceparent": "nonsense"})
        server.store.close()
        (tmp_path / "mergesearch.db").write_bytes(b"no database at all" * 1000)
        http.get("/v1/studies")
    receiver.wait(lambda: receiver.named("GET /v1/studies"))
    (unknown,) = receiver.named("GET")
    assert (unknown.attributes["http.response.status_code"], unknown.parent) == (404, "")
    (failed,) = receiver.named("GET /v1/studies")
    assert (failed.is_error, failed.reason) == (True, "503")
    assert "s3cr3t" not in repr(receiver.spans)


def test_an_application_without_tracing_has_no_span(tmp_path: Path) -> None:
    """Where tracing is off, requests do not pass the middleware of tracing, and jobs have no place in a trace."""
    with ApiServer(tmp_path) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        job_id = http.post("/v1/studies", json=document(), headers={"traceparent": PARENT}).json()["id"]
        assert server.store.job(job_id).traceparent is None
        assert "TraceRequests" not in [str(each.cls.__name__) for each in server.app.user_middleware]  # type: ignore[attr-defined]
