"""An engine fails a check: the samples that it scored are scored again in every study, and compared."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from search_spaces.recipe import Recipe
from service.errors import StudyFailed
from service.jobs.search.attempt import _check_engines, _is_closed
from service.resolved_study import ResolvedStudy
from service.store import Store, results
from service.store.steering import SteeringStore
from service.tune.coordinator import Coordinator
from service.tune.samples import rescoring
from service.types import EventKind, JobState, TrialResult, TrialState
from tests.service.tune.harness import coordinator_of, drive, make_plan, new_study, score, trial_list
from workers.errors import EngineFault
from workers.serving.fake import FakeScorer
from workers.types import (
    CanaryReport,
    SamplePictures,
    SampleResult,
    SampleTexts,
    ScoreRequest,
    ScoreResult,
    Span,
    Split,
    TaskInfo,
    TaskSpec,
    VerificationReport,
)

pytestmark = pytest.mark.slow  # whole searches

# Both studies propose the same configurations; the second has fewer trials.
SIZES = (14, 9)


class Replicas:
    """Fake replicas; the first one scores. A replica that fails a check is replaced by the next, as Serve does."""

    def __init__(self, *replicas: FakeScorer) -> None:
        self.replicas = list(replicas)

    def score(self, request: ScoreRequest) -> ScoreResult:
        with self._first() as replica:
            return replica.score(request)

    def check(self) -> tuple[CanaryReport, ...]:
        with self._first() as replica:
            return replica.check()

    def describe(self, tasks: tuple[TaskSpec, ...]) -> tuple[TaskInfo, ...]:
        return self.replicas[0].describe(tasks)

    def sample_texts(self, task: TaskSpec, start: int, stop: int) -> SampleTexts:
        return self.replicas[0].sample_texts(task, start, stop)

    def sample_pictures(self, task: TaskSpec, start: int, stop: int) -> SamplePictures:
        return self.replicas[0].sample_pictures(task, start, stop)

    def verify(self, recipe: Recipe, samples: tuple[SampleResult, ...], spans: tuple[Span, ...]) -> VerificationReport:
        return self.replicas[0].verify(recipe, samples, spans)

    def is_starting(self) -> bool:
        return self.replicas[0].is_starting()

    def statistics(self) -> Mapping[str, Any]:
        return self.replicas[0].statistics()

    @contextmanager
    def _first(self) -> Iterator[FakeScorer]:
        try:
            yield self.replicas[0]
        except EngineFault:
            del self.replicas[0]
            raise


@pytest.fixture(autouse=True)
def _look_at_every_step_and_name_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rescoring, "LOOK_S", 0.0)
    monkeypatch.setattr(rescoring, "NAMED_POSITIONS", 10**6)


@pytest.fixture
def studies(tmp_path: Path) -> tuple[Store, list[str]]:
    """Two studies in one database."""
    store, first = new_study(tmp_path)
    resolved = ResolvedStudy.of(store.job(first))
    return store, [first, store.create_job(kind="search", name="other", document={}, accepted=resolved.to_json()).id]


def undisturbed(directory: Path) -> list[list[tuple[Any, ...]]]:
    lists = []
    for size in SIZES:
        (directory / str(size)).mkdir()
        store, study = new_study(directory / str(size))
        drive(coordinator_of(store, study, max_trials=size), FakeScorer())
        lists.append(trial_list(store, study))
    return lists


def step(coordinator: Coordinator, scorer: Any) -> bool:
    """Score one evaluation; False if there is none."""
    evaluation = coordinator.next_evaluation()
    chunk = 0
    while evaluation is not None and not coordinator.on_outcome(evaluation, score(scorer, evaluation, chunk)):
        chunk += 1
    return evaluation is not None


def drive_together(coordinators: Iterable[Coordinator], scorer: Any) -> dict[int, str]:
    """Run coordinators in turn to their ends; returns the reasons of failed ones by their index."""
    failed: dict[int, str] = {}
    running = dict(enumerate(coordinators))
    while running:
        for index, coordinator in list(running.items()):
            try:
                if not step(coordinator, scorer):
                    assert coordinator.is_finished
                    del running[index]
            except StudyFailed as error:
                failed[index] = str(error)
                del running[index]
    return failed


def events(store: Store, study: str, kind: EventKind) -> list[Any]:
    return [event.payload for event in store.events(study) if event.kind == kind]


def test_faulty_scores_are_repeated(tmp_path: Path, studies: tuple[Store, list[str]]) -> None:
    """Both studies score a faulty engine's samples again and continue if nothing changed."""
    store, both = studies
    scorer = Replicas(FakeScorer(replica="one", fails_canary_at=20), FakeScorer(replica="two"))
    coordinators = [coordinator_of(store, study, max_trials=size) for study, size in zip(both, SIZES, strict=True)]
    assert drive_together(coordinators, scorer) == {}
    assert [trial_list(store, study) for study in both] == undisturbed(tmp_path)
    for study in both:
        (fault,) = events(store, study, EventKind.ENGINE_FAULT)
        assert fault["replicas"] == {"one": "engine one: the canary failed"}
        by_one = sum(row.num_samples for row in store.evidence(study) if row.replica == "one")
        assert fault["samples"] == by_one > 0
        assert events(store, study, EventKind.SCORED_AGAIN) == [{"samples": by_one}]
        assert store.void_samples(study) == ()


