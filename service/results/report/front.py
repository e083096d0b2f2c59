"""The section on the Pareto front: a chart of each pair of objectives, or of the only one the best trials as bars."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from search_spaces.objectives import Costs, Objective, dominates
from service.results.files import RunRecord, pareto
from service.results.report.charts import Interval, Legend, Plot, forest, legend, nice_scale
from service.results.report.marks import MAX_POINTS, MAX_ROWS, SHAPES, evenly
from service.results.report.texts import number_text, trial_name
from service.results.selection import best_trial, full_budget_trials, pareto_front
from service.results.statistics import Z
from service.types import Origin, TrialRecord

__all__ = ["front_section"]

# Charts of at most this many pairs of objectives.
MAX_PAIRS = 10


def front_section(run: RunRecord) -> dict[str, Any] | None:
    """What the template draws of the trials at full budget; None before there is one."""
    trials = full_budget_trials(run.trials)
    if not trials:
        return None
    front = pareto_front(run.trials, run.objectives)
    best = best_trial(run.trials, run.objectives)
    document = pareto(run)
    rows = sorted(front, key=lambda trial: -statistics.fmean(trial.values.values()))
    if len(run.objectives) == 1:
        charts = [{"name": run.objectives[0].name, "svg": _ranking_chart(run, trials, best)}]
        entries = []
    else:
        pairs = list(itertools.combinations(run.objectives, 2))[:MAX_PAIRS]
        charts = [
            {"name": f"{y.name} against {x.name}", "svg": _pair_chart(trials, front, best, x, y)} for x, y in pairs
        ]
        entries = [
            Legend("on the front", "mark front"),
            Legend("dominated", "mark dominated"),
            Legend("base or expert", "mark source", "diamond"),
            Legend("published recipe", "mark published", "square"),
            Legend("front of this pair", "frontline", "line"),
        ]
    return {
        "charts": charts,
        "legend": legend(entries) if entries else "",
        "names": [objective.name for objective in run.objectives],
        "rows": [{"name": trial_name(trial), "is_best": trial is best, "trial": trial} for trial in rows[:MAX_ROWS]],
        "hypervolume": document["hypervolume"],
        "reference": document["reference_point"][0],
        "num_trials": len(trials),
    }


def _ranking_chart(run: RunRecord, trials: Sequence[TrialRecord], best: TrialRecord | None) -> Markup:
    """One objective: the ten best proposals, every source and published recipe, as bars with intervals."""
    objective = run.objectives[0]
    ranked = sorted(trials, key=lambda trial: (objective.cost(trial.values[objective.name]), trial.number))
    proposed = [trial.number for trial in ranked if trial.origin is Origin.SEARCH][:10]
    low, high = objective.range or (0.0, 1.0)
    intervals = []
    for trial in ranked:
        if trial.origin is not Origin.SEARCH or trial.number in proposed:
            value, error = trial.values[objective.name], Z * trial.standard_errors.get(objective.name, 0.0)
            css = "best" if trial is best else trial.origin.value
            ends = max(low, value - error), min(high, value + error)
            intervals.append(Interval(trial_name(trial), value, ends[0], ends[1], css=css))
    scale = nice_scale([low, *(interval.high for interval in intervals)], bounds=(low, high))
    label = f"{objective.name} of the best trials, sources and published recipes with 95 % intervals"
    return forest(intervals, scale, label=label, with_bars=True)


def _pair_chart(
    trials: Sequence[TrialRecord],
    front: Sequence[TrialRecord],
    best: TrialRecord | None,
    x: Objective,
    y: Objective,
) -> Markup:
    def ends(trial: TrialRecord, objective: Objective) -> tuple[float, float]:
        value, error = trial.values[objective.name], Z * trial.standard_errors.get(objective.name, 0.0)
        low, high = objective.range or (0.0, 1.0)
        return max(low, value - error), min(high, value + error)

    on_front = {trial.number for trial in front}
    shown = _thinned_trials(trials, on_front)
    # Wide intervals of marks at the rim would shrink the rest: the scales hold every interval of the front only.
    scales = [
        nice_scale(
            [trial.values[o.name] for trial in shown] + [end for trial in front for end in ends(trial, o)],
            bounds=o.range or (0.0, 1.0),
        )
        for o in (x, y)
    ]
    plot = Plot(
        *scales,
        label=f"{y.name} against {x.name} of the trials at full budget; those on the front with 95 % intervals",
        x_title=f"{x.name} {'→' if x.direction == 'maximize' else '←'}",
        y_title=f"{'↑' if y.direction == 'maximize' else '↓'} {y.name}",
        height=320,
    )
    plot.steps(_pair_front(shown, x, y), css="frontline")
    for trial in sorted(shown, key=lambda trial: (trial.number in on_front, trial.origin is not Origin.SEARCH)):
        values = trial.values[x.name], trial.values[y.name]
        if trial.number in on_front:
            (left, right), (bottom, top) = ends(trial, x), ends(trial, y)
            plot.line(left, values[1], right, values[1], css="error")
            plot.line(values[0], bottom, values[0], top, css="error")
        css = trial.origin.value if trial.origin is not Origin.SEARCH else "dominated"
        if trial.number in on_front and trial.origin is Origin.SEARCH:
            css = "front"
        title = f"{trial_name(trial)}: {x.name} {number_text(values[0])}, {y.name} {number_text(values[1])}"
        plot.point(*values, css=f"mark {css}", shape=SHAPES[trial.origin], title=title, size=6 if trial is best else 4)
        if trial.origin is Origin.SOURCE:
            plot.text(*values, trial.label.removeprefix("expert:"), dy=-11)
        elif trial is best:
            plot.text(*values, f"best, {trial_name(trial)}", css="note strong", dy=-11)
    return plot.render()


def _thinned_trials(trials: Sequence[TrialRecord], kept: set[int]) -> list[TrialRecord]:
    special = [trial for trial in trials if trial.number in kept or trial.origin is not Origin.SEARCH]
    rest = [trial for trial in trials if trial.number not in kept and trial.origin is Origin.SEARCH]
    limit = max(0, MAX_POINTS - len(special))
    return special + evenly(rest, limit)


def _pair_front(trials: Sequence[TrialRecord], x: Objective, y: Objective) -> list[tuple[float, float]]:
    """The trials that none beats in both objectives, along x from its best end: a staircase of what is attained."""
    costs: dict[Costs, tuple[float, float]] = {}
    for trial in trials:
        values = trial.values[x.name], trial.values[y.name]
        costs[(x.cost(values[0]), y.cost(values[1]))] = values
    front: list[Costs] = []
    for point in sorted(costs):
        if not front or not dominates(front[-1], point):
            front.append(point)
    return [costs[point] for point in front]
