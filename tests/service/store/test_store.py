"""Guarantees of the store: one writer, whole transactions, repeated writes without effect, undisturbed readers."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source
from service.errors import Conflict, NotFound, StaleAttempt
from service.resolved_study import ResolvedStudy
from service.store import BracketRecord, JobWriter, JudgmentRecord, SampleText, Store, schema
from service.store.documents import ENDPOINT
from service.store.exports import ExportStore
from service.store.samples import _unpack_texts as unpack
from service.store.steering import SteeringStore
from service.store.steps import LossesRequest, LossesResult, LossesStep
from service.types import (
    Account,
    EventKind,
    ExportRecord,
    ExportState,
    JobState,
    Origin,
    RungRecord,
    TrialRecord,
    TrialState,
)
from tests.service.resolved import resolved_study
from tests.service.stored_values import stored_values
from workers.types import Evidence, SampleResult, ScoreResult, Split

MERGE = Merge("linear", (Source("base"), Source("math")), {"weight": (0.25, 0.75)})
PART = Merge("passthrough", (Source("math", 0),))
LAYER = LayerRecipe(PART, PART, PART)
RECIPE = Recipe({"base": "b0", "math": "m1"}, "base", (LAYER,), embedding=MERGE, head=MERGE)
TRIAL = TrialRecord(
    3, Origin.SEARCH, "trial:3", TrialState.WAITING, RECIPE, bracket=1, configuration={"g0.method": "linear"}
)
RESOLVED = resolved_study(commits={"owner/math": "c0ffee"})
RUNG = RungRecord(0, {"math": 4}, {"math": 0.5}, {"math": 0.25})


@pytest.fixture
def url(database: str) -> str:
    return database


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    store = Store(url)
    yield store
    store.close()


# The last event of what the fixture `writer` does: "created" and "attempt".
BEGINNING = 2


@pytest.fixture
def writer(store: Store) -> JobWriter:
    return store.open_attempt(
        store.create_job(kind="search", name="test", document={"seed": 1}, accepted=RESOLVED.to_json()).id
    )


def chunk(positions: range, *, value: float = 1.0, objective: str = "math", recipe: Recipe = RECIPE) -> ScoreResult:
    samples = tuple(SampleResult(objective, i, f"doc{i}", value, f"says {i}", i % 2 == 0) for i in positions)
    evidence = Evidence(recipe.digest, "bank", {f"search {objective}": "p"}, "sum", "replica-1", 7, "vllm 0")
    return ScoreResult(samples, evidence, {"score": 0.5, "swap": 0.25})


# Studies.


def test_another_store_finds_the_study(store: Store, url: str) -> None:
    """Another store on the same database finds the study."""
    created = store.create_job(
        kind="search", name="test", document={"seed": 1, "models": {"a": "b"}}, accepted=RESOLVED.to_json()
    )
    other = Store(url)
    assert other.job(created.id) == created
    assert created.state is JobState.CREATED
    other.close()


def test_studies_come_oldest_first(store: Store) -> None:
    created = [
        store.create_job(kind="search", name=name, document={}, accepted=RESOLVED.to_json()) for name in ("c", "a", "b")
    ]
    assert store.jobs() == tuple(created)


def test_jobs_come_in_pages(store: Store) -> None:
    """A page is a part of the jobs that satisfy the conditions, and comes with their number."""
    made = [
        store.create_job(kind="search", name=name, document={}, accepted={}, owner=owner)
        for name, owner in (("Math", "ann"), ("code", None), ("math-2", "bob"), ("text_100%", None))
    ]
    ids = {job.id: job.name for job in made}

    def names(**conditions: Any) -> tuple[list[str], int]:
        page, total = store.job_page("search", **conditions)
        return [ids[job.id] for job in page], total

    assert names() == (["Math", "code", "math-2", "text_100%"], 4)
    assert names(sort="-created", limit=2) == (["text_100%", "math-2"], 4)
    assert names(sort="-created", limit=2, offset=3) == (["Math"], 4)
    assert names(sort="name") == (["Math", "code", "math-2", "text_100%"], 4)
    assert names(sort="-owner", limit=2) == (["math-2", "Math"], 4)
    assert names(text="MATH") == (["Math", "math-2"], 2)
    assert names(text="ANN") == (["Math"], 1)
    assert names(text="_100%") == (["text_100%"], 1)
    assert names(text="_") == (["text_100%"], 1), "no pattern"
    assert names(text="\0\ud800") == ([], 0)
    assert names(text=made[1].id[:12].upper()) == (["code"], 1)
    assert names(state=JobState.RUNNING) == ([], 0)
    assert store.job_page("finetune") == ((), 0)
    ann = Account("ann", is_admin=False, roles={})
    assert names(reader=ann, limit=1) == (["Math"], 1)


def test_an_unknown_study_is_not_found(store: Store) -> None:
    for call in (store.job, store.open_attempt):
        with pytest.raises(
            NotFound, match=r"job 'nope': no such job in (sqlite:///.*mergesearch\.db|postgresql.*:\*\*\*@/test_.*)"
        ):
            call("nope")


def test_resolved_study_stays(store: Store, writer: JobWriter) -> None:
    """State, reason, time and document change; the resolved study stays."""
    writer.set_state(JobState.STOPPED, "interrupted")
    writer.heartbeat(wall_clock_s=12.5)
    writer.set_document({"seed": 2})
    record = store.job(writer.job_id)
    assert (record.state, record.reason, record.wall_clock_s) == (JobState.STOPPED, "interrupted", 12.5)
    assert (record.document, ResolvedStudy.of(record)) == ({"seed": 2}, RESOLVED)


def test_a_database_of_another_schema_version_is_refused(store: Store, url: str) -> None:
    store.close()
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.update(schema.schema_version).values(version=schema.SCHEMA_VERSION + 1))
    with pytest.raises(
        Conflict, match=rf"schema version {schema.SCHEMA_VERSION + 1}, this program reads {schema.SCHEMA_VERSION}; use"
    ):
        Store(url)
    engine.dispose()


# Trials.


def test_a_trial_comes_back_as_it_was_written(store: Store, writer: JobWriter) -> None:
    plain = TrialRecord(0, Origin.SOURCE, "base", TrialState.FAIL, RECIPE, reason="NaN logits")
    writer.add_trial(plain)
    writer.add_trial(TRIAL)
    assert store.trials(writer.job_id) == (plain, TRIAL)


def test_trials_and_rungs_are_ordered(store: Store, writer: JobWriter) -> None:
    """Trials come in the order of their numbers, with their rungs in order."""
    for number in (12, 3, 7):
        writer.add_trial(replace(TRIAL, number=number))
    for rung in (1, 0, 2):
        writer.finish_rung(7, replace(RUNG, rung=rung), samples_reused=rung)
    trials = store.trials(writer.job_id)
    assert [trial.number for trial in trials] == [3, 7, 12]
    assert [rung.rung for rung in trials[1].rungs] == [0, 1, 2]


def test_a_trial_number_is_never_used_twice(store: Store, writer: JobWriter) -> None:
    writer.add_trial(TRIAL)
    with pytest.raises(sa.exc.IntegrityError):
        writer.add_trial(replace(TRIAL, label="another"))
    assert [trial.label for trial in store.trials(writer.job_id)] == ["trial:3"]
    assert [event.kind for event in store.events(writer.job_id)] == ["created", "attempt", "trial"]


def test_studies_of_one_database_do_not_mix(store: Store, writer: JobWriter) -> None:
    other = store.open_attempt(
        store.create_job(kind="search", name="other", document={}, accepted=RESOLVED.to_json()).id
    )
    for each, value in ((writer, 1.0), (other, 0.0)):
        each.add_trial(TRIAL)
        each.record_chunk(3, Split.SEARCH, chunk(range(2), value=value))
        each.open_bracket(BracketRecord(0, 0, 9))
        each.set_document_named("engine", [value])
    writer.finish_trials([3], TrialState.FAIL, "broken")
    writer.resize_bracket(0, 1)
    assert store.trials(other.job_id)[0].state is TrialState.RUNNING
    assert stored_values(store, other.job_id, Split.SEARCH) == {RECIPE.digest: {"math": {0: 0.0, 1: 0.0}}}
    assert store.brackets(other.job_id) == (BracketRecord(0, 0, 9),)
    assert store.document(other.job_id, "engine") == [0.0]
    assert len(store.evidence(other.job_id)) == 1


def test_values_are_of_the_last_rung(store: Store, writer: JobWriter) -> None:
    """Values are those of the last rung, and of complete trials only."""
    full = RungRecord(1, {"math": 8}, {"math": 0.75}, {"math": 0.125})
    for number in (3, 4):
        writer.add_trial(replace(TRIAL, number=number))
        writer.finish_rung(number, RUNG, samples_reused=0)
    writer.finish_rung(3, full, samples_reused=4, state=TrialState.COMPLETE)
    writer.finish_trials([4], TrialState.PRUNED)
    complete, pruned = store.trials(writer.job_id)
    assert (complete.values, complete.standard_errors) == ({"math": 0.75}, {"math": 0.125})
    assert complete.rungs == (RUNG, full)
    assert (pruned.state, pruned.values, pruned.rungs) == (TrialState.PRUNED, {}, (RUNG,))


def test_trials_end_with_their_reason_and_others_stay(store: Store, writer: JobWriter) -> None:
    for number in (0, 1, 2):
        writer.add_trial(replace(TRIAL, number=number))
    writer.finish_trials([0, 2], TrialState.FAIL, "NaN logits")
    assert [(trial.state, trial.reason) for trial in store.trials(writer.job_id)] == [
        (TrialState.FAIL, "NaN logits"),
        (TrialState.WAITING, None),
        (TrialState.FAIL, "NaN logits"),
    ]


# Chunks, rungs and brackets.


def test_a_chunk_stores_its_samples_its_evidence_and_its_cost(store: Store, writer: JobWriter) -> None:
    writer.add_trial(TRIAL)
    first, second = chunk(range(3)), chunk(range(3, 5), value=0.0)
    writer.record_chunk(3, Split.SEARCH, first)
    writer.record_chunk(3, Split.SEARCH, second)
    assert store.samples(writer.job_id, RECIPE.digest, Split.SEARCH) == first.samples + second.samples
    assert stored_values(store, writer.job_id, Split.SEARCH)[RECIPE.digest]["math"] == {0: 1, 1: 1, 2: 1, 3: 0, 4: 0}
    (trial,) = store.trials(writer.job_id)
    assert (trial.state, trial.samples_scored) == (TrialState.RUNNING, 5)
    assert trial.timings_s == {"score": 1.0, "swap": 0.5}
    evidence = store.evidence(writer.job_id)
    assert [(row.num_samples, row.recipe_digest, row.trial) for row in evidence] == [
        (3, RECIPE.digest, 3),
        (2, RECIPE.digest, 3),
    ]
    assert evidence[0].is_of(Split.SEARCH)
    assert not evidence[0].is_of(Split.HOLDOUT)
    stated = {field.name for field in fields(Evidence)}
    assert all(getattr(evidence[0], name) == getattr(first.evidence, name) for name in stated)


def test_a_sample_keeps_the_tokens_of_its_completions(store: Store, writer: JobWriter) -> None:
    writer.add_trial(TRIAL)
    tokens = (((5, 128_000, 2),), ((), (7,)), None)
    scored = chunk(range(3))
    samples = tuple(replace(sample, tokens=each) for sample, each in zip(scored.samples, tokens, strict=True))
    writer.record_chunk(3, Split.SEARCH, replace(scored, samples=samples))
    assert store.samples(writer.job_id, RECIPE.digest, Split.SEARCH) == samples


def test_samples_of_an_objective_are_read_alone(store: Store, writer: JobWriter) -> None:
    """Samples can be read of one objective, and of some positions."""
    writer.add_trial(TRIAL)
    for positions, objective in ((range(4), "math"), (range(4, 8), "math"), (range(4), "text")):
        writer.record_chunk(3, Split.SEARCH, chunk(positions, objective=objective))
    digest = RECIPE.digest
    every = store.samples(writer.job_id, digest, Split.SEARCH)
    assert len(every) == 12
    read = partial(store.samples, writer.job_id, digest, Split.SEARCH)
    assert read(objective="text") == tuple(sample for sample in every if sample.objective == "text")
    found = [sample.position for sample in read(objective="math", positions={3, 5})]
    assert found == [3, 5]
    assert read(objective="math", positions={8, 9}) == ()
    old = {"study": writer.job_id, "recipe_digest": digest, "split": "search", "objective": "math", "position": 9}
    values = {"document": "d", "value": 0.5, "response": "x", "is_truncated": False, "evidence": 1, "tokens": None}
    with store.engine.begin() as connection:
        connection.execute(sa.insert(schema.samples).values(**old, **values))
    assert [sample.position for sample in read(objective="math", positions={5, 7, 9})] == [5, 7, 9]
    assert [sample.position for sample in read(objective="math", positions={5, 7})] == [5, 7]
    assert read(objective="text") == tuple(sample for sample in every if sample.objective == "text")
    assert [sample.position for sample in read(positions={0, 9})] == [0, 9, 0]


def test_a_driver_moves_samples_of_earlier_versions(store: Store, writer: JobWriter) -> None:
    """A chunk of a recipe moves the samples that an earlier version stored of it, and stores only the others."""
    writer.add_trial(TRIAL)
    names = {"study": writer.job_id, "recipe_digest": RECIPE.digest, "split": "search", "objective": "math"}
    values = {"document": "d", "value": 0.25, "response": "x", "is_truncated": False, "evidence": 1, "tokens": None}
    with store.engine.begin() as connection:
        for position in range(2):
            connection.execute(sa.insert(schema.samples).values(**names, **values, position=position))
    later = store.open_attempt(writer.job_id)
    later.record_chunk(3, Split.SEARCH, chunk(range(4)))
    with store.engine.begin() as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(schema.samples)).scalar() == 0
    found = store.samples(writer.job_id, RECIPE.digest, Split.SEARCH)
    assert [sample.position for sample in found] == [0, 1, 2, 3]
    assert [sample.value == 0.25 for sample in found] == [True, True, False, False]


def test_positions_far_apart_read_their_own_chunks(
    store: Store, writer: JobWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks between the positions are not unpacked; without tokens, only the number of completions is returned."""
    writer.add_trial(TRIAL)
    for start in range(0, 80, 8):
        scored = chunk(range(start, start + 8))
        samples = tuple(replace(sample, tokens=((1, 2), (3,))) for sample in scored.samples)
        writer.record_chunk(3, Split.SEARCH, replace(scored, samples=samples))
    unpacked = []
    monkeypatch.setattr(
        "service.store.samples._unpack_texts", lambda packed, count: unpacked.append(count) or unpack(packed, count)
    )
    read = partial(store.samples, writer.job_id, RECIPE.digest, Split.SEARCH, objective="math", positions={1, 3, 79})
    whole, without = read(), read(has_tokens=False)
    assert unpacked == [8] * 4
    assert [sample.position for sample in whole] == [1, 3, 79]
    assert {sample.tokens for sample in whole} == {((1, 2), (3,))}
    assert without == tuple(replace(sample, tokens=((), ())) for sample in whole)


