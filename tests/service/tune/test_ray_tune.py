"""A study on Ray Tune with fake scorers: engines that crash, and too few CPUs for the trial actors."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
import uuid
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import sqlalchemy as sa
from ray._private import state
from ray.train._internal import storage

from service.errors import StudyFailed
from service.store import Store, schema
from service.tune import ray_tune
from service.tune.ray_tune import run_evaluations
from service.types import TrialState
from tests.conftest import OPTIONS
from tests.service.tune.harness import InlineProposer, coordinator_of, lfs_space, new_study
from workers.errors import EngineUnavailable, EvidenceMismatch
from workers.serving.deployment import deploy_scorer
from workers.serving.fake import FakeScorer
from workers.types import Family, Scorer

CONCURRENCY = 3


def run(store: Store, study: str, scorer: Scorer, directory: Path) -> str:
    """Run a study; returns the reason of its failure, or ""."""
    coordinator = coordinator_of(store, study, max_trials=9)
    try:
        run_evaluations(coordinator, scorer, name="study", storage_dir=directory / "ray", concurrency=CONCURRENCY)
    except (StudyFailed, EngineUnavailable) as error:
        return str(error)
    return ""


def events(store: Store, study: str, kind: str) -> list[Any]:
    return [event.payload for event in store.events(study) if event.kind == kind]


def trial_actors() -> list[dict[str, Any]]:
    """The trial actors that Ray has ever started, including dead ones."""
    return [actor for actor in state.actors().values() if actor["ActorClassName"] == "EvaluationTrainable"]


def free_cpus() -> float:
    """Number of free CPUs, once the actors of earlier tests have ended and Ray has taken note."""
    while any(actor["State"] != "DEAD" for actor in trial_actors()):
        gc.collect()  # those of runs that ended with an error live as long as its traceback
        time.sleep(0.5)
    free = -1.0
    while free != (free := ray.available_resources()["CPU"]):
        time.sleep(3)
    return free


@pytest.mark.slow
def test_what_the_coordinator_raises_keeps_its_class(ray_cluster: None, tmp_path: Path) -> None:
    """Tune turns it into a TuneError, and the study would not be FAILED but end as after a crash."""

    class HoldsAnotherMerge(FakeScorer):
        def score(self, request: Any) -> Any:
            raise EvidenceMismatch("the engine holds another merge")

    store, study = new_study(tmp_path)
    coordinator = coordinator_of(store, study, max_trials=9)
    with pytest.raises(EvidenceMismatch, match=r"^the engine holds another merge$"):
        run_evaluations(coordinator, HoldsAnotherMerge(), name="study", storage_dir=tmp_path / "ray", concurrency=1)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_to_end_stores_its_chunks(number: signal.Signals, ray_cluster: None, tmp_path: Path) -> None:
    """After Ctrl-C or SIGTERM no further chunk is requested, and every chunk that was requested is stored."""
    requests = tmp_path / "requests"
    requests.mkdir()

    class Counting(FakeScorer):
        def score(self, request: Any) -> Any:
            (requests / uuid.uuid4().hex).touch()
            time.sleep(1.0)
            return super().score(request)

    store, study = new_study(tmp_path)
    coordinator = coordinator_of(store, study, max_trials=9)
    notes: list[str] = []
    signalled: list[int] = []

    def tick() -> None:
        if not signalled and len(list(requests.iterdir())) >= CONCURRENCY + 1:
            signalled.append(len(list(requests.iterdir())))
            os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt):
        run_evaluations(
            coordinator,
            Counting(),
            name="study",
            storage_dir=tmp_path / "ray",
            concurrency=CONCURRENCY,
            tick=tick,
            note=notes.append,
        )
    requested = len(list(requests.iterdir()))
    assert signalled[0] <= requested <= signalled[0] + CONCURRENCY  # what was being sent when the signal came
    with store.reading() as connection:
        stored = connection.execute(sa.select(sa.func.count()).select_from(schema.evidence)).scalar_one()
    assert stored == requested
    assert "ends when the chunks that are being scored are stored; a second Ctrl-C ends it at once" in notes


@pytest.mark.slow
def test_a_run_without_evaluations_ends_after_sigterm(ray_cluster: None, tmp_path: Path) -> None:
    """A search whose baselines are scored may wait for its first proposal for hours."""

    class Silent(InlineProposer):
        def result(self, *, timeout_s: float) -> Any:
            time.sleep(timeout_s)

    store, study = new_study(tmp_path)
    coordinator = coordinator_of(store, study, proposer=Silent(lfs_space()), max_trials=9)
    signalled = list[float]()
    ticks = list[tuple[float, float]]()  # the time, and the processor time until then
    is_over = threading.Event()

    def interrupt() -> None:
        while not all(trial.state.is_finished for trial in store.trials(study)):
            if is_over.wait(0.2):
                return
        is_over.wait(3.0)
        while len(signalled) < 2:  # the second one ends a run that does not look
            signalled.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)
            if is_over.wait(20.0):
                return

    thread = threading.Thread(target=interrupt)
    thread.start()
    with ExitStack() as stack:
        stack.callback(is_over.set)
        with pytest.raises(KeyboardInterrupt):
            run_evaluations(
                coordinator,
                FakeScorer(),
                name="study",
                storage_dir=tmp_path / "ray",
                concurrency=CONCURRENCY,
                tick=lambda: ticks.append((time.monotonic(), time.process_time())),
            )
    assert time.monotonic() - signalled[0] < 5.0
    thread.join()
    waiting = [busy_s for at, busy_s in ticks if signalled[0] - 2.0 < at < signalled[0]]
    assert len(waiting) >= 4
    assert waiting[-1] - waiting[0] < 1.0


@pytest.mark.slow
def test_snapshots_of_tune_that_cannot_be_copied_leave_no_trace(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody reads them: studies resume from their own database."""
    copies: list[Any] = []
    copy = storage._pyarrow_fs_copy_files

    def fails_first(*arguments: Any, **options: Any) -> None:
        copies.append(arguments)
        if len(copies) == 1:
            raise FileNotFoundError("Failed to open local file")
        copy(*arguments, **options)

    monkeypatch.setattr(storage, "_pyarrow_fs_copy_files", fails_first)
    store, study = new_study(tmp_path)
    assert run(store, study, FakeScorer(), tmp_path) == ""
    assert len(copies) == 2
    assert "Failed to open local file" not in caplog.text


