"""The section on the history: every finished rung of every trial by its number, and the best so far."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from search_spaces.objectives import Objective
from service.cli.tables import sample_count
from service.results.files import RunRecord
from service.results.report.charts import Legend, Plot, Scale, legend, nice_scale
from service.results.report.marks import MAX_POINTS, MAX_ROWS, SHAPES, evenly
from service.results.report.texts import number_text, trial_name
from service.results.selection import accuracy_objectives, full_budget_trials
from service.types import Origin, TrialRecord, TrialState

__all__ = ["history_section"]

# A chart paints at most this many crosses for failed trials.
MAX_FAILED = 300


@dataclass(frozen=True)
class _Mark:
    """One finished rung of one trial, for one panel of the history."""

    trial: TrialRecord
    rung: int
    value: float
    samples: int
    is_full: bool


def history_section(run: RunRecord) -> dict[str, Any] | None:
    """What the template draws of the search; None before the first rung is finished."""
    num_rungs = max((rung.rung for trial in run.trials for rung in trial.rungs), default=-1) + 1
    if num_rungs == 0:
        return None
    averaged = accuracy_objectives(run.objectives)
    panels: list[tuple[str, tuple[str, ...], Objective]] = []
    if len(averaged) > 1:
        panels.append(("mean", averaged, Objective("mean", "mean", "maximize")))
    panels += [(objective.name, (objective.name,), objective) for objective in run.objectives]

    failed = [trial.number for trial in run.trials if trial.state is TrialState.FAIL]
    charts: list[dict[str, Any]] = []
    for title, names, objective in panels:
        marks = list(_marks(run, names))
        height = 300 if not charts else 210
        charts.append({"name": title, "svg": _history_chart(marks, failed, title, objective, num_rungs, height)})
    sizes = {rung.rung: sample_count(rung.num_samples) for trial in run.trials for rung in trial.rungs}
    entries = [
        Legend(f"rung of {sizes.get(rung, 0)} samples", "mark", style=_rung_style(rung, num_rungs))
        for rung in range(num_rungs)
    ]
    entries += [
        Legend("base or expert", "mark source", "diamond"),
        Legend("published recipe", "mark published", "square"),
        Legend("best so far at full budget", "record", "line"),
    ]
    if failed:
        entries.append(Legend("failed", "failed", "cross"))
    trials = sorted(full_budget_trials(run.trials), key=lambda trial: trial.number)
    return {
        "charts": charts,
        "legend": legend(entries),
        "names": [objective.name for objective in run.objectives],
        "rows": trials[:MAX_ROWS],
        "num_rows_left": max(0, len(trials) - MAX_ROWS),
        "num_left_out": max(0, sum(len(trial.rungs) for trial in run.trials) - MAX_POINTS),
    }


def _marks(run: RunRecord, names: Sequence[str]) -> Iterator[_Mark]:
    for trial in sorted(run.trials, key=lambda trial: trial.number):
        for rung in trial.rungs:
            if all(name in rung.values for name in names):
                yield _Mark(
                    trial=trial,
                    rung=rung.rung,
                    value=statistics.fmean(rung.values[name] for name in names),
                    samples=max((rung.num_samples.get(name, 0) for name in names), default=0),
                    is_full=trial.state is TrialState.COMPLETE and rung is trial.rungs[-1],
                )


def _history_chart(
    marks: Sequence[_Mark], failed: Sequence[int], title: str, objective: Objective, num_rungs: int, height: int
) -> Markup:
    last = max(itertools.chain((mark.trial.number for mark in marks), failed), default=1)
    plot = Plot(
        _integer_scale(last),
        nice_scale((mark.value for mark in marks), bounds=objective.range or (0.0, 1.0)),
        label=f"{title} of every trial by number, one point per finished rung, with the best so far at full budget",
        x_title="trial",
        height=height,
    )
    record: list[tuple[float, float]] = []
    for mark in marks:
        if mark.is_full and (not record or objective.is_better(mark.value, record[-1][1])):
            record.append((mark.trial.number, mark.value))
    for number in failed[:: len(failed) // MAX_FAILED + 1]:
        plot.point(number, plot.y.low, css="failed", shape="cross", title=f"trial {number} failed")
    ordinary = [mark for mark in marks if mark.trial.origin is Origin.SEARCH]
    special = [mark for mark in marks if mark.trial.origin is not Origin.SEARCH]
    for mark in sorted(_thinned(ordinary, plot, MAX_POINTS - min(len(special), MAX_POINTS // 2)), key=lambda m: m.rung):
        plot.point(
            mark.trial.number,
            mark.value,
            css="mark",
            style=_rung_style(mark.rung, num_rungs),
            title=_mark_title(mark),
            size=3.5,
        )
    if record:
        plot.steps([*record, (last, record[-1][1])], css="record")
    for mark in special[: MAX_POINTS // 2]:
        css = f"mark {mark.trial.origin.value}"
        plot.point(mark.trial.number, mark.value, css=css, shape=SHAPES[mark.trial.origin], title=_mark_title(mark))
    return plot.render()


def _mark_title(mark: _Mark) -> str:
    return f"{trial_name(mark.trial)}: {number_text(mark.value)} on {mark.samples} samples"


def _thinned(marks: Sequence[_Mark], plot: Plot, limit: int) -> list[_Mark]:
    """At most `limit` marks that look like all of them: one per cell of a fine grid first, then evenly fewer."""
    if len(marks) <= limit:
        return list(marks)
    cells = {
        (mark.rung, round(plot.x.at(mark.trial.number) * 300), round(plot.y.at(mark.value) * 100)): mark
        for mark in reversed(marks)
    }
    kept = sorted(cells.values(), key=lambda mark: (mark.trial.number, mark.rung))
    return evenly(kept, limit)


def _integer_scale(last: int) -> Scale:
    scale = nice_scale((0, max(last, 1)), count=8)
    return Scale(0, max(last, 1), max(1.0, scale.step))


def _rung_style(rung: int, num_rungs: int) -> str:
    share = 100 if num_rungs == 1 else round(100 * rung / (num_rungs - 1))
    return f"--rung:{share}%"