def test_any_number_of_trials_is_read(store: Store, writer: JobWriter) -> None:
    """More trials can be named than a statement may have parameters; those that are not named are left out."""
    trials = [replace(TRIAL, number=number, configuration={"x": number}) for number in range(5)]
    for trial in trials:
        writer.add_trial(trial)
    named = set(range(300_000)) - {3}
    assert [trial.number for trial in store.trial_results(writer.job_id, named)] == [0, 1, 2, 4]
    assert store.configurations(writer.job_id, named) == {number: {"x": number} for number in (0, 1, 2, 4)}
    assert [trial.number for trial in store.trial_results(writer.job_id, {1, 3})] == [1, 3]


def test_work_of_replicas_is_read_since_a_time(store: Store, writer: JobWriter) -> None:
    writer.add_trial(TRIAL)
    for positions in (range(4), range(4, 6)):
        writer.record_chunk(3, Split.SEARCH, chunk(positions))
    rows = store.evidence(writer.job_id)
    work = store.chunk_work(writer.job_id)
    assert [(each.replica, each.num_samples, each.finished_at) for each in work] == [
        (row.replica, row.num_samples, row.finished_at) for row in rows
    ]
    assert work[0].timings_s == rows[0].timings_s
    assert store.chunk_work(writer.job_id, since=rows[0].finished_at) == work[1:]


