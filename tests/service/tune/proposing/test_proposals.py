"""A searcher's knowledge of the trials that its proposal may use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from search_spaces.constraints import parse_constraint
from search_spaces.objectives import Objective
from service.tune.feasibility import Feasibility
from service.tune.proposing.proposals import Observations
from service.tune.schedulers.base import Proposal
from service.types import Origin, RungRecord, TrialRecord, TrialState
from tests.service.tune.harness import lfs_space, make_plan

NAMES = ("math", "text")


def rung_record(rung: int, values: tuple[float, float], errors: tuple[float | None, float | None]) -> RungRecord:
    samples = dict.fromkeys(NAMES, (4, 12, 36)[rung])
    return RungRecord(rung, samples, dict(zip(NAMES, values, strict=True)), dict(zip(NAMES, errors, strict=True)))


def test_observation_fields() -> None:
    """An observation has its trial, its rung and the errors of its costs, and stays the same object."""
    space = lfs_space()
    objectives = (
        Objective("math", "exact_match", "maximize", None, (parse_constraint("math >= 0.875"),)),
        Objective("text", "perplexity", "minimize", (0.0, 20.0), (parse_constraint("text <= base"),)),
    )
    plan = make_plan("s", objectives=objectives)
    origin, label, recipe = plan.baselines[0]
    configurations = [space.from_recipe(published) for _, _, published in plan.baselines]
    configuration = next(c for c in configurations if c is not None)
    proposed = space.to_recipe(configuration)
    full = rung_record(2, (0.5, 5.0), (0.1, 1.0))
    trials = {
        0: TrialRecord(
            0,
            origin,
            label,
            TrialState.COMPLETE,
            recipe,
            configuration=configuration,
            rungs=(full,),
            values=full.values,
        ),
        7: TrialRecord(
            7,
            Origin.SEARCH,
            "",
            TrialState.PRUNED,
            proposed,
            configuration=configuration,
            rungs=(rung_record(0, (1.0, 10.0), (None, 2.0)), rung_record(1, (0.75, 10.0), (0.125, 1.0))),
        ),
        8: TrialRecord(8, Origin.SEARCH, "", TrialState.FAIL, proposed, configuration=configuration),
    }
    proposal = Proposal(9, 0, visible=((0, 2), (7, 0), (7, 1)), failed=(8,), pending=(), opens=None)
    feasibility = Feasibility(plan.objectives, trials)
    feasibility.know(0, {0: {"math": 0.5, "text": 12.0}, 1: {"math": 0.5, "text": 7.0}})
    observations = Observations(space, plan, feasibility)
    source, low, high, failed = observations.of(proposal, trials)
    again = observations.of(replace(proposal, number=10), trials)
    assert [id(each) for each in again] == [id(each) for each in (source, low, high, failed)]
    assert (source.number, source.rung, source.fidelity, source.is_proposed) == (0, 2, 1.0, False)
    assert (low.number, low.rung, low.is_proposed) == (7, 0, True)
    assert low.fidelity == pytest.approx(1 / 9)
    assert low.costs == (0.0, 0.5)
    assert low.standard_errors == (None, 0.1)
    assert (high.number, high.rung, high.standard_errors) == (7, 1, (0.125, 0.05))
    assert (failed.number, failed.rung, failed.costs, failed.standard_errors) == (8, 2, None, ())
    # As shares of the ranges, and the base's text on the samples of the same rung.
    assert (source.constraints, failed.constraints) == ((0.375, 0.0), ())
    assert (low.constraints, high.constraints) == ((-0.125, -0.1), (0.125, 0.15))
