"""The end of an attempt whose engine cannot use models that preflight accepted, or fails a check."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from search_spaces.errors import InvalidRecipe
from search_spaces.spaces.base import AlignedSpace, LayerPair
from search_spaces.study.file import load_study, parse_study
from search_spaces.study.search import GradientOptions, PolicyOptions, RefinementOptions, Search
from service.engine_machines import EngineMachines
from service.errors import StudyFailed, StudyUnusable
from service.jobs.heartbeat import Heartbeat
from service.jobs.search.attempt import (
    _baselines,
    _keep_prompts,
    _planned_steps,
    _reason_to_fail,
    _Snapshots,
    execute,
    stored_alignments,
    with_alignments,
)
from service.resolved_study import ResolvedStudy
from service.store import BracketRecord, Store
from service.store.artifacts import ArtifactStore
from service.store.documents import ALIGNMENT_COST, BenchmarkFacts, read_alignment_cost
from service.store.steering import SteeringStore
from service.studies.preflight.examine import examine
from service.studies.preflight.result import PreflightResult
from service.tune.plan import Benchmark
from service.tune.searchers.base import SearchSetting
from service.types import EventKind, JobRecord, JobState, Origin, Steering, TrialRecord
from tests.builders import tiny_family
from tests.end_to_end.studies import undisturbed, write_small_study
from tests.s3_server import S3, failing
from tests.service.sums import sums_study, write_sums
from tests.service.synthetic_run import run_record
from tests.service.tune.harness import trial_list
from tests.workers.recipes import random_alignment
from workers.alignments.files import is_stored, read_alignment, write_alignment
from workers.alignments.pairs import AlignmentInputs
from workers.cache import CACHE_VARIABLE
from workers.errors import EngineUnavailable, EvidenceMismatch
from workers.evaluation.sample_texts import sample_texts
from workers.serving.deployment import deploy_scorer
from workers.serving.fake import FakeScorer
from workers.types import CanaryReport, SampleTexts, Split, TaskSpec

GB = 10**9
UNUSABLE = StudyUnusable("the chat template refuses these messages")
NO_ENGINE = EngineUnavailable("no engine to score with: models/math has changed")

# vLLM is asked about models that nothing else has.
pytestmark = pytest.mark.slow


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path_factory.getbasetemp() / "findings"))
    tiny_family(tmp_path / "models", experts=("math", "text"))
    write_sums(tmp_path)
    return tmp_path


@pytest.fixture
def preflight(directory: Path) -> PreflightResult:
    return examine(parse_study(sums_study(directory / "models", data_dir=directory)))


@pytest.fixture
def record(directory: Path, preflight: PreflightResult) -> Iterator[JobRecord]:
    store = Store(f"sqlite:///{directory / 'study.db'}")
    yield store.create_job(
        kind="search", name="sums", document=preflight.study.canonical(), accepted=preflight.resolved().to_json()
    )
    store.close()


def test_engine_refusal_fails_the_study(record: JobRecord, preflight: PreflightResult) -> None:
    """An engine's refusal of unchanged models fails the study."""
    assert _reason_to_fail(UNUSABLE, record, preflight) == str(UNUSABLE)
    assert _reason_to_fail(EvidenceMismatch("another merge"), record, preflight) == "another merge"
    assert _reason_to_fail(NO_ENGINE, record, preflight) is None


@pytest.mark.parametrize("error", [UNUSABLE, NO_ENGINE])
def test_changed_or_absent_models(
    record: JobRecord, preflight: PreflightResult, directory: Path, error: Exception
) -> None:
    """Changed models fail the study; it waits for absent ones."""
    shutil.move(directory / "models" / "math", directory / "away")
    assert _reason_to_fail(error, record, preflight) is None
    shutil.copytree(directory / "models" / "text", directory / "models" / "math")
    reason = str(_reason_to_fail(error, record, preflight))
    assert "fingerprints of math have changed since it was started" in reason
    assert reason.endswith(f"; an engine says: {error}")


def test_changed_data_fail_the_study(record: JobRecord, preflight: PreflightResult, directory: Path) -> None:
    file = directory / "search.jsonl"
    file.write_text(file.read_text().replace("1", "2"))
    assert "tasks of sums have changed" in str(_reason_to_fail(UNUSABLE, record, preflight))


