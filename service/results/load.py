"""Reads a study's run record, the data for its result files and its report, from the store."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from typing import Any

import numpy as np

from search_spaces.objectives import Objective
from search_spaces.study.file import Study
from search_spaces.study.objectives import DescribedTask, ScoredTask
from service.resolved_study import ResolvedStudy
from service.results.benchmarks import BenchmarkColumn, BenchmarkTable, benchmark_table
from service.results.chunk_times import ChunkTimes
from service.results.documents import has_directions
from service.results.holdout import HeldOut, Samples, Scored, held_out_results, held_out_rows
from service.results.pictures import Contrast, contrasts, has_pictures
from service.results.ranges import OutOfRange, out_of_range
from service.results.record import RunRecord, SearchFigures
from service.results.selection import best_trial, compared_with, finalists, full_budget_trials
from service.store import RELOAD_EVENTS, EventRecord, Store
from service.store.documents import (
    ALIGNMENT_COST,
    ATTACKS,
    BENCHMARKS,
    CANARIES,
    CONTAMINATION,
    POLICY_START,
    RESPONSES,
    VERIFICATION,
    WARM_START,
    read_alignment_cost,
    read_attacks,
    read_benchmarks,
    read_canaries,
    read_contamination,
    read_policy_start,
    read_removed_responses,
    read_verification,
    read_warm_start,
)
from service.store.steps import GradientStep, Step, UpdateStep
from service.types import Estimate, EventKind, Origin, Steering, TrialRecord, TrialResult
from workers.types import Split

__all__ = ["RunReader", "data_of", "held_out_differences", "held_out_estimates", "run_record"]

# Events that results are made of.
READ_EVENTS = (
    EventKind.SEARCH_NOTE,
    EventKind.HOLDOUT_FAILED,
    EventKind.BENCHMARK_FAILED,
    EventKind.OUT_OF_RANGE,
    EventKind.STEERED,
)

# Events after which stored responses may have changed.
RESPONSE_EVENTS = (EventKind.TEXTS_DELETED, EventKind.RESPONSES_REMOVED, *RELOAD_EVENTS)

# Rows of chunks that are read at once.
BATCH = 2000


def run_record(store: Store, study_id: str) -> RunRecord:
    """Read everything that the store has about the study `study_id`, as one record.

    Every trial has its recipe and configuration.
    """
    return RunReader(store, study_id, is_whole=True).read()


class RunReader:
    """Reader of one study's run record; after the first call it reads only data that have changed.

    A trial is read again if a new event names it, and as long as it is not finished. Recipes and configurations are
    most of a trial's data, and a study may have tens of thousands of trials. Therefore the reader reads them only for
    the best trial and the trials with results on holdout data. If `is_whole` is True, the reader reads them for every
    trial.
    """

    def __init__(self, store: Store, study_id: str, *, is_whole: bool = False) -> None:
        self._store = store
        self._study_id = study_id
        self._is_whole = is_whole
        self._last_event = 0
        self._last_chunk = 0
        self._trials: dict[int, TrialResult] = {}
        self._complete: dict[int, TrialRecord] = {}
        self._events: list[EventRecord] = []
        self._steps: list[Step] = []
        self._chunks = ChunkTimes()
        self._stage: _HeldOut | None = None
        self._contrasts: _Contrasts | None = None

    def read(self) -> RunRecord:
        """Read all data that are stored of the study (its run record). Raises NotFound if there is no such study."""
        with self._store.snapshot() as snapshot:
            return self._read(snapshot)

    def read_trials(self) -> tuple[TrialResult, ...]:
        """Read the current results of the study's trials, and nothing else of its stored data.

        The reader keeps the results, so that a later call of `read` reads only results that have changed since.
        """
        with self._store.snapshot() as snapshot:
            self._read_trials(snapshot)
        return tuple(self._trials.values())

    def _read(self, store: Store) -> RunRecord:
        study_id = self._study_id
        study = store.job(study_id)
        self._read_trials(store)
        self._read_chunks(store)
        self._steps += store.steps(study_id, start=len(self._steps))
        file, resolved = Study.model_validate(study.document), ResolvedStudy.of(study)
        trials, objectives = tuple(self._trials.values()), resolved.objectives
        failures = self._of(EventKind.HOLDOUT_FAILED)
        stage = _held_out(store, study_id, file, trials, objectives, failures=failures, last=self._stage)
        self._stage = stage
        verification = read_verification(store.document(study_id, VERIFICATION))
        return RunRecord(
            study=study,
            objectives=objectives,
            trials=self._with_recipes(store, trials, stage, has_directions=has_directions(study)),
            full_budget=resolved.rung_samples[-1],
            holdout=stage.results.rows,
            holdout_reference=stage.results.reference,
            holdout_failures=stage.results.failures,
            holdout_volume=stage.results.volume,
            rival_tests=stage.results.tests,
            selection_bias=stage.results.selection_bias,
            split_difference=stage.results.split_difference,
            contrasts=self._read_contrasts(store, file, trials, objectives, stage),
            benchmarks=_benchmark_table(
                store, study_id, file, trials, objectives, failures=self._of(EventKind.BENCHMARK_FAILED)
            ),
            contamination=tuple(  # what is allowed may have been changed since
                replace(each, is_allowed=each.name in file.contamination.allowed)
                for each in read_contamination(store.document(study_id, CONTAMINATION))
            ),
            warnings=_warnings(self._of(EventKind.OUT_OF_RANGE), trials, objectives, stage),
            verifications=verification.reports,
            verification_reason=verification.reason,
            engine=self._chunks.engine_figures(
                num_replicas=file.engine.replicas, canaries=read_canaries(store.document(study_id, CANARIES))
            ),
            search=self._search(store, resolved),
            gradients=tuple(step for step in self._steps if isinstance(step, GradientStep)),
            updates=tuple(step for step in self._steps if isinstance(step, UpdateStep)),
            alignment_s=read_alignment_cost(store.document(study_id, ALIGNMENT_COST)).seconds,
            max_samples=file.limits.max_samples,
            steering=tuple((event.time, _steering(event.payload)) for event in self._of(EventKind.STEERED)),
            wall_clock_s=study.wall_clock_s,
            samples_per_second=self._chunks.samples_per_second(),
            stored_bytes=self._chunks.stored_bytes(),
            removed_responses=read_removed_responses(store.document(study_id, RESPONSES)),
            tokens_per_second=self._chunks.tokens_per_second(store.num_tokens(study_id, Split.HOLDOUT)),
            version=version("mergesearch"),
        )

    def _read_trials(self, store: Store) -> None:
        """Read new events from `store`, and the trials that may have changed since the last call.

        A trial may have changed if a new event names it, or if it is not finished. All trials are read at the first
        call, and after an event that may have changed all trials.
        """
        study_id, changed = self._study_id, None
        if not self._trials:
            self._events = []
            last, new = store.last_event_id(study_id), store.events(study_id, kinds=READ_EVENTS)
        else:
            new = store.events(study_id, after=self._last_event)
            last = max([self._last_event, *(event.id for event in new)])
            if not any(event.kind in RELOAD_EVENTS for event in new):
                changed = {number for number, trial in self._trials.items() if not trial.state.is_finished}
                changed |= {event.payload["trial"] for event in new if "trial" in event.payload}
        found: Sequence[TrialResult] = (
            store.trials(study_id) if self._is_whole else store.trial_results(study_id, changed)
        )
        # Only now: if the database had not answered, the next call would have to read the same again.
        if any(event.kind == EventKind.TEXTS_DELETED for event in new):  # the chunks' bytes have changed
            self._last_chunk, self._chunks = 0, ChunkTimes()
        if any(event.kind in RESPONSE_EVENTS for event in new):
            self._contrasts = None
        self._last_event = last
        self._events += (event for event in new if event.kind in READ_EVENTS)
        self._trials |= {trial.number: trial for trial in found}

    def _read_contrasts(
        self,
        store: Store,
        file: Study,
        trials: Sequence[TrialResult],
        objectives: Sequence[Objective],
        stage: _HeldOut,
    ) -> tuple[Contrast, ...]:
        """Read the held-out samples on which the chosen merge and its rivals differ, with their pictures.

        The samples are read again only if the held-out results `stage`, the stored texts or the stored responses have
        changed.
        """
        if not any(map(has_pictures, file.holdout)):
            return ()
        stored = store.stored_prompts(self._study_id)
        known = self._contrasts
        if known is None or known.stage is not stage or known.stored != stored:
            results = stage.results
            found = contrasts(
                store, self._study_id, file, trials, objectives, chosen=results.reference, tests=results.tests
            )
            known = self._contrasts = _Contrasts(stage, stored, found)
        return known.contrasts

    def _read_chunks(self, store: Store) -> None:
        while rows := store.evidence(self._study_id, after=self._last_chunk, limit=BATCH):
            self._chunks.add(rows)
            self._last_chunk = rows[-1].id

    def _of(self, kind: EventKind) -> list[EventRecord]:
        return [event for event in self._events if event.kind == kind]

    def _with_recipes(
        self, store: Store, trials: tuple[TrialResult, ...], stage: _HeldOut, *, has_directions: bool
    ) -> tuple[TrialResult, ...]:
        """Add recipe and configuration, read from `store`, to the trials whose recipes are shown in results.

        These are the best trial and the trials with results on holdout data, which `stage` names. If `has_directions`
        is True, as in the space m3, a chart shows all trials that were scored on all samples, so these get their
        recipes too. Each recipe is read only once. All other trials are returned unchanged. If `is_whole` is True,
        nothing is added, because the trials have their recipes already.
        """
        if self._is_whole:
            return trials
        read = {number: store.trial(self._study_id, number) for number in sorted(stage.described)}
        if has_directions:
            complete = {trial.number for trial in full_budget_trials(trials)}
            for number in sorted(complete - read.keys() - self._complete.keys()):
                self._complete[number] = store.trial(self._study_id, number)
        found = []
        for trial in trials:
            known = read.get(trial.number)
            if known is None and trial.number in self._complete:
                known = replace(self._complete[trial.number], **_results(trial))
            found.append(trial if known is None else known)
        return tuple(found)

    def _search(self, store: Store, resolved: ResolvedStudy) -> SearchFigures:
        charged = [step for step in self._steps if step.request.num_charged]  # notes cost nothing
        charges = Counter[int]()
        for step in charged:
            charges[step.proposal] += step.request.num_charged
        return SearchFigures(
            algorithm=resolved.algorithm,
            reason=resolved.algorithm_reason,
            notes=tuple(event.payload["text"] for event in self._of(EventKind.SEARCH_NOTE)),
            start=read_policy_start(store.document(self._study_id, POLICY_START)),
            warm_start=read_warm_start(store.document(self._study_id, WARM_START)),
            steps=len(charged),
            charges=dict(charges),
        )


def held_out_estimates(
    store: Store, study_id: str, trial: int, *, trials: Sequence[TrialResult], objectives: Sequence[Objective]
) -> dict[str, Estimate] | None:
    """Read the estimates of trial number `trial` on holdout data, keyed by objective.

    `study_id` is the id of the study in `store`. `trials` and `objectives` are all trials and all objectives of this
    study. Returns None if the trial was not scored on holdout data.
    """
    failures = store.events(study_id, kinds=(EventKind.HOLDOUT_FAILED,))
    file = Study.model_validate(store.job(study_id).document)
    stage = _held_out(store, study_id, file, trials, objectives, failures=failures)
    return next((dict(row.values) for row in stage.results.rows if row.trial == trial), None)


def held_out_differences(
    store: Store, study_id: str, reference: int, *, trials: Sequence[TrialResult], objectives: Sequence[Objective]
) -> dict[int, Mapping[str, Estimate]]:
    """Read the held-out samples of a study, and compute the differences of its trials from the trial `reference`.

    The differences are paired, sample by sample. There is a difference for each objective, and a difference "mean" for
    the mean of the accuracy objectives. The result contains the differences of each trial that was scored on held-out
    data, keyed by the trial's number. The result is empty if the trial `reference` was not scored on held-out data.
    `study_id` is the id of the study in `store`; `trials` and `objectives` are all trials and all objectives of this
    study.
    """
    file = Study.model_validate(store.job(study_id).document)
    compared = compared_with(finalists(trials, objectives), trials)
    samples = store.sample_values(study_id, Split.HOLDOUT, recipes=[trial.recipe.digest for trial in compared])
    rows = held_out_rows(compared, objectives, Scored(_arrays(samples), data_of(file.holdout)), reference=reference)
    return {row.trial: row.differences for row in rows if row.differences}


@dataclass(frozen=True)
class _Inputs:
    """All data from which a study's held-out results are computed; equal data give equal results.

    - `compared`: the trials that are compared on holdout data: finalists, baselines and recipes of the study file
    - `finalists`: the best trials of the Pareto front
    - `best`: the best trial on search data; None before there is one
    - `failures`: the reasons why trials could not be scored on holdout data, keyed by trial number
    - `search`, `holdout`: the values of the samples on search data and on holdout data
    """

    compared: tuple[TrialResult, ...]
    finalists: tuple[TrialResult, ...]
    best: TrialResult | None
    failures: Mapping[int, str]
    search: Scored
    holdout: Scored


@dataclass(frozen=True)
class _HeldOut:
    """Results of a study on holdout data (`results`), with the data that they were computed from (`inputs`).

    The results are computed again only if the inputs have changed.
    """

    inputs: _Inputs
    results: HeldOut

    @property
    def described(self) -> frozenset[int]:
        """Numbers of the trials that the results describe: the best trial, and trials with results on holdout data."""
        best = self.inputs.best
        return frozenset({row.trial for row in self.results.rows} | (set() if best is None else {best.number}))


@dataclass(frozen=True)
class _Contrasts:
    """Held-out samples with pictures (`contrasts`), and the data on which they depend.

    These data are the held-out results `stage` and the names of the objectives with stored prompts, `stored`.
    """

    stage: _HeldOut
    stored: frozenset[tuple[Split, str]]
    contrasts: tuple[Contrast, ...]


def _held_out(
    store: Store,
    study_id: str,
    file: Study,
    trials: Sequence[TrialResult],
    objectives: Sequence[Objective],
    *,
    failures: Iterable[EventRecord],
    last: _HeldOut | None = None,
) -> _HeldOut:
    """Read a study's samples on holdout data, and compute the held-out results.

    `study_id` is the id of the study in `store`, and `file` is its study file. `trials` and `objectives` are all trials
    and all objectives of this study. `failures` are the events of trials that failed on holdout data. `last` is the
    result of an earlier call, or None; it is returned if the data from which it was computed have not changed.
    """
    final, best = finalists(trials, objectives), best_trial(trials, objectives)
    compared = compared_with(final, trials)
    digests = [trial.recipe.digest for trial in compared]
    unselected = {trial.recipe.digest for trial in trials if trial.origin in (Origin.SOURCE, Origin.PUBLISHED)}
    needed = {*unselected, best.recipe.digest} if best is not None else set()
    search = _arrays(store.sample_values(study_id, Split.SEARCH, recipes=sorted(needed & {*digests})))
    holdout = _arrays(store.sample_values(study_id, Split.HOLDOUT, recipes=digests))
    inputs = _Inputs(
        compared=compared,
        finalists=final,
        best=best,
        failures={event.payload["trial"]: event.payload["reason"] for event in failures},
        search=Scored(search, data_of(file.scored_objectives.values())),
        holdout=Scored(holdout, data_of(file.holdout)),
    )
    if last is not None and inputs == last.inputs:
        return last
    results = held_out_results(
        trials,
        objectives,
        search=inputs.search,
        holdout=inputs.holdout,
        failures=inputs.failures,
        seed=file.search.seed,
    )
    return _HeldOut(inputs, results)


def _benchmark_table(
    store: Store,
    study_id: str,
    file: Study,
    trials: Sequence[TrialResult],
    objectives: Sequence[Objective],
    *,
    failures: Iterable[EventRecord],
) -> BenchmarkTable:
    """Read a study's samples on benchmarks, and compute the table of results; empty before a benchmark is scored.

    `study_id` is the id of the study in `store`, and `file` is its study file. `trials` and `objectives` are all trials
    and all objectives of this study. `failures` are the events of trials that could not be scored on a benchmark.
    """
    specs, data = {spec.name: spec for spec in file.benchmarks}, data_of(file.benchmarks)
    facts = [facts for facts in read_benchmarks(store.document(study_id, BENCHMARKS)) if facts.name in specs]
    if not facts:
        return BenchmarkTable()
    best = best_trial(trials, objectives)
    attacks = read_attacks(store.document(study_id, ATTACKS))
    # Attacks score many templates, but results show only the worst template of each attack.
    shown = {each.name for each in facts} | {each.samples for each in attacks}
    return benchmark_table(
        trials,
        [BenchmarkColumn(known, specs[known.name].group, data[known.name]) for known in facts],
        _arrays(store.sample_values(study_id, Split.BENCHMARK, objectives=sorted(shown))),
        reference=None if best is None else best.number,
        failures=[(e.payload["trial"], e.payload["benchmark"], e.payload["reason"]) for e in failures],
        attacks=attacks,
        judgments=store.judgments(study_id) if any(each.judge is not None for each in facts) else (),
    )


def _results(trial: TrialResult) -> dict[str, Any]:
    """Fields of a trial's result, without the recipe, as a dict by field name.

    The fields are used to update a trial that was read earlier with its recipe, without reading the recipe again.
    """
    return {field.name: getattr(trial, field.name) for field in fields(TrialResult) if field.name != "recipe"}


def data_of(specs: Iterable[ScoredTask]) -> dict[str, str]:
    """Identifiers of the documents on which objectives or benchmarks are scored, keyed by name.

    `specs` are the objectives or benchmarks in the study file. An identifier contains the task and its split (the part
    of the task's data). Two objectives or benchmarks with equal identifiers are scored on the same documents.
    """
    return {
        spec.name: json.dumps([spec.task.place if isinstance(spec.task, DescribedTask) else spec.task, spec.split])
        for spec in specs
    }


def _arrays(values: Mapping[str, Samples]) -> dict[str, Samples]:
    """Values of the stored samples in the order of their positions, keyed by recipe digest and objective.

    `values` has arrays with an entry for every position. The entry of a sample that is not stored is NaN; such entries
    are left out of the result.
    """
    return {
        digest: {name: array[~np.isnan(array)] for name, array in of_recipe.items()}
        for digest, of_recipe in values.items()
    }


def _warnings(
    stored: Iterable[EventRecord], trials: Sequence[TrialResult], objectives: Sequence[Objective], stage: _HeldOut
) -> tuple[OutOfRange, ...]:
    """Collect warnings about samples outside their objective's range, sorted by trial, objective and kind of data.

    `stored` are the events in which drivers have stored warnings. Because earlier versions stored no warnings, warnings
    are also made from the samples on search and holdout data that `stage` has loaded. The result contains at most one
    warning for each trial, objective and kind of data.
    """
    found = [OutOfRange.from_json(event.payload) for event in stored]
    for split, scored in ((Split.SEARCH, stage.inputs.search), (Split.HOLDOUT, stage.inputs.holdout)):
        for trial in trials:
            if (samples := scored.samples.get(trial.recipe.digest)) is None:
                continue
            values = {name: dict(enumerate(array.tolist())) for name, array in samples.items()}
            found += out_of_range(trial.number, objectives, split, values)
    by_place = {(warning.trial, warning.objective, warning.split): warning for warning in reversed(found)}
    return tuple(by_place[place] for place in sorted(by_place))


def _steering(payload: Mapping[str, Any]) -> Steering:
    """Read a user's request (to pause, stop or edit the study) from the payload of the event that stores it."""
    return Steering(
        payload["action"], payload["user"], payload["reason"], payload.get("changes"), trial=payload.get("trial")
    )
