"""What the report's charts show, as plain series of numbers for others to draw."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from search_spaces.objectives import Objective
from search_spaces.recipe import COMPONENTS, Merge
from service.results.files import RunRecord, pareto, summary
from service.results.report.recipe_picture import layer_runs, model_shares
from service.results.selection import accuracy_objectives, best_trial, full_budget_trials
from service.schemas.api import (
    BudgetPlot,
    FrontPlot,
    FrontPoint,
    HistoryPlot,
    HistorySeries,
    HoldoutPlot,
    MergePicture,
    RecipePlot,
)
from service.types import Origin, TrialRecord, TrialState

__all__ = ["PLOTS"]


def history(run: RunRecord) -> HistoryPlot:
    """Every finished rung by trial number, for the mean of the accuracy objectives and for each objective."""
    averaged = accuracy_objectives(run.objectives)
    series: list[HistorySeries] = []
    if len(averaged) > 1:
        series.append(_series(run.trials, averaged, Objective("mean", "mean", "maximize")))
    series += [_series(run.trials, (objective.name,), objective) for objective in run.objectives]
    return {
        "plot": "history",
        "series": series,
        "failed": [trial.number for trial in run.trials if trial.state is TrialState.FAIL],
    }


def _series(trials: Sequence[TrialRecord], names: Sequence[str], objective: Objective) -> HistorySeries:
    series: HistorySeries = {"name": objective.name, "direction": objective.direction, "points": [], "record": []}
    for trial in trials:
        for rung in trial.rungs:
            if not all(name in rung.values for name in names):
                continue
            value = statistics.fmean(rung.values[name] for name in names)
            is_full = trial.state is TrialState.COMPLETE and rung is trial.rungs[-1]
            series["points"].append(
                {
                    "trial": trial.number,
                    "label": trial.label,
                    "origin": trial.origin.value,
                    "rung": rung.rung,
                    "samples": min(rung.num_samples.get(name, 0) for name in names),
                    "value": value,
                    "is_full": is_full,
                }
            )
            record = series["record"]
            if is_full and (not record or objective.is_better(value, record[-1]["value"])):
                record.append({"trial": trial.number, "value": value})
    return series


def front(run: RunRecord) -> FrontPlot:
    """Trials at full budget, and which of them no other one beats."""
    document = pareto(run)
    numbers = {row["trial"] for row in document["front"]}
    best = best_trial(run.trials, run.objectives)
    points: list[FrontPoint] = [
        {
            "trial": trial.number,
            "label": trial.label,
            "origin": trial.origin.value,
            "values": dict(trial.values),
            "standard_errors": dict(trial.standard_errors),
            "is_on_front": trial.number in numbers,
            "is_best": trial is best,
        }
        for trial in full_budget_trials(run.trials)
    ]
    return {
        "plot": "front",
        "objectives": document["objectives"],
        "reference_point": document["reference_point"],
        "hypervolume": document["hypervolume"],
        "points": points,
    }


def holdout(run: RunRecord) -> HoldoutPlot:
    """Held-out estimates with their intervals; none before that stage."""
    return {"plot": "holdout", "rows": summary(run)["holdout"]}


def recipe(run: RunRecord) -> RecipePlot:
    """How the best trial is merged: every model's share, by runs of equal layers and by component."""
    best = best_trial(run.trials, run.objectives)
    if best is None:
        return {"plot": "recipe", "trial": None, "models": [], "embedding": None, "layers": [], "head": None}
    return {
        "plot": "recipe",
        "trial": best.number,
        "models": list(best.recipe.models),
        "embedding": _picture(best.recipe.embedding),
        "layers": [
            {
                "first": start,
                "last": stop - 1,
                "components": {name: _picture(layer.component(name)) for name in COMPONENTS},
            }
            for start, stop, layer in layer_runs(best.recipe.layers)
        ],
        "head": _picture(best.recipe.head),
    }


def _picture(merge: Merge) -> MergePicture:
    coefficients = {name: list(v) if isinstance(v, tuple) else v for name, v in merge.coefficients.items()}
    return {"method": merge.method, "shares": dict(model_shares(merge)), "coefficients": coefficients}


def budget(run: RunRecord) -> BudgetPlot:
    """How far the searched trials went, and what they cost beside scoring everything in full."""
    rungs: dict[int, list[int]] = {}
    for trial in run.trials:
        if trial.origin is Origin.SEARCH:
            for rung in trial.rungs:
                rungs.setdefault(rung.rung, []).append(max(rung.num_samples.values(), default=0))
    samples = summary(run)["samples"]
    return {
        "plot": "budget",
        "scored": samples["scored"],
        "full_budget": samples["full_budget"],
        "rungs": [{"rung": rung, "samples": max(sizes), "trials": len(sizes)} for rung, sizes in sorted(rungs.items())],
    }


PLOTS: dict[str, Callable[[RunRecord], Any]] = {
    "history": history,
    "front": front,
    "holdout": holdout,
    "recipe": recipe,
    "budget": budget,
}
