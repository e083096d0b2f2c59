"""A study without baselines: its search, its resumption, its results and its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from search_spaces.fidelity import Scheduler
from search_spaces.study.search import Search, SmacOptions
from service.results.load import run_record
from service.results.report.page import render_report
from service.results.summary import summary
from service.store import Store
from service.store.steps import NoteStep
from service.types import Origin, TrialState
from tests.service.resolved import resolved_study, study_document
from tests.service.tune.harness import InlineProposer, Killed, coordinator_of, drive, killer, lfs_space, trial_list
from workers.serving.fake import FakeScorer


def new_store(directory: Path) -> tuple[Store, str]:
    directory.mkdir()
    store = Store(f"sqlite:///{directory / 'study.db'}")
    accepted = resolved_study(algorithm="smac").to_json()
    return store, store.create_job(kind="search", name="bare", document=study_document(), accepted=accepted).id


def run(store: Store, study: str, scheduler: Scheduler, algorithm: str, **given: Any) -> None:
    space = lfs_space()
    options = Search(smac=SmacOptions(surrogate="auto"))
    proposer = InlineProposer(space, seed=2, algorithm=algorithm, options=options, steps=store.steps(study))
    plan: dict[str, Any] = {"scheduler": scheduler, "max_trials": 20, "baselines": ()}
    drive(coordinator_of(store, study, proposer=proposer, space=space, **plan, **given), FakeScorer())


@pytest.mark.parametrize(
    ("scheduler", "algorithm"), [("hyperband", "smac"), ("racing", "de"), ("asha", "random"), ("none", "random")]
)
def test_search_ends_and_resumes(scheduler: Scheduler, algorithm: str, tmp_path: Path) -> None:
    """A search without baselines proposes its trials from number 0, and has them after kills too."""
    store, study = new_store(tmp_path / "undisturbed")
    run(store, study, scheduler, algorithm)
    trials = store.trials(study)
    assert [trial.number for trial in trials] == list(range(20))
    assert {trial.origin for trial in trials} == {Origin.SEARCH}
    assert any(trial.state is TrialState.COMPLETE for trial in trials)

    killed, again = new_store(tmp_path / "killed")
    kills = 0
    while True:
        try:
            run(killed, again, scheduler, algorithm, observer=killer(30))
            break
        except Killed:
            kills += 1
    assert kills > 0
    assert trial_list(killed, again) == trial_list(store, study)
    assert killed.steps(again) == store.steps(study)
    assert [type(step) for step in store.steps(study)] == [NoteStep] * (algorithm == "smac")


def test_results_without_baselines(tmp_path: Path) -> None:
    """The held-out table has the finalists alone, and finding, bias and report say what is missing."""
    store, study = new_store(tmp_path / "study")
    run(store, study, "hyperband", "random")
    found = run_record(store, study)
    document = summary(found)
    assert found.holdout
    assert {row.trial for row in found.holdout} <= {trial.number for trial in found.trials}
    text = "Whether a merge is better than its source models was not tested: the study scored no baselines."
    assert document["finding"] == {**document["finding"], "text": text, "tests": []}
    assert document["selection_bias_against_baselines"] == {}
    page = render_report(found)
    assert text in page
    assert "The finalists, scored once" in page
    assert "Without baselines, this bias cannot be told" in page
    assert "better than" not in page.replace(text, "")