def test_prompts_are_stored_once(record: JobRecord, preflight: PreflightResult, directory: Path) -> None:
    """Every sample on which a trial may be scored gets its prompt and its answer; a later driver stores nothing.

    Without the data, the study goes on without prompts, and says so.
    """
    store = Store(f"sqlite:///{directory / 'study.db'}")
    writer, notes = store.open_attempt(record.id), list[str]()
    plan = preflight.plan(record.id, ResolvedStudy.of(record), baselines=())
    sizes = [(Split.SEARCH, plan.rung_samples[-1]), (Split.HOLDOUT, plan.holdout_samples)]
    _keep_prompts(store, writer, plan, FakeScorer(), note=notes.append)
    rows = {(row["prompt"], row["answer"]) for row in map(json.loads, (directory / "search.jsonl").open())}
    for split, samples in sizes:
        for name, count in samples.items():
            texts = store.prompts(record.id, split, name, range(count + 1))
            assert sorted(texts) == list(range(count)) != []
            if split is Split.SEARCH:
                assert {(text.prompt, text.reference) for text in texts.values()} <= rows
    assert notes == []
    (directory / "search.jsonl").unlink()
    _keep_prompts(store, writer, plan, FakeScorer(), note=notes.append)
    assert notes == [], "they are stored already"
    other = store.create_job(kind="search", name="other", document=record.document, accepted=record.accepted)
    _keep_prompts(store, store.open_attempt(other.id), plan, FakeScorer(), note=notes.append)
    assert notes
    assert all(note.startswith("prompts of search data of ") for note in notes)
    assert {split for split, _ in store.stored_prompts(other.id)} == {Split.HOLDOUT}
    store.close()


def test_prompts_of_benchmarks_are_stored(record: JobRecord, preflight: PreflightResult, directory: Path) -> None:
    """The prompts of a benchmark are those of all its samples, in the order of scoring."""
    store = Store(f"sqlite:///{directory / 'study.db'}")
    writer = store.open_attempt(record.id)
    plan = preflight.plan(record.id, ResolvedStudy.of(record), baselines=())
    (task,) = plan.holdout_tasks.values()
    count = FakeScorer().describe((task,))[0].num_samples
    facts = BenchmarkFacts("extra", "exact_match", "maximize", None, task.digest, count)
    _keep_prompts(
        store, writer, replace(plan, benchmarks=(Benchmark(facts, task, ("best",)),)), FakeScorer(), note=print
    )
    found = store.prompts(record.id, Split.BENCHMARK, "extra", range(count + 1))
    assert [(text.prompt, text.reference) for text in found.values()] == [*sample_texts(task, 0, count)]
    assert len(found) == count > 0
    store.close()


@dataclass
class CountsTexts(FakeScorer):
    """A fake scorer that records the samples whose texts were requested."""

    asked: list[tuple[int, int]] = field(default_factory=list)

    def sample_texts(self, task: TaskSpec, start: int, stop: int) -> SampleTexts:
        self.asked.append((start, stop))
        return tuple((f"prompt {position}", None) for position in range(start, stop))


