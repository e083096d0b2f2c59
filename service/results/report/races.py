"""Report section on racing: the rungs that each proposed trial reached, and the rule that stopped it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from service.results.record import RunRecord
from service.results.report.charts import Legend, Plot, legend
from service.results.report.marks import NUM_COLOURS, evenly
from service.results.report.scales import Levels, Scale, nice_scale
from service.results.report.texts import number_text
from service.results.series.races import RaceEntry, races

__all__ = ["races_section"]


# A chart draws at most this many trials.
MAX_TRIALS = 500


def races_section(run: RunRecord) -> dict[str, Any] | None:
    """Build the data of the report's section on racing, a scheduler that stops a trial when others are better.

    Returns None if all samples of a trial are scored at once, so that nothing can be stopped earlier. Also returns None
    as long as no trial has been compared with others.
    """
    plot = races(run)
    looked = [entry for entry in plot.trials if entry.looks]
    if len(plot.samples) < 2 or not looked:
        return None
    rules = list(dict.fromkeys(entry.rule for entry in plot.trials if entry.end == "stopped" and entry.rule))
    colours = {rule: f"stroke:var(--c{(index + 1) % NUM_COLOURS})" for index, rule in enumerate(rules)}
    entries = [Legend("scored at the full budget", "mark front")]
    entries += [Legend(f"stopped: {rule}", "stop", "line", style=colours[rule]) for rule in rules]
    if any(entry.end == "failed" for entry in plot.trials):
        entries.append(Legend("failed", "failed", "cross"))
    if any(entry.end == "running" for entry in plot.trials):
        entries.append(Legend("not decided yet", "mark published"))
    stopped = [entry for entry in looked if entry.end == "stopped"]
    return {
        "chart": _chart(evenly(plot.trials, MAX_TRIALS), plot.samples, colours),
        "legend": legend(entries),
        "num_trials": len(plot.trials),
        "num_stopped": len(stopped),
        "num_finished": sum(entry.end == "finished" for entry in plot.trials),
        "num_saved": sum(plot.samples[-1] - entry.looks[-1].samples for entry in stopped),
        "num_left_out": max(0, len(plot.trials) - MAX_TRIALS),
        "rows": _rows(plot.trials, plot.samples),
    }


def _chart(shown: Sequence[RaceEntry], samples: Sequence[int], colours: dict[str, str]) -> Markup:
    first, last = shown[0].trial, shown[-1].trial
    step = max(1.0, nice_scale((first, max(last, first + 1)), count=8).step)
    plot = Plot(
        Scale(first - 1, last + 1, step),
        Levels(0, len(samples) + 0.3, 1, names=tuple(f"{count:,}" for count in samples)),
        label="number of samples that each proposed trial was scored on, and the rule that stopped it",
        x_title="trial",
        y_title="samples of each objective",
        height=70 + 44 * len(samples),
    )
    half = min(0.38, (last - first + 2) / 120)
    for entry in shown:
        level = float(entry.looks[-1].rung + 1) if entry.looks else 0.0
        values = ", ".join(
            f"{number_text(look.value)} on {look.samples}" for look in entry.looks if look.value is not None
        )
        what = (
            entry.rule if entry.end == "stopped" else entry.end
        )  # the reasons of failures have a section of their own
        title = f"trial {entry.trial}: {values or 'no result'}; {what}"
        plot.curve([(entry.trial, 0.0), (entry.trial, level)], css="stem")
        if entry.end == "stopped":
            style = colours.get(entry.rule or "", "")
            plot.bar(entry.trial - half, entry.trial + half, level, css="stop", style=style, title=title)
        elif entry.end == "failed":
            plot.point(entry.trial, level, css="failed", shape="cross", title=title)
        else:
            css = "mark front" if entry.end == "finished" else "mark published"
            plot.point(entry.trial, level, css=css, title=title, size=3.5)
    return plot.render()


def _rows(entries: Sequence[RaceEntry], samples: Sequence[int]) -> list[dict[str, Any]]:
    """Build a table row for each rung, with the numbers of trials that were scored and stopped at this rung.

    A rung is a number of samples at which trials are compared. `entries` has, for each proposed trial, the rungs that
    it reached and the rule that stopped it. `samples` has the number of samples of each objective at each rung. A row
    has the number of samples, the number of scored trials, the number of stopped trials, and the number that each
    stopping rule stopped.
    """
    rows = []
    for rung, count in enumerate(samples):
        here = [entry for entry in entries if entry.looks and entry.looks[-1].rung == rung and entry.end == "stopped"]
        rows.append(
            {
                "samples": f"{count:,}",
                "looked": sum(any(look.rung == rung for look in entry.looks) for entry in entries),
                "stopped": len(here),
                "rules": "; ".join(f"{rule}: {n}" for rule, n in Counter(entry.rule for entry in here).items()),
            }
        )
    return rows
