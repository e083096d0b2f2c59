"""Losses of Serve's controller and of replicas during scoring: the controller is awaited, chunks are scored once."""

from __future__ import annotations

import logging.config
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import psutil
import pytest

from tests.conftest import OPTIONS
from tests.workers.serving.test_deployment import request
from workers.errors import EngineUnavailable, ServeUnavailable
from workers.serving import application
from workers.serving.application import application_state
from workers.serving.deployment import deploy_scorer
from workers.serving.fake import FakeScorer
from workers.serving.serve_scorer import ServeScorer, _handle
from workers.types import Family, TaskSpec

NAME = "fake-lost"
RECOVERY_S = 60.0


@dataclass
class ConfiguresLogging(FakeScorer):
    """A fake scorer that configures logging at its start, as vLLM does, after which Python closes all log handlers."""

    def __post_init__(self) -> None:
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> FakeScorer:
    """A fake scorer in this process that reads the calls of the replicas."""
    return FakeScorer(log_file=str(tmp_path_factory.mktemp("lost") / "calls"))


@pytest.fixture(scope="module")
def scorer_of_fakes(ray_cluster: None, tied_family: Family, calls: FakeScorer) -> Iterator[ServeScorer]:
    from ray import serve

    make_worker = partial(ConfiguresLogging, sample_delay_s=0.1, log_file=calls.log_file)
    scorer = deploy_scorer(tied_family, OPTIONS, name=NAME, make_worker=make_worker, health_check_period_s=0.5)
    yield replace(scorer, deadline_s=120.0, poll_s=0.5)
    serve.delete(NAME)


def controller() -> psutil.Process:
    """The process of the controller that answers this Ray; Ray may take a while to start one."""
    import ray
    from ray.exceptions import RayError
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    deadline = time.monotonic() + RECOVERY_S
    while time.monotonic() < deadline:
        try:
            handle = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
            return psutil.Process(ray.get(handle.get_pid.remote(), timeout=RECOVERY_S))
        except (RayError, ValueError, psutil.Error):
            time.sleep(0.05)
    raise AssertionError("Ray starts no controller")


def test_killed_controller_finds_its_replicas(scorer_of_fakes: ServeScorer, tied_family: Family) -> None:
    """Kills of Serve's controller in a chunk and between chunks end no request and replace no replica."""
    (process,) = scorer_of_fakes.statistics()["processes"]
    for _ in range(2):
        with ThreadPoolExecutor() as pool:
            answers = [pool.submit(scorer_of_fakes.score, request(tied_family, weight, 30)) for weight in (0.2, 0.3)]
            time.sleep(1.0)
            killed = controller()
            killed.kill()
            results = [answer.result(timeout=RECOVERY_S) for answer in answers]
        alone = [FakeScorer().score(request(tied_family, weight, 30)) for weight in (0.2, 0.3)]
        assert [result.samples for result in results] == [each.samples for each in alone]
        assert scorer_of_fakes.statistics()["processes"] == [process]
        assert controller().pid != killed.pid
        assert application_state(NAME) == "RUNNING"


def test_calls_wait_for_a_stopped_controller(
    scorer_of_fakes: ServeScorer, tied_family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the controller does not answer, chunks are scored, other calls wait, and the error names the controller."""
    monkeypatch.setattr(application, "ANSWER_S", 0.5)
    scorer_of_fakes.score(request(tied_family, 0.4, 1))  # this process then knows the replicas
    stopped = controller()
    stopped.suspend()
    try:
        with pytest.raises(ServeUnavailable, match=r"Serve's controller does not answer \(GetTimeoutError: "):
            application_state(NAME)
        assert not scorer_of_fakes.is_starting()
        result = scorer_of_fakes.score(request(tied_family, 0.4, 30))
        assert result.samples == FakeScorer().score(request(tied_family, 0.4, 30)).samples
        with pytest.raises(ServeUnavailable, match="does not answer"):
            replace(scorer_of_fakes, deadline_s=0.1).statistics()
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(scorer_of_fakes.statistics)
            time.sleep(2.0)
            assert not waiting.done()
            stopped.resume()
            assert waiting.result(timeout=RECOVERY_S)["processes"] == [int(result.evidence.replica.split("-")[1])]
    finally:
        stopped.resume()


def test_processes_that_know_no_replica_wait_for_the_controller(
    scorer_of_fakes: ServeScorer, tied_family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that knows no replica yet waits for a controller that does not answer, and no longer than it may."""
    from ray.serve.context import _get_global_client

    monkeypatch.setattr(application, "ANSWER_S", 0.5)
    stopped = controller()
    stopped.suspend()
    try:
        _handle.cache_clear()
        _get_global_client().handle_cache.clear()
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(scorer_of_fakes.score, request(tied_family, 0.8, 5))
            with pytest.raises(EngineUnavailable, match="controller does not answer"):
                replace(scorer_of_fakes, deadline_s=1.0).score(request(tied_family, 0.9, 5))
            assert not waiting.done()
            stopped.resume()
            result = waiting.result(timeout=RECOVERY_S)
    finally:
        stopped.resume()
    assert result.samples == FakeScorer().score(request(tied_family, 0.8, 5)).samples


def test_deleted_application_is_not_waited_for(scorer_of_fakes: ServeScorer) -> None:
    """An application that does not exist is an error at once, also after a restart of the controller."""
    controller().kill()
    started = time.monotonic()
    with pytest.raises(EngineUnavailable, match="no such application"):
        ServeScorer("fake-none", deadline_s=120.0).describe((TaskSpec("anything", "exact_match"),))
    assert time.monotonic() - started < RECOVERY_S


def test_chunks_of_a_killed_replica_are_scored_once(
    scorer_of_fakes: ServeScorer, tied_family: Family, calls: FakeScorer
) -> None:
    """When a replica dies, the chunk that it scored and those that waited there are scored once each elsewhere."""
    (process,) = scorer_of_fakes.statistics()["processes"]
    chunks = [request(tied_family, weight, 20) for weight in (0.5, 0.6, 0.7)]
    before = len(calls.calls())
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(scorer_of_fakes.score, chunk) for chunk in chunks]
        time.sleep(1.0)
        os.kill(process, signal.SIGKILL)
        results = [answer.result(timeout=RECOVERY_S) for answer in answers]
    assert [result.samples for result in results] == [FakeScorer().score(chunk).samples for chunk in chunks]
    scored = Counter((call["recipe"], call["outcome"]) for call in calls.calls()[before:])
    assert scored == Counter((chunk.recipe.digest, "scored") for chunk in chunks)
    assert f"fake-{process}" not in {result.evidence.replica for result in results}
