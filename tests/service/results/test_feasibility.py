"""Trials that satisfy the constraints come before others, and results name the violated constraints."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from rich.table import Table

from search_spaces.constraints import parse_constraint
from search_spaces.objectives import Objective
from service.cli.tables import holdout_table, pareto_table, trials_table
from service.results.documents import pareto, trial_documents
from service.results.feasibility import constraint_documents, total_violation, violations
from service.results.files import trials_jsonl
from service.results.record import RunRecord
from service.results.report import render_report
from service.results.selection import best_trial, criteria, finalists, full_budget_trials, held_out, pareto_front
from service.results.series.history import history
from service.results.summary import summary
from service.types import Origin, TrialRecord, TrialState
from tests.service.described import check_document
from tests.service.results.test_holdout import recipe
from tests.service.synthetic_run import run_record


def rendered(table: Table) -> str:
    stream = io.StringIO()
    Console(file=stream, width=400).print(table)
    return stream.getvalue()


def objectives(*constraints: str) -> tuple[Objective, ...]:
    parsed = [parse_constraint(text) for text in constraints]
    return tuple(
        Objective(name, "exact_match", "maximize", None, tuple(c for c in parsed if c.objective == name))
        for name in ("math", "text")
    )


def trial(number: int, math: float, text: float, label: str = "") -> TrialRecord:
    origin = Origin.SOURCE if label else Origin.SEARCH
    values = {"math": math, "text": text}
    return TrialRecord(number, origin, label or f"trial {number}", TrialState.COMPLETE, recipe(number), values=values)


TRIALS = (
    trial(0, 0.4, 0.6, "base"),
    trial(1, 0.8, 0.3, "expert:math"),
    trial(2, 0.3, 0.9, "expert:text"),
    trial(3, 0.9, 0.5),
    trial(4, 0.7, 0.6),
    trial(5, 0.6, 0.7),
)


def selected(*constraints: str) -> tuple[int, list[int]]:
    """Numbers of the best trial and of the front's trials under these constraints."""
    found = objectives(*constraints)
    best = best_trial(TRIALS, found)
    assert best is not None
    assert finalists(TRIALS, found)[0] is best
    return best.number, [t.number for t in pareto_front(TRIALS, found)]


def test_the_best_of_equal_trials_is_on_the_front() -> None:
    """Trials that tie in accuracy are compared by the other objectives, so that the best one is held out."""
    of_layers = Objective("depth", "layers", "minimize", (0.0, 20.0), cost_of_recipe="layers")
    objectives = (Objective("math", "exact_match", "maximize"), of_layers)
    trials = [
        replace(trial(number, 0.0, 0.0), values={"math": math, "depth": depth})
        for number, math, depth in ((0, 0.3, 10.0), (5, 0.6, 14.0), (9, 0.6, 12.0))
    ]
    best = best_trial(trials, objectives)
    assert best is not None
    assert best.number == 9
    assert [each.number for each in finalists(trials, objectives)] == [9, 0]


def test_bounds_of_an_invalid_source_stay() -> None:
    """A constraint that is relative to a source model holds also if the trial of this model is marked as invalid."""
    found = objectives("text >= base")
    invalid = [replace(each, invalid="cut off") if each.label == "base" else each for each in TRIALS]
    best = best_trial(invalid, found)
    assert best is not None
    assert best.number == selected("text >= base")[0] == 4
    assert best_trial(TRIALS, objectives()) is not best
    # The driver holds out the trials whose results are shown.
    assert finalists(invalid, found)[0] in held_out(invalid, found)
    valid = [each for each in invalid if each.invalid is None]
    sources = [each for each in invalid if each.origin is Origin.SOURCE]
    (shown,) = constraint_documents(found, valid, sources)
    (before,) = constraint_documents(found, TRIALS, TRIALS)
    assert shown["bound"] == before["bound"] is not None
    assert shown["kept_by"] == before["kept_by"] - 1  # without the base itself


def test_the_best_and_the_front_keep_to_all_constraints() -> None:
    assert selected() == (3, [2, 3, 4, 5])
    assert selected("text >= 0.6") == (4, [2, 4, 5])
    assert selected("text >= base") == (4, [2, 4, 5])
    assert selected("text >= base + 0.05", "math >= 0.5") == (5, [5])
    assert selected("math >= best expert") == (3, [3])
    assert selected("text <= expert:math + 0.25") == (3, [3])


def test_where_none_keeps_to_all_the_least_violation_comes_first() -> None:
    """Trial 5 lacks 0.25 of text, trial 4 0.35, trial 3 0.45 of it."""
    assert selected("text >= 0.95", "math >= 0.55") == (5, [5])