def test_the_driver_builds_no_task(
    record: JobRecord, preflight: PreflightResult, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts come from the scorer, in parts: the driver does not build a task for them."""
    monkeypatch.setattr("service.jobs.search.attempt.TEXTS_PER_CALL", 5)
    monkeypatch.setattr("workers.evaluation.sample_texts.build_task", lambda spec: pytest.fail("a task was built"))
    store, scorer = Store(f"sqlite:///{directory / 'study.db'}"), CountsTexts()
    plan = preflight.plan(record.id, ResolvedStudy.of(record), baselines=())
    _keep_prompts(store, store.open_attempt(record.id), plan, scorer, note=pytest.fail)
    count = plan.rung_samples[-1]["sums"]
    assert scorer.asked[: -(-count // 5)] == [(start, min(start + 5, count)) for start in range(0, count, 5)]
    found = store.prompts(record.id, Split.SEARCH, "sums", range(count + 1))
    assert [text.prompt for text in found.values()] == [f"prompt {position}" for position in range(count)]
    store.close()


@dataclass
class FirstFails(FakeScorer):
    """A fake scorer: the first process among those with the same `directory` fails its check."""

    directory: str = ""

    def __post_init__(self) -> None:
        marker = Path(self.directory, "started")
        self._is_first = not marker.exists()
        marker.touch()

    def check(self) -> tuple[CanaryReport, ...]:
        if self._is_first and self._fault is None:
            raise self._failed_check()
        return super().check()


def test_failed_last_check_resumes_the_study(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that fails the check before the end resumes the study."""
    from ray import serve

    # Each trial actor takes seconds to start, once more after the check.
    monkeypatch.setattr("service.studies.preflight.result.CHUNKS_IN_FLIGHT_PER_REPLICA", 1)
    (tmp_path / "models").mkdir()
    study_file = write_small_study(tmp_path / "models", name="faults", rungs=[8, 24], max_trials=4)
    preflight = examine(load_study(study_file))
    store = Store(f"sqlite:///{tmp_path / 'study.db'}")
    document = preflight.study.canonical()
    study = store.create_job(
        kind="search", name="faults", document=document, accepted=preflight.resolved().to_json()
    ).id
    fake = partial(FirstFails, bank_fingerprint=preflight.models.family.fingerprint, directory=str(tmp_path))
    scorer = deploy_scorer(
        preflight.models.family,
        preflight.engine_options,
        name="fails-late",
        make_worker=fake,
        health_check_period_s=0.5,
    )
    writer = store.open_attempt(study)
    view: Any = SimpleNamespace(update=lambda _: None, note=lambda _: None)
    heartbeat = Heartbeat(writer, 0.0)
    place: Any = {"work_dir": tmp_path / "ray", "artifacts": ArtifactStore(store, tmp_path)}
    execute(store, writer, preflight, scorer, heartbeat=heartbeat, view=view, **place)
    serve.delete("fails-late")

    record = store.job(study)
    assert record.state is JobState.COMPLETE
    (fault,) = [event.payload for event in store.events(study, kinds=(EventKind.ENGINE_FAULT,))]
    (again,) = [event.payload for event in store.events(study, kinds=(EventKind.SCORED_AGAIN,))]
    assert fault["samples"] == again["samples"] > 0
    assert len({row.replica for row in store.evidence(study)}) == 2
    assert trial_list(store, study) == undisturbed(study_file, tmp_path / "alone", resolved=ResolvedStudy.of(record))
    store.close()


def test_gradients_free_their_gpu_before_verification(
    record: JobRecord, preflight: PreflightResult, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verification finds a GPU only if the gradients of the search no longer hold it."""
    order: list[str] = []
    proposer = SimpleNamespace(release=lambda: order.append("released"))
    monkeypatch.setattr("service.tune.proposing.ray_proposer.RayProposer", lambda **_: proposer)
    monkeypatch.setattr("service.tune.ray_tune.run_evaluations", lambda *_, **__: None)
    attempt = "service.jobs.search.attempt"
    monkeypatch.setattr(f"{attempt}.best_trial", lambda *_: SimpleNamespace(number=0, values={}))
    monkeypatch.setattr(f"{attempt}.values_ci95", lambda *_: {})
    monkeypatch.setattr(f"{attempt}.verify_trials", lambda *_, **__: order.append("verified"))
    monkeypatch.setattr(f"{attempt}._is_closed", lambda _, close: close() is None)
    store = Store(f"sqlite:///{directory / 'study.db'}")
    writer = store.open_attempt(record.id)
    view: Any = SimpleNamespace(update=lambda _: None, note=lambda _: None)
    place: Any = {"work_dir": directory / "ray", "artifacts": ArtifactStore(store, directory)}
    execute(store, writer, preflight, FakeScorer(), heartbeat=Heartbeat(writer, 0.0), view=view, **place)
    assert order == ["released", "verified"]
    store.close()


# Alignments.


@pytest.fixture
def aligned(directory: Path) -> PreflightResult:
    search_space = {"kind": "hm3", "alignment": "moments"}
    search = {"algorithm": "random", "max_trials": 4}
    file = directory / "search.jsonl"
    file.write_text(file.read_text() * (100 // len(file.read_text().splitlines()) + 1))
    document = sums_study(directory / "models", data_dir=directory)
    return examine(parse_study({**document, "search_space": search_space, "search": search}))


def test_alignments_are_stored(directory: Path, aligned: PreflightResult, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alignments are stored with the study, and recipes name them."""
    aligned = replace(aligned, machines=(EngineMachines(8, None, 80 * GB), EngineMachines(1, None, 24 * GB)))
    store = Store(f"sqlite:///{directory / 'aligned.db'}")
    study = store.create_job(
        kind="search", name="a", document=aligned.study.canonical(), accepted=aligned.resolved().to_json()
    ).id
    asked: list[Any] = []

    def learned(
        place: Path, inputs: AlignmentInputs, pairs: Any, *, before: Any, gpu_bytes: int | None, note: Any
    ) -> dict[LayerPair, str]:
        assert gpu_bytes == 24 * GB, "of the smallest GPU"
        asked.append((place, inputs.kind, {*inputs.pool}, dict(before)))
        time.sleep(0.02)
        if len(asked) == 3:
            raise StudyFailed("1 of 20 alignments were lost")
        return {pair: str(number) for number, pair in enumerate(pairs)}

    monkeypatch.setattr("service.tune.proposing.alignments.alignments_in", learned)
    artifacts = ArtifactStore(store, directory / "artifacts")
    place: Any = {"directory": directory / "kept", "artifacts": artifacts, "note": lambda _: None}
    costs: list[float] = []
    for attempt in range(2):
        found = with_alignments(aligned, store, store.open_attempt(study), **place)
        assert isinstance(found.space, AlignedSpace)
        names = stored_alignments(store, study)
        assert names == {pair: str(number) for number, pair in enumerate(found.space.pairs)}
        assert found.models.family.alignments_dir == str(directory / "kept")
        assert asked[attempt] == (directory / "kept", "moments", {"math", "text"}, names if attempt else {})
        costs.append(read_alignment_cost(store.document(study, ALIGNMENT_COST)).seconds)
        rng = np.random.default_rng(0)
        drawn = [found.space.to_recipe(found.space.parameters.sample(rng)) for _ in range(20)]
        named = {layer.alignment for recipe in drawn for layer in recipe.layers} - {None}
        assert named
        assert named <= {*names.values()}
    assert 0.02 <= costs[0] <= costs[1] - 0.02, "the seconds of all attempts"
    with pytest.raises(StudyFailed, match="were lost"):
        with_alignments(aligned, store, store.open_attempt(study), **place)
    assert store.job(study).state is JobState.FAILED
    store.close()


def test_alignments_reach_every_machine(
    directory: Path, aligned: PreflightResult, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alignments in an object store are read by engines, and kept by later drivers, that have no directory of them."""
    store = Store(f"sqlite:///{tmp_path / 'aligned.db'}")
    study = store.create_job(
        kind="search", name="a", document=aligned.study.canonical(), accepted=aligned.resolved().to_json()
    ).id
    alignment = random_alignment("moments", 16, seed=1)
    found_before = []

    def learned(place: Path, inputs: Any, pairs: Any, *, before: Any, **_: Any) -> dict[LayerPair, str]:
        found_before.append({name: is_stored(place, name) for name in before.values()})
        name = write_alignment(place, alignment)
        return dict.fromkeys(pairs, name)

    monkeypatch.setattr("service.tune.proposing.alignments.alignments_in", learned)
    artifacts = ArtifactStore(store, f"{s3.bucket()}/x")
    for machine in ("one", "two"):
        place = tmp_path / machine
        found = with_alignments(
            aligned, store, store.open_attempt(study), directory=place, artifacts=artifacts, note=lambda _: None
        )
    (name,) = {*stored_alignments(store, study).values()}
    assert found_before == [{}, {name: True}]
    assert found.models.family.alignments_dir == artifacts.remote
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    for is_reachable in (True, False):
        with failing(s3, lambda *_, fails=not is_reachable: (401, "Gone") if fails else None):
            read = read_alignment(found.models.family.alignments_dir, name, layer=1, hidden_size=16)
        assert all(torch.equal(read.tensors()[key], tensor) for key, tensor in alignment.tensors().items())
    with pytest.raises(InvalidRecipe, match=r"layer 1: alignment '0000.*cannot be read"):
        read_alignment(found.models.family.alignments_dir, "0" * 64, layer=1, hidden_size=16)
    store.close()


def test_a_space_without_alignments_is_left_as_it_is(record: JobRecord, preflight: PreflightResult) -> None:
    store: Any = None  # nothing is read or written
    assert with_alignments(preflight, store, store, directory=Path(), artifacts=store, note=print) is preflight


@pytest.mark.parametrize(
    ("algorithm", "max_trials", "expected"),
    [
        ("gradient", 9, 48),  # a descent of 48 steps with 4 points, and points that need no gradients
        ("gradient", 2, 24),
        ("hm3", 64, 3),  # iterations of 16 episodes; none learns from the last
        ("hm3", 65, 4),
        ("random", 64, 0),
    ],
)
def test_planned_steps_are_those_of_the_searcher(algorithm: str, max_trials: int, expected: int) -> None:
    """They are those of the search and, with every searcher, those of the refinement of the front."""
    options = Search(
        max_trials=max_trials, gradient=GradientOptions(steps=48, points=4), hm3=PolicyOptions(episodes=16)
    )
    assert _planned_steps(algorithm, SearchSetting(objectives=("a", "b"), options=options)) == (expected, 0)
    refined = options.model_copy(update={"refinement": RefinementOptions(paths=3, steps=10)})
    assert _planned_steps(algorithm, SearchSetting(objectives=("a", "b"), options=refined)) == (expected, 30)


@pytest.mark.parametrize("stage", ["searching", "refining", "held-out"])
def test_steps_of_a_refinement_are_planned_after_the_search(preflight: PreflightResult, stage: str) -> None:
    """During the search they have no speed, so a time left with them would be that of other steps, or none."""
    coordinator: Any = SimpleNamespace(
        trials=(),
        table=SimpleNamespace(position=lambda: None),
        stage=stage,
        num_samples_scored=0,
        num_samples_used=0,
        num_steps=2,
    )
    assert _Snapshots(coordinator, preflight, 100, (7, 30)).now().steps_planned == (7 if stage == "searching" else 37)


def test_slow_snapshots_of_progress_are_rare(preflight: PreflightResult, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tune's loop takes the snapshots, which take seconds in a study of very many trials."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("service.jobs.search.attempt.time", SimpleNamespace(monotonic=lambda: clock.now))

    class OfManyTrials(SimpleNamespace):
        @property
        def trials(self) -> tuple[()]:
            clock.now += self.takes_s
            return ()

    coordinator: Any = OfManyTrials(
        takes_s=0.0,
        table=SimpleNamespace(position=lambda: None),
        stage="searching",
        num_samples_scored=0,
        num_samples_used=0,
        num_steps=0,
    )
    snapshots = _Snapshots(coordinator, preflight, 100, (0, 0))

    def taken_in(seconds: float) -> int:
        end, count = clock.now + seconds, 0
        while clock.now < end:
            count += snapshots.due() is not None
            clock.now += 0.125
        return count

    assert taken_in(10.0) == 40
    coordinator.takes_s = 2.0
    assert taken_in(60.0) == 3


def test_requested_trials_are_no_baselines(tmp_path: Path) -> None:
    """The numbers of proposals begin after the baselines, so a later driver must count the same ones."""
    store = Store(f"sqlite:///{tmp_path / 'study.db'}")
    job = store.create_job(kind="search", name="s", document={}, accepted={})
    writer = store.open_attempt(job.id)
    trials = [trial for trial in run_record().trials if isinstance(trial, TrialRecord) and trial.origin.is_given]
    for trial in trials:
        writer.add_trial(trial)
    SteeringStore(store).request_evaluation(job, 0, steering=Steering("evaluate"))
    requested = replace(trials[0], number=len(trials), origin=Origin.USER)
    writer.add_trial(requested, request=0)
    writer.open_bracket(BracketRecord(0, 0, 1))
    preflight: Any = SimpleNamespace(baselines=lambda: ())
    assert len(_baselines(store, job.id, preflight)) == len(trials)
    store.close()