class Alternating(Replicas):
    """Fake replicas that score in turn; a replica that fails a check scores no more."""

    def score(self, request: ScoreRequest) -> ScoreResult:
        result = super().score(request)
        self.replicas.append(self.replicas.pop(0))
        return result


def test_gaps_between_void_samples_fail_no_study(tmp_path: Path) -> None:
    """A trial's void samples may have those of another replica between them."""
    store, study = new_study(tmp_path)
    scorer = Alternating(FakeScorer(replica="one", fails_canary_at=25), FakeScorer(replica="two"))
    drive(coordinator_of(store, study, scheduler="asha", max_trials=30, chunk_samples=512), scorer)
    assert len(events(store, study, EventKind.SCORED_AGAIN)) == 1
    assert store.void_samples(study) == ()


def test_hashes_of_samples_with_gaps_are_ignored(tmp_path: Path) -> None:
    """Earlier versions stored the hash of the second of two ranges under a key that named both."""
    store, study = new_study(tmp_path)
    coordinator = coordinator_of(store, study)
    evaluation = coordinator.next_evaluation()
    assert evaluation is not None
    math = evaluation.chunks[0][0]
    gaps = ScoreRequest(study, evaluation.recipe, (replace(math, start=3),))
    result = FakeScorer().score(gaps)
    first = FakeScorer().score(replace(gaps, spans=(replace(math, stop=2),)))
    hashes = {f"search {math.objective}[0:{math.stop}]": result.evidence.prompts[math.objective]}
    stored = replace(result, samples=first.samples + result.samples)
    stored = replace(stored, evidence=replace(result.evidence, prompts=hashes))
    coordinator._writer.record_chunk(evaluation.trial, Split.SEARCH, stored)
    drive(coordinator_of(store, study), FakeScorer())


