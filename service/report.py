"""report.html: one self-contained page about a run, made from stored records alone.

Works offline and without scripts, in light and dark, on a phone and on paper; beside every chart is its table. Large
studies are drawn from a sample of their points; the table says where the rest is.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from search_spaces.objectives import Costs, Objective, dominates
from service.charts import Bar, Interval, Legend, Plot, Scale, forest, legend, nice_scale, stacked_bar
from service.documents import EstimateDocument, HoldoutDocument, SummaryDocument
from service.progress import duration
from service.recipe_picture import recipe_picture
from service.results import RunRecord, pareto, summary
from service.selection import accuracy_objectives, best_trial, full_budget_trials, pareto_front
from service.statistics import Z
from service.tables import sample_count, sort_holdout
from service.types import Origin, TrialRecord, TrialState

__all__ = ["render_report"]

# A chart paints at most this many points, the most that stay distinguishable; a table lists this many rows.
MAX_POINTS = 1500
MAX_ROWS = 200
MAX_PAIRS = 10
MAX_FAILED = 300

SHAPES: dict[Origin, Any] = {
    Origin.SOURCE: "diamond",
    Origin.PUBLISHED: "square",
    Origin.USER: "square",
    Origin.SEARCH: "circle",
}


def render_report(run: RunRecord) -> str:
    """The page as one HTML document. Safe for any stage of a run: what is not there yet is said, not drawn."""
    document = summary(run)
    best = best_trial(run.trials, run.objectives)
    return _template().render(
        run=run,
        summary=document,
        best=best,
        best_name=_name(best) if best else "",
        headline=_headline(document),
        key_figures=_key_figures(run, document),
        created=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.study.created_at)),
        settings=_settings(run),
        holdout=_holdout(run, document),
        history=_history(run),
        front=_front(run),
        recipe=None
        if best is None
        else recipe_picture(best.recipe, experts=tuple(run.study.document.get("models", {}).get("experts", ()))),
        savings=_savings(run, document),
        duration=duration,
    )


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = _number
    environment.filters["interval"] = _interval
    environment.filters["share"] = lambda share: f"{share:.0%}"
    return environment.get_template("report.html.j2")


# -- texts -------------------------------------------------------------------------------------------------------------


def _number(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "n/a"
    text = f"{value:+.3f}" if signed else f"{value:.3f}" if abs(value) < 1000 else f"{value:,.0f}"
    return text.replace("-", "−")  # noqa: RUF001  a minus sign, as wide as a plus


def _interval(estimate: EstimateDocument | None, *, signed: bool = False) -> str:
    if estimate is None:
        return "n/a"
    low, high = (_number(limit, signed=signed) for limit in estimate["ci95"])
    return f"{_number(estimate['value'], signed=signed)} [{low}, {high}]"


def _name(trial: TrialRecord) -> str:
    return f"trial {trial.number}" if trial.origin is Origin.SEARCH else trial.label


def _row_name(row: HoldoutDocument) -> str:
    return f"trial {row['trial']}" if row["origin"] == Origin.SEARCH else row["label"]


def _score(row: HoldoutDocument) -> EstimateDocument | None:
    """What rows are ranked by: the mean, or the only objective's value."""
    return row["mean"] or (next(iter(row["values"].values())) if len(row["values"]) == 1 else None)


def _headline(document: SummaryDocument) -> str:
    """What the run found, in one or two sentences."""
    best = document["best"]
    if best is None:
        return "No trial has reached the full budget yet."
    name = f"Trial {best['trial']}" if best["origin"] == Origin.SEARCH else best["label"]
    if best["origin"] == Origin.SOURCE:
        name = f"No merge beat the single model {best['label']}: it"
    rows = document["holdout"]
    mine = next((row for row in rows if row["trial"] == best["trial"]), None)
    score = None if mine is None else _score(mine)
    if mine is None or score is None:
        values = ", ".join(f"{key} {_number(value)}" for key, value in best["values"].items())
        return f"{name} is best on search data: {values}. Nothing was scored on held-out data yet."
    kind = "a mean of " if len(mine["values"]) > 1 else ""
    rivals = [
        text
        for origin, what in ((Origin.SOURCE, "best single model"), (Origin.PUBLISHED, "best published recipe"))
        if origin != best["origin"] and (text := _rival(rows, origin, what, best["trial"]))
    ]
    end = f": {' and '.join(rivals).rstrip(',')} (95 % intervals, paired)." if rivals else "."
    return f"{name} reaches {kind}{_number(score['value'])} on held-out data{end}"


