"""The result files of a run, each checked by its schema, and the choice of the best trial."""

from __future__ import annotations

import io
import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rich.console import Console
from rich.table import Table

from search_spaces.objectives import Objective, non_dominated_ranks
from service.cli.tables import holdout_table, pareto_table, search_line, trials_table, verification_line
from service.results.documents import pareto
from service.results.files import trials_jsonl, write_results
from service.results.record import EngineFigures, RunRecord, SearchFigures
from service.results.report import render_report
from service.results.selection import best_trial, costs_of, finalists, full_budget_trials, pareto_front
from service.results.series import CHARTS
from service.results.summary import summary
from service.schemas.json_schemas import schemas
from service.types import Origin, Steering, TrialState
from tests.service.described import check_document
from tests.service.synthetic_run import RUNGS, best_of, run_record
from workers.types import VerificationReport


@pytest.fixture(scope="module")
def run() -> RunRecord:
    return run_record()


def test_every_file_is_valid_under_its_schema(run: RunRecord, tmp_path: Path) -> None:
    files = {file.name: file for file in write_results(tmp_path, run, report="<html></html>")}
    assert sorted(files) == ["pareto.json", "report.html", "summary.json", "trials.jsonl"]
    for line in files["trials.jsonl"].read_text().splitlines():
        check_document(json.loads(line), "trial")
    check_document(json.loads(files["summary.json"].read_text()), "summary")
    check_document(json.loads(files["pareto.json"].read_text()), "pareto")
    check_document(run.whole_trials[20].read_recipe().to_json(), "recipe")
    check_document(
        {
            "name": "x",
            "models": {"base": "b", "experts": {"e": "d"}},
            "search_space": {"kind": "lfs"},
            "objectives": [{"name": "a", "task": "gsm8k", "metric": "exact_match"}],
        },
        "study",
    )


def test_all_that_a_recipe_can_say_is_in_its_schema(run: RunRecord) -> None:
    plain = run.whole_trials[20].read_recipe()
    vocabulary = {"tokens": {"<end>": {"token": "</s>", "force": True}}, "multiple_of": 64, "by_id": True}
    merge = replace(plain.head, base=plain.head.sources[0])
    recipe = replace(
        plain, tokenizer="union", vocabulary=vocabulary, stacks_experts=True, tensors={"a": merge}, head=merge
    )
    document, schema = recipe.to_json(), schemas()["recipe"]
    check_document(document, "recipe")
    assert set(document) <= set(schema["properties"])
    assert set(document["head"]) <= set(schema["$defs"]["MergeDocument"]["properties"])
    for key, wrong in (
        ("experts", "stack"),
        ("vocabulary", {"multiple_of": 0}),
        ("head", {**document["head"], "base": []}),
    ):
        with pytest.raises(jsonschema.ValidationError):
            check_document(document | {key: wrong}, "recipe")


@pytest.mark.parametrize("name", ["study", "trial", "summary", "pareto", "recipe"])
def test_schemas_are_schemas_and_reject_an_empty_document(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schemas()[name])
    with pytest.raises(jsonschema.ValidationError):
        check_document({}, name)


def test_files_of_a_study_that_has_not_scored_anything_are_valid(run: RunRecord, tmp_path: Path) -> None:
    empty = replace(run, trials=(), holdout=(), verifications=(), engine=EngineFigures(), samples_per_second=None)
    write_results(tmp_path, empty)
    document = json.loads((tmp_path / "summary.json").read_text())
    check_document(document, "summary")
    assert (document["best"], document["selection_bias"]) == (None, None)
    assert document["verification"]["status"] == "not verified"
    assert document["engine"]["swap_s"] == {"median": None, "p95": None, "max": None}
    assert json.loads((tmp_path / "pareto.json").read_text())["front"] == []


def test_writing_replaces_whole_files_and_leaves_nothing_else(run: RunRecord, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("old")
    write_results(tmp_path, run)
    first = (tmp_path / "summary.json").read_text()
    write_results(tmp_path, run)
    assert (tmp_path / "summary.json").read_text() == first
    assert sorted(os.listdir(tmp_path)) == ["pareto.json", "summary.json", "trials.jsonl"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "summary.json").stat().st_mode) == 0o666 & ~mask


