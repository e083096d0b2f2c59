"""Objectives that are costs of the recipe, in rungs, files, tables and the report."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from search_spaces.objectives import hypervolume
from service.cli.tables import holdout_table, pareto_table
from service.resolved_study import ChainedSource, ResolvedStudy
from service.results.documents import pareto
from service.results.files import write_results
from service.results.load import run_record
from service.results.record import RunRecord
from service.results.report import render_report
from service.results.report.front import front_section
from service.results.selection import best_trial, costs_of, finalists
from service.results.series import CHARTS
from service.results.summary import summary
from service.types import Origin, TrialState
from tests.service.described import check_document
from tests.service.paths_study import MAX_LAYERS, OBJECTIVES, SIZE, paths_study


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return run_record(*paths_study(tmp_path_factory.mktemp("paths")))


@pytest.mark.parametrize("scheduler", ["hyperband", "asha", "racing", "successive_halving", "none"])
def test_rungs_have_exact_costs(tmp_path: Path, scheduler: Any) -> None:
    """Every rung has the exact costs of its recipe and no samples of them."""
    changes = {"rung_samples": ({"math": 36, "text": 36},)} if scheduler == "none" else {}
    store, study = paths_study(tmp_path, scheduler=scheduler, **changes)
    trials = store.trials(study)
    assert len({len(trial.read_recipe().layers) for trial in trials}) > 1
    for trial in trials:
        for rung in trial.rungs:
            assert rung.values["depth"] == len(trial.read_recipe().layers)
            assert rung.values["size"] == 100 + 10 * len(trial.read_recipe().layers)
            assert rung.standard_errors["depth"] == rung.standard_errors["size"] == 0.0
            assert set(rung.num_samples) == {"math", "text"}
    complete = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    assert complete
    assert all(trial.rungs and trial.values for trial in complete)


def test_costs_take_part_in_the_front_and_its_hypervolume(run: RunRecord) -> None:
    document = pareto(run)
    assert [o["name"] for o in document["objectives"]] == ["math", "depth", "text", "size"]
    front = [run.whole_trials[row["trial"]] for row in document["front"]]
    assert document["hypervolume"] == pytest.approx(hypervolume([costs_of(trial, OBJECTIVES) for trial in front]))
    assert front
    for trial in front:
        costs = costs_of(trial, OBJECTIVES)
        assert costs[1] == len(trial.read_recipe().layers) / MAX_LAYERS
        assert costs[3] == pytest.approx(SIZE.of(trial.read_recipe(), "parameters") / SIZE.most("parameters"))


def test_the_best_trial_is_that_of_the_scored_objectives(run: RunRecord) -> None:
    best = best_trial(run.trials, run.objectives)
    complete = [trial for trial in run.trials if trial.values]
    assert best is not None
    assert best.values["math"] + best.values["text"] == max(t.values["math"] + t.values["text"] for t in complete)
    assert "highest mean of math, text" in summary(run)["selection"]["best"]


def test_the_table_of_the_front_begins_with_the_lowest_costs(run: RunRecord) -> None:
    """The table has a limit, so the worst merges, such as those with the most parameters, must not come first."""
    small, large = [trial for trial in run.whole_trials if trial.values][:2]
    least, most = SIZE.most("parameters") / 2, SIZE.most("parameters")
    changed = (
        replace(small, values={"math": 0.5, "text": 0.5, "depth": 1.0, "size": least}),
        replace(large, values={"math": 0.51, "text": 0.5, "depth": 2.0, "size": most}),
    )
    section = front_section(replace(run, trials=changed))
    assert section is not None
    assert [row["point"].trial for row in section["rows"]] == [small.number, large.number]


def test_constraints_on_costs_are_compared_with_the_sources(run: RunRecord) -> None:
    (document,) = summary(run)["constraints"]
    assert (document["constraint"], document["bound"]) == ("depth <= base + 1", 5.0)
    assert document["kept_by"] == document["trials"] > 0


def test_the_held_out_table_has_the_costs_as_they_are(run: RunRecord) -> None:
    (first, *_) = finalists(run.trials, run.objectives)
    rows = {row["trial"]: row for row in summary(run)["holdout"]}
    assert rows[first.number]["values"]["depth"] == {
        "value": first.values["depth"],
        "ci95": [first.values["depth"]] * 2,
        "samples": 0,
        "standard_error": 0.0,
    }
    reference = summary(run)["holdout_reference"]
    assert reference is not None
    assert rows.keys() > {reference}
    for row in rows.values():
        difference = row["values"]["size"]["value"] - rows[reference]["values"]["size"]["value"]
        if row["trial"] != reference:
            assert row["differences"]["size"]["value"] == difference
    assert run.holdout_volume is not None
    assert run.holdout_volume.holdout.ci95[0] < run.holdout_volume.holdout.ci95[1]


def test_held_out_rows_say_how_fast_their_merges_were(run: RunRecord) -> None:
    rows = summary(run)["holdout"]
    digests = {trial.number: trial.recipe.digest for trial in run.trials}
    assert {row["trial"]: row["tokens_per_second"] for row in rows} == {
        row["trial"]: run.tokens_per_second[digests[row["trial"]]] for row in rows
    }
    assert min(run.tokens_per_second.values()) > 0
    # The report shows it where depths differ.
    of_row = next(trial for trial in run.whole_trials if trial.number == rows[0]["trial"])
    others = tuple(trial for trial in run.whole_trials if trial.number != of_row.number)
    for times, is_shown in ((1, False), (2, True)):
        recipe = replace(of_row.read_recipe(), layers=of_row.read_recipe().layers[:1] * 4 * times)
        flat = [replace(trial, recipe=replace(recipe, layers=recipe.layers[:4])) for trial in others]
        speeds = {recipe.digest: 1234.4}
        page = render_report(replace(run, trials=(replace(of_row, recipe=recipe), *flat), tokens_per_second=speeds))
        assert ('<th scope="col">tokens per second</th>' in page) is is_shown
        assert ("<td>1,234</td>" in page) is is_shown


def test_the_selection_bias_is_of_scored_objectives_only(run: RunRecord) -> None:
    document = summary(run)
    for name in ("selection_bias_by_objective", "selection_bias_against_baselines", "split_difference"):
        assert set(document[name]) - {"mean"} == {"math", "text"}
    page = render_report(run)
    (table,) = re.findall(r"<h3[^>]*>Selection bias of .*?</table>", page, re.DOTALL)
    assert re.findall(r'<th scope="row">(\w+)</th>', table) == ["math", "text", "mean"]


def test_files_tables_plots_and_report_show_them(run: RunRecord, tmp_path: Path) -> None:
    files = {file.name: file for file in write_results(tmp_path, run, report=render_report(run))}
    check_document(json.loads(files["summary.json"].read_text()), "summary")
    check_document(json.loads(files["pareto.json"].read_text()), "pareto")
    assert "depth" in files["report.html"].read_text()
    for chart in CHARTS.values():
        json.dumps(chart.document(run), default=vars)
    shown = io.StringIO()
    console = Console(file=shown, width=200)
    console.print(pareto_table(pareto(run)))
    console.print(holdout_table(summary(run)))
    assert "depth ↓" in shown.getvalue()
    assert " 140 " in shown.getvalue()  # four layers of ten parameters, and a hundred


def test_summary_counts_distinct_recipes(run: RunRecord) -> None:
    """The summary says how many recipes are distinct and how many samples were saved."""
    document = summary(run)
    proposed = [trial for trial in run.trials if trial.origin is Origin.SEARCH]
    assert document["recipes"]["proposed"] == len(proposed) == 20
    assert document["recipes"]["share"] == document["recipes"]["distinct"] / 20
    repeated = replace(run, trials=(*run.trials, replace(proposed[0], number=len(run.trials), samples_scored=0)))
    again = summary(repeated)
    assert again["recipes"] == {
        "proposed": 21,
        "distinct": document["recipes"]["distinct"],
        "share": again["recipes"]["distinct"] / 21,
    }
    samples = document["samples"]
    assert samples["saved"] == 1 - samples["scored"] / samples["full_budget"]
    assert document["lineage"] == {}
    assert document["trained"] == {}
    source = ChainedSource("c0ffee", "first", 7, "d1", "/somewhere")
    expert = ChainedSource("f00d", "fleet", 0, "d2", "/elsewhere", expert="math")
    sources = {"lfs": source, "mine": expert}
    chained = replace(
        run,
        study=replace(run.study, accepted=replace(ResolvedStudy.of(run.study), chained=sources).to_json()),
    )
    own = {"study": "c0ffee", "name": "first", "trial": 7, "recipe_digest": "d1"}
    assert summary(chained)["lineage"] == {"lfs": own}
    trained = {"finetune": "f00d", "name": "fleet", "expert": "math", "digest": "d2"}
    assert summary(chained)["trained"] == {"mine": trained}
    check_document(json.loads(json.dumps(summary(chained))), "summary")
