"""The study of a pipeline on a server: created from the fleet's experts once these are trained."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

from search_spaces.errors import InvalidStudy
from service.errors import Conflict
from service.store import JobWriter, Store
from service.store.artifacts import ArtifactStore
from service.studies.chains import SOURCES
from service.studies.preflight.examine import examine
from service.types import EventKind, JobKind, JobRecord
from workers.training.finetuning.fleet import STUDY, Pipeline

__all__ = ["begin_study", "collect_sources", "study_key"]

DIGEST_DIGITS = 16
COPY = "expert-"


def study_key(finetune_id: str) -> str:
    """The idempotency key of the study of a pipeline's experts; no client can send one with a space."""
    return f"finetune {finetune_id}"


def begin_study(store: Store, writer: JobWriter, pipeline: Pipeline, artifacts: ArtifactStore) -> JobRecord:
    """Create the study of the trained experts, whose files are written beside those of chained studies. It is created
    once, whatever is killed. Raises Conflict if it cannot be run."""
    known = store.job_of_key(study_key(writer.job_id))
    if known is not None:
        return known
    root = artifacts.directory.parent / SOURCES
    directories = {}
    for record in artifacts.of(writer.job_id):
        out = root / f"{COPY}{record.digest[:DIGEST_DIGITS]}"
        directories[record.name] = out if out.is_dir() else artifacts.write_to(record, out)
    access = store.job(writer.job_id).resolved.access
    if access is not None:
        access = replace(access, readable=(*access.readable, str(root)))
    try:
        study = pipeline.study_of(directories)
        assert study is not None
        preflight = examine(study, access=access)
    except InvalidStudy as error:
        raise Conflict(f"{STUDY}: {error}") from error
    created = store.create_job(
        name=study.name,
        document=study.canonical(),
        resolved=preflight.resolved(),
        idempotency_key=study_key(writer.job_id),
    )
    writer.add_event(EventKind.STUDY, {"study": created.id, "name": created.name})
    return created


def collect_sources(store: Store, artifacts: ArtifactStore) -> None:
    """Delete the copies of experts that no study reads any more; none while a pipeline may be about to use them."""
    if any(STUDY in r.document and not r.state.is_finished for r in store.jobs(JobKind.FINETUNE)):
        return
    # By name, which has the digest: the same place may be written in several ways.
    used = json.dumps([record.document["models"] for record in store.jobs(JobKind.SEARCH)])
    for place in (artifacts.directory.parent / SOURCES).glob(f"{COPY}*"):
        if place.name not in used:
            shutil.rmtree(place, ignore_errors=True)
