import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from search_spaces.study.engine import Engine, EngineOptions
from tests.conftest import OPTIONS
from tests.workers.recipes import arithmetic
from workers.errors import (
    CrashKind,
    EngineCrashed,
    EngineFault,
    EngineUnavailable,
    InvalidModel,
    InvalidTask,
    TrialFailed,
)
from workers.serving.application import application_state, is_on_cpu, num_replicas
from workers.serving.deployment import app_name, deploy_scorer, runs_on_gpus, stop
from workers.serving.fake import FakeScorer
from workers.serving.serve_scorer import ServeScorer
from workers.serving.start_phases import start_text
from workers.serving.watchdog import TimeLimits
from workers.telemetry.phases import phase
from workers.types import Family, GpuNeed, ModelSource, ScoreRequest, ScoreResult, Span, TaskSpec

TASK = TaskSpec("anything", "exact_match")


def request(family: Family, weight: float, stop: int = 20) -> ScoreRequest:
    return ScoreRequest("study", arithmetic(family, weight, 0.1), (Span("x", TASK, 0, stop),))


@pytest.fixture(scope="module")
def fake(ray_cluster: None, tied_family: Family) -> Iterator[ServeScorer]:
    """A replica on Serve with a fake engine: 0.1 s per sample, health checks every 0.5 s."""
    from ray import serve

    make_worker = partial(FakeScorer, sample_delay_s=0.1, fails_above=0.9)
    scorer = deploy_scorer(
        tied_family,
        OPTIONS,
        name="fake",
        make_worker=make_worker,
        health_check_period_s=0.5,
        health_check_timeout_s=1.0,
    )
    yield replace(scorer, deadline_s=120.0, poll_s=0.5)
    serve.delete("fake")


def test_errors_of_a_candidate_and_of_a_task_pass_through(fake: ServeScorer, tied_family: Family) -> None:
    with pytest.raises(TrialFailed, match=r"coefficient 0\.95 is above 0\.9"):
        fake.score(request(tied_family, 0.95))
    with pytest.raises(InvalidTask, match="no stored sample"):
        fake.verify(arithmetic(tied_family, 0.1, 0.1), (), (Span("x", TASK, 0, 1),))
    assert fake.score(request(tied_family, 0.5, 2)).samples


def test_health_checks_during_a_long_chunk(fake: ServeScorer, tied_family: Family) -> None:
    """Health checks are answered during a chunk longer than their timeout."""
    (process,) = fake.statistics()["processes"]
    result = fake.score(request(tied_family, 0.5, 60))
    assert result.timings_s["score"] >= 6.0, "six times the timeout"
    assert fake.statistics()["processes"] == [process]
    assert result.evidence.replica == f"fake-{process}"


def test_killed_replicas_chunk_is_repeated(fake: ServeScorer, tied_family: Family) -> None:
    """A replica killed in a chunk is replaced, and the chunk is scored again."""
    (process,) = fake.statistics()["processes"]
    threading.Timer(1.0, os.kill, (process, signal.SIGKILL)).start()
    result = pickle.loads(pickle.dumps(fake)).score(request(tied_family, 0.5))
    assert result.samples == FakeScorer().score(request(tied_family, 0.5)).samples
    assert result.evidence.replica != f"fake-{process}"
    assert fake.statistics()["processes"] != [process]


def test_scorer_tells_that_an_engine_is_being_started(fake: ServeScorer, tied_family: Family) -> None:
    (process,) = fake.statistics()["processes"]
    assert not fake.is_starting()
    os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + 60.0
    while not fake.is_starting():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    fake.score(request(tied_family, 0.5, 1))
    assert not fake.is_starting()
    assert not ServeScorer("fake-none").is_starting()


def test_failed_canary_replaces_the_replica(ray_cluster: None, tied_family: Family, tmp_path: Path) -> None:
    """A replica that fails its canary refuses every request until Serve replaces it."""
    from ray import serve

    make_worker = partial(FakeScorer, fails_canary_at=2, log_file=str(tmp_path / "calls"))
    scorer = deploy_scorer(tied_family, OPTIONS, name="fake-fault", make_worker=make_worker, health_check_period_s=0.5)
    good, other = request(tied_family, 0.5), request(tied_family, 0.6)
    first = scorer.score(good).evidence.replica
    assert [report.replica for report in scorer.check()] == [first]
    with pytest.raises(EngineFault, match="the canary failed") as caught:
        scorer.score(other)
    assert (caught.value.replica, caught.value.canaries) == (first, 2)
    result = None
    deadline = time.monotonic() + 60
    while result is None and time.monotonic() < deadline:
        try:
            result = scorer.score(good)
        except EngineFault:
            time.sleep(0.2)
    assert result is not None
    assert result.evidence.replica != first
    serve.delete("fake-fault")


