"""Report section on trained policies: the mean outcome of their trials in each iteration.

An outcome is the weighted sum of a trial's objective values, minus a price for its number of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from service.results.record import RunRecord
from service.results.report.charts import Legend, Plot, legend
from service.results.report.marks import MAX_ROWS, NUM_COLOURS, evenly
from service.results.report.scales import Scale, nice_scale
from service.results.report.texts import number_text
from service.results.series.policies import MeanIteration, PolicySeries, policies

__all__ = ["policies_section"]


# Maximum number of points of a line.
MAX_STEPS = 600

# Statistics of updates that have a chart, each with the title of its axis.
UPDATES = {
    "kl": "KL divergence of an update, nats per step",
    "clipped": "share of ratios outside the clip after an update",
}


def policies_section(run: RunRecord) -> dict[str, Any] | None:
    """Build the data of the report's section on the policies that the search has trained.

    A policy is a network that chooses the layers of a merge. Returns None if the search has trained none.
    """
    plot = policies(run)
    found = [policy for policy in plot.policies if policy.iterations]
    if not found:
        return None
    names = [objective.name for objective in run.objectives]
    entries = [Legend("mean of an iteration", "loss", "line", style=_colour(0))]
    if len(found) > 1:
        entries.append(Legend("mean over policies", "record", "line"))
    over = "trials of an iteration" if len(found) == 1 else "policies"
    entries.append(Legend(f"one standard deviation over {over}", "range", "line"))
    return {
        "chart": _curves(found, plot.mean),
        "legend": legend(entries),
        "updates": [chart for chart in (_updates(found, statistic) for statistic in UPDATES) if chart is not None],
        "names": names,
        "num_policies": len(found),
        "num_iterations": sum(len(policy.iterations) for policy in found),
        "rows": [_policy_row(policy, names) for policy in found[:MAX_ROWS]],
    }


def _colour(number: int) -> str:
    return f"stroke:var(--c{number % NUM_COLOURS})"


def _curves(found: Sequence[PolicySeries], mean: Sequence[MeanIteration]) -> Markup:
    """Draw the mean outcome of each policy's trials over the iterations, with standard deviations.

    An outcome is the weighted sum of a trial's objective values, minus a price for its number of layers. An iteration
    is a fixed number of trials. `found` has the data of each policy, and `mean` has the means over all policies. For
    one policy, the standard deviations are over the trials of an iteration. For several policies, the standard
    deviations are over the policies, and are drawn around the policies' mean.
    """
    if len(found) == 1:
        spread = [(turn, each.outcome, each.outcome_std) for turn, each in enumerate(found[0].iterations, start=1)]
    else:
        spread = [(turn, m.outcome, m.outcome_std) for turn, m in enumerate(mean, start=1) if m.num_policies > 1]
    values = [each.outcome for policy in found for each in policy.iterations]
    values += [value for _, middle, std in spread for value in (middle - std, middle + std)]
    last = max(len(policy.iterations) for policy in found)
    plot = Plot(
        Scale(0, max(last, 1), max(1.0, nice_scale((0, last), count=8).step)),
        nice_scale([0.0, *values]),
        label="mean outcome of the trials over the iterations of each policy",
        x_title="iteration of a policy",
        y_title="outcome",
        height=300,
    )
    for turn, middle, std in spread:
        plot.line(turn, middle - std, turn, middle + std, css="range")
    for number, policy in enumerate(found):
        points = [(float(turn), each.outcome) for turn, each in enumerate(policy.iterations, start=1)]
        plot.curve(evenly(points, MAX_STEPS), css="loss", style=_colour(number))
        for (place, outcome), each in zip(points, policy.iterations, strict=True):
            what = f"{number_text(outcome)}, {number_text(each.length)} layers"
            title = f"{policy.name}, iteration {each.iteration}: {what}"
            plot.point(place, outcome, css="mark front", title=title, size=2)
    if len(found) > 1:
        plot.curve(evenly([(float(turn), middle) for turn, middle, _ in spread], MAX_STEPS), css="record")
    return plot.render()


def _updates(found: Sequence[PolicySeries], statistic: str) -> Markup | None:
    """Draw a statistic of each policy's updates, such as a loss, over the training iterations.

    `found` has the data of each policy, and `statistic` is the key of the statistic. Returns None if no update has the
    statistic.
    """
    curves = [
        [
            (float(turn), each.statistics[statistic])
            for turn, each in enumerate(policy.iterations, start=1)
            if statistic in each.statistics
        ]
        for policy in found
    ]
    values = [value for points in curves for _, value in points]
    if not values:
        return None
    last = max(turn for points in curves for turn, _ in points)
    plot = Plot(
        Scale(0, max(last, 1), max(1.0, nice_scale((0, last), count=8).step)),
        nice_scale([0.0, *values]),
        label=f"{UPDATES[statistic]}, over the iterations of each policy",
        x_title="iteration of a policy",
        y_title=UPDATES[statistic],
        height=200,
    )
    for number, points in enumerate(curves):
        plot.curve(evenly(points, MAX_STEPS), css="loss", style=_colour(number))
    return plot.render()


def _policy_row(policy: PolicySeries, names: Sequence[str]) -> dict[str, Any]:
    first, last = policy.iterations[0], policy.iterations[-1]
    return {
        "name": policy.name,
        "preference": [number_text(policy.preference[name]) if name in policy.preference else "any" for name in names],
        "num_iterations": len(policy.iterations),
        "first": first.outcome,
        "last": last.outcome,
        "length": last.length,
    }
