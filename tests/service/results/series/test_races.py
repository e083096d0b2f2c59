"""The trials that a race stopped, when, and by which rule."""

from __future__ import annotations

from dataclasses import replace

from service.results.record import RunRecord
from service.results.series.races import races
from service.types import Origin, TrialState
from tests.service.synthetic_run import RUNGS, run_record

RUN = run_record(num_trials=30)


def under(scheduler: str, reason: str | None = None) -> RunRecord:
    document = {**RUN.study.document, "fidelity": {"scheduler": scheduler}}
    trials = tuple(replace(trial, reason=reason) if trial.state is TrialState.PRUNED else trial for trial in RUN.trials)
    return replace(RUN, study=replace(RUN.study, document=document), trials=trials)


def test_every_proposed_trial_ends_at_its_last_look() -> None:
    plot = races(under("racing", "not promoted from rung 1"))
    assert plot.samples == RUNGS
    searched = [trial for trial in RUN.trials if trial.origin is Origin.SEARCH]
    assert [entry.trial for entry in plot.trials] == [trial.number for trial in searched]
    for trial, entry in zip(searched, plot.trials, strict=True):
        assert [look.samples for look in entry.looks] == [RUNGS[rung.rung] for rung in trial.rungs]
        ends = {TrialState.COMPLETE: "finished", TrialState.PRUNED: "stopped", TrialState.FAIL: "failed"}
        assert entry.end == ends[trial.state]
        assert (entry.rule is None) == (entry.end == "finished")
    failed = next(entry for entry in plot.trials if entry.end == "failed")
    assert failed.rule is not None
    assert failed.rule.startswith("NaN in the logits")


def test_stopping_rule_of_a_race() -> None:
    """The stopping rule is the scheduler's unless the reason names another."""

    def rules(run: RunRecord) -> set[str | None]:
        return {entry.rule for entry in races(run).trials if entry.end == "stopped"}

    assert rules(under("racing", "not promoted from rung 0")) == {"behind one of the best on the same samples"}
    assert rules(under("hyperband", "not promoted from rung 0")) == {"not among the best of its bracket"}
    assert rules(under("asha", "not promoted from rung 1")) == {"not among the best of the rung"}
    assert rules(under("other", "not promoted from rung 1")) == {"not promoted"}
    assert rules(under("racing", "surely behind trial 3 at rung 1")) == {"surely behind trial 3"}
    bound = "by the bound for an error rate of 0.05"
    assert rules(under("racing", f"behind at rung 1, {bound}")) == {f"behind, {bound}"}
    assert rules(under("racing", None)) == {"behind one of the best on the same samples"}


def test_trials_that_still_run_are_not_decided() -> None:
    running = replace(RUN, trials=tuple(replace(trial, state=TrialState.RUNNING) for trial in RUN.trials))
    assert {entry.end for entry in races(running).trials} == {"running"}