@dataclass
class SharesSources(FakeScorer):
    """A fake scorer that has a directory in the shared memory `root`, as the bank of an engine has."""

    root: str = ""
    _node: Any = None

    def score(self, request: ScoreRequest) -> ScoreResult:
        from workers.merging.node import Node, SharedDirectory

        self._node = self._node or Node(SharedDirectory("sources", root=Path(self.root)))
        return super().score(request)

    def close(self) -> None:
        self._node.close()


def test_stopped_replica_leaves_no_shared_memory(ray_cluster: None, tied_family: Family, tmp_path: Path) -> None:
    """The sources of a replica that Serve stops are gone from shared memory, although Serve kills its process."""
    make_worker = partial(SharesSources, root=str(tmp_path))
    scorer = deploy_scorer(tied_family, OPTIONS, name="fake-shares", make_worker=make_worker)
    scorer.score(request(tied_family, 0.5, 1))
    sources = tmp_path / f"mergesearch-{os.getuid()}" / "sources"
    assert sources.exists()
    stop("fake-shares")
    assert not sources.exists()


def test_kill_in_a_counted_chunk_is_reported(fake: ServeScorer, tied_family: Family) -> None:
    """A kill in a counted chunk is reported, and a waiting chunk is scored."""
    (process,) = fake.statistics()["processes"]
    threading.Timer(1.5, os.kill, (process, signal.SIGKILL)).start()
    with ThreadPoolExecutor() as pool:
        scored = pool.submit(fake.score, replace(request(tied_family, 0.2), crashes=0))
        time.sleep(0.5)
        waiting = pool.submit(fake.score, replace(request(tied_family, 0.3), crashes=0))
        with pytest.raises(
            EngineCrashed, match=rf"fake-{process} ended while it scored the chunk; its log is "
        ) as caught:
            scored.result(timeout=60)
        assert waiting.result(timeout=60).evidence.replica != f"fake-{process}"
    assert (caught.value.replica, caught.value.kind) == (f"fake-{process}", CrashKind.EXIT)


def test_stopped_replica_is_replaced_and_its_chunks_scored_again(fake: ServeScorer, tied_family: Family) -> None:
    (process,) = fake.statistics()["processes"]
    stopped = psutil.Process(process)
    threading.Timer(1.0, stopped.suspend).start()
    started = time.monotonic()
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(fake.score, [request(tied_family, weight) for weight in (0.2, 0.3)]))
    assert time.monotonic() - started < 60, "three health checks of one second, and the start of a replica"
    assert {result.evidence.replica for result in results} == {f"fake-{fake.statistics()['processes'][0]}"}
    assert f"fake-{process}" not in {result.evidence.replica for result in results}
    psutil.wait_procs([stopped], timeout=30)
    assert not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE, "it would keep its GPU's memory"


def test_replica_whose_engine_stands_still_is_replaced(ray_cluster: None, tied_family: Family) -> None:
    from ray import serve

    hanging = request(tied_family, 0.2)
    scorer = deploy_scorer(
        tied_family,
        OPTIONS,
        name="fake-hanging",
        make_worker=partial(FakeScorer, crashing=(hanging.recipe.digest,), crash_by="hang"),
        health_check_period_s=0.5,
        time_limits=TimeLimits(first_chunk_s=2.0, chunk_s=2.0),
    )
    scorer = replace(scorer, deadline_s=120.0, poll_s=0.5)
    (process,) = scorer.statistics()["processes"]
    with pytest.raises(
        EngineCrashed, match=rf"fake-{process} was replaced: it has worked on a chunk of 20 samples"
    ) as caught:
        scorer.score(replace(hanging, crashes=0))
    assert caught.value.kind is CrashKind.HANG
    assert scorer.score(request(tied_family, 0.3)).evidence.replica != f"fake-{process}"
    serve.delete("fake-hanging")


def test_replica_that_cannot_start_says_why_and_where_its_log_is(
    ray_cluster: None, tied_family: Family, tmp_path: Path
) -> None:
    from ray import serve

    broken = replace(tied_family, base=replace(tied_family.base, directory=str(tmp_path / "nowhere")))
    with pytest.raises(EngineUnavailable, match=r"vLLM did not start for .*nowhere: .*; its log is .*worker-.*\.out"):
        deploy_scorer(broken, OPTIONS, name="fake-broken")
    with pytest.raises(EngineUnavailable, match="no such application"):
        ServeScorer("fake-none", deadline_s=0.1).describe((TASK,))
    serve.delete("fake-broken")


