"""Benchmarks over HTTP: results, and benchmarks that are added to a study that has ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.client import Client
from service.store.documents import BENCHMARKS, BenchmarkFacts
from service.types import EventKind, JobRecord, JobState
from tests.service.api.harness import FAMILY, ApiServer, finished_study, stored_study
from workers.types import Evidence, SampleResult, ScoreResult, Split

SAMPLES = 12


def sums(name: str = "sums", **changes: Any) -> dict[str, Any]:
    task = {"file": str(FAMILY / "tasks" / "math_holdout.jsonl")}
    return {"name": name, "task": task, "metric": "exact_match", **changes}


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with ApiServer(tmp_path_factory.mktemp("api")) as server:
        yield server


@pytest.fixture
def study(server: ApiServer) -> JobRecord:
    return finished_study(server.store, num_trials=6)


def post(server: ApiServer, study: JobRecord, *benchmarks: Any, **body: Any) -> httpx.Response:
    return httpx.post(
        f"{server.url}/v1/studies/{study.id}/benchmarks", json={"benchmarks": list(benchmarks), **body}, timeout=60
    )


def test_benchmarks_are_added_to_a_complete_study(server: ApiServer, study: JobRecord) -> None:
    """The study has them in its file, waits for a driver, and says in its events what was added."""
    answered = post(server, study, sums(trials=["best", 0], group="all"))
    assert answered.status_code == 202, answered.text
    assert answered.json()["state"] == JobState.STOPPED
    stored = server.store.job(study.id)
    (spec,) = stored.document["benchmarks"]
    assert (spec["name"], spec["group"], spec["trials"]) == ("sums", "all", ["best", 0])
    assert {name: v for name, v in stored.document.items() if name != "benchmarks"} == {
        name: v for name, v in study.document.items() if name != "benchmarks"
    }
    added = server.store.events(study.id, kinds=(EventKind.BENCHMARKS_ADDED,))
    assert [event.payload for event in added] == [{"benchmarks": ["sums"]}]


def test_the_client_adds_benchmarks_of_a_file(server: ApiServer, study: JobRecord, tmp_path: Path) -> None:
    file = tmp_path / "benchmarks.json"
    file.write_text(json.dumps({"benchmarks": [sums()]}))
    with Client(server.url) as client:
        assert client.add_benchmarks(study.id, file)["state"] == JobState.STOPPED
        assert client.benchmarks(study.id)["rows"] == []


def test_only_a_complete_study_gets_benchmarks(server: ApiServer) -> None:
    running = stored_study(server.store)
    answered = post(server, running, sums())
    assert answered.status_code == 409
    assert "CREATED; benchmarks can be added to a study that is COMPLETE" in answered.text


def test_a_second_request_waits_for_the_first(server: ApiServer, study: JobRecord) -> None:
    """A study that continues for one request refuses another one, and loses none of its benchmarks."""
    assert post(server, study, sums("one")).status_code == 202
    assert post(server, study, sums("two")).status_code == 409
    assert [spec["name"] for spec in server.store.job(study.id).document["benchmarks"]] == ["one"]


@pytest.mark.parametrize(
    ("benchmarks", "field", "message"),
    [
        ([], "benchmarks", "at least 1"),
        ([sums(trials=[99])], "benchmarks.0.trials.0", "99 is not the number of a trial"),
        ([sums(metric=None)], "benchmarks.0.metric", "text"),
        ([sums(), sums()], "benchmarks.1.name", "sums is also benchmarks.0"),
    ],
)
def test_mistakes_change_nothing(
    server: ApiServer, study: JobRecord, benchmarks: Any, field: str, message: str
) -> None:
    answered = post(server, study, *benchmarks)
    assert answered.status_code == 422
    (problem,) = answered.json()["problems"]
    assert problem["field"] == field
    assert message in problem["message"]
    assert server.store.job(study.id) == study


def test_results_are_in_the_summary_and_the_report(server: ApiServer, study: JobRecord) -> None:
    """Values, averages and comparisons are the same on the route and in the summary; the report shows them."""
    assert post(server, study, sums("one", group="both"), sums("two", group="both")).status_code == 202
    writer = server.store.open_attempt(study.id)
    facts = [BenchmarkFacts(n, "exact_match", "maximize", None, n, SAMPLES) for n in ("one", "two")]
    writer.set_document_named(BENCHMARKS, [asdict(each) for each in facts])
    trials = server.store.trials(study.id)
    for trial in trials[:5] + trials[-1:]:
        samples = tuple(
            SampleResult(name, p, f"d{p}", float((trial.number + p) % 3 > 0), "says")
            for name in ("one", "two")
            for p in range(SAMPLES)
        )
        evidence = Evidence(trial.recipe.digest, "bank", {"bench one": "0"}, "sum", "replica-1", trial.number, "fake")
        writer.record_chunk(trial.number, Split.BENCHMARK, ScoreResult(samples, evidence, {"score": 0.5}))
    writer.add_event(EventKind.BENCHMARK_FAILED, {"trial": 5, "benchmark": "two", "reason": "<the judge> is away"})
    with Client(server.url) as client:
        found, summary, report = client.benchmarks(study.id), client.summary(study.id), client.report(study.id)
    assert summary["benchmarks"] == found
    assert [row["trial"] for row in found["rows"]] == [*range(5), trials[-1].number]
    assert found["rows"][0]["averages"]["both"]["value"] == pytest.approx(2 / 3)
    assert {(test["name"], test["against"]) for test in found["tests"]} >= {("both", "source"), ("one", "published")}
    for text in ("average of both", "&lt;the judge&gt; is away", "no merge is better than the best single model"):
        assert text in report
