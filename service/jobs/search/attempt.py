"""One driver's work on a study from its stored state: alignments, search, later stages, verification.

Callers connect to Ray and open the scorer.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from search_spaces.errors import InvalidStudy
from search_spaces.objectives import Objective
from search_spaces.searchers import SEARCHERS
from search_spaces.spaces.base import AlignedSpace, LayerPair
from search_spaces.study.file import Study
from service.errors import Conflict, StaleAttempt, StudyFailed, StudyUnusable
from service.jobs.heartbeat import ENGINE, PATIENCE_FACTOR, SCORING_PATIENCE_S, Heartbeat
from service.jobs.search.progress import SEARCHING, PaceMeter, ProgressReporter, ProgressSnapshot
from service.jobs.search.verification import verify_trials
from service.resolved_study import ResolvedStudy
from service.results.selection import best_trial, chosen_trials, held_out
from service.results.statistics import interval_of_mean
from service.store import JobWriter, SampleText, Store
from service.store.artifacts import ArtifactStore
from service.store.documents import (
    ALIGNMENT_COST,
    ALIGNMENTS,
    BENCHMARKS,
    CANARIES,
    CONTAMINATION,
    VERIFICATION,
    AlignmentCost,
    Canaries,
    read_alignment_cost,
    read_benchmarks,
    read_contamination,
    read_verification,
)
from service.store.steering import SteeringStore
from service.studies.preflight.algorithm import GRADIENT
from service.studies.preflight.contamination import overlaps_of, unsearched_names
from service.studies.preflight.examine import examine
from service.studies.preflight.files import FilesRefused
from service.studies.preflight.models import check_unchanged
from service.studies.preflight.result import PreflightResult
from service.studies.preflight.shared_gpus import SharedGpu
from service.tune.coordinator import Coordinator
from service.tune.plan import Baseline, Benchmark, Plan, baselines_of
from service.tune.proposing.checkpoints import PolicyCheckpoints
from service.tune.proposing.completions import SourceCompletions
from service.tune.searchers import get_searcher
from service.tune.searchers.base import LearningSearcher, SearchSetting
from service.tune.searchers.descents import descents_of, num_steps_for
from service.types import JobRecord, JobState, Origin, TrialRecord, TrialResult, TrialState
from workers.alignments.files import is_stored, store_alignment
from workers.errors import EngineFault, EngineUnavailable, EvidenceMismatch, InvalidModel, InvalidTask
from workers.models.modalities import modality_of_task
from workers.serving.watchdog import TimeLimits
from workers.types import CanaryReport, Scorer, Split, TaskSpec

__all__ = ["described_recipes", "execute", "stored_alignments", "values_ci95", "with_alignments"]

logger = logging.getLogger(__name__)

# Seconds from one snapshot of the progress to the next, at least. A snapshot goes through all trials, and Tune's loop
# waits for it: after a snapshot, the loop runs at least PAUSE_FACTOR times as long as the snapshot took.
SNAPSHOT_S, PAUSE_FACTOR = 0.25, 10

# Texts of samples in one answer of a scorer.
TEXTS_PER_CALL = 500

# Bytes of the pictures that are stored for one objective's search data, held-out data or benchmark.
MAX_PICTURE_BYTES = 8 * 2**20

# After this many seconds without a result, a driver checks whether an engine is starting, and repeats this as often.
ENGINE_CHECK_S = 15.0


def with_alignments(
    preflight: PreflightResult,
    store: Store,
    writer: JobWriter,
    *,
    directory: Path,
    artifacts: ArtifactStore,
    note: Callable[[str], None],
) -> PreflightResult:
    """Learn the alignments that a study's search space needs, and return the study with them.

    An alignment is a map of the residual stream between two layers. `preflight` is the checked study. The files of the
    alignments are written to `directory`. Alignments are learned once and stored with the study by `writer`, so that
    the study's recipes stay the same. If `artifacts` is in an object store, the files are stored there too, so that
    engines on other machines, and later drivers, can read them. A study whose search space uses no alignments is
    returned unchanged. Ray must be connected. `note` is called with messages about the progress.

    Raises:
        StudyFailed: The alignments cannot be learned; the study is stored as FAILED.
        EngineUnavailable: The alignments cannot be written to the disk.
    """
    space = preflight.space
    if not isinstance(space, AlignedSpace) or space.alignment == "none":
        return preflight
    from service.tune.proposing.alignments import alignments_in
    from workers.alignments.pairs import AlignmentInputs
    from workers.alignments.samples import positions_of

    inputs = AlignmentInputs(
        preflight.models.family,
        space.pool,
        preflight.engine_options,
        dict(preflight.tasks.search),
        positions_of({name: info.num_samples for name, info in preflight.tasks.search_infos.items()}),
        space.alignment,
    )
    before = stored_alignments(store, writer.job_id)
    try:
        if artifacts.remote is not None:
            _restore(artifacts, directory, before.values())
        started = time.monotonic()
        smallest = SharedGpu.smallest(preflight.machines)
        names = alignments_in(directory, inputs, space.pairs, before=before, gpu_bytes=smallest, note=note)
        earlier = read_alignment_cost(store.document(writer.job_id, ALIGNMENT_COST)).seconds
        cost = AlignmentCost(earlier + time.monotonic() - started)
        if artifacts.remote is not None:
            artifacts.put(writer.job_id, ALIGNMENTS, directory)
    except (InvalidModel, InvalidTask, StudyFailed) as error:
        writer.set_state(JobState.FAILED, str(error))
        raise StudyFailed(str(error)) from error
    except OSError as error:
        raise EngineUnavailable(f"alignments cannot be stored: {error}") from error
    writer.set_document_named(ALIGNMENTS, [[*pair, name] for pair, name in names.items()])
    writer.set_document_named(ALIGNMENT_COST, asdict(cost))
    family = replace(preflight.models.family, alignments_dir=artifacts.remote or str(directory.resolve()))
    return replace(preflight, space=space.with_alignments(names), models=replace(preflight.models, family=family))


def _restore(artifacts: ArtifactStore, directory: Path, names: Iterable[str]) -> None:
    """Copy the files of alignments from `artifacts` to `directory`, except files that are there already.

    An alignment is a learned map between two layers. Its file may be missing in `directory` because an earlier driver,
    on another machine, learned it. Names without a file in `artifacts` are skipped.
    """
    for name in {*names}:
        if not is_stored(directory, name):
            with suppress(FileNotFoundError):
                store_alignment(directory, artifacts.content(name))


def stored_alignments(store: Store, study_id: str) -> dict[LayerPair, str]:
    """Names of the alignments that the study `study_id` has learned, keyed by pair of layers; empty without alignments.

    An alignment is a map: it converts the residual stream after a pair's first layer to the residual stream that its
    second layer expects.
    """
    rows: list[Any] = store.document(study_id, ALIGNMENTS) or []
    return {((first[0], first[1]), (second[0], second[1])): name for first, second, name in rows}


def execute(
    store: Store,
    writer: JobWriter,
    preflight: PreflightResult,
    scorer: Scorer,
    *,
    work_dir: Path,
    artifacts: ArtifactStore,
    heartbeat: Heartbeat,
    view: ProgressReporter,
    observer: Callable[[str], None] = lambda _: None,
) -> None:
    """Run the study that `writer` writes to, from its stored state until the study is COMPLETE.

    Args:
        store: Database with the study's earlier results.
        writer: Writer of the study's results, for this driver (the process that works on the study).
        preflight: The prepared study.
        scorer: Replicas that score samples.
        work_dir: Directory for the files of Ray Tune.
        artifacts: Store of the policies (networks that propose merges) that the study trains.
        heartbeat: Heartbeat of this driver, which receives the study's progress.
        view: Receiver of progress and messages.
        observer: Called after each stored result, with a word for the result, such as "complete", so that tests can
            stop the process at this point.

    Raises:
        StudyFailed: The study cannot continue; it is stored as FAILED with the reason.
        EngineUnavailable: Engines cannot score at the moment; the study's stored state is unchanged.
        StaleAttempt: Another driver has taken over the study.
    """
    from service.tune.proposing.ray_gradients import RayGradients
    from service.tune.proposing.ray_proposer import RayProposer
    from service.tune.ray_tune import run_evaluations

    study_id = writer.job_id
    resolved = ResolvedStudy.of(store.job(study_id))
    writer.set_state(JobState.RUNNING)
    try:
        plan = preflight.plan(study_id, resolved, baselines=_baselines(store, study_id, preflight))
        _keep_facts(store, writer, plan.benchmarks)
        _keep_overlaps(store, writer, preflight)
        algorithm = resolved.algorithm or preflight.study.search.algorithm
        setting = preflight.search_setting(
            num_baselines=len(plan.baselines),
            batch=plan.batch,
            version=resolved.searcher_version,
            descent_points=resolved.descent_points or preflight.study.search.gradient.points,
        )
        inputs = preflight.gradient_inputs()
        proposer = RayProposer(
            algorithm=algorithm,
            parameters=preflight.space.parameters,
            seed=preflight.study.search.seed,
            setting=setting,
            steps=store.steps(study_id),
            gradient_inputs=inputs,
            completions=SourceCompletions(store, study_id, preflight.tasks.objectives),
            checkpoints=_checkpoints(algorithm, artifacts, study_id, setting),
        )
        gradients = None if inputs is None or plan.refinement is None else RayGradients(inputs)
        coordinator = Coordinator(
            plan,
            space=preflight.space,
            store=store,
            writer=writer,
            proposer=proposer,
            gradients=gradients,
            observer=observer,
            is_out_of_budget=lambda: _exhausted_limit(preflight.study, heartbeat.wall_clock_s),
        )
        expected = preflight.expected_samples()
        refined = 0 if plan.refinement is None else plan.refinement.options.paths * sum(plan.rung_samples[-1].values())
        planned = preflight.within_limit(expected.search + refined) + expected.holdout + expected.benchmarks
        snapshots = _Snapshots(coordinator, preflight, planned, _planned_steps(algorithm, setting))
        limits = TimeLimits.of_family(preflight.models.family)
        watch = _WaitWatch(
            scorer,
            lambda: coordinator.awaited_judges,
            writer,
            heartbeat,
            patience_s=max(SCORING_PATIENCE_S, PATIENCE_FACTOR * limits.chunk_s),
            awaits_gpus=lambda: any(each is not None and each.is_waiting for each in (proposer, gradients)),
        )

        meter = PaceMeter()

        def show(snapshot: ProgressSnapshot) -> None:
            meter.add(snapshot)
            heartbeat.progress = {**snapshot.to_json(), "time_left_s": meter.pace().time_left_s}
            view.update(snapshot)

        def tick() -> None:
            heartbeat.check()
            if heartbeat.stop_reason is not None:
                coordinator.stop(heartbeat.stop_reason)
            watch.look()
            if (snapshot := snapshots.due()) is not None:
                show(snapshot)

        not_verified: str | None = None

        def close() -> None:
            nonlocal not_verified
            if best_trial(coordinator.trials, preflight.tasks.objectives) is None:
                raise StudyFailed(_no_result(coordinator.trials, heartbeat.stop_reason))
            verify = preflight.study.engine.verify
            num_samples = verify.samples * len(preflight.tasks.objectives) if verify else 0
            heartbeat.min_patience_s = PATIENCE_FACTOR * limits.verification_s(num_samples)
            # Verification takes a GPU if one is free, and much memory. The search is over, and needs no more gradients.
            for holder in (proposer, gradients):
                if holder is not None:
                    holder.release()
            _check_engines(store, writer, scorer)
            _keep_prompts(store, writer, plan, scorer, note=view.note)
            not_verified = verify_trials(store, writer, preflight, scorer, coordinator.trials, note=view.note)

        with closing(coordinator):
            if (stop_reason := store.job(study_id).stop_reason) is not None:
                coordinator.stop(stop_reason)
            show(snapshots.now())
            is_closed = False
            while not is_closed:
                run_evaluations(
                    coordinator,
                    scorer,
                    name=f"study-{study_id}",
                    storage_dir=work_dir,
                    concurrency=preflight.concurrency,
                    tick=tick,
                    note=view.note,
                )
                show(snapshots.now())
                is_closed = _is_closed(coordinator, close)
        heartbeat.send()
        if not preflight.study.limits.keep_responses:
            trials, objectives = coordinator.trials, preflight.tasks.objectives
            writer.delete_texts(keep=described_recipes(store, study_id, trials, objectives, benchmarks=plan.benchmarks))
        reasons = [reason for reason in (coordinator.end_of_search, not_verified) if reason]
        writer.set_state(JobState.COMPLETE, "; ".join(reasons) or None)
        observer("complete")
    except (StudyFailed, StudyUnusable, EvidenceMismatch, EngineUnavailable, InvalidModel, InvalidTask) as error:
        if (reason := _reason_to_fail(error, store.job(study_id), preflight)) is None:
            raise EngineUnavailable(str(error)) from error
        writer.set_state(JobState.FAILED, reason)
        raise StudyFailed(reason) from error
    except StaleAttempt:
        raise
    except KeyboardInterrupt:
        writer.set_state(JobState.STOPPED, "interrupted")
        raise


def _checkpoints(
    algorithm: str, artifacts: ArtifactStore, study_id: str, setting: SearchSetting
) -> PolicyCheckpoints | None:
    searcher = get_searcher(algorithm)
    return PolicyCheckpoints(artifacts, study_id, searcher, setting) if isinstance(searcher, LearningSearcher) else None


def described_recipes(
    store: Store,
    study_id: str,
    trials: Sequence[TrialRecord],
    objectives: Sequence[Objective],
    *,
    benchmarks: Sequence[Benchmark] = (),
) -> list[str]:
    """Digests of the recipes whose completions are kept when the study `study_id` is COMPLETE, sorted.

    A completion is the text that a merge generated for a sample. The result contains the recipes of the `trials` that
    are scored on holdout data or on the `benchmarks`, and of the trials that were verified (scored again with
    transformers). `objectives` are the study's objectives, by which the trials for holdout data are selected.
    """
    verified = {report.recipe_digest for report in read_verification(store.document(study_id, VERIFICATION)).reports}
    scored = {trial.recipe.digest for b in benchmarks for trial in chosen_trials(b.trials, trials, objectives)}
    return sorted(verified | scored | {trial.recipe.digest for trial in held_out(trials, objectives)})


def _keep_facts(store: Store, writer: JobWriter, benchmarks: Sequence[Benchmark]) -> None:
    """Store the task, data and metric of each of the `benchmarks`, so that later changes of a benchmark are noticed.

    `writer` stores these facts. Raises StudyFailed if a benchmark of the same name is stored with another task or other
    data.
    """
    stored = {facts.name: facts for facts in read_benchmarks(store.document(writer.job_id, BENCHMARKS))}
    for benchmark in benchmarks:
        if change := benchmark.facts.change_since(stored.get(benchmark.name, benchmark.facts)):
            raise StudyFailed(
                f"benchmark {benchmark.name}: its task or data have changed since it was first scored: {change}; "
                "restore them, or add a benchmark of another name"
            )
    now = stored | {benchmark.name: benchmark.facts for benchmark in benchmarks}
    if now != stored:
        writer.set_document_named(BENCHMARKS, [asdict(facts) for facts in now.values()])


def _keep_prompts(store: Store, writer: JobWriter, plan: Plan, scorer: Scorer, *, note: Callable[[str], None]) -> None:
    """Store prompts, right answers and pictures of a study's samples, benchmarks included, so that people can see them.

    Texts that are stored already are skipped. `scorer` provides the texts, because its replicas have loaded the tasks.
    If a replica must load a task again and fails, `note` is called with the reason, and the prompts of this task are
    not stored.
    """
    benchmarks = {benchmark.name: benchmark for benchmark in plan.benchmarks}
    sizes = (
        (Split.SEARCH, plan.tasks, plan.rung_samples[-1]),
        (Split.HOLDOUT, plan.holdout_tasks, plan.holdout_samples),
        (
            Split.BENCHMARK,
            {name: benchmark.task for name, benchmark in benchmarks.items()},
            {name: benchmark.facts.num_samples for name, benchmark in benchmarks.items()},
        ),
    )
    stored = store.stored_prompts(writer.job_id)
    for split, tasks, num_samples in sizes:
        for name, task in tasks.items():
            if (split, name) not in stored:
                try:
                    texts = _with_pictures(scorer, task, _texts(scorer, task, num_samples[name]))
                except InvalidTask as error:
                    note(f"prompts of {split} data of {name} are not stored: {error}")
                else:
                    writer.add_prompts(split, name, texts)


def _texts(scorer: Scorer, task: TaskSpec, count: int) -> list[SampleText]:
    """Read the texts of the first `count` samples of a task, TEXTS_PER_CALL samples at a time."""
    found: list[SampleText] = []
    for start in range(0, count, TEXTS_PER_CALL):
        part = scorer.sample_texts(task, start, min(start + TEXTS_PER_CALL, count))
        found += [SampleText(*text) for text in part]
    return found


def _with_pictures(scorer: Scorer, task: TaskSpec, texts: list[SampleText]) -> list[SampleText]:
    """Add small pictures to the texts of a task's samples, if the task's modality has pictures.

    Pictures are added from the first sample on. All added pictures together have at most MAX_PICTURE_BYTES bytes.
    """
    if not modality_of_task(task.task).has_pictures:
        return texts
    found: list[SampleText] = []
    num_bytes = 0
    for start in range(0, len(texts), TEXTS_PER_CALL):
        stop = min(start + TEXTS_PER_CALL, len(texts))
        for text, picture in zip(texts[start:stop], scorer.sample_pictures(task, start, stop), strict=True):
            num_bytes += len(picture or b"")
            if num_bytes > MAX_PICTURE_BYTES:
                return [*found, *texts[len(found) :]]
            found.append(replace(text, picture=picture))
    return found


def _keep_overlaps(store: Store, writer: JobWriter, preflight: PreflightResult) -> None:
    """Store how many items of the held-out data and benchmarks are also in the search data.

    Nothing is done if the numbers are stored already. `preflight` is the checked study, and `writer` stores the numbers
    as a document of the study's job.
    """
    study, tasks = preflight.study, preflight.tasks
    stored = read_contamination(store.document(writer.job_id, CONTAMINATION))
    if {f"{overlap.section}.{overlap.name}" for overlap in stored} != unsearched_names(study):
        found = overlaps_of(study, tasks.search, tasks.unsearched)
        writer.set_document_named(CONTAMINATION, [asdict(overlap) for overlap in found])


def _baselines(store: Store, study_id: str, preflight: PreflightResult) -> tuple[Baseline, ...]:
    has_begun = bool(store.brackets(study_id) or store.steps(study_id))
    requested = {request.added for request in SteeringStore(store).evaluation_requests(study_id)}
    trials = [trial for trial in store.trials(study_id) if trial.number not in requested]
    return baselines_of(trials, preflight.baselines(), has_begun=has_begun)


def _planned_steps(algorithm: str, setting: SearchSetting) -> tuple[int, int]:
    """Numbers of gradient steps and policy updates of a study that is not ended early: in the search, and after it.

    `algorithm` is the name of the searcher, and `setting` has its options. A study may have a refinement, which
    improves the coefficients of trials of the Pareto front by gradient descent after the search. Its steps are counted
    for the largest number of trials that the setting `search.refinement.paths` allows.
    """
    options = setting.options
    refined = 0 if options.refinement is None else options.refinement.paths * options.refinement.steps
    if algorithm == GRADIENT:
        return num_steps_for(options.max_trials, descents_of(options.gradient, setting.vectors)), refined
    if SEARCHERS[algorithm].trains_policy:
        return (options.max_trials - 1) // options.hm3.episodes, refined  # no update follows the last iteration
    return 0, refined


class _WaitWatch:
    """Watch that tells the driver's heartbeat why the driver waits: for an engine, GPUs, or an LLM judge's answer.

    Each kind of waiting counts as progress of the driver. Otherwise the driver would be replaced during a long start of
    an engine, while the cluster adds a machine, or while a judge does not answer. `judges` returns the URLs of the
    judges that the driver waits for; the option `judge.wait_s` limits this wait. `scorer` says whether an engine is
    starting. `awaits_gpus` says whether gradients wait for a machine with GPUs. `patience_s` is the number of seconds
    without progress, once samples are scored, before the driver is replaced.
    """

    def __init__(
        self,
        scorer: Scorer,
        judges: Callable[[], Sequence[str]],
        writer: JobWriter,
        heartbeat: Heartbeat,
        *,
        patience_s: float,
        awaits_gpus: Callable[[], bool] = lambda: False,
    ) -> None:
        self._patience_s = patience_s
        self._awaits_gpus = awaits_gpus
        self._scorer = scorer
        self._judges = judges
        self._writer = writer
        self._heartbeat = heartbeat
        self._began_at = self._looked_at = time.monotonic()

    def look(self) -> None:
        if self._writer.scored_at:
            self._heartbeat.min_patience_s = self._patience_s
        now = time.monotonic()
        if now - max(self._writer.stored_at, self._began_at) < ENGINE_CHECK_S:
            self._heartbeat.wait_for(None)
        elif now - self._looked_at >= ENGINE_CHECK_S:
            self._looked_at = now
            judge = next((f"the judge at {url}" for url in self._judges()), None)
            gpus = "GPUs for gradients" if self._awaits_gpus() else None
            awaited = ENGINE if self._scorer.is_starting() else gpus or judge
            if awaited is not None:
                self._heartbeat.progressed()
            self._heartbeat.wait_for(awaited)


class _Snapshots:
    """Source of snapshots of a running study's progress; a snapshot has the study's counts at one moment.

    `coordinator` runs the study, and `preflight` is the checked study. `planned` is the expected number of samples of
    the whole study, and `planned_steps` are the expected numbers of steps in the search and after it. Snapshots count
    the latter once the search has ended: before, their speed is not known, so no time left can include them. The method
    `due` returns a snapshot if the last one was taken at least 0.25 s ago, and at least ten times the seconds that it
    took, else None. The method `now` always returns a snapshot.
    """

    def __init__(
        self, coordinator: Coordinator, preflight: PreflightResult, planned: int, planned_steps: tuple[int, int]
    ) -> None:
        self._coordinator = coordinator
        self._preflight = preflight
        self._planned = planned
        self._planned_steps = planned_steps
        self._next_at = 0.0

    def due(self) -> ProgressSnapshot | None:
        return self.now() if time.monotonic() >= self._next_at else None

    def now(self) -> ProgressSnapshot:
        began_at = time.monotonic()
        snapshot = self._taken()
        ended_at = time.monotonic()
        self._next_at = ended_at + max(SNAPSHOT_S, PAUSE_FACTOR * (ended_at - began_at))
        return snapshot

    def _taken(self) -> ProgressSnapshot:
        trials = self._coordinator.trials
        states = Counter(trial.state for trial in trials)
        study = self._preflight.study
        leader = best_trial(trials, self._preflight.tasks.objectives)
        position = self._coordinator.table.position()
        scored = self._coordinator.num_samples_scored
        stage = self._coordinator.stage
        in_search, after_it = self._planned_steps
        planned_steps = in_search if stage == SEARCHING else in_search + after_it
        return ProgressSnapshot(
            study=study.name,
            stage=stage,
            trials={state: states[state] for state in TrialState},
            max_trials=sum(trial.origin is not Origin.SEARCH for trial in trials) + study.search.num_proposals,
            bracket=position[0] if position else None,
            rung=position[1] if position else None,
            rungs=tuple(max(samples.values(), default=0) for samples in self._preflight.budget.rung_samples),
            best_trial=leader.number if leader else None,
            best=leader.values if leader else {},
            best_ci95=values_ci95(leader, self._preflight.tasks.objectives) if leader else {},
            samples_scored=scored,
            samples_planned=max(self._planned, scored),
            samples_used=self._coordinator.num_samples_used,
            max_samples=study.limits.max_samples,
            steps=self._coordinator.num_steps,
            steps_planned=max(planned_steps, self._coordinator.num_steps),
        )


def values_ci95(trial: TrialResult, objectives: Sequence[Objective]) -> dict[str, tuple[float, float]]:
    """95 % intervals of a trial's values at its highest rung, keyed by objective; exact values have no interval."""
    last = trial.rungs[-1]
    found = {}
    for objective in objectives:
        error = last.standard_errors.get(objective.name)
        n = last.num_samples.get(objective.name, 0)
        if error is not None and n > 0 and objective.cost_of_recipe is None:
            value = last.values[objective.name]
            found[objective.name] = interval_of_mean(value, error, n, bounds=objective.bounds)
    return found


