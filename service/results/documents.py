"""JSON documents shared by result files, report and API: trials, sample counts, held-out results, Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from search_spaces.directions import direction_of
from search_spaces.objectives import REFERENCE_COST, Objective, hypervolume
from search_spaces.spaces import SPACES
from service.results.benchmarks import (
    AttackedValue,
    BenchmarkColumn,
    BenchmarkRow,
    BenchmarkTable,
    BenchmarkTest,
    JudgedValue,
)
from service.results.feasibility import Values, violations
from service.results.holdout import FrontVolume
from service.results.record import RunRecord
from service.results.selection import costs_of
from service.schemas.files import (
    AttackDocument,
    BenchmarkColumnDocument,
    BenchmarkRowDocument,
    BenchmarksDocument,
    BenchmarkTestDocument,
    EstimateDocument,
    HoldoutDocument,
    JudgedDocument,
    ObjectiveDocument,
    OverlapDocument,
    ParetoDocument,
    RemovedResponsesDocument,
    SamplesDocument,
    TrialDocument,
    VolumeDocument,
)
from service.store.documents import Overlap, RemovedResponses
from service.types import Comparison, Estimate, JobRecord, Origin, TrialRecord, TrialResult, TrialState

__all__ = [
    "benchmarks_document",
    "estimate_document",
    "estimate_documents",
    "has_directions",
    "holdout_documents",
    "objective_document",
    "overlap_documents",
    "pareto",
    "samples_document",
    "trial_document",
    "trial_documents",
]


def trial_document(
    trial: TrialRecord,
    *,
    objectives: Sequence[Objective] = (),
    sources: Sequence[TrialResult] = (),
    has_shares: bool = False,
) -> TrialDocument:
    """Describe a trial as JSON, as result files and the API show it.

    Args:
        trial: The trial.
        objectives: Objectives of the study.
        sources: Trials of the study, or at least the trials of its source models, because bounds of constraints may be
            relative to values of source models.
        has_shares: Whether to add each expert's share of the merge, a number from 0 to 1; for the search space m3, in
            which an expert has one share for the whole model.
    """
    document: TrialDocument = {
        "number": trial.number,
        "origin": trial.origin.value,
        "label": trial.label,
        "state": trial.state.value,
        "reason": trial.reason,
        "invalid": trial.invalid,
        "rival": trial.rival,
        "bracket": trial.bracket,
        "configuration": None if trial.configuration is None else dict(trial.configuration),
        "recipe_digest": trial.recipe.digest,
        "rungs": [
            {
                "rung": rung.rung,
                "samples": dict(rung.num_samples),
                "values": dict(rung.values),
                "standard_errors": dict(rung.standard_errors),
            }
            for rung in trial.rungs
        ],
        "values": dict(trial.values),
        "standard_errors": dict(trial.standard_errors),
        "violations": violations(trial.values, objectives, sources),
        "samples_scored": trial.samples_scored,
        "samples_reused": trial.samples_reused,
        "timings_s": dict(trial.timings_s),
    }
    if has_shares:
        direction = direction_of(trial.read_recipe())
        document["shares"] = None if direction is None else dict(direction.shares)
    return document


def trial_documents(run: RunRecord) -> list[TrialDocument]:
    """Describe all trials of a run as JSON, in the order of their numbers."""
    trials = sorted(run.whole_trials, key=lambda trial: trial.number)
    has_shares = has_directions(run.study)
    return [
        trial_document(trial, objectives=run.objectives, sources=run.sources, has_shares=has_shares) for trial in trials
    ]


def has_directions(study: JobRecord) -> bool:
    """Whether the study's search space gives each expert a single share for the whole model, as the space m3 does.

    A share is an expert's part of the sum of task vectors that is added to the base. The shares of all experts are
    called the direction of a merge.
    """
    kind = study.document.get("search_space", {}).get("kind", "")
    return kind in SPACES and SPACES[kind](kind=kind).has_directions


def samples_document(run: RunRecord) -> SamplesDocument:
    """Describe as JSON how many samples a run's trials took, and how many samples all recipes would take in full.

    The second number counts every recipe once, also if several trials have it, and leaves out failed trials.
    """
    recipes = {trial.recipe.digest for trial in run.trials if trial.state is not TrialState.FAIL}
    scored = sum(trial.samples_scored for trial in run.trials)
    full_budget = len(recipes) * sum(run.full_budget.values())
    removed = run.removed_responses
    return {
        "scored": scored,
        "reused": sum(trial.samples_reused for trial in run.trials),
        "full_budget": full_budget,
        "saved": 1 - scored / full_budget if full_budget else None,
        "per_second": run.samples_per_second,
        "used": scored + run.search.step_samples,
        "limit": run.max_samples,
        "stored_bytes": {
            "values": run.stored_bytes.values,
            "texts": run.stored_bytes.texts if removed is None else 0,
        },
        "responses_removed": None if removed is None else removed_document(removed),
    }


def removed_document(removed: RemovedResponses) -> RemovedResponsesDocument:
    """Describe as JSON the removal of a study's model responses: its time, and the numbers of samples and bytes."""
    return {"time": removed.removed_at, "samples": removed.num_samples, "bytes": removed.num_bytes}