@dataclass
class ReadsOnce(FakeScorer):
    """A fake scorer whose models have changed when it starts a second time."""

    def __post_init__(self) -> None:
        assert self.log_file is not None
        with Path(self.log_file).open("a") as file:
            file.write(f"{os.getpid()}\n")
        if len(Path(self.log_file).read_text().splitlines()) > 1:
            raise InvalidModel(("/models/math has changed: its fingerprint is 0a1b",))


def test_changed_models_end_the_wait(ray_cluster: None, tied_family: Family, tmp_path: Path) -> None:
    """A replica whose models have changed since its first start is not waited for."""
    from ray import serve

    make_worker = partial(ReadsOnce, log_file=str(tmp_path / "starts"), sample_delay_s=0.1)
    scorer = deploy_scorer(tied_family, OPTIONS, name="fake-changed", make_worker=make_worker)
    (process,) = scorer.statistics()["processes"]
    os.kill(process, signal.SIGKILL)
    with pytest.raises(EngineUnavailable, match=r"math has changed: its fingerprint is 0a1b"):
        replace(scorer, poll_s=0.5).score(request(tied_family, 0.5))
    serve.delete("fake-changed")


@pytest.mark.parametrize("gpus", [GpuNeed.NEEDED, GpuNeed.MAY_COME])
def test_engines_for_gpus_never_run_on_the_cpu(
    ray_cluster: None, tied_family: Family, gpus: GpuNeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas planned for GPUs are refused by a cluster without any, or wait for one: no engine starts on the CPU."""
    from ray import serve

    # Serve waits as long for a replica that has no place yet as for one that finishes a chunk.
    monkeypatch.setattr("workers.serving.deployment.FINISH_CHUNK_S", 1.0)
    reason = "has 0; add a machine with GPUs" if gpus is GpuNeed.NEEDED else "not ready within 3 s"
    with pytest.raises(EngineUnavailable, match=reason):
        deploy_scorer(tied_family, OPTIONS, name="fake-gpus", make_worker=FakeScorer, gpus=gpus, start_timeout_s=3.0)
    assert not num_replicas("fake-gpus")["RUNNING"]
    serve.delete("fake-gpus")


@dataclass
class StartsSlowly(FakeScorer):
    """A replica whose start ends when a file appears."""

    until: str = ""

    def __post_init__(self) -> None:
        with phase("downloads owner/name"):
            while not Path(self.until).exists():
                time.sleep(0.05)


def test_replicas_say_what_their_start_waits_for(ray_cluster: None, tied_family: Family, tmp_path: Path) -> None:
    """What replicas do is known while they start, and forgotten when they are ready."""
    from ray import serve

    make_worker = partial(StartsSlowly, until=str(tmp_path / "done"))
    with ThreadPoolExecutor(1) as pool:
        deployed = pool.submit(
            deploy_scorer, tied_family, OPTIONS, name="fake-slow", replicas=2, make_worker=make_worker
        )
        deadline = time.monotonic() + 120.0
        while (text := start_text("fake-slow")) != "2 of 2: downloads owner/name":
            assert time.monotonic() < deadline, text
            time.sleep(0.1)
        (tmp_path / "done").touch()
        deployed.result()
    assert start_text("fake-slow") == ""
    serve.delete("fake-slow")


def test_dead_replica_leaves_the_others_in_service(ray_cluster: None, tied_family: Family, tmp_path: Path) -> None:
    """A new driver uses the replicas that run, also while the replacement of one that died starts."""
    from ray import serve

    (tmp_path / "done").touch()
    make_worker = partial(StartsSlowly, until=str(tmp_path / "done"))
    deploy = partial(
        deploy_scorer, tied_family, OPTIONS, name="fake-dead", make_worker=make_worker, health_check_period_s=0.5
    )
    killed, *others = deploy(replicas=2).statistics()["processes"]
    (tmp_path / "done").unlink()
    os.kill(killed, signal.SIGKILL)
    deadline = time.monotonic() + 120.0
    while application_state("fake-dead") != "UNHEALTHY":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert deploy(replicas=2, start_timeout_s=5.0).statistics()["processes"] == others
    (tmp_path / "done").touch()
    while num_replicas("fake-dead")["RUNNING"] < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert set(others) < set(ServeScorer("fake-dead").statistics()["processes"])
    serve.delete("fake-dead")


def test_failing_replacement_ends_the_wait(ray_cluster: None, tied_family: Family, tmp_path: Path) -> None:
    """A driver stops waiting for the replacement of the only replica as soon as the replacement fails."""
    from ray import serve

    (tmp_path / "done").touch()
    deploy = partial(
        deploy_scorer,
        tied_family,
        OPTIONS,
        name="fake-failing",
        make_worker=partial(StartsSlowly, until=str(tmp_path / "done")),
        health_check_period_s=0.5,
        start_timeout_s=300.0,
        time_limits=TimeLimits(start_s=15.0),
    )
    (process,) = deploy().statistics()["processes"]
    (tmp_path / "done").unlink()
    os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + 60.0
    while application_state("fake-failing") != "UNHEALTHY":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with pytest.raises(EngineUnavailable, match=r"^no engine within 15 s; its log is "):
        deploy()
    assert time.monotonic() < deadline + 60.0
    serve.delete("fake-failing")


def test_a_study_for_gpus_does_not_share_replicas_on_the_cpu(ray_cluster: None, tied_family: Family) -> None:
    """Replicas that were started on the CPU do not score a study of equal models that needs GPUs."""
    from ray import serve

    options = OPTIONS.model_copy(update={"max_model_len": 99})
    on_cpu = deploy_scorer(tied_family, options, make_worker=FakeScorer)
    assert num_replicas(on_cpu.app_name)["RUNNING"] == 1
    with pytest.raises(EngineUnavailable, match=r"nothing runs on the CPU in place of a GPU"):
        deploy_scorer(tied_family, options, make_worker=FakeScorer, gpus=GpuNeed.NEEDED)
    assert deploy_scorer(tied_family, options, make_worker=FakeScorer).app_name == on_cpu.app_name
    serve.delete(on_cpu.app_name)


def test_replicas_on_the_cpu_are_replaced_for_gpus(
    ray_cluster: None, tied_family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas of earlier versions, which gave the CPU the same name, do not score a study that needs GPUs."""
    from ray import serve

    monkeypatch.setattr("workers.serving.deployment.FINISH_CHUNK_S", 1.0)
    options = OPTIONS.model_copy(update={"max_model_len": 98})
    name = app_name(tied_family, options, on_gpus=True)
    deploy_scorer(tied_family, options, name=name, make_worker=FakeScorer)
    assert is_on_cpu(name)
    with pytest.raises(EngineUnavailable, match=r"nothing runs on the CPU in place of a GPU"):
        deploy_scorer(tied_family, options, make_worker=FakeScorer, gpus=GpuNeed.NEEDED)
    assert num_replicas(name)["RUNNING"] == 1, "they stay as long as there is no GPU to replace them"
    with pytest.raises(EngineUnavailable, match=r"not ready within 5 s"):
        deploy_scorer(tied_family, options, make_worker=FakeScorer, gpus=GpuNeed.MAY_COME, start_timeout_s=5.0)
    deadline = time.monotonic() + 60.0
    while num_replicas(name)["RUNNING"]:
        assert time.monotonic() < deadline, "the replica that waits for a GPU is the only one"
        time.sleep(0.1)
    assert not is_on_cpu(name), "it is not replaced again"
    serve.delete(name)


@pytest.mark.parametrize(
    ("modality", "most", "need", "expected"),
    [
        ("text", 0, GpuNeed.IF_ANY, False),
        ("text", 4, GpuNeed.IF_ANY, True),
        ("text", 0, GpuNeed.NEEDED, True),
        ("text", 0, GpuNeed.MAY_COME, True),
        ("image", 0, GpuNeed.NEEDED, False),
        ("image", 4, GpuNeed.NEEDED, True),
    ],
)
def test_replicas_run_on_gpus_that_are_there_or_needed(
    tied_family: Family, monkeypatch: pytest.MonkeyPatch, modality: str, most: int, need: GpuNeed, expected: bool
) -> None:
    monkeypatch.setattr("workers.serving.deployment._most_gpus", lambda: most)
    assert runs_on_gpus(replace(tied_family, modality=modality), need) is expected


def test_names_of_applications_stay_as_they_are() -> None:
    """A server of another version must find the replicas that run on GPUs, and not start its own beside them."""
    family = Family(ModelSource("base", "/m/base", "00"), (ModelSource("a", "/m/a", "11"),))
    name = partial(app_name, family, on_gpus=True)
    assert name(EngineOptions()) == "scorer-f5c357331e1b"
    assert name(Engine(replicas=4, verify=False).options) == "scorer-f5c357331e1b"
    assert name(EngineOptions(dtype="float16")) != "scorer-f5c357331e1b"
    assert app_name(family, EngineOptions(), on_gpus=False) == "scorer-f5c357331e1b-cpu"


def test_equal_families_share_an_application(tied_family: Family) -> None:
    """Only equal families and options share an application."""
    name = partial(app_name, tied_family, on_gpus=False)
    assert name(OPTIONS) == name(EngineOptions(max_model_len=256, threads=1))
    assert name(OPTIONS) != name(EngineOptions(max_model_len=255, threads=1))