def _reason_to_fail(error: Exception, record: JobRecord, preflight: PreflightResult) -> str | None:
    """Reason why the study of `record` must fail after `error`; None if another driver may succeed later.

    - After StudyFailed and EvidenceMismatch (a result that does not come from the requested merge or prompts), the
      study must fail.
    - After any other error, the study's models and tasks, which `preflight` names, are checked again. If they have
      changed since the study was created, or if the study may no longer read them, the study must fail. If they are
      only temporarily unusable, another driver may succeed.
    - If the checks find nothing, the study must fail, except after EngineUnavailable, when another driver may succeed.
    """
    if isinstance(error, (StudyFailed, EvidenceMismatch)):
        return str(error)
    try:
        stored = ResolvedStudy.of(record).task_digests
        found = examine(preflight.study, stored_tasks=stored, access=preflight.access)
        check_unchanged(record, found.resolved())
    except Conflict as changed:
        return f"{changed}; an engine says: {error}"
    except FilesRefused as refused:
        return str(refused)
    except InvalidStudy:
        return None
    return None if isinstance(error, EngineUnavailable) else str(error)


def _exhausted_limit(study: Study, wall_clock_s: float) -> str | None:
    limits = study.limits
    if limits.max_wall_clock_s is not None and wall_clock_s >= limits.max_wall_clock_s:
        return f"limits.max_wall_clock_s: {limits.max_wall_clock_s:g} s are used up"
    gpu_hours = wall_clock_s / 3600 * study.engine.num_gpus
    if limits.max_gpu_hours is not None and gpu_hours >= limits.max_gpu_hours:
        return f"limits.max_gpu_hours: {limits.max_gpu_hours:g} hours are used up"
    return None