def test_prompts_are_stored_once(store: Store, writer: JobWriter) -> None:
    """Texts with any characters come back by position; those that are stored stay."""
    texts = [SampleText(f"{n} \0\ud800?", None if n % 2 else str(n)) for n in range(120)]
    writer.add_prompts(Split.SEARCH, "math", texts)
    writer.add_prompts(Split.SEARCH, "math", [SampleText("other", None)])
    writer.add_prompts(Split.HOLDOUT, "text", texts[:1])
    assert store.stored_prompts(writer.job_id) == {(Split.SEARCH, "math"), (Split.HOLDOUT, "text")}
    found = store.prompts(writer.job_id, Split.SEARCH, "math", [0, 49, 50, 119, 120])
    assert found == {position: texts[position] for position in (0, 49, 50, 119)}
    assert store.prompts(writer.job_id, Split.SEARCH, "text", [0]) == {}
    writer.set_state(JobState.COMPLETE)
    store.delete_job(writer.job_id)
    assert store.prompts(writer.job_id, Split.SEARCH, "math", [0]) == {}


def test_pictures_are_stored_with_prompts(store: Store, writer: JobWriter) -> None:
    """Pictures come back by position, once and for the right data; they are removed with the study."""
    pictures = [b"\0picture %d" % n if n % 3 else None for n in range(70)]
    writer.add_prompts(Split.SEARCH, "pets", [SampleText("file", "cat", picture) for picture in pictures])
    writer.add_prompts(Split.SEARCH, "pets", [SampleText("file", "cat", b"another")])
    writer.add_prompts(Split.HOLDOUT, "pets", [SampleText("file", "cat", b"held out")])
    study = writer.job_id
    assert [store.picture(study, Split.SEARCH, "pets", n) for n in range(71)] == [*pictures, None]
    assert store.picture_positions(study, Split.SEARCH, "pets", {0, 1, 5, 60, 61, 99}) == {1, 5, 61}
    assert store.picture_positions(study, Split.SEARCH, "pets", set()) == set()
    assert store.picture(study, Split.HOLDOUT, "pets", 0) == b"held out"
    assert store.picture(study, Split.BENCHMARK, "pets", 0) is store.picture("other", Split.SEARCH, "pets", 1) is None
    assert store.prompts(study, Split.SEARCH, "pets", [1]) == {1: SampleText("file", "cat")}
    writer.set_state(JobState.COMPLETE)
    store.delete_job(study)
    assert store.picture(study, Split.SEARCH, "pets", 1) is None


