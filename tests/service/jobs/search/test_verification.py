"""Verification in an attempt with a real store and real results, but a fake scorer.

The search itself runs without Ray.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from search_spaces.recipe import Recipe
from search_spaces.study.file import load_study
from service.errors import StudyFailed
from service.jobs.heartbeat import Heartbeat
from service.jobs.search.attempt import execute
from service.results.load import run_record
from service.results.selection import best_trial
from service.results.summary import summary
from service.store import Store, schema
from service.store.artifacts import ArtifactStore
from service.studies.preflight.examine import examine
from service.studies.preflight.result import PreflightResult
from service.types import JobState
from tests.end_to_end.studies import DIS, LFS, write_small_study
from tests.service.tune.harness import InlineProposer, drive
from workers.errors import InvalidTask, MetricFailed
from workers.serving.fake import FakeScorer
from workers.types import SampleResult, Span, VerificationReport

NUM_VERIFIED = 3  # trials, by default


@dataclass
class Verifier(FakeScorer):
    """A fake scorer that records the recipes which it verifies.

    The scorer reports one differing sample for recipes in `disagreeing`. `cannot_verify` is a reason to compare
    nothing, `fails_with` an error to raise.
    """

    disagreeing: set[str] = field(default_factory=set)
    cannot_verify: str | None = None
    verified: list[str] = field(default_factory=list)
    fails_with: Exception | None = None

    def verify(self, recipe: Recipe, samples: tuple[SampleResult, ...], spans: tuple[Span, ...]) -> VerificationReport:
        if self.cannot_verify:
            return VerificationReport(recipe.digest, 0, 0, 0.0, 1e-3, (), 0, reason=self.cannot_verify)
        if self.fails_with is not None:
            raise self.fails_with
        self.verified.append(recipe.digest)
        if recipe.digest in self.disagreeing:
            samples = (replace(samples[0], value=1 - samples[0].value), *samples[1:])
        return super().verify(recipe, samples, spans)


class Study:
    """A study in a database, and attempts at it."""

    def __init__(self, preflight: PreflightResult, directory: Path) -> None:
        self.preflight = preflight
        self.directory = directory
        self.store = Store(f"sqlite:///{directory / 'study.db'}")
        document = preflight.study.canonical()
        self.id = self.store.create_job(
            kind="search", name="test", document=document, accepted=preflight.resolved().to_json()
        ).id

    def attempt(self, scorer: FakeScorer, *, max_trials: int | None = None, max_samples: int | None = None) -> JobState:
        """Run one more attempt, and return the study's state."""
        preflight = self.preflight
        if max_trials is not None:
            search = preflight.study.search.model_copy(update={"max_trials": max_trials})
            preflight = replace(preflight, study=preflight.study.model_copy(update={"search": search}))
        limits = preflight.study.limits.model_copy(update={"max_samples": max_samples})
        preflight = replace(preflight, study=preflight.study.model_copy(update={"limits": limits}))
        writer = self.store.open_attempt(self.id)
        view: Any = SimpleNamespace(update=lambda _: None, note=lambda _: None)
        with contextlib.suppress(StudyFailed):
            heartbeat = Heartbeat(writer, 0.0)
            place: Any = {"work_dir": self.directory, "artifacts": ArtifactStore(self.store, self.directory)}
            execute(self.store, writer, preflight, scorer, heartbeat=heartbeat, view=view, **place)
        return self.store.job(self.id).state

    @property
    def verification(self) -> Any:
        return summary(run_record(self.store, self.id))["verification"]

    @property
    def best(self) -> str:
        """The digest of the best trial's recipe."""
        best = best_trial(self.store.trials(self.id), self.preflight.tasks.objectives)
        assert best is not None
        return best.recipe.digest