def test_readers_of_changed_trials_have_every_change(
    studies: tuple[Store, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each step of a search, also one with samples that are scored again, the trials that changed are named."""
    monkeypatch.setattr(results, "CLOCK_STEP_S", 0.0)
    store, (study, _) = studies
    known, event, num_read = dict[int, Any](), 0, list[int | None]()

    def follow(_: str) -> None:
        nonlocal event
        numbers = store.changed_trials(study, after=event)
        event = store.last_event_id(study)
        if numbers is None:
            known.clear()
        num_read.append(None if numbers is None else len(numbers))
        known.update((trial.number, columns_of(trial)) for trial in store.trial_results(study, numbers))
        assert known == {trial.number: columns_of(trial) for trial in store.trial_results(study)}

    def columns_of(trial: TrialResult) -> Any:
        return replace(trial, timings_s={})  # which columns lack

    scorer = Replicas(FakeScorer(replica="one", fails_canary_at=20), FakeScorer(replica="two"))
    drive(coordinator_of(store, study, max_trials=SIZES[0], observer=follow), scorer)
    follow("end")
    assert events(store, study, EventKind.SCORED_AGAIN)
    assert 1 < num_read.count(None) < len(num_read) / 4
    assert max(number for number in num_read if number is not None) < len(known)


def test_changed_values_fail_every_study(
    studies: tuple[Store, list[str]],
) -> None:
    """Changed values fail every study, name its trials and rewrite no promotion."""
    store, both = studies
    scorer = Replicas(FakeScorer(replica="one", wrong_since=16, fails_canary_at=20), FakeScorer(replica="two"))
    coordinators = [coordinator_of(store, study, max_trials=size) for study, size in zip(both, SIZES, strict=True)]
    while store.engine_faults() == ():
        for coordinator in coordinators:
            step(coordinator, scorer)
    before = [[(trial.number, trial.state, trial.rungs) for trial in store.trials(study)] for study in both]
    wrong = [wrong_samples(store, study) for study in both]
    failed = drive_together(coordinators, scorer)
    assert sorted(failed) == [0, 1]
    for index, (study, size) in enumerate(zip(both, SIZES, strict=True)):
        assert wrong[index], "else this shows nothing"
        assert named(failed[index]) == wrong[index]
        after = [(trial.number, trial.state, trial.rungs) for trial in store.trials(study)]
        assert after[: len(before[index])] == before[index]
        again = coordinator_of(store, study, max_trials=size)
        with pytest.raises(StudyFailed) as caught:
            drive(again, FakeScorer(replica="three"))
        assert named(str(caught.value)) == wrong[index], "a study that failed for it fails again"


def wrong_samples(store: Store, study: str) -> set[tuple[int, str, int]]:
    """(trial, objective, position) of stored values that are not what a healthy engine gives."""
    tasks = make_plan(study).tasks
    found = set()
    for trial in store.trials(study):
        for sample in store.samples(study, trial.recipe.digest, Split.SEARCH):
            span = Span(sample.objective, tasks[sample.objective], sample.position, sample.position + 1)
            (truth,) = FakeScorer().score(ScoreRequest(study, trial.read_recipe(), (span,))).samples
            if truth.value != sample.value:
                found.add((trial.number, sample.objective, sample.position))
    return found


def named(reason: str) -> set[tuple[int, str, int]]:
    found = set()
    for trials, objective, positions in re.findall(r"trial ([\d, ]+): (\w+) \(search data\) at ([\d, ]+)", reason):
        found |= {(int(t), objective, int(p)) for t in trials.split(", ") for p in positions.split(", ")}
    assert "the canary failed" in reason
    return found


def test_samples_from_before_the_last_good_canary_stand(studies: tuple[Store, list[str]]) -> None:
    store, (study, _) = studies
    one = FakeScorer(replica="one")
    coordinator = coordinator_of(store, study)
    for _ in range(3):
        step(coordinator, one)
    one.check()
    step(coordinator, one)
    (last,) = [row for row in store.evidence(study) if row.canaries == 2][:1]
    coordinator.on_engine_fault(EngineFault("it failed", "one", 2))
    assert {sample.recipe_digest for sample in store.void_samples(study)} == {last.recipe_digest}
    drive(coordinator, FakeScorer(replica="two"))
    assert store.void_samples(study) == ()


def test_result_after_a_fault_is_dropped(studies: tuple[Store, list[str]]) -> None:
    """A result that arrives after its engine's fault is not stored."""
    store, (study, _) = studies
    coordinator = coordinator_of(store, study)
    evaluation = coordinator.next_evaluation()
    assert evaluation is not None
    late = score(FakeScorer(replica="one"), evaluation, 0)
    coordinator.on_engine_fault(EngineFault("it failed", "one", 1))
    assert coordinator.on_outcome(evaluation, late)
    assert store.evidence(study) == ()
    again = coordinator.next_evaluation()
    assert again is not None
    assert (again.trial, again.chunks) == (evaluation.trial, evaluation.chunks)


def test_faulty_weights_are_no_reference(studies: tuple[Store, list[str]]) -> None:
    """Weights of a faulty engine are no reference for those of the next."""
    store, (study, _) = studies
    coordinator = coordinator_of(store, study)
    evaluation = coordinator.next_evaluation()
    assert evaluation is not None
    first = score(FakeScorer(replica="one"), evaluation, 0)
    stale = replace(first, evidence=replace(first.evidence, weights_checksum="of other weights"))
    coordinator.on_outcome(evaluation, stale)
    coordinator.on_lost(evaluation, "killed")
    coordinator.on_engine_fault(EngineFault("it failed", "one", 1))
    drive(coordinator, FakeScorer(replica="two"))
    assert events(store, study, EventKind.SCORED_AGAIN) == [{"samples": len(first.samples)}]


def test_repeated_faults_end_the_study(studies: tuple[Store, list[str]]) -> None:
    """A study ends after engines have failed its checks repeatedly."""
    store, (study, _) = studies
    scorer = Replicas(*(FakeScorer(replica=f"no. {number}", fails_canary_at=2) for number in range(9)))
    with pytest.raises(StudyFailed, match=r"3 engines failed their checks; the last: engine no\. 2"):
        drive(coordinator_of(store, study), scorer)


def test_engines_are_checked_before_the_end(
    studies: tuple[Store, list[str]],
) -> None:
    """Engines are checked before a study ends, and a fault resumes it."""
    store, (study, other) = studies
    scorer = Replicas(FakeScorer(replica="one", wrong_since=500), FakeScorer(replica="two"))
    coordinator = coordinator_of(store, study)
    drive(coordinator, scorer)
    scorer.replicas[0]._is_wrong = True  # it has failed since
    writer = coordinator._writer
    assert not _is_closed(coordinator, lambda: _check_engines(store, writer, scorer))
    assert not coordinator.is_finished
    drive(coordinator, scorer)
    assert _is_closed(coordinator, lambda: _check_engines(store, writer, scorer))
    assert store.document(study, "canaries") == {"samples_not_checked": 0, "skipped": {}}
    assert all(trial.state is not TrialState.FAIL for trial in store.trials(study))
    assert events(store, other, EventKind.ENGINE_FAULT) == []


def test_what_could_not_be_checked_is_counted_as_not_checked(studies: tuple[Store, list[str]]) -> None:
    store, (study, _) = studies
    gone, blind = FakeScorer(replica="gone"), FakeScorer(replica="blind", skips_canaries="too little memory")
    coordinator = coordinator_of(store, study)
    for scorer in (gone, gone, blind):
        step(coordinator, scorer)
    gone.check()
    for _ in range(3):
        step(coordinator, gone)
    drive(coordinator, blind)
    _check_engines(store, coordinator._writer, blind)
    rows = store.evidence(study)
    checked = sum(row.num_samples for row in rows if row.replica == "gone" and row.canaries == 1)
    document = store.document(study, "canaries")
    assert document is not None
    assert document["skipped"] == {"blind": "too little memory"}
    assert document["samples_not_checked"] == sum(row.num_samples for row in rows) - checked
    assert checked > 0


def complete(store: Store, study: str, scorer: Any, *, max_trials: int) -> None:
    """Run a study to its end, as an attempt that cannot check its engine any more."""
    coordinator = coordinator_of(store, study, max_trials=max_trials)
    drive(coordinator, scorer)
    coordinator._writer.set_state(JobState.COMPLETE, "the space is exhausted")


def test_complete_study_repeats_void_samples(tmp_path: Path, studies: tuple[Store, list[str]]) -> None:
    """A complete study learns of void samples and scores them again when it is resumed."""
    store, (first, second) = studies
    complete(store, first, FakeScorer(replica="one"), max_trials=SIZES[0])
    assert SteeringStore(store).resume(first, reason="by request").state is JobState.COMPLETE, (
        "there is nothing to score again"
    )
    number = sum(row.num_samples for row in store.evidence(first))
    other = coordinator_of(store, second, max_trials=SIZES[1])
    step(other, FakeScorer(replica="one"))
    for _ in range(2):
        other.on_engine_fault(EngineFault("engine one: the canary failed", "one", 1))
    assert store.job(first).reason == (
        f"the space is exhausted; {number} samples are void: engine one: the canary failed; resume the study to "
        "score them again"
    )
    payload = {"replicas": {"one": "engine one: the canary failed"}, "samples": number}
    assert events(store, first, EventKind.ENGINE_FAULT) == [payload]
    assert store.job(second).state is not JobState.COMPLETE

    assert SteeringStore(store).resume(first, reason="by request").state is JobState.STOPPED
    complete(store, first, FakeScorer(replica="two"), max_trials=SIZES[0])
    assert events(store, first, EventKind.SCORED_AGAIN) == [{"samples": number}]
    assert trial_list(store, first) == undisturbed(tmp_path)[0]
    assert store.job(first).reason == "the space is exhausted"
    assert SteeringStore(store).resume(first, reason="by request").state is JobState.COMPLETE


def test_other_void_values_fail_the_study(
    studies: tuple[Store, list[str]],
) -> None:
    """A complete study fails when it is resumed if its void samples have other values."""
    store, (first, second) = studies
    complete(store, first, FakeScorer(replica="one", wrong_since=16), max_trials=SIZES[0])
    wrong = wrong_samples(store, first)
    assert wrong, "else this shows nothing"
    other = coordinator_of(store, second, max_trials=SIZES[1])
    other.on_engine_fault(EngineFault("engine one: the canary failed", "one", 1))
    SteeringStore(store).resume(first, reason="by request")
    with pytest.raises(StudyFailed) as caught:
        complete(store, first, FakeScorer(replica="two"), max_trials=SIZES[0])
    assert named(str(caught.value)) == wrong
