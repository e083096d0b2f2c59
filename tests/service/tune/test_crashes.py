"""The decision whether a candidate causes its engine's crashes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from service.store import EventRecord, Store
from service.tune.coordinator import Coordinator
from service.tune.crashes import Crashes
from service.tune.evaluation import ChunkFailed, Crash, Evaluation, FailureKind
from service.types import EventKind, TrialState
from tests.service.tune.harness import coordinator_of, drive, new_study, trial_list
from workers.errors import CrashKind, EngineCrashed, EngineUnavailable
from workers.serving.fake import FakeScorer
from workers.types import ScoreRequest, ScoreResult

ERROR, HANG, EXIT = CrashKind.ERROR, CrashKind.HANG, CrashKind.EXIT


def crash(
    evaluation: Evaluation, *, kind: CrashKind = ERROR, scored_others: bool = True, chunk: int = 0
) -> ChunkFailed:
    reason = f"replica-{chunk}: CUDA error"
    return ChunkFailed(FailureKind.CRASH, reason, crash=Crash(evaluation.chunks[chunk], "replica", scored_others, kind))


def first(coordinator: Coordinator) -> Evaluation:
    evaluation = coordinator.next_evaluation()
    assert evaluation is not None
    return evaluation


def crash_events(store: Store, study: str) -> list[Any]:
    return [event.payload for event in store.events(study) if event.kind == EventKind.CRASH]


def test_second_crash_fails_the_recipe(tmp_path: Path) -> None:
    """A recipe that crashes its engine twice fails, and the study continues."""
    store, study = new_study(tmp_path)
    coordinator = coordinator_of(store, study)
    victim = coordinator.plan.baselines[3]
    drive(coordinator, FakeScorer(crashing=[victim[2].digest]))
    failed = [trial for trial in store.trials(study) if trial.state is TrialState.FAIL]
    assert [trial.label for trial in failed] == [victim[1]]
    assert "crashed 2 times with the same samples" in str(failed[0].reason)
    assert "this recipe crashes the engine" in str(failed[0].reason)
    assert coordinator.is_finished
    assert [(e["trial"], e["crashes"]) for e in crash_events(store, study)] == [(failed[0].number, n) for n in (1, 2)]


@pytest.mark.parametrize(
    ("crashes", "fails"),
    [
        ([(ERROR, True)] * 2, True),
        ([(ERROR, False), (ERROR, True)], True),
        ([(ERROR, True), (ERROR, False)], False),  # the second engine had shown nothing yet
        ([(HANG, True)] * 2, False),
        ([(HANG, True)] * 3, True),
        ([(EXIT, True)] * 5, False),  # as five kills from outside
        ([(EXIT, True)] * 6, True),
        ([(EXIT, True)] * 5 + [(EXIT, False)], False),
        ([(ERROR, True)] + [(EXIT, True)] * 2, False),
        ([(ERROR, True)] + [(EXIT, True)] * 3, True),
        ([(HANG, True)] * 2 + [(EXIT, True)] * 2, True),
    ],
)
def test_crashes_that_fail_a_candidate(tmp_path: Path, crashes: list[tuple[CrashKind, bool]], fails: bool) -> None:
    """A candidate fails after two errors, three hangs or six ends of the process."""
    store, study = new_study(tmp_path)
    coordinator = coordinator_of(store, study)
    evaluation = first(coordinator)
    done = [
        coordinator.on_outcome(evaluation, crash(evaluation, kind=kind, scored_others=scored_others))
        for kind, scored_others in crashes
    ]
    assert done == [*[False] * (len(crashes) - 1), fails]
    assert (store.trial(study, evaluation.trial).state is TrialState.FAIL) == fails


def test_crashes_without_a_kind(tmp_path: Path) -> None:
    """Crashes stored without a kind count as errors or as ends of the process."""
    store, study = new_study(tmp_path)
    evaluation = first(coordinator_of(store, study))
    for has_error, fails in ((False, False), (True, True)):
        event, _ = Crashes(()).add(evaluation, crash(evaluation))
        del event["kind"]
        stored = EventRecord(0, 0.0, EventKind.CRASH, {**event, "has_error": has_error})
        _, failure = Crashes([stored]).add(evaluation, crash(evaluation))
        assert (failure is not None) == fails


def test_crashes_with_other_samples_count_apart(tmp_path: Path) -> None:
    store, study = new_study(tmp_path)
    coordinator = coordinator_of(store, study)
    evaluation = first(coordinator)
    assert not coordinator.on_outcome(evaluation, crash(evaluation, chunk=0))
    assert not coordinator.on_outcome(evaluation, crash(evaluation, chunk=1))
    assert coordinator.on_outcome(evaluation, crash(evaluation, chunk=1))


def test_the_count_outlives_the_driver(tmp_path: Path) -> None:
    store, study = new_study(tmp_path)
    coordinator = coordinator_of(store, study)
    evaluation = first(coordinator)
    assert evaluation.crashes == 0
    coordinator.on_outcome(evaluation, crash(evaluation))
    again = first(coordinator_of(store, study))
    assert (again.trial, again.crashes) == (evaluation.trial, 1)
    resumed = coordinator_of(store, study)
    evaluation = first(resumed)
    assert resumed.on_outcome(evaluation, crash(evaluation))
    assert "crashed 2 times" in str(store.trial(study, evaluation.trial).reason)


def test_crash_before_any_score_is_no_engine(tmp_path: Path) -> None:
    """Engines that crash before their first score count as absent."""
    store, study = new_study(tmp_path)
    coordinator = coordinator_of(store, study)
    evaluation = first(coordinator)
    for _ in range(5):
        assert not coordinator.on_outcome(evaluation, crash(evaluation, scored_others=False))
    with pytest.raises(EngineUnavailable, match=r"no engine to score with: .*CUDA error"):
        coordinator.on_outcome(evaluation, crash(evaluation, scored_others=False))
    assert store.trial(study, evaluation.trial).state is TrialState.WAITING


class KilledAtRandom(FakeScorer):
    """A scorer that kills its replica in a share of the chunks; every replica has scored other recipes before."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.kills = random.Random(1)
        self.num_kills = 0

    def score(self, request: ScoreRequest) -> ScoreResult:
        if self.kills.random() < self.share:
            self.num_kills += 1
            raise EngineCrashed("its process ended", "replica", scored_others=True, kind=EXIT)
        return super().score(request)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_kills_at_random_fail_no_candidate(tmp_path: Path, share: float) -> None:
    lists = []
    for name, scorer in (("quiet", FakeScorer()), ("killed", KilledAtRandom(share))):
        (tmp_path / name).mkdir()
        store, study = new_study(tmp_path / name)
        drive(coordinator_of(store, study, chunk_samples=10), scorer)
        lists.append(trial_list(store, study))
    assert isinstance(scorer, KilledAtRandom)
    assert scorer.num_kills >= 10
    assert lists[0] == lists[1]
