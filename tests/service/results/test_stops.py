"""Paired differences between stopped trials and their rivals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from service.results.statistics import paired_difference
from service.results.stops import stopped_trials
from service.types import TrialState
from tests.service.synthetic_run import EXPERTS, RUNGS, run_record

DOCUMENTS = {name: name for name in EXPERTS}


def test_differences_are_of_the_samples_of_each_rung() -> None:
    """Each rung counts the samples up to it, and a mean is over all objectives."""
    run = run_record(num_trials=40)
    stopped = next(t for t in run.trials if t.state is TrialState.PRUNED and len(t.rungs) == 2)
    rival = run.trials[1]
    rng = np.random.default_rng(0)
    values = {
        trial.recipe.digest: {name: (rng.random(RUNGS[-1]) < share).astype(float) for name in EXPERTS}
        for trial, share in ((stopped, 0.4), (rival, 0.7))
    }
    (found,) = stopped_trials(
        [stopped], {stopped.number: rival}, run.objectives, documents=DOCUMENTS, read=lambda _: values
    )
    assert (found.trial, found.rival, found.rung) == (stopped.number, rival.number, 1)
    assert [(look.rung, look.samples) for look in found.looks] == [(0, 30), (1, 90)]
    own, others = values[stopped.recipe.digest], values[rival.recipe.digest]
    for look in found.looks:
        for name in EXPERTS:
            wanted = paired_difference(own[name][: look.samples], others[name][: look.samples], bounds=(0.0, 1.0))
            assert look.differences[name]["value"] == wanted.value
            assert look.differences[name]["ci95"] == list(wanted.ci95)
        mean = np.mean([look.differences[name]["value"] for name in EXPERTS])
        assert look.differences["mean"]["value"] == pytest.approx(mean)


def test_samples_that_are_not_stored_are_left_out() -> None:
    """An objective with a missing sample has no difference, and then there is no mean over all objectives."""
    run = run_record(num_trials=40)
    stopped = next(t for t in run.trials if t.state is TrialState.PRUNED and len(t.rungs) == 2)
    full = {name: np.ones(RUNGS[-1]) for name in EXPERTS}
    gap = np.where(np.arange(RUNGS[-1]) == 50, np.nan, 0.0)
    values = {stopped.recipe.digest: {**full, "math": gap}, run.trials[1].recipe.digest: full}
    (found,) = stopped_trials(
        [stopped], {stopped.number: run.trials[1]}, run.objectives, documents=DOCUMENTS, read=lambda _: values
    )
    assert [set(look.differences) for look in found.looks] == [{*EXPERTS, "mean"}, {"text", "lookup"}]


def test_a_trial_without_a_rival_has_no_comparison() -> None:
    """Nothing is read for trials that no scheduler has stopped."""
    run = run_record(num_trials=40)

    def read(_: object) -> dict[str, dict[str, np.ndarray]]:
        raise AssertionError("nothing is compared")

    trial = replace(run.trials[3], rival=None)
    (found,) = stopped_trials([trial], {}, run.objectives, documents=DOCUMENTS, read=read)
    assert (found.rival, found.looks) == (None, ())
