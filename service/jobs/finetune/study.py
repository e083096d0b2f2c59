"""Creation of the study that merges the experts of a fine-tuning on a server, once all experts are trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from search_spaces.errors import InvalidStudy
from service.cluster.node_calls import cluster_machines
from service.errors import Conflict
from service.jobs.finetune.request import access_of
from service.jobs.search.kind import SEARCH
from service.jobs.search.prepare import prepared
from service.store import JobWriter, Store
from service.store.accounts import AccountStore
from service.store.artifacts import ArtifactStore
from service.studies.chains import COPY, SOURCES, on_server, place_of_expert
from service.types import EventKind, JobRecord
from workers.telemetry import tracing
from workers.training.finetuning.fleet import STUDY, Pipeline

__all__ = ["begin_study", "collect_sources", "study_of"]


def study_of(store: Store, finetune_id: str) -> JobRecord | None:
    """Study that merges the experts of the fine-tuning `finetune_id`; None if no such study was created yet."""
    return store.job_of_key(_study_key(finetune_id))


def _study_key(finetune_id: str) -> str:
    """Idempotency key with which a fine-tuning creates the study that merges the trained experts.

    `finetune_id` is the id of the fine-tuning. If the study is created again with the same key, the first study is
    returned. The key contains a space, so that no client can send it.
    """
    return f"finetune {finetune_id}"


def begin_study(
    store: Store, writer: JobWriter, pipeline: Pipeline, artifacts: ArtifactStore, data_dir: Path
) -> JobRecord:
    """Create the study that merges the trained experts of a fine-tuning, or return the study if it exists.

    `pipeline` is the specification of the fine-tuning whose job `writer` writes to, and `artifacts` has its experts. If
    `artifacts` is in an object store, the study names the experts by their URLs. Otherwise the experts are copied to
    the directory of sources in `data_dir`, the server's data directory. The study is created only once, even if drivers
    are killed. Raises Conflict if the study cannot run.
    """
    if (known := study_of(store, writer.job_id)) is not None:
        return known
    experts: dict[str, Path | str] = {
        record.name: place_of_expert(artifacts, record, data_dir) for record in artifacts.of(writer.job_id)
    }
    job = store.job(writer.job_id)
    access, reader = access_of(job), AccountStore(store).account_of(job)
    if access is not None:
        access = access.allowing(map(str, experts.values()))
    try:
        study = pipeline.study_of(experts)
        assert study is not None
        preflight = prepared(
            study,
            open_study=on_server(store, reader=reader),
            directory=data_dir,
            artifacts_in=artifacts.location,
            access=access,
            machines=cluster_machines(),
        )
    except InvalidStudy as error:
        raise Conflict(f"{STUDY}: {error}") from error
    created = store.create_job(
        traceparent=tracing.current(),
        kind=SEARCH.name,
        name=study.name,
        document=study.canonical(),
        accepted=preflight.resolved().to_json(),
        idempotency_key=_study_key(writer.job_id),
        keeps=artifacts.kept_names(study.models.named.values()),
        owner=job.owner,
        team=job.team,
        sharing=job.sharing,
    )
    writer.add_event(EventKind.STUDY, {"study": created.id, "name": created.name})
    return created


def collect_sources(store: Store, data_dir: Path) -> None:
    """Delete those copies of trained experts, in the server's data directory `data_dir`, that no stored study merges.

    The copies are made for studies of the experts of fine-tunings. While a fine-tuning that has such a study is
    unfinished, nothing is deleted, because its study may be about to use a copy.
    """
    if any(STUDY in job.document and not job.state.is_finished for job in store.jobs()):
        return
    # Compared by name, which has the digest: the same path may be written in several ways.
    used = json.dumps([[job.document["models"], job.accepted.get("chained")] for job in store.jobs(SEARCH.name)])
    for place in (data_dir / SOURCES).glob(f"{COPY}*"):
        if place.name not in used:
            shutil.rmtree(place, ignore_errors=True)