def test_tokens_are_counted_where_all_samples_have_them(store: Store, writer: JobWriter) -> None:
    writer.add_trial(TRIAL)
    tokens = (((5, 128_000, 2),), ((), (7,)), ((),), ())
    first, second = chunk(range(4)), chunk(range(4, 5))
    samples = tuple(replace(sample, tokens=each) for sample, each in zip(first.samples, tokens, strict=True))
    writer.record_chunk(3, Split.SEARCH, replace(first, samples=samples))
    assert store.num_tokens(writer.job_id, Split.SEARCH) == {RECIPE.digest: 4}
    assert store.num_tokens(writer.job_id, Split.HOLDOUT) == {}
    writer.record_chunk(3, Split.SEARCH, second)
    assert store.num_tokens(writer.job_id, Split.SEARCH) == {}


def test_holdout_samples_are_kept_apart(store: Store, writer: JobWriter) -> None:
    """Held-out samples are stored apart and are not charged to the search."""
    writer.add_trial(replace(TRIAL, state=TrialState.COMPLETE))
    writer.record_chunk(3, Split.SEARCH, chunk(range(2), value=1.0))
    writer.record_chunk(3, Split.HOLDOUT, chunk(range(2), value=0.0))
    assert stored_values(store, writer.job_id, Split.HOLDOUT) == {RECIPE.digest: {"math": {0: 0.0, 1: 0.0}}}
    assert stored_values(store, writer.job_id, Split.SEARCH) == {RECIPE.digest: {"math": {0: 1.0, 1: 1.0}}}
    (trial,) = store.trials(writer.job_id)
    assert trial.samples_scored == 2
    assert trial.state is TrialState.COMPLETE  # a finished trial does not run again


def test_a_sample_stored_once_keeps_its_first_value(store: Store, writer: JobWriter) -> None:
    writer.add_trial(TRIAL)
    writer.record_chunk(3, Split.SEARCH, chunk(range(3), value=1.0))
    writer.record_chunk(3, Split.SEARCH, chunk(range(1, 5), value=0.0))
    values = stored_values(store, writer.job_id, Split.SEARCH)[RECIPE.digest]["math"]
    assert values == {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.0, 4: 0.0}


def test_a_chunk_written_again_counts_once(store: Store, writer: JobWriter) -> None:
    writer.add_trial(TRIAL)
    writer.record_chunk(3, Split.SEARCH, chunk(range(3)))
    before = everything(store, writer.job_id)
    writer.record_chunk(3, Split.SEARCH, chunk(range(3)))
    assert everything(store, writer.job_id) == before
    writer.record_chunk(3, Split.SEARCH, chunk(range(1, 5)))  # two of its samples are new
    (trial,) = store.trials(writer.job_id)
    assert trial.samples_scored == 5
    assert [row.num_samples for row in store.evidence(writer.job_id)] == [3, 2]


def test_events_and_values_of_some_kinds_and_recipes_are_those(store: Store, writer: JobWriter) -> None:
    writer.add_trial(TRIAL)
    writer.record_chunk(3, Split.SEARCH, chunk(range(2)))
    writer.add_event(EventKind.HOLDOUT_FAILED, {"trial": 3, "reason": "x"})
    (event,) = store.events(writer.job_id, kinds=(EventKind.HOLDOUT_FAILED,))
    assert event.payload == {"trial": 3, "reason": "x"}
    assert stored_values(store, writer.job_id, Split.SEARCH, recipes=()) == {}
    assert set(stored_values(store, writer.job_id, Split.SEARCH, recipes=("other", RECIPE.digest))) == {RECIPE.digest}


def losses_step(number: int, *, loss: float = 0.5) -> LossesStep:
    request = LossesRequest(label="trial 0", point=(0.5,), positions={"math": (0, 1)})
    return LossesStep(number, 3, request, LossesResult(losses={"math": loss}))


def test_steps_of_a_searcher_are_stored_once(store: Store, writer: JobWriter) -> None:
    assert store.steps(writer.job_id) == ()
    steps = (losses_step(0, loss=0.1), losses_step(1, loss=1 / 3))
    for step in (*steps, losses_step(0, loss=9.0)):
        writer.add_step(step)
    assert store.steps(writer.job_id) == steps


def test_samples_after_a_canary_are_void(store: Store, writer: JobWriter) -> None:
    """Samples that an engine scored after its last good canary are void."""
    writer.add_trial(TRIAL)

    def scored(positions: range, replica: str, canaries: int) -> ScoreResult:
        result = chunk(positions)
        return replace(result, evidence=replace(result.evidence, replica=replica, canaries=canaries))

    for positions, replica, canaries in ((range(2), "a", 1), (range(2, 4), "a", 2), (range(4, 7), "b", 2)):
        writer.record_chunk(3, Split.SEARCH, scored(positions, replica, canaries))
    assert store.num_unchecked(writer.job_id, {}) == 5
    assert store.num_unchecked(writer.job_id, {"a": 3, "b": 3}) == 0
    for _ in range(2):  # once for each replica
        writer.record_engine_fault("a", 2, "it failed")
    writer.record_engine_fault("of another study", 0, "it failed, too")
    assert [(fault.replica, fault.canaries) for fault in store.engine_faults()] == [("a", 2), ("of another study", 0)]
    assert store.engine_faults(after=store.engine_faults()[-1].id) == ()
    assert [(sample.position, sample.replica) for sample in store.void_samples(writer.job_id)] == [(2, "a"), (3, "a")]
    writer.record_chunk(3, Split.SEARCH, scored(range(2, 4), "b", 2), again={("math", 2), ("math", 3)})
    assert store.void_samples(writer.job_id) == ()
    assert len(store.samples(writer.job_id, RECIPE.digest, Split.SEARCH)) == 7
    assert store.trial(writer.job_id, 3).samples_scored == 7


def test_replaced_samples_leave_the_rest_of_their_chunk(store: Store, writer: JobWriter) -> None:
    """Samples in the middle of a chunk are replaced; the others keep value, text and evidence."""
    writer.add_trial(TRIAL)
    first = chunk(range(8))
    tokens = tuple(((number, 2),) for number in range(8))
    first = replace(first, samples=tuple(map(lambda s, t: replace(s, tokens=t), first.samples, tokens)))
    writer.record_chunk(3, Split.SEARCH, first)
    second = chunk(range(2, 4), value=0.25)
    second = replace(second, evidence=replace(second.evidence, replica="b", canaries=1))
    writer.record_chunk(3, Split.SEARCH, second, again={("math", 2), ("math", 3)})
    expected = (*first.samples[:2], *second.samples, *first.samples[4:])
    assert store.samples(writer.job_id, RECIPE.digest, Split.SEARCH) == expected
    writer.record_engine_fault("b", 1, "it failed")
    assert [(sample.position, sample.value) for sample in store.void_samples(writer.job_id)] == [(2, 0.25), (3, 0.25)]
    assert store.num_unchecked(writer.job_id, {"replica-1": 1}) == 2