def test_results_have_what_users_asked_for(run: RunRecord) -> None:
    """A trial that a user requested is in every result; an invalid one is in none that selects."""
    best = best_of(run)
    requested = replace(best, number=len(run.trials), origin=Origin.USER, bracket=None, label="by request")
    marked = replace(best, invalid="cut off")
    trials = (*(marked if trial.number == best.number else trial for trial in run.trials), requested)
    steered = replace(run, trials=trials, steering=((1.0, Steering("evaluate", "ann", "by a hair", trial=9)),))
    found = summary(steered)
    assert found["best"] is not None
    assert (found["best"]["trial"], found["best"]["origin"]) == (requested.number, "user")
    assert found["invalid"] == [{"trial": best.number, "reason": "cut off"}]
    front = [entry["trial"] for entry in pareto(steered)["front"]]
    assert (requested.number in front, best.number in front) == (True, False)
    report = render_report(steered)
    assert "Steered: evaluate trial 9 by ann (by a hair)." in report
    assert f"Trial {best.number} was marked as invalid: cut off." in report
    assert all(chart.json(steered) for chart in CHARTS.values())


def test_numbers_outside_json_are_refused(run: RunRecord, tmp_path: Path) -> None:
    """Numbers that JSON lacks are refused before a file is written."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_results(tmp_path / "out", replace(run, wall_clock_s=float("nan")))
    assert not (tmp_path / "out").exists()


def test_a_trial_line_holds_its_rungs_and_values(run: RunRecord) -> None:
    trial = next(t for t in run.trials if t.origin is Origin.SEARCH and t.state is TrialState.COMPLETE)
    line = json.loads(trials_jsonl(run).splitlines()[trial.number])
    assert line["number"] == trial.number
    assert line["recipe_digest"] == trial.recipe.digest
    assert [rung["samples"]["math"] for rung in line["rungs"]] == list(RUNGS)
    assert line["values"] == line["rungs"][-1]["values"] == dict(trial.values)


def test_summary_counts_trials_samples_and_failures(run: RunRecord) -> None:
    got: Any = summary(run)
    assert sum(got["trials"].values()) == len(run.trials) == 69
    assert got["trials"]["FAIL"] == len(got["failures"]) == 3
    assert got["failures"][0]["reason"].startswith("NaN in the logits")
    # 66 recipes that did not fail, 270 samples of 3 objectives each.
    assert got["samples"]["full_budget"] == 66 * 270 * 3
    assert got["samples"]["scored"] == sum(t.samples_scored for t in run.trials) < got["samples"]["full_budget"] / 2
    assert got["engine"]["swaps"] == 120
    assert got["engine"]["swap_s"]["median"] <= got["engine"]["swap_s"]["p95"] <= got["engine"]["swap_s"]["max"]


def test_summary_has_the_samples_used(run: RunRecord) -> None:
    """Samples used are those scored and those that steps are charged as."""
    got = summary(replace(run, search=replace(run.search, steps=2, charges={8: 48, 9: 144}), max_samples=90_000))
    assert got["samples"]["used"] == got["samples"]["scored"] + 192
    assert got["samples"]["limit"] == 90_000
    assert summary(run)["samples"]["limit"] is None


def test_full_budget_counts_recipes_once(run: RunRecord) -> None:
    """Full budget counts a recipe once, however often it was proposed."""
    twice = replace(run, trials=(*run.trials, replace(run.trials[0], number=100, samples_scored=0)))
    assert summary(twice)["samples"]["full_budget"] == summary(run)["samples"]["full_budget"]


def test_best_has_the_highest_mean_of_full_budget_trials_only(run: RunRecord) -> None:
    best = best_of(run)
    assert best.state is TrialState.COMPLETE
    means = {t.number: sum(t.values.values()) / 3 for t in full_budget_trials(run.trials)}
    assert means[best.number] == max(means.values())


def test_a_lucky_pruned_trial_is_neither_best_nor_on_the_front(run: RunRecord) -> None:
    pruned = next(trial for trial in run.trials if trial.state is TrialState.PRUNED)
    lucky = replace(pruned, rungs=(replace(pruned.rungs[0], values=dict.fromkeys(run.full_budget, 1.0)),))
    trials = (*run.trials, replace(lucky, number=900))
    assert best_trial(trials, run.objectives) == best_of(run)
    assert pareto_front(trials, run.objectives) == pareto_front(run.trials, run.objectives)


def test_finalists_are_the_front(run: RunRecord) -> None:
    """Finalists are the front, the best first, and at most 8."""
    objectives = run.objectives
    got = finalists(run.trials, objectives)
    assert got[0] == best_trial(run.trials, objectives)
    assert {t.number for t in got} <= {t.number for t in pareto_front(run.trials, objectives)}
    many = [
        replace(run.trials[1], number=100 + i, recipe=t.recipe, values={"math": i, "text": 20 - i, "lookup": 0.5})
        for i, t in enumerate(run.trials[:20])
    ]
    unit = tuple(replace(objective, range=(0, 20)) for objective in objectives)
    assert len(finalists(many, unit)) == 8


def test_best_of_equals_is_the_first(run: RunRecord) -> None:
    best = best_of(run)
    assert best_trial((replace(best, number=500), best), run.objectives) is best


def test_best_has_the_lowest_mean_cost(run: RunRecord) -> None:
    """Without accuracy objectives, the best trial has the lowest mean cost."""
    objectives = (Objective("loss", "perplexity", "minimize", (0, 100)),)
    trials = [
        replace(t, values={"loss": v}) for t, v in zip(full_budget_trials(run.trials), (30, 10, 20), strict=False)
    ]
    best = best_trial(trials, objectives)
    assert best is not None
    assert best.values == {"loss": 10}


def test_front_is_what_no_full_budget_trial_dominates(run: RunRecord) -> None:
    trials = full_budget_trials(run.trials)
    ranks = non_dominated_ranks([costs_of(trial, run.objectives) for trial in trials])
    expected = {trial.number for trial, rank in zip(trials, ranks, strict=True) if rank == 0}
    assert {trial.number for trial in pareto_front(trials, run.objectives)} == expected
    assert 1 < len(expected) < len(trials)


def test_front_of_one_objective_is_the_best_value() -> None:
    run = run_record(num_objectives=1)
    front = pareto_front(run.trials, run.objectives)
    best = max(t.values["math"] for t in full_budget_trials(run.trials))
    assert {t.values["math"] for t in front} == {best}


def test_front_holds_a_recipe_once(run: RunRecord) -> None:
    first = pareto_front(run.trials, run.objectives)[0]
    again = replace(first, number=900)
    assert 900 not in {trial.number for trial in pareto_front((*run.trials, again), run.objectives)}


def test_pareto_states_directions_and_a_reference_point(run: RunRecord) -> None:
    got = pareto(run)
    assert got["objectives"][0] == {"name": "math", "direction": "maximize", "metric": "exact_match"}
    assert got["reference_point"] == [1.1, 1.1, 1.1]
    assert 0.1 < got["hypervolume"] < 1.1**3
    assert {row["trial"] for row in got["front"]} == {t.number for t in pareto_front(run.trials, run.objectives)}


def test_selection_bias_is_search_mean_minus_held_out_mean(run: RunRecord) -> None:
    got: Any = summary(run)
    row = next(row for row in got["holdout"] if row["trial"] == got["best"]["trial"])
    on_search = sum(got["best"]["values"].values()) / 3
    assert got["selection_bias"] == pytest.approx(on_search - row["mean"]["value"])
    low, high = got["selection_bias_by_objective"]["math"]["ci95"]
    assert low < got["selection_bias_by_objective"]["math"]["value"] < high


def test_verification_adds_up_and_names_disagreement(run: RunRecord) -> None:
    got = summary(run)["verification"]
    assert (got["status"], got["trials"], got["samples"], got["equal"]) == ("within tolerance", 3, 144, 141)
    assert (got["tokens"], got["logprobs"], got["reason"]) == (930, 2100, None)
    assert len(got["differences"]) == 3
    broken = replace(run, verifications=(replace(run.verifications[0], num_beyond=1),))
    assert summary(broken)["verification"]["status"] == "disagreement"


def test_verification_of_nothing_is_not_verified_and_says_why(run: RunRecord) -> None:
    digest = run.verifications[0].recipe_digest
    nothing = VerificationReport(digest, 0, 0, 0.0, 0.3, (), 0)
    got = summary(replace(run, verifications=(nothing,) * 3))["verification"]
    assert got["status"] == "not verified"
    assert (got["trials"], got["trials_not_verified"], got["tolerance"]) == (0, 3, None)
    assert got["reason"] == "nothing was scored again by plain transformers"
    nothing = replace(nothing, reason="there is no memory for it")
    got = summary(replace(run, verifications=(nothing,) * 3))["verification"]
    assert (got["status"], got["reason"]) == ("not verified", "there is no memory for it")
    got = summary(replace(run, verifications=(run.verifications[0], nothing)))["verification"]
    assert (got["status"], got["trials"], got["trials_not_verified"]) == ("equal", 1, 1)
    assert got["reason"] == "there is no memory for it"
    off = replace(run, verifications=(), verification_reason="switched off in the study file")
    assert summary(off)["verification"]["reason"] == "switched off in the study file"


def test_terminal_says_what_was_verified_or_why_not(run: RunRecord) -> None:
    def line(changed: RunRecord) -> str:
        return verification_line(summary(changed)["verification"]).plain

    assert line(run) == (
        "verification:  within tolerance: 141 of 144 samples of 3 of 3 trials; 930 tokens and 2,100 log-probabilities "
        "compared"
    )
    nothing = VerificationReport("0" * 64, 0, 0, 0.0, 0.3, (), 0, reason="there is no memory for it")
    assert line(replace(run, verifications=(nothing,))) == "verification:  not verified: there is no memory for it"
    old = replace(run.verifications[0], num_tokens=0, num_without_tokens=9)
    assert "tokens of 9 samples not stored, texts compared" in line(replace(run, verifications=(old,)))


def test_terminal_names_the_searcher(run: RunRecord) -> None:
    """The terminal says which searcher proposed, why and at what cost."""

    def text(search: SearchFigures) -> str:
        return search_line(summary(replace(run, search=search))["search"]).plain

    scored = sum(trial.samples_scored for trial in run.trials if trial.origin is Origin.SEARCH)
    charges = {9: 7000, 10: 104}
    descent = SearchFigures("gradient", "there are references", ("gradients are used",), steps=52, charges=charges)
    assert text(descent).splitlines() == [
        "search:        gradient: there are references",
        "               gradients are used",
        f"               {scored:,} samples scored for its trials; 52 losses and gradients, charged as 7,104 samples",
    ]
    of_early_version = text(SearchFigures())
    assert of_early_version.splitlines()[0] == "search:        a searcher that is not stored"
    assert "charged" not in of_early_version


def shown(table: Table, width: int = 160) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(table)
    return stream.getvalue()


def test_tables_show_front_holdout_and_trials(run: RunRecord) -> None:
    document: Any = summary(run)
    best = document["best"]
    front = shown(pareto_table(pareto(run)))
    assert "math ↑" in front
    assert f"{best['values']['math']:.4g} ±" in front
    held_out = shown(holdout_table(document)).splitlines()
    rows = [line for line in held_out if "expert:" in line or "trial:" in line]
    assert len(rows) >= 4
    assert all("[" in row for row in rows)
    assert "minus best" in "\n".join(held_out)
    trials = shown(trials_table(map(json.loads, trials_jsonl(run).splitlines()), ["math", "text", "lookup"]))
    assert "fail: NaN in the logits" in trials
