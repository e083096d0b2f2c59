"""Reads from the store what result files and the report show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from search_spaces.objectives import Objective
from service.results.files import EngineFigures, RunRecord
from service.results.selection import accuracy_objectives, best_trial, held_out
from service.results.statistics import compare, estimate
from service.store import EvidenceRecord, Store
from service.types import Comparison, Estimate, TrialRecord
from workers.types import SampleDifference, Split, VerificationReport

__all__ = ["held_out_estimates", "run_record"]

Samples = np.ndarray[Any, np.dtype[np.float64]]

# While a driver lives, no engine waits this long for work; a restart takes longer.
PAUSE_S = 30.0


def run_record(store: Store, study_id: str) -> RunRecord:
    """The study as far as it is stored."""
    study = store.study(study_id)
    objectives = study.resolved.objectives
    trials = store.trials(study_id)
    evidence = store.evidence(study_id)
    searched = [row for row in evidence if row.is_of(Split.SEARCH)]
    return RunRecord(
        study=study,
        objectives=objectives,
        trials=trials,
        full_budget=study.resolved.rung_samples[-1],
        holdout=_holdout(store, study_id, trials, objectives),
        verifications=_verifications(store.document(study_id, "verification")),
        engine=_engine(
            evidence,
            searched,
            num_replicas=study.document["engine"]["replicas"],
            canaries=store.document(study_id, "canaries") or {},
        ),
        wall_clock_s=study.wall_clock_s,
        samples_per_second=_rate(searched),
        version=version("mergesearch"),
    )


def held_out_estimates(
    store: Store, study_id: str, trial: int, *, trials: Sequence[TrialRecord], objectives: Sequence[Objective]
) -> dict[str, Estimate] | None:
    """The held-out values of one of `trials`, as in its row of the held-out table; None where it has no row."""
    _, rows = _held_out_samples(store, study_id, trials, objectives)
    samples = rows.get(trial)
    if samples is None:
        return None
    bounds = _bounds(objectives)
    return {name: estimate(values, bounds=bounds.get(name)) for name, values in samples.items()}


def _holdout(
    store: Store, study_id: str, trials: Sequence[TrialRecord], objectives: Sequence[Objective]
) -> tuple[Comparison, ...]:
    """Rows of the held-out table; none until the best trial has been scored there."""
    reference, rows = _held_out_samples(store, study_id, trials, objectives)
    labels = {trial.number: trial.label for trial in trials}
    return tuple(
        compare(
            labels[number],
            number,
            samples,
            reference=reference,
            mean_over=accuracy_objectives(objectives),
            bounds=_bounds(objectives),
        )
        for number, samples in rows.items()
    )


def _held_out_samples(
    store: Store, study_id: str, trials: Sequence[TrialRecord], objectives: Sequence[Objective]
) -> tuple[dict[str, Samples], dict[int, dict[str, Samples]]]:
    """The values of the best trial's held-out samples by objective, and those of every trial, by its number, that has
    as many; nothing until the best trial has been scored there."""
    winner = best_trial(trials, objectives)
    values = store.sample_values(study_id, Split.HOLDOUT)
    if winner is None or winner.recipe.digest not in values:
        return {}, {}
    names = [objective.name for objective in objectives]
    reference = _arrays(values[winner.recipe.digest], names)
    rows = {}
    for trial in held_out(trials, objectives):
        samples = _arrays(values.get(trial.recipe.digest, {}), names)
        if _counts(samples) == _counts(reference):  # else not yet scored, or it failed there
            rows[trial.number] = samples
    return reference, rows


def _counts(samples: Mapping[str, Samples]) -> dict[str, int]:
    return {name: len(values) for name, values in samples.items()}


def _bounds(objectives: Sequence[Objective]) -> dict[str, tuple[float, float]]:
    return {objective.name: objective.range for objective in objectives if objective.range}


def _arrays(values: Mapping[str, Mapping[int, float]], names: Sequence[str]) -> dict[str, Samples]:
    return {name: np.array([values[name][p] for p in sorted(values[name])]) for name in names if name in values}


def _verifications(document: Mapping[str, Any] | None) -> tuple[VerificationReport, ...]:
    def report(stored: Mapping[str, Any]) -> VerificationReport:
        differences = tuple(SampleDifference(**difference) for difference in stored["differences"])
        fields = {name: value for name, value in stored.items() if name not in ("trial", "differences")}
        return VerificationReport(**fields, differences=differences)

    return tuple(map(report, (document or {}).get("reports", ())))


def _engine(
    evidence: Sequence[EvidenceRecord],
    searched: Sequence[EvidenceRecord],
    *,
    num_replicas: int,
    canaries: Mapping[str, Any],
) -> EngineFigures:
    swaps = [row.timings_s.get("materialise", 0.0) + row.timings_s.get("swap", 0.0) for row in searched]
    span = _span_s(searched)
    busy = sum(sum(s for n, s in row.timings_s.items() if n != "wait") for row in searched)
    return EngineFigures(
        starts=len({row.replica for row in evidence}),  # engines that were killed count too
        kinds=tuple(sorted({row.engine for row in evidence})),
        swap_s=tuple(seconds for seconds in swaps if seconds > 0),
        busy_fraction=min(1.0, busy / (span * num_replicas)) if span else None,
        samples_not_checked=canaries.get("samples_not_checked"),
        skipped=tuple(sorted(set(canaries.get("skipped", {}).values()))),
    )


def _rate(searched: Sequence[EvidenceRecord]) -> float | None:
    span = _span_s(searched)
    return sum(row.num_samples for row in searched) / span if span else None


def _span_s(searched: Sequence[EvidenceRecord]) -> float | None:
    """Seconds from the start of the first search chunk to the end of the last, without pauses between attempts."""
    total, end = 0.0, 0.0
    for row in sorted(searched, key=lambda row: row.finished_at):
        finished = row.finished_at
        started = finished - sum(seconds for name, seconds in row.timings_s.items() if name != "wait")
        if started - end > PAUSE_S:
            end = started
        total += max(0.0, finished - end)
        end = max(end, finished)
    return total or None