def test_texts_are_deleted_without_their_values(store: Store, writer: JobWriter) -> None:
    """Values, documents and numbers of tokens stay; kept recipes keep their texts."""
    writer.add_trial(TRIAL)
    other = replace(chunk(range(3)), evidence=replace(chunk(range(3)).evidence, recipe_digest="other"))
    for result in (chunk(range(3)), other):
        samples = tuple(replace(sample, tokens=((1, 2),)) for sample in result.samples)
        writer.record_chunk(3, Split.SEARCH, replace(result, samples=samples))
    kept, before = store.samples(writer.job_id, "other", Split.SEARCH), store.num_tokens(writer.job_id, Split.SEARCH)
    writer.delete_texts(keep=("other",))
    found = store.samples(writer.job_id, RECIPE.digest, Split.SEARCH)
    assert found == tuple(replace(sample, response="") for sample in chunk(range(3)).samples)
    assert store.samples(writer.job_id, "other", Split.SEARCH) == kept
    assert store.num_tokens(writer.job_id, Split.SEARCH) == before
    first, second = store.evidence(writer.job_id)
    assert first.text_bytes == 0
    assert (second.text_bytes or 0) > 0


BYTES_PER_SAMPLE = 12
SIZES = {
    "sqlite": "SELECT sum(pgsize) FROM dbstat WHERE name IN "
    "(SELECT name FROM sqlite_master WHERE tbl_name IN ('sample_chunks', 'sample_documents'))",
    "postgresql": "SELECT pg_total_relation_size('sample_chunks') + pg_total_relation_size('sample_documents')",
}


@pytest.mark.parametrize("kind", ["right or wrong", "log-probability"])
def test_samples_take_few_bytes_on_disk(store: Store, writer: JobWriter, kind: str) -> None:
    """Values, documents and flags take at most 12 bytes a sample, tables' keys and pages included."""
    writer.add_trial(TRIAL)
    rng = np.random.default_rng(0)
    for number in range(20):
        for start in (0, 500):
            values = rng.normal(size=500) if kind == "log-probability" else rng.integers(2, size=500).astype(float)
            samples = tuple(
                SampleResult("math", position, f"document {position}", value, "an answer", bool(rng.integers(2)))
                for position, value in enumerate(values.tolist(), start=start)
            )
            evidence = Evidence(f"{number:064}", "bank", {"search math": "p"}, "sum", "replica-1", 7, "vllm 0")
            writer.record_chunk(3, Split.SEARCH, ScoreResult(samples, evidence, {}))
    with store.engine.connect() as connection:
        num_bytes = connection.execute(sa.text(SIZES[connection.dialect.name])).scalar_one()
    # PostgreSQL's tables take a few pages of 8 KB more, which count with only 20,000 samples.
    spare = 0 if connection.dialect.name == "sqlite" else 10 * 8192
    assert (num_bytes - spare) / 20_000 <= BYTES_PER_SAMPLE * (0.25 if kind == "right or wrong" else 1)
    stored = store.evidence(writer.job_id)
    assert all(row.sample_bytes and row.text_bytes for row in stored)
    assert sum(row.sample_bytes or 0 for row in stored) < num_bytes


def test_trials_of_the_same_recipe_share_its_samples(store: Store, writer: JobWriter) -> None:
    for number in (3, 4):
        writer.add_trial(replace(TRIAL, number=number))
        writer.record_chunk(number, Split.SEARCH, chunk(range(2)))
    assert len(store.samples(writer.job_id, RECIPE.digest, Split.SEARCH)) == 2


def test_samples_come_by_objective_and_position(store: Store, writer: JobWriter) -> None:
    writer.add_trial(TRIAL)
    for objective, positions in (("text", range(2)), ("math", range(2, 4)), ("math", range(2))):
        writer.record_chunk(3, Split.SEARCH, chunk(positions, objective=objective))
    found = store.samples(writer.job_id, RECIPE.digest, Split.SEARCH)
    assert [(sample.objective, sample.position) for sample in found] == [
        *(("math", position) for position in range(4)),
        *(("text", position) for position in range(2)),
    ]
    assert store.samples(writer.job_id, "other", Split.SEARCH) == ()


def test_a_rung_written_again_keeps_its_first_values(store: Store, writer: JobWriter) -> None:
    writer.add_trial(TRIAL)
    writer.finish_rung(3, RUNG, samples_reused=2)
    writer.finish_rung(3, replace(RUNG, values={"math": 0.9}), samples_reused=2)
    (trial,) = store.trials(writer.job_id)
    assert trial.rungs == (RUNG,)
    assert trial.samples_reused == 2


def test_a_bracket_opened_again_keeps_its_size_and_may_be_cut(store: Store, writer: JobWriter) -> None:
    writer.open_bracket(BracketRecord(1, 1, 5))
    writer.open_bracket(BracketRecord(0, 0, 9))
    writer.open_bracket(BracketRecord(0, 0, 3))
    assert store.brackets(writer.job_id) == (BracketRecord(0, 0, 9), BracketRecord(1, 1, 5))
    writer.resize_bracket(1, 2)
    assert store.brackets(writer.job_id)[1] == BracketRecord(1, 1, 2)


def test_a_named_document_is_replaced_and_absent_until_written(store: Store, writer: JobWriter) -> None:
    assert store.document(writer.job_id, "verification") is None
    writer.set_document_named("verification", {"reports": []})
    writer.set_document_named("verification", {"reports": [1]})
    assert store.document(writer.job_id, "verification") == {"reports": [1]}


def test_judgments_are_stored_once(store: Store, writer: JobWriter) -> None:
    """Judgments are found by benchmark and recipe; a stored one is kept."""
    judgments = [
        JudgmentRecord(name, digest, position, is_swapped, 0.5 if position else None, "m\u00e9", "p", "\ud83d [[tie]]")
        for name in ("chats", "mails")
        for digest in ("d1", "d2")
        for position in (0, 1)
        for is_swapped in (False, True)
    ]
    writer.add_judgments(reversed(judgments))
    writer.add_judgments([replace(judgments[0], preference=1.0, answer="other")])
    assert store.judgments(writer.job_id) == tuple(judgments)
    assert store.judgments(writer.job_id, benchmark="mails", recipe_digest="d2") == tuple(judgments[-4:])
    assert store.judgments(writer.job_id, recipe_digest="d1") == (*judgments[:4], *judgments[8:12])
    assert not store.judgments("another")


