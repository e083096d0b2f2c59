"""The whole report: rendered from the data of all sections."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from service.results.format import duration, sample_count, search_sentences
from service.results.record import RunRecord
from service.results.report.benchmarks import benchmarks_section
from service.results.report.charts import Bar, stacked_bar
from service.results.report.coefficients import coefficients_picture
from service.results.report.descents import descents_section
from service.results.report.directions import directions_section
from service.results.report.front import front_section
from service.results.report.history import history_section
from service.results.report.holdout import holdout_section
from service.results.report.hypervolume import hypervolume_picture
from service.results.report.path_picture import path_picture
from service.results.report.policies import policies_section
from service.results.report.races import races_section
from service.results.report.recipe_picture import recipe_picture
from service.results.report.sample_pictures import pictures_section
from service.results.report.texts import headline, key_figures, number_text, trial_name
from service.results.series.budget import budget
from service.results.summary import summary
from service.schemas.files import ConstraintDocument
from service.store.documents import RemovedResponses
from service.types import Origin

__all__ = ["render_report", "template"]

TEMPLATES = Path(__file__).parent


def render_report(run: RunRecord) -> str:
    """Render the report of a study as one HTML document.

    The report can be rendered at any stage of the run; a part whose data are not available yet is replaced by a
    sentence.
    """
    document = summary(run)
    best = run.best
    return template("report.html.j2").render(
        run=run,
        summary=document,
        best=best,
        best_name=trial_name(best) if best else "",
        headline=headline(document),
        key_figures=key_figures(run, document),
        created=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.study.created_at)),
        settings=_settings(run, document["constraints"]),
        search=search_sentences(document["search"]),
        holdout=holdout_section(run, best=best.number if best else None),
        benchmarks=benchmarks_section(run, best=best.number if best else None),
        pictures=pictures_section(run),
        history=history_section(run),
        descents=descents_section(run),
        policies=policies_section(run),
        races=races_section(run),
        directions=directions_section(run),
        front=front_section(run),
        hypervolume=hypervolume_picture(run),
        recipe=None
        if best is None
        else recipe_picture(best.read_recipe(), experts=tuple(run.study.document.get("models", {}).get("experts", ()))),
        coefficients=coefficients_picture(run),
        path=path_picture(run),
        savings=_savings(run),
        duration=duration,
    )


@cache
def template(name: str) -> jinja2.Template:
    """Load the Jinja template with the file name `name` from the folder of this module.

    The template can use the report's filters `number` and `share`, which format numbers.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number_text
    environment.filters["share"] = lambda share: f"{share:.0%}"
    return environment.get_template(name)


def _removed(removed: RemovedResponses) -> str:
    return f"of {removed.num_samples:,} samples removed on {date.fromtimestamp(removed.removed_at).isoformat()}"


def _settings(run: RunRecord, constraints: Sequence[ConstraintDocument]) -> list[tuple[str, str]]:
    document = run.study.document
    space, search, fidelity = (document.get(key, {}) for key in ("search_space", "search", "fidelity"))
    rungs = {rung: sample_count(samples) for rung, samples in run.rung_sizes.items()}
    found = [
        ("space", space.get("kind")),
        ("search", run.search.algorithm or search.get("algorithm")),
        ("surrogate", search.get("smac", {}).get("surrogate") if run.search.algorithm == "smac" else None),
        ("scheduler", fidelity.get("scheduler")),
        ("rungs", " / ".join(rungs[rung] for rung in sorted(rungs)) + " samples" if rungs else None),
        ("seed", search.get("seed")),
        ("constraints", ", ".join(row["constraint"] for row in constraints)),
        ("responses", "" if run.removed_responses is None else _removed(run.removed_responses)),
        ("version", run.version),
    ]
    return [(name, str(value)) for name, value in found if value not in (None, "")]


def _savings(run: RunRecord) -> dict[str, Any]:
    """Build the data of the report's part on samples saved by stopping trials at low rungs (small numbers of samples).

    A rung is a number of samples at which trials are compared. The result contains these keys:

    - "share": the number of scored samples, divided by the number that it takes to score every recipe on all samples;
      None if the divisor is not known
    - "bar": a bar for the share; "" without a share
    - "rungs": for each rung the number of samples, the number of trials that reached the rung, and a bar
    """
    plot = budget(run)
    searched = (trial for trial in run.trials if trial.origin is Origin.SEARCH)
    sizes = {rung.rung: rung.num_samples for trial in searched for rung in trial.rungs}
    share = plot.scored / plot.full_budget if plot.full_budget else None
    most = max((rung.trials for rung in plot.rungs), default=1)
    return {
        "share": share,
        "bar": "" if share is None else _bar("scored", min(1.0, share)),
        "rungs": [
            {
                "samples": sample_count(sizes[rung.rung]),
                "trials": rung.trials,
                "bar": _bar("trials", rung.trials / most),
            }
            for rung in plot.rungs
        ],
    }


def _bar(label: str, share: float) -> Markup:
    return stacked_bar([Bar(label, share, "background:var(--accent)")])