def estimate_document(estimate: Estimate) -> EstimateDocument:
    """Describe an estimate as JSON: value, 95 % interval, standard error and number of samples."""
    return {
        "value": estimate.value,
        "ci95": list(estimate.ci95),
        "standard_error": estimate.standard_error,
        "samples": estimate.samples,
    }


def estimate_documents(estimates: Mapping[str, Estimate]) -> dict[str, EstimateDocument]:
    """Describe several estimates as JSON, keyed by name: value, 95 % interval, standard error and number of samples."""
    return {name: estimate_document(estimate) for name, estimate in estimates.items()}


def holdout_documents(run: RunRecord) -> list[HoldoutDocument]:
    """Describe the results of a run's trials on holdout data as JSON, one document for each scored trial."""
    values = {row.trial: {name: e.value for name, e in row.values.items()} for row in run.holdout}
    trials = {trial.number: trial for trial in run.trials if trial.number in values}
    return [_holdout_document(row, run, trials.get(row.trial), values) for row in run.holdout]


def _holdout_document(
    row: Comparison, run: RunRecord, trial: TrialResult | None, held_out: Mapping[int, Values]
) -> HoldoutDocument:
    return {
        "label": row.label,
        "trial": row.trial,
        "origin": (Origin.SEARCH if trial is None else trial.origin).value,
        "values": estimate_documents(row.values),
        "mean": None if row.mean is None else estimate_document(row.mean),
        "violations": violations(
            {name: estimate.value for name, estimate in row.values.items()},
            run.objectives,
            run.sources,
            values_of=lambda source: held_out.get(source.number, {}),
        ),
        "differences": estimate_documents(row.differences),
        "tokens_per_second": None if trial is None else run.tokens_per_second.get(trial.recipe.digest),
    }


def benchmarks_document(table: BenchmarkTable) -> BenchmarksDocument:
    """Describe the results of trials on benchmarks as JSON; `table` has the results."""
    return {
        "benchmarks": [_column_document(column) for column in table.columns],
        "groups": {group: list(names) for group, names in table.groups.items()},
        "reference": table.reference,
        "rows": [_row_document(row) for row in table.rows],
        "tests": [_test_document(test) for test in table.tests],
        "failures": [{"trial": trial, "benchmark": name, "reason": reason} for trial, name, reason in table.failures],
    }


def _column_document(column: BenchmarkColumn) -> BenchmarkColumnDocument:
    facts = column.facts
    return {
        "name": facts.name,
        "metric": facts.metric,
        "direction": facts.direction,
        "range": list(facts.objective.bounds),
        "group": column.group,
        "samples": facts.num_samples,
        "subtasks": dict(facts.subtasks),
        "categories": {name: list(members) for name, members in facts.categories.items()},
        "attack": None if facts.attack is None else {**facts.attack, "template": facts.template},
        "judge": None if facts.judge is None else {**facts.judge, "reference_length": facts.reference_length},
    }