def test_prompt_templates_are_stored_once(store: Store, writer: JobWriter) -> None:
    """Templates of a study are found by the name of their samples; a name keeps its first template."""
    writer.add_prompt_templates("sst2", {"@a": "Clasify {{x}}\n", "@b": "\u00e9\ud83d {{x}}"})
    writer.add_prompt_templates("sst2", {"@a": "other", "@c": "{{x}}"})
    other = store.create_job(kind="search", name="other", document={}, accepted=RESOLVED.to_json()).id
    its_own = store.open_attempt(other)
    its_own.add_prompt_templates("cola", {"@a": "its own"})
    its_own.set_state(JobState.FAILED)
    assert store.prompt_templates(writer.job_id) == {
        "@a": ("sst2", "Clasify {{x}}\n"),
        "@b": ("sst2", "\u00e9\ud83d {{x}}"),
        "@c": ("sst2", "{{x}}"),
    }
    store.delete_job(other)
    assert not store.prompt_templates(other)


def test_values_of_chosen_objectives_are_read(store: Store, writer: JobWriter) -> None:
    """Only the samples of the named objectives are read, or all without names."""
    writer.add_trial(TRIAL)
    for name in ("math", "@a"):
        writer.record_chunk(3, Split.BENCHMARK, chunk(range(2), objective=name))
    read = [store.sample_values(writer.job_id, Split.BENCHMARK, objectives=names) for names in (("@a",), (), None)]
    assert [set(found.get(RECIPE.digest, {})) for found in read] == [{"@a"}, set(), {"math", "@a"}]


# Events.


def test_event_ids_grow(store: Store, writer: JobWriter) -> None:
    """Event ids grow over all studies, and a reader continues after the last that it saw."""
    other = store.open_attempt(
        store.create_job(kind="search", name="other", document={}, accepted=RESOLVED.to_json()).id
    )
    for number in range(3):
        writer.add_event("note", {"n": number})
        other.add_event("note", {"n": -number})
    events = store.events(writer.job_id, after=BEGINNING)
    assert [event.payload["n"] for event in events] == [0, 1, 2]
    ids = [event.id for event in events]
    assert ids == sorted(set(ids))
    assert set(ids).isdisjoint(event.id for event in store.events(other.job_id))
    assert [event.payload["n"] for event in store.events(writer.job_id, after=ids[0])] == [1, 2]
    assert store.events(writer.job_id, after=ids[-1]) == ()
    assert [event.id for event in store.events(writer.job_id, newest_first=True, offset=1, limit=1)] == [ids[1]]
    assert [event.id for event in store.events(writer.job_id, kinds=["note"], offset=1)] == ids[1:]
    assert store.num_events(writer.job_id, kinds=["note"]) == 3
    assert store.num_events(writer.job_id, kinds=["note"], after=ids[0]) == 2


def test_everything_that_happens_to_a_trial_is_an_event(store: Store, writer: JobWriter) -> None:
    writer.set_state(JobState.RUNNING)
    writer.add_trial(TRIAL)
    writer.finish_rung(3, RUNG, samples_reused=0, state=TrialState.COMPLETE)
    writer.finish_trials([3], TrialState.FAIL, "late")
    events = store.events(writer.job_id, after=BEGINNING)
    assert [event.kind for event in events] == ["state", "trial", "rung", "trial_state"]
    assert events[2].payload == {"trial": 3, "rung": 0, "values": {"math": 0.5}, "state": "COMPLETE"}
    assert [event.time for event in events] == sorted(event.time for event in events)


# One writer.

WRITES: dict[str, Callable[[JobWriter], object]] = {
    "heartbeat": lambda w: w.heartbeat(wall_clock_s=99.0),
    "set_state": lambda w: w.set_state(JobState.FAILED, "x"),
    "set_waiting": lambda w: w.set_waiting("x"),
    "set_document": lambda w: w.set_document({"x": 1}),
    "open_bracket": lambda w: w.open_bracket(BracketRecord(5, 0, 9)),
    "resize_bracket": lambda w: w.resize_bracket(0, 1),
    "add_trial": lambda w: w.add_trial(replace(TRIAL, number=99)),
    "record_chunk": lambda w: w.record_chunk(3, Split.SEARCH, chunk(range(9, 12))),
    "delete_texts": lambda w: w.delete_texts(keep=()),
    "finish_rung": lambda w: w.finish_rung(3, replace(RUNG, rung=2), samples_reused=1, state=TrialState.COMPLETE),
    "finish_trials": lambda w: w.finish_trials([3], TrialState.FAIL, "x"),
    "set_document_named": lambda w: w.set_document_named("holdout", {}),
    "record_engine_fault": lambda w: w.record_engine_fault("replica-1", 0, "x"),
    "add_event": lambda w: w.add_event("x", {}),
    "add_step": lambda w: w.add_step(losses_step(0)),
    "add_prompt_templates": lambda w: w.add_prompt_templates("x", {"@x": "{{x}}"}),
    "add_prompts": lambda w: w.add_prompts(Split.SEARCH, "math", [SampleText("1 + 1?", None, b"RIFF")]),
    "add_judgments": lambda w: w.add_judgments([JudgmentRecord("x", "d", 0, False, None, "m", "p", "a")]),
}


def everything(store: Store, study_id: str) -> list[Any]:
    """All rows of all tables that are about jobs."""
    tables = [table for table in schema.metadata.sorted_tables if table is not schema.commit_tokens]
    with store._engine.connect() as connection:
        return [connection.execute(sa.select(table)).all() for table in tables]


def test_every_writing_method_is_among_those_tried() -> None:
    assert {name for name in vars(JobWriter) if not name.startswith("_")} == set(WRITES)


@pytest.mark.parametrize("method", WRITES)
def test_a_writer_that_was_replaced_cannot_write(method: str, store: Store, writer: JobWriter) -> None:
    writer.open_bracket(BracketRecord(0, 0, 9))
    writer.add_trial(TRIAL)
    newer = store.open_attempt(writer.job_id)
    before = everything(store, writer.job_id)
    with pytest.raises(StaleAttempt, match=r"attempt 1 may not write, attempt 2 has taken over"):
        WRITES[method](writer)
    assert everything(store, writer.job_id) == before
    WRITES[method](newer)
    assert everything(store, writer.job_id) != before


