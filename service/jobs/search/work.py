"""The driver's work on one stored study: it continues from the stored state to the end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack

from search_spaces.study.file import Study
from service.cluster.node_calls import cluster_machines
from service.disk import alignments_dir, data_dir_of
from service.engine_machines import EngineMachines, gpu_need, has_gpus, known_machines
from service.jobs.base import Attempt
from service.jobs.heartbeat import ENGINE, PATIENCE_FACTOR
from service.jobs.search.attempt import execute, with_alignments
from service.jobs.search.prepare import prepared
from service.jobs.search.progress import ProgressReporter
from service.jobs.search.progress_log import ProgressLog
from service.jobs.search.starts import telling_starts
from service.resolved_study import ResolvedStudy
from service.store.accounts import AccountStore
from service.store.documents import BENCHMARKS, read_benchmarks
from service.studies.chains import OpenStudy, keep_sources, on_server
from service.studies.policies.start import with_start
from service.studies.preflight.dtype import with_stored_dtype
from service.studies.preflight.models import check_unchanged
from service.studies.preflight.result import PreflightResult
from service.studies.warm_start import with_warm_start
from workers.serving.deployment import app_name, runs_on_gpus
from workers.serving.watchdog import TimeLimits
from workers.telemetry import tracing

__all__ = ["continue_study", "work"]


def work(attempt: Attempt) -> None:
    """Continue a study on a server from its stored state to its end.

    `attempt` is this driver's work on the study.

    Raises:
        InvalidStudy: The study's files cannot be used at the moment.
        Conflict: The study's models or tasks have changed since the study was created.
        StudyFailed: The study cannot continue.
        EngineUnavailable, OSError: Engines, Ray or files are not available at the moment.
        StaleAttempt: Another driver has taken over the study.
    """
    job = attempt.job
    before, study = ResolvedStudy.of(job), Study.model_validate(job.document)
    open_study = on_server(attempt.store, reader=AccountStore(attempt.store).account_of(job))
    with tracing.span("prepare", {"mergesearch.job": job.id}):
        preflight = prepared(
            study,
            open_study=open_study,
            directory=data_dir_of(attempt.work_dir),
            artifacts_in=attempt.artifacts.location,
            before=before,
            accepted=study,
            benchmarks=read_benchmarks(attempt.store.document(job.id, BENCHMARKS)),
            access=before.access,
            available_bytes=sys.maxsize,  # no engine runs in this process; the request's check compared memory
            machines=cluster_machines(),
            note=attempt.progressed,
        )
    check_unchanged(job, preflight.resolved())
    # A study that an earlier version created does not keep its sources yet.
    keep_sources(attempt.artifacts, job.id, (preflight.study.models.base, *preflight.study.models.named.values()))
    attempt.progressed("The models are unchanged. Connecting to Ray ...")
    with ProgressLog() as view:
        continue_study(attempt, preflight, open_study=open_study, view=view)


def continue_study(
    attempt: Attempt,
    preflight: PreflightResult,
    *,
    open_study: OpenStudy,
    view: ProgressReporter,
    observer: Callable[[str], None] = lambda _: None,
) -> None:
    """Connect to Ray, wait for engines, and continue a prepared study from its stored state to its end.

    `attempt` has the objects that this driver (the process that works on the study) uses, and `preflight` is the
    prepared study. `open_study` opens other studies whose policies (trained networks) or results the study starts from.
    `view` receives progress. `observer` is called after each stored result, with a word for the result, such as
    "complete", so that tests can stop the process at this point.

    With `dtype: auto`, engines compute in the dtype that was stored when the study was checked, also if the machines
    have changed since: a study that was checked for GPUs waits for them, and a study that was checked for the CPU
    computes in float32 on GPUs too.

    Raises:
        StudyFailed: The study cannot continue; it is stored as FAILED with the reason.
        EngineUnavailable: Engines cannot score at the moment.
        OSError: A file, Ray or the hub is not available at the moment.
        StaleAttempt: Another driver has taken over the study.
    """
    store, writer, heartbeat = attempt.store, attempt.writer, attempt.heartbeat
    preflight = with_start(preflight, store, writer, artifacts=attempt.artifacts, open_study=open_study)
    preflight = with_warm_start(preflight, store, writer, artifacts=attempt.artifacts, open_study=open_study)
    with ExitStack() as stack:
        session = stack.enter_context(attempt.resources.ray())
        if session.dashboard_url:
            attempt.note(f"Ray dashboard: {session.dashboard_url}")
        alignments = alignments_dir(attempt.work_dir)
        preflight = with_alignments(
            preflight, store, writer, directory=alignments, artifacts=attempt.artifacts, note=attempt.progressed
        )
        replicas = preflight.study.engine.replicas
        stored, machines = ResolvedStudy.of(attempt.job).dtype, preflight.machines
        if preflight.study.engine.dtype == "auto" and stored == "bfloat16" and not has_gpus(machines):
            machines = (EngineMachines(num_gpus=1),)  # the study was checked for GPUs, which are away
        attempt.progressed(f"Waiting for {replicas} engine{'s' * (replicas > 1)} ...")
        heartbeat.wait_for(ENGINE)
        with (
            tracing.span("wait for engines", {"mergesearch.job": writer.job_id, "mergesearch.replicas": replicas}),
            known_machines(machines),  # engines that are planned for GPUs never start on the CPU
        ):
            family = preflight.models.family
            on_gpus = runs_on_gpus(family, gpu_need())
            options = with_stored_dtype(preflight.engine_options, stored, on_gpus=on_gpus)
            application = app_name(family, options, on_gpus=on_gpus)
            heartbeat.min_patience_s = PATIENCE_FACTOR * TimeLimits.of_family(family).start_s
            with telling_starts(application, heartbeat, attempt.progressed):
                opened = attempt.resources.scorer(family, options, replicas)
                scorer = stack.enter_context(opened)
        heartbeat.wait_for(None)
        execute(
            store,
            writer,
            preflight,
            scorer,
            work_dir=attempt.work_dir.resolve() / "ray",
            artifacts=attempt.artifacts,
            heartbeat=heartbeat,
            view=view,
            observer=observer,
        )