def _rival(rows: Sequence[HoldoutDocument], origin: Origin, what: str, best: int) -> str:
    """How far the best trial is from the best row of `origin`, with the paired interval turned to "best minus row"."""
    scored = [(score["value"], row) for row in rows if row["origin"] == origin and (score := _score(row))]
    rival = max((pair for pair in scored if pair[1]["trial"] != best), key=lambda pair: pair[0], default=None)
    if rival is None:
        return ""
    differences = rival[1]["differences"]
    difference = differences.get("mean") or next(iter(differences.values()), None)
    if difference is None:
        return ""
    value, low, high = -difference["value"], -difference["ci95"][1], -difference["ci95"][0]
    where = f"the {what}, {rival[1]['label']}"
    if low > 0:
        return f"{_number(value)} [{_number(low)}, {_number(high)}] above {where},"
    if high < 0:
        return f"{_number(-value)} [{_number(-high)}, {_number(-low)}] below {where},"
    limits = f"[{_number(low, signed=True)}, {_number(high, signed=True)}]"
    return f"not distinguishable from {where}, difference {limits},"


def _key_figures(run: RunRecord, document: SummaryDocument) -> list[tuple[str, str, str]]:
    """(what, figure, note) for the band under the headline."""
    figures = []
    best = document["best"]
    if best is not None:
        row = next((row for row in document["holdout"] if row["trial"] == best["trial"]), None)
        if row is not None and (score := _score(row)) is not None:
            low, high = score["ci95"]
            figures.append(("held-out", _number(score["value"]), f"95 % {_number(low)} to {_number(high)}"))
        if (bias := document["selection_bias"]) is not None:
            figures.append(("selection bias", _number(bias, signed=True), "search minus held-out"))
    counts = document["trials"]
    parts = [f"{counts[s]} {s.lower()}" for s in ("COMPLETE", "PRUNED", "RUNNING", "FAIL") if counts.get(s)]
    figures.append(("trials", f"{len(run.trials):,}", ", ".join(parts)))
    samples = document["samples"]
    note = "nothing reused"
    if samples["full_budget"]:
        note = f"{samples['scored'] / samples['full_budget']:.0%} of scoring all in full"
    figures.append(("samples scored", f"{samples['scored']:,}", note))
    speed = f"{samples['per_second']:.0f} samples/s" if samples["per_second"] else ""
    figures.append(("wall-clock", duration(run.wall_clock_s), speed))
    return figures


def _settings(run: RunRecord) -> list[tuple[str, str]]:
    document = run.study.document
    space, search, fidelity = (document.get(key, {}) for key in ("search_space", "search", "fidelity"))
    rungs = {rung.rung: sample_count(rung.num_samples) for trial in run.trials for rung in trial.rungs}
    found = [
        ("space", space.get("kind")),
        ("search", search.get("algorithm")),
        ("scheduler", fidelity.get("scheduler")),
        ("rungs", " / ".join(rungs[rung] for rung in sorted(rungs)) + " samples" if rungs else None),
        ("seed", search.get("seed")),
        ("version", run.version),
    ]
    return [(name, str(value)) for name, value in found if value not in (None, "")]


# -- held-out data -----------------------------------------------------------------------------------------------------


def _holdout(run: RunRecord, document: SummaryDocument) -> dict[str, Any] | None:
    rows = sort_holdout(document["holdout"])
    if not rows:
        return None
    best = document["best"]["trial"] if document["best"] else None
    names = list(dict.fromkeys(name for row in rows for name in row["values"]))

    def chart(name: str, *, is_mean: bool) -> dict[str, Any]:
        estimates = [(row, row["mean"] if is_mean else row["values"].get(name)) for row in rows]
        intervals = [
            Interval(
                _row_name(row),
                estimate["value"],
                low=estimate["ci95"][0],
                high=estimate["ci95"][1],
                css="best" if row["trial"] == best else row["origin"],
                title=f"{_row_name(row)}: {_interval(estimate)}, {estimate['samples']} samples",
            )
            for row, estimate in estimates
            if estimate is not None
        ]
        ends = [end for interval in intervals for end in (interval.low, interval.high)]
        mine = next((estimate for row, estimate in estimates if estimate and row["trial"] == best), None)
        drawn = forest(
            intervals,
            nice_scale(ends, bounds=_bounds(run, name)),
            label=f"{name} on held-out data with 95 % intervals, {len(intervals)} rows; values are in the table below",
            reference=mine["value"] if mine else None,
        )
        return {"name": name, "svg": drawn}

    has_mean = len(names) > 1 and any(row["mean"] for row in rows)
    return {
        "names": names,
        "has_mean": has_mean,
        "rows": [{"name": _row_name(row), "is_best": row["trial"] == best, **row} for row in rows],
        "difference_key": "mean" if has_mean else names[0],
        "mean_chart": chart("mean", is_mean=True) if has_mean else None,
        "charts": [chart(name, is_mean=False) for name in names],
        "legend": legend(
            [
                Legend("best on search data", "dot best"),
                Legend("finalist", "dot search"),
                Legend("base or expert", "dot source"),
                Legend("published recipe", "dot published"),
            ]
        ),
    }


