"""The outcomes of policies, as series and in the report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from service.results.report import render_report
from service.results.series.policies import policies
from service.store.steps import UpdateRequest, UpdateResult, UpdateStep
from tests.service.synthetic_run import run_record

RUN = run_record(num_trials=12)
VECTORS = ({"math": 1.0, "text": 0.0}, {"math": 0.0, "text": 1.0})


def updates(
    *, num_iterations: int, vectors: tuple[dict[str, float], ...] = ({},), **more: float
) -> tuple[UpdateStep, ...]:
    return tuple(
        UpdateStep(
            iteration,
            9 + iteration,
            UpdateRequest(label="", iteration=iteration, preference=vectors[iteration % len(vectors)]),
            UpdateResult(
                statistics={"outcome": 0.1 * iteration, "outcome_std": 0.05, "length": 7.5, "entropy": 2.0, **more}
            ),
        )
        for iteration in range(num_iterations)
    )


def test_each_policy_has_its_iterations() -> None:
    found = policies(replace(RUN, updates=updates(num_iterations=5, vectors=VECTORS))).policies
    assert [policy.preference for policy in found] == list(VECTORS)
    assert [[each.iteration for each in policy.iterations] for policy in found] == [[0, 2, 4], [1, 3]]
    first = found[1].iterations[0]
    assert (first.outcome, first.outcome_std, first.length, first.statistics) == (0.1, 0.05, 7.5, {"entropy": 2.0})
    assert policies(RUN).policies == ()


def test_the_report_draws_policies_where_there_are_some() -> None:
    assert "<h2>Policies</h2>" not in render_report(RUN)
    one = render_report(replace(RUN, updates=updates(num_iterations=4)))
    assert "One policy learned from 4 iterations." in one
    assert one.count("<title>policy 0, iteration 3: 0.3") == 1
    assert one.count('class="range"') >= 4
    several = render_report(replace(RUN, updates=updates(num_iterations=5, vectors=VECTORS)))
    assert "2 policies, one for each preference vector, learned from 5 iterations." in several
    assert several.count('class="range"') == 2 + 1, "iterations that both policies have had, and the legend"
    assert "one standard deviation over policies" in several


def test_outcomes_have_a_mean_and_a_deviation_over_policies() -> None:
    """Figure 6 of HM3 with deviations: policies have the outcomes 0, 0.2, 0.4 and 0.1, 0.3."""
    found = policies(replace(RUN, updates=updates(num_iterations=5, vectors=VECTORS))).mean
    assert [each.num_policies for each in found] == [2, 2, 1]
    assert [each.outcome for each in found] == pytest.approx([0.05, 0.25, 0.4])
    assert [each.outcome_std for each in found] == pytest.approx([0.1 / 2**0.5, 0.1 / 2**0.5, 0.0])


def test_the_report_draws_how_far_policies_moved() -> None:
    """KL divergence and clipping have charts where updates have them; those of earlier versions have the divergence."""
    charts = ("KL divergence of an update, nats per step", "share of ratios outside the clip after an update")

    def drawn(**statistics: float) -> list[bool]:
        page = render_report(replace(RUN, updates=updates(num_iterations=4, **statistics)))  # type: ignore[arg-type]
        return [f"{chart}, over the iterations" in page for chart in charts]

    assert drawn() == [False, False]
    assert drawn(kl=0.02) == [True, False]
    assert drawn(kl=0.02, clipped=0.5) == [True, True]
