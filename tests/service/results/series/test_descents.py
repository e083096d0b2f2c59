"""The losses of descents as numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from service.results.series.descents import descents
from service.store.steps import GradientRequest, GradientResult, GradientStep
from tests.service.synthetic_run import EXPERTS, gradients, run_record

RUN = run_record(num_trials=12)


def test_descent_losses_are_relative() -> None:
    """A descent has its losses in units of the baselines' and their weighted sum."""
    losses, preference = {"math": 3.0, "text": 0.5}, {"math": 0.75, "text": 0.25}
    # The baselines' mean losses are 2 and 0.5.
    weights = {"math": 0.75 / 2, "text": 0.25 / 0.5}
    request = GradientRequest(label="", descent=3, point=(), positions={}, weights=weights, preference=preference)
    gradient = GradientStep(0, 9, request, GradientResult(losses=losses))
    (found,) = descents(replace(RUN, gradients=(gradient,))).descents
    assert found.name == "descent 3"
    (step,) = found.steps
    assert step.losses == losses
    assert step.relative == pytest.approx({"math": 1.5, "text": 1.0})
    assert step.loss == pytest.approx(0.75 * 1.5 + 0.25 * 1.0)
    assert found.preference == preference


def test_without_preference_vectors_weights_are_equal() -> None:
    (found,) = descents(replace(RUN, gradients=gradients())).descents
    assert found.preference == pytest.approx(dict.fromkeys(EXPERTS, 1 / 3))
    assert [step.gradient for step in found.steps] == list(range(1, 49))
    assert [(point.trial, point.gradient) for point in found.points] == [(9, 12), (10, 24), (11, 36), (12, 48)]


def test_descents_follow_each_other() -> None:
    """Descents follow each other and omit objectives of weight zero."""
    found = descents(replace(RUN, gradients=gradients(num_descents=4))).descents
    assert [descent.name for descent in found] == [f"descent {number}" for number in range(4)]
    assert [descent.steps[0].gradient for descent in found] == [1, 49, 61, 73]
    assert [point.trial for descent in found[1:] for point in descent.points] == [13, 14, 15]
    assert all(step.losses.keys() == {"math"} for step in found[-1].steps)
    assert found[-1].preference == {"math": 1.0, "text": 0.0, "lookup": 0.0}


def test_failed_descent_says_why() -> None:
    """A failed descent says why and has the points before."""
    records = list(gradients()[:14])
    records[-1] = replace(records[-1], result=GradientResult(failure="the loss is nan"))
    (found,) = descents(replace(RUN, gradients=tuple(records))).descents
    assert found.failure == "the loss is nan"
    assert len(found.steps) == 13
    assert [point.trial for point in found.points] == [9], "trial 10 is no point of it"


def test_a_point_is_drawn_once_its_trial_is_proposed() -> None:
    few = replace(RUN, trials=RUN.trials[:10], gradients=gradients())
    assert [point.trial for point in descents(few).descents[0].points] == [9]
