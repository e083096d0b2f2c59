"""A study that an earlier version left in the middle of a rung continues as if that version had never stopped."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from service.jobs.search.local_run import read_run
from service.resolved_study import ResolvedStudy
from service.results.selection import best_trial
from service.types import JobState, TrialRecord
from tests.end_to_end.processes import started
from tests.mid_rung import expected_trials, restore
from tests.service.stored_values import stored_values
from workers.models.checkpoints import open_checkpoint
from workers.tiny_family import family_dir
from workers.types import Split

RUN_S = 300.0


@pytest.mark.timeout(600)
def test_earlier_versions_study_resumes(tmp_path: Path, ray_address: str) -> None:
    """A study that an earlier version stopped resumes to the same trials and is exported."""
    study, run_dir = restore(tmp_path)
    with read_run(run_dir) as (store, record):
        before = store.trials(record.id)
        assert record.state is JobState.RUNNING
        at_rung = {trial.number: max((sum(r.num_samples.values()) for r in trial.rungs), default=0) for trial in before}
        (trial,) = [trial for trial in before if trial.samples_scored > at_rung[trial.number]]
        assert len(trial.rungs) == 1, "the chunk of its second rung is stored, the rung is not"
        attempt = record.attempt
    fake = [sys.executable, "-m", "tests.end_to_end.fake_run", "{}"]
    command: list[str | Path] = [*fake, "run", study, "--out", run_dir, "--export", "best"]
    with started(command, directory=run_dir, ray_address=ray_address) as run:
        assert run.wait(timeout_s=RUN_S) == 0, run.log
    with read_run(run_dir) as (store, record):
        assert (record.state, record.attempt) == (JobState.COMPLETE, attempt + 1)
        trials = store.trials(record.id)
        assert [as_json(trial) for trial in trials] == expected_trials()
        scored = stored_values(store, record.id, Split.SEARCH)
        chunks = [row for row in store.evidence(record.id) if row.is_of(Split.SEARCH)]
        winner = best_trial(trials, ResolvedStudy.of(record).objectives)
    assert sum(row.num_samples for row in chunks) == sum(len(values["sums"]) for values in scored.values())
    assert winner is not None
    merged, base = open_checkpoint(run_dir / "export"), open_checkpoint(family_dir() / "base")
    assert {name: tensor.shape for name, tensor in merged.tensors.items()} == {
        name: tensor.shape for name, tensor in base.tensors.items()
    }
    assert winner.recipe.digest in (run_dir / "export" / "recipe.json").read_text()


def as_json(trial: TrialRecord) -> dict[str, object]:
    return {
        "number": trial.number,
        "origin": trial.origin.value,
        "label": trial.label,
        "state": trial.state.value,
        "configuration": trial.configuration,
        "recipe_digest": trial.recipe.digest,
        "bracket": trial.bracket,
        "rungs": [asdict(rung) for rung in trial.rungs],
        "samples_scored": trial.samples_scored,
        "samples_reused": trial.samples_reused,
        "reason": trial.reason,
    }
