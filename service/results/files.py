"""The result files of a run: trials.jsonl, summary.json and pareto.json.

Everything is computed from stored records: writing the files again gives the same files.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np

from search_spaces.objectives import REFERENCE_COST, Objective, hypervolume
from service.results.feasibility import constraint_documents, sources_of, violations
from service.results.finding import criterion, finding_text
from service.results.holdout import FrontVolume
from service.results.record import EngineFigures, RunRecord
from service.results.selection import (
    accuracy_objectives,
    best_trial,
    costs_of,
    criteria,
    full_budget_trials,
    pareto_front,
)
from service.results.statistics import Z, independent_difference
from service.schemas.files import (
    EngineDocument,
    EstimateDocument,
    FindingDocument,
    HoldoutDocument,
    LineageDocument,
    ObjectiveDocument,
    ParetoDocument,
    PolicyDocument,
    RecipesDocument,
    SamplesDocument,
    SearchDocument,
    StartDocument,
    SummaryDocument,
    TrialDocument,
    VerificationDocument,
    VolumeDocument,
)
from service.types import ChainedSource, Comparison, Estimate, Origin, TrialRecord, TrialState
from workers.types import VerificationReport

__all__ = [
    "holdout_documents",
    "pareto",
    "samples_document",
    "summary",
    "trial_document",
    "trial_documents",
    "trials_jsonl",
    "write_results",
]


# -- from records to documents -----------------------------------------------------------------------------------------


def trial_document(
    trial: TrialRecord, *, objectives: Sequence[Objective] = (), sources: Sequence[TrialRecord] = ()
) -> TrialDocument:
    """A trial of a study with `objectives`; `sources` are its trials, or at least those of its source models."""
    return {
        "number": trial.number,
        "origin": trial.origin.value,
        "label": trial.label,
        "state": trial.state.value,
        "reason": trial.reason,
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


def trial_documents(run: RunRecord) -> list[TrialDocument]:
    """The trials by number."""
    trials = sorted(run.trials, key=lambda trial: trial.number)
    return [trial_document(trial, objectives=run.objectives, sources=sources_of(trials)) for trial in trials]


def trials_jsonl(run: RunRecord) -> str:
    """One JSON object per line, by trial number."""
    return "".join(_json(document, indent=None) + "\n" for document in trial_documents(run))


def pareto(run: RunRecord) -> ParetoDocument:
    front = pareto_front(run.trials, run.objectives)
    return {
        "objectives": [_objective_document(objective) for objective in run.objectives],
        "reference_point": [REFERENCE_COST] * len(run.objectives),
        "hypervolume": hypervolume([costs_of(trial, run.objectives) for trial in front]),
        "holdout_hypervolume": _volume_document(run.holdout_volume),
        "front": [
            {
                "trial": trial.number,
                "label": trial.label,
                "origin": trial.origin.value,
                "values": dict(trial.values),
                "standard_errors": dict(trial.standard_errors),
                "violations": violations(trial.values, run.objectives, sources_of(run.trials)),
                "recipe_digest": trial.recipe.digest,
            }
            for trial in front
        ],
    }


def summary(run: RunRecord) -> SummaryDocument:
    best = best_trial(run.trials, run.objectives)
    bias = _search_minus_holdout(run, best)
    rules = criteria(run.objectives)
    averaged = [bias[name].value for name in accuracy_objectives(run.objectives) if name in bias]
    states = Counter(trial.state for trial in run.trials)
    return {
        "study": run.study.name,
        "state": run.study.state.value,
        "reason": run.study.reason,
        "seed": int(run.study.document.get("search", {}).get("seed", 0)),
        "version": run.version,
        "trials": {state.value: states[state] for state in TrialState if states[state]},
        "search": _search_document(run),
        "samples": samples_document(run),
        "recipes": _recipes_document(run),
        "lineage": _lineage_documents(run.study.resolved.chained),
        "wall_clock_s": run.wall_clock_s,
        "engine": _engine_document(run.engine),
        "best": None
        if best is None
        else {
            "trial": best.number,
            "label": best.label,
            "origin": best.origin.value,
            "recipe_digest": best.recipe.digest,
            "values": dict(best.values),
            "violations": violations(best.values, run.objectives, sources_of(run.trials)),
        },
        "selection": {"best": rules.best, "promotion": rules.promotion, "difference": rules.difference},
        "constraints": constraint_documents(run.objectives, full_budget_trials(run.trials)),
        "finding": _finding_document(run, best),
        "holdout": holdout_documents(run),
        "holdout_reference": run.holdout_reference,
        "holdout_failures": [{"trial": trial, "reason": reason} for trial, reason in run.holdout_failures],
        "selection_bias": statistics.fmean(averaged) if averaged else None,
        "selection_bias_by_objective": _estimate_documents(bias),
        "selection_bias_against_baselines": _estimate_documents(run.selection_bias),
        "split_difference": _estimate_documents(run.split_difference),
        "verification": _verification_document(run.verifications, run.verification_reason),
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


def samples_document(run: RunRecord) -> SamplesDocument:
    """How many samples the trials took, and how many scoring every distinct recipe in full would have taken."""
    recipes = {trial.recipe.digest for trial in run.trials if trial.state is not TrialState.FAIL}
    scored = sum(trial.samples_scored for trial in run.trials)
    full_budget = len(recipes) * sum(run.full_budget.values())
    return {
        "scored": scored,
        "reused": sum(trial.samples_reused for trial in run.trials),
        "full_budget": full_budget,
        "saved": 1 - scored / full_budget if full_budget else None,
        "per_second": run.samples_per_second,
    }


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
    }


def holdout_documents(run: RunRecord) -> list[HoldoutDocument]:
    return [_holdout_document(row, run) for row in run.holdout]


def write_results(directory: Path, run: RunRecord, *, report: str | None = None) -> tuple[Path, ...]:
    """Write trials.jsonl, summary.json, pareto.json and, if given, report.html into `directory`.

    Each file appears complete or not at all (a temporary file, then renamed). Raises ValueError on numbers that JSON
    does not allow (NaN, inf); nothing is written then.
    """
    texts = {
        "trials.jsonl": trials_jsonl(run),
        "summary.json": _json(summary(run)) + "\n",
        "pareto.json": _json(pareto(run)) + "\n",
    }
    if report is not None:
        texts["report.html"] = report
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        _write_whole(directory / name, text)
    return tuple(directory / name for name in texts)


def _objective_document(objective: Objective) -> ObjectiveDocument:
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


def _search_document(run: RunRecord) -> SearchDocument:
    search = run.search
    return {
        "algorithm": search.algorithm,
        "reason": search.reason,
        "notes": list(search.notes),
        "start": None if search.start is None else _start_document(search.start),
        "steps": search.steps,
        "step_samples": search.step_samples,
        "trial_samples": sum(trial.samples_scored for trial in run.trials if trial.origin is Origin.SEARCH),
    }


def _start_document(start: Mapping[str, Any]) -> StartDocument:
    policies: list[PolicyDocument] = [
        {"iteration": policy["iteration"], "digest": policy["digest"]} for policy in start["policies"]
    ]
    return {"study": start["study"], "name": start["name"], "policies": policies}


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


def _estimate_document(estimate: Estimate) -> EstimateDocument:
    return {
        "value": estimate.value,
        "ci95": list(estimate.ci95),
        "standard_error": estimate.standard_error,
        "samples": estimate.samples,
    }


def _estimate_documents(estimates: Mapping[str, Estimate]) -> dict[str, EstimateDocument]:
    return {name: _estimate_document(estimate) for name, estimate in estimates.items()}


def _volume_document(volume: FrontVolume | None) -> VolumeDocument | None:
    if volume is None:
        return None
    return {**_estimate_document(volume.holdout), "trials": list(volume.trials), "search": volume.search}


def _finding_document(run: RunRecord, best: TrialRecord | None) -> FindingDocument:
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
                    {"trial": trial, "is_better": trial in test.better, **_estimate_document(difference)}
                    for trial, difference in test.differences.items()
                ],
            }
            for test in run.rival_tests
        ],
    }


def _holdout_document(row: Comparison, run: RunRecord) -> HoldoutDocument:
    held_out = {row.trial: {name: e.value for name, e in row.values.items()} for row in run.holdout}
    origins = {trial.number: trial.origin for trial in run.trials}
    digests = {trial.number: trial.recipe.digest for trial in run.trials}
    return {
        "label": row.label,
        "trial": row.trial,
        "origin": origins.get(row.trial, Origin.SEARCH).value,
        "values": _estimate_documents(row.values),
        "mean": None if row.mean is None else _estimate_document(row.mean),
        "violations": violations(
            {name: estimate.value for name, estimate in row.values.items()},
            run.objectives,
            sources_of(run.trials),
            values_of=lambda trial: held_out.get(trial.number, {}),
        ),
        "differences": _estimate_documents(row.differences),
        "tokens_per_second": run.tokens_per_second.get(digests.get(row.trial, "")),
    }


def _search_minus_holdout(run: RunRecord, best: TrialRecord | None) -> dict[str, Estimate]:
    """Search value minus held-out value of the best trial, by objective: different samples, so no pairing. Costs of the
    recipe are the same on both.
    """
    row = next((row for row in run.holdout if best is not None and row.trial == best.number), None)
    if row is None or best is None:
        return {}
    bias = {}
    costs = {objective.name for objective in run.objectives if objective.cost_of_recipe is not None}
    for name, value in best.values.items():
        if name in row.values and name not in costs:
            error = best.standard_errors.get(name, 0.0)
            if error is None:  # of one sample: as uncertain as the range allows
                low, high = next(o.bounds for o in run.objectives if o.name == name)
                error = (high - low) / 2
            on_search = Estimate(value, error, run.full_budget.get(name, 0), (value - Z * error, value + Z * error))
            bias[name] = independent_difference(on_search, row.values[name])
    return bias


def _verification_document(reports: Sequence[VerificationReport], reason: str | None) -> VerificationDocument:
    """Reports of nothing count as not verified; the reason is that of the first trial with samples left out."""
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
        "tolerance": max((report.tolerance for report in compared), default=None),
        "max_logprob_difference": max((report.max_logprob_difference for report in compared), default=None),
        "differences": [asdict(difference) for report in compared for difference in report.differences],
    }


def _json(document: Any, indent: int | None = 2) -> str:
    return json.dumps(document, indent=indent, allow_nan=False, ensure_ascii=False)


def _write_whole(file: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        # Only the owner can read mkstemp's files; results get ordinary permissions.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
