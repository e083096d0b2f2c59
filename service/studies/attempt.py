"""One attempt at a study, from its stored state to its end: search, held-out stage, verification.

The caller provides a connected Ray and a scorer: `local_run` for one directory, `service.jobs.search` for the server.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import numpy as np

from search_spaces.study.file import Study
from service.errors import StaleAttempt, StudyFailed
from service.results.selection import best_trial, full_budget_trials
from service.store import Store, StudyWriter
from service.studies.preflight.examine import PreflightResult
from service.studies.progress import ProgressReporter, ProgressSnapshot
from service.tune.coordinator import Coordinator
from service.types import HEARTBEAT_S, Origin, StudyState, TrialRecord, TrialState
from workers.errors import EngineFault, EngineUnavailable, EvidenceMismatch
from workers.types import CanaryReport, Scorer, Span, Split

__all__ = ["Heartbeat", "execute"]

logger = logging.getLogger(__name__)

SNAPSHOT_S = 0.25


def execute(
    store: Store,
    writer: StudyWriter,
    preflight: PreflightResult,
    scorer: Scorer,
    *,
    work_dir: Path,
    heartbeat: Heartbeat,
    view: ProgressReporter,
    observer: Callable[[str], None] = lambda _: None,
) -> None:
    """Work on the study that `writer` has taken over until it is COMPLETE.

    Raises StudyFailed (the study is FAILED with that reason), EngineUnavailable (STOPPED, can be resumed) and
    StaleAttempt (another driver has taken over). Any other interruption leaves the study resumable.
    """
    from service.tune.ray_tune import RayProposer, run_evaluations

    study_id = writer.study_id
    writer.set_state(StudyState.RUNNING)
    try:
        coordinator = Coordinator(
            preflight.plan(study_id, store.study(study_id).resolved),
            space=preflight.space,
            store=store,
            writer=writer,
            proposer=RayProposer(
                algorithm=preflight.study.search.algorithm,
                parameters=preflight.space.parameters,
                seed=preflight.study.search.seed,
            ),
            observer=observer,
            is_out_of_budget=lambda: _exhausted_limit(preflight.study, heartbeat.wall_clock_s),
        )
        expected = preflight.expected_samples()
        snapshots = _Snapshots(coordinator, preflight, expected.search + expected.holdout)

        def tick() -> None:
            if (snapshot := snapshots.due()) is not None:
                heartbeat.progress = snapshot.to_json()
                view.update(snapshot)

        def close() -> None:
            if best_trial(coordinator.trials, preflight.objectives) is None:
                raise StudyFailed(_no_result(coordinator.trials))
            _check_engines(store, writer, scorer)
            if store.document(study_id, "verification") is None:
                view.note("Verifying some of the trials with transformers ...")
                _verify(store, writer, preflight, scorer, coordinator.trials)

        view.update(snapshots.now())
        is_closed = False
        while not is_closed:
            run_evaluations(
                coordinator,
                scorer,
                name=f"study-{study_id}",
                storage_dir=work_dir,
                concurrency=preflight.concurrency,
                tick=tick,
            )
            view.update(snapshots.now())
            is_closed = _is_closed(coordinator, close)
        heartbeat.send()
        writer.set_state(StudyState.COMPLETE, coordinator.end_of_search)
        observer("complete")
    except (StudyFailed, EvidenceMismatch) as error:
        writer.set_state(StudyState.FAILED, str(error))
        raise StudyFailed(str(error)) from error
    except StaleAttempt:
        raise
    except EngineUnavailable as error:
        writer.set_state(StudyState.STOPPED, str(error))
        raise
    except KeyboardInterrupt:
        writer.set_state(StudyState.STOPPED, "interrupted")
        raise


class Heartbeat:
    """Stores a heartbeat every `interval_s` seconds, from a thread: the driver's `progress` (as JSON), and the seconds
    that all attempts at the study have worked."""

    def __init__(self, writer: StudyWriter, worked_s: float, *, interval_s: float = HEARTBEAT_S) -> None:
        self.progress: Mapping[str, Any] | None = None
        self._writer = writer
        self._worked_s = worked_s
        self._interval_s = interval_s
        self._started_at = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send_regularly, name="heartbeat", daemon=True)

    @property
    def wall_clock_s(self) -> float:
        return self._worked_s + time.monotonic() - self._started_at

    def send(self) -> None:
        self._writer.heartbeat(wall_clock_s=self.wall_clock_s, progress=self.progress)

    def __enter__(self) -> Self:
        self.send()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _send_regularly(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self.send()
            except StaleAttempt:  # the driver's next write raises it too, where it is handled
                return
            except Exception:  # a single one may be missed; without any the driver is replaced
                logger.exception("a heartbeat was not stored")


class _Snapshots:
    """Snapshots for the progress reporter, at most every SNAPSHOT_S seconds."""

    def __init__(self, coordinator: Coordinator, preflight: PreflightResult, planned: int) -> None:
        self._coordinator = coordinator
        self._preflight = preflight
        self._planned = planned
        self._taken_at = 0.0

    def due(self) -> ProgressSnapshot | None:
        return self.now() if time.monotonic() - self._taken_at >= SNAPSHOT_S else None

    def now(self) -> ProgressSnapshot:
        self._taken_at = time.monotonic()
        trials = self._coordinator.trials
        study = self._preflight.study
        leader = best_trial(trials, self._preflight.objectives)
        position = self._coordinator.table.position()
        scored = self._coordinator.num_samples_scored
        return ProgressSnapshot(
            study=study.name,
            stage="held-out" if self._coordinator.is_holdout_stage else "searching",
            trials={state: sum(trial.state is state for trial in trials) for state in TrialState},
            max_trials=sum(trial.origin is not Origin.SEARCH for trial in trials) + study.search.max_trials,
            bracket=position[0] if position else None,
            rung=position[1] if position else None,
            rungs=tuple(max(samples.values()) for samples in self._preflight.rung_samples),
            best_trial=leader.number if leader else None,
            best=leader.values if leader else {},
            samples_scored=scored,
            samples_planned=max(self._planned, scored),
        )


def _exhausted_limit(study: Study, wall_clock_s: float) -> str | None:
    limits = study.limits
    if limits.max_wall_clock_s is not None and wall_clock_s >= limits.max_wall_clock_s:
        return f"limits.max_wall_clock_s: {limits.max_wall_clock_s:g} s are used up"
    gpu_hours = wall_clock_s / 3600 * study.engine.replicas * study.engine.tensor_parallel_size
    if limits.max_gpu_hours is not None and gpu_hours >= limits.max_gpu_hours:
        return f"limits.max_gpu_hours: {limits.max_gpu_hours:g} hours are used up"
    return None


def _no_result(trials: tuple[TrialRecord, ...]) -> str:
    failed = [trial for trial in trials if trial.state is TrialState.FAIL]
    text = f"no trial was scored at the full budget; {len(failed)} of {len(trials)} trials failed"
    return text + (f", the first with: {failed[0].reason}" if failed else "")


def _is_closed(coordinator: Coordinator, close: Callable[[], None]) -> bool:
    """Run the closing stage. False if an engine failed a check before its end: samples must be scored again."""
    try:
        close()
    except EngineFault as fault:
        coordinator.on_engine_fault(fault)
        return False
    coordinator.look_for_faults()
    return coordinator.is_finished


def _check_engines(store: Store, writer: StudyWriter, scorer: Scorer) -> None:
    """A canary in every engine that runs, so that the study does not rest on samples that none came after.

    Stores how many samples remain unchecked: of engines that have ended, or could not make a canary."""
    reports: Sequence[CanaryReport] = scorer.check()
    passed = {report.replica: report.canaries for report in reports}
    skipped = {report.replica: report.skipped for report in reports if report.skipped}
    unchecked = store.num_unchecked(writer.study_id, passed)
    writer.set_document_named("canaries", {"samples_not_checked": unchecked, "skipped": skipped})


def _verify(
    store: Store, writer: StudyWriter, preflight: PreflightResult, scorer: Scorer, trials: tuple[TrialRecord, ...]
) -> None:
    """Score some trials with transformers too: the best one, then others drawn by the study's seed.

    Raises StudyFailed if stored samples differ by more than rounding explains."""
    verify = preflight.study.engine.verify
    if not verify or verify.trials == 0 or verify.samples == 0:
        writer.set_document_named("verification", {"reports": [], "reason": "switched off in the study"})
        return
    candidates = full_budget_trials(trials)
    winner = best_trial(trials, preflight.objectives)
    others = [trial for trial in candidates if trial is not winner]
    drawn = np.random.default_rng(preflight.study.search.seed).permutation(len(others))
    chosen = [winner, *(others[i] for i in drawn)][: verify.trials]
    full = preflight.rung_samples[-1]
    spans = tuple(Span(name, task, 0, min(verify.samples, full[name])) for name, task in preflight.tasks.items())
    stops = {span.objective: span.stop for span in spans}
    reports = []
    for trial in chosen:
        assert trial is not None
        stored = store.samples(writer.study_id, trial.recipe.digest, Split.SEARCH)
        samples = tuple(sample for sample in stored if sample.position < stops[sample.objective])
        report = scorer.verify(trial.recipe, samples, spans)
        reports.append({"trial": trial.number, **asdict(report)})
        if report.num_beyond:
            writer.set_document_named("verification", {"reports": reports})
            raise StudyFailed(
                f"verification: trial {trial.number}: {report.num_beyond} of {report.num_samples} samples differ "
                f"between the engine and transformers beyond a tolerance of {report.tolerance:g}; "
                f"the first: {asdict(report.differences[0])}"
            )
    writer.set_document_named("verification", {"reports": reports})