def test_writers_of_two_threads_take_turns_and_lose_nothing(store: Store, writer: JobWriter) -> None:
    def write(thread: int) -> None:
        for number in range(20):
            writer.add_event("note", {"thread": thread, "number": number})

    threads = [threading.Thread(target=write, args=(thread,)) for thread in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = store.events(writer.job_id, after=BEGINNING)
    found = [(event.payload["thread"], event.payload["number"]) for event in events]
    assert sorted(found) == [(thread, number) for thread in range(3) for number in range(20)]


# What the server keeps.


def test_requests_of_one_name_make_one_study(store: Store) -> None:
    def create(_: int) -> str:
        return store.create_job(
            kind="search", name="a", document={}, accepted=RESOLVED.to_json(), idempotency_key="k", request_digest="d"
        ).id

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(create, range(24)))) == 1
    assert len(store.jobs()) == 1
    found = store.job_of_key("k")
    assert found is not None
    assert found.request_digest == "d"
    assert store.job_of_key("other") is None
    assert [event.kind for event in store.events(found.id)] == ["created"]


def test_a_cancelled_study_cannot_be_taken_over(store: Store, writer: JobWriter) -> None:
    store.open_attempt(writer.job_id, because="cancelled").set_state(JobState.CANCELLED)
    with pytest.raises(StaleAttempt, match=r"was cancelled"):
        store.open_attempt(writer.job_id)
    with pytest.raises(StaleAttempt, match=r"attempt 1 may not write, attempt 2 has taken over"):
        writer.heartbeat(wall_clock_s=1.0)


def test_a_submission_is_noted_with_its_time(store: Store, writer: JobWriter) -> None:
    before = time.time()
    store.record_submission(writer.job_id, 2)
    study = store.job(writer.job_id)
    assert (study.submissions, study.submitted_after) == (2, writer.attempt)
    assert before <= study.submitted_at <= time.time()


def test_attempts_count_as_failures_until_a_result_is_stored(store: Store) -> None:
    study = store.create_job(kind="search", name="a", document={}, accepted=RESOLVED.to_json()).id
    assert store.consecutive_failures(study) == 0
    store.record_submission(study, 1)
    assert store.consecutive_failures(study) == 1  # a driver that never began
    store.open_attempt(study)
    writer = store.open_attempt(study, because="lost")
    assert store.consecutive_failures(study) == 2
    writer.add_trial(TRIAL)
    assert store.consecutive_failures(study) == 2
    writer.finish_rung(3, RUNG, samples_reused=0)
    assert store.consecutive_failures(study) == 0
    store.open_attempt(study)
    assert store.consecutive_failures(study) == 1


def test_drivers_that_never_began_count_until_one_begins(store: Store) -> None:
    """Drivers that never began, each followed by one that stored results, do not add up over the life of a job."""
    study = store.create_job(kind="search", name="a", document={}, accepted=RESOLVED.to_json()).id
    for number in (1, 2, 3):
        store.record_submission(study, number)
        assert store.consecutive_failures(study) == number
    for number in (4, 6, 8):
        store.record_submission(study, number)
        writer = store.open_attempt(study, as_driver=True)
        assert writer.attempt == number
        writer.add_event(EventKind.TRIAL_STATE, {"trial": 3})
        assert store.consecutive_failures(study) == 0
        store.record_submission(study, number + 1)  # it never begins
        assert store.consecutive_failures(study) == 1


def test_answers_of_a_served_study_are_results(store: Store) -> None:
    served = store.create_job(kind="serving", name="a", document={}, accepted={}).id
    for _ in range(2):
        attempt = store.open_attempt(served)
        attempt.set_document_named(ENDPOINT, {"url": "http://head:8700"})
        assert store.consecutive_failures(served) == 1, "an endpoint without an engine is no result"
        attempt.add_event(EventKind.ANSWERED, {})
        assert store.consecutive_failures(served) == 0


def test_a_stored_chunk_is_a_result_too(store: Store, writer: JobWriter) -> None:
    writer.add_trial(TRIAL)
    for number in range(4):
        attempt = store.open_attempt(writer.job_id)
        attempt.record_chunk(3, Split.SEARCH, chunk(range(number, number + 1)))
        assert store.consecutive_failures(writer.job_id) == 0
    store.open_attempt(writer.job_id)
    store.open_attempt(writer.job_id)
    assert store.consecutive_failures(writer.job_id) == 2


def test_a_stored_step_of_the_searcher_is_a_result_too(store: Store, writer: JobWriter) -> None:
    for number in range(4):
        attempt = store.open_attempt(writer.job_id)
        attempt.add_step(losses_step(number))
        assert store.consecutive_failures(writer.job_id) == 0
    store.open_attempt(writer.job_id)
    store.open_attempt(writer.job_id)
    assert store.consecutive_failures(writer.job_id) == 2


def test_waiting_drivers_are_counted_apart(store: Store, writer: JobWriter) -> None:
    """Drivers that wait are counted apart until a result is stored."""
    study = writer.job_id
    writer.set_waiting("no engine")
    for expected in (2, 3):
        store.open_attempt(study).set_waiting("no engine")
        assert (store.consecutive_failures(study), store.consecutive_waits(study)) == (0, expected)
    store.open_attempt(study)  # it crashes
    assert (store.consecutive_failures(study), store.consecutive_waits(study)) == (1, 0)
    attempt = store.open_attempt(study)
    attempt.add_trial(TRIAL)
    attempt.record_chunk(3, Split.SEARCH, chunk(range(3)))
    assert (store.consecutive_failures(study), store.consecutive_waits(study)) == (0, 0)
    attempt.set_waiting("no engine")
    assert (store.consecutive_failures(study), store.consecutive_waits(study)) == (0, 1)
    record = store.job(study)
    assert (record.state, record.reason) == (JobState.STOPPED, "no engine")


def test_refused_jobs_count_as_failures_and_resuming_counts_anew(store: Store) -> None:
    study = store.create_job(kind="search", name="a", document={}, accepted=RESOLVED.to_json()).id
    store.record_submission(study, 1)
    for expected in (1, 2, 3):
        store.record_refusal(study, "no")
        assert store.consecutive_failures(study) == expected
    assert store.events(study)[-1].payload == {"reason": "no"}
    store.record_submission(study, 6)
    store.open_attempt(study, because="giving up").set_state(JobState.FAILED, "no")
    assert SteeringStore(store).resume(study, reason="again").state is JobState.STOPPED
    assert store.consecutive_failures(study) == 0