def test_violation_has_the_metrics_unit() -> None:
    """A violation is shown in the metric's unit and summed as shares of the ranges."""
    loss = Objective("loss", "word_perplexity", "minimize", (0.0, 40.0), (parse_constraint("loss <= base + 1"),))
    base = replace(TRIALS[0], values={"loss": 10.0})
    assert violations({"loss": 15.0}, [loss], [base]) == {"loss <= base + 1": 4.0}
    assert violations({"loss": 11.0}, [loss], [base]) == {}
    assert total_violation({loss.constraints[0]: 4.0}, [loss]) == pytest.approx(0.1)
    assert violations({"loss": 15.0}, [loss], []) == {}  # the base is not scored yet
    assert violations({"loss": 15.0}, [loss], [base], values_of=lambda _: {}) == {}  # nor on these samples


def test_the_best_expert_is_the_one_in_that_objective() -> None:
    found = violations({"math": 0.7, "text": 0.85}, objectives("math >= best expert", "text >= best expert"), TRIALS)
    assert found == {"math >= best expert": pytest.approx(0.1), "text >= best expert": pytest.approx(0.05)}


def test_the_criteria_of_a_study_name_its_constraints() -> None:
    rules = criteria(objectives("text >= base - 0.01"))
    assert "of trials that keep to text >= base - 0.01" in rules.best
    assert rules.promotion.startswith("trials that keep to text >= base - 0.01 first, by non-dominated rank")
    assert "keep to" not in criteria(objectives()).best


# What is shown.


@pytest.fixture(scope="module")
def run() -> RunRecord:
    made = run_record(num_trials=12)
    base = next(trial for trial in made.trials if trial.label == "base")
    constraints = (parse_constraint("text >= base + 0.05"), parse_constraint("text >= 0.5"))
    objectives = tuple(replace(o, constraints=constraints) if o.name == "text" else o for o in made.objectives)
    assert base.values["text"] + 0.05 < 1
    return replace(made, objectives=objectives)


def test_documents_mark_what_is_violated(run: RunRecord) -> None:
    base = next(trial for trial in run.trials if trial.label == "base")
    documents = trial_documents(run)
    marked = {document["number"]: document["violations"] for document in documents}
    assert marked[base.number]["text >= base + 0.05"] == pytest.approx(0.05)
    full = full_budget_trials(run.trials)
    assert len(full) > 1
    for found in full:
        lack = round(base.values["text"] + 0.05 - found.values["text"], 12)
        assert ("text >= base + 0.05" in marked[found.number]) == (lack > 0)
    unscored = [document for document in documents if not document["values"]]
    assert unscored
    assert not any(document["violations"] for document in unscored)
    lines = trials_jsonl(run).splitlines()
    assert len(lines) == len(documents)
    for line in lines:
        check_document(json.loads(line), "trial")
    found, front = (json.loads(json.dumps(document)) for document in (summary(run), pareto(run)))
    check_document(found, "summary")
    check_document(front, "pareto")
    first, second = found["constraints"]
    assert first["bound"] == pytest.approx(base.values["text"] + 0.05)
    kept = [t for t in full_budget_trials(run.trials) if "text >= base + 0.05" not in marked[t.number]]
    assert (first["constraint"], first["kept_by"]) == ("text >= base + 0.05", len(kept))
    assert (second["bound"], second["trials"]) == (0.5, len(full_budget_trials(run.trials)))
    assert found["best"]["violations"] == {}
    row = next(row for row in found["holdout"] if row["trial"] == base.number)
    assert row["violations"]["text >= base + 0.05"] == pytest.approx(0.05)  # of the base on the same data
    assert [o.get("constraints") for o in front["objectives"]] == [None, ["text >= base + 0.05", "text >= 0.5"], None]


def test_people_are_told_what_is_violated(run: RunRecord) -> None:
    names = [objective.name for objective in run.objectives]
    assert "violates text >= base + 0.05 by 0.05" in rendered(trials_table(trial_documents(run), names))
    assert "trial 0 violates text >= base + 0.05 by 0.05" in rendered(holdout_table(summary(run)))
    assert "violates" not in rendered(pareto_table(pareto(run)))
    page = render_report(run)
    assert "violates text &gt;= base + 0.05 by 0.05" in page
    assert "text &gt;= base + 0.05, text &gt;= 0.5" in page
    assert "No trial keeps to all constraints" not in page


def test_a_trial_that_violates_a_constraint_sets_no_record(run: RunRecord) -> None:
    kept = {document["number"] for document in trial_documents(run) if not document["violations"]}
    assert history(run).series
    for series in history(run).series:
        assert series.record
        assert {point.trial for point in series.record} <= kept
    free = replace(run, objectives=tuple(replace(o, constraints=()) for o in run.objectives))
    assert any({p.trial for p in series.record} - kept for series in history(free).series)


def test_a_study_in_which_no_trial_keeps_to_all_says_so(run: RunRecord) -> None:
    impossible = (parse_constraint("text >= 0.999"),)
    none = replace(
        run, objectives=tuple(replace(o, constraints=impossible if o.name == "text" else ()) for o in run.objectives)
    )
    best = summary(none)["best"]
    assert best is not None
    assert list(best["violations"]) == ["text >= 0.999"]
    assert "No trial keeps to all constraints." in render_report(none)
    assert "no trial keeps to all constraints" in " ".join(rendered(pareto_table(pareto(none))).split())
