"""The summary of a study: results, costs and the outcome of checks."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Literal

import numpy as np

from service.resolved_study import ChainedSource, ResolvedStudy
from service.results.documents import (
    benchmarks_document,
    estimate_document,
    estimate_documents,
    holdout_documents,
    overlap_documents,
    samples_document,
)
from service.results.feasibility import constraint_documents, violations
from service.results.finding import criterion, finding_text
from service.results.phases import phases
from service.results.record import EngineFigures, RunRecord
from service.results.selection import accuracy_objectives, criteria, full_budget_trials
from service.results.statistics import Z, independent_difference
from service.schemas.files import (
    EngineDocument,
    FindingDocument,
    LineageDocument,
    PolicyDocument,
    RecipesDocument,
    SearchDocument,
    StartDocument,
    SummaryDocument,
    TrainedDocument,
    VerificationDocument,
    WarmStartDocument,
)
from service.store.documents import PolicyStart, WarmStart
from service.types import Estimate, Origin, TrialResult, TrialState
from workers.types import VerificationReport

__all__ = ["summary", "verification_document"]


def summary(run: RunRecord) -> SummaryDocument:
    """Build the content of summary.json: a run's best trial, its results on holdout data, its cost and its checks."""
    best = run.best
    bias = _search_minus_holdout(run, best)
    rules = criteria(run.objectives)
    averaged = [bias[name].value for name in accuracy_objectives(run.objectives) if name in bias]
    states = Counter(trial.state for trial in run.trials)
    return {
        "study": run.study.name,
        "state": run.study.state.value,
        "reason": run.study.reason,
        "steering": [
            {
                "time": time_s,
                "action": asked.action,
                "trial": asked.trial,
                "user": asked.user,
                "reason": asked.reason,
                "changes": {name: list(values) for name, values in (asked.changes or {}).items()},
            }
            for time_s, asked in run.steering
        ],
        "seed": int(run.study.document.get("search", {}).get("seed", 0)),
        "version": run.version,
        "trials": {state.value: states[state] for state in TrialState if states[state]},
        "search": _search_document(run),
        "samples": samples_document(run),
        "recipes": _recipes_document(run),
        "lineage": _lineage_documents(ResolvedStudy.of(run.study).chained),
        "trained": _trained_documents(ResolvedStudy.of(run.study).chained),
        "wall_clock_s": run.wall_clock_s,
        "engine": _engine_document(run.engine),
        "phases": phases(run),
        "best": None
        if best is None
        else {
            "trial": best.number,
            "label": best.label,
            "origin": best.origin.value,
            "recipe_digest": best.recipe.digest,
            "values": dict(best.values),
            "violations": violations(best.values, run.objectives, run.sources),
        },
        "selection": {"best": rules.best, "promotion": rules.promotion, "difference": rules.difference},
        "constraints": constraint_documents(run.objectives, full_budget_trials(run.trials), _scored_sources(run)),
        "finding": _finding_document(run, best),
        "holdout": holdout_documents(run),
        "holdout_reference": run.holdout_reference,
        "holdout_failures": [{"trial": trial, "reason": reason} for trial, reason in run.holdout_failures],
        "selection_bias": statistics.fmean(averaged) if averaged else None,
        "selection_bias_by_objective": estimate_documents(bias),
        "selection_bias_against_baselines": estimate_documents(run.selection_bias),
        "split_difference": estimate_documents(run.split_difference),
        "benchmarks": benchmarks_document(run.benchmarks),
        "contamination": overlap_documents(run.contamination),
        "verification": verification_document(run.verifications, run.verification_reason),
        "invalid": [
            {"trial": trial.number, "reason": trial.invalid} for trial in run.trials if trial.invalid is not None
        ],
        "failures": [
            {"trial": trial.number, "reason": trial.reason or "no reason was stored"}
            for trial in run.trials
            if trial.state is TrialState.FAIL
        ],
        "warnings": [
            {"trial": warning.trial, "objective": warning.objective, "message": warning.message}
            for warning in run.warnings
        ],
    }


def _scored_sources(run: RunRecord) -> list[TrialResult]:
    return [trial for trial in run.sources if trial.state is TrialState.COMPLETE]


def _recipes_document(run: RunRecord) -> RecipesDocument:
    first: dict[str, int] = {}
    for trial in sorted(run.trials, key=lambda trial: trial.number):
        first.setdefault(trial.recipe.digest, trial.number)
    proposed = [trial for trial in run.trials if trial.origin is Origin.SEARCH]
    distinct = sum(first[trial.recipe.digest] == trial.number for trial in proposed)
    return {
        "proposed": len(proposed),
        "distinct": distinct,
        "share": distinct / len(proposed) if proposed else None,
    }


def _lineage_documents(chained: Mapping[str, ChainedSource]) -> dict[str, LineageDocument]:
    return {
        alias: {"study": own.study, "name": own.name, "trial": own.trial, "recipe_digest": own.recipe_digest}
        for alias, own in chained.items()
        if own.expert is None  # not an expert that a fine-tuning has trained
    }


def _trained_documents(chained: Mapping[str, ChainedSource]) -> dict[str, TrainedDocument]:
    return {
        alias: {"finetune": own.study, "name": own.name, "expert": own.expert, "digest": own.recipe_digest}
        for alias, own in chained.items()
        if own.expert is not None
    }


