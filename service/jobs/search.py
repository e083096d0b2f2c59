"""The search of one study: the same code as `mergesearch run`, with a store and replicas that studies share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from search_spaces.study.file import Study
from service.cluster.session import ray_session
from service.disk import artifacts_dir, data_dir_of
from service.jobs.progress_log import ProgressLog
from service.store import JobWriter, Store
from service.store.artifacts import ArtifactStore
from service.studies.attempt import ALIGNMENTS, execute, with_alignments
from service.studies.chains import on_server, with_exported_sources
from service.studies.heartbeat import ENGINE, Heartbeat
from service.studies.policies.start import with_start
from service.studies.preflight.examine import PreflightResult, examine
from service.studies.preflight.models import check_unchanged, with_revisions
from workers.serving.deployment import deploy_scorer
from workers.types import Scorer

__all__ = ["DATABASE", "work"]

DATABASE = "mergesearch.db"

# Replicas that no study has used for this long are stopped.
KEEP_IDLE_S = 600.0


def work(store: Store, writer: JobWriter, *, work_dir: Path, heartbeat: Heartbeat, view: ProgressLog) -> None:
    """Work on the study to its end. Raises as `with_alignments` and `execute`, and what the checks raise."""

    def note(text: str) -> None:
        heartbeat.progressed()
        view.note(text)

    record = store.job(writer.job_id)
    stored = Study.model_validate(record.document)
    exported, chained = with_exported_sources(
        stored, open_study=on_server(store), directory=work_dir.parents[1], before=record.resolved, note=note
    )
    study = with_revisions(exported, replace(record.resolved, chained={}))
    preflight = examine(study, access=record.resolved.access, chained=chained, note=note)
    check_unchanged(record, preflight.resolved())
    artifacts = ArtifactStore(store, artifacts_dir(data_dir_of(work_dir)))
    preflight = with_start(preflight, store, writer, artifacts=artifacts, open_study=on_server(store))
    note("The models are as they were. Connecting to Ray ...")
    with ray_session():
        preflight = with_alignments(preflight, store, writer, directory=work_dir / ALIGNMENTS, note=note)
        note("Waiting for an engine ...")
        heartbeat.wait_for(ENGINE)
        scorer = _shared_scorer(preflight)
        heartbeat.wait_for(None)
        execute(
            store, writer, preflight, scorer, work_dir=work_dir, artifacts=artifacts, heartbeat=heartbeat, view=view
        )


def _shared_scorer(preflight: PreflightResult) -> Scorer:
    return deploy_scorer(
        preflight.family,
        preflight.engine_options,
        replicas=preflight.study.engine.replicas,
        keep_idle_s=KEEP_IDLE_S,
    )