@pytest.fixture(scope="module", params=[LFS, DIS], ids=["lfs", "dis"])
def preflight(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> PreflightResult:
    directory = tmp_path_factory.mktemp("small")
    file = write_small_study(directory, name="small", rungs=[12, 40, 120], max_trials=6, space=request.param)
    return examine(load_study(file))


@pytest.fixture
def study(preflight: PreflightResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Study]:
    def proposer(*, seed: int, **_: Any) -> InlineProposer:
        return InlineProposer(preflight.space, seed=seed)

    def run(coordinator: Any, scorer: Any, *, concurrency: int, **_: Any) -> None:
        drive(coordinator, scorer, concurrency=concurrency)

    inline = SimpleNamespace(RayProposer=proposer, run_evaluations=run)
    for module in ("service.tune.ray_tune", "service.tune.proposing.ray_proposer"):
        monkeypatch.setitem(sys.modules, module, inline)
    study = Study(preflight, tmp_path)
    yield study
    study.store.close()


@pytest.fixture
def scorer(preflight: PreflightResult) -> Verifier:
    return Verifier(bank_fingerprint=preflight.models.family.fingerprint)


def test_failing_metric_fails_the_study(study: Study, scorer: Verifier) -> None:
    """A metric that fails on transformers' answers fails the study."""
    scorer.fails_with = MetricFailed("task sums, metric exact_match: no number")
    assert study.attempt(scorer) is JobState.FAILED
    reason = str(study.store.job(study.id).reason)
    assert re.fullmatch(r"verification: transformers cannot score trial \d+: task sums, metric .*: no number", reason)
    scorer.fails_with = None
    assert study.attempt(scorer) is JobState.COMPLETE


def test_larger_limit_of_samples_continues(study: Study, scorer: Verifier) -> None:
    """A study that its limit of samples ended is COMPLETE with that reason; a larger limit continues it."""
    preflight = study.preflight
    full = sum(preflight.budget.rung_samples[-1].values())
    limit = preflight.within_limit(preflight.expected_samples().search) - full
    assert study.attempt(scorer, max_samples=limit) is JobState.COMPLETE
    ended = study.store.job(study.id)
    before = summary(run_record(study.store, study.id))
    used = before["samples"]["used"]
    assert used <= limit
    assert str(ended.reason).startswith(f"limits.max_samples: {used:,} of {limit:,} samples are used")
    assert ended.progress is not None
    assert (ended.progress["samples_used"], ended.progress["max_samples"]) == (used, limit)
    assert (ended.progress["steps"], ended.progress["steps_planned"]) == (0, 0)
    assert before["verification"]["status"] == "equal"
    assert study.attempt(scorer) is JobState.COMPLETE
    assert study.store.job(study.id).reason is None
    after = summary(run_record(study.store, study.id))
    assert sum(after["trials"].values()) > sum(before["trials"].values())
    assert after["samples"]["used"] > used


def test_refused_task_fails_the_study(study: Study, scorer: Verifier) -> None:
    """A task that engines refuse fails the study with their reason."""

    def refuse(_: Any) -> Any:
        raise InvalidTask("the chat template refuses these messages")

    scorer.score = refuse  # type: ignore[method-assign, assignment]
    assert study.attempt(scorer) is JobState.FAILED
    assert study.store.job(study.id).reason == "the chat template refuses these messages"


def test_the_best_trial_and_some_others_are_verified_once(study: Study, scorer: Verifier) -> None:
    assert study.attempt(scorer) is JobState.COMPLETE
    assert scorer.verified[0] == study.best
    assert len(set(scorer.verified)) == NUM_VERIFIED
    found = study.verification
    assert (found["status"], found["trials"], found["samples"]) == ("equal", NUM_VERIFIED, 16 * NUM_VERIFIED)
    assert study.attempt(scorer) is JobState.COMPLETE
    assert len(scorer.verified) == NUM_VERIFIED
    assert study.verification == found


def test_failed_verification_is_repeated(study: Study, scorer: Verifier) -> None:
    """A study that failed verification verifies again and fails again."""
    study.attempt(scorer)
    wrong = scorer.verified[1]  # not the best trial
    scorer.disagreeing.add(wrong)
    other = Study(study.preflight, study.directory)
    for number in (1, 2, 3):
        assert other.attempt(scorer) is JobState.FAILED
        assert scorer.verified.count(wrong) == 1 + number
        reason = other.store.job(other.id).reason or ""
        assert "1 of 16 samples differ between the engine and transformers beyond a tolerance of 0.001" in reason
        assert other.verification["status"] == "disagreement"
    other.store.close()


def test_differing_trial_is_verified_again(study: Study, scorer: Verifier) -> None:
    """A trial that differed is verified again when others are drawn."""
    study.attempt(scorer)
    other = Study(study.preflight, study.directory)
    scorer.disagreeing.add(scorer.verified[NUM_VERIFIED - 1])
    assert other.attempt(scorer) is JobState.FAILED
    for max_trials in (9, 12, 15):
        assert other.attempt(scorer, max_trials=max_trials) is JobState.FAILED
    other.store.close()


def test_a_new_best_trial_is_verified(study: Study, scorer: Verifier) -> None:
    scorer.seed = 2  # by which one of the next trials is better
    study.attempt(scorer)
    first = study.best
    max_trials = 6
    while study.best == first:
        max_trials += 6
        assert max_trials <= 200, "no better trial"
        assert study.attempt(scorer, max_trials=max_trials) is JobState.COMPLETE
    assert study.best in scorer.verified
    scorer.disagreeing.add(study.best)
    assert study.attempt(scorer) is JobState.COMPLETE, "it was equal, and nothing has changed since"


def test_samples_that_changed_since_are_verified_again(study: Study, scorer: Verifier) -> None:
    study.attempt(scorer)
    table = schema.sample_texts
    where = (table.c.recipe_digest == scorer.verified[1]) & (table.c.split == "search") & (table.c.start == 0)
    with study.store.engine.begin() as connection:
        for objective, packed in connection.execute(sa.select(table.c.objective, table.c.packed).where(where)).all():
            rows = json.loads(zlib.decompress(packed))
            rows[3][0] = "garbage"
            changed = zlib.compress(json.dumps(rows).encode())
            connection.execute(sa.update(table).where(where & (table.c.objective == objective)).values(packed=changed))
    assert study.attempt(scorer) is JobState.FAILED
    assert scorer.verified[NUM_VERIFIED:] == [scorer.verified[1]]


def test_reports_that_do_not_say_what_they_are_on_do_not_count(study: Study, scorer: Verifier) -> None:
    """Those of earlier versions, which compared values only."""
    study.attempt(scorer)
    document = study.store.document(study.id, "verification")
    assert document is not None
    new = ("samples", "num_tokens", "num_logprobs", "num_without_tokens", "reason")
    old = [{name: value for name, value in report.items() if name not in new} for report in document["reports"]]
    study.store.open_attempt(study.id).set_document_named("verification", {"reports": old})
    assert study.verification["status"] == "equal"
    assert study.attempt(scorer) is JobState.COMPLETE
    assert scorer.verified[NUM_VERIFIED:] == scorer.verified[:NUM_VERIFIED]


def test_a_verification_of_nothing_is_none_and_is_tried_again(study: Study, scorer: Verifier) -> None:
    reason = "there is no memory for it"
    scorer.cannot_verify = reason
    assert study.attempt(scorer) is JobState.COMPLETE
    found = study.verification
    assert (found["status"], found["reason"], found["trials"]) == ("not verified", reason, 0)
    assert found["trials_not_verified"] == NUM_VERIFIED
    assert study.store.job(study.id).reason == f"not verified: {reason}"
    scorer.cannot_verify = None
    assert study.attempt(scorer) is JobState.COMPLETE
    assert (study.verification["status"], study.verification["trials"]) == ("equal", NUM_VERIFIED)
    assert study.store.job(study.id).reason is None


def test_a_study_whose_stored_answers_are_garbage_fails(study: Study, scorer: Verifier) -> None:
    scorer.garbles = True
    assert study.attempt(scorer) is JobState.FAILED
    found = study.verification
    assert (found["status"], found["samples"], found["beyond_tolerance"]) == ("disagreement", 16, 16)
    assert {difference["what"] for difference in found["differences"]} == {"tokens"}


def test_verification_that_is_switched_off_says_so(study: Study, scorer: Verifier) -> None:
    engine = study.preflight.study.engine.model_copy(update={"verify": False})
    study.preflight = replace(study.preflight, study=study.preflight.study.model_copy(update={"engine": engine}))
    for _ in range(2):
        assert study.attempt(scorer) is JobState.COMPLETE
        assert scorer.verified == []
        found = study.verification
        assert (found["status"], found["reason"]) == ("not verified", "switched off in the study file")
        assert study.store.job(study.id).reason is None
