"""The outcomes of trials at each rung of each bracket."""

from __future__ import annotations

from dataclasses import replace

from service.results.series.rungs import RungPlace, rungs
from service.types import Origin, RecipeDigest, RungRecord, TrialResult, TrialState
from tests.service.synthetic_run import run_record

RUN = run_record(num_trials=20)


def trial(number: int, bracket: int | None, state: TrialState, *finished: int) -> TrialResult:
    reached = tuple(RungRecord(rung, {"math": 10 * 3**rung}, {"math": 0.5}, {"math": None}) for rung in finished)
    return TrialResult(number, Origin.SEARCH, "", state, RecipeDigest("d"), bracket=bracket, rungs=reached)


def test_every_end_is_counted_at_its_rung() -> None:
    """A trial that failed had been promoted to the rung at which it failed; a bracket may begin above rung 0."""
    trials = (
        trial(0, None, TrialState.COMPLETE, 2),
        trial(1, 0, TrialState.COMPLETE, 0, 1, 2),
        trial(2, 0, TrialState.PRUNED, 0),
        trial(3, 0, TrialState.PRUNED, 0, 1),
        trial(4, 0, TrialState.FAIL),
        trial(5, 0, TrialState.FAIL, 0),
        trial(6, 0, TrialState.RUNNING, 0),
        trial(7, 0, TrialState.RUNNING),
        trial(8, 0, TrialState.WAITING),
        trial(9, 1, TrialState.COMPLETE, 1, 2),
        trial(10, 1, TrialState.FAIL),
    )
    assert rungs(replace(RUN, trials=trials)).places == (
        RungPlace(0, 0, 10, entered=7, promoted=3, finished=0, stopped=1, failed=1, running=2),
        RungPlace(0, 1, 30, entered=3, promoted=1, finished=0, stopped=1, failed=1, running=0),
        RungPlace(0, 2, 90, entered=1, promoted=0, finished=1, stopped=0, failed=0, running=0),
        RungPlace(1, 1, 30, entered=2, promoted=1, finished=0, stopped=0, failed=1, running=0),
        RungPlace(1, 2, 90, entered=1, promoted=0, finished=1, stopped=0, failed=0, running=0),
    )


def test_every_proposed_trial_enters_one_first_rung() -> None:
    places = rungs(RUN).places
    first = {place.bracket: place for place in reversed(places)}
    searched = [trial for trial in RUN.trials if trial.bracket is not None]
    assert sum(place.entered for place in first.values()) == len(searched)
    for place in places:
        ends = (place.promoted, place.finished, place.stopped, place.failed, place.running)
        assert sum(ends) == place.entered > 0
