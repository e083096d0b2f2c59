"""The driver's work on one stored study: it continues from the stored state to the end."""

from __future__ import annotations

import sys
from collections.abc import Callable

from search_spaces.study.file import Study
from service.disk import alignments_dir, data_dir_of
from service.jobs.base import Attempt
from service.jobs.heartbeat import ENGINE
from service.jobs.search.attempt import execute, with_alignments
from service.jobs.search.prepare import prepared
from service.jobs.search.progress import ProgressReporter
from service.jobs.search.progress_log import ProgressLog
from service.resolved_study import ResolvedStudy
from service.store.accounts import AccountStore
from service.studies.chains import OpenStudy, keep_sources, on_server
from service.studies.policies.start import with_start
from service.studies.preflight.models import check_unchanged
from service.studies.preflight.result import PreflightResult
from service.studies.warm_start import with_warm_start

__all__ = ["continue_study", "work"]


def work(attempt: Attempt) -> None:
    """Continue a study on a server from its stored state to its end.

    Raises InvalidStudy if the study's files cannot be used at the moment, Conflict if its models or tasks have changed
    since it was created, and the errors of the function `continue_study`.
    """
    job = attempt.job
    before, study = ResolvedStudy.of(job), Study.model_validate(job.document)
    open_study = on_server(attempt.store, reader=AccountStore(attempt.store).account_of(job))
    preflight = prepared(
        study,
        open_study=open_study,
        directory=data_dir_of(attempt.work_dir),
        artifacts_in=attempt.artifacts.location,
        before=before,
        accepted=study,
        access=before.access,
        available_bytes=sys.maxsize,  # no engine runs in this process; the request's check compared memory
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

    `open_study` opens other studies whose policies or results the study starts from. `view` receives progress.
    `observer` is called as soon as something is stored, with a word for it, such as "chunk", "rung" or "complete".

    Raises:
        StudyFailed: The study cannot continue; it is stored as FAILED with the reason.
        EngineUnavailable: Engines cannot score at the moment.
        OSError: A file, Ray or the hub is not available at the moment.
        StaleAttempt: Another driver has taken over the study.
    """
    store, writer, heartbeat = attempt.store, attempt.writer, attempt.heartbeat
    preflight = with_start(preflight, store, writer, artifacts=attempt.artifacts, open_study=open_study)
    preflight = with_warm_start(preflight, store, writer, artifacts=attempt.artifacts, open_study=open_study)
    with attempt.resources.ray() as session:
        if session.dashboard_url:
            attempt.note(f"Ray dashboard: {session.dashboard_url}")
        alignments = alignments_dir(attempt.work_dir)
        preflight = with_alignments(
            preflight, store, writer, directory=alignments, artifacts=attempt.artifacts, note=attempt.progressed
        )
        replicas = preflight.study.engine.replicas
        attempt.progressed(f"Waiting for {replicas} engine{'s' * (replicas > 1)} ...")
        heartbeat.wait_for(ENGINE)
        with attempt.resources.scorer(preflight.models.family, preflight.engine_options, replicas) as scorer:
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