def _bounds(run: RunRecord, name: str) -> tuple[float, float] | None:
    if name == "mean":
        return (0.0, 1.0)
    return next((objective.range or (0.0, 1.0) for objective in run.objectives if objective.name == name), None)


# -- history -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Mark:
    """One finished rung of one trial, for one panel of the history."""

    trial: TrialRecord
    rung: int
    value: float
    samples: int
    is_full: bool


def _history(run: RunRecord) -> dict[str, Any] | None:
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
        marks = list(_marks(run, names, num_rungs))
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


def _marks(run: RunRecord, names: Sequence[str], num_rungs: int) -> Iterator[_Mark]:
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
    return f"{_name(mark.trial)}: {_number(mark.value)} on {mark.samples} samples"


def _thinned(marks: Sequence[_Mark], plot: Plot, limit: int) -> list[_Mark]:
    """At most `limit` marks that look like all of them: one per cell of a fine grid first, then evenly fewer."""
    if len(marks) <= limit:
        return list(marks)
    cells = {
        (mark.rung, round(plot.x.at(mark.trial.number) * 300), round(plot.y.at(mark.value) * 100)): mark
        for mark in reversed(marks)
    }
    kept = sorted(cells.values(), key=lambda mark: (mark.trial.number, mark.rung))
    return [kept[i * len(kept) // limit] for i in range(limit)] if len(kept) > limit else kept


def _integer_scale(last: int) -> Scale:
    scale = nice_scale((0, max(last, 1)), count=8)
    return Scale(0, max(last, 1), max(1.0, scale.step))


def _rung_style(rung: int, num_rungs: int) -> str:
    share = 100 if num_rungs == 1 else round(100 * rung / (num_rungs - 1))
    return f"--rung:{share}%"


# -- Pareto front ------------------------------------------------------------------------------------------------------


def _front(run: RunRecord) -> dict[str, Any] | None:
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
        "rows": [{"name": _name(trial), "is_best": trial is best, "trial": trial} for trial in rows[:MAX_ROWS]],
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
            intervals.append(Interval(_name(trial), value, ends[0], ends[1], css=css))
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
        title = f"{_name(trial)}: {x.name} {_number(values[0])}, {y.name} {_number(values[1])}"
        plot.point(*values, css=f"mark {css}", shape=SHAPES[trial.origin], title=title, size=6 if trial is best else 4)
        if trial.origin is Origin.SOURCE:
            plot.text(*values, trial.label.removeprefix("expert:"), dy=-11)
        elif trial is best:
            plot.text(*values, f"best, {_name(trial)}", css="note strong", dy=-11)
    return plot.render()


def _thinned_trials(trials: Sequence[TrialRecord], kept: set[int]) -> list[TrialRecord]:
    special = [trial for trial in trials if trial.number in kept or trial.origin is not Origin.SEARCH]
    rest = [trial for trial in trials if trial.number not in kept and trial.origin is Origin.SEARCH]
    limit = max(0, MAX_POINTS - len(special))
    if len(rest) > limit:
        rest = [rest[i * len(rest) // limit] for i in range(limit)]
    return special + rest


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


# -- cost --------------------------------------------------------------------------------------------------------------


def _savings(run: RunRecord, document: SummaryDocument) -> dict[str, Any]:
    """What multi-fidelity saved, and how far trials went."""
    samples = document["samples"]
    reached: dict[int, int] = {}
    sizes: dict[int, str] = {}
    for trial in run.trials:
        if trial.origin is Origin.SEARCH:
            for rung in trial.rungs:
                reached[rung.rung] = reached.get(rung.rung, 0) + 1
                sizes[rung.rung] = sample_count(rung.num_samples)
    most = max(reached.values(), default=1)
    scored_share = samples["scored"] / samples["full_budget"] if samples["full_budget"] else None
    return {
        "share": scored_share,
        "bar": stacked_bar([Bar("scored", min(1.0, scored_share), "background:var(--accent)")])
        if scored_share is not None
        else "",
        "rungs": [
            {
                "samples": sizes[rung],
                "trials": reached[rung],
                "bar": stacked_bar([Bar("trials", reached[rung] / most, "background:var(--accent)")]),
            }
            for rung in sorted(reached)
        ],
    }
