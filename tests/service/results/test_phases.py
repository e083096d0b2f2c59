"""The cost of a search by phase: in the record of a run, its summary and its report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from service.results.load import run_record
from service.results.phases import phases
from service.results.report import render_report
from service.results.summary import summary
from service.store import Store
from service.store.documents import ALIGNMENT_COST
from service.store.steps import GradientRequest, GradientResult, GradientStep, UpdateRequest, UpdateResult, UpdateStep
from tests.service.api.harness import stored_study, write_holdout, write_trial
from tests.service.synthetic_run import run_record as made_up
from workers.types import Evidence, SampleResult, ScoreResult, Split


def test_seconds_of_each_phase_are_those_stored(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'study.db'}")
    study = stored_study(store)
    writer = store.open_attempt(study.id)
    assert phases(run_record(store, study.id)) == {}
    trial = made_up(num_trials=2).whole_trials[0]
    write_trial(writer, trial)
    evidence = Evidence(trial.recipe.digest, "bank", {"search math": "0"}, "sum", "replica-1", 0, "fake")
    for position, seconds in enumerate((0.5, 0.25)):
        samples = (SampleResult("math", position, f"d{position}", 1.0, "says"),)
        timings = {"materialise": 0.125, "swap": 0.0625, "score": seconds, "wait": 9.0}
        writer.record_chunk(trial.number, Split.SEARCH, ScoreResult(samples, evidence, timings))
    write_holdout(writer, trial)
    writer.set_document_named(ALIGNMENT_COST, {"seconds": 61.5})
    for iteration in range(3):
        request = UpdateRequest(label="", iteration=iteration)
        writer.add_step(UpdateStep(iteration, 9, request, UpdateResult(seconds=iteration / 2)))
    descent = GradientRequest(label="", descent=0, point=(), positions={}, weights={})
    writer.add_step(GradientStep(3, 9, descent, GradientResult(seconds=0.25)))
    run = run_record(store, study.id)
    assert phases(run) == {
        "alignments": 61.5,
        "updates": 1.5,
        "gradients": 0.25,
        "merging": 0.375,
        "scoring": 0.75,
    }
    assert summary(run)["phases"] == phases(run)
    store.close()


def test_the_report_lists_the_phases_that_a_search_had() -> None:
    run = made_up(num_trials=12)
    policies = replace(run, gradients=(), alignment_s=1061.53, engine=replace(run.engine, swap_s=(), score_s=20.0))
    page = render_report(policies)
    assert '<tr><th scope="row">alignments</th><td>1,061.5</td></tr>' in page
    assert '<tr><th scope="row">scoring</th><td>20.0</td></tr>' in page
    assert '<th scope="row">updates</th>' not in page
    nothing = replace(policies, alignment_s=0.0, engine=replace(policies.engine, score_s=0.0))
    assert "phase of the search" not in render_report(nothing)