def _row_document(row: BenchmarkRow) -> BenchmarkRowDocument:
    return {
        "trial": row.trial,
        "label": row.label,
        "origin": row.origin.value,
        "values": estimate_documents(row.values),
        "averages": estimate_documents(row.averages),
        "subtasks": {name: estimate_documents(parts) for name, parts in row.subtasks.items()},
        "differences": estimate_documents(row.differences),
        "average_differences": estimate_documents(row.average_differences),
        "attacks": {name: _attack_document(attacked) for name, attacked in row.attacks.items()},
        "judged": {name: _judged_document(judged) for name, judged in row.judged.items()},
    }


def _attack_document(attacked: AttackedValue) -> AttackDocument:
    return {
        "value": estimate_document(attacked.value),
        "drop": None if attacked.drop is None else estimate_document(attacked.drop),
        "template": attacked.found.template,
        "queries": attacked.found.num_queries,
        "is_cut": attacked.found.is_cut,
    }


def _judged_document(value: JudgedValue) -> JudgedDocument:
    judged = value.judged
    return {
        "models": list(judged.models),
        "length": value.length,
        "agreement": judged.agreement,
        "first": judged.first,
        "without_verdict": judged.num_without_verdict,
    }


def _test_document(test: BenchmarkTest) -> BenchmarkTestDocument:
    return {
        "name": test.name,
        "is_average": test.is_average,
        "against": "source" if test.origin is Origin.SOURCE else "published",
        "rival": test.rival,
        "label": test.label,
        "differences": [
            {"trial": trial, "is_better": trial in test.better, **estimate_document(difference)}
            for trial, difference in test.differences.items()
        ],
    }


def overlap_documents(overlaps: Sequence[Overlap]) -> list[OverlapDocument]:
    """Describe as JSON which share of the items of holdout data and benchmarks is also in the search data.

    `overlaps` has one measured overlap for each holdout entry and each benchmark.
    """
    return [
        {
            "section": overlap.section,
            "name": overlap.name,
            "items": overlap.num_items,
            "exact": overlap.num_exact,
            "overlapping": overlap.num_ngrams,
            "share": overlap.share,
            "by_objective": dict(overlap.by_objective),
            "examples": list(overlap.examples),
            "is_allowed": overlap.is_allowed,
        }
        for overlap in overlaps
    ]


def pareto(run: RunRecord) -> ParetoDocument:
    """Build the content of pareto.json: the Pareto front of a run, with its hypervolume."""
    return {
        "objectives": [objective_document(objective) for objective in run.objectives],
        "reference_point": [REFERENCE_COST] * len(run.objectives),
        "hypervolume": hypervolume([costs_of(trial, run.objectives) for trial in run.front]),
        "holdout_hypervolume": _volume_document(run.holdout_volume),
        "front": [
            {
                "trial": trial.number,
                "label": trial.label,
                "origin": trial.origin.value,
                "values": dict(trial.values),
                "standard_errors": dict(trial.standard_errors),
                "violations": violations(trial.values, run.objectives, run.sources),
                "recipe_digest": trial.recipe.digest,
            }
            for trial in run.front
        ],
    }


def objective_document(objective: Objective) -> ObjectiveDocument:
    """Build the JSON document that describes an objective, including its range and its constraints (if any)."""
    document: ObjectiveDocument = {
        "name": objective.name,
        "direction": objective.direction,
        "metric": objective.metric,
    }
    if objective.range is not None:
        document["range"] = list(objective.range)
    if objective.constraints:
        document["constraints"] = [constraint.text for constraint in objective.constraints]
    return document


def _volume_document(volume: FrontVolume | None) -> VolumeDocument | None:
    if volume is None:
        return None
    return {**estimate_document(volume.holdout), "trials": list(volume.trials), "search": volume.search}
