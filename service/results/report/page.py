"""The report as a whole: what its template is given, section by section."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from service.cli.progress import duration
from service.cli.tables import sample_count
from service.results.files import RunRecord, summary
from service.results.report.charts import Bar, stacked_bar
from service.results.report.front import front_section
from service.results.report.history import history_section
from service.results.report.holdout import holdout_section
from service.results.report.recipe_picture import recipe_picture
from service.results.report.texts import headline, key_figures, number_text, trial_name
from service.results.selection import best_trial
from service.schemas.files import SummaryDocument
from service.types import Origin

__all__ = ["render_report"]

TEMPLATES = Path(__file__).parent


def render_report(run: RunRecord) -> str:
    """The page as one HTML document. Safe for any stage of a run: what is not there yet is said, not drawn."""
    document = summary(run)
    best = best_trial(run.trials, run.objectives)
    return _template().render(
        run=run,
        summary=document,
        best=best,
        best_name=trial_name(best) if best else "",
        headline=headline(document),
        key_figures=key_figures(run, document),
        created=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.study.created_at)),
        settings=_settings(run),
        holdout=holdout_section(run, document),
        history=history_section(run),
        front=front_section(run),
        recipe=None
        if best is None
        else recipe_picture(best.recipe, experts=tuple(run.study.document.get("models", {}).get("experts", ()))),
        savings=_savings(run, document),
        duration=duration,
    )


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number_text
    environment.filters["share"] = lambda share: f"{share:.0%}"
    return environment.get_template("report.html.j2")


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
