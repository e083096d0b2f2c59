"""Run records, read from the store: the content of result files and the report."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np

from search_spaces.objectives import Objective
from search_spaces.study.file import Study
from search_spaces.study.objectives import InlineTask, ObjectiveSpec
from service.resolved_study import ResolvedStudy
from service.results.holdout import HeldOut, Samples, Scored, held_out_results
from service.results.ranges import OutOfRange, out_of_range
from service.results.record import EngineFigures, RunRecord, SearchFigures
from service.results.selection import best_trial, held_out
from service.store import EvidenceRecord, Store
from service.store.documents import (
    CANARIES,
    POLICY_START,
    VERIFICATION,
    Canaries,
    read_canaries,
    read_policy_start,
    read_verification,
)
from service.store.steps import GradientStep, Step, UpdateStep
from service.types import Estimate, EventKind, JobRecord, Origin, TrialRecord
from workers.types import Split

__all__ = ["held_out_estimates", "run_record"]

# Seconds without work that no engine has while a driver lives; a restart takes longer.
PAUSE_S = 30.0


def run_record(store: Store, study_id: str) -> RunRecord:
    """The record of a study, as far as it is stored, at one moment."""
    with store.snapshot() as snapshot:
        return _run_record(snapshot, study_id)


def _run_record(store: Store, study_id: str) -> RunRecord:
    study = store.job(study_id)
    file = Study.model_validate(study.document)
    objectives = ResolvedStudy.of(study).objectives
    trials = store.trials(study_id)
    evidence = store.evidence(study_id)
    verification = read_verification(store.document(study_id, VERIFICATION))
    searched = [row for row in evidence if row.is_of(Split.SEARCH)]
    stage = _held_out(store, study_id, file, trials, objectives)
    steps = store.steps(study_id)
    return RunRecord(
        study=study,
        objectives=objectives,
        trials=trials,
        full_budget=ResolvedStudy.of(study).rung_samples[-1],
        holdout=stage.results.rows,
        holdout_reference=stage.results.reference,
        holdout_failures=stage.results.failures,
        holdout_volume=stage.results.volume,
        rival_tests=stage.results.tests,
        selection_bias=stage.results.selection_bias,
        split_difference=stage.results.split_difference,
        warnings=_warnings(store, study_id, trials, objectives, stage),
        verifications=verification.reports,
        verification_reason=verification.reason,
        engine=_engine(
            evidence,
            searched,
            num_replicas=file.engine.replicas,
            canaries=read_canaries(store.document(study_id, CANARIES)),
        ),
        search=_search(store, study, steps),
        gradients=tuple(step for step in steps if isinstance(step, GradientStep)),
        updates=tuple(step for step in steps if isinstance(step, UpdateStep)),
        max_samples=file.limits.max_samples,
        wall_clock_s=study.wall_clock_s,
        samples_per_second=_rate(searched),
        tokens_per_second=_tokens_per_second(store, study_id, evidence),
        version=version("mergesearch"),
    )


def held_out_estimates(
    store: Store, study_id: str, trial: int, *, trials: Sequence[TrialRecord], objectives: Sequence[Objective]
) -> dict[str, Estimate] | None:
    """The held-out values of one of `trials`, as in its row of the held-out table; None where it has no row."""
    file = Study.model_validate(store.job(study_id).document)
    stage = _held_out(store, study_id, file, trials, objectives)
    return next((dict(row.values) for row in stage.results.rows if row.trial == trial), None)


@dataclass(frozen=True)
class _HeldOut:
    """The held-out stage, and the samples that its results are made of."""

    results: HeldOut
    search: Scored
    holdout: Scored


def _held_out(
    store: Store, study_id: str, file: Study, trials: Sequence[TrialRecord], objectives: Sequence[Objective]
) -> _HeldOut:
    compared = [trial.recipe.digest for trial in held_out(trials, objectives)]
    winner = best_trial(trials, objectives)
    unselected = {trial.recipe.digest for trial in trials if trial.origin in (Origin.SOURCE, Origin.PUBLISHED)}
    needed = {*unselected, winner.recipe.digest} if winner is not None else set()
    failed = store.events(study_id, kinds=(EventKind.HOLDOUT_FAILED,))
    search = Scored(
        _arrays(store.sample_values(study_id, Split.SEARCH, recipes=sorted(needed & {*compared}))),
        _data_of(file.scored_objectives.values()),
    )
    holdout = Scored(
        _arrays(store.sample_values(study_id, Split.HOLDOUT, recipes=compared)),
        _data_of(file.holdout),
    )
    results = held_out_results(
        trials,
        objectives,
        search=search,
        holdout=holdout,
        failures={event.payload["trial"]: event.payload["reason"] for event in failed},
        seed=file.search.seed,
    )
    return _HeldOut(results, search, holdout)


def _data_of(specs: Iterable[ObjectiveSpec]) -> dict[str, str]:
    """A text for each objective that names its data, by the objective's name.

    Objectives with equal texts are scored on the same documents.
    """
    return {
        spec.name: json.dumps([spec.task.file if isinstance(spec.task, InlineTask) else spec.task, spec.split])
        for spec in specs
    }


def _arrays(values: Mapping[str, Mapping[str, Mapping[int, float]]]) -> dict[str, Samples]:
    return {
        digest: {name: np.array([of[position] for position in sorted(of)]) for name, of in by_objective.items()}
        for digest, by_objective in values.items()
    }


def _warnings(
    store: Store, study_id: str, trials: Sequence[TrialRecord], objectives: Sequence[Objective], stage: _HeldOut
) -> tuple[OutOfRange, ...]:
    """Warnings that drivers stored, and those of the loaded samples: earlier versions stored no warnings."""
    found = [OutOfRange.from_json(e.payload) for e in store.events(study_id, kinds=(EventKind.OUT_OF_RANGE,))]
    for split, scored in ((Split.SEARCH, stage.search), (Split.HOLDOUT, stage.holdout)):
        for trial in trials:
            samples = scored.samples.get(trial.recipe.digest, {})
            values = {name: dict(enumerate(array.tolist())) for name, array in samples.items()}
            found += out_of_range(trial.number, objectives, split, values)
    by_place = {(warning.trial, warning.objective, warning.split): warning for warning in reversed(found)}
    return tuple(by_place[place] for place in sorted(by_place))


def _engine(
    evidence: Sequence[EvidenceRecord],
    searched: Sequence[EvidenceRecord],
    *,
    num_replicas: int,
    canaries: Canaries,
) -> EngineFigures:
    swaps = [row.timings_s.get("materialise", 0.0) + row.timings_s.get("swap", 0.0) for row in searched]
    span = _span_s(searched)
    busy = sum(sum(s for n, s in row.timings_s.items() if n != "wait") for row in searched)
    return EngineFigures(
        starts=len({row.replica for row in evidence}),  # engines that were killed count too
        kinds=tuple(sorted({row.engine for row in evidence})),
        swap_s=tuple(seconds for seconds in swaps if seconds > 0),
        busy_fraction=min(1.0, busy / (span * num_replicas)) if span else None,
        samples_not_checked=canaries.samples_not_checked,
        skipped=tuple(sorted(set(canaries.skipped.values()))),
    )


def _search(store: Store, study: JobRecord, steps: Sequence[Step]) -> SearchFigures:
    charged = [step for step in steps if step.request.num_charged]  # notes cost nothing
    charges = Counter[int]()
    for step in charged:
        charges[step.proposal] += step.request.num_charged
    return SearchFigures(
        algorithm=ResolvedStudy.of(study).algorithm,
        reason=ResolvedStudy.of(study).algorithm_reason,
        notes=tuple(event.payload["text"] for event in store.events(study.id, kinds=(EventKind.SEARCH_NOTE,))),
        start=read_policy_start(store.document(study.id, POLICY_START)),
        steps=len(charged),
        charges=dict(charges),
    )


def _rate(searched: Sequence[EvidenceRecord]) -> float | None:
    span = _span_s(searched)
    return sum(row.num_samples for row in searched) / span if span else None


def _tokens_per_second(store: Store, study_id: str, evidence: Iterable[EvidenceRecord]) -> dict[str, float]:
    """Tokens per second by recipe digest, in the held-out stage: all recipes are given the same prompts there."""
    seconds: dict[str, float] = defaultdict(float)
    for row in evidence:
        if row.is_of(Split.HOLDOUT):
            seconds[row.recipe_digest] += row.timings_s.get("score", 0.0)
    numbers = store.num_tokens(study_id, Split.HOLDOUT)
    return {digest: number / seconds[digest] for digest, number in numbers.items() if seconds[digest] > 0}


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