def _no_result(trials: tuple[TrialRecord, ...], stop_reason: str | None) -> str:
    failed = [trial for trial in trials if trial.state is TrialState.FAIL]
    text = f"no trial was scored at the full budget; {len(failed)} of {len(trials)} trials failed"
    if stop_reason is not None and not failed:
        return f"{stop_reason}, before any trial was scored at the full budget"
    return text + (f", the first with: {failed[0].reason}" if failed else "")


def _is_closed(coordinator: Coordinator, close: Callable[[], None]) -> bool:
    """Run the last checks of a study, and return whether the study is finished.

    `close` checks the engines and some trials. If these or earlier checks have found a faulty engine, its samples must
    be scored again: `coordinator`, which runs the search, prepares this, and the result is False.
    """
    try:
        close()
    except EngineFault as fault:
        coordinator.on_engine_fault(fault)
        return False
    coordinator.look_for_faults()
    return coordinator.is_finished


def _check_engines(store: Store, writer: JobWriter, scorer: Scorer) -> None:
    """Check that every running engine of `scorer` gives the log-probabilities of transformers on fixed prompts.

    A stored sample counts as checked if its engine passes such a check after scoring it. `writer` stores the number of
    the study's samples that are not checked.
    """
    reports: Sequence[CanaryReport] = scorer.check()
    passed = {report.replica: report.canaries for report in reports}
    skipped = {report.replica: report.skipped for report in reports if report.skipped}
    unchecked = store.num_unchecked(writer.job_id, passed)
    writer.set_document_named(CANARIES, asdict(Canaries(unchecked, skipped)))