def test_failed_or_stopped_study_is_resumed(store: Store, writer: JobWriter) -> None:
    """Only a failed or stopped study is resumed, and its driver continues to write."""
    requests = SteeringStore(store)
    for state in (JobState.CREATED, JobState.RUNNING, JobState.COMPLETE, JobState.CANCELLED):
        writer.set_state(state, "x")
        before = store.last_event_id(writer.job_id)
        assert requests.resume(writer.job_id, reason="again").state is state
        assert store.last_event_id(writer.job_id) == before
    writer.set_waiting("no engine")
    assert requests.resume(writer.job_id, reason="again").reason == "again"
    writer.set_state(JobState.RUNNING)
    with pytest.raises(NotFound):
        requests.resume("nope", reason="again")


def test_a_heartbeat_says_when_the_driver_last_got_on(store: Store, writer: JobWriter) -> None:
    writer.heartbeat(wall_clock_s=1.0, idle_s=20.0, patience_s=300.0)
    study = store.job(writer.job_id)
    assert study.heartbeat_at is not None
    assert study.progressed_at == pytest.approx(study.heartbeat_at - 20.0)
    assert study.patience_s == 300.0


def test_progress_is_kept_until_it_is_replaced(store: Store, writer: JobWriter) -> None:
    writer.heartbeat(wall_clock_s=1.0, progress={"stage": "searching"})
    writer.heartbeat(wall_clock_s=2.0)
    assert store.job(writer.job_id).progress == {"stage": "searching"}


def test_trials_are_read_in_parts(store: Store, writer: JobWriter) -> None:
    for number in range(5):
        writer.add_trial(replace(TRIAL, number=number))
    writer.finish_rung(3, RUNG, samples_reused=0)
    assert [trial.number for trial in store.trials(writer.job_id, start=1, stop=4)] == [1, 2, 3]
    assert store.trial(writer.job_id, 3).rungs == (RUNG,)
    with pytest.raises(NotFound, match=r"trial 5: study .* has no such trial"):
        store.trial(writer.job_id, 5)
    assert store.trial_counts() == {writer.job_id: {TRIAL.state.value: 5}}


def test_an_export_is_stored_once(store: Store, writer: JobWriter) -> None:
    record = ExportRecord("e", writer.job_id, 3, "bfloat16", ExportState.WAITING, 1.0)
    assert ExportStore(store).add_export(record) == record
    ExportStore(store).set_export_state("e", ExportState.FAIL, "disk full")
    assert ExportStore(store).add_export(record) == replace(record, state=ExportState.FAIL, reason="disk full")
    assert ExportStore(store).exports("another study") == ()
    with pytest.raises(NotFound, match=r"export 'f': no such export"):
        ExportStore(store).export("f")


# Readers and crashes.


def test_a_reader_sees_one_moment_and_waits_for_no_writer(store: Store, writer: JobWriter) -> None:
    writer.add_trial(TRIAL)
    with writer._transaction() as connection:
        connection.execute(sa.update(schema.trials).values(label="half done"))
        assert store.trials(writer.job_id)[0].label == "trial:3"
    assert store.trials(writer.job_id)[0].label == "half done"


def test_readers_beside_a_writer_never_see_part_of_a_transaction(store: Store, writer: JobWriter) -> None:
    """`finish_rung` adds a rung and ends the trial: no reader may see the one without the other."""
    for number in range(40):
        writer.add_trial(replace(TRIAL, number=number))
    stop = threading.Event()
    torn: list[Any] = []
    reads: list[Any] = []

    def read() -> None:
        while not stop.is_set():
            trials = store.trials(writer.job_id)
            torn.extend(t.number for t in trials if bool(t.rungs) != (t.state is TrialState.COMPLETE))
            reads.append(sum(t.state is TrialState.COMPLETE for t in trials))

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(40):
        writer.finish_rung(number, RUNG, samples_reused=0, state=TrialState.COMPLETE)
    stop.set()
    for thread in threads:
        thread.join()
    assert not torn
    assert reads


def test_an_error_inside_a_transaction_leaves_nothing_of_it(store: Store, writer: JobWriter) -> None:
    before = everything(store, writer.job_id)
    with pytest.raises(sa.exc.NoResultFound):  # after the evidence and the samples were inserted
        writer.record_chunk(77, Split.SEARCH, chunk(range(3)))
    assert everything(store, writer.job_id) == before
    writer.add_event("note", {})  # and the store goes on


def die_inside_a_chunk(url: str, study_id: str) -> None:
    """Store a chunk, then kill this process inside the transaction of another one; runs in a process of its own."""
    writer = Store(url).open_attempt(study_id)
    writer.add_trial(TRIAL)
    writer.record_chunk(3, Split.SEARCH, chunk(range(3)))
    with writer._transaction() as connection:
        connection.execute(sa.update(schema.trials).values(samples_scored=1000, state="COMPLETE"))
        connection.execute(sa.delete(schema.sample_chunks))
        os._exit(9)


def test_death_in_a_transaction_frees_locks(store: Store, url: str) -> None:
    """A process that dies in a transaction leaves the committed rows and no lock."""
    study = store.create_job(kind="search", name="test", document={}, accepted=RESOLVED.to_json()).id
    process = multiprocessing.get_context("spawn").Process(target=die_inside_a_chunk, args=(url, study))
    process.start()
    process.join()
    assert process.exitcode == 9
    (trial,) = store.trials(study)
    assert (trial.state, trial.samples_scored) == (TrialState.RUNNING, 3)
    assert len(store.samples(study, RECIPE.digest, Split.SEARCH)) == 3
    writer = store.open_attempt(study)
    assert writer.attempt == 2
    writer.record_chunk(3, Split.SEARCH, chunk(range(3, 6)))
    assert store.trials(study)[0].samples_scored == 6


def test_the_last_event_and_the_trials_of_one_study_are_its_own(store: Store, writer: JobWriter) -> None:
    other = store.open_attempt(
        store.create_job(kind="search", name="other", document={}, accepted=RESOLVED.to_json()).id
    )
    writer.add_trial(TRIAL)
    other.add_event("tick", {})
    for study in (writer.job_id, other.job_id):
        assert store.last_event_id(study) == store.events(study)[-1].id
    assert store.last_event_id("nope") == 0
    assert store.trial_counts(writer.job_id) == {writer.job_id: {"WAITING": 1}}
    assert store.trial_counts(other.job_id) == {}


def test_another_store_opens_the_same_database_by_its_url(store: Store, writer: JobWriter, url: str) -> None:
    assert store.url == url.replace("postgresql:", "postgresql+psycopg:")