@pytest.mark.slow
def test_the_driver_starts_with_the_trial_actors_that_it_gets(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each rung ends with evaluations whose own actors wait for CPUs, until they get the actor that is idle.
    monkeypatch.setattr(ray_tune, "IDLE_S", 0.3)
    monkeypatch.setattr(ray_tune, "CPU_WAIT_S", 3.0)
    store, study = new_study(tmp_path)

    @ray.remote
    class Other:
        pass

    # One trial actor, which takes 0.05, is left room.
    other = Other.options(num_cpus=round(free_cpus() - 0.08, 2)).remote()  # type: ignore[attr-defined]
    ray.get(other.__ray_ready__.remote())
    ended: list[str] = []
    driver = threading.Thread(target=lambda: ended.append(run(store, study, FakeScorer(), tmp_path)))
    driver.start()
    driver.join(timeout=90)
    is_waiting = driver.is_alive()
    ray.kill(other)  # the others can start
    driver.join(timeout=90)
    assert not is_waiting, "it waits for actors that cannot start"
    assert ended == [""]
    missing = events(store, study, "actors")[-1]
    assert (missing["running"], missing["wanted"]) == (1, CONCURRENCY)
    assert missing["reason"].startswith("1 of 3 trial actors run; the others wait for CPUs (0.05 each, 0.03 of")


@pytest.mark.slow
def test_a_trial_actor_that_starts_is_not_killed(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the death of a trial actor a single new one starts, although the others are idle again and again."""
    monkeypatch.setattr(ray_tune, "IDLE_S", 0.1)  # a new actor has its CPUs, so this limit is not for it

    class DiesOnce(FakeScorer):
        def score(self, request: Any) -> Any:
            time.sleep(0.3)
            with suppress(FileExistsError):
                (tmp_path / "died").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
            return super().score(request)

    store, study = new_study(tmp_path)
    before = len(trial_actors())
    assert run(store, study, DiesOnce(), tmp_path) == ""
    assert (tmp_path / "died").exists()
    assert len(trial_actors()) - before == CONCURRENCY + 1


@pytest.mark.slow
def test_fatal_signals_fail_the_recipe(ray_cluster: None, tied_family: Family, tmp_path: Path) -> None:
    """A recipe whose replicas die of a fatal signal fails, and the study continues."""
    from ray import serve

    store, study = new_study(tmp_path)
    label, recipe = coordinator_of(store, study).plan.baselines[3][1:]
    scorer = deploy_scorer(
        tied_family,
        OPTIONS,
        name="fake-crashing",
        make_worker=partial(FakeScorer, crashing=(recipe.digest,), crash_by="signal"),
        health_check_period_s=0.5,
    )
    failed = run(store, study, replace(scorer, deadline_s=30.0, poll_s=0.5), tmp_path)
    serve.delete("fake-crashing")
    assert failed == ""
    trials = store.trials(study)
    assert [trial.label for trial in trials if trial.state is TrialState.FAIL] == [label]
    assert all(trial.state.is_finished for trial in trials)
    crashes = events(store, study, "crash")
    assert [(crash["crashes"], crash["kind"]) for crash in crashes] == [(1, "error"), (2, "error")]
    reason = r"ended while it scored the chunk: (Fatal Python error: Segmentation fault|SIGSEGV received)"
    assert re.search(reason, crashes[-1]["reason"])
    assert len({crash["replica"] for crash in crashes}) == 2
    assert crashes[-1]["scored_others"]
