"""Report section on gradient descents: the losses at each gradient, and the trials made along each descent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from markupsafe import Markup

from search_spaces.study.image_suites import ENTROPY
from service.results.record import RunRecord
from service.results.report.charts import Legend, Plot, legend
from service.results.report.marks import MAX_ROWS, NUM_COLOURS, evenly
from service.results.report.scales import Scale, nice_scale
from service.results.report.texts import number_text
from service.results.series.descents import DescentSeries, DescentStep, descents
from service.types import Origin

__all__ = ["descents_section"]


# Number of gradients over which losses are averaged, since batches differ.
WINDOW = 4

# Maximum number of points of all lines together, and of descents that the chart names.
MAX_STEPS, MAX_NAMED = 600, 24


def descents_section(run: RunRecord) -> dict[str, Any] | None:
    """Build the data of the report's section on gradient descents; None if the search made no descents."""
    found = [descent for descent in descents(run).descents if descent.steps]
    if not found:
        return None
    names = [objective.name for objective in run.objectives]
    colours = {name: f"stroke:var(--c{index % NUM_COLOURS})" for index, name in enumerate(names)}
    entries = [Legend(name, "loss", "line", style=colours[name]) for name in names]
    if len(names) > 1:
        entries.append(Legend("weighted sum", "record", "line"))
    entries.append(Legend("trial", "mark front"))
    if len(found) > 1:
        entries.append(Legend("the next descent begins", "reference", "line"))
    unit = _unit(run)
    return {
        "chart": _chart(found, names, colours, unit=unit),
        "legend": legend(entries),
        "names": names,
        "window": WINDOW,
        "num_gradients": found[-1].steps[-1].gradient,
        "rows": [_row(descent, names) for descent in found[:MAX_ROWS]],
        "num_descents": len(found),
        "unit": unit,
        "loss": _loss(run),
        "each": "refined path" if run.has_refined else "preference vector",
    }


def _unit(run: RunRecord) -> str:
    """Text that names the loss by which the chart divides the losses of each objective; "" if they are not divided.

    If the Pareto front was refined by gradients after the search, this is the objective's loss before the first
    gradient. Otherwise it is the mean loss of the baselines. Without baselines, the losses are not divided.
    """
    if run.has_refined:
        return "the objective's loss before the first gradient"
    is_relative = any(trial.origin in (Origin.SOURCE, Origin.PUBLISHED) for trial in run.trials)
    return "the objective's mean loss over the baselines" if is_relative else ""


def _loss(run: RunRecord) -> str:
    """Text about the loss that the descents minimise: the loss on reference answers, or the entropy of predictions.

    The study file selects the loss. By default, tasks of images without labels use the entropy.
    """
    asked = run.study.document.get("search", {}).get("gradient", {}).get("loss")
    if asked == ENTROPY:
        return "the entropy of predictions"
    if asked != "cross_entropy" and any(objective.metric == ENTROPY for objective in run.objectives):
        return "the loss on reference answers or, for tasks without labels, the entropy of predictions"
    return "the loss on reference answers"


def _chart(found: Sequence[DescentSeries], names: Sequence[str], colours: dict[str, str], *, unit: str) -> Markup:
    """Draw the losses of all gradient descents over the numbers of their gradients.

    `found` has the data of the descents, and `names` has the objectives. `colours` has the CSS style of each
    objective's line. The losses in `found` are divided by a reference loss, which `unit` names for the axis. If `unit`
    is "", the losses are not divided.
    """
    lines = [(descent, _smooth(descent.steps)) for descent in found]
    values = [value for _, line in lines for _, losses, loss in line for value in (*losses.values(), loss)]
    last = found[-1].steps[-1].gradient
    plot = Plot(
        Scale(0, max(last, 1), max(1.0, nice_scale((0, last), count=8).step)),
        nice_scale([0.0, *values]),
        label="loss of each objective over the gradients of all descents" + (f", in units of {unit}" if unit else ""),
        x_title="gradient",
        y_title=f"loss, 1 is {unit}" if unit else "loss",
        height=300,
    )
    for number, (descent, _) in enumerate(lines):
        if number:
            begin = descent.steps[0].gradient - 0.5
            plot.line(begin, plot.y.low, begin, plot.y.high, css="reference")
        if 1 < len(lines) <= MAX_NAMED:
            plot.text(descent.steps[0].gradient - 0.5, plot.y.high, str(number), dy=4)
    limit = max(2, MAX_STEPS // len(lines))
    for name in names:
        for _, line in lines:
            points = [(gradient, losses[name]) for gradient, losses, _ in line if name in losses]
            plot.curve(evenly(points, limit), css="loss", style=colours[name])
    for _, line in lines if len(names) > 1 else ():
        plot.curve(evenly([(gradient, loss) for gradient, _, loss in line], limit), css="record")
    for descent, line in lines:
        reached = {gradient: loss for gradient, _, loss in line}
        for point in descent.points:
            title = f"trial {point.trial}: after gradient {point.gradient}, {descent.name}"
            plot.point(point.gradient, reached[point.gradient], css="mark front", title=title)
    return plot.render()


def _smooth(steps: Sequence[DescentStep]) -> list[tuple[int, dict[str, float], float]]:
    """Moving averages of a gradient descent's losses over WINDOW gradients.

    `steps` are the descent's gradients, each computed on a batch of samples. The result contains a tuple for each
    gradient:

    - the number of the gradient
    - for each objective, the average of its relative loss (divided by a reference loss, such as the mean loss of the
      baselines)
    - the average of the weighted sum of losses
    """

    def window(index: int) -> Sequence[DescentStep]:
        return steps[max(0, index + 1 - WINDOW) : index + 1]

    return [
        (
            step.gradient,
            {name: fmean(s.relative[name] for s in window(index)) for name in step.relative},
            fmean(s.loss for s in window(index)),
        )
        for index, step in enumerate(steps)
    ]


def _row(descent: DescentSeries, names: Sequence[str]) -> dict[str, Any]:
    first, last = descent.steps[:WINDOW], descent.steps[-WINDOW:]
    return {
        "name": descent.name,
        "preference": [number_text(descent.preference.get(name, 0.0)) for name in names],
        "num_steps": len(descent.steps),
        "first": fmean(step.loss for step in first),
        "last": fmean(step.loss for step in last),
        "trials": ", ".join(_ranges([point.trial for point in descent.points])),
        "failure": descent.failure,
    }


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    """Format ascending numbers as texts; adjacent numbers become one text such as "3 to 7"."""
    start = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            first, last = numbers[start], numbers[index - 1]
            yield str(first) if first == last else f"{first} to {last}"
            start = index
