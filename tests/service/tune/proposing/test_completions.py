"""The choice of the sources' stored completions that become references."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from search_spaces.baselines import all_baselines
from search_spaces.objectives import Objective
from service.store import JobWriter, Store
from service.store.steps import CompletionsRequest
from service.tune.proposing.completions import SourceCompletions
from service.types import Origin, RungRecord, TrialRecord, TrialState
from tests.service.resolved import resolved_study
from tests.service.tune.harness import FINGERPRINTS
from workers.types import Evidence, SampleResult, ScoreResult, Split

OBJECTIVES = (
    Objective("math", "exact_match", "maximize"),
    Objective("text", "edits", "minimize", (0.0, 20.0)),
    Objective("quiz", "acc", "maximize"),
)
Values = Mapping[str, Mapping[int, tuple[float, tuple[tuple[int, ...], ...] | None]]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path / 'study.db'}")
    yield store
    store.close()


def score(writer: JobWriter, number: int, values: Values, *, split: Split = Split.SEARCH, full: bool = True) -> None:
    """Store values of trial `number`. The trials are base, math, text, then published recipes."""
    known = all_baselines(base="base", experts=("math", "text"), fingerprints=FINGERPRINTS, num_layers=4)
    origin, label, recipe = known[number]
    writer.add_trial(TrialRecord(number, Origin(origin), label, TrialState.WAITING, recipe))
    samples = tuple(
        SampleResult(name, position, f"doc{position}", value, "an answer", tokens=tokens)
        for name, each in values.items()
        for position, (value, tokens) in each.items()
    )
    evidence = Evidence(recipe.digest, "bank", {}, "sum", "replica-1", 7, "vllm 0")
    writer.record_chunk(number, split, ScoreResult(samples, evidence, {}))
    if full:
        record = RungRecord(0, {"math": 2}, {"math": 0.5}, {"math": 0.25})
        writer.finish_rung(number, record, samples_reused=0, state=TrialState.COMPLETE)


def test_the_first_source_that_is_correct_has_the_reference(store: Store) -> None:
    writer = store.open_attempt(
        store.create_job(kind="search", name="s", document={}, accepted=resolved_study().to_json()).id
    )
    # Expert "math" is stored before the base: the order is that of the trials.
    score(writer, 1, {"math": {0: (1.0, ((5, 2),)), 1: (1.0, ((6, 2),)), 2: (0.5, ((7, 2),))}})
    score(
        writer, 0, {"math": {1: (1.0, ((8, 2),)), 3: (0.0, ((9, 2),))}, "text": {0: (0.0, ((4,),)), 1: (20.0, ((3,),))}}
    )
    # Right, but no source, not scored in full, or on holdout data.
    score(writer, 3, {"math": {4: (1.0, ((1,),))}})
    score(writer, 2, {"math": {4: (1.0, ((1,),))}}, full=False)
    completions = SourceCompletions(store, writer.job_id, OBJECTIVES)
    found = completions.find(CompletionsRequest(label="", completions=("math", "text"))).completions
    assert found == {"math": ((0, 1), (1, 0)), "text": ((0, 0),)}
    assert completions.read(found) == {"math": {0: (5, 2), 1: (8, 2)}, "text": {0: (4,)}}
    assert completions.read({"math": ((1, 1),)}) == {"math": {1: (6, 2)}}, "what was decided, not what would be now"


def test_samples_without_references(store: Store) -> None:
    """Options, several completions and samples without tokens are no references."""
    writer = store.open_attempt(
        store.create_job(kind="search", name="s", document={}, accepted=resolved_study().to_json()).id
    )
    score(writer, 0, {"quiz": {0: (1.0, None)}, "math": {0: (1.0, ((5,), (6,))), 1: (1.0, ((),)), 2: (1.0, ((7,),))}})
    score(writer, 1, {"math": {0: (1.0, ((1,),))}}, split=Split.HOLDOUT)
    found = SourceCompletions(store, writer.job_id, OBJECTIVES).find(
        CompletionsRequest(label="", completions=("math", "quiz"))
    )
    assert found.completions == {"math": ((2, 0),), "quiz": ()}