def _search_document(run: RunRecord) -> SearchDocument:
    search = run.search
    return {
        "algorithm": search.algorithm,
        "reason": search.reason,
        "notes": list(search.notes),
        "start": None if search.start is None else _start_document(search.start),
        "warm_start": None if search.warm_start is None else _warm_start_document(search.warm_start),
        "steps": search.steps,
        "step_samples": search.step_samples,
        "trial_samples": sum(trial.samples_scored for trial in run.trials if trial.origin.is_searched),
    }


def _start_document(start: PolicyStart) -> StartDocument:
    policies: list[PolicyDocument] = [
        {"iteration": policy.iteration, "digest": policy.digest} for policy in start.policies
    ]
    return {"study": start.study, "name": start.name, "policies": policies}


def _warm_start_document(start: WarmStart) -> WarmStartDocument:
    return {
        "study": start.study,
        "name": start.name,
        "rungs": start.rungs,
        "trials": start.num_trials,
        "observations": start.num_observations,
    }


def _engine_document(engine: EngineFigures) -> EngineDocument:
    swap_s = engine.swap_s
    return {
        "starts": engine.starts,
        "kinds": list(engine.kinds),
        "busy_fraction": engine.busy_fraction,
        "swaps": len(swap_s),
        "swap_s": {
            "median": float(np.median(swap_s)) if swap_s else None,
            "p95": float(np.percentile(swap_s, 95)) if swap_s else None,
            "max": max(swap_s) if swap_s else None,
        },
        "not_checked": {"samples": engine.samples_not_checked, "reasons": list(engine.skipped)},
    }


def _finding_document(run: RunRecord, best: TrialResult | None) -> FindingDocument:
    scored = [objective for objective in run.objectives if objective.cost_of_recipe is None]
    objectives = [o for o in scored if all(o.name in row.values for row in run.holdout)]
    return {
        "text": finding_text(run.rival_tests, objectives, best=best, was_scored=bool(run.holdout)),
        "criterion": criterion(objectives),
        "tests": [
            {
                "against": "source" if test.origin is Origin.SOURCE else "published",
                "rival": test.rival,
                "label": test.label,
                "differences": [
                    {"trial": trial, "is_better": trial in test.better, **estimate_document(difference)}
                    for trial, difference in test.differences.items()
                ],
            }
            for test in run.rival_tests
        ],
    }


def _search_minus_holdout(run: RunRecord, best: TrialResult | None) -> dict[str, Estimate]:
    """Estimate, for each objective, the value of the trial `best` on search data minus its value on holdout data.

    The two values are independent estimates, because they are of different samples of the `run`. Objectives that count
    the recipe's layers or parameters are left out, because their values are the same on both kinds of data. The result
    is empty if `best` is None, or if the trial has no result on holdout data.
    """
    row = next((row for row in run.holdout if best is not None and row.trial == best.number), None)
    if row is None or best is None:
        return {}
    bias = {}
    costs = {objective.name for objective in run.objectives if objective.cost_of_recipe is not None}
    for name, value in best.values.items():
        if name in row.values and name not in costs:
            error = best.standard_errors.get(name, 0.0)
            if error is None:  # a single sample: as uncertain as the range allows
                low, high = next(o.bounds for o in run.objectives if o.name == name)
                error = (high - low) / 2
            on_search = Estimate(value, error, run.full_budget.get(name, 0), (value - Z * error, value + Z * error))
            bias[name] = independent_difference(on_search, row.values[name])
    return bias


def verification_document(reports: Sequence[VerificationReport], reason: str | None) -> VerificationDocument:
    """Describe as JSON how well transformers reproduces the results of the study's engines on the same samples.

    Verification scores samples of chosen trials again with transformers, and compares completions, metric values and
    log-probabilities with the stored values. `reports` has the comparison of each chosen trial. A trial counts as not
    verified if no sample of it was compared. The key "reason" of the result says why samples were left out: it is the
    first reason in `reports`, or else the argument `reason`, which says why no trial was verified.
    """
    compared = [report for report in reports if report.num_samples]
    beyond = sum(report.num_beyond for report in compared)
    samples, equal = sum(r.num_samples for r in compared), sum(r.num_equal for r in compared)
    status: Literal["equal", "within tolerance", "disagreement", "not verified"]
    if not compared:
        status = "not verified"
    elif beyond:
        status = "disagreement"
    else:
        status = "equal" if equal == samples else "within tolerance"
    if not compared or len(compared) < len(reports):
        reason = reason or "nothing was scored again by plain transformers"
    return {
        "status": status,
        "reason": next((report.reason for report in reports if report.reason), reason),
        "trials": len(compared),
        "trials_not_verified": len(reports) - len(compared),
        "samples": samples,
        "equal": equal,
        "beyond_tolerance": beyond,
        "tokens": sum(report.num_tokens for report in compared),
        "samples_without_tokens": sum(report.num_without_tokens for report in compared),
        "logprobs": sum(report.num_logprobs for report in compared),
        "unstable_logprobs": sum(report.num_unstable for report in compared),
        "tolerance": max((report.tolerance for report in compared), default=None),
        "max_logprob_difference": max((report.max_logprob_difference for report in compared), default=None),
        "differences": [asdict(difference) for report in compared for difference in report.differences],
    }
