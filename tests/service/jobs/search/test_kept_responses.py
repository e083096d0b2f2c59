"""The responses that a complete study keeps."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from service.jobs.search.attempt import described_recipes
from service.results.selection import held_out
from service.store.documents import VERIFICATION
from service.types import Origin
from tests.service.tune.harness import coordinator_of, drive, make_plan, new_study
from workers.serving.fake import FakeScorer
from workers.types import Split, VerificationReport


def test_responses_of_described_trials_are_kept(tmp_path: Path) -> None:
    """Baselines, finalists and verified trials keep their responses; all trials keep their values."""
    store, study = new_study(tmp_path)
    drive(coordinator_of(store, study, max_trials=8, scheduler="none"), FakeScorer())
    trials, objectives = store.trials(study), make_plan(study).objectives
    compared = {trial.recipe.digest for trial in held_out(trials, objectives)}
    assert {t.recipe.digest for t in trials if t.origin is not Origin.SEARCH} <= compared
    verified = next(trial.recipe.digest for trial in trials if trial.recipe.digest not in compared)
    report = VerificationReport(verified, 1, 1, 0.0, 0.0, (), 0, 1, 1)
    writer = store.open_attempt(study)
    writer.set_document_named(VERIFICATION, {"reports": [{"trial": 0, "samples": "0", **asdict(report)}]})
    before = store.sample_values(study, Split.SEARCH)
    writer.delete_texts(keep=described_recipes(store, study, trials, objectives))
    for trial in trials:
        samples = store.samples(study, trial.recipe.digest, Split.SEARCH)
        is_kept = trial.recipe.digest in {*compared, verified}
        assert all(bool(sample.response) == is_kept for sample in samples), trial.number
    after = store.sample_values(study, Split.SEARCH)
    assert {digest: {name: list(v) for name, v in of.items()} for digest, of in after.items()} == {
        digest: {name: list(v) for name, v in of.items()} for digest, of in before.items()
    }
    store.close()
